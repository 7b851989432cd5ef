// SPDX-License-Identifier: GPL-2.0

//! The NICs: RDMA devices of mlx5_ib, as they come and go; and the PCI functions that are taken away.

use crate::{
    abi::glue,
    decisions::life::Reason,
    pci::Function,
    registry::{
        Registry,
        REGISTRY, //
    }, //
};
use kernel::{
    bindings,
    container_of,
    error::to_result,
    prelude::*,
    types::Opaque, //
};

/// Bytes of an ib_device's name, NUL included.
pub(crate) const NAME_BYTES: usize = 64;

/// A PCI function that is, or was a moment ago, an RDMA device of mlx5_ib.
pub(crate) struct Nic {
    pub(crate) function: Function,
    /// Its ib_device, for comparison only; null while the driver resets the function.
    ibdev: *const glue::ib_device,
    /// The ib_device's name, ended by NUL.
    pub(crate) name: [u8; NAME_BYTES],
    /// Word `IBGDA_STATUS_WORD_PORT` of the status page.
    pub(crate) port: u64,
    /// The PCI driver is being unbound.
    unbinding: bool,
}

// SAFETY: `ibdev` is never dereferenced.
unsafe impl Send for Nic {}

impl Nic {
    /// Whether it has an ib_device; if not, its driver is resetting it.
    pub(crate) fn is_up(&self) -> bool {
        !self.ibdev.is_null()
    }
}

fn port_word(port: glue::ibgda_c_port) -> u64 {
    u64::from(port.state) << 32 | u64::from(port.mbps)
}

/// An ib_device of mlx5_ib was registered.
///
/// # Safety
///
/// For the client of `glue.c`: an ib_device, the PCI function it belongs to, and its name.
#[no_mangle]
unsafe extern "C" fn ibgda_nic_arrives(
    ibdev: *mut glue::ib_device,
    pdev: *mut bindings::pci_dev,
    name: *const c_char,
    port: glue::ibgda_c_port,
) {
    // SAFETY: The client passes the PCI function that the ib_device it was called with belongs to.
    let function = unsafe { Function::from_raw(pdev) };
    // SAFETY: The client passes the ib_device's name.
    let text = unsafe { CStr::from_char_ptr(name) }.to_bytes();
    let mut name = [0; NAME_BYTES];
    let length = text.len().min(NAME_BYTES - 1);
    name[..length].copy_from_slice(&text[..length]);
    let nic = Nic {
        function: function.clone(),
        ibdev,
        name,
        port: port_word(port),
        unbinding: false,
    };

    let mut registry = REGISTRY.lock();
    let port = nic.port;
    let known = registry
        .nics
        .iter_mut()
        .find(|nic| nic.function.bdf == function.bdf);
    match known {
        // A second ib_device on one function: the first stands for it.
        Some(known) if known.is_up() => return,
        Some(known) => *known = nic,
        None => {
            if registry.nics.push(nic, GFP_KERNEL).is_err() {
                pr_err!("{}: no memory to remember the NIC\n", function.bdf);
                return;
            }
        }
    }
    for session in registry.sessions() {
        session.nic_returned(&function, port);
    }
}

/// An ib_device of mlx5_ib is being unregistered. Its driver waits for us.
///
/// # Safety
///
/// For the client of `glue.c`.
#[no_mangle]
unsafe extern "C" fn ibgda_nic_leaves(ibdev: *mut glue::ib_device) {
    let mut registry = REGISTRY.lock();
    let Some(index) = registry
        .nics
        .iter()
        .position(|nic| core::ptr::eq(nic.ibdev, ibdev))
    else {
        return;
    };
    let nic = &mut registry.nics[index];
    let function = nic.function.clone();
    let resets = !nic.unbinding && !function.is_disconnected() && function.rdma_function_leaves();
    let reason = if resets {
        Reason::NicReset
    } else {
        Reason::NicRemoved
    };
    if resets {
        nic.ibdev = core::ptr::null();
    } else {
        // Only an index out of bounds is an error.
        let _ = registry.nics.remove(index);
    }
    lose_nic(&registry, &function, reason);
}

