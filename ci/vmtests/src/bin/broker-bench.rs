// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the broker costs in a virtual machine, against uverbs itself: a doorbell's way into a process, the revocation of a
//! thousand doorbells, what that adds to the driver's own removal, and a session's memory.
//!
//! `./ci/vm -- broker-bench [ROUNDS]`. Only the ratios of one run say something: both sides of each are measured in turns,
//! and the medians count. Each round is a process of its own, for a page stays its process's until that is dead.

use std::env;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ibgda_uapi::IBGDA_STATE_LOST;
use ibgda_vmtests::broker::{Mapping, Session};
use ibgda_vmtests::machine::{Allowed, Bdf, gpus, nics, unbind_mlx5_ib};
use ibgda_vmtests::verbs::Verbs;

/// Doorbells that one process imports one after the other.
const IMPORTS: usize = 200;
/// Sessions, or contexts of uverbs, whose doorbells are taken away.
const SESSIONS: usize = 100;
/// Doorbells of each.
const DOORBELLS: usize = 10;
/// Sessions that are open at once to see what they weigh.
const WEIGHED: usize = 1000;

fn pair() -> (Bdf, Bdf) {
    (gpus()[0], nics()[0])
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Microseconds of one UAR by uverbs, and of one by the broker.
fn import() -> Result<Vec<f64>> {
    let (gpu, nic) = pair();
    let _allowed = Allowed::pair(gpu, nic);
    let verbs = Verbs::open(nic);
    let (mut theirs, mut ours, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..IMPORTS {
        let start = Instant::now();
        let uar = verbs.alloc_uar();
        let mapping = verbs.map(&uar);
        theirs.push(start.elapsed().as_secs_f64() * 1e6);
        drop(mapping);

        let dmabuf = verbs.export(&uar);
        let session = Session::open();
        let start = Instant::now();
        session.bind(gpu, nic).map_err(errno("bind"))?;
        let granted = session
            .import(&dmabuf, &verbs.uverbs())
            .map_err(errno("import"))?;
        let mapping = session.map(granted, 4096).map_err(errno("map"))?;
        session
            .populate(granted.handle, mapping.address)
            .map_err(errno("populate"))?;
        ours.push(start.elapsed().as_secs_f64() * 1e6);
        kept.push((session, mapping, uar));
    }
    Ok(vec![median(theirs), median(ours)])
}

fn errno(what: &'static str) -> impl Fn(i32) -> anyhow::Error {
    move |errno| anyhow::anyhow!("{what}: {}", std::io::Error::from_raw_os_error(errno))
}

/// Contexts of uverbs with doorbells in this process's memory.
fn contexts() -> Vec<(Verbs, Vec<ibgda_verbs_sys::uverbs::Uar>)> {
    let open = || {
        let verbs = Verbs::open(pair().1);
        let uars = (0..DOORBELLS).map(|_| verbs.alloc_uar()).collect();
        (verbs, uars)
    };
    (0..SESSIONS).map(|_| open()).collect()
}

/// Sessions with a doorbell for each UAR.
fn sessions(contexts: &[(Verbs, Vec<ibgda_verbs_sys::uverbs::Uar>)]) -> Result<Vec<Granted>> {
    let (gpu, nic) = pair();
    let mut all = Vec::new();
    for (verbs, uars) in contexts {
        let session = Session::open();
        session.bind(gpu, nic).map_err(errno("bind"))?;
        let mut mappings = Vec::new();
        for uar in uars {
            let granted = session
                .import(&verbs.export(uar), &verbs.uverbs())
                .map_err(errno("import"))?;
            let mapping = session.map(granted, 4096).map_err(errno("map"))?;
            session
                .populate(granted.handle, mapping.address)
                .map_err(errno("populate"))?;
            mappings.push(mapping);
        }
        all.push((session, mappings));
    }
    Ok(all)
}

type Granted = (Session, Vec<Mapping>);

/// Microseconds in which the policy's end takes all doorbells.
fn revoke() -> Result<Vec<f64>> {
    let (gpu, nic) = pair();
    let allowed = Allowed::pair(gpu, nic);
    let contexts = contexts();
    let sessions = sessions(&contexts)?;
    let start = Instant::now();
    drop(allowed);
    let time = start.elapsed();
    for (session, _) in &sessions {
        ensure!(
            session.status().state() == IBGDA_STATE_LOST,
            "a session is not lost"
        );
    }
    Ok(vec![time.as_secs_f64() * 1e6])
}

/// Microseconds that the kernel spends in functions while the driver is removed; and in the removal. The parts: those of
/// uverbs that zap its mappings, and those that call the broker.
fn removal(with_broker: bool) -> Result<Vec<f64>> {
    let (gpu, nic) = pair();
    let _allowed = Allowed::pair(gpu, nic);
    let contexts = contexts();
    let mapped: Vec<_> = contexts
        .iter()
        .flat_map(|(verbs, uars)| uars.iter().map(|uar| verbs.map(uar)))
        .collect();
    let sessions = if with_broker {
        sessions(&contexts)?
    } else {
        Vec::new()
    };
    let traced = Traced::begin(&[UVERBS, OURS[0], OURS[1]])?;
    let start = Instant::now();
    let bind = unbind_mlx5_ib(nic);
    let time = start.elapsed();
    let times = traced.end()?;
    for (session, _) in &sessions {
        ensure!(
            session.status().state() == IBGDA_STATE_LOST,
            "a session is not lost"
        );
    }
    drop((sessions, mapped, contexts));
    bind();
    let calls = times
        .iter()
        .filter(|(function, _)| function == UVERBS)
        .count();
    ensure!(
        calls >= SESSIONS,
        "uverbs disassociated {calls} of {SESSIONS}"
    );
    let sum = |names: &[&str]| -> f64 {
        let of = times
            .iter()
            .filter(|(function, _)| names.contains(&function.as_str()));
        of.map(|(_, time)| time).sum()
    };
    Ok(vec![sum(&[UVERBS]), sum(&OURS), time.as_secs_f64() * 1e6])
}

/// Zaps the mappings of one file of uverbs.
const UVERBS: &str = "uverbs_user_mmap_disassociate";
/// The ways into the broker at a removal: the dma-buf core's, of which we are the only importer here, and ib_core's.
const OURS: [&str; 2] = ["dma_buf_invalidate_mappings", "client_remove"];

/// The kernel's own times of some of its functions.
struct Traced;

const TRACING: &str = "/sys/kernel/tracing";

impl Traced {
    fn write(file: &str, text: &str) -> Result<()> {
        fs::write(format!("{TRACING}/{file}"), text)
            .with_context(|| format!("write {text:?} to {TRACING}/{file}"))
    }

    fn begin(functions: &[&str]) -> Result<Self> {
        let traced = Self;
        Self::write("current_tracer", "nop")?;
        Self::write("set_ftrace_filter", "")?;
        for function in functions {
            let file = fs::OpenOptions::new()
                .append(true)
                .open(format!("{TRACING}/set_ftrace_filter"))?;
            std::io::Write::write_all(&mut &file, function.as_bytes())
                .with_context(|| format!("the kernel cannot trace {function}"))?;
        }
        Self::write("buffer_size_kb", "4096")?;
        Self::write("options/sleep-time", "1")?;
        Self::write("current_tracer", "function_graph")?;
        Ok(traced)
    }

    /// The functions and microseconds of their calls.
    fn end(self) -> Result<Vec<(String, f64)>> {
        Self::write("tracing_on", "0")?;
        let text = fs::read_to_string(format!("{TRACING}/trace"))?;
        let mut calls = Vec::new();
        // " 1) + 12.345 us   |  name [module]();", or "… us |  } /* name [module] */" for one with others in it.
        for line in text.lines() {
            let Some((before, after)) = line.split_once(" us ") else {
                continue;
            };
            let time = before.split_whitespace().last().unwrap_or("").parse();
            let name = after
                .trim_start_matches(|c: char| !c.is_ascii_alphabetic() && c != '_')
                .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next();
            match (time, name) {
                (Ok(time), Some(name)) => calls.push((name.to_owned(), time)),
                _ => bail!("the kernel's trace has the line {line:?}"),
            }
        }
        Ok(calls)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        for (file, text) in [
            ("current_tracer", "nop"),
            ("set_ftrace_filter", ""),
            ("tracing_on", "1"),
        ] {
            if let Err(error) = Self::write(file, text) {
                eprintln!("{error:#}");
            }
        }
    }
}

/// Bytes that a bound session takes of the machine's memory, its file included.
fn weight() -> Result<Vec<f64>> {
    let (gpu, nic) = pair();
    let _allowed = Allowed::pair(gpu, nic);
    let free = || -> Result<f64> {
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        std::thread::sleep(Duration::from_millis(200));
        let text = fs::read_to_string("/proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemFree:"));
        let kib = line.context("MemFree")?.trim().trim_end_matches(" kB");
        Ok(kib.parse::<f64>()? * 1024.0)
    };
    // What comes with the first ones, as slabs and page tables do, is no session's.
    let first: Vec<_> = (0..WEIGHED).map(|_| Session::bound(gpu, nic)).collect();
    let before = free()?;
    let more: Vec<_> = (0..WEIGHED).map(|_| Session::bound(gpu, nic)).collect();
    let after = free()?;
    drop((first, more));
    Ok(vec![(before - after) / WEIGHED as f64])
}

/// Runs a part in a process of its own.
fn part(name: &str) -> Result<Vec<f64>> {
    let output = Command::new(env::current_exe()?).arg(name).output()?;
    ensure!(
        output.status.success(),
        "{name}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    let numbers = text.split_whitespace().map(|word| Ok(word.parse()?));
    numbers.collect()
}

fn report(rounds: usize) -> Result<()> {
    let mut found: Vec<Vec<f64>> = Vec::new();
    for round in 0..rounds {
        let mut row = Vec::new();
        for name in ["import", "revoke", "removal", "removal-with-broker"] {
            row.extend(part(name)?);
        }
        eprintln!("round {} of {rounds}: {row:.0?} µs", round + 1);
        found.push(row);
    }
    let column = |index: usize| median(found.iter().map(|row| row[index]).collect());
    let weight = part("weight")?[0];
    println!("| what | ratio |\n|---|---|");
    println!(
        "| bind + import + mmap + populate, to uverbs's UAR allocation + mmap | {:.2} |",
        column(1) / column(0)
    );
    println!(
        "| {} doorbells of {SESSIONS} sessions revoked by the policy, to uverbs's disassociation of as many mappings | {:.2} |",
        SESSIONS * DOORBELLS,
        column(2) / column(3)
    );
    println!(
        "| what as many doorbells add to mlx5_ib's removal, to that disassociation | {:.2} |",
        (column(7) - column(4)) / column(3)
    );
    println!(
        "| the same, to the removal without them | {:.4} |",
        (column(7) - column(4)) / column(5)
    );
    println!(
        "| memory of a bound session with its file, to 16 KiB | {:.2} |",
        weight / 16384.0
    );
    Ok(())
}

fn main() -> Result<()> {
    let limit = libc::rlimit {
        rlim_cur: 65536,
        rlim_max: 65536,
    };
    // SAFETY: of this process.
    ensure!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } == 0);
    let word = env::args().nth(1);
    let numbers = match word.as_deref() {
        Some("import") => import()?,
        Some("revoke") => revoke()?,
        Some("removal") => removal(false)?,
        Some("removal-with-broker") => removal(true)?,
        Some("weight") => weight()?,
        None => return report(3),
        Some(rounds) => {
            let rounds: usize = rounds.parse().context("ROUNDS is a number")?;
            ensure!(rounds > 0, "no rounds");
            return report(rounds);
        }
    };
    let words: Vec<_> = numbers.iter().map(f64::to_string).collect();
    println!("{}", words.join(" "));
    Ok(())
}
