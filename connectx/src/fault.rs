// SPDX-License-Identifier: MIT OR Apache-2.0
//! Misbehaviour on demand: what `connectx ctl fault` and `connectx ctl link` make a function do.
//!
//! Each fault is consumed when it strikes, so that the recovery after it finds a healthy device, except those that name a
//! lasting state (a frozen health counter, a port that is down, a slow or lossy link, an order of re-use).

use std::time::Duration;

use serde_json::{Value, json};

use crate::cmd;
use crate::engine::completion::Failure;
use crate::engine::event;
use crate::ifc::event::port_change;
use crate::ifc::opcode::{self, Status};
use crate::objects::device::Device;
use crate::objects::table::Reuse;
use crate::wire::port::PortState;

/// What `fault` takes after the function's name.
pub const USAGE: &str = "FUNCTION health freeze|run | syndrome N | command-timeout MILLISECONDS | reset [after N] | swallow OPCODE | fail OPCODE STATUS \
                         | wqe QPN SYNDROME [VENDOR] | delay QPN MICROSECONDS | reorder QPN | stray KEY | pages N | uars newest-first|oldest-first | clear";
/// What `link` takes after the function's name.
pub const LINK_USAGE: &str =
    "FUNCTION up|down | loss PER_MILLION | delay MICROSECONDS | rate MEGABITS_PER_SECOND";

/// Faults that wait to strike.
#[derive(Debug, Default)]
pub struct Faults {
    /// Commands that are still executed before the device resets itself.
    reset_after: Option<u64>,
    /// Opcodes of which the next command is never answered.
    swallowed: Vec<u16>,
    /// Slots of commands that were never answered, a bit each.
    pub swallowed_slots: u32,
    /// Opcodes of which the next command fails, and how.
    failing: Vec<(u16, Status)>,
    /// Queue pairs of which the next WQE fails, and how.
    wqes: Vec<(u32, Failure)>,
    /// Queue pairs of which the next completion is held back, and how.
    holds: Vec<(u32, Hold)>,
}

/// How a completion is held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// It comes that much later, and those of its queue pair behind it.
    Delay(Duration),
    /// The next one in its completion queue overtakes it.
    Reorder,
}

/// What becomes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is executed.
    Execute,
    /// It is never answered.
    Swallow,
    /// The device resets itself instead.
    Reset,
}

impl Faults {
    /// Whether a fault may strike a command before it is executed.
    pub fn strikes_commands(&self) -> bool {
        self.reset_after.is_some() || !self.swallowed.is_empty()
    }

    /// Decides on a command.
    pub fn command(&mut self, opcode: u16) -> Verdict {
        match &mut self.reset_after {
            Some(0) => {
                self.reset_after = None;
                return Verdict::Reset;
            }
            Some(left) => *left -= 1,
            None => {}
        }
        if take(&mut self.swallowed, |&swallowed| swallowed == opcode).is_some() {
            return Verdict::Swallow;
        }
        Verdict::Execute
    }

    /// The status with which a command is to fail.
    pub fn status(&mut self, opcode: u16) -> Option<Status> {
        take(&mut self.failing, |&(failing, _)| failing == opcode).map(|(_, status)| status)
    }

    /// How a WQE of a queue pair is to fail.
    pub fn failure(&mut self, qpn: u32) -> Option<Failure> {
        take(&mut self.wqes, |&(failing, _)| failing == qpn).map(|(_, failure)| failure)
    }

    /// Whether a completion may be held back.
    pub fn holds_completions(&self) -> bool {
        !self.holds.is_empty()
    }

    /// How a completion of a queue pair is to be held back.
    pub fn hold(&mut self, qpn: u32) -> Option<Hold> {
        take(&mut self.holds, |&(held, _)| held == qpn).map(|(_, hold)| hold)
    }
}

fn take<T>(list: &mut Vec<T>, is: impl Fn(&T) -> bool) -> Option<T> {
    let at = list.iter().position(is)?;
    Some(list.remove(at))
}

/// A fault, as it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The health counter stands still, or runs again.
    HealthFrozen(bool),
    /// The health buffer shows a syndrome and asks for a reset.
    Syndrome(u8),
    /// What the device says how long the driver should wait for a command, from its next start on.
    CommandTimeout(u32),
    /// The device resets itself after so many more commands; config space stays as it is.
    Reset(u64),
    /// The next command of an opcode is never answered.
    Swallow(u16),
    /// The next command of an opcode fails with a status.
    Fail(u16, Status),
    /// The next WQE of a queue pair fails.
    Wqe(u32, Failure),
    /// The next completion of a queue pair is held back.
    Hold(u32, Hold),
    /// A key's pages are not where it says: no memory is there.
    Stray(u32),
    /// The device asks for pages, or (negative) wants to give some back.
    Pages(i32),
    /// Which of the freed UAR pages is handed out next.
    UarReuse(Reuse),
    /// Faults that have not struck are forgotten, commands that were not answered are given up, and health is well again.
    Clear,
}

