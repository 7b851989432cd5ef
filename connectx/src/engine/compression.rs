// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compressed completions: a title that says how many there are and all that they have in common, and arrays of eight mini
//! CQEs with what each has of its own.
//!
//! A session of n completions counts as n entries. Only its title and its arrays are written, at the places where drivers
//! read them (`mlx5e_decompress_cqes_start` of the kernel's `en_rx.c`): the title in the first slot, the first array in the
//! second, each further array in the slot of the first completion that it tells of. The consumer, which knows of the
//! session by its title, gives all of its slots to the next lap (`mlx5e_cqes_update_owner`).

use super::completion::{self, Completion};
use crate::cmd::caps::Capabilities;
use crate::ifc::wqe::{cqe, cqe_opcode, mini_cqe};
use crate::objects::device::Device;
use crate::objects::queue::{Cq, CqStatus, MiniFormat};

/// Mini CQEs of an array, `MLX5_MINI_CQE_ARRAY_SIZE`.
const ARRAY: usize = cqe::SIZE / mini_cqe::SIZE;
/// `MLX5_COMPRESSED`, of `cqe.format`.
const COMPRESSED: u64 = 3;

/// Whether a completion can be one of a session: a receive's that went well and brings no data.
fn is_receive(completion: &Completion) -> bool {
    let opcodes = cqe_opcode::RESP_WR_IMM..=cqe_opcode::RESP_SEND_INV;
    opcodes.contains(&completion.opcode)
        && completion.failure.is_none()
        && completion.signature.is_none()
        && completion.scattered.is_none()
}

/// Whether a completion differs from the one before in nothing but what a mini CQE tells.
fn follows(format: MiniFormat, last: &Completion, next: &Completion) -> bool {
    let alike = Completion {
        wqe_counter: next.wqe_counter,
        byte_count: next.byte_count,
        ..*last
    };
    alike == *next
        && (format == MiniFormat::ChecksumStride
            || next.wqe_counter == last.wqe_counter.wrapping_add(1))
}

/// Most completions of a session. One does not go around the ring, and a collapsed queue has no second slot.
fn most(cq: &Cq) -> usize {
    match cq.collapsed {
        true => 1,
        false => usize::from(Capabilities::MAX_SESSION).min(1 << cq.log_size),
    }
}

/// Takes a completion into its queue's session. `false` if it is to be written by itself, behind what was in the session.
pub(super) fn take(device: &mut Device, cqn: u32, completion: &Completion) -> bool {
    let Some(cq) = device.cqs.get(cqn) else {
        return false;
    };
    let Some(format) = cq.compression else {
        return false;
    };
    let joins = cq
        .session
        .last()
        .is_some_and(|last| follows(format, last, completion));
    if !joins {
        close(device, cqn);
    }
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return false;
    };
    let most = most(cq);
    if most < 2 || cq.status != CqStatus::Ok || !is_receive(completion) {
        return false;
    }
    // Room is taken now: what has been taken in is always written.
    if !completion::has_room(&device.host, cq, cq.session.len()) {
        close(device, cqn);
        return false;
    }
    cq.session.push(*completion);
    if cq.session.len() >= most {
        return close(device, cqn);
    }
    if !device.compressing.contains(&cqn) {
        device.compressing.push(cqn);
    }
    true
}

/// Writes all sessions: nothing more is under way that could join one.
pub fn close_all(device: &mut Device) {
    for cqn in std::mem::take(&mut device.compressing) {
        close(device, cqn);
    }
}

/// Writes a queue's session. `false` if it could not be written: the queue has failed, as an event says, and its queue
/// pairs learn of it with their next completion.
fn close(device: &mut Device, cqn: u32) -> bool {
    let clock = crate::hca::clock::ticks();
    let Some(cq) = device.cqs.get_mut(cqn) else {
        return true;
    };
    let session = std::mem::take(&mut cq.session);
    let (Some(title), Some(format)) = (session.first(), cq.compression) else {
        return true;
    };
    if session.len() == 1 {
        return completion::write_entry(device, cqn, title);
    }
    let arrays = session.chunks(ARRAY).enumerate().all(|(index, chunk)| {
        let ahead = (index * ARRAY).max(1) as u32;
        completion::put(&device.host, cq, ahead, &[], &array(format, chunk))
    });
    let mut entry = title.encode(clock);
    cqe::byte_cnt.set(&mut entry, session.len() as u64);
    cqe::format.set(&mut entry, COMPRESSED);
    cqe::owner.set(&mut entry, u64::from(completion::owner(cq)));
    // The title last: with it all are there.
    if !arrays || !completion::put(&device.host, cq, 0, &[], &entry) {
        completion::write_failed(device, cqn);
        return false;
    }
    completion::written(device, cqn, session.len() as u32, title.solicited);
    true
}

/// The mini CQEs of up to eight completions.
fn array(format: MiniFormat, completions: &[Completion]) -> [u8; cqe::SIZE] {
    let mut array = [0; cqe::SIZE];
    for (mini, completion) in array.chunks_exact_mut(mini_cqe::SIZE).zip(completions) {
        mini_cqe::byte_cnt.set(mini, completion.byte_count.into());
        if format == MiniFormat::ChecksumStride {
            mini_cqe::stridx.set(mini, completion.wqe_counter.into());
        }
    }
    array
}
