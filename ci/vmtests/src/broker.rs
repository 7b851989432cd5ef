// SPDX-License-Identifier: MIT OR Apache-2.0
//! `/dev/ibgda` by its ioctls, and its mappings.

use crate::machine::Bdf;
use ibgda_uapi::*;
use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::Path,
    ptr,
};

/// An errno in place of an `io::Error`, for comparing.
pub type Errno = i32;

fn last<T>() -> Result<T, Errno> {
    Err(io::Error::last_os_error()
        .raw_os_error()
        .expect("a system call sets errno"))
}

/// Issues an ioctl with any argument.
///
/// # Safety
/// `argument` must be what the command takes, or memory that it may be refused for.
pub unsafe fn ioctl(file: &impl AsRawFd, command: u32, argument: *mut u8) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    match unsafe { libc::ioctl(file.as_raw_fd(), command.into(), argument) } {
        0 => Ok(()),
        -1 => last(),
        other => panic!("ioctl {command:#x} answered {other}"),
    }
}

/// One open file of the broker.
#[derive(Debug)]
pub struct Session(pub File);

/// What DOORBELL_IMPORT and QUEUE_ALLOC give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    pub handle: u32,
    pub mmap_offset: u64,
    /// Of a doorbell.
    pub bar_offset: u64,
}

macro_rules! argument {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {
        {
            let mut argument = $type::default();
            argument.size = size_of::<$type>() as u32;
            $(argument.$field = $value;)*
            argument
        }
    };
}

fn uapi(bdf: Bdf) -> ibgda_bdf {
    ibgda_bdf {
        domain: bdf.domain,
        bus: bdf.bus,
        device: bdf.device,
        function: bdf.function,
        reserved: 0,
    }
}

impl Session {
    /// Opens the device.
    pub fn open() -> Self {
        Self::open_at(Path::new("/dev/ibgda"))
    }

    /// Opens a node of the device.
    pub fn open_at(node: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(node);
        Self(file.unwrap_or_else(|error| {
            panic!("open {} (is ibgda.ko loaded?): {error}", node.display())
        }))
    }

    /// Opens the device and binds the pair, which must be allowed.
    pub fn bound(gpu: Bdf, nic: Bdf) -> Self {
        let session = Self::open();
        session.bind(gpu, nic).expect("bind an allowed pair");
        session
    }

    fn call<T>(&self, command: u32, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: the methods below pass the structure that belongs to the command.
        unsafe { ioctl(&self.0, command, ptr::from_mut(argument).cast()) }
    }

    pub fn info(&self) -> Result<ibgda_info, Errno> {
        let mut info = argument!(ibgda_info {});
        self.call(IBGDA_IOC_INFO, &mut info).map(|()| info)
    }

    pub fn bind(&self, gpu: Bdf, nic: Bdf) -> Result<ibgda_bind, Errno> {
        let mut bind = argument!(ibgda_bind {
            gpu: uapi(gpu),
            nic: uapi(nic)
        });
        self.call(IBGDA_IOC_BIND, &mut bind).map(|()| bind)
    }

    pub fn rebind(&self) -> Result<ibgda_bind, Errno> {
        let mut bind = argument!(ibgda_bind {});
        self.call(IBGDA_IOC_REBIND, &mut bind).map(|()| bind)
    }

    pub fn import_as(
        &self,
        dmabuf: &impl AsRawFd,
        uverbs: &impl AsRawFd,
        mem_type: u32,
    ) -> Result<Granted, Errno> {
        let mut import = argument!(ibgda_doorbell_import {
            dmabuf_fd: dmabuf.as_raw_fd(),
            uverbs_fd: uverbs.as_raw_fd(),
            mem_type: mem_type,
        });
        self.call(IBGDA_IOC_DOORBELL_IMPORT, &mut import)?;
        assert_eq!(
            import.mem_type, mem_type,
            "the type in force is the one asked for"
        );
        Ok(Granted {
            handle: import.handle,
            mmap_offset: import.mmap_offset,
            bar_offset: import.bar_offset,
        })
    }

    pub fn import(&self, dmabuf: &impl AsRawFd, uverbs: &impl AsRawFd) -> Result<Granted, Errno> {
        self.import_as(dmabuf, uverbs, IBGDA_MEM_UC)
    }

    pub fn alloc_queue(&self, length: u64, node: i32, mem_type: u32) -> Result<Granted, Errno> {
        let mut queue = argument!(ibgda_queue_alloc {
            length: length,
            node: node,
            mem_type: mem_type
        });
        self.call(IBGDA_IOC_QUEUE_ALLOC, &mut queue)?;
        Ok(Granted {
            handle: queue.handle,
            mmap_offset: queue.mmap_offset,
            bar_offset: 0,
        })
    }

    pub fn populate(&self, handle: u32, address: *const u8) -> Result<(), Errno> {
        let mut populate = argument!(ibgda_populate {
            handle: handle,
            address: address as u64
        });
        self.call(IBGDA_IOC_POPULATE, &mut populate)
    }

    pub fn release(&self, handle: u32) -> Result<(), Errno> {
        let mut release = argument!(ibgda_release { handle: handle });
        self.call(IBGDA_IOC_RELEASE, &mut release)
    }