/// A property of the link at a function's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Up or down, with the event.
    Up(bool),
    /// Packets lost of a million that the port sends.
    Loss(u32),
    /// Time that a packet takes.
    Delay(Duration),
    /// Megabits a second that it takes; 0 for all there are.
    Rate(u32),
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn numeric<T: TryFrom<u64>>(what: &str, text: &str) -> Result<T, String> {
    let value = number(text).and_then(|value| T::try_from(value).ok());
    value.ok_or_else(|| format!("{what} {text:?} is no number in range"))
}

fn command(text: &str) -> Result<u16, String> {
    let named = (0..=u16::MAX >> 4).find(|&code| opcode::name(code) == Some(text));
    named.map_or_else(|| numeric("opcode", text), Ok)
}

impl Fault {
    /// Reads the words of a command.
    pub fn parse(words: &[&str]) -> Result<Self, String> {
        Ok(match words {
            ["health", "freeze"] => Self::HealthFrozen(true),
            ["health", "run"] => Self::HealthFrozen(false),
            ["syndrome", syndrome] => Self::Syndrome(numeric("syndrome", syndrome)?),
            ["command-timeout", milliseconds] => {
                let value: u32 = numeric("timeout", milliseconds)?;
                if !(1..1 << 20).contains(&value) {
                    return Err(format!("a timeout of {value} ms; it has 20 bits"));
                }
                Self::CommandTimeout(value)
            }
            ["reset"] => Self::Reset(0),
            ["reset", "after", commands] => Self::Reset(numeric("commands", commands)?),
            ["swallow", opcode] => Self::Swallow(command(opcode)?),
            ["fail", opcode, status] => {
                let status: u8 = numeric("status", status)?;
                let known = Status::from_number(status).filter(|&status| status != Status::Ok);
                Self::Fail(
                    command(opcode)?,
                    known.ok_or(format!("no failing status {status:#x}"))?,
                )
            }
            ["wqe", qpn, syndrome] => Self::Wqe(
                numeric("QPN", qpn)?,
                Failure::new(numeric("syndrome", syndrome)?, 0),
            ),
            ["wqe", qpn, syndrome, vendor] => {
                let vendor = numeric("vendor syndrome", vendor)?;
                let failure = Failure::new(numeric("syndrome", syndrome)?, vendor);
                Self::Wqe(numeric("QPN", qpn)?, failure)
            }
            ["delay", qpn, microseconds] => {
                let delay = Duration::from_micros(numeric::<u32>("delay", microseconds)?.into());
                Self::Hold(numeric("QPN", qpn)?, Hold::Delay(delay))
            }
            ["reorder", qpn] => Self::Hold(numeric("QPN", qpn)?, Hold::Reorder),
            ["stray", key] => Self::Stray(numeric("key", key)?),
            ["pages", pages] => {
                let pages: i32 = pages
                    .parse()
                    .map_err(|_| format!("pages {pages:?} is no number"))?;
                Self::Pages(pages)
            }
            ["uars", "newest-first"] => Self::UarReuse(Reuse::NewestFirst),
            ["uars", "oldest-first"] => Self::UarReuse(Reuse::OldestFirst),
            ["clear"] => Self::Clear,
            _ => return Err(format!("usage: fault {USAGE}")),
        })
    }

    /// Arms the part of the fault that the device's commands and queues meet.
    pub fn arm(self, device: &mut Device) -> Result<(), String> {
        match self {
            Self::Reset(after) => device.faults.reset_after = Some(after),
            Self::Swallow(opcode) => device.faults.swallowed.push(opcode),
            Self::Fail(opcode, status) => device.faults.failing.push((opcode, status)),
            Self::Wqe(qpn, failure) => device.faults.wqes.push((qpn, failure)),
            Self::Hold(qpn, hold) => device.faults.holds.push((qpn, hold)),
            Self::Stray(key) => {
                let mkey = device.mkeys.get_mut(key >> 8);
                let astray = mkey.is_some_and(|mkey| mkey.translation.lead_astray());
                if !astray {
                    return Err(format!("no key {key:#x} of pages"));
                }
            }
            Self::Pages(pages) => {
                let at_rest = device.pages.at_rest as i64 + i64::from(pages);
                device.pages.at_rest = usize::try_from(at_rest).unwrap_or(0);
                event::page_request(device, pages);
            }
            Self::UarReuse(order) => device.uars.set_reuse(order),
            Self::Clear => {
                cmd::hand_back(device);
                device.faults = Faults::default();
            }
            Self::HealthFrozen(_) | Self::Syndrome(_) | Self::CommandTimeout(_) => {}
        }
        Ok(())
    }
}

