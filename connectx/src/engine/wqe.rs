// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work queue entries: fetching them from the send queue and taking them apart.

use smallvec::SmallVec;

use super::atomic;
use crate::cmd::caps::Capabilities;
use crate::ifc::context::mkc;
use crate::ifc::wqe::{
    BASIC_BLOCK, INVALID_LKEY, MMO_DMA, SEGMENT, av, completion, ctrl, data, raddr, send, set_psv,
    umr_ctrl,
};
use crate::objects::device::Host;
use crate::objects::qp::{Qp, Service};
use crate::objects::signature::Bsf;
use crate::wire::packet::{Atomic, Rider};

/// Longest WQE.
const MAX_LEN: usize = Capabilities::MAX_SEND_WQE as usize;

/// Pieces of local memory, of which there are seldom many.
pub type SgeList = SmallVec<[Sge; 2]>;

/// A piece of local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Sge {
    pub key: u32,
    pub address: u64,
    pub len: u32,
}

/// Destination of a datagram, or of a dynamic connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct AddressVector {
    pub qkey: u32,
    pub qpn: u32,
    pub lid: u16,
    pub sl: u8,
    pub gid: Option<[u8; 16]>,
    pub traffic_class: u8,
    pub flow_label: u32,
    pub hop_limit: u8,
    /// Of a target of dynamic connections, in the place of `qkey`.
    pub access_key: u64,
}

/// What a WQE asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Operation {
    Nop,
    /// Reads local memory and drops it: what GPUs use to see that earlier READs have arrived.
    Dump,
    Send {
        rider: Rider,
    },
    Write {
        address: u64,
        rkey: u32,
        rider: Rider,
    },
    Read {
        address: u64,
        rkey: u32,
    },
    Atomic {
        address: u64,
        rkey: u32,
        operation: Atomic,
        /// Bytes that it works on.
        len: u32,
    },
    Invalidate {
        key: u32,
    },
    /// Copies within local memory: the first of [`Wqe::gather`] to the second.
    Copy,
    /// Change of a memory key, described in [`Wqe::update`].
    Update {
        key: u32,
    },
    /// Gives a prediction signature value.
    SetPsv {
        psv: u32,
        transient: u64,
    },
}

/// Change of a memory key by a UMR WQE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    /// Control segment.
    pub control: [u8; umr_ctrl::SIZE],
    /// New context, of which `mkey_mask` says what counts.
    pub context: [u8; mkc::SIZE],
    /// New entries inside the WQE.
    pub inline: Vec<u8>,
    /// New BSF, if there is one.
    pub bsf: SmallVec<[u8; Bsf::SIZE]>,
}

/// A send WQE.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Wqe {
    /// Index of its first basic block, as in its CQE.
    pub index: u16,
    pub blocks: u16,
    pub opcode: u8,
    /// `ifc::wqe::completion`.
    pub completion: u8,
    pub fence: u8,
    pub solicited: bool,
    pub operation: Operation,
    pub destination: Option<AddressVector>,
    pub xrc_srqn: Option<u32>,
    /// Stream of a dynamic connection's initiator.
    pub stream: u16,
    pub gather: SgeList,
    /// Data inside the WQE, which replaces `gather`.
    pub inline: Vec<u8>,
    /// Bytes of the message.
    pub len: u32,
    /// Of an [`Operation::Update`].
    pub update: Option<Box<Update>>,
}

impl Operation {
    /// Whether it is over when it has been done here: nothing is sent.
    pub fn is_local(self) -> bool {
        matches!(
            self,
            Self::Nop
                | Self::Dump
                | Self::Invalidate { .. }
                | Self::Update { .. }
                | Self::SetPsv { .. }
                | Self::Copy
        )
    }
}

/// Why a WQE cannot be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed {
    /// Index of its first basic block.
    pub index: u16,
    /// Basic blocks to skip.
    pub blocks: u16,
    /// Opcode as far as it could be read.
    pub opcode: u8,
    /// Field that is wrong, its value, and what is right.
    pub field: &'static str,
    /// See above.
    pub value: u64,
    /// See above.
    pub rule: &'static str,
    /// The control segment does not belong to this place in the queue.
    pub torn: bool,
}

/// Result of a look at the send queue.
#[derive(Debug)]
pub enum Fetched {
    /// A WQE.
    Wqe(Wqe),
    /// Something that is not one.
    Malformed(Malformed),
    /// The queue's memory could not be reached.
    Unreachable,
}

