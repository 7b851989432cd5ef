// SPDX-License-Identifier: MIT OR Apache-2.0
//! The verbs device, with DevX or without, and the objects made through it. Each object keeps what it depends on alive.

mod channel;

pub(crate) use channel::Channel;

use crate::{
    error::{Error, Result, Source},
    event::AsyncEvent,
    hub,
    ifc::{Block, answer},
    pci::Bdf,
    worker::Home,
};
use ibgda_verbs_sys::{self as sys, uverbs::UarType};
use std::{
    ffi::CStr,
    fs, io, mem,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::{Arc, OnceLock},
};

/// A verbs device context and its protection domain.
#[derive(Debug)]
pub(crate) struct Device {
    context: NonNull<sys::ibv_context>,
    pd: NonNull<sys::ibv_pd>,
    pdn: u32,
    name: String,
    eqn: OnceLock<u32>,
    /// The process that opened it.
    home: Home,
}

// SAFETY: libibverbs and libmlx5 allow calls on a context, and on what was made from it, from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the verbs device of this name with DevX.
    pub(crate) fn open(name: &str) -> Result<Arc<Self>> {
        let mut device = Self::open_by(name, |device| {
            let mut attr = sys::mlx5dv_context_attr {
                flags: sys::mlx5dv_context_attr_flags::MLX5DV_CONTEXT_FLAGS_DEVX,
                comp_mask: 0,
            };
            // SAFETY: the device is of the list; the attribute is read only.
            NonNull::new(unsafe { sys::mlx5dv_open_device(device, &mut attr) })
                .ok_or_else(|| Error::last_verbs(format!("open {name} with DevX")))
        })?;
        let mut out = sys::mlx5dv_pd::default();
        let mut object = sys::mlx5dv_obj::default();
        object.pd.in_ = device.pd.as_ptr();
        object.pd.out = &mut out;
        // SAFETY: only the PD part is asked for, and it is filled in.
        match unsafe {
            sys::mlx5dv_init_obj(&mut object, sys::mlx5dv_obj_type::MLX5DV_OBJ_PD.into())
        } {
            0 => device.pdn = out.pdn,
            errno => return Err(Error::verbs("mlx5dv_init_obj of the PD", errno)),
        }
        Ok(Arc::new(device))
    }

    /// Opens it for plain verbs, which any device has.
    pub(crate) fn open_plain(name: &str) -> Result<Arc<Self>> {
        let device = Self::open_by(name, |device| {
            // SAFETY: the device is of the list.
            NonNull::new(unsafe { sys::ibv_open_device(device) })
                .ok_or_else(|| Error::last_verbs(format!("ibv_open_device of {name}")))
        })?;
        Ok(Arc::new(device))
    }

    fn open_by(
        name: &str,
        open: impl Fn(*mut sys::ibv_device) -> Result<NonNull<sys::ibv_context>>,
    ) -> Result<Self> {
        let mut count = 0;
        // SAFETY: the list is freed below, after the one device of it that is used has been opened.
        let list = unsafe { sys::ibv_get_device_list(&mut count) };
        if list.is_null() {
            return Err(Error::last_verbs("ibv_get_device_list"));
        }
        // SAFETY: the list has `count` entries.
        let devices = unsafe { std::slice::from_raw_parts(list, count as usize) };
        let found = devices.iter().copied().find(|&device| {
            // SAFETY: each entry is a device, and its name is terminated.
            unsafe { CStr::from_ptr(sys::ibv_get_device_name(device)) }.to_bytes()
                == name.as_bytes()
        });
        let context = found.map(open);
        // SAFETY: from ibv_get_device_list, and not used any more; an opened context keeps its own device.
        unsafe { sys::ibv_free_device_list(list) };
        let context = context.ok_or_else(|| {
            Error::new(
                crate::error::Source::Verbs,
                libc::ENODEV,
                format!("open {name}"),
                "there is no verbs device of that name, or no node of it in /dev/infiniband",
                "see ibv_devices for what there is; modprobe ib_uverbs; in a container: --device /dev/infiniband/uverbsN",
            )
        })??;

        // SAFETY: the context is open.
        let Some(pd) = NonNull::new(unsafe { sys::ibv_alloc_pd(context.as_ptr()) }) else {
            let error = Error::last_verbs(format!("ibv_alloc_pd on {name}"));
            // SAFETY: nothing was made from it.
            unsafe { sys::ibv_close_device(context.as_ptr()) };
            return Err(error);
        };
        let device = Self {
            context,
            pd,
            pdn: 0,
            name: name.to_owned(),
            eqn: OnceLock::new(),
            home: Home::here(),
        };
        device.unblock_async_file()?;
        Ok(device)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pdn(&self) -> u32 {
        self.pdn
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.context.as_ptr()
    }

    pub(crate) fn pd(&self) -> *mut sys::ibv_pd {
        self.pd.as_ptr()
    }

    /// What the device can do.
    pub(crate) fn limits(&self) -> Result<sys::ibv_device_attr> {
        let mut attr = sys::ibv_device_attr::default();
        // SAFETY: the context is open; the attribute is written only.
        match unsafe { sys::ibv_query_device(self.context(), &mut attr) } {
            0 => Ok(attr),
            errno => Err(Error::verbs(
                format!("ibv_query_device of {}", self.name),
                errno,
            )),
        }
    }

    /// All GIDs of all ports.
    pub(crate) fn gids(&self) -> Result<Vec<sys::ibv_gid_entry>> {
        /// More than the tables of devices have.
        const MOST: usize = 1024;
        let mut table = vec![sys::ibv_gid_entry::default(); MOST];
        // SAFETY: the table has room for that many; the context is open.
        let found =
            unsafe { sys::ibv_query_gid_table(self.context(), table.as_mut_ptr(), MOST, 0) };
        match usize::try_from(found) {
            Ok(found) => {
                table.truncate(found);
                Ok(table)
            }
            Err(_) => Err(Error::verbs(
                format!("ibv_query_gid_table of {}", self.name),
                found.unsigned_abs() as i32,
            )),
        }
    }

    /// The command file, which the broker compares a dma-buf's origin with.
    pub(crate) fn uverbs(&self) -> BorrowedFd<'_> {
        // SAFETY: the context owns the file as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().cmd_fd) }
    }

    /// Whether this is the process that opened it. What a forked child drops is still its parent's: they share the
    /// uverbs file, through which both would end the same objects.
    pub(crate) fn is_ours(&self) -> bool {
        self.home.is_here()
    }

    pub(crate) fn check_ours(&self, what: &str) -> Result<()> {
        self.home.check(|| format!("{what} on {}", self.name))
    }

    /// Where asynchronous events come from.
    pub(crate) fn async_file(&self) -> BorrowedFd<'_> {
        // SAFETY: the context owns the file as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) }
    }

    fn unblock_async_file(&self) -> Result<()> {
        unblock(self.async_file(), || {
            format!("O_NONBLOCK for the asynchronous events of {}", self.name)
        })
    }

    /// The next asynchronous event, if there is one.
    pub(crate) fn async_event(&self) -> Option<AsyncEvent> {
        let mut event = mem::MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the context is open, and the event is written only. A queue that it names lives until the event is
        // acknowledged, since its destruction waits for that.
        unsafe {
            if sys::ibv_get_async_event(self.context.as_ptr(), event.as_mut_ptr()) != 0 {
                return None;
            }
            let about = event.assume_init_ref();
            let queue = hub::kind::of_verbs(about.event_type)
                .and_then(|kind| AsyncEvent::of_object((*about.element.qp).qp_num, kind, 0));
            sys::ibv_ack_async_event(event.as_mut_ptr());
            if queue.is_some() {
                return queue;
            }
            let event = event.assume_init();
            let name = CStr::from_ptr(sys::ibv_event_type_str(event.event_type));
            let port = is_of_port(event.event_type).then_some(event.element.port_num as u8);
            Some(AsyncEvent::of_verbs(
                &self.name,
                event.event_type,
                port.unwrap_or(0),
                &name.to_string_lossy(),
            ))
        }
    }

    /// State, LID, MTU of a port.
    pub(crate) fn port(&self, port: u8) -> Result<sys::ibv_port_attr> {
        let mut attr = sys::ibv_port_attr::default();
        // SAFETY: the context is open; the attribute is written only.
        match unsafe { sys::___ibv_query_port(self.context.as_ptr(), port, &mut attr) } {
            0 => Ok(attr),
            errno => Err(Error::verbs(
                format!("ibv_query_port {port} of {}", self.name),
                errno,
            )),
        }
    }

    /// GID 0 of a port.
    pub(crate) fn gid(&self, port: u8) -> Result<[u8; 16]> {
        let mut gid = sys::ibv_gid::default();
        // SAFETY: as above.
        if unsafe { sys::ibv_query_gid(self.context.as_ptr(), port, 0, &mut gid) } != 0 {
            return Err(Error::last_verbs(format!(
                "ibv_query_gid, port {port} of {}",
                self.name
            )));
        }
        // SAFETY: both members of the union are these 16 bytes.
        Ok(unsafe { gid.raw })
    }

    /// Executes a command that is about no object.
    pub(crate) fn general<const N: usize, const M: usize>(
        &self,
        what: &str,
        input: &Block<N>,
    ) -> Result<Block<M>> {
        self.check_ours(what)?;
        let mut output = Block::<M>::new();
        // SAFETY: the context is open; both buffers have the lengths given.
        let errno = unsafe {
            sys::mlx5dv_devx_general_cmd(
                self.context.as_ptr(),
                input.as_bytes().as_ptr().cast(),
                N,
                output.as_bytes_mut().as_mut_ptr().cast(),
                M,
            )
        };
        if errno == 0 {
            return Ok(output);
        }
        Err(match output.get(answer::STATUS) as u8 {
            0 => Error::verbs(what, errno.abs()),
            status => Error::firmware(what, status, output.get(answer::SYNDROME) as u32),
        })
    }

    /// The EQ of completion vector 0, which stays the same.
    pub(crate) fn eqn(&self) -> Result<u32> {
        if let Some(eqn) = self.eqn.get() {
            return Ok(*eqn);
        }
        let mut eqn = 0;
        // SAFETY: as above.
        match unsafe { sys::mlx5dv_devx_query_eqn(self.context.as_ptr(), 0, &mut eqn) } {
            0 => Ok(*self.eqn.get_or_init(|| eqn)),
            errno => Err(Error::verbs("mlx5dv_devx_query_eqn", errno.abs())),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // SAFETY: whatever was made from the context holds an `Arc` of `self`, so it is gone. Failure means that the NIC is
        // gone, and with it what would be undone.
        unsafe {
            sys::ibv_dealloc_pd(self.pd.as_ptr());
            sys::ibv_close_device(self.context.as_ptr());
        }
    }
}

