// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loopback route through the public calls: what `examples/loopback`, which moves data, leaves out.

use ibgda::{
    Access, Context, LinkLayer, OpenOptions, QpAddress, QueuePairOptions, Rounding, Route, Source,
    loopback,
};
use std::{ptr, sync::Mutex, time::Duration};

/// The NICs are the process's: one test at a time.
static NICS: Mutex<()> = Mutex::new(());

fn open(nic: &str, port: u8) -> ibgda::Result<Context> {
    Context::open(&OpenOptions {
        nic: nic.to_owned(),
        gpu: "0000:00:00.0".parse().expect("an address"),
        port,
        route: Route::Loopback,
    })
}

#[test]
fn opening_says_what_is_wrong() {
    let _alone = NICS.lock();
    for nic in ["mlx5_0", "loopback4", "loopback", "loopback-1", ""] {
        let error = open(nic, 1).expect_err("no such NIC");
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(
            error.to_string().contains("loopback0 to loopback3"),
            "{error}"
        );
    }
    let error = open("loopback0", 2).expect_err("no such port");
    assert_eq!(error.errno(), libc::EINVAL, "{error}");
}

#[test]
fn the_models_refusal_has_status_and_syndrome() {
    let _alone = NICS.lock();
    let context = open("loopback0", 1).expect("opens");
    let cq = context.create_cq(16).expect("a CQ");
    let options = QueuePairOptions {
        send_depth: 16,
        ..Default::default()
    };
    let qp = context.create_qp(&options, &cq, None).expect("a QP");
    qp.stop().expect("to error");
    let peer = QpAddress {
        qpn: 0x40,
        psn: 1,
        link_layer: LinkLayer::Loopback,
        lid: 1,
        mtu: 5,
        gid: qp.address().gid,
    };
    let error = qp.connect(&peer).expect_err("from the error state");
    assert!(matches!(error.origin(), Source::Firmware { .. }), "{error}");
    assert!(error.to_string().contains("INIT2RTR_QP"), "{error}");
}

#[test]
fn what_is_of_before_a_loss_is_dead_and_ends_nothing_of_after() {
    let _alone = NICS.lock();
    let mut context = open("loopback2", 1).expect("opens");
    let old_cq = context.create_cq(16).expect("a CQ");
    let old_region = context.alloc(4096, Access::all()).expect("a region");
    let generation = context.pair().generation;
    let error = context.rebind(Duration::ZERO).expect_err("it is not lost");
    assert_eq!(error.errno(), libc::EINVAL, "{error}");

    loopback::lose("loopback2").expect("lost");
    assert_eq!((context.state().state, context.state().reason), (2, 1));
    let error = context.create_cq(16).expect_err("a CQ of a lost NIC");
    assert_eq!(error.errno(), libc::ENOLINK);
    let text = error.to_string();
    assert!(
        text.contains("NIC reset") && text.contains("rebind"),
        "{text}"
    );
    let error = context.alloc(4096, Access::all()).expect_err("lost");
    assert_eq!(error.errno(), libc::ENOLINK, "{error}");
    let mut page = vec![0_u8; 8192];
    let start = page.as_mut_ptr();
    // SAFETY: the memory outlives the call, which fails.
    let mapped = unsafe { context.map_device(start, 8192, Access::all(), Rounding::Outward) };
    assert_eq!(mapped.expect_err("lost").errno(), libc::ENOLINK);
    let error = context.rebind(Duration::ZERO).expect_err("not back");
    assert_eq!(error.errno(), libc::EAGAIN, "{error}");

    loopback::recover("loopback2").expect("back");
    assert_eq!(context.state().state, 3, "recovered, and not yet rebound");
    let error = context.create_cq(16).expect_err("a CQ of before");
    assert_eq!(error.errno(), libc::ENOLINK, "{error}");
    context.rebind(Duration::ZERO).expect("rebinds");
    assert_eq!(context.pair().generation, generation + 1);
    assert_eq!(context.state().state, 1);

    // The new objects have the numbers of the old ones.
    let cq = context.create_cq(16).expect("a CQ");
    assert_eq!(cq.number(), old_cq.number());
    let region = context.alloc(4096, Access::all()).expect("a region");
    assert_eq!(region.rkey(), old_region.rkey());
    drop((old_cq, old_region));
    let options = QueuePairOptions {
        send_depth: 16,
        ..Default::default()
    };
    context
        .create_qp(&options, &cq, None)
        .expect("the CQ is there");
    let error = loopback::recover("loopback2").expect_err("it is not lost");
    assert!(error.to_string().contains("not lost"), "{error}");
}

#[test]
fn memory_may_be_registered_more_than_once() {
    let _alone = NICS.lock();
    let (one, other) = (
        open("loopback0", 1).expect("opens"),
        open("loopback1", 1).expect("opens"),
    );
    let mut memory = vec![0u8; 5 * 4096];
    let start = ptr::from_mut(&mut memory[0]);
    let map = |context: &Context, offset: usize, length: usize| {
        // SAFETY: the memory outlives the regions, and nobody reads it.
        unsafe {
            context.map_device(
                start.wrapping_add(offset),
                length,
                Access::all(),
                Rounding::Outward,
            )
        }
        .expect("registers")
    };
    let whole = map(&one, 0, memory.len());
    let part = map(&other, 4096, 100);
    let again = map(&one, 4196, 100);
    assert_ne!(whole.rkey(), again.rkey());
    drop(whole);
    drop(map(&other, 0, memory.len()));
    drop((part, again));
    drop(map(&one, 100, 4096));
}

#[test]
fn a_context_may_go_before_what_was_made_from_it() {
    let _alone = NICS.lock();
    let context = open("loopback0", 1).expect("opens");
    let cq = context.create_cq(16).expect("a CQ");
    let options = QueuePairOptions {
        send_depth: 16,
        ..Default::default()
    };
    let qp = context.create_qp(&options, &cq, None).expect("a QP");
    let region = context.alloc(4096, Access::all()).expect("a region");
    drop(context);
    drop(cq);
    region.write(0, b"still here").expect("writes");
    qp.stop().expect("stops");
    drop(region);
    drop(qp);
}
