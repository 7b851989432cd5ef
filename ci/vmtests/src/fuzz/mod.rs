// SPDX-License-Identifier: MIT OR Apache-2.0
//! A fuzzer of `/dev/ibgda` and its mappings. A [`program`] is a string of bytes, each run in a process of its own; where
//! the kernel has KCOV ([`coverage`]), programs that reach something new are kept and changed further.

pub mod coverage;
pub mod program;

use crate::machine::Bdf;
use crate::process::{End, fork};
use coverage::Coverage;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::{Duration, Instant};

/// How long a program may take; what a kill does not end by then hangs in the kernel.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a program.
const LONGEST: usize = 512;

/// A small generator (xorshift64*): which bytes come does not matter, only that a seed gives them again.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Any seed.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// What a run did.
#[derive(Debug, Default)]
pub struct Summary {
    pub programs: u64,
    /// Programs worth keeping.
    pub corpus: usize,
    /// Places in the module that were reached; 0 without KCOV.
    pub places: usize,
}

/// Runs programs until the time is over. `Err` is what went wrong, with the program.
pub fn run(pair: (Bdf, Bdf), seed: u64, time: Duration) -> Result<Summary, String> {
    let mut random = Random::new(seed);
    let coverage = Coverage::open();
    let mut log = KernelLog::open()?;
    let mut corpus: Vec<Vec<u8>> = program::seeds();
    let mut seen = BTreeSet::new();
    let mut summary = Summary::default();
    let end = Instant::now() + time;
    while Instant::now() < end {
        let program = match corpus.get(summary.programs as usize) {
            // The seeds first, as they are.
            Some(seed) if summary.programs < program::seeds().len() as u64 => seed.clone(),
            _ => change(&mut random, &corpus),
        };
        execute(pair, &program, coverage.as_ref()).map_err(|error| report(&error, &program))?;
        if let Some(complaint) = log.complaint() {
            return Err(report(&format!("the kernel says: {complaint}"), &program));
        }
        summary.programs += 1;
        if let Some(coverage) = &coverage {
            let before = seen.len();
            seen.extend(coverage.places());
            if seen.len() > before {
                corpus.push(program);
            }
        }
    }
    summary.corpus = corpus.len();
    summary.places = seen.len();
    Ok(summary)
}

/// Runs one program.
pub fn execute(
    pair: (Bdf, Bdf),
    program: &[u8],
    coverage: Option<&Coverage>,
) -> Result<(), String> {
    let child = fork(|_| {
        // A program may ring, store to what is not there, and wait for itself.
        // SAFETY: no handler is called; the signal ends the process.
        unsafe { libc::alarm(10) };
        if let Some(coverage) = coverage {
            coverage.enable();
        }
        program::interpret(pair, program);
        0
    });
    let started = Instant::now();
    while !child.has_ended() {
        if started.elapsed() > PATIENCE / 2 {
            child.kill();
        }
        if started.elapsed() > PATIENCE {
            return Err(format!("process {} cannot be killed", child.pid));
        }
        thread::sleep(Duration::from_millis(1));
    }
    match child.end() {
        // It may store to a mapping that is no more, wait too long, or find the NIC gone.
        End::Exit(0 | 101) | End::Signal(libc::SIGBUS | libc::SIGSEGV | libc::SIGALRM) => Ok(()),
        other => Err(format!("the program ended with {other:?}")),
    }
}

fn report(error: &str, program: &[u8]) -> String {
    let mut text = format!("{error}\nthe program, for IBGDA_FUZZ_PROGRAM: ");
    for byte in program {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// A program from the corpus, or two, changed in a few places.
fn change(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut program = corpus[random.below(corpus.len())].clone();
    if random.below(4) == 0 {
        let other = &corpus[random.below(corpus.len())];
        program.truncate(random.below(program.len() + 1));
        program.extend_from_slice(&other[random.below(other.len() + 1)..]);
    }
    for _ in 0..1 + random.below(6) {
        let at = random.below(program.len() + 1);
        let byte = random.below(256) as u8;
        match random.below(4) {
            0 => program.insert(at, byte),
            1 if at < program.len() => drop(program.remove(at)),
            2 => {
                let from = random.below(program.len() + 1).min(at);
                let piece = program[from..at].to_vec();
                program.splice(at..at, piece);
            }
            _ => {
                if let Some(place) = program.get_mut(at) {
                    *place = byte;
                }
            }
        }
    }
    program.truncate(LONGEST);
    program
}

/// New lines of the kernel's log.
#[derive(Debug)]
struct KernelLog(File);

impl KernelLog {
    fn open() -> Result<Self, String> {
        use std::io::{Seek, SeekFrom};
        let mut options = OpenOptions::new();
        let log = options.read(true).custom_flags(libc::O_NONBLOCK);
        let mut log = log
            .open("/dev/kmsg")
            .map_err(|error| format!("/dev/kmsg: {error}"))?;
        log.seek(SeekFrom::End(0))
            .map_err(|error| format!("/dev/kmsg: {error}"))?;
        Ok(Self(log))
    }

    /// A line in which the kernel finds fault with itself.
    fn complaint(&mut self) -> Option<String> {
        let mut record = [0; 8192];
        // Ends with "nothing new"; what was overwritten before it was read is skipped by the kernel.
        while let Ok(length) = self.0.read(&mut record) {
            let line = String::from_utf8_lossy(&record[..length]);
            let text = line.split_once(';').map_or(&*line, |(_, text)| text);
            let faults = ["BUG: ", "WARNING: ", "UBSAN: ", "Oops", "refcount_t: "];
            if faults.iter().any(|fault| text.contains(fault)) {
                return Some(text.lines().next().unwrap_or_default().to_owned());
            }
        }
        None
    }
}