/// Has reads of a file return at once.
fn unblock(file: BorrowedFd<'_>, what: impl FnOnce() -> String) -> Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: the file is open; neither command takes a pointer.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
    };
    if done {
        Ok(())
    } else {
        Err(Error::last_verbs(what()))
    }
}

/// Whether an event is about a port, and so has its number, and not the address of an object.
fn is_of_port(event: sys::ibv_event_type::Type) -> bool {
    use sys::ibv_event_type as of;
    matches!(
        event,
        of::IBV_EVENT_PORT_ACTIVE
            | of::IBV_EVENT_PORT_ERR
            | of::IBV_EVENT_LID_CHANGE
            | of::IBV_EVENT_PKEY_CHANGE
            | of::IBV_EVENT_SM_CHANGE
            | of::IBV_EVENT_CLIENT_REREGISTER
            | of::IBV_EVENT_GID_CHANGE
    )
}

/// A port that packets do not get through, by what its state is.
pub(crate) fn not_active(port: String, state: sys::ibv_port_state::Type) -> Error {
    let (state, advice) = port_state(state);
    Error::new(
        Source::Argument,
        libc::ENETDOWN,
        port,
        format!("its state is {state}, not ACTIVE"),
        advice,
    )
}

/// A port's state as ibv_devinfo names it, and what to do when it is not active.
fn port_state(state: sys::ibv_port_state::Type) -> (&'static str, &'static str) {
    use sys::ibv_port_state as of;
    match state {
        of::IBV_PORT_DOWN => (
            "DOWN",
            "is the cable in, the other end up, and the port enabled? see ibv_devinfo, and ip link",
        ),
        of::IBV_PORT_INIT => (
            "INIT",
            "the link is up, and no subnet manager has configured it: start opensm in this fabric",
        ),
        of::IBV_PORT_ARMED => (
            "ARMED",
            "the subnet manager is configuring it: try again in a second",
        ),
        of::IBV_PORT_ACTIVE => ("ACTIVE", ""),
        of::IBV_PORT_ACTIVE_DEFER => (
            "ACTIVE_DEFER",
            "the link had an error and recovers: try again in a second",
        ),
        _ => ("NOP", "the driver does not know its state; see dmesg"),
    }
}

