// SPDX-License-Identifier: MIT OR Apache-2.0
//! One run: the model, and the guests with their commands, from the start to the end, whichever ends it.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::child::{Guarded, describe};
use super::guest::{Guest, Phase};
use super::vm::Vm;
use super::{Outcome, model, outside};
use crate::protocol::{PEERS, Report};

/// For a guest to write the stacks of what hangs.
const SHOW_BLOCKED: Duration = Duration::from_secs(2);
/// For the last lines of the kernel's log, when the guest could not say how many there are.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// How often the children are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// For the second guest's command to end by itself after the first's.
const PEER_END: Duration = Duration::from_secs(5);

/// What the threads that read the guests' ports tell the session.
pub enum Event {
    /// The agent reported.
    Report(Report),
    /// The agent sent what is no report.
    Garbled(io::Error),
    /// Some bytes of a stream were written out.
    Copied,
    /// They could not be.
    NotWritten(io::Error),
}

/// Runs everything, and says how it ended and with which guest; an error is the harness's.
pub fn run(vms: &[Vm<'_>]) -> Result<(usize, Outcome)> {
    let options = vms[0].options;
    let mut model = match model::start(options)? {
        Ok(model) => model,
        Err(died) => return Ok((0, died)),
    };
    let agent = outside::start(options)?;
    let (sender, events) = channel();
    let guests = vms.iter().enumerate();
    let guests: Result<Vec<_>> = guests
        .map(|(index, vm)| Guest::start(vm, index, &sender))
        .collect();
    let mut session = Session {
        vms,
        events,
        model: model.as_mut(),
        guests: guests?,
    };
    let (which, outcome) = session.watch()?;
    if !matches!(outcome, Outcome::Command(_) | Outcome::NoReader) {
        // What the guest's kernel said of it may still be on its way to the log.
        thread::sleep(LAST_WORDS);
    }
    for guest in session.guests {
        guest.end()?;
    }
    let agent = agent.map_or(Ok(()), outside::end);
    let outcome = match model {
        Some(model) => model::end(model, outcome)?,
        None => outcome,
    };
    match (agent, &outcome) {
        (Err(error), Outcome::Command(0)) => return Err(error),
        // What is worse comes first.
        (Err(error), _) => eprintln!("{error:#}"),
        (Ok(()), _) => {}
    }
    Ok((which, outcome))
}

struct Session<'a> {
    vms: &'a [Vm<'a>],
    events: Receiver<(usize, Event)>,
    model: Option<&'a mut Guarded>,
    guests: Vec<Guest<'a>>,
}

impl Session<'_> {
    fn watch(&mut self) -> Result<(usize, Outcome)> {
        let mut looked = Instant::now();
        loop {
            match self.events.recv_timeout(LOOK) {
                Ok((index, Event::Report(report))) => {
                    if let Some(outcome) = self.guests[index].report(report)? {
                        return Ok((index, outcome));
                    }
                }
                Ok((_, Event::Garbled(error))) => {
                    bail!("the guest's agent sent what is no report: {error}")
                }
                Ok((index, Event::NotWritten(error)))
                    if error.kind() == io::ErrorKind::BrokenPipe =>
                {
                    return Ok((index, Outcome::NoReader));
                }
                Ok((_, Event::NotWritten(error))) => {
                    bail!("writing the command's output or the kernel's log: {error}")
                }
                Ok((_, Event::Copied)) => {}
                Err(RecvTimeoutError::Timeout) => {}
                // QEMU's end closes all of them; the look below says how it ended.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK),
            }
            self.guests.iter_mut().for_each(Guest::drain);
            self.run_commands()?;
            if let Some(end) = self.commands_ended() {
                return Ok(end);
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if let Some(end) = self.look()? {
                    return Ok(end);
                }
            }
        }
    }

    /// Runs the commands whose turn it is: first the second guest's, then, when that listens or has ended or has had the
    /// time for it, the first's.
    fn run_commands(&mut self) -> Result<()> {
        let [first, others @ ..] = &mut self.guests[..] else {
            return Ok(());
        };
        if first.phase().0 != Phase::Ready {
            return Ok(());
        }
        for other in others {
            match other.phase() {
                (Phase::Boot | Phase::SetUp, _) => return Ok(()),
                (Phase::Ready, _) => {
                    other.run_command()?;
                    return Ok(());
                }
                (Phase::Command { listening: false }, time) => {
                    let patience = self.vms[0].options.peer_wait;
                    if time < patience {
                        return Ok(());
                    }
                    if !patience.is_zero() {
                        let [a, b] = PEERS.map(|peer| peer.name);
                        eprintln!(
                            "ci/vm: {b} listens on no TCP port after {patience:?}; {a} starts (--peer-wait)"
                        );
                    }
                }
                (
                    Phase::Command { listening: true } | Phase::Drain { .. } | Phase::Done { .. },
                    _,
                ) => {}
            }
        }
        first.run_command()
    }

    /// The end, if the first guest's command has ended and the second's has had its time for it too: the first status that
    /// is not 0.
    fn commands_ended(&mut self) -> Option<(usize, Outcome)> {
        let (Phase::Done { status }, since) = self.guests[0].phase() else {
            return None;
        };
        let mut end = (0, Outcome::Command(status));
        if let Some(other) = self.guests.get(1) {
            match other.phase() {
                (Phase::Done { status: theirs }, _) => {
                    if theirs != 0 {
                        let name = PEERS[1].name;
                        eprintln!("ci/vm: {name}: the command ended with status {theirs}");
                    }
                    if status == 0 {
                        end = (1, Outcome::Command(theirs));
                    }
                }
                _ if since < PEER_END => return None,
                _ => {}
            }
        }
        Some(end)
    }

    /// Whether a child has ended though the commands have not, or takes too long.
    fn look(&mut self) -> Result<Option<(usize, Outcome)>> {
        if let Some(model) = &mut self.model {
            if let Some(status) = model.ended()? {
                return Ok(Some((0, Outcome::ModelDied(describe(status)))));
            }
        }
        for (index, guest) in self.guests.iter_mut().enumerate() {
            if let Some(outcome) = guest.ended(self.model.as_deref_mut())? {
                return Ok(Some((index, outcome)));
            }
        }
        for (index, guest) in self.guests.iter().enumerate() {
            if let Some(outcome) = guest.out_of_patience() {
                if matches!(outcome, Outcome::TimedOut(_)) {
                    self.show_blocked();
                }
                return Ok(Some((index, outcome)));
            }
        }
        Ok(None)
    }

    fn show_blocked(&self) {
        let asked = self.guests.iter().filter(|guest| guest.show_blocked());
        if asked.count() > 0 {
            thread::sleep(SHOW_BLOCKED);
        }
    }
}
