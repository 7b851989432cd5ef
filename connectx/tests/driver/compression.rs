// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compressed completions, read back by the test driver's own decompressor (`Cq::poll`).

use std::collections::VecDeque;

use connectx::hca::{Hca, HcaConfig};
use connectx::ifc::context::cqc;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::log::Referee;
use connectx::platform::Function;
use connectx::wire::Fabric;

use crate::guest::{Cq, Guest, Qp, Settings, Shape, Side, Srq, guests, pointer, remote};
use crate::hostile::Random;

const HASH: u64 = 0;
const CHECKSUM: u64 = 1;
const STRIDE: u64 = 3;
/// `cqe_compression_max_num` of the model.
const MOST: usize = 24;

fn compressed(c: &mut [u8], format: u64, cqe_sz: u64) {
    cqc::cqe_comp_en.set(c, 1);
    cqc::mini_cqe_res_format.set(c, format);
    cqc::cqe_sz.set(c, cqe_sz);
}

/// What is sent.
#[derive(Debug, Clone, Copy)]
struct Message {
    op: u8,
    len: u32,
    immediate: u32,
    solicited: bool,
}

impl Message {
    fn plain(len: u32) -> Self {
        Self {
            op: send::SEND,
            len,
            immediate: 0,
            solicited: false,
        }
    }

    /// Opcode of its completion.
    fn completes_as(&self) -> u8 {
        match self.op {
            send::SEND => cqe_opcode::RESP_SEND,
            send::SEND_IMM => cqe_opcode::RESP_SEND_IMM,
            _ => cqe_opcode::RESP_WR_IMM,
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        (self.op, self.immediate, self.solicited) == (other.op, other.immediate, other.solicited)
    }
}

/// A queue pair that sends to one whose completions are compressed.
struct Link {
    guests: Vec<Guest>,
    sides: [Side; 2],
    from: Qp,
    to: Qp,
    cq: Cq,
}

impl Link {
    fn new(log: u32, f: impl FnOnce(&mut [u8])) -> Self {
        Self::receiving(log, f, |_, _| None)
    }

    /// The same with a shared receive queue.
    fn receiving(
        log: u32,
        f: impl FnOnce(&mut [u8]),
        srq: impl FnOnce(&mut Guest, u32) -> Option<u32>,
    ) -> Self {
        let mut guests = guests(2);
        let sides = [Side::new(&mut guests[0]), Side::new(&mut guests[1])];
        let cq = Cq::with(&mut guests[1], log, f);
        let shape = Shape {
            log_sq: 6,
            log_rq: 6,
            ..Shape::default()
        };
        let qp = |guest: &mut Guest, side: &Side, receive, shape| {
            Qp::shaped(guest, side.pd, guest.uar, &side.send, receive, shape).unwrap()
        };
        let from = qp(&mut guests[0], &sides[0], &sides[0].receive, shape);
        let srqn = srq(&mut guests[1], sides[1].pd);
        let to = qp(&mut guests[1], &sides[1], &cq, Shape { srqn, ..shape });
        from.connect(&mut guests[0], Settings::to(2, to.qpn));
        to.connect(&mut guests[1], Settings::to(1, from.qpn));
        Self {
            guests,
            sides,
            from,
            to,
            cq,
        }
    }

    /// Posts a receive WQE.
    fn receive(&mut self, len: u32) {
        let side = &self.sides[1];
        self.to.receive(&self.guests[1], side.key, side.at, len);
    }

    /// Sends messages with one doorbell.
    fn send(&mut self, messages: &[Message]) {
        let [a, b] = &self.sides;
        for message in messages {
            let data = pointer(message.len, a.key, a.at);
            let segments = match message.op {
                send::RDMA_WRITE_IMM => vec![remote(b.at, b.key), data],
                _ => vec![data],
            };
            let flags = if message.solicited { 2 } else { 0 };
            let (guest, immediate) = (&self.guests[0], message.immediate);
            self.from
                .put(guest, message.op, flags, immediate, &segments);
        }
        self.from.ring(&self.guests[0], self.guests[0].uar);
    }

    /// Sends messages, for each of which there is a receive WQE.
    fn batch(&mut self, messages: &[Message]) {
        for _ in messages {
            self.receive(4096);
        }
        self.send(messages);
    }