/// The verbs device of a PCI function.
pub(crate) fn device_name(nic: Bdf) -> Result<String> {
    let folder = format!("/sys/bus/pci/devices/{nic}/infiniband");
    let name = fs::read_dir(&folder).and_then(|mut entries| entries.next().transpose());
    match name {
        Ok(Some(entry)) => Ok(entry.file_name().to_string_lossy().into_owned()),
        Ok(None) | Err(_) => Err(Error::argument(
            format!("NIC {nic}"),
            format!("{folder} names no verbs device"),
            "pass the address of an RDMA NIC whose driver (mlx5_ib) is loaded; see ls -l /sys/class/infiniband",
        )),
    }
}

/// Refuses what names neither a PCI function nor a verbs device that is there.
pub(crate) fn check_name(nic: &str) -> Result<()> {
    let is_name = !nic.is_empty() && !nic.contains('/') && !nic.starts_with('.');
    if nic.parse::<Bdf>().is_ok()
        || is_name && fs::exists(format!("/sys/class/infiniband/{nic}")).unwrap_or(false)
    {
        return Ok(());
    }
    device_bdf(nic).map(drop)
}

/// That the kernel has the function of a GPU.
pub(crate) fn check_present(gpu: Bdf) -> Result<()> {
    if fs::exists(format!("/sys/bus/pci/devices/{gpu}")).unwrap_or(true) {
        return Ok(());
    }
    Err(Error::new(
        Source::Argument,
        libc::ENODEV,
        format!("GPU {gpu}"),
        "there is no such PCI function",
        "see ibgda topo, or lspci -D; route proxy needs no GPU, if asked for",
    ))
}

