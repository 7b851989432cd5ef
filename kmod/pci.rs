// SPDX-License-Identifier: GPL-2.0

//! PCI functions: from name to device, what they are, and how two of them reach each other.

use crate::{
    abi::{
        glue,
        uapi::*, //
    },
    decisions::bdf::{
        self,
        Bdf, //
    },
};
use core::ptr::NonNull;
use kernel::{
    bindings,
    error::code::*,
    pci,
    prelude::*,
    sync::aref::ARef, //
};

/// Base class of display controllers: VGA, 3D and others; every GPU has it.
const BASE_CLASS_DISPLAY: u32 = 0x03;

/// What tells a device from another one that later has the same address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    vendor: u16,
    device: u16,
    subsystem_vendor: u16,
    subsystem_device: u16,
    class: u32,
}

/// A PCI function that we hold a reference to.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) bdf: Bdf,
    pub(crate) identity: Identity,
    device: ARef<pci::Device>,
}

impl Function {
    /// Takes a reference.
    ///
    /// # Safety
    ///
    /// `pdev` must be a valid `struct pci_dev` for the duration of the call.
    pub(crate) unsafe fn from_raw(pdev: *mut bindings::pci_dev) -> Self {
        // SAFETY: `pci::Device` is a transparent wrapper of `struct pci_dev`, valid by the caller's promise.
        let device: &pci::Device = unsafe { &*pdev.cast() };
        Self::new(ARef::from(device))
    }

    fn new(device: ARef<pci::Device>) -> Self {
        let pdev: *mut bindings::pci_dev = core::ptr::from_ref(&*device).cast_mut().cast();
        // SAFETY: The device is valid; these fields never change, and its bus outlives it.
        let (domain, bus, devfn, class) = unsafe {
            (
                glue::ibgda_c_domain(pdev),
                (*(*pdev).bus).number,
                (*pdev).devfn as u8,
                (*pdev).class,
            )
        };
        Self {
            bdf: Bdf::from_devfn(domain, bus, devfn),
            identity: Identity {
                vendor: device.vendor_id().as_raw(),
                device: device.device_id(),
                subsystem_vendor: device.subsystem_vendor_id(),
                subsystem_device: device.subsystem_device_id(),
                class,
            },
            device,
        }
    }

    /// Looks the function up.
    pub(crate) fn find(bdf: Bdf) -> Result<Self> {
        let domain = bdf.domain().try_into().map_err(|_| ENODEV)?;
        // SAFETY: No requirements; null when there is none.
        let pdev = unsafe {
            bindings::pci_get_domain_bus_and_slot(domain, bdf.bus().into(), bdf.devfn().into())
        };
        let pdev = NonNull::new(pdev).ok_or(ENODEV)?;
        // SAFETY: The reference that the lookup took is handed over; `pci::Device` is a transparent wrapper.
        Ok(Self::new(unsafe {
            ARef::from_raw(pdev.cast::<pci::Device>())
        }))
    }

