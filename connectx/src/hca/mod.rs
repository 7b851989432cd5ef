// SPDX-License-Identifier: MIT OR Apache-2.0
//! One ConnectX function behind its BAR: initialisation segment, UAR pages, reset.

pub mod clock;
mod init_segment;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use crate::cmd::caps::Capabilities;
use crate::engine::blueflame;
use crate::engine::doorbell::{self, Halves};
use crate::fault::{self, Fault};
use crate::ifc::wqe::uar;
use crate::mem::SharedMemory;
use crate::objects::Owned;
use crate::objects::device::Device;
use crate::objects::memic;
use crate::objects::table::Reuse;
use crate::pci::ConfigSpace;
use crate::platform::{Dma, Function, Interrupts, ResetKind};
use crate::polling::mapped::Poller;
use crate::wire::Fabric;
use crate::wire::port::Port;
use init_segment::{Health, InitSegment};

pub use crate::hca_config::MSIX_VECTORS;
use crate::hca_config::{BAR0_SIZE, config_space, config_space_of_vf};

/// First byte behind the initialisation segment and the MSI-X tables, which the host emulates.
const DOORBELLS: u64 = crate::objects::device::FIRST_UAR as u64 * uar::PAGE;

/// What tells functions apart.
#[derive(Debug, Clone)]
pub struct HcaConfig {
    /// Name in logs.
    pub name: String,
    /// Local identifier that the subnet manager gives the port.
    pub lid: u16,
    /// GUID of node and port.
    pub guid: u64,
    /// The function has an Access Control Services capability.
    pub acs: bool,
    /// It is an SR-IOV virtual function, as a guest has it that was given one.
    pub virtual_function: bool,
    /// Capabilities after each reset.
    pub capabilities: Capabilities,
    /// Which freed UAR page is given out next.
    pub uar_reuse: Reuse,
}

impl HcaConfig {
    /// The `index`th function of a fabric: `nic0` has LID 1 and so on.
    pub fn numbered(index: usize) -> Self {
        // Mellanox' OUI, as a locally administered EUI-64.
        const GUID: u64 = 0x0202_c903_0000_0100;
        Self {
            name: format!("nic{index}"),
            lid: index as u16 + 1,
            guid: GUID + index as u64,
            acs: false,
            virtual_function: false,
            capabilities: Capabilities::new(),
            uar_reuse: Reuse::default(),
        }
    }
}

/// A ConnectX function.
pub struct Hca {
    name: String,
    guid: u64,
    acs: bool,
    virtual_function: bool,
    fabric: Arc<Fabric>,
    /// Its place in the fabric.
    index: usize,
    segment: Mutex<InitSegment>,
    halves: Mutex<Halves>,
}

impl Hca {
    /// Makes a function and plugs its port into a fabric.
    pub fn new(fabric: &Arc<Fabric>, config: HcaConfig) -> Self {
        let port = Port::new(config.lid, config.guid);
        let mut device = Device::new(config.name.clone(), port, fabric.referee());
        let mut capabilities = config.capabilities;
        if config.virtual_function {
            capabilities.of_virtual_function();
        }
        device.caps = capabilities.clone();
        device.power_on_caps = capabilities;
        device.virtual_function = config.virtual_function;
        device.uars.set_reuse(config.uar_reuse);
        let index = fabric.attach(device);
        Self {
            name: config.name,
            guid: config.guid,
            acs: config.acs,
            virtual_function: config.virtual_function,
            fabric: fabric.clone(),
            index,
            segment: Mutex::default(),
            halves: Mutex::default(),
        }
    }

    /// Its place in the fabric.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Lets the guest map the UAR pages of users, which `poller` looks at. Before the function is served.
    pub fn map_doorbells(&self, poller: &Poller) -> std::io::Result<()> {
        let mapped = poller.map(self.index)?;
        self.fabric
            .drive(self.index, |device| device.mapped = Some(mapped));
        Ok(())
    }

    /// Runs something on the function's state, for control and tests.
    pub fn with_device<R>(&self, f: impl FnOnce(&mut Device) -> R) -> R {
        self.fabric.drive(self.index, f)
    }

