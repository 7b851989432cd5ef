// SPDX-License-Identifier: MIT OR Apache-2.0
//! UARs, and a queue pair that rings one, from the real driver through DevX.

use crate::machine::Bdf;
use ibgda_verbs_sys::{
    self as sys,
    uverbs::{self, UarType},
};
use std::{
    ffi::CStr,
    fs, io,
    marker::PhantomData,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{Ordering, fence},
    time::{Duration, Instant},
};

/// A verbs context with DevX, and its protection domain.
#[derive(Debug)]
pub struct Verbs {
    context: NonNull<sys::ibv_context>,
    pd: NonNull<sys::ibv_pd>,
}

impl Verbs {
    /// Opens the verbs device of a NIC.
    pub fn open(nic: Bdf) -> Self {
        Self::try_open(nic)
            .unwrap_or_else(|| panic!("{nic} has no RDMA device that opens with DevX"))
    }

    /// The same, `None` while the NIC has no RDMA device.
    pub fn try_open(nic: Bdf) -> Option<Self> {
        let mut entries = fs::read_dir(nic.sysfs().join("infiniband")).ok()?;
        let name = entries.next()?.ok()?.file_name();
        let mut count = 0;
        // SAFETY: the list is freed below; the device is opened before that.
        unsafe {
            let list = sys::ibv_get_device_list(&mut count);
            if list.is_null() {
                return None;
            }
            let device = (0..count as usize)
                .map(|index| *list.add(index))
                .find(|&device| {
                    CStr::from_ptr(sys::ibv_get_device_name(device)).to_bytes()
                        == name.as_encoded_bytes()
                });
            let mut attributes = sys::mlx5dv_context_attr {
                flags: sys::mlx5dv_context_attr_flags::MLX5DV_CONTEXT_FLAGS_DEVX,
                comp_mask: 0,
            };
            let context = device
                .and_then(|device| NonNull::new(sys::mlx5dv_open_device(device, &mut attributes)));
            sys::ibv_free_device_list(list);
            let context = context?;
            let Some(pd) = NonNull::new(sys::ibv_alloc_pd(context.as_ptr())) else {
                sys::ibv_close_device(context.as_ptr());
                return None;
            };
            Some(Self { context, pd })
        }
    }

