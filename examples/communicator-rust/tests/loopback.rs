// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program on the loopback route: no NIC, no module, no root.

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ibgda-communicator"))
        .args(["--route", "loopback"])
        .args(arguments)
        .output()
        .expect("the program starts")
}

#[test]
fn blocks_of_every_size_arrive_among_two_to_seven_ranks() {
    for (ranks, bytes, rounds) in [(2, 1, 5), (3, 70_000, 3), (4, 16_384, 100), (7, 4095, 10)] {
        let output = run(&[
            "--threads",
            "--ranks",
            &ranks.to_string(),
            "--bytes",
            &bytes.to_string(),
            "--rounds",
            &rounds.to_string(),
        ]);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        let words = format!("{rounds} rounds with {} peers, every byte right", ranks - 1);
        assert_eq!(said.matches(&words).count(), ranks, "{said}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_what_to_do() {
    for (arguments, words) in [
        (&["--ranks", "2"][..], "pass --threads"),
        (&["--threads", "--ranks", "1"], "1 is not in 2..=16"),
        (&["--threads", "--on", "abacus"], "they are cpu and gpu"),
        (&["--rank", "0"], "--meet"),
    ] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(said.contains(words), "{words:?} is missing in {said}");
    }
    let output = run(&["--threads", "--bytes", "0"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
