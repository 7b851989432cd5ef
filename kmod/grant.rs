// SPDX-License-Identifier: GPL-2.0

//! The grant table: which doorbell page was given to whom, until that process is dead.
//!
//! Taking a mapping back does not take it from the GPU. So a page stays its owner's, across release, loss and reset of the
//! NIC, until every thread of the owner is gone and its file released; `decisions::grants` has the rule. A grant without a
//! file is an *orphan*: it holds the module, and a work item looks after its owner.

use crate::{
    decisions::grants::{
        self,
        Grant as _,
        Limits, //
    },
    doorbell::{
        Import,
        MemoryType, //
    },
    observe,
    owner::ThreadGroup,
    session::Session, //
};
use kernel::{
    bindings,
    error::code::*,
    fmt,
    module::this_module,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::{
        atomic::Relaxed,
        Arc, //
    },
    workqueue::{
        impl_has_delayed_work,
        new_delayed_work,
        DelayedWork,
        HasWork,
        Queue,
        Work,
        WorkItem, //
    }, //
};

const LIMITS: Limits = Limits {
    per_owner: 4096,
    total: 65536,
};

/// Jiffies to the first look after an owner, and between two looks at most.
const FIRST_DELAY: usize = 1;
const LAST_DELAY: usize = bindings::HZ as usize;

/// A page that was given to a process.
pub(crate) struct Grant {
    /// CPU physical address, which survives a reset of the NIC. Never shown.
    pub(crate) page: u64,
    /// Tells grants of one page apart.
    pub(crate) number: u64,
    /// `IBGDA_MEM_*` in force.
    pub(crate) mem_type: u32,
    pub(crate) _memory_type: MemoryType,
    pub(crate) import: Arc<Import>,
}

impl Grant {
    fn session(&self) -> &Session {
        &self.import.session
    }

    fn key(&self) -> (u64, u64) {
        (self.page, self.number)
    }

    /// Whether its dma-buf was invalidated.
    pub(crate) fn is_revoked(&self) -> bool {
        self.import.is_revoked()
    }
}

impl grants::Grant for Grant {
    type Owner = ThreadGroup;

    fn owner(&self) -> &ThreadGroup {
        &self.session().owner.group
    }

    fn file_released(&self) -> bool {
        self.session().is_released()
    }

    fn owner_dead(&self) -> bool {
        self.owner().dead()
    }
}

/// See the module's documentation.
pub(crate) struct Table {
    /// By page, then number.
    grants: RBTree<(u64, u64), Arc<Grant>>,
    /// How many each process has.
    owners: RBTree<usize, u32>,
    total: u32,
    /// Sessions released with grants left; each holds the module.
    orphaned_sessions: u32,
    reaper: Arc<Reaper>,
    delay: usize,
}

kernel::sync::global_lock! {
    // SAFETY: The module's initialiser initialises it before anything else.
    pub(crate) unsafe(uninit) static TABLE: Mutex<Option<Table>> = None;
}

impl Table {
    /// Puts a grant in, unless somebody else has the page.
    fn insert(
        &mut self,
        grant: &Arc<Grant>,
        node: RBTreeNode<(u64, u64), Arc<Grant>>,
        count: RBTreeNode<usize, u32>,
    ) -> Result {
        let owner = grant.owner();
        let of_owner = self.owners.get(&owner.key()).copied().unwrap_or(0);
        if !LIMITS.allow(of_owner, self.total) {
            return Err(EDQUOT);
        }
        match self.owners.get_mut(&owner.key()) {
            Some(count) => *count += 1,
            None => {
                self.owners.insert(count);
            }
        }
        self.total += 1;
        grant.session().grants.fetch_add(1, Relaxed);
        self.grants.insert(node);
        Ok(())
    }

    /// Whether another process has the page.
    fn is_barred(&mut self, grant: &Grant) -> bool {
        let mut cursor = self.grants.cursor_lower_bound_mut(&(grant.page, 0));
        while let Some(at) = cursor {
            let (key, other) = at.current();
            if key.0 != grant.page {
                return false;
            }
            if grants::bars(&**other, grant.owner()) {
                return true;
            }
            cursor = at.move_next();
        }
        false
    }

    /// Accounts for a grant that was taken out.
    fn removed(&mut self, grant: &Grant) {
        let key = grant.owner().key();
        if let Some(count) = self.owners.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.owners.remove(&key);
            }
        }
        self.total -= 1;
        let session = grant.session();
        if session.grants.fetch_sub(1, Relaxed) == 1 && session.is_released() {
            self.orphaned_sessions -= 1;
            // SAFETY: Taken when the session was orphaned. The caller is a file operation, whose file holds the module, or
            // the reaper, which the module's exit waits for.
            unsafe { bindings::module_put(this_module::<crate::LocalModule>().as_ptr()) };
        }
    }

    /// Takes up to a batch of ended grants out.
    fn take_ended(&mut self) -> [Option<Arc<Grant>>; BATCH] {
        let mut batch = [const { None }; BATCH];
        let mut places = batch.iter_mut();
        let mut place = places.next();
        let mut cursor = self.grants.cursor_front_mut();
        while let Some(at) = cursor {
            if place.is_none() {
                break;
            }
            if grants::ended(&**at.current().1) {
                let (next, node) = at.remove_current();
                if let Some(place) = place {
                    *place = Some(node.to_key_value().1);
                }
                place = places.next();
                cursor = next;
            } else {
                cursor = at.move_next();
            }
        }
        for grant in batch.iter().flatten() {
            observe::ENDED.count();
            self.removed(grant);
        }
        batch
    }

    /// Sees to it that owners of orphans are looked after.
    fn schedule(&mut self) {
        if self.orphaned_sessions == 0 {
            return;
        }
        // SAFETY: A global of the kernel's, always valid.
        let queue = unsafe { Queue::from_raw(bindings::system_dfl_wq) };
        // When it is queued already, that is as good.
        let _ = queue.enqueue_delayed(self.reaper.clone(), self.delay);
        self.delay = (self.delay * 2).min(LAST_DELAY);
    }
}

