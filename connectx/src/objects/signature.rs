// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signatures of memory keys: what a BSF says about blocks of data, and the values that they have.
//!
//! A key with a BSF has three streams of the same data: what lies in memory, with the signatures of the memory domain
//! after each block; what is on the wire, with those of the wire domain; and the data alone. Addresses under the key are
//! those of the wire; its length is that in memory (rdma-core's mlx5dv_wr_set_mkey_sig_block(3), and `rdma_rw_ctx_signature_init`
//! of the kernel, which leaves the signatures out of the wire's length where that has none).

use std::cell::Cell;

use crc::{CRC_16_T10_DIF, CRC_32_ISCSI, CRC_32_ISO_HDLC, CRC_64_NVME, Crc};

use super::table::Weigh;
use crate::ifc::wqe::{bsf, bsf_inl};

static CRC16: Crc<u16> = Crc::<u16>::new(&CRC_16_T10_DIF);
static CRC32: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);
static CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
static CRC64: Crc<u64> = Crc::<u64>::new(&CRC_64_NVME);

/// Prediction signature value: seed of a domain's guard, and tags of its first block.
#[derive(Debug, Clone, Copy)]
pub struct Psv {
    /// Owner.
    pub uid: u16,
    /// Protection domain.
    pub pd: u32,
    /// Guard, application tag and reference tag; of a CRC32, the upper half is the seed; of a CRC64, all.
    pub transient: u64,
}

impl Weigh for Psv {}

/// Tags that say that a block of T10-DIF is not to be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    None,
    /// An application tag of all ones.
    Application,
    /// Both tags of all ones.
    Both,
}

/// Kind of a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// T10-DIF: 2 bytes of guard, 2 of application tag, 4 of reference tag.
    T10 {
        /// The guard is an IP checksum and no CRC.
        checksum: bool,
        /// The reference tag goes up by one with each block.
        increments: bool,
        escape: Escape,
        /// Bits of the application tag that are checked.
        application: u16,
    },
    Crc32,
    Crc32c,
    /// CRC64 of XP10, which is NVMe's.
    Crc64,
}

/// Signatures of one domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Domain {
    kind: Kind,
    /// Bytes of data that one signature is for.
    pub block: u64,
    /// Number of its PSV.
    pub psv: u32,
}

impl Domain {
    /// Bytes of a signature.
    pub fn signature(&self) -> usize {
        match self.kind {
            Kind::Crc32 | Kind::Crc32c => 4,
            Kind::T10 { .. } | Kind::Crc64 => 8,
        }
    }

    /// Bytes of a block with its signature.
    pub fn unit(&self) -> u64 {
        self.block + self.signature() as u64
    }

    /// The signature of a block, by its number in the stream, as a PSV has it.
    pub fn generate(&self, transient: u64, block: u64, data: &[u8]) -> u64 {
        match self.kind {
            Kind::T10 {
                checksum,
                increments,
                ..
            } => {
                let seed = (transient >> 48) as u16;
                let guard = if checksum {
                    ip_checksum(seed, data)
                } else {
                    let mut digest = CRC16.digest_with_initial(seed);
                    digest.update(data);
                    digest.finalize()
                };
                let added = if increments { block as u32 } else { 0 };
                let reference = (transient as u32).wrapping_add(added);
                (u64::from(guard) << 48) | (transient & (0xffff << 32)) | u64::from(reference)
            }
            Kind::Crc32 | Kind::Crc32c => {
                let crc = match self.kind {
                    Kind::Crc32 => &CRC32,
                    _ => &CRC32C,
                };
                let mut digest = crc.digest_with_initial((transient >> 32) as u32);
                digest.update(data);
                u64::from(digest.finalize()) << 32
            }
            Kind::Crc64 => {
                let mut digest = CRC64.digest_with_initial(transient);
                digest.update(data);
                digest.finalize()
            }
        }
    }

