// SPDX-License-Identifier: MIT OR Apache-2.0
//! The broker, `/dev/ibgda`: one session of it, and what it grants.

use crate::{
    error::{Error, Result, Source},
    mapping::Mapping,
    pci::Bdf,
};
use ibgda_uapi::{
    IBGDA_ABI_VERSION, IBGDA_IOC_BIND, IBGDA_IOC_DOORBELL_IMPORT, IBGDA_IOC_EVENTFD,
    IBGDA_IOC_EVENTS, IBGDA_IOC_INFO, IBGDA_IOC_POPULATE, IBGDA_IOC_QUEUE_ALLOC, IBGDA_IOC_REBIND,
    IBGDA_IOC_RELEASE, IBGDA_IOC_STATUS, IBGDA_MEM_UC, IBGDA_MEM_WC, IBGDA_PAGE_SIZE,
    IBGDA_STATE_READY, IBGDA_STATUS_WORD_REASON, IBGDA_STATUS_WORD_STATE, IBGDA_STATUS_WORD_TIME,
    ibgda_bind, ibgda_doorbell_import, ibgda_event, ibgda_eventfd, ibgda_events, ibgda_info,
    ibgda_link, ibgda_populate, ibgda_queue_alloc, ibgda_release, ibgda_status_map,
};
use ibgda_verbs_sys::uverbs::UarType;
use memmap2::MmapOptions;
use std::{
    ffi::CStr,
    fs::{File, OpenOptions},
    io,
    mem::size_of,
    os::fd::{AsRawFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

const DEVICE: &str = "/dev/ibgda";
const PAGE: usize = IBGDA_PAGE_SIZE as usize;

/// An ioctl argument: a struct of the ABI, which begins with its own size.
trait Argument: Default {
    const COMMAND: u32;
    const NAME: &'static str;
}

macro_rules! arguments {
    ($($type:ty => $command:ident),* $(,)?) => {
        $(impl Argument for $type {
            const COMMAND: u32 = $command;
            const NAME: &'static str = stringify!($command);
        })*
    };
}

arguments! {
    ibgda_info => IBGDA_IOC_INFO,
    ibgda_bind => IBGDA_IOC_BIND,
    ibgda_doorbell_import => IBGDA_IOC_DOORBELL_IMPORT,
    ibgda_queue_alloc => IBGDA_IOC_QUEUE_ALLOC,
    ibgda_populate => IBGDA_IOC_POPULATE,
    ibgda_status_map => IBGDA_IOC_STATUS,
    ibgda_release => IBGDA_IOC_RELEASE,
    ibgda_eventfd => IBGDA_IOC_EVENTFD,
    ibgda_events => IBGDA_IOC_EVENTS,
}

fn call<T: Argument>(file: &File, argument: &mut T) -> io::Result<()> {
    command(file, T::COMMAND, argument)
}

fn command<T: Argument>(file: &File, command: u32, argument: &mut T) -> io::Result<()> {
    loop {
        // SAFETY: every struct that is an `Argument` is one of the ABI's and carries its size, so that the kernel reads and
        // writes no more than it; the one that has a user pointer, `ibgda_events`, is made by `take_events` alone.
        if unsafe { libc::ioctl(file.as_raw_fd(), command as libc::Ioctl, &raw mut *argument) } == 0
        {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn sized<T: Argument>(fill: impl FnOnce(&mut T, u32)) -> T {
    let mut argument = T::default();
    fill(&mut argument, size_of::<T>() as u32);
    argument
}

/// What an errno of an ioctl means, and what to do: the ABI's table in words.
fn explain(command: &str, errno: i32) -> (&'static str, &'static str) {
    match (command, errno) {
        (_, libc::EPERM) => (
            "this session belongs to another process",
            "open a context of your own after fork",
        ),
        (_, libc::ENOTTY) => (
            "the module does not know this call",
            "load an ibgda.ko of this library's version",
        ),
        (_, libc::E2BIG) => (
            "the module is older than this library",
            "load an ibgda.ko of this library's version",
        ),
        (_, libc::ENOTCONN) => ("the session is not bound to a NIC", "bind it first"),
        (_, libc::ENOLINK) => (
            "the NIC was reset or taken away",
            "rebind the context and make new queues",
        ),
        ("IBGDA_IOC_BIND", libc::ENODEV) => {
            ("no such PCI function", "see lspci -D for what there is")
        }
        ("IBGDA_IOC_BIND", libc::EINVAL) => (
            "the first is no GPU, or the second no RDMA NIC of mlx5_ib",
            "pass the GPU's and the NIC's addresses, in this order",
        ),
        ("IBGDA_IOC_BIND" | "IBGDA_IOC_REBIND", libc::EACCES) => (
            "the policy does not allow this pair",
            "as root: mkdir /sys/kernel/config/ibgda/allow/<gpu>@<nic>, or load ibgda.ko with allow_all=1",
        ),
        ("IBGDA_IOC_BIND", libc::EXDEV) => (
            "the GPU cannot reach the NIC peer to peer",
            "put both below one PCIe switch without ACS redirect; or write 1 to the policy entry's any_path, for route cpu-doorbell",
        ),
        ("IBGDA_IOC_BIND", libc::EALREADY) => (
            "this session is bound already",
            "open another context for another pair",
        ),
        ("IBGDA_IOC_BIND" | "IBGDA_IOC_REBIND", libc::EHOSTDOWN) => {
            ("the NIC is being reset", "try again in a second")
        }
        ("IBGDA_IOC_REBIND", libc::EAGAIN) => ("the NIC is not back yet", "try again in a second"),
        ("IBGDA_IOC_REBIND", libc::EINVAL) => {
            ("the session is not lost", "there is nothing to rebind")
        }
        ("IBGDA_IOC_DOORBELL_IMPORT", libc::EBADF) => ("not a dma-buf, or not a uverbs file", ""),
        ("IBGDA_IOC_DOORBELL_IMPORT", libc::EINVAL) => (
            "the dma-buf is not one page that this uverbs file exported",
            "export the UAR of the context that you pass",
        ),
        ("IBGDA_IOC_DOORBELL_IMPORT", libc::ERANGE) => (
            "the page is not in the BAR of the NIC this session is bound to",
            "export a UAR of that NIC",
        ),
        ("IBGDA_IOC_DOORBELL_IMPORT", libc::EBUSY) => (
            "another process still holds this page, or it is mapped with another memory type",
            "allocate another UAR; a page is free when its last owner is dead",
        ),
        ("IBGDA_IOC_DOORBELL_IMPORT" | "IBGDA_IOC_QUEUE_ALLOC", libc::EOPNOTSUPP) => (
            "this memory type is not offered here",
            "use UC for doorbells and WB for queues",
        ),
        ("IBGDA_IOC_DOORBELL_IMPORT", libc::EDQUOT) => (
            "too many doorbells in this session",
            "release some, or open another context",
        ),
        ("IBGDA_IOC_QUEUE_ALLOC", libc::EDQUOT) => (
            "more locked memory or queues than allowed",
            "raise RLIMIT_MEMLOCK (ulimit -l), or release queues",
        ),
        ("IBGDA_IOC_QUEUE_ALLOC", libc::EINVAL) => (
            "the length is zero, unaligned or too large",
            "see IBGDA_IOC_INFO's max_queue_bytes",
        ),
        ("IBGDA_IOC_EVENTFD", libc::EBADF) => ("not an eventfd", ""),
        ("IBGDA_IOC_EVENTS", libc::EAGAIN) => ("nothing has happened", ""),
        ("IBGDA_IOC_POPULATE", libc::EFAULT) => ("the address is not this doorbell's mapping", ""),
        (_, libc::ENOENT) => ("no such handle in this session", ""),
        _ => ("", ""),
    }
}

fn broker_error(command: &str, values: &str, error: &io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let (why, advice) = explain(command, errno);
    Error::errno_with(
        Source::Broker,
        format!("{command} ({values})"),
        errno,
        why,
        advice,
    )
}

/// How the GPU's posted writes reach the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Below one PCIe switch.
    Switch,
    /// Through a host bridge that the kernel allows for it.
    HostBridge,
    /// Not known to be reachable; the policy entry says to go on (`any_path`).
    None,
}

/// What the broker knows of the pair a session is bound to.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The GPU.
    pub gpu: Bdf,
    /// The NIC.
    pub nic: Bdf,
    /// Name of the NIC's verbs device, such as `mlx5_0`.
    pub ibdev_name: String,
    /// How the GPU reaches the NIC.
    pub path: Path,
    /// The kernel's p2pdma distance; -1 when not reachable.
    pub path_distance: i32,
    /// NUMA node of the GPU, -1 unknown.
    pub gpu_node: i32,
    /// NUMA node of the NIC, -1 unknown.
    pub nic_node: i32,
    /// PCIe link of the GPU.
    pub gpu_link: ibgda_link,
    /// PCIe link of the NIC.
    pub nic_link: ibgda_link,
    /// 1 at first, one more at each return of the NIC.
    pub generation: u32,
}

/// What the status page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionState {
    /// `IBGDA_STATE_*`: 1 ready, 2 lost, 3 recovered.
    pub state: u32,
    /// Generation the state is of.
    pub generation: u32,
    /// `IBGDA_REASON_*` of the last loss.
    pub reason: u32,
    /// When it last changed, on CLOCK_MONOTONIC, ns.
    pub changed_ns: u64,
}

impl SessionState {
    /// The reason in words.
    pub fn reason_text(&self) -> &'static str {
        reason_text(self.reason)
    }
}

/// `IBGDA_REASON_*` in words.
pub(crate) fn reason_text(reason: u32) -> &'static str {
    match reason {
        0 => "none",
        1 => "NIC reset",
        2 => "NIC removed or unbound",
        3 => "GPU removed",
        4 => "policy withdrawn",
        5 => "UAR destroyed",
        _ => "unknown reason",
    }
}

