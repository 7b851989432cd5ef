// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda events`: the broker's records of one pair, as they come.

use crate::{
    bdf::Bdf,
    broker::{Session, as_error, why_not_bound, why_not_opened},
    machine::Machine,
    output::print,
    root::Root,
};
use anyhow::{Context as _, Result, bail};
use ibgda_uapi::*;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use serde::Serialize;
use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

/// How often a lost pair is asked for again.
const RETRY: Duration = Duration::from_millis(500);

/// Print what happens to a pair: loss and return of the NIC, with the reason.
///
/// Binds a session of its own to the pair, which the policy must allow, and prints the broker's records until it is
/// interrupted, or as --timeout and --count say. After a loss it binds the session again as soon as that is possible,
/// so that the next loss is seen too.
#[derive(clap::Args)]
pub struct Arguments {
    /// The GPU's PCI address.
    #[arg(long, value_name = "BDF")]
    gpu: Bdf,
    /// The NIC's name, as mlx5_0, or PCI address.
    #[arg(long, value_name = "NAME|BDF")]
    nic: String,
    /// Print a JSON object for each record, on a line of its own.
    #[arg(long)]
    json: bool,
    /// End after so many seconds. That is a failure if --count was given and has not been reached.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: Option<u64>,
    /// End after so many records.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// A record as it is printed.
#[derive(Debug, PartialEq, Serialize)]
struct Record {
    time_ns: u64,
    event: &'static str,
    reason: Option<&'static str>,
    generation: Option<u32>,
    handle: Option<u32>,
    dropped: Option<u32>,
}

impl From<&ibgda_event> for Record {
    fn from(event: &ibgda_event) -> Self {
        let overflow = event.type_ == IBGDA_EVENT_OVERFLOW;
        Self {
            time_ns: event.time_ns,
            event: match event.type_ {
                IBGDA_EVENT_LOST => "lost",
                IBGDA_EVENT_RECOVERED => "recovered",
                IBGDA_EVENT_DOORBELL => "doorbell-revoked",
                IBGDA_EVENT_OVERFLOW => "overflow",
                _ => "unknown",
            },
            reason: match event.reason {
                IBGDA_REASON_NIC_RESET => Some("nic-reset"),
                IBGDA_REASON_NIC_REMOVED => Some("nic-removed"),
                IBGDA_REASON_GPU_REMOVED => Some("gpu-removed"),
                IBGDA_REASON_POLICY => Some("policy"),
                IBGDA_REASON_UAR_DESTROYED => Some("uar-destroyed"),
                _ => None,
            },
            generation: (!overflow).then_some(event.generation),
            handle: (event.type_ == IBGDA_EVENT_DOORBELL).then_some(event.handle),
            dropped: overflow.then_some(event.handle),
        }
    }
}

impl Record {
    fn words(&self) -> String {
        let why = match self.reason {
            Some("nic-reset") => "the driver reset the NIC",
            Some("nic-removed") => "the NIC was unbound or removed",
            Some("gpu-removed") => "the GPU was unbound or removed",
            Some("policy") => "the policy no longer allows the pair",
            Some("uar-destroyed") => "its UAR was destroyed",
            _ => "no reason given",
        };
        let what = match (self.event, self.handle, self.dropped) {
            ("lost", ..) => format!("lost: {why}"),
            ("recovered", ..) => format!("recovered: the NIC is back (lost before because: {why})"),
            (_, Some(handle), _) => format!("doorbell {handle} revoked: {why}"),
            (.., Some(dropped)) => format!("{dropped} older records were dropped"),
            (other, ..) => format!("{other} record: is the module newer than this command?"),
        };
        let generation = self.generation.map_or(String::new(), |generation| {
            format!(" [generation {generation}]")
        });
        let [seconds, rest] = [
            self.time_ns / 1_000_000_000,
            self.time_ns % 1_000_000_000 / 1000,
        ];
        format!("[{seconds:5}.{rest:06}] {what}{generation}")
    }

    fn line(&self, json: bool) -> Result<String> {
        let text = if json {
            serde_json::to_string(self)?
        } else {
            self.words()
        };
        Ok(text + "\n")
    }
}

/// Runs it.
pub fn run(root: &Root, arguments: &Arguments) -> Result<()> {
    let start = Instant::now();
    let session = Session::open(root).map_err(|error| as_error(why_not_opened(&error)))?;
    let machine = Machine::read(root);
    let (gpu, nic) = (
        machine.gpu(arguments.gpu)?.bdf,
        machine.nic(&arguments.nic)?.function.bdf,
    );
    let bound = session
        .bind(gpu, nic)
        .map_err(|error| as_error(why_not_bound(gpu, nic, &error)))?;
    let eventfd =
        EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).context("eventfd")?;
    session
        .set_eventfd(eventfd.as_fd())
        .context("IBGDA_IOC_EVENTFD")?;
    eprintln!("ibgda: watching {gpu} and {} ({nic})", bound.rdma);

