// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows, QPs to every peer, and what is done with them.

use crate::{
    error::{Error, Result},
    processor::{Kernel, Loaded, Processor},
    team::Team,
    view::{ABORTED, HEADER_BYTES, MOST_RANKS, Outcome, View},
};
use ibgda::{
    ADDRESS_BYTES, Access, Bdf, Context, MemoryRegion, OpenOptions, QpAddress, QueuePair,
    QueuePairOptions, Route, Status, abi::ibgda_region,
};
use std::{sync::Arc, time::Duration};

/// What a rank needs to know of its own machine.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its NIC: a verbs device or a PCI address; on the loopback route `loopback0` and on.
    pub nic: String,
    /// Its GPU. The loopback route does not look at it.
    pub gpu: Bdf,
    /// How doorbells get to the NIC.
    pub route: Route,
    /// Bytes of its window, which peers write into.
    pub window_bytes: usize,
}

/// Send queue slots of each QP: what is under way to one peer at a time.
const SEND_DEPTH: u32 = 64;
/// How long the cause of an error may take to be heard of: that a rank is gone says more than that its QP does not answer.
const CAUSE: Duration = Duration::from_secs(1);

/// `struct exchange_call` of `kernels/exchange.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ExchangeCall {
    round: u64,
    block_bytes: u64,
    timeout_ns: u64,
}

unsafe extern "C" {
    fn communicator_all_to_all(view: View, call: ExchangeCall);
    fn communicator_barrier(view: View, call: ExchangeCall);
}

const SOURCE: &str = concat!(
    include_str!("../kernels/team.cuh"),
    include_str!("../kernels/exchange.cu")
);

const fn one_thread(
    name: &'static str,
    cpu: unsafe extern "C" fn(View, ExchangeCall),
) -> Kernel<ExchangeCall> {
    Kernel {
        name,
        source: SOURCE,
        image: None,
        threads: 1,
        cpu,
    }
}

const ALL_TO_ALL: Kernel<ExchangeCall> =
    one_thread("communicator_all_to_all", communicator_all_to_all);
const BARRIER: Kernel<ExchangeCall> = one_thread("communicator_barrier", communicator_barrier);

/// A rank with its NIC, connected to all others.
#[derive(Debug)]
pub struct Communicator<'a> {
    team: &'a Team,
    processor: Processor,
    all_to_all: Arc<Loaded<ExchangeCall>>,
    barrier: Arc<Loaded<ExchangeCall>>,
    rounds: u64,
    barriers: u64,
    view: View,
    // Before the memory that they move, and that before its context.
    qps: Vec<Option<QueuePair>>,
    region: Arc<MemoryRegion>,
    context: Context,
}

impl<'a> Communicator<'a> {
    /// Opens the NIC and connects to every peer. All ranks call it.
    ///
    /// # Errors
    /// libibgda's, CUDA's; a rank that is gone, or whose card makes no sense.
    pub fn new(team: &'a Team, processor: &Processor, options: &Options) -> Result<Self> {
        let context = Context::open(&OpenOptions {
            route: options.route,
            ..OpenOptions::new(&options.nic, options.gpu)
        })?;
        let bytes = HEADER_BYTES + options.window_bytes;
        let region = Arc::new(context.alloc(bytes, Access::WRITE)?);
        let (rank, size) = (usize::from(team.rank()), usize::from(team.size()));
        let mut qps = Vec::new();
        for peer in 0..size {
            let qp = || -> Result<_> {
                let cq = context.create_cq(SEND_DEPTH)?;
                let options = QueuePairOptions {
                    send_depth: SEND_DEPTH,
                    access: Access::WRITE,
                    ..QueuePairOptions::default()
                };
                Ok(context.create_qp(&options, &cq, None)?)
            };
            qps.push(if peer == rank { None } else { Some(qp()?) });
        }
        let mut view = View {
            rank: team.rank().into(),
            size: team.size().into(),
            own: pointer(processor, &region)?,
            region: region.region(),
            windows: Default::default(),
            qps: Default::default(),
        };
        for (to, qp) in view.qps.iter_mut().zip(&qps) {
            *to = qp.as_ref().map_or(Ok(0), |qp| handle(processor, qp))?;
        }

        let cards = team.exchange(&card(&region.region(), &qps))?;
        for (peer, card) in cards.iter().enumerate() {
            let address;
            (view.windows[peer], address) = read_card(peer, card, rank, size, bytes)?;
            if let Some(qp) = &qps[peer] {
                qp.connect(&QpAddress::from_bytes(&address)?)?;
            }
        }
        let made = Self {
            team,
            processor: processor.clone(),
            all_to_all: Arc::new(processor.load(&ALL_TO_ALL)?),
            barrier: Arc::new(processor.load(&BARRIER)?),
            rounds: 0,
            barriers: 0,
            view,
            qps,
            region: Arc::clone(&region),
            context,
        };
        // Kernels look at this word in each wait.
        team.on_failure(Some(Box::new(move || {
            let set = region.write(0, &1_u64.to_ne_bytes());
            set.expect("the window has a first word");
        })));
        // Nobody posts before all are connected.
        team.exchange(&[])?;
        Ok(made)
    }