    /// The C structure, valid while `self` lives.
    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        core::ptr::from_ref(&*self.device).cast_mut().cast()
    }

    /// Its `struct device`.
    pub(crate) fn as_raw_device(&self) -> *mut bindings::device {
        // SAFETY: The device is valid.
        unsafe { &raw mut (*self.as_raw()).dev }
    }

    /// Whether it is this very device, not another one of the same name.
    pub(crate) fn is(&self, pdev: *mut bindings::pci_dev) -> bool {
        core::ptr::eq(self.as_raw(), pdev)
    }

    /// Whether `other` can be this function come back: same place, same kind.
    pub(crate) fn looks_like(&self, other: &Function) -> bool {
        self.bdf == other.bdf && self.identity == other.identity
    }

    /// Whether it is a GPU by its class.
    pub(crate) fn is_gpu(&self) -> bool {
        self.identity.class >> 16 == BASE_CLASS_DISPLAY
    }

    /// Whether the bus has given it up: unplugged, or a recovery that failed.
    pub(crate) fn is_disconnected(&self) -> bool {
        // SAFETY: The device is valid. The field is written elsewhere, and read once here.
        let state = unsafe { (&raw const (*self.as_raw()).error_state).read_volatile() };
        state == bindings::pci_channel_io_perm_failure
    }

    /// Whether mlx5_core takes its RDMA function away, which it does for a reset, and when it is unbound itself.
    pub(crate) fn rdma_function_leaves(&self) -> bool {
        // SAFETY: The device is valid.
        unsafe { glue::ibgda_c_rdma_function_leaves(self.as_raw()) }
    }

    /// Its NUMA node, -1 unknown.
    pub(crate) fn node(&self) -> i32 {
        #[cfg(CONFIG_NUMA)]
        // SAFETY: The device is valid.
        return unsafe { (*self.as_raw_device()).numa_node };
        #[cfg(not(CONFIG_NUMA))]
        return -1;
    }

    /// Its PCI Express link, zeros without one.
    pub(crate) fn link(&self) -> ibgda_link {
        let read = |register: u32| {
            let mut value = 0;
            // SAFETY: The device is valid, and so is the place for the value. The accessor gives 0 on failure.
            unsafe {
                bindings::pcie_capability_read_dword(self.as_raw(), register as i32, &mut value)
            };
            value
        };
        // Link Status is the upper half of the register that Link Control begins.
        let status = read(bindings::PCI_EXP_LNKCTL) >> 16;
        let capabilities = read(bindings::PCI_EXP_LNKCAP);
        ibgda_link {
            speed: bdf::link_speed(status),
            speed_max: bdf::link_speed(capabilities),
            width: bdf::link_width(status),
            width_max: bdf::link_width(capabilities),
        }
    }

    /// BAR0: first bus address, first CPU address, and length; `None` without one.
    pub(crate) fn bar0(&self) -> Option<Bar0> {
        // SAFETY: The device is valid, and so are the first of its resources and the place for the answer.
        let region = unsafe {
            let mut region = bindings::pci_bus_region::default();
            let resource = (&raw mut (*self.as_raw()).resource).cast();
            bindings::pcibios_resource_to_bus((*self.as_raw()).bus, &mut region, resource);
            region
        };
        let length = self.device.resource_len(0).ok()?;
        (length != 0).then_some(Bar0 {
            bus: region.start,
            cpu: self.device.resource_start(0).ok()?,
            length,
        })
    }
}

/// Where BAR0 of a function lies.
pub(crate) struct Bar0 {
    bus: u64,
    cpu: u64,
    length: u64,
}

impl Bar0 {
    /// Offset of the page at this bus address, when it is wholly inside.
    pub(crate) fn offset_of_bus_page(&self, address: u64) -> Option<u64> {
        self.offset(address.checked_sub(self.bus)?)
    }

    /// Offset of the page at this CPU physical address, when it is wholly inside.
    pub(crate) fn offset_of_cpu_page(&self, address: u64) -> Option<u64> {
        self.offset(address.checked_sub(self.cpu)?)
    }

    fn offset(&self, offset: u64) -> Option<u64> {
        let page = u64::from(IBGDA_PAGE_SIZE);
        (offset % page == 0 && offset < self.length && self.length - offset >= page)
            .then_some(offset)
    }

    /// CPU physical address of an offset that one of the above gave.
    pub(crate) fn cpu_address(&self, offset: u64) -> u64 {
        self.cpu + offset
    }
}

/// How one function's posted writes reach another.
#[derive(Clone, Copy)]
pub(crate) struct Path {
    /// `IBGDA_PATH_*`.
    pub(crate) class: u32,
    /// As the kernel's p2pdma counts, -1 when not reachable.
    pub(crate) distance: i32,
}

impl Path {
    /// As the kernel's own p2pdma code judges it.
    pub(crate) fn between(gpu: &Function, nic: &Function) -> Self {
        let mut client = gpu.as_raw_device();
        // SAFETY: Both devices are valid; one client is announced and one given.
        let distance =
            unsafe { bindings::pci_p2pdma_distance_many(nic.as_raw(), &mut client, 1, false) };
        // SAFETY: Both devices are valid.
        let same_switch = unsafe { glue::ibgda_c_same_switch(nic.as_raw(), gpu.as_raw()) };
        let class = match (distance < 0, same_switch) {
            (true, _) => IBGDA_PATH_NONE,
            (false, true) => IBGDA_PATH_SWITCH,
            (false, false) => IBGDA_PATH_HOST_BRIDGE,
        };
        Self { class, distance }
    }
}