    /// A signature as it lies behind its block: of T10-DIF the first byte is the most significant, of the reflected CRCs
    /// the least (SPDK's accel_mlx5.c has the engine store a CRC32C where a processor of that order loads it).
    pub fn to_bytes(&self, value: u64) -> [u8; 8] {
        match self.kind {
            Kind::T10 { .. } => value.to_be_bytes(),
            Kind::Crc32 | Kind::Crc32c => (value >> 32).to_le_bytes(),
            Kind::Crc64 => value.to_le_bytes(),
        }
    }

    /// The reverse of [`Domain::to_bytes`].
    pub fn from_bytes(&self, bytes: [u8; 8]) -> u64 {
        match self.kind {
            Kind::T10 { .. } => u64::from_be_bytes(bytes),
            Kind::Crc32 | Kind::Crc32c => u64::from_le_bytes(bytes) << 32,
            Kind::Crc64 => u64::from_le_bytes(bytes),
        }
    }

    /// The parts of a signature that are wrong, as bits of an error's syndrome (rdma-core `MLX5_SIGERR_CQE_SYNDROME_*`):
    /// of a checked byte for each bit of `mask`. 0 if none is.
    pub fn compare(&self, expected: u64, actual: u64, mask: u8) -> u16 {
        const REFERENCE: u16 = 1 << 11;
        const APPLICATION: u16 = 1 << 12;
        const GUARD: u16 = 1 << 13;
        let mut wrong = (expected ^ actual) & bytes_of(mask);
        let Kind::T10 {
            escape,
            application,
            ..
        } = self.kind
        else {
            return if wrong == 0 { 0 } else { GUARD };
        };
        let escaped = match escape {
            Escape::None => false,
            Escape::Application => (actual >> 32) as u16 == 0xffff,
            Escape::Both => actual & 0xffff_ffff_ffff == 0xffff_ffff_ffff,
        };
        if escaped {
            return 0;
        }
        wrong &= !(0xffff << 32) | (u64::from(application) << 32);
        let part = |bits: u64, syndrome| if wrong & bits == 0 { 0 } else { syndrome };
        part(0xffff_ffff, REFERENCE) | part(0xffff << 32, APPLICATION) | part(0xffff << 48, GUARD)
    }
}

/// A bit for each byte, spread over the byte.
pub fn bytes_of(mask: u8) -> u64 {
    (0..8)
        .filter(|bit| (mask >> bit) & 1 == 1)
        .fold(0, |all, bit| all | (0xff << (8 * bit)))
}

/// Internet checksum (RFC 1071) of data behind a sum.
fn ip_checksum(seed: u16, data: &[u8]) -> u16 {
    let words = data.chunks(2).map(|pair| match pair {
        [high, low] => u64::from(u16::from_be_bytes([*high, *low])),
        [last] => u64::from(*last) << 8,
        _ => 0,
    });
    let mut sum = words.sum::<u64>() + u64::from(seed);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// What is wrong with a BSF: field, value, rule.
pub type Wrong = (&'static str, u64, &'static str);

/// Byte stream format of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bsf {
    /// Signatures in memory.
    pub memory: Option<Domain>,
    /// Signatures on the wire.
    pub wire: Option<Domain>,
    /// Bytes of an incoming signature that are checked.
    pub check: u8,
    /// Both domains have the same blocks and signatures: the bytes that go from one to the other as they are.
    pub copy: Option<u8>,
    /// Bytes of data.
    pub len: u64,
}

/// A range of a key's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// On the wire.
    pub wire: (u64, u64),
    /// Of the data.
    pub data: (u64, u64),
}

impl Bsf {
    /// The longest.
    pub const SIZE: usize = bsf::SIZE;