/// One open, bound file of the broker.
#[derive(Debug)]
pub(crate) struct Session {
    file: File,
    status: Mapping,
}

impl Session {
    /// Opens the broker and binds the pair.
    pub(crate) fn open(gpu: Bdf, nic: Bdf) -> Result<(Arc<Self>, Pair)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(DEVICE)
            .map_err(|error| {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                let (why, advice) = match errno {
                    libc::ENOENT | libc::ENXIO | libc::ENODEV => (
                        "the broker's module is not loaded, or this container was not given the device",
                        "modprobe -a configfs mlx5_ib ib_uverbs ibgda; for a container: --device /dev/ibgda",
                    ),
                    libc::EACCES => (
                        "no permission",
                        "the device is for root and the group ibgda: adduser USER ibgda, and log in again",
                    ),
                    libc::EPERM => (
                        "the container's device cgroup forbids it",
                        "start the container with --device /dev/ibgda",
                    ),
                    _ => ("", ""),
                };
                Error::errno_with(Source::Broker, format!("open {DEVICE}"), errno, why, advice)
            })?;

        let mut info = sized::<ibgda_info>(|info, size| info.size = size);
        call(&file, &mut info).map_err(|error| broker_error(ibgda_info::NAME, "", &error))?;
        if info.abi_version != IBGDA_ABI_VERSION || info.page_size != IBGDA_PAGE_SIZE {
            return Err(Error::new(
                Source::Broker,
                libc::EPROTO,
                format!("open {DEVICE}"),
                format!(
                    "the module speaks ABI {} with pages of {} bytes, this library ABI {IBGDA_ABI_VERSION} with {IBGDA_PAGE_SIZE}",
                    info.abi_version, info.page_size
                ),
                "load an ibgda.ko of this library's version",
            ));
        }

