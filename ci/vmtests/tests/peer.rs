// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two machines on one wire: the tools between them, and what a bad or cut link does to both.
//!
//! vm: --nics 1 --gpus 0 --no-ibgda --peer 'busybox nc -ll -p 7 -e /bin/sh'

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use ibgda_vmtests::tools::{Place, Running, ctl, model_counter, pair_passes, wait};

/// The NIC of either machine as its kernel calls it.
const DEVICE: &str = "mlx5_0";
/// The NICs of this machine and the other as the model calls them.
const NICS: [&str; 2] = ["nic0", "nic1"];

static TURN: Mutex<()> = Mutex::new(());

/// Waits for this test's turn and makes both links good.
fn take() -> Result<MutexGuard<'static, ()>> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for nic in NICS {
        for state in [&["up"][..], &["loss", "0"], &["delay", "0"]] {
            ctl(&[&["link", nic], state].concat())?;
        }
    }
    for place in [Place::Here, Place::Peer] {
        wait("an active port", || port_is(place, "ACTIVE"))?;
    }
    Ok(turn)
}

fn port_is(place: Place, state: &str) -> Result<bool> {
    let file = format!("/sys/class/infiniband/{DEVICE}/ports/1/state");
    Ok(place.run(&["cat", &file])?.output.contains(state))
}

fn passes(words: &[&str]) -> Result<()> {
    pair_passes((Place::Peer, DEVICE), DEVICE, words)
}

#[test]
fn machines_differ_in_what_names_them() -> Result<()> {
    let _turn = take()?;
    for words in [
        &["hostname"][..],
        &["cat", "/sys/class/infiniband/mlx5_0/node_guid"],
        &["cat", "/sys/class/infiniband/mlx5_0/ports/1/lid"],
    ] {
        let [own, other] = [Place::Here, Place::Peer].map(|place| place.run(words));
        let (own, other) = (own?, other?);
        own.passed()?;
        other.passed()?;
        ensure!(own.output != other.output, "both: {}", own.output);
    }
    Ok(())
}

#[test]
fn tools_run_between_machines() -> Result<()> {
    let _turn = take()?;
    for words in [
        &["ibv_rc_pingpong", "-c", "-n", "100"][..],
        &["ibv_ud_pingpong", "-n", "100", "-r", "100"],
        &["ib_write_bw", "-F", "-n", "500"],
        &["ib_write_lat", "-F", "-n", "100"],
        &["ib_read_bw", "-F", "-n", "500"],
        &["ib_send_bw", "-F", "-n", "500", "-e"],
        &["ib_atomic_lat", "-F", "-n", "100"],
    ] {
        passes(words)?;
    }
    Ok(())
}

/// One packet of a hundred is lost in either direction, and the others take their time.
#[test]
fn a_slow_and_lossy_wire_is_made_up_for() -> Result<()> {
    let _turn = take()?;
    let count = |counter: &str| NICS.map(|nic| model_counter(nic, counter));
    let [lost, again] = [count("packets_lost"), count("retransmissions")];
    for nic in NICS {
        ctl(&["link", nic, "loss", "10000"])?;
        ctl(&["link", nic, "delay", "200"])?;
    }
    passes(&["ib_write_bw", "-F", "-s", "65536", "-n", "200"])?;
    passes(&["ibv_rc_pingpong", "-c", "-n", "200"])?;
    let [more_lost, more_again] = [count("packets_lost"), count("retransmissions")];
    for (before, after) in lost.into_iter().zip(more_lost) {
        ensure!(after? > before?, "no packet was lost");
    }
    for (before, after) in again.into_iter().zip(more_again) {
        ensure!(after? > before?, "nothing was sent again");
    }
    Ok(())
}

/// Starts a program that prints asynchronous events, for so many seconds.
fn watch(place: Place) -> Result<Running> {
    let running = place.spawn(&[
        "timeout",
        "15",
        "stdbuf",
        "-oL",
        "ibv_asyncwatch",
        "-d",
        DEVICE,
    ])?;
    // It says that it listens, but only we wait for its end.
    wait("ibv_asyncwatch", || {
        let seen = place.run(&["pgrep", "-x", "ibv_asyncwatch"])?;
        ensure!(!running.has_ended(), "ibv_asyncwatch does not run");
        Ok(seen.ok())
    })?;
    sleep(Duration::from_secs(1));
    Ok(running)
}

/// Both sides send at once, so both have requests that are never answered.
#[test]
fn a_cut_wire_exceeds_the_retries_of_both_sides() -> Result<()> {
    let _turn = take()?;
    let words = [
        "ib_write_bw",
        "-F",
        "-d",
        DEVICE,
        "-b",
        "-s",
        "4096",
        "-n",
        "5000000",
    ];
    let host = Place::Peer.host()?;
    let before = model_counter("nic1", "packets_received")?;
    let server = Place::Peer.spawn(&words)?;
    let client = loop {
        let client = Place::Here.spawn(&[&words[..], &[&host]].concat())?;
        wait("traffic, or an end", || {
            Ok(client.has_ended() || model_counter("nic1", "packets_received")? > before + 1000)
        })?;
        if !client.has_ended() {
            break client;
        }
        let said = client.end()?;
        ensure!(!said.ok() && said.output.contains("onnect"), "{said:?}");
        sleep(Duration::from_millis(50));
    };
    ensure!(!server.has_ended());
    ctl(&["link", "nic0", "down"])?;
    for side in [client, server] {
        let side = side.end()?;
        // 12 is IBV_WC_RETRY_EXC_ERR.
        let exceeded = side.output.contains("status 12");
        ensure!(!side.ok() && exceeded, "{side:?}");
    }
    wait("the port to be down", || port_is(Place::Here, "DOWN"))?;
    ensure!(
        port_is(Place::Peer, "ACTIVE")?,
        "the other's port is joined to the switch, not to ours"
    );
    ctl(&["link", "nic0", "up"])?;
    wait("the port to be active", || port_is(Place::Here, "ACTIVE"))?;
    passes(&["ibv_rc_pingpong", "-c", "-n", "100"])
}

#[test]
fn programs_of_both_machines_hear_of_their_ports() -> Result<()> {
    let _turn = take()?;
    let watchers = [watch(Place::Here)?, watch(Place::Peer)?];
    for state in ["down", "up"] {
        for nic in NICS {
            ctl(&["link", nic, state])?;
        }
        sleep(Duration::from_millis(500));
    }
    for watcher in watchers {
        let said = watcher.end()?.output;
        for event in ["IBV_EVENT_PORT_ERR", "IBV_EVENT_PORT_ACTIVE"] {
            ensure!(said.contains(event), "no {event:?} in: {said}");
        }
    }
    Ok(())
}
