// SPDX-License-Identifier: GPL-2.0

//! What an administrator sees in debugfs: `ibgda/sessions`, `ibgda/grants`, `ibgda/counters`. No addresses.

use crate::{
    grant,
    registry::REGISTRY, //
};
use kernel::{
    debugfs::{
        Dir,
        File, //
    },
    fmt,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    }, //
};

/// Things that happened since the module was loaded.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $label:literal),* $(,)?) => {
        $($(#[$doc])* pub(crate) static $name: Counter = Counter(Atomic::new(0));)*

        fn show_counters(_: &(), f: &mut fmt::Formatter<'_>) -> fmt::Result {
            $(writeln!(f, concat!($label, "\t{}"), $name.0.load(Relaxed))?;)*
            Ok(())
        }
    };
}

/// Counts one kind of event.
pub(crate) struct Counter(Atomic<u64>);

impl Counter {
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Relaxed);
    }
}

counters! {
    /// Sessions opened.
    SESSIONS: "sessions",
    /// Pages granted.
    GRANTS: "grants",
    /// Imports refused because another process has the page.
    BARRED: "barred",
    /// Grants whose dma-buf was invalidated.
    INVALIDATED: "invalidated",
    /// Grants that ended.
    ENDED: "ended",
    /// Sessions lost.
    LOSSES: "losses",
    /// Sessions whose NIC came back.
    RETURNS: "returns",
}

fn show_sessions(_: &(), f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(
        f,
        "number\towner\tstate\tgeneration\tgpu\tnic\tdoorbells\tqueues\tgrants"
    )?;
    for session in REGISTRY.lock().sessions() {
        session.show_line(f)?;
    }
    Ok(())
}

fn show_grants(_: &(), f: &mut fmt::Formatter<'_>) -> fmt::Result {
    writeln!(f, "number\tsession\towner\tstate\tmapping")?;
    grant::show(f)
}

/// The files, while the module is loaded.
#[pin_data]
pub(crate) struct Files {
    _directory: Dir,
    #[pin]
    sessions: File<()>,
    #[pin]
    grants: File<()>,
    #[pin]
    counters: File<()>,
}

impl Files {
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        let directory = Dir::new(c"ibgda");
        let parent = directory.clone();
        try_pin_init!(Self {
            _directory: directory,
            sessions <- parent.read_callback_file(c"sessions", (), &show_sessions),
            grants <- parent.read_callback_file(c"grants", (), &show_grants),
            counters <- parent.read_callback_file(c"counters", (), &show_counters),
        })
    }
}
