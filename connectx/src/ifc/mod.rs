// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device's interface, field by field.
//!
//! Every structure is big-endian, and a field is named by the byte it starts in, the bit in that byte counted from the
//! most significant, and its width. Nothing outside this module knows an offset. Reading beyond the end of a buffer
//! gives 0 and writing there does nothing, so that a short mailbox from a guest can never be more than wrong.

pub mod cap;
pub mod command;
pub mod context;
pub mod event;
pub mod mad;
pub mod opcode;
pub mod register;
pub mod wqe;

/// One field of a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    byte: u16,
    bit: u8,
    width: u16,
}

impl Field {
    /// A field that starts in byte `byte` at bit `bit` (0 the most significant) and is `width` bits wide.
    pub const fn new(byte: u16, bit: u8, width: u16) -> Self {
        assert!(bit < 8, "a field starts in its first byte");
        assert!(width > 0);
        Self { byte, bit, width }
    }

    /// Byte in which the field starts.
    pub const fn offset(self) -> usize {
        self.byte as usize
    }

    /// Bit in its first byte at which the field starts, 0 the most significant.
    pub const fn bit(self) -> u8 {
        self.bit
    }

    /// Width in bits.
    pub const fn width(self) -> u16 {
        self.width
    }

    /// Width in bytes, rounded up.
    pub const fn size(self) -> usize {
        (self.width as usize).div_ceil(8)
    }

    /// The field's value in `buf`; absent bytes count as 0. The field must be at most 64 bits wide.
    #[inline]
    pub fn get(self, buf: &[u8]) -> u64 {
        debug_assert!(self.width <= 64);
        let bits = self.bit as usize + self.width as usize;
        let count = bits.div_ceil(8);
        let mut value: u128 = 0;
        for i in 0..count {
            value = (value << 8) | u128::from(buf.get(self.offset() + i).copied().unwrap_or(0));
        }
        let value = value >> (count * 8 - bits);
        value as u64 & (u64::MAX >> (64 - self.width))
    }

    /// The field as a 32-bit number; of a wider field the low bits.
    #[inline]
    pub fn get32(self, buf: &[u8]) -> u32 {
        self.get(buf) as u32
    }

    /// Whether any bit of the field is set.
    #[inline]
    pub fn is_set(self, buf: &[u8]) -> bool {
        self.get(buf) != 0
    }

    /// Stores the low bits of `value`. The field must be at most 64 bits wide.
    #[inline]
    pub fn set(self, buf: &mut [u8], value: u64) {
        debug_assert!(self.width <= 64);
        let bits = self.bit as usize + self.width as usize;
        let count = bits.div_ceil(8);
        let shift = count * 8 - bits;
        let mask = u128::from(u64::MAX >> (64 - self.width)) << shift;
        let value = (u128::from(value) << shift) & mask;
        for i in 0..count {
            if let Some(byte) = buf.get_mut(self.offset() + i) {
                let down = (count - 1 - i) * 8;
                *byte = *byte & !((mask >> down) as u8) | (value >> down) as u8;
            }
        }
    }

    /// The bytes of a structure inside `buf`, as many as there are.
    pub fn bytes(self, buf: &[u8]) -> &[u8] {
        let start = self.offset().min(buf.len());
        let end = (self.offset() + self.size()).min(buf.len());
        &buf[start..end]
    }

    /// As [`Field::bytes`], to change them.
    pub fn bytes_mut(self, buf: &mut [u8]) -> &mut [u8] {
        let start = self.offset().min(buf.len());
        let end = (self.offset() + self.size()).min(buf.len());
        &mut buf[start..end]
    }

    /// Everything from the field's first byte on: a list without a fixed length.
    pub fn tail(self, buf: &[u8]) -> &[u8] {
        &buf[self.offset().min(buf.len())..]
    }
}