/// The PCI function of a verbs device.
pub(crate) fn device_bdf(name: &str) -> Result<Bdf> {
    let link = format!("/sys/class/infiniband/{name}/device");
    let unknown = |why: String| {
        Error::argument(
            format!("NIC {name:?}"),
            why,
            "see ibv_devices for what there is",
        )
    };
    if name.is_empty() || name.contains('/') {
        return Err(unknown("not the name of a verbs device".into()));
    }
    let target = fs::canonicalize(&link).map_err(|error| {
        if fs::exists(format!("/sys/class/infiniband/{name}")).unwrap_or(false) {
            unknown("a verbs device that is no PCI function, and so no mlx5 NIC".into())
        } else {
            unknown(format!("{link}: {error}"))
        }
    })?;
    let text = target
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    text.parse()
        .map_err(|error: crate::pci::ParseBdfError| unknown(error.to_string()))
}

/// A UAR page of one's own.
///
/// Allocated past libmlx5, whose "dedicated" UARs are registers: two of them share a page, and a page freed by
/// `mlx5dv_devx_free_uar` is kept for the next caller.
#[derive(Debug)]
pub(crate) struct Uar {
    device: Arc<Device>,
    uar: sys::uverbs::Uar,
}

impl Uar {
    /// Where in the page the first doorbell register lies (`MLX5_BF_OFFSET` of rdma-core).
    pub(crate) const DOORBELL_OFFSET: usize = 0x800;
    /// And the register that arms CQs (`MLX5_CQ_DOORBELL` of rdma-core).
    pub(crate) const ARM_OFFSET: usize = 0x20;

    pub(crate) fn alloc(device: &Arc<Device>, kind: UarType) -> Result<Self> {
        device.check_ours("allocate a UAR")?;
        let uar = sys::uverbs::alloc_uar(device.uverbs(), kind).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let what = format!("MLX5_IB_METHOD_UAR_OBJ_ALLOC ({kind:?}) on {}", device.name);
            if kind == UarType::BlueFlame && errno == libc::EOPNOTSUPP {
                return Error::new(
                    Source::Verbs,
                    errno,
                    what,
                    "the NIC has no BlueFlame, or mlx5_ib found that this platform does not combine writes",
                    "make the QP without BlueFlame",
                );
            }
            Error::verbs(what, errno)
        })?;
        Ok(Self {
            device: Arc::clone(device),
            uar,
        })
    }

    /// Firmware's index of the page.
    pub(crate) fn page_id(&self) -> u32 {
        self.uar.page_id
    }

    /// The page as a dma-buf.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let offset = self.uar.mmap_offset;
        sys::uverbs::export_dmabuf(self.device.uverbs(), offset).map_err(|error| {
            Error::verbs(
                format!(
                    "UVERBS_METHOD_DMABUF_ALLOC of UAR {:#x} (offset {offset:#x})",
                    self.page_id()
                ),
                error.raw_os_error().unwrap_or(libc::EIO),
            )
        })
    }
}

