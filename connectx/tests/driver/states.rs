// SPDX-License-Identifier: MIT OR Apache-2.0
//! States of queue pairs: every command in every state, and every optional parameter of every transition. The tables are
//! written down from the IB specification (10.3.1, table 92) and mlx5_ib's `optab` and `opt_mask`.

use connectx::ifc::command::{self, header, reply};
use connectx::ifc::context::qpc;
use connectx::ifc::opcode::{
    self, INIT2INIT_QP, INIT2RTR_QP, RST2INIT_QP, RTR2RTS_QP, RTS2RTS_QP, SQD_RTS_QP, SQERR2RTS_QP,
    TO_ERR_QP, TO_RST_QP,
};
use connectx::ifc::wqe::{cqe_opcode, send, syndrome};
use connectx::objects::qp::Service;

use crate::guest::{Guest, Qp, Settings, Shape, Side, address_vector, input, pointer, status};

const RC: u64 = 0;
const UC: u64 = 1;
const UD: u64 = 2;
const SERVICES: [u64; 3] = [RC, UC, UD];

const RESET: u64 = 0;
const INIT: u64 = 1;
const RTR: u64 = 2;
const RTS: u64 = 3;
const SQER: u64 = 4;
const ERR: u64 = 6;

const BAD_PARAM: u8 = 0x03;
const BAD_QP_STATE: u8 = 0x10;

/// Bits of `opt_param_mask` (include/linux/mlx5/qp.h).
mod opt {
    pub const ALT_ADDR_PATH: u32 = 1 << 0;
    pub const RRE: u32 = 1 << 1;
    pub const RAE: u32 = 1 << 2;
    pub const RWE: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const Q_KEY: u32 = 1 << 5;
    pub const RNR_TIMEOUT: u32 = 1 << 6;
    pub const PM_STATE: u32 = 1 << 10;
    /// Of rdma-core's mlx5_ifc.h.
    pub const DRAIN_SIGERR: u32 = 1 << 11;
    pub const LAG_TX_AFF: u32 = 1 << 15;
    pub const PRI_PORT: u32 = 1 << 16;
    pub const SRQN: u32 = 1 << 18;
    pub const CQN_RCV: u32 = 1 << 19;
    pub const PP_INDEX: u32 = 1 << 22;
    pub const COUNTER_SET_ID: u32 = 1 << 25;
}

fn shaped(guest: &mut Guest, side: &Side, service: u64) -> Qp {
    let service = Service::from_number(service).unwrap();
    let (pd, uar, shape) = (side.pd, guest.uar, Shape::of(service));
    Qp::shaped(guest, pd, uar, &side.send, &side.receive, shape).unwrap()
}

/// A queue pair of a service on an own function.
fn fresh(service: u64) -> (Guest, Side) {
    let mut guest = crate::guest::guests(1).pop().unwrap();
    let mut side = Side::new(&mut guest);
    side.qp = shaped(&mut guest, &side, service);
    (guest, side)
}

/// A transition whose values are good. Gives the answer.
fn modify(guest: &mut Guest, qp: &Qp, op: u16, mask: u32, f: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = input(op, 0x110);
    header::object.set(&mut bytes, u64::from(qp.qpn));
    command::modify_qp_in::opt_param_mask.set(&mut bytes, u64::from(mask));
    let context = command::modify_qp_in::qpc.bytes_mut(&mut bytes);
    qpc::mtu.set(context, 3);
    qpc::log_msg_max.set(context, 30);
    f(context);
    guest.command(bytes, 16)
}

