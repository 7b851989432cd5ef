// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the bytes of a program mean. Each step takes a byte that says what to do, and what it needs besides; where there
//! are no bytes left the program is over. Steps use what earlier ones made, or something that is none of it.

use crate::broker::ioctl;
use crate::machine::Bdf;
use crate::verbs::Verbs;
use ibgda_uapi::*;
use ibgda_verbs_sys::uverbs::{Uar, UarType, alloc_uar, destroy_uar, export_dmabuf};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::{fs, ptr, thread};

const PAGE: usize = 4096;
/// Of each kind of thing.
const MOST: usize = 8;

/// Programs that go the ways users go; the fuzzer changes them.
pub fn seeds() -> Vec<Vec<u8>> {
    let session = [OPEN, 0, BIND, 0, 0];
    let doorbell = [UAR, 0, IMPORT, 0, 0, 0, 0];
    let map = [MAP, 0, 0, 0, 0, 0];
    [
        &[
            &session[..],
            &doorbell,
            &map,
            &[POPULATE, 0, 0, 0, STORE, 0, 8, RELEASE, 0, 0],
        ][..],
        &[
            &session,
            &[QUEUE, 0, 4, 0, 0],
            &map,
            &[STORE, 0, 0, LOAD, 0, 0, UNMAP, 0, 0, RELEASE, 0, 0],
        ],
        &[
            &session,
            &[
                STATUS, 0, MAP, 0, 1, 0, 0, 0, LOAD, 0, 0, EVENTFD, 0, 0, EVENTS, 0, 4, 0,
            ],
        ],
        &[
            &session,
            &doorbell,
            &map,
            &[
                POPULATE, 0, 0, 0, DESTROY, 0, LOAD, 0, 0, EVENTS, 0, 9, 0, REBIND, 0,
            ],
        ],
        &[
            &session,
            &doorbell,
            &map,
            &[FORK, 3, STORE, 0, 8, CLOSE, 0, LOAD, 0, 0],
        ],
        &[
            &session,
            &doorbell,
            &[THREAD, RELEASE, 0, 0],
            &map,
            &[POPULATE, 0, 0, 0, CLOSE, 0],
        ],
        &[
            &session,
            &[FAIL, 3, QUEUE, 0, 4, 0, 0, FAIL, 9],
            &doorbell,
            &[FAIL, 1],
            &map,
        ],
        &[
            &session,
            &[
                RAW, 0, 3, 40, 1, 2, 3, 4, 5, 6, 7, 8, ADVISE, 0, 0, REMAP, 0, 1, PROTECT, 0, 1,
            ],
        ],
    ]
    .iter()
    .map(|parts| parts.concat())
    .collect()
}

const OPEN: u8 = 0;
const CLOSE: u8 = 1;
const BIND: u8 = 2;
const REBIND: u8 = 3;
const UAR: u8 = 4;
const IMPORT: u8 = 5;
const QUEUE: u8 = 6;
const MAP: u8 = 7;
const UNMAP: u8 = 8;
const STORE: u8 = 9;
const LOAD: u8 = 10;
const POPULATE: u8 = 11;
const RELEASE: u8 = 12;
const STATUS: u8 = 13;
const EVENTFD: u8 = 14;
const EVENTS: u8 = 15;
const DESTROY: u8 = 16;
const FORK: u8 = 17;
const THREAD: u8 = 18;
const RAW: u8 = 19;
const ADVISE: u8 = 20;
const REMAP: u8 = 21;
const PROTECT: u8 = 22;
const FAIL: u8 = 23;
const DUP: u8 = 24;
const CLOSE_DMABUF: u8 = 25;
const FDINFO: u8 = 26;
const STEPS: u8 = 27;

/// The bytes that are left.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// A byte, 0 where there is none.
    fn next(&mut self) -> usize {
        self.byte().unwrap_or(0).into()
    }

    fn wide(&mut self) -> u64 {
        (0..8).fold(0, |value, _| (value << 8) | self.next() as u64)
    }
}

/// What the steps have made.
struct World {
    pair: (Bdf, Bdf),
    verbs: Option<Verbs>,
    files: Vec<File>,
    uars: Vec<Uar>,
    dmabufs: Vec<OwnedFd>,
    handles: Vec<u32>,
    offsets: Vec<u64>,
    mappings: Vec<(usize, usize)>,
    eventfd: OwnedFd,
}

