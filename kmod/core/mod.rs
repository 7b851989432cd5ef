// SPDX-License-Identifier: GPL-2.0
//! Decisions of the module that need no kernel.
#![cfg_attr(not(test), no_std)]