        let mut bind = sized::<ibgda_bind>(|bind, size| bind.size = size);
        bind.gpu = gpu.into();
        bind.nic = nic.into();
        call(&file, &mut bind).map_err(|error| {
            broker_error(ibgda_bind::NAME, &format!("GPU {gpu}, NIC {nic}"), &error)
        })?;

        let mut status = sized::<ibgda_status_map>(|status, size| status.size = size);
        call(&file, &mut status)
            .map_err(|error| broker_error(ibgda_status_map::NAME, "", &error))?;
        let status = MmapOptions::new()
            .offset(status.mmap_offset)
            .len(PAGE)
            .map_raw_read_only(&file)
            .map(Mapping::new)
            .map_err(|error| broker_error("mmap", "status page", &error))?;

        Ok((Arc::new(Self { file, status }), pair(gpu, nic, &bind)))
    }

    /// Joins the NIC again after it was lost and came back.
    pub(crate) fn rebind(&self, gpu: Bdf, nic: Bdf) -> Result<Pair> {
        let mut bind = sized::<ibgda_bind>(|bind, size| bind.size = size);
        command(&self.file, IBGDA_IOC_REBIND, &mut bind).map_err(|error| {
            broker_error("IBGDA_IOC_REBIND", &format!("GPU {gpu}, NIC {nic}"), &error)
        })?;
        Ok(pair(gpu, nic, &bind))
    }

    /// The status page, for waits of a kernel.
    pub(crate) fn status_page(&self) -> *const u64 {
        self.status.address().cast_const().cast()
    }

    /// 0 in a forked child, in which the page is not mapped.
    fn status_word(&self, index: u32) -> u64 {
        if !self.status.is_here() {
            return 0;
        }
        // SAFETY: the page is mapped as long as `self` lives, its 64-bit words are aligned, and the kernel, which alone
        // writes them, writes whole words.
        unsafe { AtomicU64::from_ptr(self.status.address().cast::<u64>().add(index as usize)) }
            .load(Ordering::Acquire)
    }

    pub(crate) fn state(&self) -> SessionState {
        let state = self.status_word(IBGDA_STATUS_WORD_STATE);
        SessionState {
            state: state as u32,
            generation: (state >> 32) as u32,
            reason: (self.status_word(IBGDA_STATUS_WORD_REASON) >> 32) as u32,
            changed_ns: self.status_word(IBGDA_STATUS_WORD_TIME),
        }
    }

    /// Is the NIC of this generation lost? One load.
    pub(crate) fn is_lost(&self, generation: u32) -> bool {
        let ready = (u64::from(generation) << 32) | u64::from(IBGDA_STATE_READY);
        self.status_word(IBGDA_STATUS_WORD_STATE) != ready
    }

    /// Has this eventfd counted up at each new record.
    pub(crate) fn set_eventfd(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        let mut argument = sized::<ibgda_eventfd>(|eventfd, size| eventfd.size = size);
        argument.fd = eventfd.as_raw_fd();
        call(&self.file, &mut argument).map_err(|error| {
            broker_error(ibgda_eventfd::NAME, &format!("fd {}", argument.fd), &error)
        })
    }

    /// Takes the records of what happened, oldest first; none in a forked child.
    pub(crate) fn take_events(&self) -> Vec<ibgda_event> {
        const AT_ONCE: usize = 16;
        let mut taken = Vec::new();
        loop {
            let mut records = [ibgda_event::default(); AT_ONCE];
            let mut events = sized::<ibgda_events>(|events, size| events.size = size);
            events.records = records.as_mut_ptr().expose_provenance() as u64;
            events.capacity = AT_ONCE as u32;
            // Fails when there are none.
            if call(&self.file, &mut events).is_err() {
                return taken;
            }
            taken.extend(&records[..AT_ONCE.min(events.count as usize)]);
        }
    }

    fn release(&self, handle: u32) {
        let mut release = sized::<ibgda_release>(|release, size| release.size = size);
        release.handle = handle;
        // Fails only for a handle the kernel has dropped with the session, and then there is nothing left to release.
        let _ = call(&self.file, &mut release);
    }
}