const BATCH: usize = 16;

/// Gives the page to the owner of the grant's session. `EBUSY`: another process has it.
pub(crate) fn claim(grant: &Arc<Grant>) -> Result {
    let node = RBTreeNode::new(grant.key(), grant.clone(), GFP_KERNEL_ACCOUNT)?;
    let count = RBTreeNode::new(grant.owner().key(), 1, GFP_KERNEL_ACCOUNT)?;
    // Those that ended go first: the one that bars us may be among them.
    reap();
    let mut table = TABLE.lock();
    let table = table.as_mut().ok_or(ENODEV)?;
    // A build for the tests (`--cfg ibgda_pages_for_all`) does not ask, to show that they would see it.
    if table.is_barred(grant) && !cfg!(ibgda_pages_for_all) {
        observe::BARRED.count();
        return Err(EBUSY);
    }
    table.insert(grant, node, count)?;
    observe::GRANTS.count();
    Ok(())
}

/// Takes back a grant that was never mapped.
pub(crate) fn withdraw(grant: &Grant) {
    let mut table = TABLE.lock();
    let node = table.as_mut().and_then(|table| {
        let node = table.grants.remove_node(&grant.key());
        table.removed(grant);
        node
    });
    // Lets go of the files with the table's lock given back.
    drop(table);
    drop(node);
}

/// Lets go of the grants that ended.
pub(crate) fn reap() {
    loop {
        let mut table = TABLE.lock();
        let Some(ended) = table.as_mut().map(Table::take_ended) else {
            return;
        };
        drop(table);
        // Detaching takes `dma_resv`, so this is done without the lock.
        if ended.iter().flatten().count() < BATCH {
            return;
        }
    }
}

/// A session's file is released.
pub(crate) fn file_released(session: &Session) {
    let mut table = TABLE.lock();
    session.set_released();
    if let Some(table) = table.as_mut() {
        if session.grants.load(Relaxed) > 0 {
            // SAFETY: The file being released still holds the module.
            unsafe { bindings::__module_get(this_module::<crate::LocalModule>().as_ptr()) };
            table.orphaned_sessions += 1;
            table.delay = FIRST_DELAY;
            table.schedule();
        }
    }
    drop(table);
    reap();
}

/// A line for each grant, without its page.
pub(crate) fn show(f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let table = TABLE.lock();
    for grant in table.iter().flat_map(|table| table.grants.values()) {
        let session = grant.session();
        writeln!(
            f,
            "{}\t{}\t{}\t{}\t{}",
            grant.number,
            session.number,
            grant.owner().number(),
            if session.is_released() {
                "orphan"
            } else {
                "held"
            },
            if grant.is_revoked() {
                "invalidated"
            } else {
                "valid"
            },
        )?;
    }
    Ok(())
}

/// Looks after the owners of orphans, while there are any.
#[pin_data]
struct Reaper {
    #[pin]
    work: DelayedWork<Reaper>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Reaper> for Reaper { self.work }
}

impl WorkItem for Reaper {
    type Pointer = Arc<Reaper>;

    fn run(_this: Arc<Reaper>) {
        reap();
        if let Some(table) = TABLE.lock().as_mut() {
            table.schedule();
        }
    }
}

/// The table, while the module is loaded.
pub(crate) struct GrantTable;

impl GrantTable {
    pub(crate) fn new() -> Result<Self> {
        let reaper = Arc::pin_init(
            pin_init!(Reaper {
                work <- new_delayed_work!("ibgda::Reaper::work"),
            }),
            GFP_KERNEL,
        )?;
        *TABLE.lock() = Some(Table {
            grants: RBTree::new(),
            owners: RBTree::new(),
            total: 0,
            orphaned_sessions: 0,
            reaper,
            delay: FIRST_DELAY,
        });
        Ok(Self)
    }
}

impl Drop for GrantTable {
    /// No file is open and nothing is orphaned, else the module would be held: the table is empty.
    fn drop(&mut self) {
        let Some(table) = TABLE.lock().take() else {
            return;
        };
        let reaper = Arc::as_ptr(&table.reaper).cast_mut();
        // SAFETY: The work is a `delayed_work`'s, initialised and pinned. It does not queue itself again without a table.
        let pending = unsafe {
            let work: *mut Work<Reaper> = Reaper::raw_get_work(reaper);
            let work = Work::raw_get(work);
            bindings::cancel_delayed_work_sync(kernel::container_of!(
                work,
                bindings::delayed_work,
                work
            ))
        };
        if pending {
            // SAFETY: The queue held this reference, and did not pass it to `run`.
            drop(unsafe { Arc::from_raw(reaper) });
        }
    }
}