/// One of several, or nothing where there is none.
fn pick<T>(things: &[T], which: usize) -> Option<&T> {
    things.get(which % things.len().max(1))
}

fn keep<T>(things: &mut Vec<T>, thing: T) {
    if things.len() == MOST {
        things.remove(0);
    }
    things.push(thing);
}

/// Runs a program in this process.
pub fn interpret(pair: (Bdf, Bdf), program: &[u8]) {
    // SAFETY: a new descriptor.
    let eventfd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_NONBLOCK)) };
    let mut world = World {
        pair,
        verbs: None,
        files: Vec::new(),
        uars: Vec::new(),
        dmabufs: Vec::new(),
        handles: Vec::new(),
        offsets: Vec::new(),
        mappings: Vec::new(),
        eventfd,
    };
    world.run(&mut Bytes(program));
}

macro_rules! argument {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let mut argument = $type::default();
        argument.size = size_of::<$type>() as u32;
        $(argument.$field = $value;)*
        argument
    }};
}

impl World {
    fn run(&mut self, bytes: &mut Bytes<'_>) {
        while let Some(step) = bytes.byte() {
            self.step(step % STEPS, bytes);
        }
    }

    fn call<T>(&self, file: usize, command: u32, argument: &mut T) -> bool {
        let Some(file) = pick(&self.files, file) else {
            return false;
        };
        // SAFETY: the argument is the command's.
        unsafe { ioctl(file, command, ptr::from_mut(argument).cast()) }.is_ok()
    }

    /// A descriptor that the step may be given: of the right kind, or of another.
    fn descriptor(&self, which: usize, right: Option<i32>) -> i32 {
        match which % 8 {
            4 => -1,
            5 => self.eventfd.as_raw_fd(),
            6 => self.files.first().map_or(0, AsRawFd::as_raw_fd),
            7 => 1000,
            _ => right.unwrap_or(-1),
        }
    }

    fn step(&mut self, step: u8, bytes: &mut Bytes<'_>) {
        match step {
            OPEN => {
                let node = OpenOptions::new().read(true).write(true).open("/dev/ibgda");
                keep(&mut self.files, node.expect("open /dev/ibgda"));
            }
            DUP => {
                let file = pick(&self.files, bytes.next()).and_then(|file| file.try_clone().ok());
                if let Some(file) = file {
                    keep(&mut self.files, file);
                }
            }
            CLOSE => {
                if !self.files.is_empty() {
                    self.files.remove(bytes.next() % self.files.len());
                }
            }
            FDINFO => {
                if let Some(file) = pick(&self.files, bytes.next()) {
                    let _ = fs::read(format!("/proc/self/fdinfo/{}", file.as_raw_fd()));
                }
            }
            BIND | REBIND => self.bind(step == BIND, bytes),
            UAR => self.uar(bytes),
            DESTROY => {
                if let (Some(verbs), false) = (&self.verbs, self.uars.is_empty()) {
                    let uar = self.uars.remove(bytes.next() % self.uars.len());
                    let _ = destroy_uar(verbs.uverbs(), uar.handle);
                }
            }
            CLOSE_DMABUF => {
                if !self.dmabufs.is_empty() {
                    self.dmabufs.remove(bytes.next() % self.dmabufs.len());
                }
            }
            IMPORT | QUEUE => self.grant(step == IMPORT, bytes),
            RELEASE => {
                let file = bytes.next();
                let handle = self.handle(bytes.next());
                let mut release = argument!(ibgda_release { handle: handle });
                self.call(file, IBGDA_IOC_RELEASE, &mut release);
            }
            STATUS => {
                let mut map = argument!(ibgda_status_map {});
                if self.call(bytes.next(), IBGDA_IOC_STATUS, &mut map) {
                    keep(&mut self.offsets, map.mmap_offset);
                }
            }
            EVENTFD => {
                let file = bytes.next();
                let fd = self.descriptor(bytes.next(), Some(self.eventfd.as_raw_fd()));
                self.call(
                    file,
                    IBGDA_IOC_EVENTFD,
                    &mut argument!(ibgda_eventfd { fd: fd }),
                );
            }
            EVENTS => {
                let (file, capacity) = (bytes.next(), bytes.next());
                let mut room = vec![ibgda_event::default(); capacity.min(64)];
                let records = match bytes.next() % 4 {
                    3 => self.address(bytes),
                    _ => room.as_mut_ptr() as u64,
                };
                let mut events = argument!(ibgda_events {
                    records: records,
                    // Never more than there is room for where it is ours.
                    capacity: if capacity > 64 { 0 } else { capacity as u32 },
                });
                self.call(file, IBGDA_IOC_EVENTS, &mut events);
            }
            MAP => self.map(bytes),
            UNMAP | ADVISE | REMAP | PROTECT => self.change(step, bytes),
            POPULATE => {
                let file = bytes.next();
                let handle = self.handle(bytes.next());
                let address = self.address(bytes);
                let mut populate = argument!(ibgda_populate {
                    handle: handle,
                    address: address,
                });
                self.call(file, IBGDA_IOC_POPULATE, &mut populate);
            }
            STORE | LOAD => self.access(step == STORE, bytes),
            FORK => self.fork(bytes),
            THREAD => self.thread(bytes),
            RAW => self.raw(bytes),
            FAIL => {
                // The n-th chance from now on to fail, in this task, does (CONFIG_FAULT_INJECTION).
                let _ = fs::write("/proc/thread-self/fail-nth", bytes.next().to_string());
            }
            _ => {}
        }
    }