fn pair(gpu: Bdf, nic: Bdf, bind: &ibgda_bind) -> Pair {
    // SAFETY: the kernel terminates the name; the array is zeroed beyond it.
    let name = unsafe { CStr::from_ptr(bind.ibdev_name.as_ptr()) };
    Pair {
        gpu,
        nic,
        ibdev_name: name.to_string_lossy().into_owned(),
        path: match bind.path {
            ibgda_uapi::IBGDA_PATH_SWITCH => Path::Switch,
            ibgda_uapi::IBGDA_PATH_HOST_BRIDGE => Path::HostBridge,
            _ => Path::None,
        },
        path_distance: bind.path_distance,
        gpu_node: bind.gpu_node,
        nic_node: bind.nic_node,
        gpu_link: bind.gpu_link,
        nic_link: bind.nic_link,
        generation: bind.generation,
    }
}

/// A doorbell page granted to this process.
#[derive(Debug)]
pub(crate) struct Doorbell {
    session: Arc<Session>,
    handle: u32,
    page: Option<Mapping>,
    pub(crate) bar_offset: u64,
}

impl Doorbell {
    /// Imports a UAR page, of the memory type that suits its kind, and maps and fills it.
    pub(crate) fn import(
        session: &Arc<Session>,
        dmabuf: BorrowedFd<'_>,
        uverbs: BorrowedFd<'_>,
        page_id: u32,
        kind: UarType,
    ) -> Result<Self> {
        let (mem_type, name) = match kind {
            UarType::NonCached => (IBGDA_MEM_UC, "UC"),
            UarType::BlueFlame => (IBGDA_MEM_WC, "WC"),
        };
        let mut import = sized::<ibgda_doorbell_import>(|import, size| import.size = size);
        import.dmabuf_fd = dmabuf.as_raw_fd();
        import.uverbs_fd = uverbs.as_raw_fd();
        import.mem_type = mem_type;
        call(&session.file, &mut import).map_err(|error| {
            broker_error(
                ibgda_doorbell_import::NAME,
                &format!("UAR {page_id:#x}, {name}"),
                &error,
            )
        })?;
        let mut doorbell = Self {
            session: Arc::clone(session),
            handle: import.handle,
            page: None,
            bar_offset: import.bar_offset,
        };

        let page = MmapOptions::new()
            .offset(import.mmap_offset)
            .len(PAGE)
            .map_raw(&session.file)
            .map(Mapping::new)
            .map_err(|error| {
                broker_error(
                    "mmap",
                    &format!("doorbell page of UAR {page_id:#x}"),
                    &error,
                )
            })?;
        let mut populate = sized::<ibgda_populate>(|populate, size| populate.size = size);
        populate.handle = import.handle;
        populate.address = page.address() as u64;
        call(&session.file, &mut populate).map_err(|error| {
            broker_error(ibgda_populate::NAME, &format!("UAR {page_id:#x}"), &error)
        })?;
        doorbell.page = Some(page);
        Ok(doorbell)
    }

