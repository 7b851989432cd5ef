// SPDX-License-Identifier: GPL-2.0

//! `/dev/ibgda`: opening, and the ioctls with their arguments.

use crate::{
    abi::{
        uapi::*,
        Argument, //
    },
    decisions::argument::{
        extent,
        BadSize,
        Extent, //
    },
    doorbell,
    events::EventFd,
    mapping,
    queue,
    session::{
        self,
        Session, //
    }, //
};
use kernel::{
    error::code::*,
    fs::File,
    ioctl::_IO,
    miscdevice::{
        MiscDevice,
        MiscDeviceRegistration, //
    },
    mm::virt::VmaNew,
    prelude::*,
    seq_file::SeqFile,
    sync::{
        Arc,
        ArcBorrow, //
    },
    transmute::{
        AsBytes,
        FromBytes, //
    },
    uaccess::{
        UserPtr,
        UserSlice, //
    }, //
};

#[vtable]
impl MiscDevice for Session {
    type Ptr = Arc<Session>;

    fn open(file: &File, _: &MiscDeviceRegistration<Self>) -> Result<Arc<Session>> {
        Session::open(file)
    }

    fn release(session: Arc<Session>, _: &File) {
        session.release();
    }

    fn mmap(session: ArcBorrow<'_, Session>, _: &File, vma: &VmaNew) -> Result {
        mapping::mmap(&session, vma)
    }

    fn ioctl(
        session: ArcBorrow<'_, Session>,
        _: &File,
        command: u32,
        argument: usize,
    ) -> Result<isize> {
        session.owner.check()?;
        ioctl(session.into(), command, UserPtr::from_addr(argument))
    }

    fn show_fdinfo(session: ArcBorrow<'_, Session>, seq: &SeqFile, _: &File) {
        session.show(seq);
    }
}

const fn io(number: u32) -> u32 {
    _IO(IBGDA_IOC_TYPE, number)
}

const INFO: u32 = io(IBGDA_CMD_INFO);
const BIND: u32 = io(IBGDA_CMD_BIND);
const DOORBELL_IMPORT: u32 = io(IBGDA_CMD_DOORBELL_IMPORT);
const QUEUE_ALLOC: u32 = io(IBGDA_CMD_QUEUE_ALLOC);
const POPULATE: u32 = io(IBGDA_CMD_POPULATE);
const STATUS: u32 = io(IBGDA_CMD_STATUS);
const RELEASE: u32 = io(IBGDA_CMD_RELEASE);
const EVENTFD: u32 = io(IBGDA_CMD_EVENTFD);
const EVENTS: u32 = io(IBGDA_CMD_EVENTS);
const REBIND: u32 = io(IBGDA_CMD_REBIND);

fn ioctl(session: Arc<Session>, command: u32, pointer: UserPtr) -> Result<isize> {
    let session = &session;
    match command {
        INFO => call(pointer, info),
        BIND => call(pointer, |argument| session.bind(argument)),
        REBIND => call(pointer, |argument| session.rebind(argument)),
        DOORBELL_IMPORT => {
            let mut handle = None;
            let result = call(pointer, |argument| {
                doorbell::import(session, argument)?;
                handle = Some(argument.handle);
                Ok(())
            });
            undo_unless_told(session, result, handle)
        }
        QUEUE_ALLOC => {
            let mut handle = None;
            let result = call(pointer, |argument| {
                queue::alloc(session, argument)?;
                handle = Some(argument.handle);
                Ok(())
            });
            undo_unless_told(session, result, handle)
        }
        POPULATE => call(pointer, |argument| mapping::populate(session, argument)),
        STATUS => call(pointer, |argument: &mut ibgda_status_map| {
            argument.mmap_offset = session.status_offset()?;
            Ok(())
        }),
        RELEASE => call(pointer, |argument: &mut ibgda_release| {
            session.release_object(argument.handle)
        }),
        EVENTFD => call(pointer, |argument| set_eventfd(session, argument)),
        EVENTS => {
            let mut taken = KVec::new();
            let result = call(pointer, |argument| {
                take_events(session, argument, &mut taken)
            });
            if result.is_err() {
                session.lock().events.give_back(&taken);
            }
            result
        }
        _ => Err(ENOTTY),
    }
}