impl Link {
    /// Reads the words of a command; `None` for none, which asks for the present state.
    pub fn parse(words: &[&str]) -> Result<Option<Self>, String> {
        Ok(Some(match words {
            [] => return Ok(None),
            ["up"] => Self::Up(true),
            ["down"] => Self::Up(false),
            ["loss", per_million] => {
                let loss: u32 = numeric("loss", per_million)?;
                if loss > 1_000_000 {
                    return Err(format!("a loss of {loss} per million"));
                }
                Self::Loss(loss)
            }
            ["delay", microseconds] => Self::Delay(Duration::from_micros(
                numeric::<u32>("delay", microseconds)?.into(),
            )),
            ["rate", megabits] => Self::Rate(numeric("rate", megabits)?),
            _ => return Err(format!("usage: link {LINK_USAGE}")),
        }))
    }

    /// Sets the property, with the event that a change of state raises.
    pub fn set(self, device: &mut Device) {
        match self {
            Self::Up(up) => {
                let (state, change) = match up {
                    true => (PortState::Active, port_change::ACTIVE),
                    false => (PortState::Down, port_change::DOWN),
                };
                if device.port.state != state {
                    device.port.state = state;
                    event::port_change(device, change);
                }
            }
            Self::Loss(per_million) => device.port.link.loss = per_million,
            Self::Delay(delay) => device.port.link.delay = delay,
            Self::Rate(megabits) => device.port.link.set_rate(megabits),
        }
    }

    /// The present state.
    pub fn show(device: &Device) -> Value {
        json!({
            "up": device.port.state == PortState::Active,
            "loss": device.port.link.loss,
            "delay_us": device.port.link.delay.as_micros() as u64,
            "rate_mbps": device.port.link.rate(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let parse = |text: &str| Fault::parse(&text.split(' ').collect::<Vec<_>>());
        assert_eq!(parse("reset"), Ok(Fault::Reset(0)));
        assert_eq!(parse("reset after 7"), Ok(Fault::Reset(7)));
        assert_eq!(parse("swallow CREATE_CQ"), Ok(Fault::Swallow(0x400)));
        assert_eq!(
            parse("fail 0x500 3"),
            Ok(Fault::Fail(0x500, Status::BadParam))
        );
        assert_eq!(
            parse("wqe 0x41 0x13 0x88"),
            Ok(Fault::Wqe(0x41, Failure::new(0x13, 0x88)))
        );
        assert_eq!(
            parse("uars oldest-first"),
            Ok(Fault::UarReuse(Reuse::OldestFirst))
        );
        assert_eq!(parse("pages -5"), Ok(Fault::Pages(-5)));
        assert_eq!(parse("stray 0x1234"), Ok(Fault::Stray(0x1234)));
        assert_eq!(
            parse("delay 0x41 250"),
            Ok(Fault::Hold(0x41, Hold::Delay(Duration::from_micros(250))))
        );
        assert_eq!(parse("reorder 0x41"), Ok(Fault::Hold(0x41, Hold::Reorder)));
        assert_eq!(
            parse("command-timeout 2000"),
            Ok(Fault::CommandTimeout(2000))
        );
        for bad in [
            "",
            "reset after",
            "reset after x",
            "syndrome 256",
            "fail CREATE_QP 0",
            "fail NONE 3",
            "wqe 1 300",
            "delay 1",
            "command-timeout 0",
            "command-timeout 0x100000",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let link = |text: &str| Link::parse(&text.split(' ').collect::<Vec<_>>());
        assert_eq!(link("loss 1000"), Ok(Some(Link::Loss(1000))));
        assert!(link("loss 1000001").is_err());
        assert!(link("sideways").is_err());
        assert_eq!(Link::parse(&[]), Ok(None));
    }

    #[test]
    fn faults_strike_once() {
        let mut f = Faults {
            reset_after: Some(1),
            ..Faults::default()
        };
        f.swallowed.push(0x400);
        f.failing.push((0x500, Status::Limit));
        assert!(f.strikes_commands());
        assert_eq!(f.command(0x400), Verdict::Swallow);
        assert_eq!(f.command(0x400), Verdict::Reset);
        assert_eq!(f.command(0x400), Verdict::Execute);
        assert!(!f.strikes_commands());
        assert_eq!(f.status(0x501), None);
        assert_eq!(f.status(0x500), Some(Status::Limit));
        assert_eq!(f.status(0x500), None);
    }
}
