// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every combination of rdma-core's pingpongs and perftest's tests between two NICs. Each passes, or perftest itself will
//! not have it; then its reason is one of those listed here. What happened is printed, one line a combination.
//!
//! The pingpongs and a part of perftest's run by default, with IBGDA_MATRIX=all each; with another word there, those
//! whose line has the word in it.
//! `./ci/vm --nics 2 --gpus 0 --no-ibgda --timeout 7200 -- env IBGDA_MATRIX=all /opt/ibgda/tests/matrix --nocapture`
//!
//! vm: --nics 2 --gpus 0 --no-ibgda

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use ibgda_vmtests::tools::{Ended, Place, ctl, pair};

const SERVER: &str = "mlx5_0";
const CLIENT: &str = "mlx5_1";

/// Words by which perftest refuses a combination of options. None of them is about what a device can do.
const REFUSALS: &[&str] = &[
    "Using SRQ only avavilible in SEND tests",
    "UC connection not possible in READ/ATOMIC verbs",
    "UD connection only possible in SEND verb",
    "Multiple QPs only available on bw tests",
    "Inline feature not available on READ/Atomic verbs",
    "Events feature not available on WRITE verb",
    "Bidirectional is only available in BW test",
    "Message size cannot be changed for Atomic tests",
];

/// What a combination came to.
enum Came {
    Pass,
    Refused(String),
    Failed(String),
}

/// Runs one pair of programs.
fn run(words: &[&str]) -> Result<Came> {
    let (server, client) = pair((Place::Here, SERVER), CLIENT, words)?;
    let client = match client {
        Some(client) => client,
        None => match refusal(&server) {
            Some(why) => return Ok(Came::Refused(why)),
            None => return Ok(Came::Failed(format!("{server:?}"))),
        },
    };
    Ok(match (server.ok(), client.ok()) {
        (true, true) => Came::Pass,
        (false, false) => match (refusal(&server), refusal(&client)) {
            (Some(why), Some(_)) => Came::Refused(why),
            _ => Came::Failed(format!("{server:?}\n{client:?}")),
        },
        _ => Came::Failed(format!("{server:?}\n{client:?}")),
    })
}

/// The line with which the program refuses its options.
fn refusal(ended: &Ended) -> Option<String> {
    let line = |words: &&&str| ended.output.lines().find(|line| line.contains(**words));
    let words = REFUSALS.iter().find(|words| line(words).is_some())?;
    line(&words).map(|line| line.trim().to_owned())
}

/// A link of so many megabits a second, for as long as this lives.
struct Slow;

impl Slow {
    fn new(megabits: &str) -> Result<Self> {
        for nic in ["nic0", "nic1"] {
            ctl(&["link", nic, "rate", megabits])?;
        }
        Ok(Self)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        for nic in ["nic0", "nic1"] {
            ctl(&["link", nic, "rate", "0"]).expect("a fast link");
        }
    }
}

/// Messages whose receives are to be posted anew while others come.
const SMALL: [&str; 2] = ["-s", "2048"];

/// All servers listen on one port, and a link has one rate.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs combinations and prints what became of each; an error if one failed.
fn all(combinations: &[Vec<&str>]) -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut table, mut failures, mut passed, mut refused) = (String::new(), 0, 0, 0);
    for words in combinations {
        let line = words.join(" ");
        let start = Instant::now();
        let paced = words.windows(2).any(|words| words == SMALL);
        let _slow = paced.then(|| Slow::new("1")).transpose()?;
        match run(words)? {
            Came::Pass => {
                passed += 1;
                println!("pass     {line} ({:.1} s)", start.elapsed().as_secs_f32());
            }
            Came::Refused(why) => {
                refused += 1;
                println!("refused  {line}: {why}");
            }
            Came::Failed(how) => {
                failures += 1;
                println!("FAILED   {line}: {how}");
                writeln!(table, "{line}: {how}\n{}", ctl(&["refusals", "3"])?)?;
            }
        }
    }
    println!("{passed} passed, {refused} refused by perftest, {failures} failed");
    ensure!(passed > 0, "nothing passed");
    if failures > 0 {
        bail!("{failures} combinations failed:\n{table}");
    }
    Ok(())
}

