// SPDX-License-Identifier: MIT OR Apache-2.0
//! The policy in configfs: who may meet, who may say so, and what its removal takes away.

use crate::fixture::{Doorbell, Pair, alone};
use ibgda_uapi::*;
use ibgda_vmtests::broker::Session;
use ibgda_vmtests::machine::{Allowed, entry_path, gpus, nics};
use ibgda_vmtests::process::{End, in_child};
use std::fs;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;

#[test]
fn nothing_is_allowed_that_the_policy_does_not_name() {
    alone(|| {
        let (gpu, nics) = (gpus()[0], nics());
        let session = Session::open();
        assert_eq!(session.bind(gpu, nics[0]).err(), Some(libc::EACCES));
        let other = Allowed::pair(gpu, nics[1]);
        assert_eq!(session.bind(gpu, nics[0]).err(), Some(libc::EACCES));
        session.bind(gpu, nics[1]).expect("the pair that is named");
        drop(other);
        for name in [
            "*@*".to_owned(),
            format!("{gpu}@*"),
            format!("*@{}", nics[0]),
        ] {
            let _entry = Allowed::entry(&name);
            Session::open()
                .bind(gpu, nics[0])
                .unwrap_or_else(|error| panic!("{name}: errno {error}"));
        }
        for name in ["", "x", "*", "*@", "0000:00:00.0", "0000:0:00.0@*", "*@*@*"] {
            let made = fs::create_dir(entry_path(name));
            assert!(made.is_err(), "{name:?} is no pair");
        }
        assert!(fs::create_dir("/sys/kernel/config/ibgda/other").is_err());
    });
}

/// N17: root of a user namespace is not root of the machine.
#[test]
fn only_root_of_the_machine_changes_the_policy() {
    alone(|| {
        let end = in_child(|| {
            // SAFETY: gives up everything in this process.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
            let error = fs::create_dir(entry_path("*@*")).expect_err("nobody may not");
            error.raw_os_error().unwrap_or(0)
        });
        assert!(
            matches!(end, End::Exit(libc::EACCES | libc::EPERM)),
            "{end:?}"
        );

        let end = in_child(|| {
            // SAFETY: this process alone moves, and keeps its user id: the owner of the directory, without power over it.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER) }, 0);
            fs::write("/proc/self/setgroups", "deny").expect("setgroups");
            fs::write("/proc/self/uid_map", "0 0 1").expect("uid_map");
            fs::write("/proc/self/gid_map", "0 0 1").expect("gid_map");
            let error =
                fs::create_dir(entry_path("*@*")).expect_err("root of a user namespace may not");
            error.raw_os_error().unwrap_or(0)
        });
        assert_eq!(end, End::Exit(libc::EPERM));
    });
}

#[test]
fn the_any_path_attribute_is_a_bool() {
    alone(|| {
        let entry = Allowed::entry("*@*");
        assert_eq!(entry.any_path(), "0\n");
        entry.set_any_path("1\n").expect("set");
        assert_eq!(entry.any_path(), "1\n");
        assert!(entry.set_any_path("perhaps").is_err());
        entry.set_any_path("0").expect("reset");
        assert_eq!(entry.any_path(), "0\n");
    });
}

#[test]
fn removing_an_entry_revokes_what_relied_on_it_and_nothing_else() {
    alone(|| {
        let pair = Pair::new();
        let wide = Allowed::entry(&format!("*@{}", pair.nic));
        let session = pair.session();
        let status = session.status();
        drop(wide);
        assert_eq!(
            status.state(),
            IBGDA_STATE_READY,
            "the other entry still allows it"
        );

        let Pair { gpu, nic, allowed } = pair;
        let doorbell = Doorbell::import(&session, nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        // An attribute held open does not hold the permission.
        let _held = File::open(entry_path(&format!("{gpu}@{nic}")).join("any_path"))
            .expect("open any_path");
        drop(allowed);
        assert_eq!(
            (status.state(), status.reason()),
            (IBGDA_STATE_LOST, IBGDA_REASON_POLICY)
        );
        assert_eq!(
            session.populate(doorbell.granted.handle, mapping.address),
            Err(libc::ENOLINK)
        );
        assert_eq!(
            session.import(&doorbell.dmabuf, &doorbell.verbs.uverbs()),
            Err(libc::ENOLINK)
        );
        assert_eq!(session.rebind().err(), Some(libc::EACCES));

        let _allowed = Allowed::pair(gpu, nic);
        assert_eq!(session.rebind().map(|bind| bind.generation), Ok(2));
        assert_eq!(
            (status.state(), status.generation()),
            (IBGDA_STATE_READY, 2)
        );
        session
            .import(&doorbell.dmabuf, &doorbell.verbs.uverbs())
            .expect("its own page again");
    });
}

/// N17: who may open the device is a matter of its node, and who has been handed an open attribute has no say.
#[test]
fn strangers_neither_open_the_device_nor_write_what_root_has_opened_for_them() {
    alone(|| {
        let mode = fs::metadata("/dev/ibgda")
            .expect("stat /dev/ibgda")
            .permissions()
            .mode();
        assert_eq!(mode & 0o007, 0, "mode {mode:o}");
        let entry = Allowed::entry("*@*");
        let any_path = entry_path("*@*").join("any_path");
        let mut opened = File::options()
            .write(true)
            .open(any_path)
            .expect("open any_path");
        let end = in_child(|| {
            // SAFETY: gives up everything in this process.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
            let error = File::open("/dev/ibgda").expect_err("nobody may not");
            assert_eq!(error.raw_os_error(), Some(libc::EACCES));
            let error = opened.write(b"1").expect_err("nobody may not");
            error.raw_os_error().unwrap_or(0)
        });
        assert_eq!(end, End::Exit(libc::EPERM));
        assert_eq!(entry.any_path(), "0\n");
    });
}
