// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work queue entries: the segments that the opcode and the service say, each as its own part.

use super::Explanation;
use crate::engine;
use crate::ifc::Field;
use crate::ifc::wqe::{
    BASIC_BLOCK, EXTENDED_ATOMIC, INVALID_LKEY, SEGMENT, atomic, av, ctrl, data, masked_atomic,
    masked_atomic_32, raddr, send as opcode, umr_ctrl,
};
use crate::objects::qp::Service;

/// Walks over a dump.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    e: Explanation,
}

impl<'a> Walk<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            e: Explanation {
                fields: Vec::new(),
                problems: Vec::new(),
            },
        }
    }

    fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at.min(self.bytes.len())..]
    }

    fn part(&mut self, name: &'static str, fields: &[(&'static str, Field)], size: usize) {
        let rest = self.rest();
        let bytes = &rest[..rest.len().min(size)];
        if !bytes.is_empty() {
            self.e.part(name, fields, bytes, self.at);
        }
        self.at += size;
    }

    /// Pointers and inline data up to the end.
    fn data(&mut self) {
        while self.rest().len() >= SEGMENT {
            if data::is_inline.is_set(self.rest()) {
                let count = data::byte_count.get(self.rest()) as usize;
                let inline = (4 + count).next_multiple_of(SEGMENT);
                // The head has the shape of a pointer's first word; what follows is payload, not fields.
                self.e
                    .part("inline", &data::FIELDS[..2], &self.rest()[..4], self.at);
                self.at += inline;
            } else {
                self.part("data", data::FIELDS, SEGMENT);
            }
        }
    }
}

/// A send WQE. Bytes after its `ds` segments are ignored: a dump often holds whole basic blocks.
pub fn send(service: Service, dump: &[u8]) -> Explanation {
    let len = ctrl::ds.get(dump) as usize * SEGMENT;
    let mut walk = Walk::new(&dump[..dump.len().min(len.max(ctrl::SIZE))]);
    let code = ctrl::opcode.get(dump) as u8;
    walk.part("ctrl", ctrl::FIELDS, ctrl::SIZE);
    let connects = service == Service::Dci
        && !matches!(
            code,
            opcode::NOP | opcode::UMR | opcode::LOCAL_INVAL | opcode::DUMP | opcode::MMO
        );
    if connects || service.is_datagram() && code != opcode::NOP {
        let extended = av::extended.is_set(walk.rest());
        walk.part("av", av::FIELDS, if extended { av::SIZE } else { SEGMENT });
    }
    if service == Service::Xrc && code != opcode::NOP {
        walk.part("xrc", &[("xrc_srqn", Field::new(1, 0, 24))], SEGMENT);
    }
    match code {
        opcode::RDMA_WRITE | opcode::RDMA_WRITE_IMM | opcode::RDMA_READ => {
            walk.part("raddr", raddr::FIELDS, raddr::SIZE);
        }
        opcode::ATOMIC_MASKED_CS | opcode::ATOMIC_MASKED_FA
            if ctrl::opmod.get(dump) == u64::from(EXTENDED_ATOMIC) =>
        {
            walk.part("raddr", raddr::FIELDS, raddr::SIZE);
            let (fields, size) = (masked_atomic_32::FIELDS, masked_atomic_32::SIZE);
            walk.part("masked_atomic_32", fields, size);
        }
        opcode::ATOMIC_CS | opcode::ATOMIC_FA | opcode::ATOMIC_MASKED_FA => {
            walk.part("raddr", raddr::FIELDS, raddr::SIZE);
            walk.part("atomic", atomic::FIELDS, atomic::SIZE);
        }
        opcode::ATOMIC_MASKED_CS => {
            walk.part("raddr", raddr::FIELDS, raddr::SIZE);
            walk.part("masked_atomic", masked_atomic::FIELDS, masked_atomic::SIZE);
        }
        opcode::MMO => walk.at += SEGMENT,
        opcode::UMR => walk.part("umr_ctrl", umr_ctrl::FIELDS, umr_ctrl::SIZE),
        _ => {}
    }
    if !matches!(code, opcode::NOP | opcode::LOCAL_INVAL | opcode::UMR) {
        walk.data();
    }
    let mut e = walk.e;
    if len < SEGMENT {
        e.problems.push(format!(
            "ds = {:#x}: a WQE has at least its control segment",
            len / SEGMENT
        ));
    } else if dump.len() < len {
        e.problems.push(format!(
            "ds = {:#x}: {len} bytes, of which {} are given",
            len / SEGMENT,
            dump.len()
        ));
    } else {
        let blocks = len.div_ceil(BASIC_BLOCK) as u16;
        let index = ctrl::wqe_index.get(dump) as u16;
        if let Err((field, value, rule)) = engine::wqe::parse(service, index, blocks, &dump[..len])
        {
            e.problems.push(format!("{field} = {value:#x}: {rule}"));
        }
    }
    e
}

/// A receive WQE: pointers up to the invalid key.
pub fn receive(dump: &[u8]) -> Explanation {
    let used = dump
        .chunks(SEGMENT)
        .take_while(|segment| data::lkey.get32(segment) != INVALID_LKEY);
    let used = used.map(<[u8]>::len).sum::<usize>();
    let with_end = dump.len().min(used + SEGMENT);
    let mut walk = Walk::new(&dump[..with_end]);
    while !walk.rest().is_empty() {
        walk.part("data", data::FIELDS, SEGMENT);
    }
    let mut e = walk.e;
    if dump.len() % SEGMENT != 0 {
        e.problems.push(format!(
            "{} bytes given: a receive WQE consists of 16-byte segments",
            dump.len()
        ));
    }
    for (i, segment) in dump[..used].chunks(SEGMENT).enumerate() {
        if data::is_inline.is_set(segment) {
            e.problems.push(format!(
                "data segment {i}: byte_count has bit 31 set: nothing is inline in a receive WQE"
            ));
        }
    }
    e
}