    let end = arguments
        .timeout
        .map(|seconds| start + Duration::from_secs(seconds));
    let (mut seen, mut lost) = (0, false);
    loop {
        let wanted = arguments.count.map_or(64, |count| (count - seen).min(64));
        let records = session
            .events(wanted as usize)
            .context("IBGDA_IOC_EVENTS")?;
        for record in &records {
            print(&Record::from(record).line(arguments.json)?)?;
            lost |= [IBGDA_EVENT_LOST, IBGDA_EVENT_RECOVERED].contains(&record.type_);
            seen += 1;
        }
        if arguments.count == Some(seen) {
            return Ok(());
        }
        if lost && let_back(&session) {
            lost = false;
        }
        let now = Instant::now();
        let left = end.map(|end| end.saturating_duration_since(now));
        if left == Some(Duration::ZERO) {
            if let Some(count) = arguments.count {
                bail!(
                    "{seen} of {count} records came within {} s",
                    arguments.timeout.unwrap_or_default()
                );
            }
            return Ok(());
        }
        let wait = [left, lost.then_some(RETRY)].into_iter().flatten().min();
        let wait = wait.map_or(PollTimeout::NONE, |wait| {
            // Rounded up, or the last millisecond would be spent asking again and again.
            PollTimeout::try_from(wait + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        let mut polled = [PollFd::new(eventfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, wait) {
            Ok(0) | Err(nix::Error::EINTR) => {}
            Ok(_) => {
                eventfd.read().context("eventfd")?;
            }
            Err(error) => return Err(error).context("poll"),
        }
    }
}

/// Binds a lost session again, if that is possible by now.
fn let_back(session: &Session) -> bool {
    match session.rebind() {
        Ok(bound) => {
            eprintln!(
                "ibgda: bound again to {}, generation {}",
                bound.rdma, bound.generation
            );
            true
        }
        // EINVAL: it is not lost any more.
        Err(error) => error.raw_os_error() == Some(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(type_: u32, reason: u32, handle: u32) -> ibgda_event {
        ibgda_event {
            type_,
            reason,
            generation: 3,
            handle,
            time_ns: 12_034_567_890,
        }
    }

    #[test]
    fn every_record_and_reason_has_words() {
        for (record, words) in [
            (
                event(IBGDA_EVENT_LOST, IBGDA_REASON_NIC_RESET, 0),
                "[   12.034567] lost: the driver reset the NIC [generation 3]",
            ),
            (
                event(IBGDA_EVENT_RECOVERED, IBGDA_REASON_NIC_REMOVED, 0),
                "[   12.034567] recovered: the NIC is back (lost before because: the NIC was unbound or removed) \
                 [generation 3]",
            ),
            (
                event(IBGDA_EVENT_DOORBELL, IBGDA_REASON_UAR_DESTROYED, 7),
                "[   12.034567] doorbell 7 revoked: its UAR was destroyed [generation 3]",
            ),
            (
                event(IBGDA_EVENT_OVERFLOW, 0, 9),
                "[   12.034567] 9 older records were dropped",
            ),
            (
                event(99, 0, 0),
                "[   12.034567] unknown record: is the module newer than this command? [generation 3]",
            ),
        ] {
            assert_eq!(Record::from(&record).words(), words);
        }
        for reason in [IBGDA_REASON_GPU_REMOVED, IBGDA_REASON_POLICY] {
            let words = Record::from(&event(IBGDA_EVENT_LOST, reason, 0)).words();
            assert!(!words.contains("no reason"), "{words}");
        }
    }

    #[test]
    fn the_json_line_has_a_stable_shape() {
        let line = Record::from(&event(IBGDA_EVENT_LOST, IBGDA_REASON_POLICY, 0)).line(true);
        assert_eq!(
            line.unwrap(),
            "{\"time_ns\":12034567890,\"event\":\"lost\",\"reason\":\"policy\",\"generation\":3,\
             \"handle\":null,\"dropped\":null}\n"
        );
    }
}