/// An object whose handle the caller was not told of is given back.
fn undo_unless_told(
    session: &Session,
    result: Result<isize>,
    handle: Option<u32>,
) -> Result<isize> {
    if let (Err(_), Some(handle)) = (&result, handle) {
        // Another thread may have guessed the handle and released it; then there is nothing to do.
        let _ = session.release_object(handle);
    }
    result
}

/// Copies an argument in, calls, copies it out.
fn call<T: Argument + FromBytes + AsBytes>(
    pointer: UserPtr,
    handler: impl FnOnce(&mut T) -> Result,
) -> Result<isize> {
    let size: u32 = UserSlice::new(pointer, size_of::<u32>()).reader().read()?;
    let Extent { copy, tail } =
        extent(size, T::FIRST, size_of::<T>()).map_err(|error| match error {
            BadSize::TooShort => EINVAL,
            BadSize::TooLong => E2BIG,
        })?;
    let mut argument = T::default();
    let mut reader = UserSlice::new(pointer, copy + tail).reader();
    let bytes = argument.as_bytes_mut();
    reader.read_slice(&mut bytes[..copy])?;
    // It was fetched twice; the first is the one that was checked.
    bytes[..size_of::<u32>()].copy_from_slice(&size.to_ne_bytes());
    let mut rest = [0; 64];
    while !reader.is_empty() {
        let part = reader.len().min(rest.len());
        reader.read_slice(&mut rest[..part])?;
        if rest[..part].iter().any(|&byte| byte != 0) {
            return Err(E2BIG);
        }
    }
    if argument.flags() != 0 {
        return Err(EINVAL);
    }
    handler(&mut argument)?;
    UserSlice::new(pointer, copy)
        .writer()
        .write_slice(&argument.as_bytes()[..copy])?;
    Ok(0)
}

fn info(argument: &mut ibgda_info) -> Result {
    argument.abi_version = IBGDA_ABI_VERSION;
    argument.page_size = IBGDA_PAGE_SIZE;
    argument.features = doorbell::FEATURES
        | queue::FEATURES
        | u64::from(IBGDA_FEATURE_EVENTS)
        | u64::from(IBGDA_FEATURE_REBIND);
    argument.max_doorbells = session::MAX_DOORBELLS;
    argument.max_queues = session::MAX_QUEUES;
    argument.max_queue_bytes = queue::MAX_BYTES;
    Ok(())
}

fn set_eventfd(session: &Session, argument: &mut ibgda_eventfd) -> Result {
    let eventfd = match argument.fd {
        -1 => None,
        fd => Some(EventFd::get(fd)?),
    };
    let former = session.lock().events.set_eventfd(eventfd);
    drop(former);
    Ok(())
}

fn take_events(
    session: &Session,
    argument: &mut ibgda_events,
    records: &mut KVec<ibgda_event>,
) -> Result {
    const MAX: u32 = 64;

    if !(1..=MAX).contains(&argument.capacity) {
        return Err(EINVAL);
    }
    records.reserve(argument.capacity as usize, GFP_KERNEL)?;
    {
        let mut inner = session.lock();
        while records.len() < argument.capacity as usize {
            let Some(record) = inner.events.take() else {
                break;
            };
            records.push_within_capacity(record)?;
        }
    }
    if records.is_empty() {
        return Err(EAGAIN);
    }
    let pointer = UserPtr::from_addr(usize::try_from(argument.records).map_err(|_| EFAULT)?);
    let mut writer = UserSlice::new(pointer, records.len() * size_of::<ibgda_event>()).writer();
    for record in records.iter() {
        writer.write(record)?;
    }
    argument.count = records.len() as u32;
    Ok(())
}
