// SPDX-License-Identifier: MIT OR Apache-2.0
//! The firmware commands this library sends through DevX: their fields by name.
//!
//! Places are those of `include/linux/mlx5/mlx5_ifc.h` in Linux 7.3, except three that the kernel leaves to user space and
//! lists as reserved (`dbr_umem_id` of both contexts, `cq_umem_offset` and `cq_umem_id`): they are as in the headers of the
//! DPDK and UCX mlx5 drivers. Everything is big-endian; bit 0 is a byte's most significant.

/// A field: where it begins, and how many bits it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    byte: usize,
    bit: usize,
    width: usize,
}

impl Field {
    const fn new(byte: usize, bit: usize, width: usize) -> Self {
        Self { byte, bit, width }
    }

    /// The field of a structure that begins `base` bytes into a command.
    pub(crate) const fn at(self, base: usize) -> Self {
        Self {
            byte: self.byte + base,
            ..self
        }
    }

    fn bits(self) -> std::ops::Range<usize> {
        let start = self.byte * 8 + self.bit;
        start..start + self.width
    }
}

/// A command's input or output.
#[derive(Clone, Debug)]
pub(crate) struct Block<const N: usize>([u8; N]);

impl<const N: usize> Block<N> {
    pub(crate) fn new() -> Self {
        Self([0; N])
    }

    /// An input with its opcode.
    pub(crate) fn command(opcode: u16) -> Self {
        Self::new().set(header::OPCODE, opcode.into())
    }

    /// Sets a field, whose value must fit.
    pub(crate) fn set(mut self, field: Field, value: u64) -> Self {
        debug_assert!(
            field.width == 64 || value >> field.width == 0,
            "{value:#x} does not fit {field:?}"
        );
        for (place, bit) in field.bits().rev().enumerate() {
            let mask = 0x80 >> (bit % 8);
            if (value >> place) & 1 == 1 {
                self.0[bit / 8] |= mask;
            } else {
                self.0[bit / 8] &= !mask;
            }
        }
        self
    }

    pub(crate) fn get(&self, field: Field) -> u64 {
        field.bits().fold(0, |value, bit| {
            (value << 1) | u64::from((self.0[bit / 8] >> (7 - bit % 8)) & 1)
        })
    }

    pub(crate) fn as_bytes(&self) -> &[u8; N] {
        &self.0
    }

    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8; N] {
        &mut self.0
    }
}

/// Opcodes.
pub(crate) mod opcode {
    pub(crate) const QUERY_HCA_CAP: u16 = 0x100;
    pub(crate) const CREATE_CQ: u16 = 0x400;
    pub(crate) const CREATE_QP: u16 = 0x500;
    pub(crate) const RST2INIT_QP: u16 = 0x502;
    pub(crate) const INIT2RTR_QP: u16 = 0x503;
    pub(crate) const RTR2RTS_QP: u16 = 0x504;
    pub(crate) const TO_ERR_QP: u16 = 0x507;
}