/// Brings a fresh queue pair to a state. `false` if its service does not have it.
fn bring(guest: &mut Guest, side: &mut Side, service: u64, state: u64) -> bool {
    let settings = Settings::to(1, side.qp.qpn);
    if state >= INIT {
        side.qp.to_init(guest, settings);
    }
    if state >= RTR {
        side.qp.to_ready_to_receive(guest, settings);
    }
    if state >= RTS {
        side.qp.to_ready_to_send(guest, settings);
    }
    match state {
        SQER if service == RC => return false,
        SQER => {
            // A send with a key that does not exist.
            let mut segments = vec![pointer(4, 0xdead00, side.at)];
            if service == UD {
                segments.splice(0..0, address_vector(1, side.qp.qpn, settings.qkey as u32));
            }
            side.qp.post(guest, send::SEND, 0, &segments);
            let cqe = side.send.wait(guest);
            assert_eq!(cqe.opcode, cqe_opcode::REQ_ERR);
            assert_eq!(cqe.syndrome, syndrome::LOCAL_PROT);
        }
        ERR => assert_eq!(guest.on_object(TO_ERR_QP, side.qp.qpn), 0),
        _ => {}
    }
    true
}

#[test]
pub fn every_command_in_every_state() {
    const COMMANDS: [u16; 9] = [
        RST2INIT_QP,
        INIT2INIT_QP,
        INIT2RTR_QP,
        RTR2RTS_QP,
        RTS2RTS_QP,
        SQERR2RTS_QP,
        SQD_RTS_QP,
        TO_ERR_QP,
        TO_RST_QP,
    ];
    // No command leads to SQD, so that SQD2RTS is always refused.
    #[rustfmt::skip]
    let legal: [(u64, &[(u16, u64)]); 6] = [
        (RESET, &[(RST2INIT_QP, INIT), (TO_ERR_QP, ERR), (TO_RST_QP, RESET)]),
        (INIT, &[(INIT2INIT_QP, INIT), (INIT2RTR_QP, RTR), (TO_ERR_QP, ERR), (TO_RST_QP, RESET)]),
        (RTR, &[(RTR2RTS_QP, RTS), (TO_ERR_QP, ERR), (TO_RST_QP, RESET)]),
        (RTS, &[(RTS2RTS_QP, RTS), (TO_ERR_QP, ERR), (TO_RST_QP, RESET)]),
        (SQER, &[(SQERR2RTS_QP, RTS), (TO_ERR_QP, ERR), (TO_RST_QP, RESET)]),
        (ERR, &[(TO_ERR_QP, ERR), (TO_RST_QP, RESET)]),
    ];
    let mut tried = 0;
    for service in SERVICES {
        let (mut guest, mut side) = fresh(service);
        for (state, ends) in legal {
            for op in COMMANDS {
                assert_eq!(guest.on_object(TO_RST_QP, side.qp.qpn), 0);
                (side.qp.producer, side.qp.posted) = (0, 0);
                if !bring(&mut guest, &mut side, service, state) {
                    continue;
                }
                assert_eq!(side.qp.state(&mut guest), state);
                let out = modify(&mut guest, &side.qp, op, 0, |_| {});
                let end = ends.iter().find(|(legal, _)| *legal == op);
                let what = format!("service {service}, {:?} in {state}", opcode::name(op));
                match end {
                    Some((_, end)) => {
                        assert_eq!(status(&out), 0, "{what}");
                        assert_eq!(side.qp.state(&mut guest), *end, "{what}");
                    }
                    None => {
                        assert_eq!(status(&out), BAD_QP_STATE, "{what}");
                        assert_ne!(reply::syndrome.get(&out), 0, "{what}");
                        assert_eq!(side.qp.state(&mut guest), state, "{what}: unchanged");
                    }
                }
                tried += 1;
            }
        }
    }
    assert_eq!(tried, (3 * 6 - 1) * COMMANDS.len());
}

