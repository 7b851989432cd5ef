// SPDX-License-Identifier: MIT OR Apache-2.0
//! What each of two processes sees when something between them fails: status, syndrome and callback at both ends, each
//! in bounded time.
//!
//! vm: --nics 2 --gpus 1

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::{
    machine::{
        Allowed, FATAL, ask_model, gpus, inject_error, model_counts, nics, wait_for_rdma,
        wait_until,
    },
    said::Running,
    side::{Side, exchange, join},
};
use serde_json::{Value, json};
use std::{
    fs,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

const RETRIES: &str = "IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED";
/// A timeout of 2^14 * 4.096 us and 7 retries are half a second; the machine under the guest may have other work.
const MOST_MS: u64 = 20_000;

/// Two processes, one on each NIC, joined.
struct Two {
    near: Side,
    far: Side,
    route: &'static str,
    _allowed: [Allowed; 2],
    _turn: MutexGuard<'static, ()>,
}

/// One test at a time has the machine.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The test on each route over NICs: what is said of a failure is the same.
fn on_each_route(options: Value, test: impl Fn(&mut Two) -> Result<()>) -> Result<()> {
    for route in ["direct", "cpu-doorbell", "proxy"] {
        println!("route {route}");
        let mut two = two(&options, route)?;
        test(&mut two).with_context(|| format!("route {route}"))?;
    }
    Ok(())
}

fn two(options: &Value, route: &'static str) -> Result<Two> {
    let turn = turn();
    let (gpu, nics) = (gpus()[0], nics());
    ensure!(nics.len() >= 2, "run this in ./ci/vm --nics 2");
    nics.iter().for_each(|&nic| wait_for_rdma(nic));
    let allowed = [Allowed::pair(gpu, nics[0]), Allowed::pair(gpu, nics[1])];
    let mut two = Two {
        near: Side::start_on(gpu, nics[0], route)?,
        far: Side::start_on(gpu, nics[1], route)?,
        route,
        _allowed: allowed,
        _turn: turn,
    };
    two.join(options)?;
    Ok(two)
}

fn put(seed: u64) -> Value {
    json!({"do": "put", "seed": seed, "bytes": 4096, "patience_ms": 60_000})
}

fn is(answer: &Value, status: &str) -> Result<()> {
    ensure!(answer["status"] == status, "{answer}, not {status}");
    let ms = answer["ms"].as_u64().context("a time")?;
    ensure!(ms < MOST_MS, "{answer} took {ms} ms");
    println!(
        "{status} after {ms} ms: {}",
        answer["text"].as_str().unwrap_or_default()
    );
    Ok(())
}

/// The first error of the send queue: its syndrome, and words of its text.
fn has_error(side: &mut Side, syndrome: u8, words: &[&str]) -> Result<()> {
    let error = side.ask(json!({"do": "error"}))?;
    ensure!(error["syndrome"] == syndrome, "{error}, not {syndrome:#x}");
    let text = error["text"].as_str().unwrap_or_default();
    for word in words {
        ensure!(text.contains(word), "{word:?} is missing in {text:?}");
    }
    Ok(())
}

impl Two {
    fn join(&mut self, options: &Value) -> Result<()> {
        join(&mut self.near, &mut self.far, options, |_| ())
    }

    /// Both ways.
    fn moves_data(&mut self, seed: u64) -> Result<()> {
        exchange(&mut self.near, &mut self.far, seed)
    }
}

/// A request that nobody answers: what its end sees.
fn is_not_answered(side: &mut Side) -> Result<()> {
    is(&side.ask(put(9))?, RETRIES)?;
    has_error(side, 0x15, &["did not acknowledge", "RDMA_WRITE"])?;
    let heard = side.hears("did not acknowledge")?;
    ensure!(heard.contains("alive"), "{heard}");
    Ok(())
}

/// A connection has no heartbeat: until it asks something of the other, nobody tells an end that the other has gone.
#[test]
fn a_peer_that_is_killed_is_known_by_the_next_request() -> Result<()> {
    on_each_route(json!({}), |two| {
        two.moves_data(1)?;
        ensure!(two.far.kill()? == Some(libc::SIGKILL));
        two.near.hears_nothing_more()?;
        is_not_answered(&mut two.near)?;

        // With another process in its place the same one goes on.
        two.far = Side::start_on(gpus()[0], nics()[1], two.route)?;
        two.join(&json!({}))?;
        two.moves_data(2)
    })
}

#[test]
fn a_link_that_is_cut_is_told_at_its_end_and_found_at_the_other() -> Result<()> {
    on_each_route(json!({}), |two| {
        ask_model("link", &["nic0", "down"]);
        let mut cut = || -> Result<()> {
            two.near.hears("port 1 of")?;
            is_not_answered(&mut two.near)?;
            // Its own port is up.
            two.far.hears_nothing_more()?;
            is_not_answered(&mut two.far)
        };
        let seen = cut();
        ask_model("link", &["nic0", "up"]);
        seen?;
        two.near.hears("is active")?;
        wait_for_rdma(nics()[0]);
        two.join(&json!({}))?;
        two.moves_data(3)
    })
}

#[test]
fn a_reset_of_the_nic_ends_a_wait_and_the_other_end_finds_nobody() -> Result<()> {
    on_each_route(json!({}), |two| {
        two.moves_data(4)?;
        two.near
            .tell(&json!({"do": "poll", "patience_ms": 60_000}))?;
        inject_error(nics()[0], FATAL);
        is(&two.near.answer()?, "IBGDA_ERR_NIC_LOST")?;
        let heard = two.near.hears("is lost")?;
        ensure!(heard.contains("NIC reset"), "{heard}");
        ensure!(two.near.ask(json!({"do": "state"}))?["reason"] == 1);
        is(&two.near.ask(put(9))?, "IBGDA_ERR_NIC_LOST")?;
        // Until the reset itself, the NIC still answers for the queue pairs that its process has lost.
        two.near.hears("is back")?;
        two.far.hears_nothing_more()?;
        is_not_answered(&mut two.far)?;

        two.near
            .ask(json!({"do": "rebind", "patience_ms": 60_000}))?;
        two.join(&json!({}))?;
        two.moves_data(5)
    })
}

#[test]
fn a_wrong_rkey_is_refused_at_one_end_and_told_at_both() -> Result<()> {
    on_each_route(json!({}), |two| {
        two.moves_data(6)?;
        let mut wrong = put(9);
        wrong["key"] = 0xff00.into();
        is(&two.near.ask(wrong)?, "IBGDA_ERR_REMOTE_ACCESS")?;
        has_error(&mut two.near, 0x13, &["rkey", "RDMA_WRITE"])?;
        two.near.hears("the peer refused the access")?;
        // The end that posted nothing hears why its QP is in error, before it posts to it.
        let heard = two.far.hears("refused a request of its peer")?;
        ensure!(
            heard.contains("rkey") && heard.contains("WQ_ACCESS_ERROR"),
            "{heard}"
        );
        let holds = json!({"do": "holds", "seed": 6, "bytes": 4096});
        ensure!(
            two.far.ask(holds)?["holds"] == true,
            "refused data has come"
        );
        is(&two.far.ask(put(9))?, "IBGDA_ERR_WR_FLUSHED")?;
        two.join(&json!({}))?;
        two.moves_data(7)
    })
}

#[test]
fn a_full_ring_says_so_and_nothing_of_it_is_lost() -> Result<()> {
    // The acknowledgements take longer than a post waits, and less than the NIC does (2^21 * 4.096 us).
    let options = json!({"depth": 16, "post_timeout_ms": 200, "ack_timeout": 21});
    on_each_route(options, |two| {
        ask_model("link", &["nic1", "delay", "4000000"]);
        let mut full = || -> Result<()> {
            let full = two.near.ask(json!({"do": "fill", "most": 100}))?;
            is(&full, "IBGDA_ERR_QUEUE_FULL")?;
            ensure!(full["posted"] == 16, "{full}");
            ensure!(
                two.near.ask(json!({"do": "error"}))? == json!({}),
                "the queue pair is well"
            );
            is(
                &two.near
                    .ask(json!({"do": "quiet", "patience_ms": 60_000}))?,
                "IBGDA_OK",
            )
        };
        let seen = full();
        ask_model("link", &["nic1", "delay", "0"]);
        seen?;
        two.near.hears_nothing_more()?;
        two.far.hears_nothing_more()?;
        two.moves_data(8)
    })
}

/// As many completions as the CQ has entries, all of them errors, before anybody polls.
#[test]
fn the_first_error_of_a_full_completion_queue_is_the_one_that_is_found() -> Result<()> {
    on_each_route(json!({"depth": 16}), |two| {
        is(
            &two.near
                .ask(json!({"do": "burst", "count": 16, "key": 0xff00}))?,
            "IBGDA_OK",
        )?;
        two.far.hears("refused a request of its peer")?;
        let quiet = json!({"do": "quiet", "patience_ms": 60_000});
        is(&two.near.ask(quiet)?, "IBGDA_ERR_REMOTE_ACCESS")?;
        has_error(&mut two.near, 0x13, &["rkey"])?;
        ensure!(two.near.ask(json!({"do": "error"}))?["index"] == 0);
        two.near.hears("request 0 failed")?;
        two.join(&json!({}))?;
        two.moves_data(9)
    })
}

/// The MTU of an address, by its code, with the checksum that goes with it.
fn claim_mtu(address: &mut [u8], code: u8) {
    address[18] = code;
    let crc = crc32fast::hash(&address[..60]);
    address[60..].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn the_smaller_mtu_is_taken_and_different_ones_are_an_error_at_both_ends() -> Result<()> {
    on_each_route(json!({}), |two| {
        let (near, far) = (&mut two.near, &mut two.far);
        // Each is told of 512 bytes, as by a port that can do no more.
        join(near, far, &json!({}), |address| claim_mtu(address, 2))?;
        two.moves_data(10)?;

        // One end only: it sends packets of 512 bytes to a QP that takes a write's first packet to be full, of 4096.
        let (near, far) = (&mut two.near, &mut two.far);
        let mut of_near = near.ask(json!({"do": "begin"}))?;
        let mut of_far = far.ask(json!({"do": "begin"}))?;
        let mut address: Vec<u8> = serde_json::from_value(of_far["address"].take())?;
        claim_mtu(&mut address, 2);
        of_far["address"] = json!(address);
        for card in [&mut of_near, &mut of_far] {
            card["do"] = "connect".into();
        }
        near.ask(of_far)?;
        far.ask(of_near)?;
        is(&near.ask(put(11))?, "IBGDA_ERR_REMOTE_INVALID_REQUEST")?;
        near.hears("does not take this kind of request")?;
        let heard = far.hears("refused a request of its peer")?;
        ensure!(
            heard.contains("MTU") && heard.contains("WQ_INVAL_REQ_ERROR"),
            "{heard}"
        );
        two.join(&json!({}))?;
        two.moves_data(12)
    })
}

/// The communicator of examples/, three ranks of it: a rank that waits finds out who has gone, long before a deadline that
/// a slow rank needs (30 s).
#[test]
fn a_communicator_names_the_rank_that_was_killed() -> Result<()> {
    const PROGRAM: &str = "/tmp/communicator";
    let _turn = turn();
    let (gpu, nics) = (gpus()[0], nics());
    let _allowed = [Allowed::pair(gpu, nics[0]), Allowed::pair(gpu, nics[1])];
    let built = Command::new("c++")
        .args([
            "-std=c++17",
            "-O1",
            "/src/examples/communicator/communicator.cpp",
        ])
        .args([
            "-I/src/libibgda/include",
            "-I/src/kernels/include",
            "-L/opt/ibgda/lib",
        ])
        .args(["-o", PROGRAM, "-libgda"])
        .status()?;
    ensure!(built.success(), "{built}");
    let packets = || model_counts(0)["packets_sent"] + model_counts(1)["packets_sent"];
    let before = packets();
    let mut parent = Running::start(
        Command::new(PROGRAM)
            .args([gpu, nics[0], nics[1]].map(|function| function.to_string()))
            .args(["--ranks", "3", "--rounds", "1000000"]),
    )?;
    wait_until("the ranks exchange blocks", || packets() > before + 500);
    let list = format!("/proc/{0}/task/{0}/children", parent.child.id());
    let mut ranks: Vec<i32> = fs::read_to_string(&list)?
        .split_whitespace()
        .map(|pid| pid.parse().expect("a process"))
        .collect();
    ranks.sort_unstable();
    ensure!(ranks.len() == 3, "{ranks:?}");
    let start = Instant::now();
    // SAFETY: a process that the parent has not waited for.
    ensure!(unsafe { libc::kill(ranks[1], libc::SIGKILL) } == 0);
    let said = parent.end()?.ended_with(1)?.errors;
    println!("after {:?}:\n{said}", start.elapsed());
    ensure!(
        start.elapsed() < Duration::from_millis(MOST_MS),
        "{:?}",
        start.elapsed()
    );
    ensure!(said.contains("rank 1: ended by signal 9"), "{said}");
    for rank in [0, 2] {
        let line = format!("rank {rank}: rank 1 is gone, or cannot be reached");
        ensure!(said.contains(&line), "{line:?} is missing in {said}");
    }
    Ok(())
}
