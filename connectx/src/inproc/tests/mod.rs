// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that drive queues by plain stores, as the PRM and rdma-core's mlx5dv.h have them.

mod data;
mod doorbells;
mod queues;

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::{Access, Fabric, Memory, Nic, Options, Qp, QpSpec};

/// Longer than anything here takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(30);
/// `opcode` of CQEs.
const REQ: u8 = 0x0;
const REQ_ERR: u8 = 0xd;
/// `MLX5_CQE_SYNDROME_*`.
const LOCAL_QP_OP: u8 = 0x02;
const LOCAL_PROT: u8 = 0x04;
const REMOTE_ACCESS: u8 = 0x13;
/// Opcodes of WQEs.
const SEND: u8 = 0x0a;
const WRITE: u8 = 0x08;
const READ: u8 = 0x10;

/// What a completion queue entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cqe {
    opcode: u8,
    counter: u16,
    syndrome: u8,
}

/// A piece of memory: address, key, bytes.
type Piece = (u64, u32, u32);

/// The program's side of a queue pair.
struct Queue {
    qp: Qp,
    posted: u64,
    taken: u64,
}

impl Queue {
    fn slot(&self, index: u64) -> u64 {
        self.qp.send_ring + (index & u64::from(self.qp.spec.send_depth - 1)) * 64
    }

    /// Writes a WQE whose completion is signalled into the next slot, and tells nobody.
    fn post(&mut self, opcode: u8, remote: Option<(u64, u32)>, pieces: &[Piece]) {
        let mut words = [0u64; 8];
        let mut segments = 1;
        if let Some((address, rkey)) = remote {
            words[2..4].copy_from_slice(&[address, u64::from(rkey) << 32]);
            segments += 1;
        }
        for &(address, key, len) in pieces {
            let at = segments as usize * 2;
            words[at] = (u64::from(len) << 32) | u64::from(key);
            words[at + 1] = address;
            segments += 1;
        }
        let index = self.posted & 0xffff;
        words[0] =
            (index << 40) | (u64::from(opcode) << 32) | (u64::from(self.qp.qpn) << 8) | segments;
        words[1] = 8 << 32;
        let slot = self.slot(self.posted);
        for (i, word) in words.iter().enumerate() {
            quad(slot + 8 * i as u64).store(word.to_be(), Ordering::Relaxed);
        }
        self.posted += 1;
    }

    /// Stores the send counter of the doorbell record.
    fn record(&self, index: u64) {
        word(self.qp.record + 4).store((index as u32 & 0xffff).to_be(), Ordering::Release);
    }

    /// The doorbell for an index.
    fn doorbell(&self, index: u64) -> u64 {
        (((index & 0xffff) << 40) | (u64::from(self.qp.qpn) << 8)).to_be()
    }

    /// Announces all that is posted.
    fn ring(&self) {
        self.record(self.posted);
        fence(Ordering::SeqCst);
        quad(self.qp.doorbell).store(self.doorbell(self.posted), Ordering::Release);
    }

    /// Takes a completion of the send queue, if there is one.
    fn poll(&mut self) -> Option<Cqe> {
        let depth = u64::from(self.qp.spec.send_depth);
        let entry = self.qp.send_cq_ring + (self.taken & (depth - 1)) * 64;
        let cqe = read(entry, self.taken / depth)?;
        self.taken += 1;
        word(self.qp.send_cq_record)
            .store((self.taken as u32 & 0xff_ffff).to_be(), Ordering::Release);
        Some(cqe)
    }

    fn wait(&mut self) -> Cqe {
        until(|| self.poll())
    }

    /// Waits for a success of the WQE with an index.
    fn done(&mut self, index: u64) {
        let (opcode, counter, syndrome) = (REQ, index as u16, 0);
        let expected = Cqe {
            opcode,
            counter,
            syndrome,
        };
        assert_eq!(self.wait(), expected);
    }

    /// Waits for a failure.
    fn failed(&mut self) -> u8 {
        let cqe = self.wait();
        assert_eq!(cqe.opcode, REQ_ERR, "{cqe:?}");
        cqe.syndrome
    }
}