macro_rules! fields {
    ($(#[$doc:meta])* $module:ident { $($name:ident = $byte:literal [$bit:literal; $width:literal]),* $(,)? }) => {
        $(#[$doc])*
        pub(crate) mod $module {
            use super::Field;
            $(pub(crate) const $name: Field = Field::new($byte, $bit, $width);)*
            #[cfg(test)]
            pub(crate) const ALL: &[(&str, Field)] = &[$((stringify!($name), $name)),*];
        }
    };
}

fields! {
    /// Of every input.
    header { OPCODE = 0x00[0; 16] }
}

fields! {
    /// `query_hca_cap_in`, and of `cmd_hca_cap` behind the header of its output.
    hca_cap { OP_MOD = 0x06[0; 16], LOG_BF_REG_SIZE = 0x5d[3; 5] }
}
/// Bytes of `query_hca_cap_out`.
pub(crate) const QUERY_HCA_CAP_OUT_BYTES: usize = 0x1010;
/// `op_mod` of what the device can do in general, as it is set now (`HCA_CAP_OPMOD_GET_CUR`).
pub(crate) const GENERAL_NOW: u64 = 1;

fields! {
    /// Of every output.
    answer { STATUS = 0x00[0; 8], SYNDROME = 0x04[0; 32], OBJECT = 0x09[0; 24] }
}

fields! {
    /// `create_cq_in` around its context.
    create_cq { UMEM_OFFSET = 0x50[0; 64], UMEM_ID = 0x58[0; 32], UMEM_VALID = 0x5c[0; 1] }
}
/// Bytes of `create_cq_in`.
pub(crate) const CREATE_CQ_BYTES: usize = 0x110;
/// Where `cqc` begins in it.
pub(crate) const CREATE_CQ_CQC: usize = 0x10;

fields! {
    /// `cqc`.
    cqc {
        DBR_UMEM_VALID = 0x00[6; 1],
        CQE_SIZE = 0x01[0; 3],
        COLLAPSED = 0x01[3; 1],
        OVERRUN_IGNORE = 0x01[6; 1],
        DBR_UMEM_ID = 0x04[0; 32],
        LOG_SIZE = 0x0c[3; 5],
        UAR_PAGE = 0x0d[0; 24],
        EQN = 0x14[0; 32],
        LOG_PAGE_SIZE = 0x18[3; 5],
        DBR_ADDR = 0x38[0; 64],
    }
}

fields! {
    /// `create_qp_in` around its context, and what the state changes share with it.
    qp {
        QPN = 0x09[0; 24],
        OPT_PARAM_MASK = 0x10[0; 32],
        WQ_UMEM_OFFSET = 0x100[0; 64],
        WQ_UMEM_ID = 0x108[0; 32],
        WQ_UMEM_VALID = 0x10c[0; 1],
    }
}
/// Bytes of `create_qp_in` and of the state changes.
pub(crate) const QP_BYTES: usize = 0x110;
/// Bytes of `qp_2err_in`.
pub(crate) const QP_2ERR_BYTES: usize = 0x10;
/// Where `qpc` begins in `create_qp_in` and in the state changes.
pub(crate) const QP_QPC: usize = 0x18;
/// Where `ads`, the primary address path, begins in `qpc`.
const QPC_PATH: usize = 0x18;

/// A field of the QP's context in those commands.
pub(crate) fn ctx(field: Field) -> Field {
    field.at(QP_QPC)
}

/// A field of its address path.
pub(crate) fn ads(field: Field) -> Field {
    field.at(QP_QPC + QPC_PATH)
}

fields! {
    /// `qpc`.
    qpc {
        SERVICE = 0x01[0; 8],
        PM_STATE = 0x02[3; 2],
        PD = 0x05[0; 24],
        MTU = 0x08[0; 3],
        LOG_MSG_MAX = 0x08[3; 5],
        LOG_RQ_SIZE = 0x09[1; 4],
        LOG_RQ_STRIDE = 0x09[5; 3],
        NO_SQ = 0x0a[0; 1],
        LOG_SQ_SIZE = 0x0a[1; 4],
        UAR_PAGE = 0x0d[0; 24],
        USER_INDEX = 0x11[0; 24],
        LOG_PAGE_SIZE = 0x14[3; 5],
        REMOTE_QPN = 0x15[0; 24],
        LOG_SRA_MAX = 0x71[0; 3],
        RETRY_COUNT = 0x71[5; 3],
        RNR_RETRY = 0x72[0; 3],
        NEXT_SEND_PSN = 0x79[0; 24],
        CQN_SND = 0x7d[0; 24],
        LOG_RRA_MAX = 0x91[0; 3],
        ATOMIC_MODE = 0x91[4; 4],
        RRE = 0x92[0; 1],
        RWE = 0x92[1; 1],
        RAE = 0x92[2; 1],
        MIN_RNR_NAK = 0x94[3; 5],
        NEXT_RCV_PSN = 0x95[0; 24],
        CQN_RCV = 0x9d[0; 24],
        DBR_ADDR = 0xa0[0; 64],
        RQ_TYPE = 0xac[5; 3],
        DBR_UMEM_VALID = 0xd0[3; 1],
        DBR_UMEM_ID = 0xe4[0; 32],
    }
}

fields! {
    /// `ads`.
    path {
        PKEY_INDEX = 0x02[0; 16],
        GRH = 0x05[0; 1],
        RLID = 0x06[0; 16],
        ACK_TIMEOUT = 0x08[0; 5],
        SRC_ADDR_INDEX = 0x09[0; 8],
        HOP_LIMIT = 0x0b[0; 8],
        RGID_HIGH = 0x10[0; 64],
        RGID_LOW = 0x18[0; 64],
        PORT = 0x25[0; 8],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_land_on_their_bits() {
        let block = Block::<16>::new()
            .set(Field::new(0, 3, 5), 0x1f)
            .set(Field::new(1, 0, 24), 0x0012_3456)
            .set(Field::new(4, 7, 1), 1)
            .set(Field::new(8, 0, 64), 0x0102_0304_0506_0708);
        assert_eq!(
            block.as_bytes(),
            &[0x1f, 0x12, 0x34, 0x56, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
        );
        assert_eq!(block.get(Field::new(1, 0, 24)), 0x0012_3456);
        assert_eq!(
            block.set(Field::new(0, 3, 5), 2).as_bytes()[0],
            2,
            "a field is overwritten, not merged"
        );
    }

    #[test]
    fn no_two_fields_of_a_structure_overlap() {
        for (name, fields, bytes) in [
            ("create_cq", create_cq::ALL, CREATE_CQ_BYTES),
            ("cqc", cqc::ALL, 0x40),
            ("qp", qp::ALL, QP_BYTES),
            ("qpc", qpc::ALL, 0xe8),
            ("path", path::ALL, 0x2c),
            ("answer", answer::ALL, 0x10),
            ("hca_cap", hca_cap::ALL, QUERY_HCA_CAP_OUT_BYTES),
            ("header", header::ALL, 0x10),
        ] {
            for (i, (a, first)) in fields.iter().enumerate() {
                assert!(first.bits().end <= bytes * 8, "{name}.{a} lies outside");
                for (b, second) in &fields[i + 1..] {
                    let (one, two) = (first.bits(), second.bits());
                    assert!(
                        one.end <= two.start || two.end <= one.start,
                        "{name}: {a} and {b} overlap"
                    );
                }
            }
        }
    }
}
