// SPDX-License-Identifier: GPL-2.0

//! Which pairs are allowed: `allow/<gpu>@<nic>` in configfs, and the module parameter `allow_all`.

use crate::{
    decisions::{
        bdf::{
            Bdf,
            Pair, //
        },
        life::Reason, //
    },
    module_parameters,
    registry::{
        Registry,
        REGISTRY, //
    },
};
use core::fmt::Write as _;
use kernel::{
    bindings,
    configfs::{
        configfs_attrs,
        AttributeOperations,
        Group,
        GroupOperations,
        HasGroup,
        Subsystem, //
    },
    error::to_result,
    page::PAGE_SIZE,
    prelude::*,
    str::{
        kstrtobool_bytes,
        CString, //
    },
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        ArcBorrow, //
    }, //
};

/// One allowed pair, as the registry has it.
pub(crate) struct Entry {
    number: u64,
    pair: Pair,
    /// Also when the two do not reach each other peer to peer.
    any_path: bool,
}

/// What the policy says of a pair that it allows.
#[derive(Clone, Copy)]
pub(crate) struct Permission {
    pub(crate) any_path: bool,
}

/// Whether the pair is allowed, and how.
pub(crate) fn permission(registry: &Registry, gpu: Bdf, nic: Bdf) -> Option<Permission> {
    let mut matching = registry
        .policy
        .iter()
        .filter(|entry| entry.pair.covers(gpu, nic))
        .peekable();
    if matching.peek().is_none() && !*module_parameters::allow_all.value_ref() {
        return None;
    }
    Some(Permission {
        any_path: matching.any(|entry| entry.any_path),
    })
}

/// Takes away what no entry allows any more.
fn revoke(registry: &Registry) {
    for session in registry.sessions() {
        session.lose_if(Reason::Policy, |pair| {
            match permission(registry, pair.gpu.bdf, pair.nic.bdf) {
                None => true,
                Some(permission) => !pair.permitted(permission),
            }
        });
    }
}

/// Changes need the capability in the initial namespace: root of a user namespace has no say.
fn check_capability() -> Result {
    // SAFETY: No requirements.
    if unsafe { bindings::capable(bindings::CAP_SYS_ADMIN as i32) } {
        Ok(())
    } else {
        Err(EPERM)
    }
}

/// `ibgda/`.
#[pin_data]
struct Root {}

/// `ibgda/allow/`.
#[pin_data]
struct Allow {}

/// `ibgda/allow/<gpu>@<nic>/`. Configfs keeps the names unique, and a pair has one name.
#[pin_data(PinnedDrop)]
struct Item {
    number: u64,
}

impl Item {
    fn add(pair: Pair) -> Result<u64> {
        static NUMBERS: Atomic<u64> = Atomic::new(0);

        let number = NUMBERS.fetch_add(1, Relaxed);
        let entry = Entry {
            number,
            pair,
            any_path: false,
        };
        REGISTRY.lock().policy.push(entry, GFP_KERNEL)?;
        Ok(number)
    }
}

/// Removes the entry that `which` picks, if it is still there, and what relied on it.
fn remove(which: impl Fn(&Entry) -> bool) {
    let mut registry = REGISTRY.lock();
    if let Some(index) = registry.policy.iter().position(which) {
        // Only an index out of bounds is an error.
        let _ = registry.policy.remove(index);
        revoke(&registry);
    }
}

#[pinned_drop]
impl PinnedDrop for Item {
    fn drop(self: Pin<&mut Self>) {
        // For a mkdir that failed halfway; else rmdir has done it.
        remove(|entry| entry.number == self.number);
    }
}

#[vtable]
impl AttributeOperations<0> for Item {
    type Data = Item;

    fn show(item: &Item, page: &mut [u8; PAGE_SIZE]) -> Result<usize> {
        let any_path = REGISTRY
            .lock()
            .policy
            .iter()
            .any(|entry| entry.number == item.number && entry.any_path);
        let mut writer = kernel::str::Formatter::new(page);
        writer.write_str(if any_path { "1\n" } else { "0\n" })?;
        Ok(writer.bytes_written())
    }