/// Optional parameters of a transition, by service.
fn options(service: u64, op: u16) -> u32 {
    use opt::*;
    let common = match (service, op) {
        (_, RST2INIT_QP) => LAG_TX_AFF,
        (RC, INIT2INIT_QP) => RRE | RAE | RWE | PKEY_INDEX | PRI_PORT | LAG_TX_AFF | DRAIN_SIGERR,
        (UC, INIT2INIT_QP) => RWE | PKEY_INDEX | PRI_PORT | LAG_TX_AFF | DRAIN_SIGERR,
        (UD, INIT2INIT_QP) => PKEY_INDEX | Q_KEY | PRI_PORT,
        (RC, INIT2RTR_QP) => ALT_ADDR_PATH | RRE | RAE | RWE | PKEY_INDEX | LAG_TX_AFF,
        (UC, INIT2RTR_QP) => ALT_ADDR_PATH | RWE | PKEY_INDEX | LAG_TX_AFF,
        (UD, INIT2RTR_QP) => PKEY_INDEX | Q_KEY,
        (RC, RTR2RTS_QP | RTS2RTS_QP) => {
            ALT_ADDR_PATH | RRE | RAE | RWE | PM_STATE | RNR_TIMEOUT | PP_INDEX
        }
        (UC, RTR2RTS_QP | RTS2RTS_QP) => ALT_ADDR_PATH | RWE | PM_STATE | PP_INDEX,
        (UD, RTR2RTS_QP) => Q_KEY | PP_INDEX,
        (UD, RTS2RTS_QP) => Q_KEY | SRQN | CQN_RCV | PP_INDEX,
        (UC, SQERR2RTS_QP) => RWE,
        (UD, SQERR2RTS_QP) => Q_KEY,
        _ => unreachable!(),
    };
    common | COUNTER_SET_ID
}

#[test]
pub fn every_optional_parameter_of_every_transition() {
    for service in SERVICES {
        for (state, op) in [
            (RESET, RST2INIT_QP),
            (INIT, INIT2INIT_QP),
            (INIT, INIT2RTR_QP),
            (RTR, RTR2RTS_QP),
            (RTS, RTS2RTS_QP),
            (SQER, SQERR2RTS_QP),
        ] {
            let (mut guest, mut side) = fresh(service);
            for bit in 0..32 {
                assert_eq!(guest.on_object(TO_RST_QP, side.qp.qpn), 0);
                (side.qp.producer, side.qp.posted) = (0, 0);
                if !bring(&mut guest, &mut side, service, state) {
                    continue;
                }
                let out = modify(&mut guest, &side.qp, op, 1 << bit, |_| {});
                let expected = if options(service, op) & (1 << bit) == 0 {
                    BAD_PARAM
                } else {
                    0
                };
                let what = format!("service {service}, {:?}, bit {bit}", opcode::name(op));
                assert_eq!(status(&out), expected, "{what}");
            }
        }
    }
}

#[test]
pub fn what_the_mask_does_not_name_stays() {
    let (mut guest, mut side) = fresh(RC);
    bring(&mut guest, &mut side, RC, RTS);
    let rights = |guest: &mut Guest, side: &Side| {
        let mut query = input(opcode::QUERY_QP, 16);
        header::object.set(&mut query, u64::from(side.qp.qpn));
        let out = guest.ok(query, 0x110);
        let context = command::query_qp_out::qpc.bytes(&out).to_vec();
        [qpc::rre, qpc::rwe, qpc::rae].map(|right| right.get(&context))
    };
    assert_eq!(rights(&mut guest, &side), [1, 1, 1]);
    let out = modify(&mut guest, &side.qp, RTS2RTS_QP, opt::RWE, |_| {});
    assert_eq!(status(&out), 0);
    assert_eq!(rights(&mut guest, &side), [1, 0, 1]);
    let back = |c: &mut [u8]| qpc::rwe.set(c, 1);
    modify(&mut guest, &side.qp, RTS2RTS_QP, opt::RRE | opt::RWE, back);
    assert_eq!(rights(&mut guest, &side), [0, 1, 1]);
}

#[test]
pub fn a_send_queue_in_error_flushes_until_it_is_ready_again() {
    for service in [UC, UD] {
        let (mut guest, mut side) = fresh(service);
        bring(&mut guest, &mut side, service, SQER);
        side.qp.post(&guest, send::NOP, 0, &[]);
        let cqe = side.send.wait(&guest);
        assert_eq!(cqe.syndrome, syndrome::WR_FLUSH);
        assert_eq!(guest.event(), None, "the receive queue goes on");
        let out = modify(&mut guest, &side.qp, SQERR2RTS_QP, 0, |_| {});
        assert_eq!(status(&out), 0);
        side.qp.post(&guest, send::NOP, 0, &[]);
        assert_eq!(side.send.wait(&guest).opcode, cqe_opcode::REQ);
    }
}
