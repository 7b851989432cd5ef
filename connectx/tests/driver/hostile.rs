// SPDX-License-Identifier: MIT OR Apache-2.0
//! A guest that writes anything anywhere: the model refuses, and neither panics nor hangs.

use connectx::ifc::command::header;
use connectx::platform::Function;

use crate::guest::{Pair, guests};

/// A small generator, so that a failure can be repeated.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Mostly small numbers, sometimes all ones, sometimes noise: what fields with meaning are sensitive to.
    fn byte(&mut self) -> u8 {
        match self.below(8) {
            0 => 0xff,
            1 => self.next() as u8,
            2..4 => self.below(8) as u8,
            _ => 0,
        }
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }
}

/// A command of any content.
pub fn any_input(random: &mut Random) -> Vec<u8> {
    const OPCODES: &[std::ops::Range<u16>] = &[
        // The phase is not to change, or most commands would only be told so.
        0x100..0x102,
        0x106..0x110,
        0x200..0x204,
        0x301..0x304,
        0x400..0x404,
        0x500..0x50f,
        0x705..0x709,
        0x762..0x766,
        0x800..0x810,
        0x904..0x910,
        0xa04..0xa0b,
    ];
    let all: Vec<u16> = OPCODES.iter().cloned().flatten().collect();
    let op = all[random.below(all.len() as u64) as usize];
    let len = [16, 48, 272, 288, 0x200, 4112][random.below(6) as usize];
    let mut input = random.bytes(len);
    header::opcode.set(&mut input, u64::from(op));
    input
}

#[test]
pub fn any_command_is_answered() {
    let mut guest = guests(1).pop().unwrap();
    let mut random = Random(0x1234_5678_9abc_def1);
    for round in 0..6000 {
        let mut input = any_input(&mut random);
        let user = if round % 3 == 0 { random.below(3) } else { 0 };
        header::uid.set(&mut input, user);
        let output = guest.command(input, 16 + random.below(600) as usize);
        assert!(!output.is_empty());
    }
    // It still works.
    guest.bring_up();
}

#[test]
pub fn short_and_long_inputs_are_refused() {
    let mut guest = guests(1).pop().unwrap();
    for op in 0x100..0xb00u16 {
        let mut input = vec![0; 4];
        header::opcode.set(&mut input, u64::from(op));
        if (0x102..=0x105).contains(&op) {
            continue;
        }
        let output = guest.command(input, 16);
        assert_ne!(output[0], 0, "command {op:#x} with 4 bytes");
    }
    // Mailboxes that are not there, or too few for the length.
    let (slot, _) = guest.submit(&[0; 32], 16, 4 << 20);
    assert_ne!(guest.ram.get(slot + 0x3f, 1)[0] >> 1, 0, "delivery fails");
    let (slot, _) = guest.submit(&[0; 32], 16, usize::MAX >> 32);
    assert_ne!(guest.ram.get(slot + 0x3f, 1)[0] >> 1, 0);
    guest.bring_up();
}

#[test]
pub fn any_register_access_is_survived() {
    let guest = guests(1).pop().unwrap();
    let mut random = Random(42);
    for _ in 0..20_000 {
        // Not the command queue's address, nor its doorbell with it: those are covered above.
        let offset = 0x1000 + random.below((32 << 20) + 0x4000);
        let len = [1, 2, 4, 8, 64][random.below(5) as usize];
        if random.below(4) == 0 {
            let mut data = vec![0; len];
            guest.hca.bar_read(0, offset, &mut data);
        } else {
            let data = random.bytes(len);
            guest.hca.bar_write(random.below(2) as usize, offset, &data);
        }
    }
}

#[test]
pub fn any_queue_content_is_survived() {
    let mut random = Random(7);
    for _ in 0..60 {
        wild(&mut Pair::new(), &mut random);
    }
}

/// Work requests of any content, and doorbell records that claim anything.
pub fn wild(pair: &mut Pair, random: &mut Random) {
    let Pair { guests, sides } = pair;
    let [a, b] = sides;
    for _ in 0..16 {
        let segments: Vec<[u8; 16]> = (0..random.below(4))
            .map(|_| match random.below(4) {
                0 => crate::guest::remote(b.at + random.below(64), b.key),
                1 => crate::guest::pointer(random.below(4096) as u32, a.key, a.at),
                _ => random.bytes(16).try_into().unwrap(),
            })
            .collect();
        let op = [0, 1, 8, 9, 10, 11, 16, 17, 18, 20, 21, 27, 37][random.below(13) as usize];
        a.qp.put(
            &guests[0],
            op,
            random.byte(),
            random.next() as u32,
            &segments,
        );
        let len = random.below(5000) as u32;
        b.qp.receive(&guests[1], b.key, b.at, len);
        a.qp.ring(&guests[0], guests[0].uar);
    }
    let record = (random.next() as u32).to_be_bytes();
    guests[0].ram.set(a.qp.dbr + 4, &record);
    guests[0].ram.set(a.qp.dbr, &record);
    a.qp.ring(&guests[0], guests[0].uar);
    a.send.poll(&guests[0]);
}

#[test]
pub fn memory_that_is_gone_is_a_counted_fault() {
    let Pair { guests, mut sides } = Pair::new();
    let [a, b] = &mut sides;
    guests[0].hca.bus_master(false);
    let segments = [
        crate::guest::remote(b.at, b.key),
        crate::guest::pointer(4, a.key, a.at),
    ];
    a.qp.post(&guests[0], 8, 0, &segments);
    assert!(guests[0].count("dma_faults") > 0);
    assert_eq!(a.send.poll(&guests[0]), None);
}
