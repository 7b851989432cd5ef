// SPDX-License-Identifier: MIT OR Apache-2.0
//! GPU-initiated RDMA on an mlx5 NIC, by way of the IBGDA broker (`/dev/ibgda`).
//!
//! A [`Context`] joins a NIC and a GPU. From it come memory regions ([`Context::map_device`], [`Context::alloc`]), completion
//! queues and queue pairs, whose queues lie in broker memory and whose doorbell is a page the broker granted. A kernel gets
//! [`QueuePair::device_handle`] and does the rest with the calls of `ibgda_device.cuh`.
//!
//! ```no_run
//! use ibgda::{Access, Context, OpenOptions, QueuePairOptions};
//!
//! # fn main() -> ibgda::Result<()> {
//! let context = Context::open(&OpenOptions::new("mlx5_0", "0000:65:00.0".parse().unwrap()))?;
//! println!("{}", context.route_report());
//! context.on_error(|event| eprintln!("{event}"))?;
//! let memory = context.alloc(1 << 20, Access::WRITE)?;
//! let cq = context.create_cq(128)?;
//! let qp = context.create_qp(&QueuePairOptions::default(), &cq, None)?;
//! let mine = qp.address().to_bytes();
//! # let received = mine;
//! // … exchange `mine` and the region's address and rkey with the peer …
//! qp.connect(&ibgda::QpAddress::from_bytes(&received)?)?;
//! let for_the_kernel = (qp.device_handle(), memory.region());
//! # let _ = for_the_kernel;
//! # Ok(())
//! # }
//! ```

mod address;
mod broker;
#[allow(non_camel_case_types, missing_debug_implementations)]
pub mod capi;
mod carrier;
mod context;
mod counters;
mod cq;
#[cfg(feature = "cuda")]
pub mod cuda;
mod devx;
mod doorbell;
mod error;
mod event;
mod exported;
mod heap;
mod hub;
mod idle;
mod ifc;
#[cfg(feature = "loopback")]
pub mod loopback;
mod mapping;
mod memory;
mod monitor;
mod nic;
#[cfg(feature = "outside")]
pub mod outside;
mod pci;
pub mod processor;
mod proxy;
mod qp;
mod queue;
mod queue_pool;
mod route;
mod worker;

pub use address::{ADDRESS_BYTES, LinkLayer, QpAddress};
pub use broker::{Pair, Path, SessionState};
pub use context::{Context, OpenOptions};
pub use counters::QpCounters;
pub use cq::{CompletionQueue, CompletionQueueOptions};
pub use error::{Error, Result, Source};
pub use event::{AsyncEvent, AsyncEventKind, QueuePairEvent};
pub use exported::ExportedMemory;
pub use heap::{HEAP_GRANULE, Heap, HeapBuffer, HeapUsage};
pub use ibgda_device::{Status, abi};
pub use memory::{Access, MemoryRegion, PAGE_BYTES, Rounding};
pub use pci::{Bdf, ParseBdfError};
pub use processor::Processor;
pub use qp::{QueuePair, QueuePairOptions};
pub use route::{Route, RouteReport};