/// Names the fields of structures: each structure becomes a module with a [`Field`] constant per field and its `SIZE`.
macro_rules! layout {
    ($( $(#[$doc:meta])* $name:ident($size:literal) {
        $( $(#[$fdoc:meta])* $field:ident = $byte:literal[$bit:literal; $width:literal], )*
    } )*) => { $(
        $(#[$doc])*
        #[allow(non_upper_case_globals, missing_docs)]
        pub mod $name {
            use $crate::ifc::Field;
            /// Size in bytes of the part with a fixed length.
            pub const SIZE: usize = $size;
            $( $(#[$fdoc])* pub const $field: Field = Field::new($byte, $bit, $width); )*
            /// Every field with its name, in the order of the table.
            pub const FIELDS: &[(&str, Field)] = &[ $( (stringify!($field), $field), )* ];
        }
    )* };
}
use layout;

/// Big-endian 64-bit entries of a list, such as the physical addresses of pages.
pub fn be64_list(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes
        .chunks_exact(8)
        .map(|c| c.iter().fold(0, |v, b| (v << 8) | u64::from(*b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_header_puts_them() {
        // qpc of a CREATE_QP: RC, PD 0x123456, RQ 2^9 entries of 16 << 2 bytes, SQ 2^8 blocks.
        let mut qpc = vec![0; context::qpc::SIZE];
        qpc[0x00..0x02].copy_from_slice(&[0x30, 0x07]);
        qpc[0x04..0x08].copy_from_slice(&[0x00, 0x12, 0x34, 0x56]);
        qpc[0x08..0x0c].copy_from_slice(&[0xbe, 0x4a, 0x40, 0x00]);
        assert_eq!(context::qpc::state.get(&qpc), 3);
        assert_eq!(context::qpc::st.get(&qpc), 7);
        assert_eq!(context::qpc::pd.get(&qpc), 0x12_3456);
        assert_eq!(context::qpc::mtu.get(&qpc), 5);
        assert_eq!(context::qpc::log_msg_max.get(&qpc), 30);
        assert_eq!(context::qpc::log_rq_size.get(&qpc), 9);
        assert_eq!(context::qpc::log_rq_stride.get(&qpc), 2);
        assert_eq!(context::qpc::log_sq_size.get(&qpc), 8);
        assert_eq!(context::qpc::no_sq.get(&qpc), 0);
    }

    #[test]
    fn fields_across_bytes() {
        // ads.flow_label is 20 bits in the middle of byte 0x0d.
        let mut ads = vec![0; context::ads::SIZE];
        context::ads::tclass.set(&mut ads, 0xff);
        context::ads::flow_label.set(&mut ads, 0xabcde);
        assert_eq!(&ads[0x0c..0x10], &[0x0f, 0xfa, 0xbc, 0xde]);
        context::ads::flow_label.set(&mut ads, 0);
        assert_eq!(context::ads::tclass.get(&ads), 0xff);
        context::ads::tclass.set(&mut ads, 0x123);
        assert_eq!(
            context::ads::tclass.get(&ads),
            0x23,
            "a value too wide keeps its low bits"
        );
        // 64 bits that do not start on a byte's first bit.
        let wide = Field::new(1, 4, 64);
        let mut buf = [0xff; 12];
        wide.set(&mut buf, 0x0123_4567_89ab_cdef);
        assert_eq!(wide.get(&buf), 0x0123_4567_89ab_cdef);
        assert_eq!((buf[0], buf[1], buf[9], buf[10]), (0xff, 0xf0, 0xff, 0xff));
    }

    #[test]
    fn short_buffers_read_as_zero() {
        let mut short = [0xffu8; 3];
        assert_eq!(command::header::op_mod.get(&short), 0);
        assert_eq!(command::header::uid.get(&short), 0xff00);
        command::header::op_mod.set(&mut short, 7);
        assert_eq!(short, [0xff; 3]);
        assert_eq!(command::create_qp_in::qpc.bytes(&short), &[] as &[u8]);
        assert_eq!(command::create_qp_in::pas.tail(&short), &[] as &[u8]);
    }

    #[test]
    fn capability_layout_matches_known_bytes() {
        // From a dump of QUERY_HCA_CAP as mlx5_core saw it: log_max_qp_sz at 0x11, rc at bit 7 of 0x47.
        let mut cap = vec![0; cap::cmd_hca_cap::SIZE];
        cap[0x11] = 15;
        cap[0x47] = 1;
        cap[0x8c] = 5;
        assert_eq!(cap::cmd_hca_cap::log_max_qp_sz.get(&cap), 15);
        assert_eq!(cap::cmd_hca_cap::rc.get(&cap), 1);
        assert_eq!(cap::cmd_hca_cap::log_max_uctx.get(&cap), 5);
    }

    #[test]
    fn lists_ignore_a_partial_entry() {
        let bytes = [0, 0, 0, 0, 0, 0, 0x10, 0, 1, 2, 3];
        assert_eq!(be64_list(&bytes).collect::<Vec<_>>(), [0x1000]);
    }
}