/// Reads the WQE at basic block `index`, of which `available` blocks are posted.
pub fn fetch(host: &Host, qp: &mut Qp, index: u16, available: u16) -> Fetched {
    let window = &mut qp.requester.window;
    if let Some(copy) = qp.requester.copied.take_if(|copy| copy.index == index) {
        window.fill(index, &copy.bytes);
    }
    let Some(first) = window.block(host, &qp.queues, index, available) else {
        return Fetched::Unreachable;
    };
    let mut head = [0; BASIC_BLOCK];
    head.copy_from_slice(first);
    let len = ctrl::ds.get(&head) as usize * SEGMENT;
    let blocks = len.div_ceil(BASIC_BLOCK).max(1) as u16;
    let wrong = |field, value: u64, rule, torn| {
        let opcode = ctrl::opcode.get(&head) as u8;
        Fetched::Malformed(Malformed {
            index,
            blocks: blocks.min(available.max(1)),
            opcode,
            field,
            value,
            rule,
            torn,
        })
    };
    if ctrl::wqe_index.get(&head) != u64::from(index) {
        return wrong(
            "wqe_index",
            ctrl::wqe_index.get(&head),
            "the WQE's index is that of its place",
            true,
        );
    }
    if ctrl::qpn.get32(&head) != qp.number {
        return wrong(
            "qpn",
            ctrl::qpn.get(&head),
            "the WQE names the queue pair that it is posted to",
            true,
        );
    }
    if len < SEGMENT {
        return wrong(
            "ds",
            ctrl::ds.get(&head),
            "a WQE has at least its control segment",
            false,
        );
    }
    if blocks > available {
        return wrong(
            "ds",
            ctrl::ds.get(&head),
            "a WQE ends before the producer index",
            true,
        );
    }
    let mut long = [0; MAX_LEN];
    let raw = if blocks == 1 {
        &head[..len]
    } else {
        for (block, into) in (0..blocks).zip(long.chunks_exact_mut(BASIC_BLOCK)) {
            let (index, posted) = (index.wrapping_add(block), available - block);
            let Some(raw) = window.block(host, &qp.queues, index, posted) else {
                return Fetched::Unreachable;
            };
            into.copy_from_slice(raw);
        }
        long.get(..len).unwrap_or_default()
    };
    match parse(qp.service, index, blocks, raw) {
        Ok(wqe) => Fetched::Wqe(wqe),
        Err((field, value, rule)) => wrong(field, value, rule, false),
    }
}

pub(super) type Wrong = (&'static str, u64, &'static str);

/// The next `len` bytes of a WQE.
pub(super) fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], Wrong> {
    let (head, tail) = rest.split_at_checked(len).ok_or((
        "ds",
        rest.len() as u64,
        "the WQE has the segments of its opcode",
    ))?;
    *rest = tail;
    Ok(head)
}

/// Takes a WQE apart. `raw` is the whole WQE.
pub fn parse(service: Service, index: u16, blocks: u16, raw: &[u8]) -> Result<Wqe, Wrong> {
    let mut rest = raw;
    let head = take(&mut rest, ctrl::SIZE)?;
    let opcode = ctrl::opcode.get(head) as u8;
    let immediate = ctrl::imm.get32(head);
    if ctrl::completion.get(head) as u8 == completion::ON_FIRST_ERROR {
        return Err((
            "ce",
            u64::from(completion::ON_FIRST_ERROR),
            "a completion on every or no success",
        ));
    }
    let addressed = match service {
        Service::Dci => !matches!(
            opcode,
            send::NOP | send::UMR | send::SET_PSV | send::LOCAL_INVAL | send::DUMP | send::MMO
        ),
        _ => service.is_datagram() && opcode != send::NOP,
    };
    let destination = if addressed {
        Some(address_vector(&mut rest)?)
    } else {
        None
    };
    let xrc_srqn = if service == Service::Xrc && opcode != send::NOP {
        let segment = take(&mut rest, SEGMENT)?;
        Some(u32::from_be_bytes([0, segment[1], segment[2], segment[3]]))
    } else {
        None
    };
    let operation = operation(opcode, ctrl::opmod.get(head) as u8, immediate, &mut rest)?;
    check_service(service, opcode)?;
    let mut wqe = Wqe {
        index,
        blocks,
        opcode,
        completion: ctrl::completion.get(head) as u8,
        fence: ctrl::fence_mode.get(head) as u8,
        solicited: ctrl::solicited.is_set(head),
        operation,
        destination,
        xrc_srqn,
        stream: ctrl::dci_stream_channel_id.get(head) as u16,
        gather: SgeList::new(),
        inline: Vec::new(),
        len: 0,
        update: None,
    };
    if operation == Operation::Copy {
        copy_segments(&mut wqe, rest)?;
    } else if matches!(operation, Operation::Update { .. }) {
        key_update(&mut wqe, rest)?;
    } else if operation == Operation::Dump || !operation.is_local() {
        data_segments(&mut wqe, rest)?;
    }
    Ok(wqe)
}

