// SPDX-License-Identifier: MIT OR Apache-2.0
//! NIC, GPU and drivers are taken away under live grants.

use crate::fixture::{Doorbell, Pair, alone, run};
use ibgda_uapi::*;
use ibgda_vmtests::machine::{self, Bdf, wait_until};
use ibgda_vmtests::monitor::Monitor;
use ibgda_vmtests::pair;
use ibgda_vmtests::tools::ctl;
use ibgda_vmtests::verbs::REGISTER;
use std::fs;

fn rescan() {
    fs::write("/sys/bus/pci/rescan", "1").expect("rescan the bus");
}

fn remove(function: Bdf) {
    fs::write(function.sysfs().join("remove"), "1").expect("remove the function");
}

/// A session with a populated doorbell loses it by `lose`, and has it again, in the same file, after `come_back`.
fn survives(lose: impl FnOnce(&Pair), reason: Option<u32>, come_back: impl FnOnce(&Pair)) {
    let pair = Pair::new();
    let session = pair.session();
    let status = session.status();
    let doorbell = Doorbell::import(&session, pair.nic);
    let mapping = session.map(doorbell.granted, 4096).expect("map");
    let handle = doorbell.granted.handle;
    session.populate(handle, mapping.address).expect("populate");

    lose(&pair);
    wait_until("the session is lost", || status.state() == IBGDA_STATE_LOST);
    if let Some(reason) = reason {
        assert_eq!(status.reason(), reason);
    }
    mapping.store(REGISTER, 77);
    assert_eq!(mapping.load(REGISTER), 77, "a store lands in the sink page");
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK)
    );

    come_back(&pair);
    wait_until("the session can be bound again", || {
        session.rebind().is_ok()
    });
    assert_eq!(
        (status.state(), status.generation()),
        (IBGDA_STATE_READY, 2)
    );
    assert_eq!(mapping.load(REGISTER), 77, "the old mapping stays a sink");
    machine::wait_for_rdma(pair.nic);
    Doorbell::import(&session, pair.nic);
}

/// N10: mlx5_core is unbound from the NIC.
#[test]
fn unbinding_the_pci_driver_under_a_grant_loses_the_session_and_binding_returns_it() {
    alone(|| {
        survives(
            |pair| pair::driver("unbind", pair.nic).expect("unbind mlx5_core"),
            Some(IBGDA_REASON_NIC_REMOVED),
            |pair| pair::driver("bind", pair.nic).expect("bind mlx5_core"),
        );
    });
}

/// N10: the NIC's PCI function is removed.
#[test]
fn removing_the_nic_under_a_grant_loses_the_session_and_a_rescan_returns_it() {
    alone(|| {
        survives(
            |pair| remove(pair.nic),
            Some(IBGDA_REASON_NIC_REMOVED),
            |_| rescan(),
        );
    });
}

/// N10: the slot's button is pressed, and the NIC pulled; put back, and the button pressed.
#[test]
fn unplugging_the_nic_under_a_grant_loses_the_session_and_plugging_it_in_returns_it() {
    alone(|| {
        let gone = |pair: &Pair| wait_until("it is let go", || !pair.nic.sysfs().exists());
        survives(
            |pair| {
                let mut monitor = Monitor::open().expect("the monitor");
                monitor.press_button("nic0").expect("press the button");
                gone(pair);
                ctl(&["pull", "nic0"]).expect("pull the card");
            },
            Some(IBGDA_REASON_NIC_REMOVED),
            |_| {
                ctl(&["insert", "nic0"]).expect("insert the card");
                let mut monitor = Monitor::open().expect("the monitor");
                monitor.press_button("nic0").expect("press the button");
            },
        );
    });
}

/// N10: the NIC is torn out without a word; its driver finds out.
#[test]
fn tearing_the_nic_out_under_a_grant_loses_the_session_and_plugging_it_in_returns_it() {
    alone(|| {
        survives(
            |pair| {
                // Else the driver tries for a minute to get it back.
                let device = format!("pci/{}", pair.nic);
                assert!(run(
                    "devlink",
                    &[
                        "health",
                        "set",
                        &device,
                        "reporter",
                        "fw_fatal",
                        "auto_recover",
                        "false"
                    ]
                ));
                ctl(&["pull", "nic0"]).expect("pull the card");
                wait_until("the port goes", || !pair::up(pair.nic));
                let mut monitor = Monitor::open().expect("the monitor");
                monitor.press_button("nic0").expect("press the button");
                wait_until("it is let go", || !pair.nic.sysfs().exists());
            },
            None,
            |_| {
                ctl(&["insert", "nic0"]).expect("insert the card");
                let mut monitor = Monitor::open().expect("the monitor");
                monitor.press_button("nic0").expect("press the button");
            },
        );
    });
}

/// N10: the same with the GPU.
#[test]
fn unplugging_the_gpu_under_a_grant_loses_the_session_and_plugging_it_in_returns_it() {
    alone(|| {
        survives(
            |pair| {
                let mut monitor = Monitor::open().expect("the monitor");
                monitor.press_button("gpu0").expect("press the button");
                wait_until("it is let go", || !pair.gpu.sysfs().exists());
            },
            Some(IBGDA_REASON_GPU_REMOVED),
            |pair| {
                let mut monitor = Monitor::open().expect("the monitor");
                monitor.press_button("gpu0").expect("press the button");
                wait_until("the GPU is back", || pair.gpu.sysfs().exists());
            },
        );
    });
}

/// N10: the NIC's drivers are unloaded.
#[test]
fn unloading_the_nics_drivers_under_a_grant_loses_the_session_and_loading_returns_it() {
    alone(|| {
        survives(
            |_| {
                assert!(run("rmmod", &["mlx5_ib"]), "rmmod mlx5_ib");
                assert!(run("rmmod", &["mlx5_core"]), "rmmod mlx5_core");
            },
            Some(IBGDA_REASON_NIC_REMOVED),
            |_| {
                assert!(run("modprobe", &["mlx5_ib"]), "modprobe mlx5_ib");
                for nic in machine::nics() {
                    machine::wait_for_rdma(nic);
                }
            },
        );
    });
}
