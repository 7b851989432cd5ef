// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a modelled PCI function and its host (QEMU through vfio-user, or a process) need of each other.
//!
//! The model knows nothing of vfio-user, the front ends nothing of mlx5: they meet only here.

use std::ops::Range;
use std::sync::Arc;

use vm_memory::VolatileSlice;

/// A bus-master access that reached no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaFault {
    /// First byte that could not be reached.
    pub addr: u64,
    /// Length of the whole access in bytes.
    pub len: usize,
    /// True for a write by the device.
    pub write: bool,
}

/// Memory as the function's bus master sees it: bus addresses, any alignment, across mappings.
pub trait Dma: Send + Sync {
    /// Copies `buf.len()` bytes from bus address `addr`.
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), DmaFault>;
    /// Copies `buf` to bus address `addr`.
    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault>;
    /// One store of a naturally aligned 1-, 2-, 4- or 8-byte `buf` that is seen whole, and after every earlier write.
    /// Any other length or alignment is a fault.
    fn publish(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault>;
    /// Writes an entry of a queue: its last 8 bytes, which are aligned, in one store after all others.
    fn write_entry(&self, addr: u64, entry: &[u8]) -> Result<(), DmaFault> {
        let (body, last) = entry.split_at(entry.len().saturating_sub(8));
        self.write(addr, body)?;
        self.publish(addr.wrapping_add(body.len() as u64), last)
    }
    /// A 64-bit add-and-fetch-old or compare-and-swap on an aligned quadword, atomic to the CPUs that share the memory.
    /// `f` maps the old native-endian value to the new one, or `None` to leave it; the old value is returned. When a CPU
    /// changes the quadword meanwhile, `f` is asked again.
    fn atomic64(&self, addr: u64, f: &mut dyn FnMut(u64) -> Option<u64>) -> Result<u64, DmaFault>;
    /// Gives the memory of a range to `f`, one piece after the other, and takes none of it away before this returns. With
    /// `write`, `f` fills each piece whole; without, it only reads. `f` may lend from this or another memory meanwhile.
    ///
    /// Memory that has no address in this process goes through a buffer.
    fn lend(
        &self,
        addr: u64,
        len: usize,
        write: bool,
        f: &mut dyn FnMut(VolatileSlice<'_>),
    ) -> Result<(), DmaFault> {
        let mut buffer = [0; 4096];
        let mut done = 0;
        while done < len {
            let piece = &mut buffer[..(len - done).min(4096)];
            let at = addr.wrapping_add(done as u64);
            if !write {
                self.read(at, piece)?;
            }
            f(VolatileSlice::from(&mut *piece));
            if write {
                self.write(at, piece)?;
            }
            done += piece.len();
        }
        Ok(())
    }
    /// A posted write of at most 64 bytes that goes wherever the PCI fabric routes it: to another function's registers
    /// too, which `write` does not reach. The caller must hold no lock that its own register accesses take.
    fn post(&self, addr: u64, buf: &[u8]) -> Result<(), DmaFault>;
}

/// MSI-X as seen by the function.
pub trait Interrupts: Send + Sync {
    /// Signals a vector; masked, unassigned and out-of-range vectors are dropped.
    fn raise(&self, vector: u16);
}

/// Why a function is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetKind {
    /// Power-on, secondary bus reset or any other reset by the host of the model.
    Bus,
    /// Function-level reset through the PCIe capability.
    FunctionLevel,
}

/// A PCI function. Calls come from the front end's thread, one at a time, except `bar_write`, which peers call too
/// (a GPU rings a NIC's doorbell), and `counts`. All must return promptly.
pub trait Function: Send + Sync {
    /// Short unique name, as in logs: `nic0`, `gpu1`.
    fn name(&self) -> &str;
    /// Config space at power-on, and its writable bits.
    fn config_space(&self) -> crate::pci::ConfigSpace;
    /// Sizes of the BARs in bytes, index 0 to 5; 0 for none (or the upper half of a 64-bit one).
    fn bar_sizes(&self) -> [u64; 6];
    /// MSI-X vectors; 0 for none.
    fn msix_vectors(&self) -> u16;
    /// Gives the function its view of memory and its interrupts; called once, before any access.
    fn connect(&self, dma: Arc<dyn Dma>, interrupts: Arc<dyn Interrupts>);
    /// The memory behind a BAR that is nothing but memory, which peers may then reach by DMA; `None` for registers.
    fn bar_memory(&self, _bar: usize) -> Option<Arc<crate::mem::SharedMemory>> {
        None
    }
    /// The part of a BAR that the host may map instead of asking, and the memory that the whole BAR lies in: all of it if it
    /// is nothing but memory.
    fn bar_window(&self, bar: usize) -> Option<(Arc<crate::mem::SharedMemory>, Range<u64>)> {
        let memory = self.bar_memory(bar)?;
        let all = 0..memory.len() as u64;
        Some((memory, all))
    }
    /// MMIO read; bytes that no register covers read as 0.
    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]);
    /// MMIO write, of the length and alignment that the CPU used.
    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]);
    /// Bus mastering was switched (command register bit 2): while off the function must not touch memory.
    fn bus_master(&self, enabled: bool);
    /// Where the host placed a BAR (bus address), or `None` while it is not decoded.
    fn bar_placed(&self, bar: usize, address: Option<u64>);
    /// Everything the function held is gone.
    fn reset(&self, kind: ResetKind);
    /// Carries out a control command (`fault`, `link`) with its words after the function's name.
    fn steer(&self, command: &str, _words: &[&str]) -> Result<serde_json::Value, String> {
        Err(format!("{} does not know {command}", self.name()))
    }
    /// Live objects and events by name, for the control socket: `("qp", 3)`. Names are stable.
    fn counts(&self) -> Vec<(&'static str, u64)>;
}
