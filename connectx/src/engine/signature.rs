// SPDX-License-Identifier: MIT OR Apache-2.0
//! Access through keys with signatures: what goes to the wire is checked against those in memory and gets those of the wire,
//! and the other way round.
//!
//! What a signature is depends on where its block is in the key's stream, so a packet that comes or goes again is treated as
//! it was. The part of a block that other packets have is read from memory.

use super::completion::{self, Completion};
use super::lent::Data;
use super::memory::{self, Denied, Purpose, Range};
use crate::ifc::wqe::cqe_opcode;
use crate::objects::device::Device;
use crate::objects::memory::Mkey;
use crate::objects::signature::{Bsf, Domain, Extent, Signature, SignatureError, bytes_of};

/// A key with signatures and a range of its wire's stream.
pub(super) struct Access<'a> {
    device: &'a Device,
    key: &'a Mkey,
    signature: &'a Signature,
    bsf: &'a Bsf,
    number: u32,
    extent: Extent,
    /// Seeds and tags of the memory's domain and of the wire's.
    transients: (u64, u64),
}

/// Data of a key from an offset on, and the signatures that lie between it in memory, by their blocks.
#[derive(Default)]
struct Stored {
    start: u64,
    data: Vec<u8>,
    signatures: Vec<(u64, u64)>,
}

impl Stored {
    /// A range of it; empty if not all of it is there.
    fn range(&self, start: u64, end: u64) -> &[u8] {
        let Some(from) = start.checked_sub(self.start) else {
            return &[];
        };
        let range = from as usize..(end - self.start) as usize;
        self.data.get(range).unwrap_or_default()
    }

    fn block(&self, domain: &Domain, block: u64) -> &[u8] {
        let start = block * domain.block;
        self.range(start, start + domain.block)
    }

    fn signature(&self, block: u64) -> Option<u64> {
        let found = self.signatures.binary_search_by_key(&block, |(of, _)| *of);
        self.signatures.get(found.ok()?).map(|(_, value)| *value)
    }
}

