// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data of any size, from and to memory of any kind, over links good and bad.

use std::fs::File;

use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::inproc::{PAGE, Place};

/// A byte that tells places apart, also in different pages.
fn pattern(at: usize) -> u8 {
    (at ^ (at >> 8) ^ (at >> 16)) as u8
}

fn fill(memory: &Memory, seed: usize) {
    let bytes: Vec<u8> = (0..memory.len()).map(|at| pattern(at + seed)).collect();
    memory.write(0, &bytes);
}

fn bytes(memory: &Memory, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(offset, &mut bytes);
    bytes
}

/// A WRITE from two pieces and a READ to two pieces of lengths around every border there is.
fn both_ways(rig: &Rig, q: &mut Queue, lengths: &[usize]) {
    for (round, &len) in lengths.iter().enumerate() {
        fill(&rig.buffers[0], round);
        rig.buffers[1].write(0, &vec![0; len + 64]);
        let (base, key) = (rig.buffers[0].addr(), rig.keys[0]);
        let first = len / 3;
        let pieces = [
            (base + 5, key, first as u32),
            (base + (1 << 20) + 3, key, (len - first) as u32),
        ];
        let remote = (rig.buffers[1].addr() + 7, rig.keys[1]);
        q.post(WRITE, Some(remote), &pieces);
        q.ring();
        q.done(q.posted - 1);
        let mut sent = bytes(&rig.buffers[0], 5, first);
        sent.extend(bytes(&rig.buffers[0], (1 << 20) + 3, len - first));
        assert!(bytes(&rig.buffers[1], 7, len) == sent, "WRITE of {len}");
        assert_eq!(bytes(&rig.buffers[1], 7 + len, 8), [0; 8], "and no more");
        rig.buffers[0].write(0, &vec![0; LEN]);
        q.post(READ, Some(remote), &pieces);
        q.ring();
        q.done(q.posted - 1);
        let mut read = bytes(&rig.buffers[0], 5, first);
        read.extend(bytes(&rig.buffers[0], (1 << 20) + 3, len - first));
        assert!(read == sent, "READ of {len}");
    }
}

const LENGTHS: [usize; 10] = [
    2, 511, 513, 1536, 4096, 4097, 8192, 262_143, 262_145, 1_000_000,
];

#[test]
fn every_length_arrives() {
    let rig = Rig::new();
    both_ways(&rig, &mut rig.queue(16), &LENGTHS);
    assert_eq!(rig.wrong(), []);
}

#[test]
fn every_length_arrives_over_a_bad_link() {
    let rig = Rig::new();
    for i in [0, 1] {
        rig.nic(i).steer("link", "loss 20000").unwrap();
    }
    both_ways(&rig, &mut rig.queue(16), &LENGTHS);
    assert!(rig.nic(0).count("packets_lost") > 0);
    for i in [0, 1] {
        rig.nic(i).steer("link", "loss 0").unwrap();
        rig.nic(i).steer("link", "delay 50").unwrap();
    }
    both_ways(&rig, &mut rig.queue(16), &LENGTHS);
    for i in [0, 1] {
        rig.nic(i).steer("link", "rate 2000").unwrap();
    }
    both_ways(&rig, &mut rig.queue(16), &LENGTHS);
}

#[test]
fn a_link_may_get_worse_and_better_while_it_carries() {
    let rig = Rig::new();
    let mut q = rig.queue(16);
    let piece = (rig.buffers[0].addr(), rig.keys[0], 1_000_001);
    let remote = (rig.buffers[1].addr(), rig.keys[1]);
    for round in 0..30 {
        fill(&rig.buffers[0], round);
        q.post(WRITE, Some(remote), &[piece]);
        q.ring();
        for (i, link) in [
            (0, "loss 50000"),
            (1, "loss 100000"),
            (0, "delay 10"),
            (1, "rate 10000"),
        ] {
            rig.nic(i).steer("link", link).unwrap();
            std::thread::yield_now();
        }
        for (i, link) in [(0, "loss 0"), (1, "loss 0"), (0, "delay 0"), (1, "rate 0")] {
            rig.nic(i).steer("link", link).unwrap();
        }
        q.done(q.posted - 1);
        let sent = bytes(&rig.buffers[0], 0, 1_000_001);
        assert!(bytes(&rig.buffers[1], 0, 1_000_001) == sent);
    }
}

#[test]
fn a_long_send_takes_one_receive() {
    let rig = Rig::new();
    let spec = QpSpec {
        send_depth: 16,
        recv_depth: 4,
        collapsed: false,
    };
    let [mut a, b] = rig.pair(spec);
    fill(&rig.buffers[0], 0);
    let entry = (1_000_000u64 << 32) | u64::from(rig.keys[1]);
    quad(b.qp.recv_ring).store(entry.to_be(), Ordering::Relaxed);
    quad(b.qp.recv_ring + 8).store(rig.buffers[1].addr().to_be(), Ordering::Relaxed);
    word(b.qp.record).store(1u32.to_be(), Ordering::Release);
    a.post(SEND, None, &[(rig.buffers[0].addr(), rig.keys[0], 999_999)]);
    a.ring();
    a.done(0);
    let cqe = until(|| read(b.qp.recv_cq_ring, 0));
    assert_eq!((cqe.opcode, cqe.counter), (2, 0));
    let sent = bytes(&rig.buffers[0], 0, 999_999);
    assert!(bytes(&rig.buffers[1], 0, 999_999) == sent);
}

