// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is seen from outside, and when the module may go.

use crate::fixture::{Doorbell, Pair, alone, module_is_loaded, run};
use ibgda_uapi::*;
use ibgda_vmtests::broker::Session;
use ibgda_vmtests::machine::wait_until;
use ibgda_vmtests::process::{End, fork};
use ibgda_vmtests::verbs::Verbs;
use std::fs;
use std::path::Path;

#[test]
fn debugfs_lists_sessions_and_grants_until_they_end() {
    alone(|| {
        let read = |file: &str| {
            fs::read_to_string(Path::new("/sys/kernel/debug/ibgda").join(file))
                .expect("read debugfs")
        };
        let counter = |name: &str| -> u64 {
            let counters = read("counters");
            let line = counters.lines().find_map(|line| line.strip_prefix(name));
            line.expect("the counter").trim().parse().expect("a number")
        };
        let pair = Pair::new();
        wait_until("no grant is left of earlier tests", || {
            read("grants").lines().count() == 1
        });
        let (granted, ended) = (counter("grants"), counter("ended"));
        let mut owner = fork(|line| {
            let session = pair.session();
            let _doorbell = Doorbell::import(&session, pair.nic);
            line.go();
            line.wait();
            drop(session);
            line.go();
            line.wait();
            0
        });
        owner.wait();
        let pid = owner.pid.to_string();
        let sessions = read("sessions");
        let line = sessions
            .lines()
            .find(|line| line.split('\t').nth(1) == Some(&pid))
            .expect("the session");
        let (gpu, nic) = (pair.gpu.to_string(), pair.nic.to_string());
        assert_eq!(
            line.split('\t').skip(2).collect::<Vec<_>>(),
            ["ready", "1", &gpu, &nic, "1", "0", "1"]
        );
        assert!(
            read("grants").contains(&format!("\t{pid}\theld\tvalid\n")),
            "{}",
            read("grants")
        );
        owner.go();
        owner.wait();
        assert!(
            read("grants").contains(&format!("\t{pid}\torphan\tvalid\n")),
            "{}",
            read("grants")
        );
        assert_eq!(counter("grants"), granted + 1);
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        wait_until("the grant has ended", || {
            read("grants").lines().count() == 1
        });
        assert_eq!(counter("ended"), ended + 1);
    });
}

/// N13: no address in fdinfo.
#[test]
fn fdinfo_tells_the_state_and_no_address() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        assert!(session.fdinfo().contains("\nstate:\tunbound\n"));
        session.bind(pair.gpu, pair.nic).expect("bind");
        let _doorbell = Doorbell::import(&session, pair.nic);
        session
            .alloc_queue(8192, -1, IBGDA_MEM_WB)
            .expect("queue memory");
        let info = session.fdinfo();
        for line in [
            format!("owner:\t{}", std::process::id()),
            "state:\tready".to_owned(),
            "generation:\t1".to_owned(),
            format!("gpu:\t{}", pair.gpu),
            format!("nic:\t{}", pair.nic),
            "path:\tswitch".to_owned(),
            "doorbells:\t1".to_owned(),
            "queues:\t1".to_owned(),
            "queue-bytes:\t8192".to_owned(),
            "grants:\t1".to_owned(),
        ] {
            assert!(info.lines().any(|got| got == line), "{line:?} in:\n{info}");
        }
        let resource =
            fs::read_to_string(pair.nic.sysfs().join("resource")).expect("read resource");
        let bar = resource
            .split(' ')
            .next()
            .expect("BAR0")
            .trim_start_matches("0x")
            .trim_start_matches('0');
        assert!(
            !info.contains(&bar[..bar.len() - 4]),
            "an address of the NIC in:\n{info}"
        );
    });
}

/// N10: rmmod of the module while it is used.
#[test]
fn the_module_stays_while_it_is_used_and_goes_when_it_is_not() {
    alone(|| {
        let pair = Pair::new();
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let mut owner = fork(|line| {
            let session = pair.session();
            session.import(&dmabuf, &verbs.uverbs()).expect("import");
            line.go();
            line.wait();
            drop(session);
            line.go();
            line.wait();
            0
        });
        owner.wait();
        drop(pair);
        assert!(
            !run("rmmod", &["ibgda"]) && module_is_loaded(),
            "a file is open"
        );
        owner.go();
        owner.wait();
        assert!(
            !run("rmmod", &["ibgda"]) && module_is_loaded(),
            "the owner of a page lives"
        );
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        wait_until("the module can go", || {
            run("rmmod", &["ibgda"]) && !module_is_loaded()
        });
        assert!(run("insmod", &["/opt/ibgda/ibgda.ko"]) && module_is_loaded());
        wait_until("the device is there", || Path::new("/dev/ibgda").exists());
        Pair::new().session();
    });
}
