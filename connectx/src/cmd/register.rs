// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registers behind ACCESS_REG. Numbers are those of `enum mlx5_reg` in `include/linux/mlx5/driver.h`.

use super::{IFC, Reject, Reply, Request, ok};
use crate::ifc::command::{access_register_in, access_register_out};
use crate::ifc::opcode::Status;
use crate::ifc::register::{paos_reg, pmtu_reg, ptys_reg, pvlc_reg};
use crate::objects::device::Device;
use crate::wire::port::PortState;

mod number {
    pub const PMTU: u16 = 0x5003;
    pub const PTYS: u16 = 0x5004;
    pub const PAOS: u16 = 0x5006;
    pub const PVLC: u16 = 0x500f;
    pub const NODE_DESC: u16 = 0x6001;
    pub const HOST_ENDIANNESS: u16 = 0x7004;
    pub const MFRL: u16 = 0x9028;
    pub const DTOR: u16 = 0xc00e;
}

/// InfiniBand link width 4X and speed HDR as PTYS encodes them; together 200 Gb/s.
const WIDTH_4X: u64 = 1 << 2;
const SPEED_HDR: u64 = 1 << 6;
const MTU: u64 = 4096;
/// VL0 to VL7 (`ib_vl_enum`).
const VLS: u64 = 4;

pub(super) fn access_register(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let register = access_register_in::register_id.get(request.input) as u16;
    // op_mod 1 reads, 0 writes.
    let read = request.op_mod() == 1;
    let given = access_register_in::register_data.tail(request.input);
    // The whole NIC's, which is its physical function's to set (`mlx5_core_is_pf` in set_hca_ctrl).
    if device.virtual_function && register == number::HOST_ENDIANNESS {
        let rule = "a register that a virtual function has";
        return Err(Reject::new(
            Status::BadOp,
            "register_id",
            register,
            rule,
            IFC,
        ));
    }
    let mut data = match (register, read) {
        (number::HOST_ENDIANNESS, false) => given.to_vec(),
        (number::PTYS, true) => port_type(given),
        (number::PMTU, true) => port_mtu(given),
        (number::PVLC, true) => port_lanes(given),
        (number::PAOS, true) => port_status(device, given),
        // Default time-outs: 0 leaves a driver its own.
        (number::DTOR, true) => vec![0; given.len()],
        // Reset levels that would activate a new firmware: none, there is none stored.
        (number::MFRL, true) => vec![0; given.len()],
        (number::NODE_DESC, true) => device.node_description().to_vec(),
        (number::NODE_DESC, false) => given.to_vec(),
        _ => {
            let rule = "a register that the device has, in a direction that it has";
            return Err(Reject::new(
                Status::BadParam,
                "register_id",
                register,
                rule,
                IFC,
            ));
        }
    };
    let mut out = ok(access_register_out::register_data.offset());
    out.append(&mut data);
    Ok(out)
}

fn port_type(given: &[u8]) -> Vec<u8> {
    let mut reg = vec![0; ptys_reg::SIZE];
    ptys_reg::local_port.set(&mut reg, ptys_reg::local_port.get(given));
    ptys_reg::proto_mask.set(&mut reg, ptys_reg::proto_mask.get(given));
    for width in [
        ptys_reg::ib_link_width_capability,
        ptys_reg::ib_link_width_admin,
        ptys_reg::ib_link_width_oper,
    ] {
        width.set(&mut reg, WIDTH_4X);
    }
    for speed in [
        ptys_reg::ib_proto_capability,
        ptys_reg::ib_proto_admin,
        ptys_reg::ib_proto_oper,
    ] {
        speed.set(&mut reg, SPEED_HDR);
    }
    reg
}

fn port_mtu(given: &[u8]) -> Vec<u8> {
    let mut reg = vec![0; pmtu_reg::SIZE];
    pmtu_reg::local_port.set(&mut reg, pmtu_reg::local_port.get(given));
    for mtu in [pmtu_reg::max_mtu, pmtu_reg::admin_mtu, pmtu_reg::oper_mtu] {
        mtu.set(&mut reg, MTU);
    }
    reg
}

fn port_lanes(given: &[u8]) -> Vec<u8> {
    let mut reg = vec![0; pvlc_reg::SIZE];
    pvlc_reg::local_port.set(&mut reg, pvlc_reg::local_port.get(given));
    for lanes in [
        pvlc_reg::vl_hw_cap,
        pvlc_reg::vl_admin,
        pvlc_reg::vl_operational,
    ] {
        lanes.set(&mut reg, VLS);
    }
    reg
}

fn port_status(device: &Device, given: &[u8]) -> Vec<u8> {
    let mut reg = vec![0; paos_reg::SIZE];
    paos_reg::local_port.set(&mut reg, paos_reg::local_port.get(given));
    // 1 up, 2 down.
    paos_reg::admin_status.set(&mut reg, 1);
    paos_reg::oper_status.set(
        &mut reg,
        if device.port.state == PortState::Active {
            1
        } else {
            2
        },
    );
    reg
}