impl Drop for Uar {
    fn drop(&mut self) {
        if !self.device.is_ours() {
            return;
        }
        // Fails only when the NIC is gone, and the page with it.
        let _ = sys::uverbs::destroy_uar(self.device.uverbs(), self.uar.handle);
    }
}

/// Memory that firmware objects of ours may lie in.
#[derive(Debug)]
pub(crate) struct Umem {
    device: Arc<Device>,
    umem: NonNull<sys::mlx5dv_devx_umem>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Umem {}
// SAFETY: as for `Device`.
unsafe impl Sync for Umem {}

impl Umem {
    /// # Safety
    /// The memory must stay mapped as long as the UMEM lives, and used only in the way of a queue that the NIC writes to.
    pub(crate) unsafe fn register(
        device: &Arc<Device>,
        address: *mut u8,
        bytes: usize,
    ) -> Result<Self> {
        device.check_ours("register a UMEM")?;
        let access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        // SAFETY: by this function's contract.
        let umem = unsafe {
            sys::mlx5dv_devx_umem_reg(device.context.as_ptr(), address.cast(), bytes, access)
        };
        let umem = NonNull::new(umem)
            .ok_or_else(|| Error::last_verbs(format!("mlx5dv_devx_umem_reg ({bytes} bytes)")))?;
        Ok(Self {
            device: Arc::clone(device),
            umem,
        })
    }

