// SPDX-License-Identifier: MIT OR Apache-2.0
//! The model driven in this process: a small driver with ordinary memory takes a function through its life, from the
//! command queue to completions and events, and makes every mistake that a guest can make.

mod answers;
mod atomics;
mod blueflame;
mod bounds;
mod completions;
mod compression;
mod device_memory;
mod dynamic;
mod errors;
mod extensions;
mod faults;
mod fences;
mod hostile;
mod kept;
mod lifecycle;
mod limits;
mod mapped;
mod ownership;
mod paging;
mod queues;
mod refusals;
mod scatter;
mod signatures;
mod states;
mod syndromes;
mod traffic;
mod virtual_function;

use connectx_guest as guest;
