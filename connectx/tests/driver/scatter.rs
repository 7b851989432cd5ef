// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data in completions, as mlx5_ib asks for it (`cs_req`, `cs_res`): of READs and atomics in the requester's, of SENDs in
//! the receiver's.

use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe, cqe_opcode, send};

use crate::guest::{Cq, Guest, Qp, REGION, Settings, Shape, guests, pointer, remote};

struct Loop {
    guest: Guest,
    qp: Qp,
    send: Cq,
    receive: Cq,
    key: u32,
    at: u64,
}

impl Loop {
    /// A queue pair connected to itself.
    fn new(entry: u64, scatter: (u64, u64)) -> Result<Self, u8> {
        let mut guest = guests(1).pop().unwrap();
        let pd = guest.alloc(opcode::ALLOC_PD);
        let send = Cq::sized(&mut guest, 4, entry);
        let receive = Cq::sized(&mut guest, 4, entry);
        let shape = Shape {
            scatter,
            ..Shape::default()
        };
        let uar = guest.uar;
        let qp = Qp::shaped(&mut guest, pd, uar, &send, &receive, shape)?;
        qp.connect(&mut guest, Settings::to(1, qp.qpn));
        let (key, at) = guest.region(pd, REGION);
        Ok(Self {
            guest,
            qp,
            send,
            receive,
            key,
            at,
        })
    }

    fn landing(&self) -> u64 {
        self.at + 4096
    }

    /// What is in memory where data may land, after that has been wiped.
    fn wipe(&self) {
        self.guest.ram.set(self.landing(), &[0xee; 128]);
    }

    fn landed(&self, len: usize) -> Vec<u8> {
        self.guest.ram.get(self.landing(), len)
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (1..=len as u8).collect()
}

/// The data that an entry carries: by its format in its first bytes, or in its first half.
fn carried(entry: &[u8], len: usize) -> Option<Vec<u8>> {
    let half = &entry[entry.len() - cqe::SIZE..];
    match cqe::format.get(half) {
        0 => None,
        1 => Some(half[..len].to_vec()),
        2 => Some(entry[..len].to_vec()),
        other => panic!("format {other}"),
    }
}

#[test]
pub fn short_data_comes_in_the_completion_and_only_there() {
    for (entry, scatter, most) in [
        (64, (0x11, 1), 32),
        (128, (0x11, 1), 32),
        (128, (0x22, 2), 64),
    ] {
        let mut l = Loop::new(entry, scatter).unwrap();
        for len in [1, 31, 32, 33, 63, 64, 65] {
            let data = pattern(len);
            let bytes = len as u32;
            l.guest.ram.set(l.at, &data);
            let fits = len <= most;
            let expected = fits.then(|| data.clone());
            let memory = if fits { vec![0xee; len] } else { data };

            l.wipe();
            let read = [remote(l.at, l.key), pointer(bytes, l.key, l.landing())];
            l.qp.post(&l.guest, send::RDMA_READ, 0, &read);
            let cqe = l.send.wait(&l.guest);
            assert_eq!((cqe.opcode, cqe.bytes), (cqe_opcode::REQ, bytes));
            assert_eq!(carried(&l.send.last(&l.guest), len), expected, "READ {len}");
            assert_eq!(l.landed(len), memory, "READ {len}");

            l.wipe();
            l.qp.receive(&l.guest, l.key, l.landing(), 128);
            let data = [pointer(bytes, l.key, l.at)];
            l.qp.post(&l.guest, send::SEND_IMM, 0x1234_5678, &data);
            let cqe = l.receive.wait(&l.guest);
            assert_eq!((cqe.bytes, cqe.immediate), (bytes, 0x1234_5678));
            let last = l.receive.last(&l.guest);
            assert_eq!(carried(&last, len), expected, "SEND {len}");
            assert_eq!(l.landed(len), memory, "SEND {len}");
            l.send.wait(&l.guest);
            assert_eq!(carried(&l.send.last(&l.guest), len), None);
        }
        let start = 40u64.to_be_bytes();
        l.guest.ram.set(l.at, &start);
        l.wipe();
        let mut add = [0; 16];
        add[..8].copy_from_slice(&2u64.to_be_bytes());
        let atomic = [remote(l.at, l.key), add, pointer(8, l.key, l.landing())];
        l.qp.post(&l.guest, send::ATOMIC_FA, 0, &atomic);
        l.send.wait(&l.guest);
        let last = l.send.last(&l.guest);
        assert_eq!(carried(&last, 8).as_deref(), Some(&start[..]));
        assert_eq!(l.landed(8), [0xee; 8]);
        assert_eq!(l.guest.ram.get(l.at, 8), 42u64.to_be_bytes());
    }
}

#[test]
pub fn without_a_completion_or_a_fit_data_goes_to_memory() {
    let mut l = Loop::new(64, (0x11, 1)).unwrap();
    l.guest.ram.set(l.at, &pattern(8));
    l.wipe();
    let read = [remote(l.at, l.key), pointer(8, l.key, l.landing())];
    // A READ without a completion of its own, and a NOP that has one.
    l.qp.put(&l.guest, send::RDMA_READ, 0, 0, &read);
    l.qp.post(&l.guest, send::NOP, 0, &[]);
    l.send.wait(&l.guest);
    assert_eq!(l.landed(8), pattern(8));
    assert_eq!(carried(&l.send.last(&l.guest), 8), None);
    // No data, no format.
    l.qp.receive(&l.guest, l.key, l.landing(), 128);
    l.qp.post(&l.guest, send::SEND, 0, &[]);
    assert_eq!(l.receive.wait(&l.guest).bytes, 0);
    assert_eq!(carried(&l.receive.last(&l.guest), 0), None);
    l.send.wait(&l.guest);
    // A message is no longer than its receive WQE wherever it would go.
    l.qp.receive(&l.guest, l.key, l.landing(), 7);
    l.qp.post(&l.guest, send::SEND, 0, &[pointer(8, l.key, l.at)]);
    assert_eq!(l.receive.wait(&l.guest).syndrome, 0x01);
}

#[test]
pub fn what_does_not_fit_an_entry_is_refused() {
    const BAD_PARAM: u8 = 3;
    for (entry, scatter) in [
        (64, (0x22, 0)),
        (64, (0, 2)),
        (64, (1, 0)),
        (64, (0x33, 0)),
        (64, (0, 0x11)),
        (128, (0, 3)),
    ] {
        let refused = Loop::new(entry, scatter).err();
        assert_eq!(refused, Some(BAD_PARAM), "{entry} {scatter:x?}");
    }
}