    fn bind(&self, first: bool, bytes: &mut Bytes<'_>) {
        let (file, how) = (bytes.next(), bytes.next());
        let function = |bdf: Bdf| ibgda_bdf {
            domain: bdf.domain,
            bus: bdf.bus,
            device: bdf.device,
            function: bdf.function,
            reserved: 0,
        };
        let (gpu, nic) = (function(self.pair.0), function(self.pair.1));
        let mut argument = argument!(ibgda_bind {});
        match how % 8 {
            6 => (argument.gpu, argument.nic) = (nic, gpu),
            7 => {
                argument.gpu = gpu;
                argument.nic = ibgda_bdf {
                    domain: bytes.next() as u32,
                    bus: bytes.next() as u8,
                    device: bytes.next() as u8,
                    function: bytes.next() as u8,
                    reserved: bytes.next() as u8,
                };
            }
            _ if first => (argument.gpu, argument.nic) = (gpu, nic),
            _ => {}
        }
        let command = if first {
            IBGDA_IOC_BIND
        } else {
            IBGDA_IOC_REBIND
        };
        self.call(file, command, &mut argument);
    }

    fn uar(&mut self, bytes: &mut Bytes<'_>) {
        if self.verbs.is_none() {
            self.verbs = Verbs::try_open(self.pair.1);
        }
        let Some(verbs) = &self.verbs else {
            return;
        };
        let kind = match bytes.next() % 4 {
            3 => UarType::BlueFlame,
            _ => UarType::NonCached,
        };
        let Ok(uar) = alloc_uar(verbs.uverbs(), kind) else {
            return;
        };
        if let Ok(dmabuf) = export_dmabuf(verbs.uverbs(), uar.mmap_offset) {
            keep(&mut self.dmabufs, dmabuf);
        }
        keep(&mut self.uars, uar);
    }

    fn grant(&mut self, import: bool, bytes: &mut Bytes<'_>) {
        let file = bytes.next();
        let mem_type = |which: usize, usual| match which % 8 {
            5 => IBGDA_MEM_WC,
            6 => IBGDA_MEM_WB,
            7 => which as u32,
            _ => usual,
        };
        let (handle, offset) = if import {
            let dmabuf = pick(&self.dmabufs, bytes.next()).map(AsRawFd::as_raw_fd);
            let uverbs = self.verbs.as_ref().map(|verbs| verbs.uverbs().as_raw_fd());
            let mut import = argument!(ibgda_doorbell_import {
                dmabuf_fd: self.descriptor(bytes.next(), dmabuf),
                uverbs_fd: self.descriptor(bytes.next(), uverbs),
                mem_type: mem_type(bytes.next(), IBGDA_MEM_UC),
            });
            if !self.call(file, IBGDA_IOC_DOORBELL_IMPORT, &mut import) {
                return;
            }
            (import.handle, import.mmap_offset)
        } else {
            let pages = bytes.next() as u64;
            let mut queue = argument!(ibgda_queue_alloc {
                length: match pages % 16 {
                    14 => pages,
                    15 => (64 << 20) + pages,
                    _ => pages * PAGE as u64,
                },
                node: [-1, 0, -1, 1, -2, 64, -1, 0][bytes.next() % 8],
                mem_type: mem_type(bytes.next(), IBGDA_MEM_WB),
            });
            if !self.call(file, IBGDA_IOC_QUEUE_ALLOC, &mut queue) {
                return;
            }
            (queue.handle, queue.mmap_offset)
        };
        keep(&mut self.handles, handle);
        keep(&mut self.offsets, offset);
    }

