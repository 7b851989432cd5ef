// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual machine, for one test at a time, and what the tests of libibgda look at.

#[allow(unused_imports, reason = "not every test program breaks the machine")]
pub use ibgda_hil::machine::{ask_model, inject_fatal_error};

use anyhow::{Context as _, Result};
use ibgda::{MemoryRegion, QueuePair};
use ibgda_hil::{machine, rig};
use ibgda_test_kernels::Poster;
use serde_json::{Value, json};
use std::{
    ops::{Deref, DerefMut},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Two NICs and a GPU that may drive both, for one test at a time.
pub struct Machine {
    machine: machine::Machine,
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    /// Waits for this test's turn, then allows the pairs.
    pub fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            machine: machine::Machine::take().expect("the machine of ./ci/vm --nics 2 --gpus 1"),
            _turn: turn,
        }
    }
}

impl Deref for Machine {
    type Target = machine::Machine;

    fn deref(&self) -> &machine::Machine {
        &self.machine
    }
}

impl DerefMut for Machine {
    fn deref_mut(&mut self) -> &mut machine::Machine {
        &mut self.machine
    }
}

/// What a CPU thread posts with.
pub fn poster(qp: &mut QueuePair) -> Poster {
    // SAFETY: the QP and what it names outlive each call of the poster, and each test uses it from one thread.
    unsafe { Poster::new(qp.device_handle()) }
}

/// The first bytes of a region.
pub fn contents(region: &MemoryRegion, bytes: usize) -> Result<Vec<u8>> {
    rig::contents(region, 0, bytes)
}

/// How many live objects of these kinds each NIC in the model has. Keys that mlx5_ib keeps for later are free, and no one's.
pub fn model_objects(kinds: &[&str]) -> Result<Value> {
    let mut counts = ask_model("counts", &[])?;
    for function in counts["functions"]
        .as_array_mut()
        .context("counts has functions")?
    {
        let function = function
            .as_object_mut()
            .context("a function's counts are an object")?;
        let kept = function.get("mkey_free").and_then(Value::as_u64);
        if let (Some(kept), Some(keys)) = (kept, function.get_mut("mkey")) {
            *keys = json!(keys.as_u64().unwrap_or_default() - kept);
        }
        function.retain(|name, _| name == "name" || kinds.contains(&name.as_str()));
    }
    Ok(counts)
}

/// One counter, summed over all functions.
pub fn model_count(name: &str) -> Result<u64> {
    let count = machine::counts()?.get(name).copied();
    count.with_context(|| format!("the model does not count {name}"))
}
