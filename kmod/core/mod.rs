// SPDX-License-Identifier: GPL-2.0
//! Decisions that need no kernel: names, argument sizes, the states of a session, who may have a page.

pub mod argument;
pub mod bdf;
pub mod grants;
pub mod life;
pub mod ring;
