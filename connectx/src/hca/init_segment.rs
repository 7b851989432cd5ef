// SPDX-License-Identifier: MIT OR Apache-2.0
//! The initialisation segment: the registers that exist before there is a command interface.

use super::clock;
use crate::cmd;
use crate::cmd::CommandQueue;
use crate::ifc::register::{health_buffer, iseg};
use crate::objects::device::Device;

/// Firmware version 20.35.1012 of a ConnectX-6.
const FW_MAJOR: u32 = 20;
const FW_MINOR: u32 = 35;
const FW_SUBMINOR: u32 = 1012;
/// Command interface revision that the driver demands.
const COMMAND_INTERFACE: u32 = 5;
/// Hardware id of ConnectX-6.
const HW_ID: u32 = 0x20f;
/// Log2 of entries and stride of the command queue.
const COMMAND_QUEUE_SIZES: u32 = (5 << 4) | 6;
const _: () = assert!(cmd::CommandQueue::LOG_ENTRIES == 5 && cmd::CommandQueue::LOG_STRIDE == 6);

/// Registers without a field in `mlx5_ifc_initial_seg_bits`: `struct mlx5_init_seg`, `include/linux/mlx5/device.h`.
const INTERNAL_TIMER_HIGH: u64 = 0x1000;
const INTERNAL_TIMER_LOW: u64 = 0x1004;
/// How long the driver is to wait for a command, and for the device to take the command queue: milliseconds in the low
/// 20 bits (`mlx5_tout_query_iseg`, core/lib/tout.c). Not 0, or the driver uses what it was built with.
const COMMAND_TIMEOUT: u64 = 0xff8;
const QUEUE_TIMEOUT: u64 = 0xffc;
const QUEUE_TIMEOUT_MS: u32 = 2000;

const FW_REV: u64 = iseg::fw_rev_minor.offset() as u64;
const CMDIF_REV: u64 = iseg::cmd_interface_rev.offset() as u64;
const QUEUE_HIGH: u64 = iseg::cmdq_phy_addr_63_32.offset() as u64;
const QUEUE_LOW: u64 = iseg::cmdq_phy_addr_31_12.offset() as u64;
const DOORBELL: u64 = iseg::command_doorbell_vector.offset() as u64;
const HEALTH: u64 = iseg::health_buffer.offset() as u64;
const HEALTH_FW: u64 = HEALTH + health_buffer::fw_version.offset() as u64;
const HEALTH_HW: u64 = HEALTH + health_buffer::hw_id.offset() as u64;
const HEALTH_RFR: u64 = HEALTH + health_buffer::rfr.offset() as u64;
const HEALTH_SYNDROME: u64 = HEALTH + (health_buffer::synd.offset() as u64 & !3);
const INITIALIZING: u64 = iseg::initializing.offset() as u64;
const HEALTH_COUNTER: u64 = iseg::health_syndrome.offset() as u64;

/// Bits 10:8 of the queue's low word: state of the NIC interface, `MLX5_NIC_IFC_*`.
const NIC_STATE: u32 = 0x700;
/// Full driver.
const NIC_FULL: u32 = 0;
/// No driver: how the device comes out of a reset of its own.
const NIC_DISABLED: u32 = 1 << 8;
/// The driver asks for a reset of the firmware.
const NIC_SW_RESET: u32 = 7 << 8;
/// Bit of the `initializing` word: a driver may ask for that (`MLX5_FW_RESET_SUPPORTED_OFFSET`, core/health.c).
const FW_RESET_SUPPORTED: u32 = 1 << 30;

/// The segment's state.
#[derive(Debug, Clone, Copy)]
pub(super) struct InitSegment {
    queue_high: u32,
    queue_low: u32,
    pub(super) health: Health,
    /// Milliseconds that a driver that starts is told to wait for a command.
    pub(super) command_timeout: u32,
}

impl Default for InitSegment {
    /// After power-on: healthy, and waiting for a driver.
    fn default() -> Self {
        Self {
            queue_high: 0,
            queue_low: NIC_DISABLED,
            health: Health::default(),
            command_timeout: Self::COMMAND_TIMEOUT_MS,
        }
    }
}

/// What the health buffer shows.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Health {
    /// Value at which the counter stands still.
    pub frozen: Option<u32>,
    /// Syndrome; 0 is none. With it the device asks for a reset.
    pub syndrome: u8,
}

/// What a write leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// The command queue is at an address.
    Queue(u64),
    /// The driver gave up the interface: everything is dropped.
    Drop,
    /// Commands are in the slots with a bit set.
    Commands(u32),
}

