// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs of random ioctls and mappings against the module, while mlx5_ib comes and goes and the policy changes.
//!
//! `IBGDA_FUZZ_SECONDS` says how long (30), `IBGDA_FUZZ_SEED` with which seed (the time's), and `IBGDA_FUZZ_PROGRAM` runs
//! one program, in the form that a finding is reported in.

use ibgda_vmtests::{
    broker::Session,
    fuzz,
    machine::{self, Allowed, gpus, nics, wait_until},
    verbs::Verbs,
};
use std::{
    env, fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

fn lines(file: &str) -> usize {
    fs::read_to_string(format!("/sys/kernel/debug/ibgda/{file}"))
        .expect("read debugfs")
        .lines()
        .count()
}

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is not a number"))
    })
}

#[test]
fn random_programs_end_and_leave_nothing_behind() {
    let pair = (gpus()[0], nics()[0]);
    let allowed = Allowed::pair(pair.0, pair.1);
    // mlx5_ib keeps a few things from its first users on, and others from its second coming on.
    machine::unbind_mlx5_ib(pair.1)();
    drop(Session::bound(pair.0, pair.1));
    drop(Verbs::open(pair.1));
    let before = machine::settle(0);
    if let Ok(hex) = env::var("IBGDA_FUZZ_PROGRAM") {
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("a program in hex");
        let program: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        fuzz::execute(pair, &program, None).unwrap_or_else(|error| panic!("{error}"));
        return;
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = number(
        "IBGDA_FUZZ_SEED",
        time.expect("after 1970").as_nanos() as u64,
    );
    let seconds = number("IBGDA_FUZZ_SECONDS", 30);
    println!("seed {seed}");
    let stop = AtomicBool::new(false);
    let summary = thread::scope(|scope| {
        let disturber = scope.spawn(|| {
            let mut allowed = Some(allowed);
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(700));
                drop(allowed.take());
                thread::sleep(Duration::from_millis(50));
                allowed = Some(Allowed::pair(pair.0, pair.1));
                thread::sleep(Duration::from_millis(700));
                machine::unbind_mlx5_ib(pair.1)();
            }
        });
        let summary = fuzz::run(pair, seed, Duration::from_secs(seconds));
        stop.store(true, Ordering::Relaxed);
        disturber.join().expect("the disturber ends well");
        summary
    });
    let summary = summary.unwrap_or_else(|error| panic!("{error}"));
    println!("{summary:?}");
    assert!(summary.programs > 0);
    wait_until("every session and grant has ended", || {
        (lines("sessions"), lines("grants")) == (1, 1)
    });
    assert_eq!(
        machine::settle(0),
        before,
        "the model's counts are not back"
    );
}