    pub fn set_eventfd(&self, fd: i32) -> Result<(), Errno> {
        let mut eventfd = argument!(ibgda_eventfd { fd: fd });
        self.call(IBGDA_IOC_EVENTFD, &mut eventfd)
    }

    /// Takes up to `capacity` records.
    pub fn events(&self, capacity: usize) -> Result<Vec<ibgda_event>, Errno> {
        let mut records = vec![ibgda_event::default(); capacity];
        let count = self.events_to(records.as_mut_ptr() as u64, capacity)?;
        records.truncate(count);
        Ok(records)
    }

    /// Has records written to an address.
    pub fn events_to(&self, records: u64, capacity: usize) -> Result<usize, Errno> {
        let mut events = argument!(ibgda_events {
            records: records,
            capacity: capacity as u32,
        });
        self.call(IBGDA_IOC_EVENTS, &mut events)?;
        Ok(events.count as usize)
    }

    pub fn status_offset(&self) -> Result<u64, Errno> {
        let mut map = argument!(ibgda_status_map {});
        self.call(IBGDA_IOC_STATUS, &mut map)
            .map(|()| map.mmap_offset)
    }

    pub fn status(&self) -> Status {
        let offset = self.status_offset().expect("STATUS of a bound session");
        Status(
            Mapping::new(&self.0, 4096, libc::PROT_READ, libc::MAP_SHARED, offset)
                .expect("map the status page"),
        )
    }

    /// Maps a doorbell or queue memory for reading and writing.
    pub fn map(&self, granted: Granted, length: usize) -> Result<Mapping, Errno> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        Mapping::new(&self.0, length, prot, libc::MAP_SHARED, granted.mmap_offset)
    }

    /// A field of `/proc/self/fdinfo`.
    pub fn fdinfo(&self) -> String {
        std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))
            .expect("read fdinfo")
    }
}

impl AsRawFd for Session {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// A mapping, undone when dropped.
#[derive(Debug)]
pub struct Mapping {
    pub address: *mut u8,
    pub length: usize,
}

impl Mapping {
    pub fn new(
        file: &impl AsRawFd,
        length: usize,
        prot: i32,
        flags: i32,
        offset: u64,
    ) -> Result<Self, Errno> {
        // SAFETY: a new mapping, where the kernel likes.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                prot,
                flags,
                file.as_raw_fd(),
                offset as i64,
            )
        };
        if address == libc::MAP_FAILED {
            return last();
        }
        Ok(Self {
            address: address.cast(),
            length,
        })
    }

    /// Stores a 64-bit word in one access. It kills the process when the page is not there.
    pub fn store(&self, offset: usize, value: u64) {
        assert!(offset % 8 == 0 && offset + 8 <= self.length);
        // SAFETY: inside the mapping, aligned.
        unsafe { self.address.add(offset).cast::<u64>().write_volatile(value) };
    }

    /// Loads a 64-bit word in one access.
    pub fn load(&self, offset: usize) -> u64 {
        assert!(offset % 8 == 0 && offset + 8 <= self.length);
        // SAFETY: inside the mapping, aligned.
        unsafe { self.address.add(offset).cast::<u64>().read_volatile() }
    }

    /// Whether the page at `offset` can be accessed, found without being killed by it: the kernel tries.
    pub fn is_there(&self, offset: usize) -> bool {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        // SAFETY: the kernel checks the address.
        let sent = unsafe { libc::write(writer.as_raw_fd(), self.address.add(offset).cast(), 4) };
        drop(reader);
        match sent {
            4 => true,
            -1 => {
                assert_eq!(last::<()>(), Err(libc::EFAULT));
                false
            }
            other => panic!("write of 4 bytes wrote {other}"),
        }
    }

    /// `mprotect`.
    pub fn protect(&self, prot: i32) -> Result<(), Errno> {
        // SAFETY: our own mapping; nobody relies on its contents.
        match unsafe { libc::mprotect(self.address.cast(), self.length, prot) } {
            0 => Ok(()),
            _ => last(),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.address.cast(), self.length) };
    }
}

/// The mapped status page.
#[derive(Debug)]
pub struct Status(pub Mapping);

impl Status {
    fn word(&self, index: u32) -> u64 {
        self.0.load(index as usize * 8)
    }

    pub fn state(&self) -> u32 {
        self.word(IBGDA_STATUS_WORD_STATE) as u32
    }

    pub fn generation(&self) -> u32 {
        (self.word(IBGDA_STATUS_WORD_STATE) >> 32) as u32
    }

    pub fn reason(&self) -> u32 {
        (self.word(IBGDA_STATUS_WORD_REASON) >> 32) as u32
    }

    pub fn port_state(&self) -> u32 {
        (self.word(IBGDA_STATUS_WORD_PORT) >> 32) as u32
    }

    pub fn time_ns(&self) -> u64 {
        self.word(IBGDA_STATUS_WORD_TIME)
    }

    pub fn sequence(&self) -> u64 {
        self.word(IBGDA_STATUS_WORD_SEQUENCE)
    }
}

/// A descriptor by number, for passing wrong ones.
#[derive(Clone, Copy, Debug)]
pub struct Number(pub i32);

impl AsRawFd for Number {
    fn as_raw_fd(&self) -> i32 {
        self.0
    }
}