impl InitSegment {
    /// What hardware tells its drivers.
    pub(super) const COMMAND_TIMEOUT_MS: u32 = 60_000;

    fn word(&self, offset: u64) -> u32 {
        let ticks = clock::ticks();
        match offset {
            FW_REV => (FW_MINOR << 16) | FW_MAJOR,
            CMDIF_REV => (COMMAND_INTERFACE << 16) | FW_SUBMINOR,
            QUEUE_HIGH => self.queue_high,
            QUEUE_LOW => self.queue_low & !0xff | COMMAND_QUEUE_SIZES,
            HEALTH_FW => (FW_MAJOR << 24) | (FW_MINOR << 16) | FW_SUBMINOR,
            HEALTH_HW => HW_ID,
            INTERNAL_TIMER_HIGH => (ticks >> 32) as u32,
            INTERNAL_TIMER_LOW => ticks as u32,
            COMMAND_TIMEOUT => self.command_timeout,
            QUEUE_TIMEOUT => QUEUE_TIMEOUT_MS,
            INITIALIZING => FW_RESET_SUPPORTED,
            HEALTH_RFR => u32::from(self.health.syndrome != 0) << 31,
            HEALTH_SYNDROME => u32::from(self.health.syndrome) << 16,
            HEALTH_COUNTER => self.health.frozen.unwrap_or_else(clock::health_counter),
            _ => 0,
        }
    }

    /// After a reset: as after power-on, except for what the model was told to say.
    pub(super) fn reset(&mut self) {
        *self = Self {
            command_timeout: self.command_timeout,
            ..Self::default()
        };
    }

    /// Reads registers; they are big-endian.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset + i as u64;
            *byte = self.word(at & !3).to_be_bytes()[(at & 3) as usize];
        }
    }

    /// Writes a register of 4 bytes. Others have no effect.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Action {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return Action::Nothing;
        };
        let value = u32::from_be_bytes(bytes);
        match offset {
            QUEUE_HIGH => self.queue_high = value,
            QUEUE_LOW => {
                self.queue_low = value;
                if value & NIC_STATE == NIC_SW_RESET {
                    self.reset();
                    return Action::Drop;
                }
                if value & NIC_STATE != NIC_FULL {
                    return Action::Drop;
                }
                return Action::Queue(
                    (u64::from(self.queue_high) << 32) | u64::from(value & !0xfff),
                );
            }
            DOORBELL => return Action::Commands(value),
            _ => {}
        }
        Action::Nothing
    }
}

/// Does what a write leads to.
pub(super) fn act(device: &mut Device, action: Action) {
    match action {
        Action::Nothing => {}
        Action::Queue(address) => device.commands = CommandQueue { address },
        Action::Drop => device.drop_everything(),
        Action::Commands(slots) => cmd::doorbell(device, slots),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_big_endian_words() {
        let segment = InitSegment::default();
        let mut word = [0; 4];
        segment.read(0, &mut word);
        assert_eq!(word, [0, 35, 0, 20]);
        segment.read(4, &mut word);
        assert_eq!(word, [0, 5, 0x03, 0xf4]);
        segment.read(0x14, &mut word);
        assert_eq!(word, [0, 0, 1, 0x56], "no driver yet");
        segment.read(0xff8, &mut word);
        assert_eq!(word, [0, 0, 0xea, 0x60]);
        segment.read(0x230, &mut word);
        assert_eq!(word, [20, 35, 0x03, 0xf4]);
        segment.read(0x1010, &mut word);
        assert_ne!(word, [0; 4], "the driver waits for a counter that is not 0");
        let mut byte = [0];
        segment.read(0x23d, &mut byte);
        assert_eq!(byte, [0], "no health syndrome");
    }

    #[test]
    fn the_command_queue_is_set_by_its_low_word() {
        let mut segment = InitSegment::default();
        assert_eq!(segment.write(0x10, &[0, 0, 0, 1]), Action::Nothing);
        assert_eq!(
            segment.write(0x14, &[0x23, 0x45, 0x60, 0]),
            Action::Queue(0x1_2345_6000)
        );
        assert_eq!(
            segment.write(0x18, &[0x80, 0, 0, 1]),
            Action::Commands(0x8000_0001)
        );
        assert_eq!(segment.write(0x14, &[0x23, 0x45, 0x61, 0]), Action::Drop);
        assert_eq!(segment.write(0x18, &[1; 8]), Action::Nothing);
    }
}