    /// This rank among the others.
    pub fn team(&self) -> &Team {
        self.team
    }

    /// The NIC's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What kernels are given.
    pub fn view(&mut self) -> &mut View {
        &mut self.view
    }

    /// Copies bytes into the own window.
    ///
    /// # Errors
    /// The range is not inside.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        Ok(self
            .region
            .write(HEADER_BYTES.saturating_add(offset), bytes)?)
    }

    /// Copies bytes out of the own window.
    ///
    /// # Errors
    /// The range is not inside.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        Ok(self
            .region
            .read(HEADER_BYTES.saturating_add(offset), bytes)?)
    }

    /// Makes a kernel ready. It may wait until no kernel runs: all ranks of a process load before any of them runs one.
    ///
    /// # Errors
    /// NVRTC's, CUDA's.
    pub fn load<A>(&self, kernel: &Kernel<A>) -> Result<Loaded<A>> {
        self.processor.load(kernel)
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// What the kernel left as its outcome; a rank that is gone, where that is the cause.
    ///
    /// # Safety
    /// `kernel` takes `A`, and writes to no other memory than the windows'.
    pub unsafe fn run<A: Copy + Send>(&mut self, kernel: &Loaded<A>, arguments: A) -> Result<()> {
        if let Some(error) = self.team.failure(Duration::ZERO) {
            return Err(error);
        }
        // A kernel that leaves no outcome has not come to its end.
        self.region.write(Outcome::OFFSET, &[0xff; 16])?;
        // SAFETY: the QPs are this value's, which is borrowed for the kernel alone; the rest is the caller's promise.
        unsafe { kernel.run(self.view, arguments) }?;
        let mut outcome = [0; size_of::<Outcome>()];
        self.region.read(Outcome::OFFSET, &mut outcome)?;
        let outcome = Outcome::parse(outcome);
        if outcome.status == 0 {
            return Ok(());
        }
        // An error of its own is the cause, and the others are to hear of it at once.
        let patience = if outcome.follows() {
            CAUSE
        } else {
            Duration::ZERO
        };
        if let Some(error) = self.team.failure(patience) {
            return Err(error);
        }
        Err(self.fail(Error::Kernel {
            kernel: kernel.name,
            act: outcome.act(),
            peer: outcome.peer,
            status: self.words(outcome),
        }))
    }

    /// Tells the others of an error of this rank, before anything of it is taken down: what a GPU has registered is only given
    /// back when no kernel runs, and theirs end by this.
    #[must_use]
    pub fn fail(&self, error: Error) -> Error {
        self.team.fail(&error.to_string());
        error
    }

    /// The status, and the first error of the QP that it is of.
    fn words(&self, outcome: Outcome) -> String {
        if outcome.status == ABORTED {
            return "told to stop".to_owned();
        }
        let status = Status(outcome.status);
        let qp = self.qps.get(outcome.peer as usize).and_then(Option::as_ref);
        let latched = qp.and_then(|qp| match &self.processor {
            Processor::Cpu => qp.send_cq().error(),
            #[cfg(feature = "cuda")]
            Processor::Gpu(_) => qp.error_on_gpu().ok().flatten(),
        });
        // It says which request it was, and what to do.
        latched.map_or_else(|| status.to_string(), |error| error.to_string())
    }

    /// Sends block p of `out` to rank p, and fills block p of `in` from rank p. The window has all blocks that go out, and
    /// behind them all that come in; what came in is this rank's until its next call. All ranks call it, with one length.
    ///
    /// # Errors
    /// The window is too small; of [`Communicator::run`].
    pub fn all_to_all(&mut self, block_bytes: usize) -> Result<()> {
        let (size, window) = (
            usize::from(self.team.size()),
            self.view.region.length as usize - HEADER_BYTES,
        );
        let needed = block_bytes
            .checked_mul(2 * size)
            .filter(|&bytes| bytes <= window);
        if needed.is_none() || block_bytes == 0 {
            return Err(Error::Argument(format!(
                "blocks of {block_bytes} bytes: 1 to {} fit the window of {window}",
                window / (2 * size)
            )));
        }
        self.rounds += 1;
        let call = self.call(self.rounds, block_bytes);
        let kernel = Arc::clone(&self.all_to_all);
        // SAFETY: it is this crate's kernel, which takes that structure.
        unsafe { self.run(&kernel, call) }
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Of [`Communicator::run`].
    pub fn barrier(&mut self) -> Result<()> {
        self.barriers += 1;
        let call = self.call(self.barriers, 0);
        let kernel = Arc::clone(&self.barrier);
        // SAFETY: as in `all_to_all`.
        unsafe { self.run(&kernel, call) }
    }

    fn call(&self, round: u64, block_bytes: usize) -> ExchangeCall {
        ExchangeCall {
            round,
            block_bytes: block_bytes as u64,
            timeout_ns: self.team.patience().as_nanos() as u64,
        }
    }

    /// Waits until no rank writes to another any more, and ends.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn finish(self) -> Result<()> {
        self.team.exchange(&[]).map(drop)
    }
}