/// A piece of a stream.
enum Part<'a> {
    Data(&'a [u8]),
    /// Of a block's signature, from a byte on.
    Signature(u64, usize, &'a [u8]),
}

/// Calls `f` with the pieces of what lies at an offset of a domain's stream.
fn split<'a>(
    domain: Option<&Domain>,
    mut at: u64,
    mut bytes: &'a [u8],
    f: &mut dyn FnMut(Part<'a>),
) {
    let Some(domain) = domain else {
        return f(Part::Data(bytes));
    };
    while !bytes.is_empty() {
        let (block, within) = (at / domain.unit(), at % domain.unit());
        let in_data = within < domain.block;
        let end = if in_data { domain.block } else { domain.unit() };
        let (piece, rest) = bytes.split_at(bytes.len().min((end - within) as usize));
        f(match in_data {
            true => Part::Data(piece),
            false => Part::Signature(block, (within - domain.block) as usize, piece),
        });
        at += piece.len() as u64;
        bytes = rest;
    }
}

/// Blocks that end within a range of data.
fn ending(domain: Option<&Domain>, data: (u64, u64)) -> std::ops::Range<u64> {
    domain.map_or(0..0, |d| {
        data.0 / d.block..(data.1 / d.block).max(data.0 / d.block)
    })
}

impl<'a> Access<'a> {
    /// An access to a range that lies within a key. `None` if the key has no signatures.
    pub fn new(device: &'a Device, key: &'a Mkey, range: Range) -> Option<Result<Self, Denied>> {
        let signature = key.signature.as_deref()?;
        let bsf = signature.active()?;
        let transient = |domain: Option<Domain>| match domain {
            None => Some(0),
            Some(domain) => {
                let psv = device.psvs.get(domain.psv);
                psv.filter(|psv| psv.pd == key.pd).map(|psv| psv.transient)
            }
        };
        let offset = range.address.wrapping_sub(key.start);
        let Some(extent) = bsf.extent(offset, range.len) else {
            return Some(Err(Denied::Bounds));
        };
        let (Some(memory), Some(wire)) = (transient(bsf.memory), transient(bsf.wire)) else {
            return Some(Err(Denied::Signature));
        };
        Some(Ok(Self {
            device,
            key,
            signature,
            bsf,
            number: range.key,
            extent,
            transients: (memory, wire),
        }))
    }

    /// Where the data starts that the signatures within the range depend on.
    fn start(&self) -> u64 {
        let Extent { wire, data } = self.extent;
        let mut start = data.0;
        if let Some(domain) = &self.bsf.memory {
            let block = data.0 / domain.block;
            if (block + 1) * domain.block <= data.1 {
                start = start.min(block * domain.block);
            }
        }
        if let Some(domain) = &self.bsf.wire {
            let block = wire.0 / domain.unit();
            if block * domain.unit() + domain.block < wire.1 {
                start = start.min(block * domain.block);
            }
        }
        start
    }

    /// Calls `f` for each piece of a range of the key's memory.
    fn in_memory(
        &self,
        purpose: Purpose,
        offset: u64,
        len: usize,
        f: &mut dyn FnMut(u64, std::ops::Range<usize>) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
        let range = Range {
            key: self.number,
            address: self.key.start.wrapping_add(offset),
            len: len as u64,
        };
        memory::walk_key(self.device, self.key, range, purpose, f)
    }

    /// Reads data, and the signatures of the blocks that end there.
    fn load(&self, start: u64, end: u64) -> Result<Stored, Denied> {
        let mut stored = Stored {
            start,
            ..Stored::default()
        };
        if start == end {
            return Ok(stored);
        }
        let offset = self.bsf.in_memory(start);
        let mut raw = vec![0; (self.bsf.memory_end(end) - offset) as usize];
        self.in_memory(Purpose::LocalRead, offset, raw.len(), &mut |bus, part| {
            let piece = raw.get_mut(part).ok_or(Denied::Translation)?;
            self.device.host.read(bus, piece).map_err(|_| Denied::Dma)
        })?;
        let domain = self.bsf.memory.as_ref();
        split(domain, offset, &raw, &mut |part| match (part, domain) {
            (Part::Data(piece), _) => stored.data.extend_from_slice(piece),
            (Part::Signature(block, _, piece), Some(domain)) => {
                let mut bytes = [0; 8];
                bytes[..piece.len()].copy_from_slice(piece);
                stored.signatures.push((block, domain.from_bytes(bytes)));
            }
            _ => {}
        });
        Ok(stored)
    }

    /// Compares a signature that has come in. Of several that are wrong the first is told.
    fn check(&self, in_memory: bool, domain: &Domain, block: u64, actual: u64, data: &[u8]) {
        let (memory, wire) = self.transients;
        let transient = if in_memory { memory } else { wire };
        let expected = domain.generate(transient, block, data);
        let syndrome = domain.compare(expected, actual, self.bsf.check);
        if syndrome != 0 && !self.signature.reported.replace(true) {
            self.device
                .signature_errors
                .borrow_mut()
                .push(SignatureError {
                    key: self.number,
                    in_memory,
                    syndrome,
                    expected,
                    actual,
                    offset: block * domain.unit(),
                });
        }
    }

    /// The signature that goes out: what is copied, and the rest as the domain has it.
    fn outgoing(
        &self,
        domain: &Domain,
        transient: u64,
        block: u64,
        data: &[u8],
        came: Option<u64>,
    ) -> u64 {
        let value = domain.generate(transient, block, data);
        match (self.bsf.copy, came) {
            (Some(mask), Some(came)) => came & bytes_of(mask) | value & !bytes_of(mask),
            _ => value,
        }
    }

    /// From memory to the wire.
    pub fn read(&self, into: &mut [u8]) -> Result<(), Denied> {
        let data = self.extent.data;
        let stored = self.load(self.start(), data.1)?;
        if let Some(domain) = &self.bsf.memory {
            for block in ending(Some(domain), data) {
                let actual = stored.signature(block).ok_or(Denied::Translation)?;
                self.check(true, domain, block, actual, stored.block(domain, block));
            }
        }
        let mut at = self.extent.wire.0;
        let mut done = 0;
        while done < into.len() {
            // Without signatures on the wire all is one piece.
            let (bytes, signed);
            let piece: &[u8] = match &self.bsf.wire {
                Some(domain) if at % domain.unit() >= domain.block => {
                    let block = at / domain.unit();
                    let (content, came) = (stored.block(domain, block), stored.signature(block));
                    let value = self.outgoing(domain, self.transients.1, block, content, came);
                    signed = domain.to_bytes(value);
                    let from = (at % domain.unit() - domain.block) as usize;
                    &signed[from..domain.signature()]
                }
                wire => {
                    let (start, left) = match wire {
                        Some(domain) => {
                            let within = at % domain.unit();
                            let block = at / domain.unit() * domain.block;
                            (block + within, domain.block - within)
                        }
                        None => (at, into.len() as u64),
                    };
                    let from = (start - stored.start) as usize;
                    let end = (from + left as usize).min(stored.data.len());
                    bytes = stored.data.get(from..end).unwrap_or_default();
                    bytes
                }
            };
            let len = piece.len().min(into.len() - done);
            if len == 0 {
                return Err(Denied::Translation);
            }
            into[done..done + len].copy_from_slice(&piece[..len]);
            done += len;
            at += len as u64;
        }
        Ok(())
    }

    /// From the wire to memory.
    pub fn write(&self, from: Data<'_>) -> Result<(), Denied> {
        let bytes = from.to_vec()?;
        let data = self.extent.data;
        let wire = self.bsf.wire.as_ref();
        let mut stored = self.load(self.start(), data.0)?;
        stored.signatures.clear();
        // What of the wire's stream goes to memory, where both have the same blocks.
        let mut same = Vec::new();
        let mut same_at = self.extent.wire.0;
        split(wire, same_at, &bytes, &mut |part| {
            let (block, start, piece) = match part {
                Part::Data(piece) => {
                    stored.data.extend_from_slice(piece);
                    return same.extend_from_slice(piece);
                }
                Part::Signature(block, start, piece) => (block, start, piece),
            };
            let Some(domain) = wire else {
                return;
            };
            let (of, mut signature) = self.signature.partial.get();
            if of != block || start == 0 {
                signature = [0; 8];
            }
            signature[start..start + piece.len()].copy_from_slice(piece);
            self.signature.partial.set((block, signature));
            if same.is_empty() {
                same_at = block * domain.unit() + domain.block;
            }
            if start + piece.len() < domain.signature() {
                return;
            }
            let came = domain.from_bytes(signature);
            let content = stored.block(domain, block);
            self.check(false, domain, block, came, content);
            if let (Some(memory), Some(_)) = (&self.bsf.memory, self.bsf.copy) {
                let value = self.outgoing(memory, self.transients.0, block, content, Some(came));
                same.extend_from_slice(&memory.to_bytes(value)[..memory.signature()]);
            }
        });
        if self.bsf.copy.is_some() {
            return self.store(same_at, &same);
        }
        let mut image = Vec::with_capacity(bytes.len());
        let mut at = data.0;
        if let Some(memory) = &self.bsf.memory {
            for block in ending(Some(memory), data) {
                let end = (block + 1) * memory.block;
                let content = stored.block(memory, block);
                image.extend_from_slice(stored.range(at, end));
                let value = memory.generate(self.transients.0, block, content);
                image.extend_from_slice(&memory.to_bytes(value)[..memory.signature()]);
                at = end;
            }
        }
        image.extend_from_slice(stored.range(at, data.1));
        self.store(self.bsf.in_memory(data.0), &image)
    }

    fn store(&self, offset: u64, image: &[u8]) -> Result<(), Denied> {
        if image.is_empty() {
            return Ok(());
        }
        self.in_memory(
            Purpose::LocalWrite,
            offset,
            image.len(),
            &mut |bus, part| {
                let piece = image.get(part).ok_or(Denied::Translation)?;
                self.device.host.write(bus, piece).map_err(|_| Denied::Dma)
            },
        )
    }
}

/// Tells a completion queue of the wrong signatures that an access has met. `true` if there were any.
pub(super) fn report(device: &mut Device, cqn: u32, qpn: u32) -> bool {
    let errors = device.signature_errors.take();
    for error in &errors {
        device.counters.signature_errors += 1;
        let mut entry = Completion::new(cqe_opcode::SIG_ERR, qpn, 0, 0);
        entry.signature = Some(*error);
        completion::post(device, cqn, &entry);
    }
    !errors.is_empty()
}
