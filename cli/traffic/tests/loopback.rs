// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command on the loopback route: no NIC, no module, no GPU.

use serde_json::Value;
use std::{
    fs,
    process::{Command, Output},
};

fn ibgda(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ibgda-traffic"))
        .args(arguments)
        .output()
        .expect("it runs")
}

fn json(arguments: &[&str]) -> Value {
    let output = ibgda(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn bench_measures_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("bench.svg");
    let picture = picture.to_str().expect("UTF-8");
    let document = json(&[
        "bench",
        "--route",
        "loopback",
        "--on",
        "cpu",
        "--size",
        "1,8,100000",
        "--count",
        "2000",
        "--qps",
        "3",
        "--seed",
        "7",
        "--svg",
        picture,
        "--json",
    ]);
    assert_eq!(document["nic"], "loopback0");
    assert_eq!(document["peer_nic"], "loopback1");
    assert_eq!(document["seed"], 7);
    assert_eq!(
        document["poster"],
        "CPU threads, which stand in for the GPU (as asked for)"
    );
    for (at, bytes) in [1, 8, 100_000].into_iter().enumerate() {
        let (latency, rate) = (&document["latency"][at], &document["rate"][at]);
        assert_eq!(
            (&latency["bytes"], &latency["count"]),
            (&bytes.into(), &2000.into())
        );
        assert!(rate["count"].as_u64() >= Some(2000), "{rate}");
        let [median, max] = ["median_ns", "max_ns"].map(|name| latency[name].as_u64());
        assert!(median > Some(0) && median <= max, "{latency}");
    }
    let text = fs::read_to_string(picture).expect("the picture");
    assert!(text.starts_with("<svg ") && text.trim_end().ends_with("</svg>"));

    let text = ibgda(&[
        "bench", "rate", "--route", "loopback", "--on", "cpu", "--count", "100",
    ]);
    let text = String::from_utf8(text.stdout).expect("UTF-8");
    for words in [
        "route loopback",
        "64 KiB",
        "messages/s",
        "every byte as it should be",
    ] {
        assert!(text.contains(words), "{words:?} in {text}");
    }
    assert!(!text.contains("latency,"), "{text}");
}

#[test]
fn the_same_seed_sends_the_same() {
    let run = || {
        json(&[
            "stress", "--route", "loopback", "--for", "1s", "--seed", "5", "--qps", "1", "--json",
        ])
    };
    let (one, other) = (run(), run());
    for report in [&one, &other] {
        assert_eq!(report["state"], "done");
        assert_eq!(report["seeds"], serde_json::json!([5]));
        assert!(report["totals"]["requests"].as_u64() > Some(0), "{report}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (arguments, words) in [
        (&["bench", "--size", "1T"][..], "no number of bytes"),
        (
            &["bench", "--route", "loopback", "--nic", "loopback7"],
            "loopback0 to loopback3",
        ),
        (
            &[
                "bench",
                "--route",
                "loopback",
                "--on",
                "gpu",
                "--gpu",
                "ffff:ff:1f.7",
            ],
            "the GPU",
        ),
        (&["shadow", "--route", "loopback"], "needs a NIC"),
        (
            &["stress", "--route", "loopback", "--max-size", "1G"],
            "16 MiB",
        ),
        (&["stress", "--resume", "/nonexistent"], "/nonexistent"),
        (&["route", "--route", "bridge"], "there is no such route"),
    ] {
        let output = ibgda(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && errors.contains(words),
            "{arguments:?}: {output:?}"
        );
    }
}