/// The entry at an address, if it is valid in a round of its queue.
fn read(entry: u64, round: u64) -> Option<Cqe> {
    let byte = |offset: u64| {
        // SAFETY: entries lie in queues that their test keeps.
        unsafe { &*((entry + offset) as *const AtomicU8) }
    };
    let own = byte(63).load(Ordering::Acquire);
    if own >> 4 == 0xf || u64::from(own & 1) != round & 1 {
        return None;
    }
    let get = |offset| byte(offset).load(Ordering::Relaxed);
    Some(Cqe {
        opcode: own >> 4,
        counter: u16::from_be_bytes([get(60), get(61)]),
        syndrome: if own >> 4 == REQ_ERR { get(55) } else { 0 },
    })
}

fn quad(addr: u64) -> &'static AtomicU64 {
    assert_eq!(addr % 8, 0);
    // SAFETY: only called for places in queues and UAR pages that their test keeps.
    unsafe { &*(addr as *const AtomicU64) }
}

fn word(addr: u64) -> &'static AtomicU32 {
    assert_eq!(addr % 4, 0);
    // SAFETY: as in `quad`.
    unsafe { &*(addr as *const AtomicU32) }
}

/// Tries until there is a result.
fn until<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(Instant::now() < deadline, "nothing within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Time in which the engine would have done what it must not do: it looks every few milliseconds at least.
fn settle() {
    std::thread::sleep(Duration::from_millis(20));
}

/// Two functions, a buffer with a key on each.
struct Rig {
    fabric: Fabric,
    pds: [u32; 2],
    buffers: [Memory; 2],
    keys: [u32; 2],
}

const LEN: usize = 2 << 20;

impl Rig {
    fn new() -> Self {
        let fabric = Fabric::new(&Options::default()).unwrap();
        let pds = [0, 1].map(|i| fabric.nics()[i].alloc_pd().unwrap());
        let buffers = [0, 1].map(|_| fabric.alloc(LEN).unwrap());
        let keys = [0, 1].map(|i| {
            let nic = &fabric.nics()[i];
            nic.create_mkey(pds[i], buffers[i].addr(), LEN as u64, Access::ALL)
                .unwrap()
        });
        Self {
            fabric,
            pds,
            buffers,
            keys,
        }
    }

    fn nic(&self, i: usize) -> &Nic {
        &self.fabric.nics()[i]
    }

    fn connect(&self, a: u32, b: u32) {
        for (i, qpn, peer) in [(0, a, b), (1, b, a)] {
            let peer = super::Peer::new(self.nic(1 - i).lid(), peer);
            self.nic(i).connect(qpn, &peer).unwrap();
        }
    }

    /// A queue pair of the first function that is connected to one of the second.
    fn pair(&self, spec: QpSpec) -> [Queue; 2] {
        let queues = [0, 1].map(|i| Queue {
            qp: self.nic(i).open_qp(self.pds[i], &spec).unwrap(),
            posted: 0,
            taken: 0,
        });
        self.connect(queues[0].qp.qpn, queues[1].qp.qpn);
        queues
    }

    fn queue(&self, send_depth: u32) -> Queue {
        let spec = QpSpec {
            send_depth,
            ..QpSpec::default()
        };
        let [a, _] = self.pair(spec);
        a
    }

    /// Posts a WRITE of 8 bytes.
    fn write(&self, queue: &mut Queue) {
        let remote = (self.buffers[1].addr(), self.keys[1]);
        let local = (self.buffers[0].addr(), self.keys[0], 8);
        queue.post(WRITE, Some(remote), &[local]);
    }

    /// Counters of the first function that are not 0, of those that tell of something wrong.
    fn wrong(&self) -> Vec<(&'static str, u64)> {
        let names = [
            "torn_wqes",
            "doorbells_ahead",
            "foreign_doorbells",
            "lost_doorbells",
            "stale_doorbells",
            "dma_faults",
            "cq_overruns",
            "error_cqes",
        ];
        let mut counts = self.nic(0).counts();
        counts.retain(|(name, count)| *count > 0 && names.contains(name));
        counts
    }
}