    /// Address of the page in this process.
    pub(crate) fn address(&self) -> *mut u8 {
        self.page.as_ref().expect("mapped by import").address()
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.page = None;
        self.session.release(self.handle);
    }
}

/// Pinned, zeroed host memory for queues.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    session: Arc<Session>,
    handle: u32,
    memory: Option<Mapping>,
}

impl QueueMemory {
    /// At least `bytes` bytes, rounded up to pages, write-back, on the NIC's node.
    pub(crate) fn alloc(session: &Arc<Session>, bytes: usize) -> Result<Self> {
        let length = bytes.next_multiple_of(PAGE);
        let mut alloc = sized::<ibgda_queue_alloc>(|alloc, size| alloc.size = size);
        alloc.length = length as u64;
        alloc.node = -1;
        alloc.mem_type = ibgda_uapi::IBGDA_MEM_WB;
        call(&session.file, &mut alloc).map_err(|error| {
            broker_error(
                ibgda_queue_alloc::NAME,
                &format!("{length} bytes, WB"),
                &error,
            )
        })?;
        let mut queue = Self {
            session: Arc::clone(session),
            handle: alloc.handle,
            memory: None,
        };
        let memory = MmapOptions::new()
            .offset(alloc.mmap_offset)
            .len(length)
            .map_raw(&session.file)
            .map(Mapping::new)
            .map_err(|error| {
                broker_error("mmap", &format!("queue memory, {length} bytes"), &error)
            })?;
        queue.memory = Some(memory);
        Ok(queue)
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.memory().address()
    }

