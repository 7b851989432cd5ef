// SPDX-License-Identifier: GPL-2.0

//! Who owns a session: a thread group and its address space.

use crate::abi::glue;
use kernel::{
    bindings,
    mm::Mm,
    prelude::*,
    sync::aref::ARef,
    task::Task, //
};

/// A thread group, by its `struct pid`, which is not re-used while we hold it.
pub(crate) struct ThreadGroup(*mut bindings::pid);

// SAFETY: `struct pid` is reference counted atomically and may be used from any thread.
unsafe impl Send for ThreadGroup {}
// SAFETY: As above.
unsafe impl Sync for ThreadGroup {}

impl ThreadGroup {
    /// That of the caller.
    pub(crate) fn current() -> Self {
        // SAFETY: `current` is a valid task. A thread of a living group has a TGID pid, so it is not null.
        Self(unsafe {
            bindings::get_task_pid(Task::current_raw(), bindings::pid_type_PIDTYPE_TGID)
        })
    }

    /// Whether every thread of it, and with them every file they had, is gone.
    pub(crate) fn dead(&self) -> bool {
        // SAFETY: We hold a reference.
        unsafe { glue::ibgda_c_dead(self.0) }
    }

    /// Its number as the reader's pid namespace has it, 0 for none there.
    pub(crate) fn number(&self) -> i32 {
        // SAFETY: We hold a reference.
        unsafe { bindings::pid_vnr(self.0) }
    }

    /// A number that tells living or referenced groups apart, never shown to anybody.
    pub(crate) fn key(&self) -> usize {
        self.0 as usize
    }
}

impl PartialEq for ThreadGroup {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self.0, other.0)
    }
}

impl Drop for ThreadGroup {
    fn drop(&mut self) {
        // SAFETY: The reference is ours.
        unsafe { bindings::put_pid(self.0) };
    }
}

/// The opener of a session.
pub(crate) struct Owner {
    pub(crate) group: ThreadGroup,
    /// Pins the structure, not the address space.
    mm: ARef<Mm>,
}

impl Owner {
    /// The caller.
    pub(crate) fn current() -> Result<Self> {
        let current = kernel::current!();
        let mm: &Mm = current.mm().ok_or(EPERM)?;
        Ok(Self {
            group: ThreadGroup::current(),
            mm: ARef::from(mm),
        })
    }

    /// Fails for another process, and for the same one after exec.
    pub(crate) fn check(&self) -> Result {
        let current = kernel::current!();
        let same = current
            .mm()
            .is_some_and(|mm| core::ptr::eq(mm.as_raw(), self.mm.as_raw()))
            && ThreadGroup::current() == self.group;
        if same {
            Ok(())
        } else {
            Err(EPERM)
        }
    }

    /// The address space, dead or alive.
    pub(crate) fn mm(&self) -> &Mm {
        &self.mm
    }
}
