// SPDX-License-Identifier: MIT OR Apache-2.0
//! The module against the real mlx5 driver: what it refuses, what it takes away, and whom it keeps a page from.
//!
//! The tests share the machine, so they run with `--test-threads=1`.

#[path = "module/arguments.rs"]
mod arguments;
#[path = "module/bind.rs"]
mod bind;
#[path = "module/events.rs"]
mod events;
#[path = "module/fixture.rs"]
mod fixture;
#[path = "module/import.rs"]
mod import;
#[path = "module/inject.rs"]
mod inject;
#[path = "module/loss.rs"]
mod loss;
#[path = "module/mapping.rs"]
mod mapping;
#[path = "module/observe.rs"]
mod observe;
#[path = "module/owner.rs"]
mod owner;
#[path = "module/policy.rs"]
mod policy;
#[path = "module/queue.rs"]
mod queue;
#[path = "module/race.rs"]
mod race;
#[path = "module/removal.rs"]
mod removal;
#[path = "module/status.rs"]
mod status;
#[path = "module/suspend.rs"]
mod suspend;