    fn handle(&self, which: usize) -> u32 {
        match which % 8 {
            7 => which as u32,
            _ => *pick(&self.handles, which).unwrap_or(&0),
        }
    }

    /// An address: of a mapping, near one, of our memory, or of none.
    fn address(&self, bytes: &mut Bytes<'_>) -> u64 {
        static READ_ONLY: [u64; 512] = [0; 512];
        let which = bytes.next();
        let mapped = pick(&self.mappings, which / 8).map_or(0, |(address, _)| *address as u64);
        match which % 8 {
            4 => mapped + bytes.next() as u64,
            5 => mapped + PAGE as u64,
            6 => READ_ONLY.as_ptr() as u64,
            7 => bytes.wide(),
            _ => mapped,
        }
    }

    fn map(&mut self, bytes: &mut Bytes<'_>) {
        let file = bytes.next();
        let which = bytes.next();
        let offset = match which % 8 {
            5 => bytes.wide() & !(PAGE as u64 - 1),
            6 => (bytes.next() * PAGE) as u64,
            7 => pick(&self.offsets, which / 8).map_or(0, |offset| offset + PAGE as u64),
            _ => *pick(&self.offsets, which / 8).unwrap_or(&0),
        };
        let length = [1, 1, 1, 2, 4, 0, 64, 1 << 20][bytes.next() % 8] * PAGE;
        let prot = [3, 3, 1, 2, 7, 0, 3, 5][bytes.next() % 8];
        let flags = [
            libc::MAP_SHARED,
            libc::MAP_SHARED | libc::MAP_POPULATE,
            libc::MAP_PRIVATE,
            libc::MAP_SHARED | libc::MAP_LOCKED,
        ][bytes.next() % 4];
        let Some(file) = pick(&self.files, file) else {
            return;
        };
        // SAFETY: a new mapping, where the kernel likes.
        let address = unsafe {
            let offset = offset as libc::off_t;
            libc::mmap(
                ptr::null_mut(),
                length,
                prot,
                flags,
                file.as_raw_fd(),
                offset,
            )
        };
        if address != libc::MAP_FAILED {
            keep(&mut self.mappings, (address as usize, length));
        }
    }

    /// Does something to a mapping.
    fn change(&mut self, step: u8, bytes: &mut Bytes<'_>) {
        if self.mappings.is_empty() {
            return;
        }
        let which = bytes.next() % self.mappings.len();
        let (address, length) = self.mappings[which];
        let how = bytes.next();
        let at = address as *mut libc::c_void;
        // SAFETY: only ranges of the broker's mappings are changed, and nothing but the steps uses those.
        unsafe {
            match step {
                UNMAP => {
                    libc::munmap(at, if how % 4 == 3 { PAGE } else { length });
                    self.mappings.remove(which);
                }
                ADVISE => {
                    let advice = [
                        libc::MADV_DONTFORK,
                        libc::MADV_DOFORK,
                        libc::MADV_DONTNEED,
                        libc::MADV_WILLNEED,
                        libc::MADV_REMOVE,
                        libc::MADV_DODUMP,
                        libc::MADV_POPULATE_WRITE,
                        libc::MADV_MERGEABLE,
                    ];
                    libc::madvise(at, length, advice[how % 8]);
                }
                REMAP => {
                    let longer = [length, length + PAGE, PAGE, length * 2][how % 4];
                    let moved = libc::mremap(at, length, longer, libc::MREMAP_MAYMOVE);
                    if moved != libc::MAP_FAILED {
                        self.mappings[which] = (moved as usize, longer);
                    }
                }
                _ => {
                    libc::mprotect(at, length, [3, 1, 7, 0][how % 4]);
                }
            }
        }
    }

