// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands: one file per group of opcodes, this one with what they share.
//!
//! To add a command: its opcode is in [`opcode`] already, its fields go to `ifc/command.rs`, its handler into the file of
//! its group, and a line into [`COMMANDS`].

mod adapter;
pub mod caps;
mod cq;
mod dct;
mod eq;
mod general;
mod mad;
mod memic;
mod mkey;
mod multicast;
mod odp;
mod pages;
mod pp;
mod psv;
mod qp;
mod qp_ext;
mod queue;
mod register;
mod sq;
mod srq;
mod user;
mod vport;

pub(crate) use qp::{insert_qp, remove as remove_qp};
pub use queue::{CommandQueue, doorbell, hand_back};

use std::panic::Location;

use crate::ifc::command::{header, reply};
use crate::ifc::opcode::{self, Status};
use crate::ifc::{Field, be64_list};
use crate::log::Refusal;
use crate::objects::device::{Device, Phase, TRANSLATIONS};
use crate::objects::memory::{Buffer, Pages};
use crate::objects::table::Weigh;

/// Where most rules are written down.
pub(crate) const IFC: &str = "include/linux/mlx5/mlx5_ifc.h";
/// The vendor's manual.
pub(crate) const PRM: &str = "Mellanox Adapters Programmer's Reference Manual";

/// The uid whose objects every user may refer to (`MLX5_SHARED_RESOURCE_UID`).
pub const SHARED_UID: u16 = 0xffff;

/// A command as it came from the driver.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Input, at least as long as the command's fixed part.
    pub input: &'a [u8],
    /// Bytes that the driver takes as output.
    pub output_len: usize,
}

impl Request<'_> {
    /// Opcode.
    pub fn opcode(&self) -> u16 {
        header::opcode.get(self.input) as u16
    }

    /// User on whose behalf the command is; 0 is the driver itself.
    pub fn uid(&self) -> u16 {
        header::uid.get(self.input) as u16
    }

    /// Modifier of the opcode.
    pub fn op_mod(&self) -> u16 {
        header::op_mod.get(self.input) as u16
    }

    /// Number of the object that most commands name in one place.
    pub fn object(&self) -> u32 {
        header::object.get32(self.input)
    }

    /// Checks that the command's user may use an object of `owner`. The driver may use all, everybody those shared.
    pub fn check_owner(&self, field: &'static str, number: u32, owner: u16) -> Result<(), Reject> {
        let uid = self.uid();
        if uid == 0 || owner == uid || owner == SHARED_UID {
            return Ok(());
        }
        Err(Reject::new(
            Status::BadResource,
            field,
            number,
            "an object is used by its owner's uid only",
            PRM,
        ))
    }
}

/// Output of a command, status included.
pub type Reply = Vec<u8>;

/// An output of `len` bytes with status OK.
fn ok(len: usize) -> Reply {
    vec![0; len]
}

/// An output with the number of a new object.
fn ok_object(number: u32) -> Reply {
    let mut out = ok(reply::SIZE);
    reply::object.set(&mut out, u64::from(number));
    out
}

/// Why a command fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reject {
    /// Status for the driver.
    pub status: Status,
    /// Field that is wrong.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// What would have been right.
    pub rule: &'static str,
    /// Where that is written.
    pub source: &'static str,
    /// Where the rule is in this program.
    pub code: &'static Location<'static>,
}

impl Reject {
    /// A rejection by the caller.
    #[track_caller]
    pub fn new(
        status: Status,
        field: &'static str,
        value: impl Into<u64>,
        rule: &'static str,
        source: &'static str,
    ) -> Self {
        Self {
            status,
            field,
            value: value.into(),
            rule,
            source,
            code: Location::caller(),
        }
    }

    /// An object that does not exist.
    #[track_caller]
    fn absent(field: &'static str, number: u32) -> Self {
        Self::new(
            Status::BadResource,
            field,
            number,
            "the object must exist",
            PRM,
        )
    }

    /// An object that others still refer to.
    #[track_caller]
    fn busy(field: &'static str, number: u32) -> Self {
        Self::new(
            Status::BadResourceState,
            field,
            number,
            "an object is destroyed after all that refer to it",
            PRM,
        )
    }

    /// No free number of a kind.
    #[track_caller]
    fn full(field: &'static str, limit: usize) -> Self {
        Self::new(
            Status::Limit,
            field,
            limit as u64,
            "no more objects of a kind than the capability says",
            IFC,
        )
    }

    /// A value out of range.
    #[track_caller]
    fn param(field: &'static str, value: impl Into<u64>, rule: &'static str) -> Self {
        Self::new(Status::BadParam, field, value, rule, IFC)
    }

