// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutations that know what a program is: whole steps come, go and change places; fields get values that mean something.

use connectx::cmd;
use connectx_guest::BASE;

use crate::program::{Kind, Step, decode, encode};

/// SplitMix64: small, and a seed gives the same mutation again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// A value that some field is sensitive to.
    fn value(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.below(64),
            3 => (1u64 << self.below(64)).wrapping_sub(1),
            // Numbers of objects: UARs, CQs and QPs, SRQs, keys.
            4 => [0x100, 0x101, 0x40, 0x41, 0x42, 0x85a, 0x95a, 0xa00][self.below(8)],
            5 => BASE + (self.next() % (4 << 20)),
            6 => BASE + (self.next() % 1024) * 4096,
            _ => self.next() >> self.below(64),
        }
    }
}

/// Mutates a program in place; gives its new size.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32, kinds: &[Kind]) -> usize {
    let mut random = Random(u64::from(seed));
    let mut steps = decode(&data[..size.min(data.len())], kinds);
    for _ in 0..1 + random.below(3) {
        change(&mut steps, &mut random, kinds);
    }
    let mut bytes = encode(&steps);
    bytes.truncate(max_size.min(data.len()));
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
}

fn change(steps: &mut Vec<Step>, random: &mut Random, kinds: &[Kind]) {
    let count = steps.len();
    let at = random.below(count);
    match random.below(16) {
        _ if count == 0 => steps.push(fresh(random, kinds)),
        0 => steps.insert(random.below(count + 1), fresh(random, kinds)),
        1 => {
            steps.remove(at);
        }
        2 => {
            let step = steps[at].clone();
            steps.insert(random.below(count + 1), step);
        }
        3 => {
            let other = random.below(count);
            steps.swap(at, other);
        }
        4 => head(&mut steps[at], random),
        5..11 => field(&mut steps[at].data, random),
        11 => {
            // A part of another step's data.
            let from = steps[random.below(count)].data.clone();
            let start = random.below(from.len()) & !7;
            let part = from
                .get(start..(start + 16).min(from.len()))
                .unwrap_or_default();
            let data = &mut steps[at].data;
            let to = random.below(data.len()) & !7;
            for (place, byte) in data.iter_mut().skip(to).zip(part) {
                *place = *byte;
            }
        }
        _ => {
            let data = &mut steps[at].data;
            let size = data.len();
            data.resize(size + 1 + random.below(32), 0);
            let room = data.len();
            let size = libfuzzer_sys::fuzzer_mutate(data, size, room);
            data.truncate(size);
        }
    }
}

/// A step of a kind that the target knows.
fn fresh(random: &mut Random, kinds: &[Kind]) -> Step {
    let kind = kinds[random.below(kinds.len())];
    let mut step = Step::new(kind, random.value() as u32, random.below(64) as u32, &[]);
    step.flags = random.below(2) as u8;
    if kind == Kind::Command {
        let known: Vec<_> = cmd::known().collect();
        let (opcode, input, output) = known[random.below(known.len())];
        step.data = opcode.to_be_bytes().to_vec();
        step.data.resize(16, 0);
        step.a = input.max(16) as u32;
        step.b = output as u32 + 16;
    } else if kind != Kind::Run && kind != Kind::Consume {
        step.data.resize([4, 8, 16, 48, 64][random.below(5)], 0);
        field(&mut step.data, random);
    }
    step
}

fn head(step: &mut Step, random: &mut Random) {
    match random.below(4) {
        0 => step.flags = random.next() as u8,
        1 => step.a = random.value() as u32,
        2 => step.b = random.value() as u32,
        _ => step.a = step.a.wrapping_add(random.below(17) as u32).wrapping_sub(8),
    }
}

/// Sets one field-sized piece.
fn field(data: &mut Vec<u8>, random: &mut Random) {
    let width = [1, 1, 2, 3, 4, 4, 8][random.below(7)];
    let at = random.below(data.len() + 8);
    let at = if width == 1 {
        at
    } else {
        at & !(width.min(4) - 1)
    };
    if data.len() < at + width {
        data.resize(at + width, 0);
    }
    let value = random.value().to_be_bytes();
    data[at..at + width].copy_from_slice(&value[8 - width..]);
}