    /// Takes a BSF apart.
    pub fn parse(raw: &[u8]) -> Result<Self, Wrong> {
        let mut bytes = [0; bsf::SIZE];
        let len = raw.len().min(bsf::SIZE);
        bytes[..len].copy_from_slice(&raw[..len]);
        let kind = bsf::bsf_size.get(&bytes);
        // Basic, extended, and with the inline part; one for encryption has the fourth.
        let size = [16, 32, 64].get(kind as usize).ok_or((
            "bsf_size",
            kind,
            "a BSF of signatures: basic, extended or inline",
        ))?;
        if raw.len() != *size {
            let rule = "as many octowords as bsf_size says";
            return Err(("bsf_octowords", raw.len() as u64 / 16, rule));
        }
        for (field, value) in [
            ("w_tfs_psv", bsf::w_tfs_psv.get(&bytes)),
            ("m_tfs_psv", bsf::m_tfs_psv.get(&bytes)),
        ] {
            if value != 0 {
                return Err((
                    field,
                    value,
                    "signatures are of blocks, not of transactions",
                ));
            }
        }
        let selector = bsf::mem_bs_selector.get(&bytes);
        let memory = domain(
            ("mem.bs_selector", selector),
            (bsf::m_bfs.get(&bytes), bsf::m_inl.bytes(&bytes)),
            bsf::m_psv.get32(&bytes),
        )?;
        let same = bsf::sbs.is_set(&bytes);
        let selector = match same {
            true => selector,
            false => bsf::wire.get(&bytes),
        };
        let wire = domain(
            ("wire.bs_selector", selector),
            (bsf::w_bfs.get(&bytes), bsf::w_inl.bytes(&bytes)),
            bsf::w_psv.get32(&bytes),
        )?;
        let structure = |domain: Option<Domain>| domain.map(|d| (d.block, d.signature()));
        if same && (memory.is_none() || structure(memory) != structure(wire)) {
            let rule = "where the block structure is the same, both domains have one";
            return Err(("sbs", 1, rule));
        }
        Ok(Self {
            memory,
            wire,
            check: bsf::check_byte_mask.get(&bytes) as u8,
            copy: same.then(|| bsf::wire.get(&bytes) as u8),
            len: bsf::raw_data_size.get(&bytes),
        })
    }

    /// The data in a range of the wire; `None` if it ends beyond what there is.
    pub fn extent(&self, offset: u64, len: u64) -> Option<Extent> {
        let data = |at: u64| match &self.wire {
            Some(wire) => at / wire.unit() * wire.block + (at % wire.unit()).min(wire.block),
            None => at,
        };
        let end = offset.checked_add(len)?;
        let extent = Extent {
            wire: (offset, end),
            data: (data(offset), data(end)),
        };
        (extent.data.1 <= self.len).then_some(extent)
    }

    /// Where data is in memory.
    pub fn in_memory(&self, data: u64) -> u64 {
        match &self.memory {
            Some(memory) => data / memory.block * memory.unit() + data % memory.block,
            None => data,
        }
    }

    /// Where in memory data ends, with the signature of the last block if it is whole.
    pub fn memory_end(&self, data: u64) -> u64 {
        match &self.memory {
            Some(memory) if data % memory.block == 0 => data / memory.block * memory.unit(),
            _ => self.in_memory(data),
        }
    }
}

