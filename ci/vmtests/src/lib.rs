// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the module's tests inside the virtual machine share: the broker's raw ioctls, UARs and a queue pair from the real
//! driver, and the machine itself. Nothing of libibgda is used, so that a mistake there cannot hide one in the module.

// The ioctls and fields are documented in ibgda.h.
#![allow(missing_docs)]

pub mod broker;
pub mod confined;
pub mod fuzz;
pub mod machine;
pub mod monitor;
pub mod pair;
pub mod plain;
pub mod process;
pub mod rdma;
pub mod rxe;
pub mod said;
pub mod side;
pub mod tools;
pub mod verbs;