    /// The next completion: opcode, counter, bytes, immediate.
    fn poll(&mut self) -> Option<(u8, u16, u32, u32)> {
        let cqe = self.cq.poll(&self.guests[1])?;
        Some((cqe.opcode, cqe.counter, cqe.bytes, cqe.immediate))
    }
}

fn plain(lens: impl IntoIterator<Item = u32>) -> Vec<Message> {
    lens.into_iter().map(Message::plain).collect()
}

#[test]
fn only_a_title_and_its_arrays_are_written() {
    for (cqe_sz, format) in [(0, HASH), (1, CHECKSUM), (2, STRIDE)] {
        let mut link = Link::new(5, |c| compressed(c, format, cqe_sz));
        link.batch(&plain(100..120));
        let guest = &link.guests[1];
        let entry = |index| link.cq.slot(guest, index);
        for index in 0..32 {
            let whole = entry(index);
            let (first, e) = whole.split_at(whole.len() - 64);
            let written = [0, 1, 8, 16].contains(&index);
            let pad = if written && cqe_sz == 2 { 0 } else { 0xff };
            assert!(first.iter().all(|byte| *byte == pad), "{index}");
            assert_eq!(e != [0xff; 64], written, "{index}");
        }
        let half = |index| entry(index).split_off(if cqe_sz == 0 { 0 } else { 64 });
        let title = half(0);
        // Format 3 in the first lap, as many completions as there are, the first one's counter.
        assert_eq!(title[63], (cqe_opcode::RESP_SEND << 4) | (3 << 2));
        assert_eq!(
            (&title[44..48], &title[60..62]),
            (&[0, 0, 0, 20][..], &[0, 0][..])
        );
        let stride = if format == STRIDE { 9 } else { 0 };
        assert_eq!(half(8)[8..16], [0, 0, 0, stride, 0, 0, 0, 109]);
        assert_eq!(half(16)[32..], [0; 32]);
        for index in 0..20u16 {
            let expected = (cqe_opcode::RESP_SEND, index, 100 + u32::from(index), 0);
            assert_eq!(link.poll(), Some(expected));
        }
        assert_eq!((link.poll(), &link.cq.sessions[..]), (None, &[20][..]));
    }
}

#[test]
fn what_is_unpacked_is_what_was_sent() {
    let mut random = Random(0x77);
    for (round, log) in [1u32, 2, 3, 4, 5, 6]
        .into_iter()
        .cycle()
        .take(18)
        .enumerate()
    {
        let (format, cqe_sz) = ([HASH, CHECKSUM, STRIDE][round % 3], round as u64 / 6);
        let mut link = Link::new(log, |c| compressed(c, format, cqe_sz));
        let (mut waiting, mut sessions) = (VecDeque::new(), Vec::new());
        let mut counter = 0u16;
        for _ in 0..60 {
            let room = (1 << log) - waiting.len();
            let count = random.below(room.min(30) as u64 + 1) as usize;
            let (mut messages, mut kind) = (Vec::new(), Message::plain(0));
            for _ in 0..count {
                if random.below(6) == 0 {
                    let op = [send::SEND, send::SEND_IMM, send::RDMA_WRITE_IMM];
                    kind.op = op[random.below(3) as usize];
                    kind.immediate = match kind.op {
                        send::SEND => 0,
                        _ => random.below(2) as u32,
                    };
                    kind.solicited = random.below(4) == 0;
                }
                kind.len = random.below(200) as u32;
                messages.push(kind);
            }
            link.batch(&messages);
            for run in messages.chunk_by(Message::is_like) {
                let parts = run.chunks(MOST.min(1 << log)).map(<[_]>::len);
                sessions.extend(parts.filter(|len| *len > 1));
            }
            for message in &messages {
                let m = (
                    message.completes_as(),
                    counter,
                    message.len,
                    message.immediate,
                );
                waiting.push_back(m);
                counter = counter.wrapping_add(1);
            }
            // Some are left for later, in the middle of a session too.
            for _ in 0..random.below(waiting.len() as u64 + 1) {
                assert_eq!(link.poll(), waiting.pop_front());
            }
        }
        while let Some(expected) = waiting.pop_front() {
            assert_eq!(link.poll(), Some(expected));
        }
        assert_eq!((link.poll(), &link.cq.sessions), (None, &sessions));
        // In a ring of two hardly any two are alike.
        assert!(sessions.len() > 10 || log == 1, "{sessions:?}");
        assert_eq!(link.guests[1].count("cq_overruns"), 0);
    }
}

#[test]
fn a_shared_queue_s_counters_need_not_be_in_order_with_strides() {
    for (format, sessions) in [(HASH, vec![]), (CHECKSUM, vec![]), (STRIDE, vec![16])] {
        let mut srq = None;
        let shared = |guest: &mut Guest, pd| {
            let made = Srq::new(guest, pd, 4, None);
            let number = made.number;
            srq = Some(made);
            Some(number)
        };
        let mut link = Link::receiving(5, |c| compressed(c, format, 0), shared);
        let mut srq = srq.unwrap();
        let (key, at) = (link.sides[1].key, link.sides[1].at);
        for index in 0..16u16 {
            srq.post(&link.guests[1], &[pointer(4096, key, at)]);
            let next = ((index + 5) & 15).to_be_bytes();
            link.guests[1]
                .ram
                .set(srq.at + u64::from(index) * 64 + 2, &next);
        }
        link.send(&plain(1..17));
        for index in 0..16u16 {
            let expected = (
                cqe_opcode::RESP_SEND,
                (index * 5) & 15,
                u32::from(index) + 1,
                0,
            );
            assert_eq!(link.poll(), Some(expected));
        }
        assert_eq!(link.cq.sessions, sessions);
    }
}

#[test]
fn an_error_ends_a_session_and_is_an_entry_of_its_own() {
    let mut link = Link::new(5, |c| compressed(c, CHECKSUM, 0));
    for len in [100, 100, 100, 100, 10, 100, 100] {
        link.receive(len);
    }
    link.send(&plain([20; 7]));
    for index in 0..7 {
        let cqe = link.cq.poll(&link.guests[1]).unwrap();
        assert_eq!(cqe.counter, index);
        let expected = match index {
            0..4 => (cqe_opcode::RESP_SEND, 0),
            4 => (cqe_opcode::RESP_ERR, syndrome::LOCAL_LENGTH),
            _ => (cqe_opcode::RESP_ERR, syndrome::WR_FLUSH),
        };
        assert_eq!((cqe.opcode, cqe.syndrome), expected);
    }
    assert_eq!((link.poll(), &link.cq.sessions[..]), (None, &[4][..]));
}

#[test]
fn receives_behind_a_session_are_flushed_one_by_one() {
    let mut link = Link::new(4, |c| compressed(c, HASH, 1));
    link.batch(&plain([8; 9]));
    for _ in 0..5 {
        link.receive(64);
    }
    let Link { guests, to, .. } = &mut link;
    assert_eq!(to.modify(&mut guests[1], opcode::TO_ERR_QP, |_| {}), 0);
    for index in 0..14 {
        let cqe = link.cq.wait(&link.guests[1]);
        let flushed = cqe.syndrome == syndrome::WR_FLUSH;
        assert_eq!((cqe.counter, flushed), (index, index >= 9));
    }
    assert_eq!(link.cq.sessions, [9]);
}

#[test]
fn a_session_without_room_is_an_overrun_where_it_would_be_without() {
    let mut link = Link::new(3, |c| compressed(c, STRIDE, 0));
    link.batch(&plain([1; 5]));
    link.batch(&plain([2; 5]));
    assert_eq!(link.guests[1].count("cq_overruns"), 1);
    assert_eq!(link.guests[1].event(), Some((0x04, link.cq.cqn)));
    for index in 0..8 {
        let len = if index < 5 { 1 } else { 2 };
        let expected = (cqe_opcode::RESP_SEND, index, len, 0);
        assert_eq!(link.poll(), Some(expected));
    }
    assert_eq!((link.poll(), &link.cq.sessions[..]), (None, &[5, 3][..]));
}

#[test]
fn a_session_is_one_event_for_who_waits() {
    let mut link = Link::new(6, |c| compressed(c, CHECKSUM, 0));
    let cqn = link.cq.cqn;
    link.cq.arm(&link.guests[1]);
    link.batch(&plain([4; 30]));
    assert_eq!(link.guests[1].completion_event(), Some(cqn));
    assert_eq!(link.guests[1].completion_event(), None);
    while link.poll().is_some() {}
    assert_eq!(link.cq.sessions, [MOST, 30 - MOST]);

    // For a solicited one.
    let mut doorbell = [0u8; 8];
    doorbell[..4].copy_from_slice(&(link.cq.consumer | (1 << 24)).to_be_bytes());
    doorbell[4..].copy_from_slice(&cqn.to_be_bytes());
    let at = u64::from(link.guests[1].uar) * 4096 + 0x20;
    link.guests[1].hca.bar_write(0, at, &doorbell);
    link.batch(&plain([4; 5]));
    assert_eq!(link.guests[1].completion_event(), None);
    let mut messages = plain([4; 7]);
    for message in &mut messages[3..] {
        message.solicited = true;
    }
    link.batch(&messages);
    assert_eq!(link.guests[1].completion_event(), Some(cqn));
    assert_eq!(link.guests[1].completion_event(), None);
    while link.poll().is_some() {}
    assert_eq!(link.cq.sessions[2..], [5, 3, 4]);
}

#[test]
fn a_queue_compresses_on_in_other_memory() {
    let mut link = Link::new(3, |c| compressed(c, STRIDE, 0));
    for log in [5, 4, 2, 6] {
        // There is room for the entry that says so.
        link.batch(&plain([6; 3]));
        assert_eq!(link.cq.resize(&mut link.guests[1], log), 0);
        for _ in 0..3 {
            assert_eq!(link.poll().unwrap().0, cqe_opcode::RESP_SEND);
        }
        assert_eq!(link.poll().unwrap().0, cqe_opcode::RESIZE_CQ);
        link.cq.switch();
        assert_eq!(link.poll(), None);
    }
    assert_eq!(link.cq.sessions, [3; 4]);
}

#[test]
fn a_collapsed_queue_has_no_sessions() {
    let mut link = Link::new(4, |c| {
        compressed(c, STRIDE, 0);
        cqc::cc.set(c, 1);
    });
    link.batch(&plain([6; 9]));
    let last = link.cq.slot(&link.guests[1], 0);
    assert_eq!((last[61], last[63]), (8, cqe_opcode::RESP_SEND << 4));
    assert_eq!(link.cq.slot(&link.guests[1], 1), [0xff; 64]);
}

#[test]
pub fn what_the_device_does_not_compress_is_refused() {
    /// `MLX5_CMD_STAT_BAD_PARAM_ERR`.
    const BAD_PARAM: u8 = 3;
    let plain = |format, cqe_sz| move |c: &mut [u8]| compressed(c, format, cqe_sz);
    for (lacks, format, cqe_sz, status) in [
        ("", 2, 0, BAD_PARAM),
        ("", STRIDE, 2, 0),
        ("cqe_compression=0", HASH, 0, BAD_PARAM),
        ("cqe_compression=0", HASH, 1, 0),
        ("cqe_compression_128=0", HASH, 0, 0),
        ("cqe_compression_128=0", HASH, 1, BAD_PARAM),
        ("cqe_compression_128=0", HASH, 2, BAD_PARAM),
        ("mini_cqe_resp_stride_index=0", STRIDE, 0, BAD_PARAM),
        ("mini_cqe_resp_stride_index=0", CHECKSUM, 0, 0),
    ] {
        let mut config = HcaConfig::numbered(0);
        if !lacks.is_empty() {
            config.capabilities.set(lacks).unwrap();
        }
        let fabric = Fabric::new(Referee::in_memory());
        let mut guest = Guest::cold(Hca::new(&fabric, config), fabric.referee());
        guest.bring_up();
        let made = Cq::try_with(&mut guest, 3, plain(format, cqe_sz));
        assert_eq!(made.err().unwrap_or(0), status, "{lacks} {format} {cqe_sz}");
        if lacks == "cqe_compression_128=0" && status == 0 {
            // Nor can it become one.
            let cq = Cq::with(&mut guest, 3, plain(format, 0));
            assert_eq!(
                crate::completions::resized_entries(&mut guest, cq.cqn, 1),
                BAD_PARAM
            );
            assert_eq!(
                crate::completions::resized_entries(&mut guest, cq.cqn, 0),
                0
            );
        }
    }
    let mut guest = guests(1).remove(0);
    let enhanced = |c: &mut [u8]| {
        compressed(c, HASH, 0);
        cqc::cqe_compression_layout.set(c, 1);
    };
    let made = Cq::try_with(&mut guest, 3, enhanced);
    assert_eq!(made.err(), Some(BAD_PARAM));
}