#[test]
fn memory_that_is_not_registered_is_the_fault_of_its_side() {
    // 8 bytes are copied, the others lent.
    for len in [8u32, 1_000_000] {
        let rig = Rig::new();
        let outside = MmapRaw::from(MmapOptions::new().len(1 << 20).map_anon().unwrap());
        let addr = outside.as_mut_ptr() as u64;
        let keys = [0, 1].map(|i| {
            rig.nic(i)
                .create_mkey(rig.pds[i], addr, 1 << 20, Access::ALL)
                .unwrap()
        });
        let mut q = rig.queue(16);
        let remote = (rig.buffers[1].addr(), rig.keys[1]);
        q.post(WRITE, Some(remote), &[(addr, keys[0], len)]);
        q.ring();
        assert_eq!(q.failed(), LOCAL_PROT);
        assert_eq!(bytes(&rig.buffers[1], 0, 8), [0; 8]);
        for opcode in [WRITE, READ] {
            let mut q = rig.queue(16);
            let local = (rig.buffers[0].addr(), rig.keys[0], len);
            q.post(opcode, Some((addr, keys[1])), &[local]);
            q.ring();
            assert_eq!(q.failed(), REMOTE_ACCESS, "opcode {opcode:#x}");
        }
        assert!(rig.nic(0).count("dma_faults") > 0 && rig.nic(1).count("dma_faults") > 0);
    }
}

#[test]
fn nothing_touches_memory_once_it_was_taken_back() {
    // Whichever side is taken back while megabytes move: its pages are unmapped at once, so that a late access would kill us.
    for side in [0, 1] {
        for round in 0..20 {
            let rig = Rig::new();
            let outside = MmapRaw::from(MmapOptions::new().len(1 << 20).map_anon().unwrap());
            let addr = outside.as_mut_ptr();
            // SAFETY: it is mapped until `unregister` has returned.
            unsafe { rig.fabric.register(addr, 1 << 20) }.unwrap();
            let mut pieces = [0, 1].map(|i| (rig.buffers[i].addr(), rig.keys[i]));
            let key = rig
                .nic(side)
                .create_mkey(rig.pds[side], addr as u64, 1 << 20, Access::ALL);
            pieces[side] = (addr as u64, key.unwrap());
            let mut q = rig.queue(16);
            let opcode = if round % 2 == 0 { WRITE } else { READ };
            let (addr0, key0) = pieces[0];
            for _ in 0..16 {
                q.post(opcode, Some(pieces[1]), &[(addr0, key0, 1 << 20)]);
            }
            q.ring();
            for _ in 0..round * 20 {
                std::hint::spin_loop();
            }
            assert!(rig.fabric.unregister(addr));
            drop(outside);
            let failure = until(|| q.poll().filter(|cqe| cqe.opcode != REQ || q.taken == 16));
            let expected = if side == 0 { LOCAL_PROT } else { REMOTE_ACCESS };
            assert!(
                failure.opcode == REQ || failure.syndrome == expected,
                "{failure:?}"
            );
        }
    }
}

#[test]
fn queues_and_data_may_lie_in_a_memfd_from_outside() {
    let rig = Rig::new();
    let spec = QpSpec {
        send_depth: 16,
        ..QpSpec::default()
    };
    let len = spec.bytes() + PAGE;
    let file = File::from(memfd_create("outside", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(len as u64).unwrap();
    let map = MmapOptions::new().len(len).map_raw(&file).unwrap();
    // SAFETY: `map` is mapped until the registration has ended.
    unsafe { rig.fabric.register(map.as_mut_ptr(), len) }.unwrap();
    let place = Place {
        block: map.as_mut_ptr(),
        uar: None,
    };
    // SAFETY: it stays mapped until the queue pair is closed.
    let qp = unsafe { rig.nic(0).open_qp_at(rig.pds[0], &spec, &place) }.unwrap();
    let data = map.as_mut_ptr() as u64 + spec.bytes() as u64;
    let key = rig
        .nic(0)
        .create_mkey(rig.pds[0], data, PAGE as u64, Access::ALL)
        .unwrap();
    let peer = rig.nic(1).open_qp(rig.pds[1], &spec).unwrap();
    rig.connect(qp.qpn, peer.qpn);
    let (posted, taken) = (0, 0);
    let mut q = Queue { qp, posted, taken };
    // What others see of the file is what counts.
    let other = MmapOptions::new().len(len).map_raw(&file).unwrap();
    let there = other.as_mut_ptr() as u64 + spec.bytes() as u64;
    quad(there).store(0x0123_4567_89ab_cdef, Ordering::SeqCst);
    let remote = (rig.buffers[1].addr(), rig.keys[1]);
    q.post(WRITE, Some(remote), &[(data, key, 8)]);
    q.post(READ, Some(remote), &[(data + 8, key, 8)]);
    q.ring();
    q.done(0);
    q.done(1);
    assert_eq!(
        bytes(&rig.buffers[1], 0, 8),
        0x0123_4567_89ab_cdefu64.to_ne_bytes()
    );
    assert_eq!(
        quad(there + 8).load(Ordering::SeqCst),
        0x0123_4567_89ab_cdef
    );
    rig.nic(0).close_qp(&q.qp).unwrap();
    assert!(rig.fabric.unregister(map.as_mut_ptr()));
    assert_eq!(rig.wrong(), []);
}