/// The port of an ib_device changed.
///
/// # Safety
///
/// For the client of `glue.c`.
#[no_mangle]
unsafe extern "C" fn ibgda_nic_port(ibdev: *mut glue::ib_device, port: glue::ibgda_c_port) {
    let mut registry = REGISTRY.lock();
    let Some(nic) = registry
        .nics
        .iter_mut()
        .find(|nic| core::ptr::eq(nic.ibdev, ibdev))
    else {
        return;
    };
    if nic.port == port_word(port) {
        return;
    }
    nic.port = port_word(port);
    let (pdev, port) = (nic.function.as_raw(), nic.port);
    for session in registry.sessions() {
        session.port_changed(|pair| pair.nic.is(pdev), port);
    }
}

fn lose_nic(registry: &Registry, nic: &Function, reason: Reason) {
    let mut lost = 0;
    for session in registry.sessions() {
        lost += u32::from(session.lose_if(reason, |pair| pair.nic.is(nic.as_raw())));
    }
    if lost > 0 {
        pr_info!(
            "NIC {} lost ({:?}), with {} sessions\n",
            nic.bdf,
            reason,
            lost
        );
    }
}

/// A PCI function's driver is being unbound, or the function removed.
///
/// # Safety
///
/// `pdev` must be valid during the call.
unsafe fn function_leaves(pdev: *mut bindings::pci_dev) {
    let mut registry = REGISTRY.lock();
    let nic = registry.nics.iter().position(|nic| nic.function.is(pdev));
    if let Some(index) = nic {
        if registry.nics[index].is_up() {
            registry.nics[index].unbinding = true;
        } else {
            // Its reset has failed.
            let function = registry.nics[index].function.clone();
            let _ = registry.nics.remove(index);
            lose_nic(&registry, &function, Reason::NicRemoved);
        }
    }
    let mut lost = 0;
    for session in registry.sessions() {
        lost += u32::from(session.lose_if(Reason::GpuRemoved, |pair| pair.gpu.is(pdev)));
    }
    if lost > 0 {
        // SAFETY: The notifier's device is valid during the call.
        let gpu = unsafe { Function::from_raw(pdev) };
        pr_info!("GPU {} lost, with {} sessions\n", gpu.bdf, lost);
    }
}

unsafe extern "C" fn bus_event(
    _block: *mut bindings::notifier_block,
    event: usize,
    device: *mut c_void,
) -> c_int {
    // Between the last two a function that is being removed can still be looked up, and a session bound to it.
    const LEAVING: [usize; 3] = [
        bindings::bus_notifier_event_BUS_NOTIFY_UNBIND_DRIVER as usize,
        bindings::bus_notifier_event_BUS_NOTIFY_DEL_DEVICE as usize,
        bindings::bus_notifier_event_BUS_NOTIFY_REMOVED_DEVICE as usize,
    ];
    if LEAVING.contains(&event) {
        let device: *mut bindings::device = device.cast();
        // SAFETY: Devices of the PCI bus are embedded in a `struct pci_dev`, which is valid while the notifiers run.
        unsafe { function_leaves(container_of!(device, bindings::pci_dev, dev)) };
    }
    bindings::NOTIFY_DONE as c_int
}

/// Hears of PCI functions that leave, while it exists.
#[pin_data(PinnedDrop)]
pub(crate) struct BusNotifier {
    #[pin]
    block: Opaque<bindings::notifier_block>,
}

// SAFETY: The block is only touched by the notifier core, under its lock.
unsafe impl Send for BusNotifier {}
// SAFETY: As above.
unsafe impl Sync for BusNotifier {}

impl BusNotifier {
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            block <- Opaque::try_ffi_init(|slot: *mut bindings::notifier_block| {
                // SAFETY: The slot is ours to write; the block is pinned and unregistered before it is freed.
                unsafe {
                    slot.write(bindings::notifier_block {
                        notifier_call: Some(bus_event),
                        ..pin_init::zeroed()
                    });
                    to_result(bindings::bus_register_notifier(&raw const bindings::pci_bus_type, slot))
                }
            }),
        })
    }
}

#[pinned_drop]
impl PinnedDrop for BusNotifier {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: It is registered. No callback runs when this returns.
        unsafe {
            bindings::bus_unregister_notifier(&raw const bindings::pci_bus_type, self.block.get())
        };
    }
}

/// Hears of RDMA devices, while it exists.
pub(crate) struct Client;

impl Client {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: Once; every callback finds the registry initialised.
        to_result(unsafe { glue::ibgda_c_client_register() })?;
        Ok(Self)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: It is registered. No callback runs when this returns.
        unsafe { glue::ibgda_c_client_unregister() };
        // The references to PCI functions of those in reset.
        REGISTRY.lock().nics = KVec::new();
    }
}