    /// As `register`, of part of a dma-buf.
    pub(crate) fn of_dmabuf(
        device: &Arc<Device>,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
    ) -> Result<Self> {
        device.check_ours("register a UMEM")?;
        let mut input = sys::mlx5dv_devx_umem_in {
            // The kernel takes it for an offset.
            addr: ptr::without_provenance_mut(offset as usize),
            size: bytes,
            access: sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0,
            // Whatever page size suits.
            pgsz_bitmap: u64::MAX & !(crate::PAGE_BYTES - 1),
            comp_mask: sys::mlx5dv_devx_umem_in_mask::MLX5DV_UMEM_MASK_DMABUF.into(),
            dmabuf_fd: file.as_raw_fd(),
        };
        // SAFETY: the context is open, and the argument is read only; the kernel keeps the dma-buf as long as the UMEM lives.
        let umem = unsafe { sys::mlx5dv_devx_umem_reg_ex(device.context.as_ptr(), &mut input) };
        let umem = NonNull::new(umem).ok_or_else(|| {
            Error::last_verbs(format!(
                "mlx5dv_devx_umem_reg_ex ({bytes} bytes at offset {offset:#x} of a dma-buf)"
            ))
        })?;
        Ok(Self {
            device: Arc::clone(device),
            umem,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        // SAFETY: registered, and libmlx5 does not change it.
        unsafe { self.umem.as_ref() }.umem_id
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        if !self.device.is_ours() {
            return;
        }
        // SAFETY: registered by register; firmware objects in it hold it, so they are gone.
        unsafe { sys::mlx5dv_devx_umem_dereg(self.umem.as_ptr()) };
    }
}

/// An object of the firmware.
#[derive(Debug)]
pub(crate) struct Object {
    device: Arc<Device>,
    object: NonNull<sys::mlx5dv_devx_obj>,
    /// Its number: a CQN, a QPN.
    pub(crate) number: u32,
}

// SAFETY: as for `Device`.
unsafe impl Send for Object {}
// SAFETY: as for `Device`.
unsafe impl Sync for Object {}

impl Object {
    /// Creates an object; `what` names it in errors.
    pub(crate) fn create<const N: usize>(
        device: &Arc<Device>,
        what: &str,
        input: &Block<N>,
    ) -> Result<Self> {
        device.check_ours(what)?;
        let mut output = Block::<16>::new();
        // SAFETY: both buffers have the lengths given; libmlx5 reads the one and writes the other.
        let object = unsafe {
            sys::mlx5dv_devx_obj_create(
                device.context.as_ptr(),
                input.as_bytes().as_ptr().cast(),
                N,
                output.as_bytes_mut().as_mut_ptr().cast(),
                16,
            )
        };
        let object = NonNull::new(object)
            .ok_or_else(|| refused(what, &output, io::Error::last_os_error()))?;
        Ok(Self {
            device: Arc::clone(device),
            object,
            number: output.get(answer::OBJECT) as u32,
        })
    }

    /// Changes the object's state.
    pub(crate) fn modify<const N: usize>(&self, what: &str, input: &Block<N>) -> Result<()> {
        self.device.check_ours(what)?;
        let mut output = Block::<16>::new();
        // SAFETY: as in `create`; the object exists.
        let answer = unsafe {
            sys::mlx5dv_devx_obj_modify(
                self.object.as_ptr(),
                input.as_bytes().as_ptr().cast(),
                N,
                output.as_bytes_mut().as_mut_ptr().cast(),
                16,
            )
        };
        match answer {
            0 => Ok(()),
            errno => Err(refused(
                what,
                &output,
                io::Error::from_raw_os_error(errno.abs()),
            )),
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if !self.device.is_ours() {
            return;
        }
        // SAFETY: created by create. Failure means that the NIC is gone, and the object with it.
        unsafe { sys::mlx5dv_devx_obj_destroy(self.object.as_ptr()) };
    }
}

/// Firmware's own answer where it gave one, else the system's.
fn refused(what: &str, output: &Block<16>, error: io::Error) -> Error {
    match output.get(answer::STATUS) as u8 {
        0 => Error::verbs(what, error.raw_os_error().unwrap_or(libc::EIO)),
        status => Error::firmware(what, status, output.get(answer::SYNDROME) as u32),
    }
}

/// Memory registered with the NIC (`ibv_reg_mr`).
#[derive(Debug)]
pub(crate) struct Registration {
    device: Arc<Device>,
    mr: NonNull<sys::ibv_mr>,
}

// SAFETY: as for `Device`.
unsafe impl Send for Registration {}
// SAFETY: as for `Device`.
unsafe impl Sync for Registration {}

impl Registration {
    /// # Safety
    /// The memory must stay mapped as long as the registration lives, and be such that the NIC may read and write it.
    pub(crate) unsafe fn new(
        device: &Arc<Device>,
        address: u64,
        bytes: usize,
        access: sys::ibv_access_flags,
    ) -> Result<Self> {
        device.check_ours("register memory")?;
        let pointer = ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: by this function's contract.
        let mr = unsafe { sys::ibv_reg_mr(device.pd.as_ptr(), pointer, bytes, access.0 as i32) };
        let mr = NonNull::new(mr).ok_or_else(|| {
            Error::last_verbs(format!(
                "ibv_reg_mr ({bytes} bytes at {address:#x}, access {:#x})",
                access.0
            ))
        })?;
        Ok(Self {
            device: Arc::clone(device),
            mr,
        })
    }

    /// As `new`, of a dma-buf from its first byte on; requests name it by `address` and up.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_dmabuf(
        device: &Arc<Device>,
        dmabuf: BorrowedFd<'_>,
        address: u64,
        bytes: usize,
        access: sys::ibv_access_flags,
    ) -> Result<Self> {
        device.check_ours("register GPU memory")?;
        let (file, access) = (std::os::fd::AsRawFd::as_raw_fd(&dmabuf), access.0 as i32);
        // SAFETY: the PD and the descriptor are good; the kernel keeps the dma-buf as long as the region lives.
        let mr =
            unsafe { sys::ibv_reg_dmabuf_mr(device.pd.as_ptr(), 0, bytes, address, file, access) };
        let mr = NonNull::new(mr).ok_or_else(|| {
            Error::last_verbs(format!(
                "ibv_reg_dmabuf_mr ({bytes} bytes for {address:#x}, access {access:#x})"
            ))
        })?;
        Ok(Self {
            device: Arc::clone(device),
            mr,
        })
    }

    /// Whether this is the process that made it.
    pub(crate) fn is_ours(&self) -> bool {
        self.device.is_ours()
    }

    pub(crate) fn keys(&self) -> (u32, u32) {
        // SAFETY: registered, and libibverbs does not change it.
        let mr = unsafe { self.mr.as_ref() };
        (mr.lkey, mr.rkey)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.device.is_ours() {
            return;
        }
        // SAFETY: registered by new.
        unsafe { sys::ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_is_not_there_is_refused_by_its_name() {
        let bdf: Bdf = "fffe:fe:1f.7".parse().expect("well formed");
        let error = check_present(bdf).expect_err("there is none");
        assert_eq!(error.errno(), libc::ENODEV);
        assert!(error.to_string().contains("fffe:fe:1f.7"), "{error}");
    }
}
