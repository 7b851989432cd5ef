// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists of device calls (`kernels/library/steps.h`), made here and run by a kernel.

use crate::rig::{PATIENCE, Where};
use anyhow::{Result, ensure};
use ibgda::{
    MemoryRegion, Processor, QueuePair, Status,
    processor::{Launched, Reached},
};
use ibgda_device::kernels::steps::{KERNEL, abi::*};
use std::{mem::size_of, slice, sync::Arc, time::Duration};

/// What a list's block is to do, step after step.
#[derive(Clone, Debug)]
pub struct List {
    at: Where,
    steps: Vec<ibgda_step>,
}

/// A kernel that runs lists. Lists and what came of them lie in the processor's memory, so that it does not depend on any
/// NIC.
pub struct Running {
    launched: Box<dyn Launched>,
    processor: Arc<dyn Processor>,
    memory: Reached,
    blocks: usize,
    each: usize,
}

const STEP: usize = size_of::<ibgda_step>();

fn bytes_of(steps: &[ibgda_step]) -> &[u8] {
    // SAFETY: integers without padding, as the layout tests of the binding and the assertion below have it.
    unsafe { slice::from_raw_parts(steps.as_ptr().cast(), size_of_val(steps)) }
}
const _: () = assert!(STEP == 9 * 8 + 8 * 4 + 3 * 8);

impl List {
    /// An empty one.
    pub fn new(at: &Where) -> Self {
        Self {
            at: at.clone(),
            steps: Vec::new(),
        }
    }

    fn add(mut self, kind: ibgda_step_kind, qp: &QueuePair, step: ibgda_step) -> Result<Self> {
        let qp = qp.handle_of(&self.at.processor)?;
        self.steps.push(ibgda_step { kind, qp, ..step });
        Ok(self)
    }

    /// Between regions: `bytes` at an offset of each.
    fn between(
        self,
        kind: ibgda_step_kind,
        qp: &QueuePair,
        (remote, to): (&MemoryRegion, u64),
        (local, from): (&MemoryRegion, u64),
        step: ibgda_step,
    ) -> Result<Self> {
        let step = ibgda_step {
            remote: remote.address() + to,
            rkey: remote.rkey(),
            local: local.address() + from,
            lkey: local.lkey(),
            ..step
        };
        self.add(kind, qp, step)
    }

    /// RDMA WRITE.
    pub fn put(
        self,
        qp: &QueuePair,
        to: (&MemoryRegion, u64),
        from: (&MemoryRegion, u64),
        bytes: u32,
    ) -> Result<Self> {
        let step = ibgda_step {
            bytes,
            ..Default::default()
        };
        self.between(IBGDA_STEP_PUT, qp, to, from, step)
    }

    /// RDMA WRITE of at most 8 bytes from the WQE.
    pub fn put_inline(
        self,
        qp: &QueuePair,
        (to, offset): (&MemoryRegion, u64),
        value: u64,
        bytes: u32,
    ) -> Result<Self> {
        let step = ibgda_step {
            remote: to.address() + offset,
            rkey: to.rkey(),
            value,
            bytes,
            ..Default::default()
        };
        self.add(IBGDA_STEP_PUT_INLINE, qp, step)
    }

    /// RDMA READ into `to`.
    pub fn get(
        self,
        qp: &QueuePair,
        to: (&MemoryRegion, u64),
        from: (&MemoryRegion, u64),
        bytes: u32,
    ) -> Result<Self> {
        let step = ibgda_step {
            bytes,
            ..Default::default()
        };
        self.between(IBGDA_STEP_GET, qp, from, to, step)
    }

    /// Adds to a word of `at`; `old` takes what was there.
    pub fn fetch_add(
        self,
        qp: &QueuePair,
        at: (&MemoryRegion, u64),
        old: (&MemoryRegion, u64),
        value: u64,
    ) -> Result<Self> {
        let step = ibgda_step {
            value,
            ..Default::default()
        };
        self.between(IBGDA_STEP_FETCH_ADD, qp, at, old, step)
    }