impl Drop for Communicator<'_> {
    fn drop(&mut self) {
        self.team.on_failure(None);
    }
}

/// The window as the processor sees it.
fn pointer(processor: &Processor, region: &MemoryRegion) -> Result<u64> {
    match processor {
        Processor::Cpu => Ok(region.address()),
        #[cfg(feature = "cuda")]
        Processor::Gpu(gpu) => Ok(region.device_pointer_on(gpu)?),
    }
}

fn handle(processor: &Processor, qp: &QueuePair) -> Result<u64> {
    match processor {
        Processor::Cpu => Ok(qp.device_handle().expose_provenance() as u64),
        #[cfg(feature = "cuda")]
        Processor::Gpu(gpu) => Ok(qp.device_handle_on(gpu)?),
    }
}

/// What a rank tells the others: its window, and for each of them the address of its QP to it.
fn card(region: &ibgda_region, qps: &[Option<QueuePair>]) -> Vec<u8> {
    let mut card = [region.address, region.length, region.rkey.into()]
        .map(u64::to_le_bytes)
        .concat();
    for qp in qps {
        card.extend(
            qp.as_ref()
                .map_or([0; ADDRESS_BYTES], |qp| qp.address().to_bytes()),
        );
    }
    card
}

fn read_card(
    peer: usize,
    card: &[u8],
    rank: usize,
    size: usize,
    bytes: usize,
) -> Result<(ibgda_region, [u8; ADDRESS_BYTES])> {
    let wrong = |why: String| Error::Meeting {
        what: format!("the card of rank {peer}"),
        why,
    };
    if card.len() != 24 + size * ADDRESS_BYTES || size > MOST_RANKS {
        return Err(wrong(format!(
            "{} bytes, not {}",
            card.len(),
            24 + size * ADDRESS_BYTES
        )));
    }
    let word = |at: usize| u64::from_le_bytes(card[at..at + 8].try_into().expect("eight bytes"));
    let region = ibgda_region {
        address: word(0),
        length: word(8),
        lkey: 0,
        rkey: word(16) as u32,
    };
    if region.length != bytes as u64 {
        return Err(wrong(format!(
            "its window has {} bytes, this rank's {bytes}",
            region.length
        )));
    }
    let at = 24 + rank * ADDRESS_BYTES;
    let address = card[at..at + ADDRESS_BYTES]
        .try_into()
        .expect("as long as an address");
    Ok((region, address))
}