    /// The syndrome that tells rules apart: a hash of the rule and field, as firmware has a number per check.
    fn syndrome(&self) -> u32 {
        let hash = |seed: u32, text: &str| {
            text.bytes()
                .fold(seed, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193))
        };
        hash(hash(0x811c_9dc5, self.field), self.rule) & 0xff_ffff
    }

    /// The output that tells the driver.
    fn reply(&self) -> Reply {
        let mut out = ok(reply::SIZE);
        reply::status.set(&mut out, self.status as u64);
        reply::syndrome.set(&mut out, u64::from(self.syndrome()));
        out
    }
}

/// One command that the model has.
struct Command {
    opcode: u16,
    /// Length of the fixed part of the input and of the output.
    len: (usize, usize),
    /// Phase that the function must have reached.
    phase: Phase,
    /// May come with a user's uid.
    user: bool,
    handler: fn(&mut Device, &Request<'_>) -> Result<Reply, Reject>,
}

macro_rules! commands {
    ($( $opcode:ident, $input:literal / $output:literal, $phase:ident, $who:ident => $handler:path; )*) => {
        &[$( Command {
            opcode: opcode::$opcode,
            len: ($input, $output),
            phase: Phase::$phase,
            user: commands!(@ $who),
            handler: $handler,
        }, )*]
    };
    (@ driver) => { false };
    (@ user) => { true };
}

/// All commands: opcode, bytes of fixed input / output, phase from which it is taken, who may send it, handler.
#[rustfmt::skip]
const COMMANDS: &[Command] = commands! {
    ENABLE_HCA,               16 / 12,   Disabled,    driver => adapter::enable_hca;
    DISABLE_HCA,              16 / 12,   Disabled,    driver => adapter::disable_hca;
    INIT_HCA,                 16 / 8,    Enabled,     driver => adapter::init_hca;
    TEARDOWN_HCA,             16 / 8,    Enabled,     driver => adapter::teardown_hca;
    QUERY_ISSI,               16 / 112,  Enabled,     driver => adapter::query_issi;
    SET_ISSI,                 16 / 8,    Enabled,     driver => adapter::set_issi;
    QUERY_HCA_CAP,            16 / 16,   Enabled,     user   => adapter::query_hca_cap;
    SET_HCA_CAP,              16 / 8,    Enabled,     driver => adapter::set_hca_cap;
    QUERY_ADAPTER,            8 / 272,   Enabled,     driver => adapter::query_adapter;
    NOP,                      8 / 8,     Enabled,     driver => adapter::nop;
    QUERY_PAGES,              16 / 16,   Enabled,     driver => pages::query_pages;
    MANAGE_PAGES,             16 / 16,   Enabled,     driver => pages::manage_pages;
    ACCESS_REG,               16 / 16,   Enabled,     driver => register::access_register;
    CREATE_UCTX,              16 / 16,   Initialised, driver => user::create_uctx;
    DESTROY_UCTX,             16 / 8,    Initialised, driver => user::destroy_uctx;
    ALLOC_UAR,                16 / 16,   Initialised, user   => user::alloc_uar;
    DEALLOC_UAR,              16 / 8,    Initialised, user   => user::dealloc_uar;
    ALLOC_PD,                 16 / 16,   Initialised, user   => user::alloc_pd;
    DEALLOC_PD,               16 / 8,    Initialised, user   => user::dealloc_pd;
    ALLOC_XRCD,               16 / 16,   Initialised, user   => user::alloc_xrcd;
    DEALLOC_XRCD,             16 / 8,    Initialised, user   => user::dealloc_xrcd;
    CREATE_UMEM,              48 / 16,   Initialised, user   => user::create_umem;
    DESTROY_UMEM,             16 / 8,    Initialised, user   => user::destroy_umem;
    CREATE_MKEY,              272 / 16,  Initialised, user   => mkey::create_mkey;
    QUERY_MKEY,               16 / 80,   Initialised, user   => mkey::query_mkey;
    DESTROY_MKEY,             16 / 8,    Initialised, user   => mkey::destroy_mkey;
    CREATE_PSV,               16 / 32,   Initialised, user   => psv::create;
    DESTROY_PSV,              16 / 8,    Initialised, user   => psv::destroy;
    SET_PP_RATE_LIMIT,        64 / 8,    Initialised, user   => pp::set_rate_limit;
    CREATE_GENERAL_OBJECT,    16 / 16,   Initialised, user   => general::create;
    MODIFY_GENERAL_OBJECT,    16 / 16,   Initialised, user   => general::modify;
    QUERY_GENERAL_OBJECT,     16 / 16,   Initialised, user   => general::query;
    DESTROY_GENERAL_OBJECT,   16 / 16,   Initialised, user   => general::destroy;
    PAGE_FAULT_RESUME,        16 / 8,    Initialised, driver => odp::resume;
    QUERY_SPECIAL_CONTEXTS,   16 / 32,   Initialised, driver => odp::query_special_contexts;
    ALLOC_MEMIC,              32 / 16,   Initialised, driver => memic::alloc;
    DEALLOC_MEMIC,            32 / 8,    Initialised, driver => memic::dealloc;
    MODIFY_MEMIC,             64 / 64,   Initialised, driver => memic::modify;
    CREATE_EQ,                272 / 16,  Initialised, user   => eq::create_eq;
    DESTROY_EQ,               16 / 8,    Initialised, user   => eq::destroy_eq;
    QUERY_EQ,                 16 / 80,   Initialised, driver => eq::query_eq;
    CREATE_CQ,                272 / 16,  Initialised, user   => cq::create_cq;
    DESTROY_CQ,               16 / 8,    Initialised, user   => cq::destroy_cq;
    QUERY_CQ,                 16 / 80,   Initialised, user   => cq::query_cq;
    MODIFY_CQ,                80 / 8,    Initialised, user   => cq::modify_cq;
    CREATE_QP,                272 / 16,  Initialised, user   => qp::create_qp;
    DESTROY_QP,               16 / 8,    Initialised, user   => qp::destroy_qp;
    QUERY_QP,                 16 / 256,  Initialised, user   => qp::query_qp;
    RST2INIT_QP,              256 / 8,   Initialised, user   => qp::modify_qp;
    INIT2INIT_QP,             256 / 8,   Initialised, user   => qp::modify_qp;
    INIT2RTR_QP,              256 / 8,   Initialised, user   => qp::modify_qp;
    RTR2RTS_QP,               256 / 8,   Initialised, user   => qp::modify_qp;
    RTS2RTS_QP,               256 / 8,   Initialised, user   => qp::modify_qp;
    SQERR2RTS_QP,             256 / 8,   Initialised, user   => qp::modify_qp;
    SQD_RTS_QP,               256 / 8,   Initialised, user   => qp::modify_qp;
    TO_ERR_QP,                16 / 8,    Initialised, user   => qp::modify_qp;
    TO_RST_QP,                16 / 8,    Initialised, user   => qp::modify_qp;
    CREATE_DCT,               128 / 16,  Initialised, user   => dct::create_dct;
    DESTROY_DCT,              16 / 8,    Initialised, user   => dct::destroy_dct;
    DRAIN_DCT,                16 / 8,    Initialised, user   => dct::drain_dct;
    QUERY_DCT,                16 / 80,   Initialised, user   => dct::query_dct;
    ARM_DCT_FOR_KEY_VIOLATION, 16 / 8,   Initialised, user   => dct::arm_dct;
    CREATE_XRC_SRQ,           272 / 16,  Initialised, user   => srq::create_xrc_srq;
    DESTROY_XRC_SRQ,          16 / 8,    Initialised, user   => srq::destroy_xrc_srq;
    QUERY_XRC_SRQ,            16 / 80,   Initialised, user   => srq::query_xrc_srq;
    ARM_XRC_SRQ,              16 / 8,    Initialised, user   => srq::arm_xrc_srq;
    CREATE_RMP,               272 / 16,  Initialised, user   => srq::create_rmp;
    DESTROY_RMP,              16 / 8,    Initialised, user   => srq::destroy_rmp;
    QUERY_RMP,                16 / 240,  Initialised, user   => srq::query_rmp;
    MODIFY_RMP,               272 / 8,   Initialised, user   => srq::modify_rmp;
    CREATE_SQ,                272 / 16,  Initialised, user   => sq::create_sq;
    MODIFY_SQ,                272 / 8,   Initialised, user   => sq::modify_sq;
    DESTROY_SQ,               16 / 8,    Initialised, user   => sq::destroy_sq;
    QUERY_SQ,                 16 / 272,  Initialised, user   => sq::query_sq;
    ATTACH_TO_MCG,            32 / 8,    Initialised, user   => multicast::attach;
    DETACH_FROM_MCG,          32 / 8,    Initialised, user   => multicast::detach;
    MAD_IFC,                  272 / 272, Initialised, driver => mad::mad_ifc;
    QUERY_HCA_VPORT_CONTEXT,  16 / 528,  Initialised, user   => vport::query_context;
    MODIFY_HCA_VPORT_CONTEXT, 528 / 8,   Initialised, driver => vport::modify_context;
    QUERY_HCA_VPORT_GID,      16 / 32,   Initialised, driver => vport::query_gid;
    QUERY_HCA_VPORT_PKEY,     16 / 20,   Initialised, driver => vport::query_pkey;
};

/// Every command that the model has: opcode, and bytes of the fixed part of input and output.
pub fn known() -> impl Iterator<Item = (u16, usize, usize)> {
    COMMANDS.iter().map(|c| (c.opcode, c.len.0, c.len.1))
}

/// Opcodes that users may send.
pub fn of_users() -> impl Iterator<Item = u16> {
    COMMANDS.iter().filter(|c| c.user).map(|c| c.opcode)
}

/// Opcodes that only the driver may send.
pub fn of_driver() -> impl Iterator<Item = u16> {
    COMMANDS.iter().filter(|c| !c.user).map(|c| c.opcode)
}

/// Executes a command and returns its output.
pub fn execute(device: &mut Device, request: &Request<'_>) -> Reply {
    device.counters.commands += 1;
    let result = match device.faults.status(request.opcode()) {
        Some(status) => Err(Reject::new(
            status,
            "opcode",
            request.opcode(),
            "a failure that was asked for",
            "connectx ctl fault",
        )),
        None => check(device, request).and_then(|command| (command.handler)(device, request)),
    };
    match result {
        Ok(reply) => reply,
        Err(reject) => {
            device.counters.commands_refused += 1;
            let number = request.opcode();
            let refusal = Refusal {
                function: device.name.clone(),
                object: format!(
                    "cmd {} ({number:#x}) uid {}",
                    opcode::name(number).unwrap_or("unknown"),
                    request.uid()
                ),
                field: reject.field.into(),
                value: format!("{:#x}", reject.value),
                rule: format!(
                    "{} (status {:?}, syndrome {:#x})",
                    reject.rule,
                    reject.status,
                    reject.syndrome()
                ),
                source: reject.source.into(),
            };
            device.referee.refuse_by(refusal, reject.code);
            reject.reply()
        }
    }
}

/// What every command must satisfy.
fn check(device: &Device, request: &Request<'_>) -> Result<&'static Command, Reject> {
    let opcode = request.opcode();
    let command = COMMANDS
        .iter()
        .find(|c| c.opcode == opcode)
        .ok_or(Reject::new(
            Status::BadOp,
            "opcode",
            opcode,
            "a command that the device has",
            IFC,
        ))?;
    let uid = request.uid();
    if uid != 0 && !command.user {
        return Err(Reject::new(
            Status::BadOp,
            "uid",
            uid,
            "only the driver may send this command",
            PRM,
        ));
    }
    if uid != 0 && uid != SHARED_UID && device.uctxs.get(u32::from(uid)).is_none() {
        return Err(Reject::new(
            Status::BadResource,
            "uid",
            uid,
            "a uid is one that CREATE_UCTX gave",
            PRM,
        ));
    }
    if request.input.len() < command.len.0 {
        let len = request.input.len() as u64;
        return Err(Reject::new(
            Status::BadInputLength,
            "inlen",
            len,
            "the input holds the command's fixed part",
            IFC,
        ));
    }
    if request.output_len < command.len.1 {
        let len = request.output_len as u64;
        return Err(Reject::new(
            Status::BadOutputLength,
            "outlen",
            len,
            "the output has room for the answer",
            IFC,
        ));
    }
    if device.phase < command.phase {
        return Err(Reject::new(
            Status::BadSysState,
            "phase",
            device.phase as u64,
            "ENABLE_HCA comes before configuration, INIT_HCA before objects",
            PRM,
        ));
    }
    Ok(command)
}

/// Pages that a command lists: `len` bytes from `start` in pages of `log_page_size` (log2 of bytes).
fn listed_pages(list: &[u8], log_page_size: u32, start: u64, len: u64) -> Result<Pages, Reject> {
    let pages = (start + len).div_ceil(1 << log_page_size);
    let addresses: Vec<u64> = be64_list(list)
        .take(usize::try_from(pages).unwrap_or(usize::MAX))
        .map(|entry| entry & !((1 << log_page_size) - 1))
        .collect();
    if (addresses.len() as u64) < pages {
        return Err(Reject::param(
            "pas",
            addresses.len() as u64,
            "the page list covers the queue",
        ));
    }
    Ok(Pages {
        addresses: addresses.into(),
        log_size: log_page_size,
    })
}

/// Checks that there is room for what a new object, or an object's new lists, would hold.
fn admit(device: &Device, object: &impl Weigh) -> Result<(), Reject> {
    let held = device.translations() + object.entries();
    if held <= TRANSLATIONS {
        return Ok(());
    }
    Err(Reject::new(
        Status::NoResources,
        "translation entries",
        held as u64,
        "page lists and key lists of all objects have at most 2^24 entries",
        "connectx/src/objects/device.rs, TRANSLATIONS",
    ))
}

/// Where a queue lies, as its context says.
struct Placement<'a> {
    /// Page list of the command, used without a UMEM.
    list: &'a [u8],
    /// `log_page_size` of the context, above 4 KiB.
    log_page_size: u32,
    /// `page_offset` of the context, in 1/64 of a page.
    page_offset: u64,
    /// UMEM and offset into it.
    umem: Option<(u32, u64)>,
}

/// Finds the memory of a queue of `len` bytes.
fn place(
    device: &Device,
    request: &Request<'_>,
    placement: &Placement<'_>,
    len: u64,
) -> Result<Buffer, Reject> {
    if len == 0 {
        return Ok(Buffer::empty());
    }
    if let Some((id, offset)) = placement.umem {
        let umem = device.umems.get(id).ok_or(Reject::absent("umem_id", id))?;
        request.check_owner("umem_id", id, umem.uid)?;
        let start = umem.page_offset.checked_add(offset);
        let fits = offset.checked_add(len).is_some_and(|end| end <= umem.len);
        return start
            .filter(|_| fits)
            .and_then(|start| Buffer::new(umem.pages.clone(), start, len))
            .map(|buffer| Buffer {
                borrowed: true,
                ..buffer
            })
            .ok_or(Reject::param(
                "umem_offset",
                offset,
                "the queue lies within its UMEM",
            ));
    }
    let log_page_size = placement.log_page_size + 12;
    if log_page_size > 31 {
        return Err(Reject::param(
            "log_page_size",
            placement.log_page_size,
            "a page of a queue is at most 2 GiB",
        ));
    }
    let start = placement.page_offset << (log_page_size - 6);
    let pages = listed_pages(placement.list, log_page_size, start, len)?;
    Buffer::new(pages, start, len).ok_or(Reject::param(
        "page_offset",
        placement.page_offset,
        "the queue lies within its pages",
    ))
}

/// Bus address of a doorbell record: as given, or by its offset in a UMEM.
fn place_dbr(
    device: &Device,
    request: &Request<'_>,
    address: u64,
    umem: Option<u32>,
) -> Result<u64, Reject> {
    if address % 8 != 0 {
        return Err(Reject::param(
            "dbr_addr",
            address,
            "a doorbell record is aligned to 8 bytes",
        ));
    }
    let Some(id) = umem else { return Ok(address) };
    let placement = Placement {
        list: &[],
        log_page_size: 0,
        page_offset: 0,
        umem: Some((id, address)),
    };
    let buffer = place(device, request, &placement, 8)?;
    buffer.locate(0).map(|(addr, _)| addr).ok_or(Reject::param(
        "dbr_addr",
        address,
        "the doorbell record lies within its UMEM",
    ))
}

/// A field that is `Some` when a valid bit is set.
fn when(valid: Field, input: &[u8], value: Field) -> Option<u32> {
    valid.is_set(input).then(|| value.get32(input))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_listed_once_and_have_names() {
        for (i, command) in COMMANDS.iter().enumerate() {
            assert!(opcode::name(command.opcode).is_some());
            assert!(
                COMMANDS[..i].iter().all(|c| c.opcode != command.opcode),
                "{:#x} twice",
                command.opcode
            );
        }
    }

    #[test]
    fn a_queue_starts_at_sixty_fourths_of_a_page() {
        let list = [0x10_0000u64, 0x20_0000].map(u64::to_be_bytes).concat();
        let device = Device::new(
            "t".into(),
            crate::wire::port::Port::test(),
            Default::default(),
        );
        let request = Request {
            input: &[0; 16],
            output_len: 16,
        };
        let at = |page_offset, log_page_size, len| {
            let placement = Placement {
                list: &list,
                log_page_size,
                page_offset,
                umem: None,
            };
            place(&device, &request, &placement, len).map(|b| b.locate(0).unwrap().0)
        };
        assert_eq!(at(1, 0, 64), Ok(0x10_0040));
        assert_eq!(at(1, 4, 64), Ok(0x10_0400));
        assert_eq!(at(32, 0, 4096), Ok(0x10_0800));
        assert!(at(1, 0, 8192).is_err(), "three pages are needed");
    }
}