    /// Makes a word of `at` `value` if it is `compare`; `old` takes what was there.
    pub fn compare_swap(
        self,
        qp: &QueuePair,
        at: (&MemoryRegion, u64),
        old: (&MemoryRegion, u64),
        [compare, value]: [u64; 2],
    ) -> Result<Self> {
        let step = ibgda_step {
            value,
            compare,
            ..Default::default()
        };
        self.between(IBGDA_STEP_COMPARE_SWAP, qp, at, old, step)
    }

    /// RDMA WRITE with a word behind it.
    pub fn put_signal(
        self,
        qp: &QueuePair,
        to: (&MemoryRegion, u64),
        from: (&MemoryRegion, u64),
        bytes: u32,
        (signal, value): (u64, u64),
    ) -> Result<Self> {
        let compare = to.0.address() + signal;
        let step = ibgda_step {
            bytes,
            compare,
            value,
            ..Default::default()
        };
        self.between(IBGDA_STEP_PUT_SIGNAL, qp, to, from, step)
    }

    fn message(
        self,
        kind: ibgda_step_kind,
        qp: &QueuePair,
        (region, offset): (&MemoryRegion, u64),
        bytes: u32,
    ) -> Result<Self> {
        let step = ibgda_step {
            local: region.address() + offset,
            lkey: region.lkey(),
            bytes,
            ..Default::default()
        };
        self.add(kind, qp, step)
    }

    /// SEND.
    pub fn send(self, qp: &QueuePair, from: (&MemoryRegion, u64), bytes: u32) -> Result<Self> {
        self.message(IBGDA_STEP_SEND, qp, from, bytes)
    }

    /// Posts a receive.
    pub fn recv(self, qp: &QueuePair, to: (&MemoryRegion, u64), bytes: u32) -> Result<Self> {
        self.message(IBGDA_STEP_RECV, qp, to, bytes)
    }

    fn wait(self, kind: ibgda_step_kind, qp: &QueuePair, timeout: Duration) -> Result<Self> {
        let timeout_ns = timeout.as_nanos() as u64;
        let step = ibgda_step {
            timeout_ns,
            ..Default::default()
        };
        self.add(kind, qp, step)
    }

    /// Waits for all that was posted.
    pub fn quiet(self, qp: &QueuePair) -> Result<Self> {
        self.wait(IBGDA_STEP_QUIET, qp, PATIENCE)
    }

    /// Waits for a message.
    pub fn poll_recv(self, qp: &QueuePair, timeout: Duration) -> Result<Self> {
        self.wait(IBGDA_STEP_POLL_RECV, qp, timeout)
    }

    /// Waits for a completion of the send queue.
    pub fn poll_send(self, qp: &QueuePair, timeout: Duration) -> Result<Self> {
        self.wait(IBGDA_STEP_POLL_SEND, qp, timeout)
    }

    /// Waits until a word of a region is at least `value`, as long as the QP's NIC is there if one is given.
    pub fn wait_until(
        mut self,
        qp: Option<&QueuePair>,
        (region, offset): (&MemoryRegion, u64),
        value: u64,
        timeout: Duration,
    ) -> Result<Self> {
        let word = region.pointer_of(&self.at.processor)? + offset;
        let qp = qp.map_or(Ok(0), |qp| qp.handle_of(&self.at.processor))?;
        self.steps.push(ibgda_step {
            kind: IBGDA_STEP_WAIT_UNTIL,
            qp,
            word,
            value,
            timeout_ns: timeout.as_nanos() as u64,
            ..Default::default()
        });
        Ok(self)
    }

    /// What the kernel itself finds in a word of a region.
    pub fn load(mut self, (region, offset): (&MemoryRegion, u64)) -> Result<Self> {
        let word = region.pointer_of(&self.at.processor)? + offset;
        let kind = IBGDA_STEP_LOAD;
        self.steps.push(ibgda_step {
            kind,
            word,
            ..Default::default()
        });
        Ok(self)
    }

    /// `count` puts of 8 bytes to `slots` words.
    pub fn storm(self, qp: &QueuePair, to: &MemoryRegion, count: u64, slots: u64) -> Result<Self> {
        let step = ibgda_step {
            remote: to.address(),
            rkey: to.rkey(),
            count,
            slots,
            timeout_ns: PATIENCE.as_nanos() as u64,
            ..Default::default()
        };
        self.add(IBGDA_STEP_STORM, qp, step)
    }