    fn store(item: &Item, text: &[u8]) -> Result {
        check_capability()?;
        let any_path = kstrtobool_bytes(text)?;
        let mut registry = REGISTRY.lock();
        let entry = registry
            .policy
            .iter_mut()
            .find(|entry| entry.number == item.number)
            .ok_or(ENOENT)?;
        entry.any_path = any_path;
        revoke(&registry);
        Ok(())
    }
}

#[vtable]
impl GroupOperations for Allow {
    type Child = Item;

    fn make_group(&self, name: &CStr) -> Result<impl PinInit<Group<Item>, Error>> {
        check_capability()?;
        let pair = Pair::parse(name.to_bytes()).ok_or(EINVAL)?;
        let item_type = configfs_attrs! {
            container: Group<Item>,
            data: Item,
            attributes: [
                any_path: 0,
            ],
        };
        Ok(Group::new(
            name.try_into()?,
            item_type,
            try_pin_init!(Item {
                number: Item::add(pair)?,
            }),
        ))
    }

    /// At rmdir, not at the last reference to the item, which an open attribute may hold for long.
    fn drop_item(&self, child: ArcBorrow<'_, Group<Item>>) {
        // SAFETY: The group is valid, and so is the name of its item, which configfs set at mkdir. (The group's data is
        // out of reach here.)
        let name = unsafe { CStr::from_char_ptr((*Group::group(&*child)).cg_item.ci_name) };
        if let Some(pair) = Pair::parse(name.to_bytes()) {
            remove(|entry| entry.pair == pair);
        }
    }
}

/// The directories, while the module is loaded.
#[pin_data]
pub(crate) struct Policy {
    // Dropped first.
    _allow: AllowDirectory,
    #[pin]
    subsystem: Subsystem<Root>,
}

impl Policy {
    pub(crate) fn new() -> impl PinInit<Self, Error> {
        let item_type = configfs_attrs! {
            container: Subsystem<Root>,
            data: Root,
            attributes: [],
        };
        try_pin_init!(&this in Self {
            subsystem <- Subsystem::new(c"ibgda", item_type, try_pin_init!(Root {})),
            // SAFETY: `subsystem` was initialised just now, and is pinned.
            _allow: unsafe { AllowDirectory::new(&raw const (*this.as_ptr()).subsystem) }?,
        })
    }
}

/// `allow/`: a group below the subsystem from the beginning, which the kernel's Rust has no word for.
struct AllowDirectory(*mut bindings::config_group);

// SAFETY: The pointer is only used to take the group down, once.
unsafe impl Send for AllowDirectory {}
// SAFETY: As above.
unsafe impl Sync for AllowDirectory {}

impl AllowDirectory {
    /// # Safety
    ///
    /// `parent` must be a registered subsystem that outlives the result.
    unsafe fn new(parent: *const Subsystem<Root>) -> Result<Self> {
        let item_type = configfs_attrs! {
            container: Group<Allow>,
            data: Allow,
            child: Item,
            attributes: [],
        };
        let group = Arc::pin_init(
            Group::new(
                CString::try_from(c"allow")?,
                item_type,
                try_pin_init!(Allow {}),
            ),
            GFP_KERNEL,
        )?;
        // SAFETY: A valid group. The release operation of its item type drops the reference that is given up here.
        let this = Self(unsafe { Group::group(group.into_raw()) }.cast_mut());
        // SAFETY: The parent is registered, and the group is initialised and has no parent yet.
        let result = to_result(unsafe {
            bindings::configfs_register_group(Subsystem::group(parent).cast_mut(), this.0)
        });
        if let Err(error) = result {
            let mut this = core::mem::ManuallyDrop::new(this);
            // SAFETY: The only reference is ours.
            unsafe { bindings::config_item_put(&raw mut (*this.0).cg_item) };
            return Err(error);
        }
        Ok(this)
    }
}

impl Drop for AllowDirectory {
    fn drop(&mut self) {
        // SAFETY: The group is registered; it has no children, else they would hold the module.
        unsafe { bindings::configfs_unregister_group(self.0) };
        // SAFETY: The last reference is ours.
        unsafe { bindings::config_item_put(&raw mut (*self.0).cg_item) };
    }
}
