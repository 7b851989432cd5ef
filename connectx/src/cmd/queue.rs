// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command queue: entries, mailboxes, delivery. Layout: `struct mlx5_cmd_layout` and `mlx5_cmd_prot_block` in
//! `include/linux/mlx5/device.h`.

use super::{Request, execute};
use crate::engine::event;
use crate::fault::Verdict;
use crate::ifc::command::header;
use crate::ifc::event::kind;
use crate::ifc::{Field, opcode};
use crate::objects::device::Device;
use crate::platform::DmaFault;

/// Longest input or output: a CREATE_MKEY with the pages of a large region. Longer ones are refused.
const MAX_LEN: usize = 4 << 20;

mod entry {
    use super::Field;
    pub const SIZE: usize = 64;
    pub const KIND: Field = Field::new(0x00, 0, 8);
    pub const INPUT_LEN: Field = Field::new(0x04, 0, 32);
    pub const INPUT_MAILBOX: Field = Field::new(0x08, 0, 64);
    pub const INPUT: Field = Field::new(0x10, 0, 128);
    pub const OUTPUT: u64 = 0x20;
    pub const OUTPUT_MAILBOX: Field = Field::new(0x30, 0, 64);
    pub const OUTPUT_LEN: Field = Field::new(0x38, 0, 32);
    pub const TOKEN: Field = Field::new(0x3c, 0, 8);
    pub const STATUS: u64 = 0x3f;
    pub const OWNED_BY_DEVICE: Field = Field::new(0x3f, 7, 1);
    /// Bytes of input and output in the entry itself.
    pub const INLINE: usize = 16;
    pub const KIND_PCIE: u64 = 7;
}

mod block {
    use super::Field;
    pub const SIZE: usize = 576;
    pub const DATA: usize = 512;
    pub const ALIGNMENT: u64 = 512;
    pub const NEXT: Field = Field::new(0x230, 0, 64);
    pub const NUMBER: Field = Field::new(0x238, 0, 32);
    pub const TOKEN: Field = Field::new(0x23d, 0, 8);
    pub const TOKEN_AT: u64 = 0x23d;
}

/// Delivery statuses, `MLX5_CMD_DELIVERY_STAT_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Delivery {
    Ok = 0x00,
    Token = 0x02,
    BlockNumber = 0x03,
    OutputAlignment = 0x04,
    InputAlignment = 0x05,
    Firmware = 0x06,
    InputLength = 0x07,
    OutputLength = 0x08,
    Descriptor = 0x10,
}

impl From<DmaFault> for Delivery {
    fn from(_: DmaFault) -> Self {
        Self::Firmware
    }
}

/// Where the driver put its command queue.
#[derive(Debug, Default, Clone, Copy)]
pub struct CommandQueue {
    /// Bus address of the first entry.
    pub address: u64,
}

impl CommandQueue {
    /// Log2 of the number of entries.
    pub const LOG_ENTRIES: u32 = 5;
    /// Log2 of the bytes of an entry.
    pub const LOG_STRIDE: u32 = 6;
}

/// The driver rang the command doorbell: executes what the bits name and reports it, by event where an event queue asks for it.
pub fn doorbell(device: &mut Device, slots: u32) {
    for slot in (0..32).filter(|slot| (slots >> slot) & 1 == 1) {
        if device.faults.strikes_commands() {
            match device.faults.command(opcode_in(device, slot)) {
                Verdict::Execute => {}
                Verdict::Swallow => {
                    device.faults.swallowed_slots |= 1 << slot;
                    continue;
                }
                Verdict::Reset => {
                    device.reset();
                    device.rebooted = true;
                    return;
                }
            }
        }
        // The command that makes the queue for command events is itself polled for, so who reports is settled before.
        let reporter = device
            .eqs
            .iter()
            .find(|(_, eq)| eq.takes(kind::COMMAND))
            .map(|(eqn, _)| eqn);
        if let Err(fault) = serve(device, slot) {
            device.refuse(
                format!("cmd slot {slot}"),
                "address",
                fault.addr,
                "command memory is reachable",
                super::PRM,
            );
            continue;
        }
        if let Some(eqn) = reporter {
            event::command_done(device, eqn, 1 << slot);
        }
        super::pages::balance(device);
    }
}

/// Hands back the slots of commands that were never answered, late and without an answer: the driver has long given up,
/// and freed all but the slot, which it has no use of until then (nor does it unload, or recover from an error).
pub fn hand_back(device: &mut Device) {
    let slots = std::mem::take(&mut device.faults.swallowed_slots);
    for slot in (0..32u32).filter(|slot| (slots >> slot) & 1 == 1) {
        let at = device.commands.address + (u64::from(slot) << CommandQueue::LOG_STRIDE);
        let status = (Delivery::Firmware as u8) << 1;
        let reporter = device.eqs.iter().find(|(_, eq)| eq.takes(kind::COMMAND));
        let reporter = reporter.map(|(eqn, _)| eqn);
        if device.host.publish(at + entry::STATUS, &[status]).is_ok() {
            if let Some(eqn) = reporter {
                event::command_done(device, eqn, 1 << slot);
            }
        }
    }
}