/// A domain: the selector of its blocks, by its name, of their format, with the inline part, and its PSV. Without blocks
/// there are no signatures.
fn domain(
    (field, blocks): (&'static str, u64),
    (format, inline): (u64, &[u8]),
    psv: u32,
) -> Result<Option<Domain>, Wrong> {
    if blocks == 0 {
        return Ok(None);
    }
    Ok(Some(Domain {
        kind: kind_of(format, inline)?,
        block: block_size(field, blocks)?,
        psv,
    }))
}

/// Sizes of blocks (`bs_selector` of drivers/infiniband/hw/mlx5/wr.c, and of rdma-core's qp.c).
fn block_size(field: &'static str, selector: u64) -> Result<u64, Wrong> {
    match selector {
        1 => Ok(512),
        2 => Ok(520),
        3 => Ok(4096),
        4 => Ok(4160),
        6 => Ok(4048),
        _ => {
            let rule = "1 for 512 bytes, 2 for 520, 3 for 4096, 4 for 4160 or 6 for 4048";
            Err((field, selector, rule))
        }
    }
}

/// What a block format selector and the inline part say (`MLX5_BFS_*` and `MLX5_BSF_*` of rdma-core's wqe.h).
fn kind_of(selector: u64, inline: &[u8]) -> Result<Kind, Wrong> {
    const REPEAT: u64 = 2;
    /// The seed of blocks is 0; it is in the PSV too.
    const SEED: u64 = 1;
    let repeats = "blocks of a format repeat";
    if selector != 0 {
        let kind = match selector & !(REPEAT | SEED) {
            0x20 => Kind::Crc32,
            0x40 => Kind::Crc32c,
            0x50 => Kind::Crc64,
            _ => {
                let rule = "0 for the inline part, or 0x20, 0x40 or 0x50 for a CRC";
                return Err(("bfs", selector, rule));
            }
        };
        return match selector & REPEAT {
            0 => Err(("bfs", selector, repeats)),
            _ => Ok(kind),
        };
    }
    if !bsf_inl::valid.is_set(inline) {
        return Err(("bsf_inl.valid", 0, "a format is in the selector or inline"));
    }
    if !bsf_inl::repeat_block.is_set(inline) {
        return Err(("bsf_inl.repeat_block", 0, repeats));
    }
    let checksum = match bsf_inl::sig_type.get(inline) {
        1 => false,
        2 => true,
        other => {
            let rule = "a guard is 1 a CRC or 2 an IP checksum";
            return Err(("bsf_inl.sig_type", other, rule));
        }
    };
    let escape = match bsf_inl::escape.get(inline) {
        0 => Escape::None,
        1 => Escape::Application,
        2 => Escape::Both,
        other => {
            let rule = "0, or 1 for the application tag, or 2 for both tags";
            return Err(("bsf_inl.escape", other, rule));
        }
    };
    Ok(Kind::T10 {
        checksum,
        increments: bsf_inl::inc_reftag.is_set(inline),
        escape,
        application: bsf_inl::dif_app_bitmask_check.get(inline) as u16,
    })
}

/// What a key that can have signatures has of them.
#[derive(Debug, Clone, Default)]
pub struct Signature {
    /// Bytes of a BSF that it has room for.
    pub room: usize,
    /// Its BSF.
    pub bsf: Option<Bsf>,
    /// The BSF is used (`mkc.bsf_en`).
    pub enabled: bool,
    /// `mkc.expected_sigerr_count`: to change it is to ask for the next error.
    pub expected: bool,
    /// The error that was asked for has been told: there is one for each time.
    pub reported: Cell<bool>,
    /// What has come of a signature that is cut by a packet's end: of which block.
    pub partial: Cell<(u64, [u8; 8])>,
}

impl Signature {
    /// The BSF, if it matters.
    pub fn active(&self) -> Option<&Bsf> {
        self.bsf
            .as_ref()
            .filter(|bsf| self.enabled && (bsf.memory.is_some() || bsf.wire.is_some()))
    }
}

/// A wrong signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignatureError {
    /// The key, of 32 bits.
    pub key: u32,
    /// It is the memory domain's.
    pub in_memory: bool,
    /// What is wrong.
    pub syndrome: u16,
    /// The signature as it should be.
    pub expected: u64,
    /// As it is.
    pub actual: u64,
    /// Where its block starts in the domain.
    pub offset: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(kind: Kind) -> Domain {
        Domain {
            kind,
            block: 512,
            psv: 1,
        }
    }

    const T10: Kind = Kind::T10 {
        checksum: false,
        increments: true,
        escape: Escape::None,
        application: 0xffff,
    };

    #[test]
    fn signatures_have_their_published_check_values() {
        const CHECK: &[u8] = b"123456789";
        let of = |kind, seed| domain(kind).generate(seed, 0, CHECK);
        assert_eq!(of(T10, 0) >> 48, 0xd0db);
        assert_eq!(of(Kind::Crc32, u64::MAX) >> 32, 0xcbf4_3926);
        assert_eq!(of(Kind::Crc32c, u64::MAX) >> 32, 0xe306_9283);
        // Of NVMe's base specification, 64b CRC: 4 KiB of zeros.
        let zeros = domain(Kind::Crc64).generate(u64::MAX, 0, &[0; 4096]);
        assert_eq!(zeros, 0x6482_d367_eb22_b64e);
        assert_eq!(of(Kind::Crc64, u64::MAX), 0xae8b_1486_0a79_9888);
        assert_ne!(
            of(Kind::Crc32, 0),
            of(Kind::Crc32, u64::MAX),
            "the seed counts"
        );
        // The example of RFC 1071.
        let sum = ip_checksum(0, &[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum, !0xddf2);
        assert_eq!(ip_checksum(0, &[0x12]), !0x1200);
    }

    #[test]
    fn tags_and_their_order_in_memory() {
        let d = domain(T10);
        let value = d.generate(0xabcd_0000_0007, 2, b"123456789");
        assert_eq!(value, 0xd0db_abcd_0000_0009);
        assert_eq!(d.to_bytes(value), [0xd0, 0xdb, 0xab, 0xcd, 0, 0, 0, 9]);
        let crc = domain(Kind::Crc32c);
        let value = crc.generate(u64::MAX, 0, b"123456789");
        assert_eq!(crc.to_bytes(value)[..4], [0x83, 0x92, 0x06, 0xe3]);
        for d in [d, crc, domain(Kind::Crc64)] {
            let value = d.generate(5 << 32, 3, b"x");
            assert_eq!(d.from_bytes(d.to_bytes(value)), value);
        }
    }

    #[test]
    fn what_is_wrong_is_told_apart() {
        let d = domain(T10);
        let right = 0xd0db_abcd_0000_0009u64;
        assert_eq!(d.compare(right, right, 0xff), 0);
        assert_eq!(d.compare(right, right ^ 1, 0xff), 1 << 11);
        assert_eq!(d.compare(right, right ^ (1 << 32), 0xff), 1 << 12);
        assert_eq!(d.compare(right, right ^ (1 << 48), 0xff), 1 << 13);
        assert_eq!(d.compare(right, !right, 0xff), 7 << 11);
        assert_eq!(d.compare(right, !right, 0x0f), 1 << 11, "what is checked");
        assert_eq!(d.compare(right, right ^ (1 << 8), 0x01), 0);
        let escaping = |escape, actual| {
            let kind = Kind::T10 {
                checksum: false,
                increments: false,
                escape,
                application: 0x00ff,
            };
            domain(kind).compare(right, actual, 0xff)
        };
        assert_ne!(escaping(Escape::None, 0xffff << 32), 0);
        assert_eq!(escaping(Escape::Application, 0xffff << 32), 0);
        assert_ne!(escaping(Escape::Both, 0xffff << 32), 0);
        assert_eq!(escaping(Escape::Both, 0xffff_ffff_ffff), 0);
        assert_eq!(escaping(Escape::None, right ^ (0x0100 << 32)), 0, "bits");
        let crc = domain(Kind::Crc32);
        assert_eq!(crc.compare(0, 1, 0xff), 1 << 13);
        assert_eq!(crc.compare(0, 1 << 32, 0x0f), 0);
    }

    #[test]
    fn where_data_is() {
        let both = Bsf {
            memory: Some(domain(Kind::Crc32)),
            wire: Some(domain(T10)),
            check: 0,
            copy: None,
            len: u64::from(u32::MAX),
        };
        let data = |at, len| both.extent(at, len).map(|extent| extent.data);
        assert_eq!(data(0, 512), Some((0, 512)));
        assert_eq!(data(513, 6), Some((512, 512)));
        assert_eq!(data(520, 520), Some((512, 1024)));
        assert_eq!(data(u64::MAX, 1), None);
        assert_eq!(data(u64::MAX - 1, 1), None);
        assert_eq!((both.in_memory(512), both.memory_end(512)), (516, 516));
        assert_eq!((both.in_memory(513), both.memory_end(513)), (517, 517));
        assert_eq!(both.memory_end(1024), 1032);
    }
}
