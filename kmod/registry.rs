// SPDX-License-Identifier: GPL-2.0

//! What the module knows as a whole: the sessions, the NICs that are there, the pairs that are allowed.
//!
//! One lock for the three, because their changes meet: a bind looks at policy and NICs and becomes visible as a session; a
//! change of either must see every session it concerns. The lock is taken before any session's, and never under `dma_resv`
//! or `mmap_lock`.

use crate::{
    ibclient::Nic,
    policy,
    session::Session, //
};
use kernel::{
    prelude::*,
    rbtree::RBTree,
    sync::Arc, //
};

/// See the module's documentation.
pub(crate) struct Registry {
    pub(crate) policy: KVec<policy::Entry>,
    pub(crate) nics: KVec<Nic>,
    /// By number; `None` while there is none.
    sessions: Option<RBTree<u64, Arc<Session>>>,
}

kernel::sync::global_lock! {
    // SAFETY: The module's initialiser initialises it before anything else.
    pub(crate) unsafe(uninit) static REGISTRY: Mutex<Registry> = Registry {
        policy: KVec::new(),
        nics: KVec::new(),
        sessions: None,
    };
}

/// What the registry holds, as long as the module is there: a static is never dropped, and the vectors keep their memory
/// when they are empty.
pub(crate) struct Contents;

impl Drop for Contents {
    fn drop(&mut self) {
        let mut registry = REGISTRY.lock();
        registry.policy = KVec::new();
        registry.nics = KVec::new();
        // No session outlives the device, whose files keep the module.
        registry.sessions = None;
    }
}

impl Registry {
    /// Adds a session.
    pub(crate) fn add(session: &Arc<Session>) -> Result {
        let node = kernel::rbtree::RBTreeNode::new(session.number, session.clone(), GFP_KERNEL)?;
        REGISTRY
            .lock()
            .sessions
            .get_or_insert_with(RBTree::new)
            .insert(node);
        Ok(())
    }

    /// Forgets a session.
    pub(crate) fn remove(session: &Session) {
        let node = REGISTRY
            .lock()
            .sessions
            .as_mut()
            .and_then(|sessions| sessions.remove_node(&session.number));
        // Freed here, with the lock given back.
        drop(node);
    }

    /// All sessions, oldest first.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = &Arc<Session>> {
        self.sessions.iter().flat_map(RBTree::values)
    }
}