    /// `count` puts, each waited for; their times in ns go to `times` of the processor's memory.
    pub fn rounds(
        self,
        qp: &QueuePair,
        (to, from): (&MemoryRegion, &MemoryRegion),
        bytes: u32,
        count: u64,
        times: &Reached,
    ) -> Result<Self> {
        let step = ibgda_step {
            bytes,
            count,
            word: times.address(),
            timeout_ns: PATIENCE.as_nanos() as u64,
            ..Default::default()
        };
        self.between(IBGDA_STEP_ROUNDS, qp, (to, 0), (from, 0), step)
    }

    /// Changes the last step.
    pub fn but(mut self, change: impl FnOnce(&mut ibgda_step)) -> Self {
        self.steps.last_mut().map(change);
        self
    }

    /// Starts a kernel with a block for each list. All lists are for the same processor, and of one length.
    pub fn start(lists: &[Self], kernel: &str) -> Result<Running> {
        let each = lists[0].steps.len();
        ensure!(
            lists.iter().all(|list| list.steps.len() == each),
            "lists of different lengths"
        );
        let processor = Arc::clone(&lists[0].at.processor);
        let steps: Vec<ibgda_step> = lists.iter().flat_map(|list| list.steps.clone()).collect();
        let task = size_of::<ibgda_task>();
        let memory = processor.alloc(task + size_of_val(steps.as_slice()))?;
        let head = ibgda_task {
            steps: memory.address() + task as u64,
            each: each as u32,
            reserved: 0,
        };
        let mut bytes = Vec::new();
        bytes.extend(head.steps.to_ne_bytes());
        bytes.extend(head.each.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(bytes_of(&steps));
        // SAFETY: the memory is of that length, and no kernel knows it yet.
        unsafe { processor.write(memory.address(), &bytes) }?;
        // SAFETY: the lists name QPs and regions that their caller keeps until the kernel has ended.
        let launched = unsafe { processor.launch(kernel, lists.len() as u32, memory.address()) }?;
        Ok(Running {
            launched,
            processor,
            memory,
            blocks: lists.len(),
            each,
        })
    }

    /// Runs one list, and gives its steps with what came of them.
    pub fn run(self) -> Result<Vec<ibgda_step>> {
        let mut all = Self::run_all(&[self])?;
        Ok(all.remove(0))
    }

    /// Runs lists, each in a block of one kernel.
    pub fn run_all(lists: &[Self]) -> Result<Vec<Vec<ibgda_step>>> {
        Self::start(lists, KERNEL)?.end()
    }
}

impl Running {
    /// Waits for the kernel's end.
    pub fn end(mut self) -> Result<Vec<Vec<ibgda_step>>> {
        // Each of its waits has a deadline of its own.
        let patience = PATIENCE * 4;
        ensure!(
            self.launched.wait(patience)?,
            "the kernel has not ended after {patience:?}"
        );
        let mut steps = vec![ibgda_step::default(); self.blocks * self.each];
        let start = self.memory.address() + size_of::<ibgda_task>() as u64;
        let len = steps.len() * STEP;
        // SAFETY: integers without padding; nothing else refers to them.
        let bytes = unsafe { slice::from_raw_parts_mut(steps.as_mut_ptr().cast(), len) };
        // SAFETY: inside the memory.
        unsafe { self.processor.read(start, bytes) }?;
        Ok(steps.chunks(self.each).map(<[_]>::to_vec).collect())
    }
}

/// That every step of a list was reached and succeeded.
pub fn all_ok(steps: &[ibgda_step]) -> Result<()> {
    for (at, step) in steps.iter().enumerate() {
        ensure!(step.done == 1, "step {at} was not reached");
        ensure!(
            step.status == 0,
            "step {at} (kind {}) ended in {}",
            step.kind,
            Status(step.status)
        );
    }
    Ok(())
}

/// That a step was reached and ended so.
pub fn ended_in(step: &ibgda_step, status: Status) -> Result<()> {
    ensure!(
        step.done == 1 && Status(step.status) == status,
        "the kernel returned {:?}, not {status:?}",
        Status(step.status)
    );
    Ok(())
}
