// SPDX-License-Identifier: MIT OR Apache-2.0
//! A ConnectX function as the upstream mlx5 driver sees it, and the machinery that lets a guest have it.
//!
//! From the device inwards: [`ifc`] names every field by its place, [`cmd`] executes commands on [`objects`], [`engine`] runs the
//! work queues, [`wire`] joins functions, [`mad`] manages their subnet, [`hca`] puts them together behind a BAR. From the host inwards: [`vfio`] serves
//! a [`platform::Function`] to QEMU, [`pci`] is its config space, [`gpu`] a stand-in GPU beside the NIC. [`log`] is the
//! referee's record of everything refused [`ctl`] the socket to read and steer a running model, [`fault`]
//! what it can be told to do wrong, and [`explain`]
//! puts dumps of its structures into words.

pub mod bus;
pub mod cmd;
pub mod ctl;
pub mod dma;
pub mod engine;
pub mod explain;
pub mod fault;
pub mod gpu;
pub mod hca;
pub mod hca_config;
pub mod ifc;
pub mod inproc;
pub mod irq;
pub mod log;
pub mod mad;
pub mod mem;
pub mod objects;
pub mod pci;
pub mod platform;
pub mod polling;
pub mod vfio;
pub mod wire;
