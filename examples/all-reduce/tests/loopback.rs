// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring on the loopback route, on CPU threads: no NIC, no GPU, no root.

use std::{
    process::{Command, Output},
    time::{Duration, Instant},
};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ibgda-all-reduce"))
        .args(["--route", "loopback", "--threads", "--calls", "3"])
        .args(arguments)
        .output()
        .expect("the program starts")
}

#[test]
fn every_shape_equals_the_plain_sum() {
    for (ranks, elements, chunk, slots) in [
        (2, 100_003, 4096, 4),
        (4, 100_003, 4096, 4),
        // Fewer slots than chunks of a segment, and the least there can be.
        (4, 10_000, 64, 1),
        (3, 10_000, 64, 2),
        // More slots than chunks; segments of one element; some of none.
        (4, 16, 1, 16),
        (4, 5, 1, 3),
        (3, 1, 100, 4),
        (7, 1000, 7, 5),
    ] {
        let text = [ranks, elements, chunk, slots].map(|number: usize| number.to_string());
        let output = run(&[
            "--ranks",
            &text[0],
            "--elements",
            &text[1],
            "--chunk",
            &text[2],
            "--slots",
            &text[3],
        ]);
        assert!(output.status.success(), "{text:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stdout);
        let words =
            format!("6 all-reduces of {elements} elements over {ranks} ranks equal the plain sum");
        assert_eq!(said.matches(&words).count(), ranks, "{said}");
    }
}

#[test]
fn the_others_say_who_failed_and_why_without_delay() {
    let start = Instant::now();
    let output = run(&["--ranks", "4", "--fail", "1@4", "--patience", "300"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("rank 1: all_reduce_ring, ")
            && said.contains(" rank 2: RDMA_WRITE at WQE ")
            && said.contains("IBGDA_ERR_REMOTE_ACCESS"),
        "{said}"
    );
    for rank in [0, 2, 3] {
        let words = format!("rank {rank}: rank 1 is gone: all_reduce_ring, ");
        assert!(said.contains(&words), "{words:?} is missing in {said}");
    }
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    for (arguments, words) in [
        (["--elements", "0"], "--elements 0: must be 1 to 268435456"),
        (["--chunk", "0"], "--chunk 0: must be 1 to"),
        (["--slots", "17"], "--slots 17: must be 1 to 16"),
        (["--fail", "1"], "write RANK@CALL"),
    ] {
        let output = run(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(said.contains(words), "{words:?} is missing in {said}");
    }
}
