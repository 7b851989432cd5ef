// SPDX-License-Identifier: GPL-2.0

//! IBGDA broker: decides which GPU may ring which NIC, and sees to it that a doorbell page never changes hands while a
//! GPU could still write to it.
//!
//! `docs/kernel.md` describes the objects, their states and their locks.

use kernel::{
    error::code::*,
    miscdevice::{
        MiscDeviceOptions,
        MiscDeviceRegistration, //
    },
    page::PAGE_SIZE,
    prelude::*, //
};

mod abi;
// Shared with the host's tests, to which these items are public.
#[allow(unreachable_pub)]
#[path = "core/mod.rs"]
mod decisions;
mod device;
mod doorbell;
mod events;
mod grant;
mod ibclient;
mod mapping;
mod observe;
mod owner;
mod pci;
mod policy;
mod queue;
mod registry;
mod session;
mod status;

module! {
    type: Ibgda,
    name: "ibgda",
    authors: ["IBGDA broker authors"],
    description: "Broker of NIC doorbells for GPUs",
    license: "GPL v2",
    imports_ns: ["DMA_BUF"],
    params: {
        allow_all: bool {
            default: false,
            description: "Allow every GPU to ring every NIC (default: only the pairs in configfs)",
        },
    },
}

/// What exists while the module is loaded; taken down from the first to the last.
#[pin_data]
struct Ibgda {
    #[pin]
    device: MiscDeviceRegistration<session::Session>,
    #[pin]
    files: observe::Files,
    #[pin]
    policy: policy::Policy,
    client: ibclient::Client,
    #[pin]
    bus: ibclient::BusNotifier,
    grants: grant::GrantTable,
    /// Last: what is dropped before takes itself out of the registry.
    registry: registry::Contents,
}

impl kernel::InPlaceModule for Ibgda {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        // SAFETY: Once, and before anything that uses them.
        unsafe {
            registry::REGISTRY.init();
            grant::TABLE.init();
        }
        try_pin_init!(Self {
            registry: registry::Contents,
            grants: {
                if PAGE_SIZE != abi::uapi::IBGDA_PAGE_SIZE as usize {
                    pr_err!("pages of {} bytes would span several UARs; only 4096 will do\n", PAGE_SIZE);
                    return Err(EOPNOTSUPP);
                }
                grant::GrantTable::new()?
            },
            bus <- ibclient::BusNotifier::new(),
            client: ibclient::Client::new()?,
            policy <- policy::Policy::new(),
            files <- observe::Files::new(),
            device <- MiscDeviceRegistration::register(MiscDeviceOptions { name: c"ibgda" }),
        })
    }
}