    fn segment(&self) -> std::sync::MutexGuard<'_, InitSegment> {
        self.segment.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Function for Hca {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_space(&self) -> ConfigSpace {
        match self.virtual_function {
            true => config_space_of_vf(self.acs),
            false => config_space(self.guid, self.acs),
        }
    }

    fn bar_sizes(&self) -> [u64; 6] {
        [BAR0_SIZE, 0, 0, 0, 0, 0]
    }

    fn msix_vectors(&self) -> u16 {
        MSIX_VECTORS
    }

    fn connect(&self, dma: Arc<dyn Dma>, interrupts: Arc<dyn Interrupts>) {
        self.fabric
            .drive(self.index, |device| device.host.connect(dma, interrupts));
    }

    fn bar_window(&self, bar: usize) -> Option<(Arc<SharedMemory>, Range<u64>)> {
        let mapped = self
            .fabric
            .drive(self.index, |device| device.mapped.clone());
        mapped.filter(|_| bar == 0).map(|mapped| mapped.window())
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // UAR pages are write-only: they read as 0.
        if bar != 0 || offset >= DOORBELLS {
            return;
        }
        if offset >= memic::START {
            self.fabric
                .drive(self.index, |device| device.host.memic.load(offset, data));
        } else {
            self.segment().read(offset, data);
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        if bar != 0 || offset >= BAR0_SIZE {
            return;
        }
        if offset >= DOORBELLS {
            let page = (offset / uar::PAGE) as u32;
            let mut halves = self.halves.lock().unwrap_or_else(PoisonError::into_inner);
            self.fabric.drive(self.index, |device| {
                doorbell::write(device, &mut halves, page, offset % uar::PAGE, data)
            });
            return;
        }
        if offset >= memic::START {
            self.fabric
                .drive(self.index, |device| device.host.memic.store(offset, data));
            return;
        }
        // What was rung before a command is done before it.
        self.fabric.drive(self.index, blueflame::settle_all);
        let action = self.segment().write(offset, data);
        let rebooted = self.fabric.drive(self.index, |device| {
            init_segment::act(device, action);
            std::mem::take(&mut device.rebooted)
        });
        if rebooted {
            tracing::info!("{}: reset by itself", self.name);
            self.segment().reset();
        }
    }

    fn bus_master(&self, enabled: bool) {
        self.fabric
            .drive(self.index, |device| device.host.bus_master = enabled);
    }

    fn bar_placed(&self, _bar: usize, _address: Option<u64>) {}

    fn reset(&self, kind: ResetKind) {
        tracing::info!("{}: reset ({kind:?})", self.name);
        // The NIC state is what tells a driver of a reset that it did not ask for (an FLR under it): its health poll
        // looks at nothing else that a reset changes.
        self.segment().reset();
        self.fabric.drive(self.index, Device::reset);
    }

    fn steer(&self, command: &str, words: &[&str]) -> Result<Value, String> {
        match command {
            "fault" => {
                let fault = Fault::parse(words)?;
                match fault {
                    Fault::HealthFrozen(on) => {
                        self.segment().health.frozen = on.then(clock::health_counter);
                    }
                    Fault::Syndrome(syndrome) => self.segment().health.syndrome = syndrome,
                    Fault::CommandTimeout(milliseconds) => {
                        self.segment().command_timeout = milliseconds;
                    }
                    Fault::Clear => {
                        let mut segment = self.segment();
                        segment.health = Health::default();
                        segment.command_timeout = InitSegment::COMMAND_TIMEOUT_MS;
                    }
                    _ => {}
                }
                self.fabric.drive(self.index, |device| fault.arm(device))?;
                Ok(json!({"armed": words.join(" ")}))
            }
            "link" => {
                let link = fault::Link::parse(words)?;
                Ok(self.fabric.drive(self.index, |device| {
                    if let Some(link) = link {
                        link.set(device);
                    }
                    fault::Link::show(device)
                }))
            }
            "uars" => self.fabric.drive(self.index, |device| {
                let row = |(page, uar): (u32, &Owned)| {
                    let strays = device.strays.get(&page).unwrap_or(&0);
                    json!({"page": page, "uid": uar.uid, "strays": strays})
                };
                Ok(json!({"uars": device.uars.iter().map(row).collect::<Vec<_>>()}))
            }),
            _ => Err(format!("{} does not know {command}", self.name)),
        }
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.fabric.drive(self.index, |device| device.counts())
    }
}