    /// Stores or loads by a system call, so that an access that faults is an error.
    fn access(&self, store: bool, bytes: &mut Bytes<'_>) {
        let Some((address, length)) = pick(&self.mappings, bytes.next()).copied() else {
            return;
        };
        let at = address + (bytes.next() * 8) % length.max(8);
        let mut word = 0_u64.to_ne_bytes();
        let [mut ours, mut theirs] = [
            libc::iovec {
                iov_base: word.as_mut_ptr().cast(),
                iov_len: 8,
            },
            libc::iovec {
                iov_base: at as *mut libc::c_void,
                iov_len: 8,
            },
        ];
        if store {
            std::mem::swap(&mut ours, &mut theirs);
        }
        // SAFETY: a pipe of our own; the kernel checks both addresses.
        unsafe {
            let mut ends = [0; 2];
            if libc::pipe(ends.as_mut_ptr()) != 0 {
                return;
            }
            // From the one into the pipe, from the pipe into the other.
            if libc::writev(ends[1], &theirs, 1) == 8 {
                libc::readv(ends[0], &ours, 1);
            }
            libc::close(ends[0]);
            libc::close(ends[1]);
        }
    }

    /// Has a child do the next steps.
    fn fork(&mut self, bytes: &mut Bytes<'_>) {
        let steps = bytes.next() % 8;
        // SAFETY: the child only makes system calls, as a program does anyway, and ends.
        match unsafe { libc::fork() } {
            -1 => {}
            0 => {
                // SAFETY: no handler is called.
                unsafe { libc::alarm(2) };
                for _ in 0..steps {
                    let Some(step) = bytes.byte() else {
                        break;
                    };
                    self.step(step % STEPS, bytes);
                }
                // SAFETY: nothing of the parent's is to be run at exit.
                unsafe { libc::_exit(0) }
            }
            child => {
                // SAFETY: waits for the child, which its alarm ends.
                unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
            }
        }
    }

    /// Two threads do all the rest, each on its own copy of the descriptors.
    fn thread(&mut self, bytes: &mut Bytes<'_>) {
        let rest = std::mem::take(&mut bytes.0);
        let program = rest.to_vec();
        let pair = self.pair;
        let files: Vec<_> = self.files.iter().map(File::try_clone).collect();
        let dmabufs: Vec<_> = self.dmabufs.iter().map(OwnedFd::try_clone).collect();
        let eventfd = self.eventfd.try_clone().expect("another descriptor");
        let (handles, offsets) = (self.handles.clone(), self.offsets.clone());
        let other = thread::spawn(move || {
            let mut twin = Self {
                pair,
                verbs: None,
                files: files.into_iter().flatten().collect(),
                uars: Vec::new(),
                dmabufs: dmabufs.into_iter().flatten().collect(),
                handles,
                offsets,
                // Each unmaps what it mapped, or it would unmap what is another's meanwhile.
                mappings: Vec::new(),
                eventfd,
            };
            for step in program.chunks(4) {
                let mut bytes = Bytes(step);
                while let Some(step) = bytes.byte() {
                    // No threads of threads, and no copies of a process with two.
                    if !matches!(step % STEPS, THREAD | FORK) {
                        twin.step(step % STEPS, &mut bytes);
                    }
                }
            }
        });
        let mut own = Bytes(rest);
        while let Some(step) = own.byte() {
            if !matches!(step % STEPS, THREAD | FORK) {
                self.step(step % STEPS, &mut own);
            }
        }
        let _ = other.join();
    }

    /// Any command with any argument, at any place.
    fn raw(&self, bytes: &mut Bytes<'_>) {
        let (file, command, size) = (bytes.next(), bytes.next(), bytes.next());
        let mut argument = [0_u64; 32];
        argument[0] = size as u64;
        for word in &mut argument[1..] {
            if bytes.0.is_empty() {
                break;
            }
            *word = bytes.wide();
        }
        let Some(file) = pick(&self.files, file) else {
            return;
        };
        let number = match command {
            0..64 => IBGDA_IOC_INFO - IBGDA_CMD_INFO + command as u32 % 12,
            _ => ((command as u32) << 8) | command as u32,
        };
        // EVENTS writes where its argument says, which is not ours to choose here.
        if number == IBGDA_IOC_EVENTS {
            return;
        }
        let pointer = match size % 8 {
            7 => self.address(bytes) as *mut u8,
            _ => argument.as_mut_ptr().cast(),
        };
        // SAFETY: the longest argument is shorter than ours; addresses that are none of ours are the kernel's to check, and
        // those of mappings hold nothing that anybody relies on.
        let _ = unsafe { ioctl(file, number, pointer) };
    }
}
