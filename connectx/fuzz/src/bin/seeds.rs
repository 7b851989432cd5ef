// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the seeds: what the driver of the tests sends, command by command, and a work request of each kind.
//!
//! `seeds DIR` makes `DIR/commands`, `DIR/wqe` and `DIR/bar`.

use std::fs;
use std::io;
use std::path::Path;

use connectx::ifc::command::{self, header};
use connectx::ifc::context::{cqc, umem};
use connectx::ifc::opcode;
use connectx::ifc::wqe::send;
use connectx_fuzz::harness::{Machine, connected, started};
use connectx_fuzz::program::{Kind, Step, encode};
use connectx_guest::{Cq, Guest, Qp, Settings, Srq, address_vector, input, pointer, remote};

fn main() -> io::Result<()> {
    let dir = std::env::args().nth(1).unwrap_or_else(|| "corpus".into());
    let dir = Path::new(&dir);
    for (target, seeds) in [
        ("commands", commands()),
        ("wqe", requests()),
        ("bar", registers()),
    ] {
        let dir = dir.join(target);
        fs::create_dir_all(&dir)?;
        for (name, steps) in seeds {
            fs::write(dir.join(name), encode(&steps))?;
        }
    }
    Ok(())
}

type Seeds = Vec<(&'static str, Vec<Step>)>;

/// Records what a guest sends.
fn record(f: impl FnOnce(&mut Guest)) -> Vec<Step> {
    let mut machine = started();
    let guest = &mut machine.guests[0];
    guest.record = Some(Vec::new());
    f(guest);
    let sent = guest.record.take().unwrap_or_default();
    sent.iter()
        .map(|(input, output_len)| {
            Step::new(Kind::Command, input.len() as u32, *output_len as u32, input)
        })
        .collect()
}

fn pd(guest: &mut Guest) -> u32 {
    guest.alloc(opcode::ALLOC_PD)
}

fn query(guest: &mut Guest, op: u16, number: u32, output_len: usize) {
    let mut bytes = input(op, 16);
    header::object.set(&mut bytes, u64::from(number));
    guest.command(bytes, output_len);
}

fn commands() -> Seeds {
    vec![
        ("start", record(Guest::bring_up)),
        (
            "memory",
            record(|g| {
                let pd = pd(g);
                let (key, at) = g.region(pd, 3 << 12);
                g.key(pd, at + 100, 5000, 0x1f);
                query(g, opcode::QUERY_MKEY, key >> 8, 0x110);
                let window = g.window(pd);
                g.on_object(opcode::DESTROY_MKEY, window >> 8);
                g.on_object(opcode::DESTROY_MKEY, key >> 8);
                g.on_object(opcode::DEALLOC_PD, pd);
            }),
        ),
        (
            "completion-queue",
            record(|g| {
                let mut cq = Cq::new(g, 6);
                query(g, opcode::QUERY_CQ, cq.cqn, 0x110);
                cq.resize(g, 7);
                let mut modify = input(opcode::MODIFY_CQ, 0x110);
                header::object.set(&mut modify, u64::from(cq.cqn));
                command::modify_cq_in::field_select.set(&mut modify, 3);
                g.command(modify, 16);
                g.on_object(opcode::DESTROY_CQ, cq.cqn);
            }),
        ),
        (
            "queue-pair",
            record(|g| {
                let pd = pd(g);
                let cq = Cq::new(g, 4);
                let qp = Qp::new(g, pd, &cq, &cq);
                qp.connect(g, Settings::to(1, qp.qpn));
                qp.state(g);
                qp.modify(g, opcode::RTS2RTS_QP, |_| {});
                query(g, opcode::TO_ERR_QP, qp.qpn, 16);
                query(g, opcode::TO_RST_QP, qp.qpn, 16);
                g.on_object(opcode::DESTROY_QP, qp.qpn);
                g.on_object(opcode::DESTROY_CQ, cq.cqn);
            }),
        ),
        (
            "shared-receive-queues",
            record(|g| {
                let pd = pd(g);
                let xrcd = g.alloc(opcode::ALLOC_XRCD);
                let cq = Cq::new(g, 4);
                let pool = Srq::new(g, pd, 4, None);
                let srq = Srq::new(g, pd, 4, Some((xrcd, &cq)));
                query(g, opcode::QUERY_RMP, pool.number, 0x110);
                query(g, opcode::QUERY_XRC_SRQ, srq.number, 0x110);
                query(g, opcode::ARM_XRC_SRQ, srq.number, 16);
                g.on_object(opcode::DESTROY_RMP, pool.number);
                g.on_object(opcode::DESTROY_XRC_SRQ, srq.number);
            }),
        ),
        (
            "user",
            record(|g| {
                let out = g.ok(input(opcode::CREATE_UCTX, 64), 16);
                g.uid = command::create_uctx_out::uid.get(&out) as u16;
                g.alloc(opcode::ALLOC_UAR);
                let pd = pd(g);
                let at = g.ram.alloc(2 << 12);
                let mut create = input(opcode::CREATE_UMEM, 0x30);
                umem::num_of_mtt.set(command::create_umem_in::umem.bytes_mut(&mut create), 2);
                create.extend([at + 3, at + 4099].into_iter().flat_map(u64::to_be_bytes));
                let out = g.ok(create, 16);
                let id = u64::from(command::reply::object.get32(&out));
                let mut create = input(opcode::CREATE_CQ, 0x110);
                command::create_cq_in::cq_umem_valid.set(&mut create, 1);
                command::create_cq_in::cq_umem_id.set(&mut create, id);
                let (eqn, uar) = (u64::from(g.completions.eqn), u64::from(g.uar) + 1);
                let context = command::create_cq_in::cqc.bytes_mut(&mut create);
                cqc::dbr_umem_valid.set(context, 1);
                cqc::dbr_umem_id.set(context, id);
                cqc::dbr_addr.set(context, 4096);
                cqc::log_cq_size.set(context, 5);
                cqc::c_eqn.set(context, eqn);
                cqc::uar_page.set(context, uar);
                g.command(create, 16);
                let mut key = input(opcode::CREATE_MKEY, 0x110);
                command::create_mkey_in::mkey_umem_valid.set(&mut key, 1);
                command::create_mkey_in::mkey_umem_id.set(&mut key, id);
                let context = command::create_mkey_in::mkc.bytes_mut(&mut key);
                connectx::ifc::context::mkc::access_mode_1_0.set(context, 1);
                connectx::ifc::context::mkc::pd.set(context, u64::from(pd));
                connectx::ifc::context::mkc::len.set(context, 4096);
                connectx::ifc::context::mkc::log_page_size.set(context, 12);
                g.command(key, 16);
            }),
        ),
        (
            "queries",
            record(|g| {
                for (op_mod, len) in [(0u64, 0x1010), (1, 0x1010), (6, 0x1010), (7, 0x1010)] {
                    let mut caps = input(opcode::QUERY_HCA_CAP, 16);
                    header::op_mod.set(&mut caps, op_mod);
                    g.command(caps, len);
                }
                for (op, len) in [
                    (opcode::QUERY_ADAPTER, 0x110),
                    (opcode::QUERY_ISSI, 0x70),
                    (opcode::QUERY_HCA_VPORT_CONTEXT, 0x210),
                    (opcode::QUERY_HCA_VPORT_GID, 0x110),
                    (opcode::QUERY_HCA_VPORT_PKEY, 0x210),
                ] {
                    g.command(input(op, 16), len);
                }
                for register in [0x5003u64, 0x5004, 0x5006, 0x500f, 0x6001] {
                    let mut access = input(opcode::ACCESS_REG, 0x50);
                    header::op_mod.set(&mut access, 1);
                    command::access_register_in::register_id.set(&mut access, register);
                    g.command(access, 0x60);
                }
                let mut mad = input(opcode::MAD_IFC, 0x110);
                header::op_mod.set(&mut mad, 3);
                mad[16..20].copy_from_slice(&[1, 1, 1, 1]);
                g.command(mad, 0x110);
            }),
        ),
        (
            "pages",
            record(|g| {
                let mut pages = input(opcode::MANAGE_PAGES, 16);
                header::op_mod.set(&mut pages, 1);
                command::manage_pages_in::input_num_entries.set(&mut pages, 4);
                pages.extend((1..=4u64).flat_map(|page| (page << 12).to_be_bytes()));
                g.command(pages, 16);
                let mut pages = input(opcode::MANAGE_PAGES, 16);
                header::op_mod.set(&mut pages, 2);
                command::manage_pages_in::input_num_entries.set(&mut pages, 7);
                g.command(pages, 16 + 7 * 8);
                g.on_object(opcode::TEARDOWN_HCA, 0);
                g.on_object(opcode::DISABLE_HCA, 0);
            }),
        ),
    ]
}

/// A WQE without what the harness fills in.
fn wqe(op: u8, flags: u8, immediate: u32, segments: &[[u8; 16]]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, op, 0, 0, 0, 0, 0, 0, 0, flags];
    bytes.extend(immediate.to_be_bytes());
    bytes.extend(segments.concat());
    bytes
}

