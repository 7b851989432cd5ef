// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of firmware objects, as the kernel hands them to who subscribed: the DevX event channel of mlx5_ib.

use super::{Device, Object};
use crate::error::{Error, Result};
use ibgda_verbs_sys as sys;
use std::{
    io, mem,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
};

/// An event queue entry, as in `struct mlx5_eqe` of the kernel.
const EQE_BYTES: usize = 64;
const EQE_TYPE: usize = 1;
/// `data.cq_err.syndrome`.
const EQE_CQ_SYNDROME: usize = 0x2b;
const HEADER_BYTES: usize = mem::size_of::<sys::mlx5_ib_uapi_devx_async_event_hdr>();

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Of the subscription.
    pub(crate) cookie: u64,
    /// `MLX5_EVENT_TYPE_*`.
    pub(crate) kind: u8,
    /// Of a CQ's error.
    pub(crate) syndrome: u8,
}

/// A file that events of objects are read from.
#[derive(Debug)]
pub(crate) struct Channel {
    channel: NonNull<sys::mlx5dv_devx_event_channel>,
    device: Arc<Device>,
}

// SAFETY: as for `Device`; libmlx5 keeps nothing of a channel but its file.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn open(device: &Arc<Device>) -> Result<Self> {
        device.check_ours("open an event channel")?;
        // With their data: one subscription is for several types.
        let flags = 0;
        // SAFETY: the context is open.
        let channel =
            unsafe { sys::mlx5dv_devx_create_event_channel(device.context.as_ptr(), flags) };
        let channel = NonNull::new(channel).ok_or_else(|| {
            Error::last_verbs(format!(
                "mlx5dv_devx_create_event_channel on {}",
                device.name
            ))
        })?;
        let channel = Self {
            channel,
            device: Arc::clone(device),
        };
        super::unblock(channel.as_fd(), || {
            format!("O_NONBLOCK for the DevX events of {}", device.name)
        })?;
        Ok(channel)
    }

    /// Has events of these types of the object come with this cookie, until the object is destroyed.
    pub(crate) fn subscribe(&self, object: &Object, kinds: &[u16], cookie: u64) -> Result<()> {
        let mut kinds = kinds.to_vec();
        let bytes = mem::size_of_val(kinds.as_slice()) as u16;
        // SAFETY: channel and object exist; the list, which is read only, has the length given.
        let errno = unsafe {
            sys::mlx5dv_devx_subscribe_devx_event(
                self.channel.as_ptr(),
                object.object.as_ptr(),
                bytes,
                kinds.as_mut_ptr(),
                cookie,
            )
        };
        match errno {
            0 => Ok(()),
            errno => Err(Error::verbs(
                format!(
                    "mlx5dv_devx_subscribe_devx_event (object {:#x}, types {kinds:x?})",
                    object.number
                ),
                errno.abs(),
            )),
        }
    }

    /// The next event, or `None` when there is none now.
    ///
    /// # Errors
    /// There will be none any more: the device is gone.
    pub(crate) fn next(&self) -> io::Result<Option<Event>> {
        let mut buffer = [0_u64; (HEADER_BYTES + EQE_BYTES) / 8];
        let bytes = mem::size_of_val(&buffer);
        // SAFETY: the channel is open; the buffer has so many bytes, aligned as the header is.
        let read = unsafe {
            sys::mlx5dv_devx_get_event(self.channel.as_ptr(), buffer.as_mut_ptr().cast(), bytes)
        };
        if read < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                // Events were dropped for want of memory: those behind them come.
                Some(libc::EOVERFLOW) => self.next(),
                _ => Err(error),
            };
        }
        let eqe = |at: usize| buffer[(HEADER_BYTES + at) / 8].to_ne_bytes()[at % 8];
        Ok(Some(Event {
            cookie: buffer[0],
            kind: eqe(EQE_TYPE),
            syndrome: eqe(EQE_CQ_SYNDROME),
        }))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns the file as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.device.is_ours() {
            // SAFETY: opened by open, and used by nobody any more.
            unsafe { sys::mlx5dv_devx_destroy_event_channel(self.channel.as_ptr()) };
        }
    }
}

const _: () = assert!(HEADER_BYTES == 8);