/// Whether a combination is to run; `usual` is whether it does by default.
fn wanted(words: &[&str], usual: bool) -> bool {
    match std::env::var("IBGDA_MATRIX") {
        Ok(which) if which == "all" => true,
        Ok(which) => words.join(" ").contains(&which),
        Err(_) => usual,
    }
}

#[test]
fn pingpongs() -> Result<()> {
    let mut combinations = Vec::new();
    for program in [
        &["ibv_rc_pingpong", "-c"][..],
        &["ibv_uc_pingpong", "-c"],
        &["ibv_ud_pingpong", "-c"],
        &["ibv_srq_pingpong", "-c"],
        &["ibv_xsrq_pingpong"],
    ] {
        for events in [&[][..], &["-e"]] {
            combinations.push([program, &["-n", "200"], events].concat());
        }
    }
    all(&combinations)
}

/// Options that go together with each test and service.
const VARIANTS: &[&[&str]] = &[
    &[],
    &["-a"],
    &["-e"],
    &["-q", "16"],
    &["-I", "64"],
    &["--use-srq"],
    &["-b"],
    &["-a", "-e"],
    &["-a", "-q", "16"],
    &["-a", "-I", "64"],
    &["-a", "--use-srq"],
    &["-q", "16", "--use-srq"],
    &["-q", "16", "-e"],
    &["-b", "-q", "16", "--use-srq", "-e"],
    &["-b", "-a"],
];

/// How many messages, so that by perftest's own arithmetic there is a receive for each.
///
/// Without a connection's acknowledgements a message that finds no receive is lost, and perftest waits for it for ever. For a
/// shared queue it posts a fixed number of receives if that is more than there are messages, and with many sizes those that
/// are left over fill the queue. More messages than that number (`MIN_SRQ_UD_RX_DEPTH`, 80 or 100), and it posts as many as
/// there are messages, which are to fit the smallest queue of mlx5 that holds them (127).
/// With 16 queue pairs there are messages for each and receives for one. perftest posts them anew as they are used, so the
/// messages are to come no faster than that: those that do are small, and [`all`] slows the link.
/// XRC has twice as many queue pairs in both directions, which share the receives: none is posted if there are fewer.
fn arithmetic(service: &str, variant: &[&str]) -> &'static [&'static str] {
    let has = |option| variant.contains(&option);
    match service {
        "UC" | "UD" if has("--use-srq") && has("16") => &["-n", "120", SMALL[0], SMALL[1]],
        "UC" | "UD" if has("--use-srq") => &["-n", "120"],
        "XRC" if has("-b") && has("16") => &["-n", "64"],
        _ => &["-n", "20"],
    }
}

/// The part that runs by default: each service, and each option alone with the first one; all sizes where that does not
/// mean a round trip for each message, which costs half a minute.
fn is_usual(kind: &str, service: &str, variant: &[&str]) -> bool {
    let alone =
        variant.len() <= 2 && variant != ["-a", "-e"] && (variant != ["-a"] || kind == "bw");
    variant.is_empty() || (service == "RC" && alone)
}

#[test]
fn perftest() -> Result<()> {
    let mut combinations = Vec::new();
    for test in ["write", "read", "send", "atomic"] {
        for kind in ["lat", "bw"] {
            for service in ["RC", "UC", "UD", "XRC"] {
                for variant in VARIANTS {
                    let program = match (test, kind) {
                        ("write", "lat") => "ib_write_lat",
                        ("write", _) => "ib_write_bw",
                        ("read", "lat") => "ib_read_lat",
                        ("read", _) => "ib_read_bw",
                        ("send", "lat") => "ib_send_lat",
                        ("send", _) => "ib_send_bw",
                        (_, "lat") => "ib_atomic_lat",
                        _ => "ib_atomic_bw",
                    };
                    let words: [&[&str]; 3] = [
                        &[program, "-F", "-c", service],
                        arithmetic(service, variant),
                        variant,
                    ];
                    let words = words.concat();
                    if wanted(&words, is_usual(kind, service, variant)) {
                        combinations.push(words);
                    }
                }
            }
        }
    }
    for operation in ["CMP_AND_SWAP", "FETCH_AND_ADD"] {
        for program in ["ib_atomic_lat", "ib_atomic_bw"] {
            let words = vec![program, "-F", "-n", "20", "-A", operation];
            if wanted(&words, true) {
                combinations.push(words);
            }
        }
    }
    all(&combinations)
}
