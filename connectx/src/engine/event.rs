// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events: entries in event queues, and interrupts.

use crate::ifc::event::{eqe, kind, page_fault};
use crate::objects::device::Device;

/// Kind of queue in an affiliated event (`mlx5_eqe_qp_srq.type`).
const QUEUE_TYPE_QP: u64 = 0;

/// Writes an entry to one event queue and interrupts if it is armed. `false` if the queue cannot take it.
fn post(device: &mut Device, eqn: u32, mut entry: [u8; eqe::SIZE]) -> bool {
    let Some(eq) = device.eqs.get_mut(eqn) else {
        return false;
    };
    if eq.write_failed {
        return false;
    }
    let size = 1 << eq.log_size;
    if eq.producer.wrapping_sub(eq.consumer) & 0xff_ffff >= size {
        eq.overrun = true;
        device.counters.eq_overruns += 1;
        device.refuse(
            format!("eq {eqn:#x}"),
            "producer",
            size,
            "the driver takes events before the queue is full",
            "PRM EQC",
        );
        return false;
    }
    let owner = (eq.producer >> eq.log_size) & 1;
    eqe::owner.set(&mut entry, u64::from(owner));
    let slot = u64::from(eq.producer & (size - 1)) * eqe::SIZE as u64;
    let Some((addr, _)) = eq.buffer.locate(slot) else {
        return false;
    };
    let last = eqe::SIZE - 1;
    // The owner bit makes the entry valid, so it must be seen last.
    let written = device
        .host
        .write(addr, &entry[..last])
        .and_then(|()| device.host.publish(addr + last as u64, &entry[last..]));
    if let Err(fault) = written {
        eq.write_failed = true;
        let rule = "an event queue's memory is reachable for as long as the queue lives";
        device.refuse(
            format!("eq {eqn:#x}"),
            "address",
            fault.addr,
            rule,
            "PRM EQC",
        );
        return false;
    }
    eq.producer = eq.producer.wrapping_add(1);
    if std::mem::take(&mut eq.armed) {
        device.host.interrupt(eq.vector);
    }
    true
}

/// Posts an asynchronous event to every queue that takes its type. False if none could take it.
fn broadcast(device: &mut Device, event_type: u8, entry: [u8; eqe::SIZE]) -> bool {
    let takers: Vec<u32> = device
        .eqs
        .iter()
        .filter(|(_, eq)| eq.takes(event_type))
        .map(|(eqn, _)| eqn)
        .collect();
    let mut told = false;
    for &eqn in &takers {
        told |= post(device, eqn, entry);
    }
    told
}

fn entry(event_type: u8) -> [u8; eqe::SIZE] {
    let mut entry = [0; eqe::SIZE];
    eqe::event_type.set(&mut entry, u64::from(event_type));
    entry
}

/// A completion queue has something.
pub fn completion(device: &mut Device, eqn: u32, cqn: u32) {
    let mut entry = entry(kind::COMPLETION);
    eqe::comp_cqn.set(&mut entry, u64::from(cqn));
    post(device, eqn, entry);
}

/// Commands in the slots of `slots` are done.
pub fn command_done(device: &mut Device, eqn: u32, slots: u32) {
    let mut entry = entry(kind::COMMAND);
    eqe::cmd_vector.set(&mut entry, u64::from(slots));
    post(device, eqn, entry);
}

/// Something happened to a queue pair.
pub fn queue_pair(device: &mut Device, event_type: u8, qpn: u32) {
    let mut entry = entry(event_type);
    eqe::queue_type.set(&mut entry, QUEUE_TYPE_QP);
    eqe::queue_number.set(&mut entry, u64::from(qpn));
    broadcast(device, event_type, entry);
}

/// Something happened to a shared receive queue.
pub fn shared_receive_queue(device: &mut Device, event_type: u8, srqn: u32) {
    let mut entry = entry(event_type);
    eqe::queue_number.set(&mut entry, u64::from(srqn));
    broadcast(device, event_type, entry);
}

/// Something happened to a target of dynamic connections.
pub fn target(device: &mut Device, event_type: u8, dctn: u32) {
    let mut entry = entry(event_type);
    eqe::dctn.set(&mut entry, u64::from(dctn));
    broadcast(device, event_type, entry);
}

/// A range under a key that somebody waits for.
pub struct Demand {
    /// By which the driver answers.
    pub token: u64,
    /// The key.
    pub key: u32,
    /// Where it begins.
    pub address: u64,
    /// Pages of 4 KiB without which nothing goes on.
    pub pages: u64,
    /// Pages behind them that will be needed next.
    pub after: u64,
}

/// Memory that a key covers is not there. False if nobody heard it.
pub fn page_fault(device: &mut Device, demand: Demand) -> bool {
    let mut entry = entry(kind::PAGE_FAULT);
    for (field, value) in [
        (eqe::event_sub_type, u64::from(page_fault::MEMORY)),
        (eqe::page_fault_flags, u64::from(page_fault::LAST)),
        (eqe::page_fault_post_demand_pages, demand.after),
        (eqe::page_fault_token_47_32, demand.token >> 32),
        (eqe::page_fault_token_31_0, demand.token & 0xffff_ffff),
        (eqe::page_fault_demand_pages, demand.pages),
        (eqe::page_fault_mkey, u64::from(demand.key)),
        (eqe::page_fault_va, demand.address),
    ] {
        field.set(&mut entry, value);
    }
    broadcast(device, kind::PAGE_FAULT, entry)
}

/// A completion queue failed.
pub fn cq_error(device: &mut Device, cqn: u32, syndrome: u8) {
    let mut entry = entry(kind::CQ_ERROR);
    eqe::cq_err_cqn.set(&mut entry, u64::from(cqn));
    eqe::cq_err_syndrome.set(&mut entry, u64::from(syndrome));
    broadcast(device, kind::CQ_ERROR, entry);
}

/// The port went up or down (`ifc::event::port_change`).
pub fn port_change(device: &mut Device, sub_type: u8) {
    let mut entry = entry(kind::PORT_CHANGE);
    eqe::event_sub_type.set(&mut entry, u64::from(sub_type));
    eqe::port_num.set(&mut entry, 1);
    broadcast(device, kind::PORT_CHANGE, entry);
}

/// The device wants pages from the driver, or (negative) gives some back. False if nobody heard it.
pub fn page_request(device: &mut Device, pages: i32) -> bool {
    let mut entry = entry(kind::PAGE_REQUEST);
    eqe::page_req_num_pages.set(&mut entry, u64::from(pages as u32));
    broadcast(device, kind::PAGE_REQUEST, entry)
}

/// The driver told how far it has read an event queue, and whether it wants an interrupt for more.
pub fn consumed(device: &mut Device, eqn: u32, consumer: u32, arm: bool) {
    let Some(eq) = device.eqs.get_mut(eqn) else {
        return;
    };
    eq.consumer = consumer;
    if arm {
        eq.armed = eq.producer & 0xff_ffff == consumer;
        if !eq.armed {
            device.host.interrupt(eq.vector);
        }
    }
}
