// SPDX-License-Identifier: MIT OR Apache-2.0
//! NIC, GPU and drivers are taken away under live grants.

use crate::fixture::{Doorbell, Pair, alone, run, wait_for_sink};
use ibgda_uapi::*;
use ibgda_vmtests::broker::Session;
use ibgda_vmtests::machine::{self, Allowed, Bdf, gpus, nics, wait_until};
use ibgda_vmtests::monitor::Monitor;
use ibgda_vmtests::pair;
use ibgda_vmtests::process::{End, fork};
use ibgda_vmtests::tools::ctl;
use ibgda_vmtests::verbs::REGISTER;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

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
    wait_until("the session is lost", || {
        status.state() != IBGDA_STATE_READY
    });
    if let Some(reason) = reason {
        assert_eq!(status.reason(), reason);
    }
    wait_for_sink(&mapping);
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK)
    );

    come_back(&pair);
    if status.reason() != IBGDA_REASON_GPU_REMOVED {
        wait_until("the session is recovered", || {
            status.state() == IBGDA_STATE_RECOVERED
        });
    }
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

/// N21: the driver unloads and loads the NIC, as it does when the machine sleeps and wakes. (The VM itself does not survive
/// sleep: its root file system's virtio device has no way to.)
#[test]
fn reloading_the_nic_as_sleep_does_under_a_grant_loses_the_session_and_returns_it() {
    alone(|| {
        survives(
            |pair| {
                let device = format!("pci/{}", pair.nic);
                assert!(run("devlink", &["dev", "reload", &device]), "devlink");
            },
            Some(IBGDA_REASON_NIC_RESET),
            |_| {},
        );
    });
}

/// How many PCI functions the kernel has freed, while it exists.
struct Freed;

impl Freed {
    const TRACING: &str = "/sys/kernel/tracing";

    fn write(file: &str, text: &str) {
        let mut file = File::options()
            .append(true)
            .open(Path::new(Self::TRACING).join(file))
            .expect("open a file of tracefs");
        file.write_all(text.as_bytes()).expect("write it");
    }

    fn new() -> Self {
        if !Path::new(Self::TRACING).join("kprobe_events").exists() {
            assert!(run("mount", &["-t", "tracefs", "tracefs", Self::TRACING]));
        }
        Self::write("kprobe_events", "p:ibgda/freed pci_release_dev\n");
        Self::write("events/ibgda/freed/enable", "1");
        Self
    }

    fn count(&self) -> u64 {
        let profile = Path::new(Self::TRACING).join("kprobe_profile");
        let profile = fs::read_to_string(profile).expect("read kprobe_profile");
        let line = profile.lines().find(|line| line.contains("freed"));
        let hits = line.and_then(|line| line.split_whitespace().nth(1));
        hits.expect("our probe").parse().expect("a number")
    }
}

impl Drop for Freed {
    fn drop(&mut self) {
        Self::write("events/ibgda/freed/enable", "0");
        Self::write("kprobe_events", "-:ibgda/freed\n");
    }
}

/// N15: a reference to a function lasts as long as who uses it, and not longer: a refused BIND leaves none, a session keeps
/// both, a grant keeps its NIC's.
#[test]
fn a_function_that_is_removed_is_freed_with_the_last_of_its_sessions() {
    alone(|| {
        let (gpu, nic) = (gpus()[0], nics()[1]);
        let freed = Freed::new();
        let allowed = Allowed::pair(gpu, nic);
        for _ in 0..10 {
            let session = Session::open();
            assert_eq!(session.bind(nic, nic).err(), Some(libc::EINVAL));
            assert_eq!(session.bind(gpu, gpu).err(), Some(libc::EINVAL));
            assert_eq!(session.bind(gpu, nics()[0]).err(), Some(libc::EACCES));
            session.bind(gpu, nic).expect("bind");
            assert_eq!(session.bind(gpu, nic).err(), Some(libc::EALREADY));
        }
        for (function, is) in [(gpu, "the GPU"), (nic, "the NIC")] {
            let mut user = fork(|line| {
                let session = Session::bound(gpu, nic);
                Doorbell::import(&session, nic);
                line.go();
                line.wait();
                assert!(session.rebind().is_err());
                0
            });
            user.wait();
            let before = freed.count();
            remove(function);
            // Long enough for whoever else had it.
            std::thread::sleep(std::time::Duration::from_millis(300));
            assert_eq!(freed.count(), before, "{is} is freed under a session");
            user.go();
            assert_eq!(user.end(), End::Exit(0));
            wait_until(is, || freed.count() == before + 1);
            rescan();
            wait_until("it is back", || function.sysfs().exists());
            machine::wait_for_rdma(nic);
        }
        drop(allowed);
    });
}

/// Two functions, each below a port of its own, with their bus numbers exchanged.
struct Exchanged([Bdf; 2]);

impl Exchanged {
    /// Where the two are alternates.
    fn exchange(functions: [Bdf; 2]) {
        let ports = functions.map(|function| {
            let path = fs::canonicalize(function.sysfs()).expect("its folder");
            path.parent().expect("a port").to_owned()
        });
        functions.map(remove);
        // With nothing below them, the ports can be told other numbers; the kernel reads them when it finds the ports anew.
        for (port, bus) in ports.iter().zip([functions[1].bus, functions[0].bus]) {
            let config = File::options().write(true).open(port.join("config"));
            let config = config.expect("open the port's configuration space");
            // Secondary and subordinate bus number.
            config
                .write_all_at(&[bus, bus], 0x19)
                .expect("write the bus numbers");
        }
        for port in ports {
            fs::write(port.join("remove"), "1").expect("remove the port");
        }
        rescan();
        for function in functions {
            wait_until("the functions are back", || function.sysfs().exists());
        }
    }

    fn new(functions: [Bdf; 2]) -> Self {
        Self::exchange(functions);
        Self(functions)
    }
}

impl Drop for Exchanged {
    fn drop(&mut self) {
        Self::exchange(self.0);
    }
}

/// N15: an address that is used again, by another device.
#[test]
fn a_device_that_takes_the_gpus_address_is_not_the_gpu() {
    alone(|| {
        let pair = Pair::new();
        let other = nics()[1];
        let session = pair.session();
        let status = session.status();
        let vendor = |function: Bdf| {
            fs::read_to_string(function.sysfs().join("vendor")).expect("read the vendor")
        };
        let nvidia = vendor(pair.gpu);
        let exchanged = Exchanged::new([pair.gpu, other]);
        assert_ne!(vendor(pair.gpu), nvidia, "nothing was exchanged");
        assert_eq!(
            (status.state(), status.reason()),
            (IBGDA_STATE_LOST, IBGDA_REASON_GPU_REMOVED)
        );
        assert_eq!(session.rebind().err(), Some(libc::ENODEV));
        let bound = Session::open().bind(pair.gpu, pair.nic);
        assert_eq!(bound.err(), Some(libc::EINVAL), "it is no GPU");
        drop(exchanged);
        assert_eq!(vendor(pair.gpu), nvidia);
        assert_eq!(session.rebind().map(|bind| bind.generation), Ok(2));
        machine::wait_for_rdma(other);
    });
}