    /// The context, open as long as this lives.
    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.context.as_ptr()
    }

    /// The protection domain.
    pub(crate) fn pd(&self) -> *mut sys::ibv_pd {
        self.pd.as_ptr()
    }

    /// LID of its port.
    pub(crate) fn lid(&self) -> u64 {
        let mut port = sys::ibv_port_attr::default();
        // SAFETY: the context is open; the attribute is written only.
        let errno = unsafe { sys::___ibv_query_port(self.context(), 1, &mut port) };
        assert_eq!(errno, 0, "ibv_query_port");
        port.lid.into()
    }

    /// The EQ of completion vector 0.
    pub(crate) fn eqn(&self) -> u64 {
        let mut eqn = 0;
        // SAFETY: as above.
        let errno = unsafe { sys::mlx5dv_devx_query_eqn(self.context(), 0, &mut eqn) };
        assert_eq!(errno, 0, "mlx5dv_devx_query_eqn");
        eqn.into()
    }

    /// Firmware's number of the protection domain.
    pub(crate) fn pdn(&self) -> u64 {
        let (mut out, mut object) = (sys::mlx5dv_pd::default(), sys::mlx5dv_obj::default());
        object.pd.in_ = self.pd();
        object.pd.out = &mut out;
        // SAFETY: only the PD part is asked for, and it is filled in.
        let errno = unsafe {
            sys::mlx5dv_init_obj(&mut object, sys::mlx5dv_obj_type::MLX5DV_OBJ_PD.into())
        };
        assert_eq!(errno, 0, "mlx5dv_init_obj");
        out.pdn.into()
    }

    /// Registers a mapping's memory, for as long as the result lives.
    pub fn register(&self, address: *mut u8, length: usize) -> Registration<'_> {
        let access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: uverbs pins the pages, which may then lose their mapping.
        let mr = unsafe { sys::ibv_reg_mr(self.pd(), address.cast(), length, access.0 as i32) };
        Registration {
            mr: NonNull::new(mr).expect("register memory"),
            _verbs: PhantomData,
        }
    }

    /// The command file.
    pub fn uverbs(&self) -> BorrowedFd<'_> {
        // SAFETY: the context keeps the file.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().cmd_fd) }
    }

    /// A UAR of its own, destroyed when the context is closed or by [`Self::destroy`].
    pub fn alloc_uar(&self) -> uverbs::Uar {
        self.alloc_uar_of(UarType::NonCached)
            .expect("allocate a UAR")
    }

    /// A UAR of a type.
    pub fn alloc_uar_of(&self, kind: UarType) -> io::Result<uverbs::Uar> {
        uverbs::alloc_uar(self.uverbs(), kind)
    }

    /// Maps a UAR as libmlx5 does.
    pub fn map(&self, uar: &uverbs::Uar) -> UarMapping {
        // SAFETY: a new mapping, checked and owned.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                PAGE,
                libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.uverbs().as_raw_fd(),
                uar.mmap_offset as libc::off_t,
            )
        };
        assert_ne!(page, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        UarMapping(page)
    }

    /// The UAR as a dma-buf.
    pub fn export(&self, uar: &uverbs::Uar) -> OwnedFd {
        uverbs::export_dmabuf(self.uverbs(), uar.mmap_offset).expect("export the UAR")
    }

    /// Destroys the UAR, which revokes its dma-bufs.
    pub fn destroy(&self, uar: uverbs::Uar) {
        uverbs::destroy_uar(self.uverbs(), uar.handle).expect("destroy the UAR");
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        // SAFETY: nothing made from them is left in use. Both fail when the NIC is gone, and then nothing is left to undo.
        unsafe {
            sys::ibv_dealloc_pd(self.pd.as_ptr());
            sys::ibv_close_device(self.context.as_ptr());
        }
    }
}

/// A firmware command: big-endian fields at (byte, bit, width).
pub(crate) struct Command(Vec<u8>);

pub(crate) type Field = (usize, usize, usize);

impl Command {
    pub(crate) fn new(opcode: u16, bytes: usize) -> Self {
        Self(vec![0; bytes]).set((0, 0, 16), opcode.into())
    }

    pub(crate) fn set(mut self, (byte, bit, width): Field, value: u64) -> Self {
        assert!(
            width == 64 || value >> width == 0,
            "{value:#x} does not fit into {width} bits"
        );
        for index in 0..width {
            let position = byte * 8 + bit + index;
            let mask = 0x80 >> (position % 8);
            let one = (value >> (width - 1 - index)) & 1 == 1;
            self.0[position / 8] = self.0[position / 8] & !mask | if one { mask } else { 0 };
        }
        self
    }
}

/// A firmware object.
#[derive(Debug)]
pub(crate) struct Object {
    object: NonNull<sys::mlx5dv_devx_obj>,
    pub(crate) number: u32,
}