/// What a service can do (IBA table 35).
fn check_service(service: Service, opcode: u8) -> Result<(), Wrong> {
    let allowed = match service {
        Service::Rc => true,
        Service::Xrc | Service::Dci => opcode != send::MMO,
        Service::Uc => !matches!(
            opcode,
            send::RDMA_READ
                | send::ATOMIC_CS
                | send::ATOMIC_FA
                | send::ATOMIC_MASKED_CS
                | send::ATOMIC_MASKED_FA
                | send::SEND_INVAL
                | send::MMO
        ),
        Service::Ud | Service::Smi | Service::Gsi => {
            matches!(opcode, send::NOP | send::SEND | send::SEND_IMM)
        }
        Service::Sq => opcode == send::NOP,
        Service::Dct | Service::Dcr => false,
        Service::RegUmr => matches!(opcode, send::NOP | send::LOCAL_INVAL | send::UMR),
    };
    if allowed {
        Ok(())
    } else {
        Err((
            "opcode",
            u64::from(opcode),
            "an operation of the queue pair's service",
        ))
    }
}

fn address_vector(rest: &mut &[u8]) -> Result<AddressVector, Wrong> {
    let base = take(rest, SEGMENT)?;
    let mut whole = [0; av::SIZE];
    whole[..SEGMENT].copy_from_slice(base);
    if av::extended.is_set(base) {
        whole[SEGMENT..].copy_from_slice(take(rest, av::SIZE - SEGMENT)?);
    }
    let gid = av::grh.is_set(&whole).then(|| {
        let mut gid = [0; 16];
        gid.copy_from_slice(av::rgid.bytes(&whole));
        gid
    });
    Ok(AddressVector {
        qkey: av::qkey.get32(&whole),
        qpn: av::dqpn.get32(&whole),
        lid: av::rlid.get(&whole) as u16,
        sl: av::sl.get(&whole) as u8,
        gid,
        traffic_class: av::tclass.get(&whole) as u8,
        flow_label: av::flow_label.get32(&whole),
        hop_limit: av::hop_limit.get(&whole) as u8,
        access_key: av::dc_key.get(&whole),
    })
}

fn operation(opcode: u8, opmod: u8, immediate: u32, rest: &mut &[u8]) -> Result<Operation, Wrong> {
    let rider = match opcode {
        send::SEND_IMM | send::RDMA_WRITE_IMM => Rider::Immediate(immediate),
        send::SEND_INVAL => Rider::Invalidate(immediate),
        _ => Rider::None,
    };
    let mut remote =
        || take(rest, raddr::SIZE).map(|s| (raddr::address.get(s), raddr::rkey.get32(s)));
    Ok(match opcode {
        send::NOP => Operation::Nop,
        send::DUMP => Operation::Dump,
        send::SEND | send::SEND_IMM | send::SEND_INVAL => Operation::Send { rider },
        send::RDMA_WRITE | send::RDMA_WRITE_IMM => {
            let (address, rkey) = remote()?;
            Operation::Write {
                address,
                rkey,
                rider,
            }
        }
        send::RDMA_READ => {
            let (address, rkey) = remote()?;
            Operation::Read { address, rkey }
        }
        send::ATOMIC_CS | send::ATOMIC_FA | send::ATOMIC_MASKED_CS | send::ATOMIC_MASKED_FA => {
            let (address, rkey) = remote()?;
            let (operation, len) = atomic::parse(opcode, opmod, rest)?;
            Operation::Atomic {
                address,
                rkey,
                operation,
                len,
            }
        }
        send::LOCAL_INVAL => Operation::Invalidate { key: immediate },
        send::UMR => Operation::Update { key: immediate },
        send::SET_PSV => {
            let segment = take(rest, set_psv::SIZE)?;
            Operation::SetPsv {
                psv: set_psv::psv_index.get32(segment),
                transient: set_psv::transient_signature.get(segment),
            }
        }
        send::MMO if opmod == MMO_DMA => Operation::Copy,
        other => return Err(("opcode", u64::from(other), "an opcode that the device has")),
    })
}

