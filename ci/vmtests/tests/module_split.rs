// SPDX-License-Identifier: MIT OR Apache-2.0
//! The module where GPU and NIC do not reach each other peer to peer.
//!
//! vm: --nics 1 --gpus 1 --split

use ibgda_uapi::{IBGDA_PATH_NONE, IBGDA_STATE_LOST, IBGDA_STATE_READY};
use ibgda_vmtests::{
    broker::Session,
    machine::{Allowed, gpus, nics},
};

#[test]
fn a_pair_that_is_not_reachable_needs_any_path() {
    let (gpu, nic) = (gpus()[0], nics()[0]);
    let entry = Allowed::pair(gpu, nic);
    let session = Session::open();
    assert_eq!(session.bind(gpu, nic).err(), Some(libc::EXDEV));
    entry.set_any_path("1").expect("set any_path");
    let bind = session.bind(gpu, nic).expect("bind with any_path");
    assert_eq!((bind.path, bind.path_distance), (IBGDA_PATH_NONE, -1));
    let status = session.status();
    assert_eq!(status.state(), IBGDA_STATE_READY);
    entry.set_any_path("0").expect("reset any_path");
    assert_eq!(
        status.state(),
        IBGDA_STATE_LOST,
        "what relied on it is revoked"
    );
    assert_eq!(session.rebind().err(), Some(libc::EXDEV));
}
