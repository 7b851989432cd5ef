// SPDX-License-Identifier: MIT OR Apache-2.0
//! BIND: what is no GPU and no NIC.

use crate::fixture::{Pair, alone};
use ibgda_uapi::*;
use ibgda_vmtests::broker::Session;
use ibgda_vmtests::machine::Bdf;
use std::fs;

/// N15: names of what is no GPU, no NIC, or nothing.
#[test]
fn bind_refuses_what_is_no_gpu_no_nic_or_not_there() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        let absent = Bdf {
            bus: 0xee,
            ..pair.nic
        };
        let bridge = Bdf::parse("0000:00:00.0");
        assert_eq!(session.bind(absent, pair.nic).err(), Some(libc::ENODEV));
        assert_eq!(session.bind(pair.gpu, absent).err(), Some(libc::ENODEV));
        let far = Bdf {
            domain: u32::MAX,
            ..pair.nic
        };
        assert_eq!(session.bind(pair.gpu, far).err(), Some(libc::ENODEV));
        assert_eq!(
            session.bind(bridge, pair.nic).err(),
            Some(libc::EINVAL),
            "a bridge as GPU"
        );
        assert_eq!(
            session.bind(pair.gpu, bridge).err(),
            Some(libc::EINVAL),
            "a bridge as NIC"
        );
        assert_eq!(
            session.bind(pair.nic, pair.nic).err(),
            Some(libc::EINVAL),
            "a NIC as GPU"
        );
        assert_eq!(
            session.bind(pair.gpu, pair.gpu).err(),
            Some(libc::EINVAL),
            "a GPU as NIC"
        );
        let no_such = Bdf {
            device: 32,
            ..pair.nic
        };
        assert_eq!(
            session.bind(pair.gpu, no_such).err(),
            Some(libc::EINVAL),
            "device 32"
        );
        session
            .bind(pair.gpu, pair.nic)
            .expect("after all those the pair binds");
    });
}

#[test]
fn bind_tells_how_the_two_reach_each_other() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        let bind = session.bind(pair.gpu, pair.nic).expect("bind");
        let name: Vec<u8> = bind
            .ibdev_name
            .iter()
            .map(|&c| c as u8)
            .take_while(|&c| c != 0)
            .collect();
        assert!(
            pair.nic
                .sysfs()
                .join("infiniband")
                .join(String::from_utf8(name).expect("a name"))
                .exists()
        );
        assert_eq!((bind.path, bind.path_distance), (IBGDA_PATH_SWITCH, 4));
        assert_eq!(bind.generation, 1);
        let sysfs = |file: &str| {
            fs::read_to_string(pair.nic.sysfs().join(file))
                .expect("read sysfs")
                .trim()
                .to_owned()
        };
        // A kernel without NUMA has no such file.
        let node = fs::read_to_string(pair.nic.sysfs().join("numa_node"));
        let node = node.unwrap_or_else(|_| "-1".to_owned());
        assert_eq!(bind.nic_node.to_string(), node.trim());
        assert_eq!(bind.nic_link.width.to_string(), sysfs("current_link_width"));
        let speed = f64::from(bind.nic_link.speed) / 1000.0;
        assert!(
            sysfs("current_link_speed").starts_with(&format!("{speed:.1} GT/s")),
            "{speed}"
        );
        assert_eq!(session.bind(pair.gpu, pair.nic).err(), Some(libc::EALREADY));
    });
}