/// Segments of a UMR: control, key context, then the entries or where they are.
fn key_update(wqe: &mut Wqe, mut rest: &[u8]) -> Result<(), Wrong> {
    let mut update = Update {
        control: [0; umr_ctrl::SIZE],
        context: [0; mkc::SIZE],
        inline: Vec::new(),
        bsf: SmallVec::new(),
    };
    update
        .control
        .copy_from_slice(take(&mut rest, umr_ctrl::SIZE)?);
    // A WQE that only invalidates has no more than the part of the context that it needs.
    let len = rest.len().min(mkc::SIZE);
    update.context[..len].copy_from_slice(take(&mut rest, len)?);
    let entries = umr_ctrl::xlt_octowords.get(&update.control) as usize * SEGMENT;
    if umr_ctrl::is_inline.is_set(&update.control) {
        update.inline = take(&mut rest, entries)?.to_vec();
    } else if entries > 0 {
        wqe.gather.push(sge(take(&mut rest, SEGMENT)?));
    }
    let bsf = umr_ctrl::bsf_octowords.get(&update.control);
    if bsf > 0 && !umr_ctrl::translation_offset_en.is_set(&update.control) {
        let len = bsf as usize * SEGMENT;
        if len > Bsf::SIZE || !umr_ctrl::is_inline.is_set(&update.control) {
            let rule = "at most 2^log_max_bsf_list_size, and with the entries inside the WQE";
            return Err(("bsf_octowords", bsf, rule));
        }
        update.bsf.extend_from_slice(take(&mut rest, len)?);
    }
    wqe.update = Some(Box::new(update));
    Ok(())
}

/// Segments of a copy: one for the result of other operations of its kind, its source and its destination.
fn copy_segments(wqe: &mut Wqe, mut rest: &[u8]) -> Result<(), Wrong> {
    take(&mut rest, SEGMENT)?;
    let (source, destination) = (
        sge(take(&mut rest, SEGMENT)?),
        sge(take(&mut rest, SEGMENT)?),
    );
    let len = u64::from(source.len);
    if source.len != destination.len {
        let rule = "a copy's source and destination are of one length";
        return Err(("byte_count", len, rule));
    }
    // 0 stands for 2 GiB.
    if source.len == 0 || len > 1 << Capabilities::LOG_DMA_MMO_MAX_SIZE {
        let rule = "a copy has at most 2^log_dma_mmo_max_size bytes";
        return Err(("byte_count", len, rule));
    }
    wqe.gather.push(source);
    wqe.gather.push(destination);
    Ok(())
}

fn data_segments(wqe: &mut Wqe, mut rest: &[u8]) -> Result<(), Wrong> {
    let mut len = 0u64;
    while rest.len() >= SEGMENT {
        if data::is_inline.is_set(rest) {
            let count = data::byte_count.get(rest) as usize;
            let bytes = rest.get(4..4 + count).ok_or((
                "byte_count",
                count as u64,
                "inline data lies within the WQE",
            ))?;
            wqe.inline.extend_from_slice(bytes);
            len += count as u64;
            rest = rest
                .get((4 + count).next_multiple_of(SEGMENT)..)
                .unwrap_or_default();
        } else {
            let segment = take(&mut rest, SEGMENT)?;
            let sge = sge(segment);
            len += u64::from(sge.len);
            wqe.gather.push(sge);
        }
    }
    if !wqe.inline.is_empty() && !wqe.gather.is_empty() {
        return Err(("byte_count", len, "data is all inline or all by pointers"));
    }
    if !wqe.inline.is_empty()
        && !matches!(
            wqe.operation,
            Operation::Send { .. } | Operation::Write { .. }
        )
    {
        return Err(("byte_count", len, "only what is sent can be inline"));
    }
    wqe.len = u32::try_from(len)
        .ok()
        .filter(|len| *len <= 1 << Capabilities::LOG_MAX_MSG)
        .ok_or((
            "byte_count",
            len,
            "a message has at most 2^log_max_msg bytes",
        ))?;
    if matches!(wqe.operation, Operation::Atomic { len, .. } if len != wqe.len) {
        let rule = "an atomic returns as many bytes as it works on";
        return Err(("byte_count", len, rule));
    }
    Ok(())
}

/// The pieces of memory that hold `len` bytes from `offset` on of what a list names, as far as it reaches.
pub fn part(list: &[Sge], offset: usize, len: usize) -> impl Iterator<Item = Sge> + '_ {
    let (mut skip, mut left) = (offset, len);
    list.iter().filter_map(move |sge| {
        let size = sge.len as usize;
        if skip >= size {
            skip -= size;
            return None;
        }
        let piece = (size - skip).min(left);
        let address = sge.address.wrapping_add(skip as u64);
        (skip, left) = (0, left - piece);
        (piece > 0).then_some(Sge {
            key: sge.key,
            address,
            len: piece as u32,
        })
    })
}