impl Object {
    pub(crate) fn create(verbs: &Verbs, command: Command) -> Self {
        let mut answer = [0; 16];
        // SAFETY: both buffers have the lengths given.
        let object = unsafe {
            sys::mlx5dv_devx_obj_create(
                verbs.context.as_ptr(),
                command.0.as_ptr().cast(),
                command.0.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        let error = std::io::Error::last_os_error();
        let object = NonNull::new(object)
            .unwrap_or_else(|| panic!("command {:02x?}: {error}, {answer:02x?}", &command.0[..2]));
        Self {
            object,
            number: u32::from_be_bytes([0, answer[9], answer[10], answer[11]]),
        }
    }

    pub(crate) fn modify(&self, command: Command) {
        let mut answer = [0_u8; 16];
        // SAFETY: both buffers have the lengths given.
        let errno = unsafe {
            sys::mlx5dv_devx_obj_modify(
                self.object.as_ptr(),
                command.0.as_ptr().cast(),
                command.0.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        assert_eq!(errno, 0, "command {:02x?}: {answer:02x?}", &command.0[..2]);
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: created by `create`. It fails when the NIC is gone, and the object with it.
        unsafe { sys::mlx5dv_devx_obj_destroy(self.object.as_ptr()) };
    }
}

#[derive(Debug)]
pub(crate) struct Umem(NonNull<sys::mlx5dv_devx_umem>);

impl Umem {
    /// # Safety
    /// The memory outlives the UMEM.
    pub(crate) unsafe fn register(verbs: &Verbs, address: *mut u8, bytes: usize) -> Self {
        let write = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        // SAFETY: by this function's contract.
        let umem = unsafe {
            sys::mlx5dv_devx_umem_reg(verbs.context.as_ptr(), address.cast(), bytes, write.0)
        };
        Self(NonNull::new(umem).expect("register memory for queues"))
    }

    pub(crate) fn id(&self) -> u64 {
        // SAFETY: registered.
        unsafe { self.0.as_ref() }.umem_id.into()
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: registered; the objects in it are gone before.
        unsafe { sys::mlx5dv_devx_umem_dereg(self.0.as_ptr()) };
    }
}

/// An MR.
#[derive(Debug)]
pub struct Registration<'a> {
    mr: NonNull<sys::ibv_mr>,
    _verbs: PhantomData<&'a Verbs>,
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        // SAFETY: registered.
        unsafe { sys::ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// A UAR's page, by uverbs.
#[derive(Debug)]
pub struct UarMapping(*mut libc::c_void);

impl Drop for UarMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `Verbs::map`.
        unsafe { libc::munmap(self.0, PAGE) };
    }
}

const PAGE: usize = 4096;
/// Offsets in the queues' memory: the CQ, its doorbell record, the send queue, its doorbell record.
const CQ: usize = 0;
const CQ_RECORD: usize = PAGE;
const SQ: usize = 2 * PAGE;
const SQ_RECORD: usize = 3 * PAGE;
const QUEUE_BYTES: usize = 4 * PAGE;
const LOG_ENTRIES: u64 = 4;
/// Where in a UAR page the first doorbell register lies.
pub const REGISTER: usize = 0x800;

/// A reliable connection of a queue pair to itself, with memory to write to: what it takes to see that a store to a
/// doorbell register does its work.
#[derive(Debug)]
pub struct Loopback<'a> {
    // Dropped in this order.
    qp: Object,
    _cq: Object,
    _umem: Umem,
    mr: Registration<'a>,
    queues: Box<Aligned<QUEUE_BYTES>>,
    memory: Box<Aligned<PAGE>>,
    posted: u16,
    _verbs: &'a Verbs,
}

// Places in commands are those of mlx5_ifc.h: cqc at 0x10, qpc at 0x18, its primary address path at 0x18 in it.
const QPC: usize = 0x18;
const PATH: usize = QPC + 0x18;

/// `enum ibv_mtu`.
pub(crate) const MTU_256: u64 = 1;
pub(crate) const MTU_4096: u64 = 5;

/// Where a queue and its doorbell record lie in a UMEM, and the page that it is rung by.
pub(crate) struct Place {
    pub(crate) umem: u64,
    pub(crate) queue: u64,
    pub(crate) record: u64,
    pub(crate) log_entries: u64,
    pub(crate) uar_page: u64,
}

/// CREATE_CQ, with overruns ignored.
pub(crate) fn create_cq(verbs: &Verbs, place: &Place, eqn: u64) -> Object {
    Object::create(
        verbs,
        Command::new(0x400, 0x110)
            .set((0x50, 0, 64), place.queue)
            .set((0x58, 0, 32), place.umem)
            .set((0x5c, 0, 1), 1)
            .set((0x10, 6, 1), 1)
            .set((0x14, 0, 32), place.umem)
            .set((0x1c, 3, 5), place.log_entries)
            .set((0x1d, 0, 24), place.uar_page)
            .set((0x24, 0, 32), eqn)
            .set((0x48, 0, 64), place.record),
    )
}

/// CREATE_QP of an RC QP that only sends, for which both CQs are this one.
pub(crate) fn create_qp(verbs: &Verbs, place: &Place, pdn: u64, cq: &Object) -> Object {
    Object::create(
        verbs,
        Command::new(0x500, 0x110)
            .set((0x100, 0, 64), place.queue)
            .set((0x108, 0, 32), place.umem)
            .set((0x10c, 0, 1), 1)
            .set((QPC + 0x02, 3, 2), 3)
            .set((QPC + 0x05, 0, 24), pdn)
            .set((QPC + 0x0a, 1, 4), place.log_entries)
            .set((QPC + 0x0d, 0, 24), place.uar_page)
            .set((QPC + 0x7d, 0, 24), cq.number.into())
            .set((QPC + 0x9d, 0, 24), cq.number.into())
            .set((QPC + 0xa0, 0, 64), place.record)
            .set((QPC + 0xac, 5, 3), 3)
            .set((QPC + 0xd0, 3, 1), 1)
            .set((QPC + 0xe4, 0, 32), place.umem),
    )
}

/// RST2INIT, INIT2RTR and RTR2RTS of a QP whose peer is itself.
pub(crate) fn connect_to_itself(qp: &Object, lid: u64, mtu: u64) {
    let change = |opcode| {
        Command::new(opcode, 0x110)
            .set((0x09, 0, 24), qp.number.into())
            .set((QPC + 0x02, 3, 2), 3)
            .set((QPC + 0x92, 1, 1), 1)
            .set((PATH + 0x25, 0, 8), 1)
    };
    qp.modify(change(0x502));
    qp.modify(
        change(0x503)
            .set((QPC + 0x08, 0, 3), mtu)
            .set((QPC + 0x08, 3, 5), 30)
            .set((QPC + 0x15, 0, 24), qp.number.into())
            .set((PATH + 0x06, 0, 16), lid),
    );
    qp.modify(
        change(0x504)
            .set((QPC + 0x71, 5, 3), 7)
            .set((PATH + 0x08, 0, 5), 14),
    );
}

#[repr(align(4096))]
#[derive(Debug)]
struct Aligned<const N: usize>([u8; N]);

impl<'a> Loopback<'a> {
    /// Its doorbells go to `uar`.
    pub fn new(verbs: &'a Verbs, uar: &uverbs::Uar) -> Self {
        let mut queues = Box::new(Aligned([0; QUEUE_BYTES]));
        let mut memory = Box::new(Aligned([0; PAGE]));
        // CQEs that nobody has written have the opcode "invalid".
        for entry in 0..1 << LOG_ENTRIES {
            queues.0[CQ + entry * 64 + 63] = 0xf0;
        }
        let (lid, eqn, pdn) = (verbs.lid(), verbs.eqn(), verbs.pdn());
        // SAFETY: the memory lives longer than its registrations, by the order of `drop`.
        let umem = unsafe { Umem::register(verbs, queues.0.as_mut_ptr(), QUEUE_BYTES) };
        let mr = verbs.register(memory.0.as_mut_ptr(), PAGE);
        let umem_id = umem.id();

        let place = |queue: usize, record: usize| Place {
            umem: umem_id,
            queue: queue as u64,
            record: record as u64,
            log_entries: LOG_ENTRIES,
            uar_page: uar.page_id.into(),
        };
        let cq = create_cq(verbs, &place(CQ, CQ_RECORD), eqn);
        let qp = create_qp(verbs, &place(SQ, SQ_RECORD), pdn, &cq);
        connect_to_itself(&qp, lid, MTU_256);
        Self {
            qp,
            _cq: cq,
            _umem: umem,
            mr,
            queues,
            memory,
            posted: 0,
            _verbs: verbs,
        }
    }

    fn queue(&mut self, offset: usize, bytes: &[u8]) {
        self.queues.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Builds a WQE that copies a word from one place of the memory to another, counts it in the doorbell record, and
    /// gives what is then to be stored to the register.
    fn build_write(&mut self, value: u64) -> u64 {
        let memory = self.memory.0.as_mut_ptr();
        self.memory.0[..8].copy_from_slice(&value.to_ne_bytes());
        self.memory.0[8..16].fill(0);
        // SAFETY: registered.
        let (lkey, rkey) = unsafe { (self.mr.mr.as_ref().lkey, self.mr.mr.as_ref().rkey) };
        let mut wqe = [0; 64];
        // Control: index and RDMA_WRITE, QPN and three segments, a completion asked for.
        wqe[..4].copy_from_slice(&((u32::from(self.posted) << 8) | 0x08).to_be_bytes());
        wqe[4..8].copy_from_slice(&((self.qp.number << 8) | 3).to_be_bytes());
        wqe[11] = 0x08;
        wqe[16..24].copy_from_slice(&(memory as u64 + 8).to_be_bytes());
        wqe[24..28].copy_from_slice(&rkey.to_be_bytes());
        wqe[32..36].copy_from_slice(&8_u32.to_be_bytes());
        wqe[36..40].copy_from_slice(&lkey.to_be_bytes());
        wqe[40..48].copy_from_slice(&(memory as u64).to_be_bytes());
        let slot = usize::from(self.posted) % (1 << LOG_ENTRIES);
        self.queue(SQ + slot * 64, &wqe);
        self.posted += 1;
        // All before this one have been consumed; without that the CQ overruns.
        let consumed = u32::from(self.posted - 1).to_be_bytes();
        self.queue(CQ_RECORD, &consumed);
        fence(Ordering::SeqCst);
        // The send counter is the second word of the record.
        let counter = u32::from(self.posted).to_be_bytes();
        self.queue(SQ_RECORD + 4, &counter);
        fence(Ordering::SeqCst);
        u64::from_ne_bytes(wqe[..8].try_into().expect("eight bytes"))
    }

    /// Writes a word over the wire; `ring` stores its argument to the doorbell register. Whether it arrived, and its
    /// completion, within the time.
    pub fn write_rings(&mut self, value: u64, time: Duration, ring: impl FnOnce(u64)) -> bool {
        let slot = usize::from(self.posted) % (1 << LOG_ENTRIES);
        let lap = (self.posted >> LOG_ENTRIES) & 1;
        let doorbell = self.build_write(value);
        ring(doorbell);
        let end = Instant::now() + time;
        let status = &raw const self.queues.0[CQ + slot * 64 + 63];
        loop {
            // SAFETY: inside the queues; the device writes it.
            let status = unsafe { status.read_volatile() };
            // Opcode REQ, and the owner bit of this lap.
            if status & 0xf1 == lap as u8 {
                fence(Ordering::SeqCst);
                // SAFETY: inside the memory; the device has written it.
                let arrived =
                    unsafe { ptr::read_volatile(self.memory.0.as_ptr().add(8).cast::<u64>()) };
                assert_eq!(arrived, value, "completed, with other data");
                return true;
            }
            assert!(
                status >> 4 == 0xf || status >> 4 == 0,
                "a completion with opcode {:#x}",
                status >> 4
            );
            if Instant::now() > end {
                return false;
            }
        }
    }

    /// Posts a NOP that is silent in memory, and gives it with the request for a completion.
    pub fn silent_nop(&mut self) -> [u64; 8] {
        let mut wqe = [0_u8; 64];
        wqe[1..3].copy_from_slice(&self.posted.to_be_bytes());
        wqe[4..8].copy_from_slice(&((self.qp.number << 8) | 1).to_be_bytes());
        let slot = usize::from(self.posted) % (1 << LOG_ENTRIES);
        self.queue(SQ + slot * 64, &wqe);
        self.posted += 1;
        fence(Ordering::SeqCst);
        self.queue(SQ_RECORD + 4, &u32::from(self.posted).to_be_bytes());
        fence(Ordering::SeqCst);
        wqe[11] = 0x08;
        std::array::from_fn(|i| {
            u64::from_ne_bytes(wqe[i * 8..][..8].try_into().expect("eight bytes"))
        })
    }

    /// Store of a doorbell that belongs to this queue pair, for ringing where it should not.
    pub fn stray_doorbell(&self) -> u64 {
        let mut word = [0; 8];
        word[4..].copy_from_slice(&((self.qp.number << 8) | 3).to_be_bytes());
        u64::from_ne_bytes(word)
    }
}