    pub(crate) fn len(&self) -> usize {
        self.memory().len()
    }

    fn memory(&self) -> &Mapping {
        self.memory.as_ref().expect("mapped by alloc")
    }
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        self.memory = None;
        self.session.release(self.handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_pair_tells_how_to_allow_it() {
        let error = broker_error(
            "IBGDA_IOC_BIND",
            "GPU 0000:05:00.0, NIC 0000:04:00.0",
            &io::Error::from_raw_os_error(libc::EACCES),
        );
        assert_eq!(
            (error.errno(), error.origin()),
            (libc::EACCES, Source::Broker)
        );
        let text = error.to_string();
        for part in [
            "IBGDA_IOC_BIND",
            "0000:05:00.0",
            "policy",
            "mkdir /sys/kernel/config/ibgda/allow/",
        ] {
            assert!(text.contains(part), "{part:?} is missing in {text:?}");
        }
    }

    #[test]
    fn every_errno_of_the_abi_has_words() {
        for (command, errnos) in [
            (
                "IBGDA_IOC_BIND",
                &[
                    libc::ENODEV,
                    libc::EINVAL,
                    libc::EACCES,
                    libc::EXDEV,
                    libc::EALREADY,
                    libc::EHOSTDOWN,
                ][..],
            ),
            (
                "IBGDA_IOC_DOORBELL_IMPORT",
                &[
                    libc::EBADF,
                    libc::EINVAL,
                    libc::ERANGE,
                    libc::EBUSY,
                    libc::EDQUOT,
                    libc::ENOTCONN,
                    libc::ENOLINK,
                    libc::EOPNOTSUPP,
                ],
            ),
            (
                "IBGDA_IOC_QUEUE_ALLOC",
                &[
                    libc::EINVAL,
                    libc::EOPNOTSUPP,
                    libc::EDQUOT,
                    libc::ENOTCONN,
                    libc::ENOLINK,
                ],
            ),
            (
                "IBGDA_IOC_POPULATE",
                &[libc::ENOENT, libc::EFAULT, libc::ENOLINK],
            ),
            ("IBGDA_IOC_STATUS", &[libc::ENOTCONN]),
            ("IBGDA_IOC_RELEASE", &[libc::ENOENT, libc::EPERM]),
            ("IBGDA_IOC_EVENTFD", &[libc::EBADF]),
            ("IBGDA_IOC_EVENTS", &[libc::EAGAIN]),
            (
                "IBGDA_IOC_REBIND",
                &[libc::EAGAIN, libc::EHOSTDOWN, libc::EACCES, libc::EINVAL],
            ),
        ] {
            for &errno in errnos {
                assert_ne!(
                    explain(command, errno).0,
                    "",
                    "{command}: errno {errno} has no words"
                );
            }
        }
    }
}