fn sge(segment: &[u8]) -> Sge {
    Sge {
        key: data::lkey.get32(segment),
        address: data::address.get(segment),
        len: data::byte_count.get32(segment),
    }
}

/// Scatter list of a receive WQE: it ends with its space or with the invalid key.
pub fn scatter_list(raw: &[u8]) -> SgeList {
    raw.chunks_exact(SEGMENT)
        .map(sge)
        .take_while(|sge| sge.key != INVALID_LKEY)
        .filter(|sge| sge.len > 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of an RDMA WRITE with one pointer, put together by hand from rdma-core's mlx5dv.h.
    fn write_wqe() -> Vec<u8> {
        let mut w = vec![
            0x00, 0x00, 0x05, 0x08, 0x00, 0x00, 0x48, 0x03, 0, 0, 0, 0x08, 0, 0, 0, 0,
        ];
        w.extend([0, 0, 0x7f, 0, 0, 0, 0x10, 0, 0, 0, 0x12, 0x34, 0, 0, 0, 0]);
        w.extend([
            0, 0, 0x10, 0, 0, 0, 0x56, 0x78, 0, 0, 0x7e, 0, 0, 0, 0x20, 0,
        ]);
        w
    }

    #[test]
    fn a_write() {
        let wqe = parse(Service::Rc, 5, 1, &write_wqe()).unwrap();
        assert_eq!(
            wqe.operation,
            Operation::Write {
                address: 0x7f00_0000_1000,
                rkey: 0x1234,
                rider: Rider::None
            }
        );
        assert_eq!(
            wqe.gather[..],
            [Sge {
                key: 0x5678,
                address: 0x7e00_0000_2000,
                len: 0x1000
            }]
        );
        assert_eq!(
            (wqe.len, wqe.completion, wqe.fence, wqe.solicited),
            (0x1000, completion::ALWAYS, 0, false)
        );
    }

    #[test]
    fn inline_data_in_the_last_segment() {
        let mut w = write_wqe();
        w.truncate(32);
        w.extend([0x80, 0, 0, 12, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        let wqe = parse(Service::Rc, 5, 1, &w).unwrap();
        assert_eq!((wqe.inline.len(), wqe.len), (12, 12));
        w[35] = 13;
        assert_eq!(parse(Service::Rc, 5, 1, &w).unwrap_err().0, "byte_count");
        w[35] = 0;
        assert_eq!(parse(Service::Rc, 5, 1, &w).unwrap().len, 0);
    }

    #[test]
    fn what_a_service_cannot_do() {
        let mut w = write_wqe();
        assert!(parse(Service::Uc, 5, 1, &w).is_ok());
        w[3] = send::RDMA_READ;
        assert!(parse(Service::Rc, 5, 1, &w).is_ok());
        assert_eq!(parse(Service::Uc, 5, 1, &w).unwrap_err().0, "opcode");
        w[3] = 0x7f;
        assert_eq!(parse(Service::Rc, 5, 1, &w).unwrap_err().0, "opcode");
    }

    #[test]
    fn any_bytes_parse_or_are_refused() {
        // A deterministic walk through short and odd WQEs for every service and opcode.
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        for round in 0..20_000u32 {
            let mut raw = vec![0u8; (round as usize % 33) * 16];
            for byte in &mut raw {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = (seed >> 56) as u8;
            }
            for service in [
                Service::Rc,
                Service::Uc,
                Service::Ud,
                Service::Xrc,
                Service::Dci,
                Service::RegUmr,
            ] {
                if let Ok(wqe) = parse(service, 0, 1, &raw) {
                    assert!(wqe.inline.len() <= raw.len());
                    assert!(u64::from(wqe.len) <= 1 << Capabilities::LOG_MAX_MSG);
                }
            }
        }
    }

    #[test]
    fn scatter_lists_end_at_the_invalid_key() {
        let mut raw = vec![];
        for (len, key) in [(16u32, 5u32), (0, 6), (32, 7), (0, INVALID_LKEY), (64, 8)] {
            raw.extend(len.to_be_bytes());
            raw.extend(key.to_be_bytes());
            raw.extend(0u64.to_be_bytes());
        }
        assert_eq!(
            scatter_list(&raw)
                .iter()
                .map(|s| (s.key, s.len))
                .collect::<Vec<_>>(),
            [(5, 16), (7, 32)]
        );
    }
}
