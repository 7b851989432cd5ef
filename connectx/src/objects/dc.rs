// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the two ends of a dynamic connection keep beside a queue pair.
//!
//! An initiator (DCI) is a queue pair whose WQEs name their destination: a target (DCT) and its access key. At the target
//! every initiator that sends to it has a responder of its own (DCR), which is the receiving half of a connection and is
//! made with it. Targets and responders have numbers of queue pairs, since packets find them by those.

/// Role of a queue pair in dynamic connections.
#[derive(Debug, Default)]
pub enum Dc {
    /// None: its service is another.
    #[default]
    None,
    /// Initiator.
    Initiator(Initiator),
    /// Target.
    Target(Target),
    /// The target's end of one connection.
    Responder(Peer),
}

/// Where an initiator sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// Port.
    pub lid: u16,
    /// Target.
    pub dctn: u32,
    /// The target's access key, as the WQE has it.
    pub access_key: u64,
}

/// Of an initiator.
#[derive(Debug, Default)]
pub struct Initiator {
    /// Log2 of the streams in error with which it goes on; `None` without streams.
    pub log_errored: Option<u32>,
    /// Streams in error.
    pub errored: Vec<u16>,
    /// To whom it is connected, and the connection's number.
    pub connection: Option<(Destination, u64)>,
}

impl Initiator {
    /// As in RESET.
    pub fn reset(&mut self) {
        self.errored.clear();
        self.connection = None;
    }
}

/// State of a target, `MLX5_DCTC_STATE_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum TargetState {
    Active = 0,
    Drained = 2,
}

/// Of a target.
#[derive(Debug)]
pub struct Target {
    /// Key that an initiator must have.
    pub access_key: u64,
    /// State.
    pub state: TargetState,
    /// Connections with another key, and whether the next one is an event.
    pub violations: u32,
    /// See above.
    pub armed: bool,
    /// The context as it was given.
    pub context: Vec<u8>,
    /// Its responders, by number; the one that was connected last is the last.
    pub responders: Vec<u32>,
}

/// The initiator that a responder answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The responder's target.
    pub dctn: u32,
    /// Port of the initiator.
    pub lid: u16,
    /// The initiator.
    pub qpn: u32,
    /// Number of the connection.
    pub session: u64,
}