/// Opcode of the command in a slot, before it is executed; 0 if it cannot be read.
fn opcode_in(device: &Device, slot: u32) -> u16 {
    let at = device.commands.address + (u64::from(slot) << CommandQueue::LOG_STRIDE);
    let mut head = [0; entry::SIZE];
    let read = device.host.read(at, &mut head);
    let input = entry::INPUT.bytes(&head);
    read.map_or(0, |()| header::opcode.get(input) as u16)
}

/// Executes the command in a slot. The driver's own memory going away is the only error.
fn serve(device: &mut Device, slot: u32) -> Result<(), DmaFault> {
    let at = device.commands.address + (u64::from(slot) << CommandQueue::LOG_STRIDE);
    let mut head = [0; entry::SIZE];
    device.host.read(at, &mut head)?;
    if !entry::OWNED_BY_DEVICE.is_set(&head) {
        device.refuse(
            format!("cmd slot {slot}"),
            "status_own",
            0u8,
            "a slot is handed over before its doorbell",
            super::PRM,
        );
        return Ok(());
    }
    let delivery = match deliver(device, at, &head) {
        Ok(()) => Delivery::Ok,
        Err(delivery) => {
            device.refuse(
                format!("cmd slot {slot}"),
                "delivery",
                delivery as u8,
                "a well-formed command entry",
                super::PRM,
            );
            delivery
        }
    };
    device
        .host
        .publish(at + entry::STATUS, &[(delivery as u8) << 1])
}

fn deliver(device: &mut Device, at: u64, head: &[u8]) -> Result<(), Delivery> {
    if entry::KIND.get(head) != entry::KIND_PCIE {
        return Err(Delivery::Descriptor);
    }
    let token = entry::TOKEN.get(head) as u8;
    let input_len = entry::INPUT_LEN.get(head) as usize;
    let output_len = entry::OUTPUT_LEN.get(head) as usize;
    if input_len > MAX_LEN {
        return Err(Delivery::InputLength);
    }
    if output_len > MAX_LEN {
        return Err(Delivery::OutputLength);
    }
    let input = gather(device, head, input_len, token)?;
    // Whoever could not learn what a command did must find that it did nothing.
    let mailboxes = output_mailboxes(device, at, head, output_len)?;
    let request = Request {
        input: &input,
        output_len,
    };
    tracing::debug!(
        "{}: {} uid {} op_mod {} in {input_len} out {output_len}",
        device.name,
        opcode::name(request.opcode()).unwrap_or("unknown command"),
        request.uid(),
        request.op_mod()
    );
    let mut output = execute(device, &request);
    output.resize(output_len, 0);
    scatter(device, at, &mailboxes, &output, token)
}

/// Reads the input from the entry and its mailboxes.
fn gather(device: &Device, head: &[u8], len: usize, token: u8) -> Result<Vec<u8>, Delivery> {
    let mut input = entry::INPUT.bytes(head).to_vec();
    let mut next = entry::INPUT_MAILBOX.get(head);
    let mut mailbox = [0; block::SIZE];
    for number in 0..len.saturating_sub(entry::INLINE).div_ceil(block::DATA) {
        if next == 0 || next % block::ALIGNMENT != 0 {
            return Err(Delivery::InputAlignment);
        }
        device.host.read(next, &mut mailbox)?;
        if block::NUMBER.get(&mailbox) != number as u64 {
            return Err(Delivery::BlockNumber);
        }
        if block::TOKEN.get(&mailbox) != u64::from(token) {
            return Err(Delivery::Token);
        }
        input.extend_from_slice(&mailbox[..block::DATA]);
        next = block::NEXT.get(&mailbox);
    }
    input.truncate(len);
    Ok(input)
}

/// Finds the mailboxes for an output and that they, and the entry, can be written.
fn output_mailboxes(
    device: &Device,
    at: u64,
    head: &[u8],
    len: usize,
) -> Result<Vec<u64>, Delivery> {
    device.host.write(at + entry::OUTPUT, &[0; entry::INLINE])?;
    let count = len.saturating_sub(entry::INLINE).div_ceil(block::DATA);
    let mut mailboxes = Vec::with_capacity(count);
    let mut next = entry::OUTPUT_MAILBOX.get(head);
    let mut mailbox = [0; block::SIZE];
    for _ in 0..count {
        if next == 0 || next % block::ALIGNMENT != 0 {
            return Err(Delivery::OutputAlignment);
        }
        device.host.read(next, &mut mailbox)?;
        device.host.write(next, &mailbox)?;
        mailboxes.push(next);
        next = block::NEXT.get(&mailbox);
    }
    Ok(mailboxes)
}

/// Writes the output to the entry and its mailboxes.
fn scatter(
    device: &Device,
    at: u64,
    mailboxes: &[u64],
    output: &[u8],
    token: u8,
) -> Result<(), Delivery> {
    let (inline, rest) = output.split_at(output.len().min(entry::INLINE));
    device.host.write(at + entry::OUTPUT, inline)?;
    for (mailbox, data) in mailboxes.iter().zip(rest.chunks(block::DATA)) {
        device.host.write(*mailbox, data)?;
        device.host.write(mailbox + block::TOKEN_AT, &[token])?;
    }
    Ok(())
}