fn requests() -> Seeds {
    let machine = connected();
    let Machine {
        regions,
        srqs,
        queues,
        ..
    } = &machine;
    let (key, at) = regions[0];
    let (rkey, to) = regions[1];
    let local = |len| pointer(len, key, at);
    let there = remote(to + 64, rkey);
    let post = |qp: u32, bytes: Vec<u8>| Step::new(Kind::Post, qp, 0, &bytes);
    let run = || Step::new(Kind::Run, 0, 0, &[]);
    let receive = |queue: u32| Step::new(Kind::Receive, queue, 0, &pointer(4096, rkey, to)).on(1);
    let mut operands = [0u8; 16];
    operands[7] = 5;
    let mut inline = [0u8; 16];
    inline[..4].copy_from_slice(&0x8000_000cu32.to_be_bytes());
    let mut seeds: Seeds = vec![
        (
            "write",
            vec![
                post(0, wqe(send::RDMA_WRITE, 8, 0, &[there, local(5000)])),
                run(),
            ],
        ),
        (
            "write-inline",
            vec![
                post(0, wqe(send::RDMA_WRITE, 8, 0, &[there, inline])),
                run(),
            ],
        ),
        (
            "write-immediate",
            vec![
                receive(0),
                post(0, wqe(send::RDMA_WRITE_IMM, 8, 7, &[there, local(64)])),
                run(),
            ],
        ),
        (
            "read",
            vec![
                post(0, wqe(send::RDMA_READ, 8, 0, &[there, local(3000)])),
                post(0, wqe(send::NOP, 0x48, 0, &[])),
                run(),
            ],
        ),
        (
            "fetch-add",
            vec![
                post(0, wqe(send::ATOMIC_FA, 8, 0, &[there, operands, local(8)])),
                run(),
            ],
        ),
        (
            "compare-swap",
            vec![
                post(0, wqe(send::ATOMIC_CS, 8, 0, &[there, operands, local(8)])),
                run(),
            ],
        ),
        (
            "masked-swap",
            vec![
                post(
                    0,
                    wqe(
                        send::ATOMIC_MASKED_CS,
                        8,
                        0,
                        &[there, operands, operands, local(8)],
                    ),
                ),
                run(),
            ],
        ),
        (
            "send",
            vec![
                receive(0),
                post(0, wqe(send::SEND, 8, 0, &[local(100), local(200)])),
                run(),
                Step::new(Kind::Consume, 0, 0, &[]),
            ],
        ),
        (
            "send-not-ready",
            vec![
                post(0, wqe(send::SEND, 8, 0, &[local(100)])),
                run(),
                receive(0),
                run(),
            ],
        ),
        (
            "send-invalidate",
            vec![
                receive(0),
                post(0, wqe(send::SEND_INVAL, 8, rkey, &[local(1)])),
                run(),
            ],
        ),
        (
            "unreliable",
            vec![
                receive(1),
                post(1, wqe(send::SEND_IMM, 8, 3, &[local(2000)])),
                run(),
            ],
        ),
        (
            "shared",
            vec![
                receive(6),
                post(3, wqe(send::SEND, 8, 0, &[local(100)])),
                run(),
            ],
        ),
        (
            "own",
            vec![
                post(5, wqe(send::RDMA_WRITE, 8, 0, &[remote(at, key), local(9)])),
                run(),
            ],
        ),
        (
            "dump",
            vec![
                post(0, wqe(send::DUMP, 8, 0, &[local(64)])),
                post(0, wqe(send::LOCAL_INVAL, 8, key, &[])),
                run(),
            ],
        ),
    ];
    let [a, b, c] = address_vector(2, queues[1][2].qp.qpn, 0x1111_1111);
    seeds.push((
        "datagram",
        vec![
            receive(2),
            post(2, wqe(send::SEND, 8, 0, &[a, b, c, local(100)])),
            run(),
        ],
    ));
    let mut xrc = [0u8; 16];
    xrc[..4].copy_from_slice(&srqs[1][1].number.to_be_bytes());
    seeds.push((
        "xrc",
        vec![
            receive(7),
            post(4, wqe(send::SEND, 8, 0, &[xrc, local(100)])),
            run(),
        ],
    ));
    // A window bound with entries in the WQE: control, context, four entries.
    let mut bind = [[0u8; 16]; 11];
    bind[0][0] = 0x80 | 0x10;
    bind[0][2..4].copy_from_slice(&4u16.to_be_bytes());
    bind[0][8..16].copy_from_slice(&0x2010_6041u64.to_be_bytes());
    bind[7] = pointer(64, key, at);
    seeds.push((
        "bind",
        vec![
            post(0, wqe(send::UMR, 8, (key & !0xff) + 0x100, &bind)),
            run(),
        ],
    ));
    let mut doorbell = [0u8; 8];
    doorbell[2] = 1;
    doorbell[4..].copy_from_slice(&(queues[0][0].qp.qpn << 8).to_be_bytes());
    let uar = machine.guests[0].uar * 4096;
    seeds.push((
        "doorbells",
        vec![
            Step::new(Kind::Write, uar + 0x800, 0, &doorbell),
            Step::new(Kind::Write, uar + 0x20, 0, &[0, 0, 0, 0, 0, 0, 0, 0x41]),
            Step::new(Kind::Write, uar + 0x40, 0, &[0, 0, 0, 0]),
            Step::new(Kind::Write, uar + 0x1804, 0, &[0, 0, 0x40, 0]),
            run(),
        ],
    ));
    seeds
}

fn registers() -> Seeds {
    let step = |kind, a, b, data: &[u8]| Step::new(kind, a, b, data);
    vec![
        (
            "segment",
            vec![
                step(Kind::Read, 0, 0x400, &[]),
                step(Kind::Read, 0x1000, 8, &[]),
                step(Kind::Write, 0x18, 0, &[0, 0, 0, 2]),
                step(Kind::Write, 0x14, 0, &[0, 0, 7, 0]),
                step(Kind::Run, 0, 0, &[]),
            ],
        ),
        (
            "config",
            vec![
                step(Kind::Config, 0, 256, &[]),
                step(Kind::Config, 0x10, 8, &[0xff; 8]),
                step(Kind::Config, 4, 4, &[6, 0, 0, 0]),
                step(Kind::Config, 0x68, 4, &[0, 0x80]),
                step(Kind::Config, 0x100, 64, &[0xff; 4]),
                step(Kind::Config, 0xffe, 4, &[1; 8]),
            ],
        ),
        (
            "reset",
            vec![
                step(Kind::Steer, 0, 0, &[]),
                step(Kind::Reset, 0, 0, &[]),
                step(Kind::Steer, 10, 0, &[]),
            ],
        ),
    ]
}
