// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel of `kernels/ring.cu`, and the window that it works in.

use ibgda_communicator::{Communicator, Error, HEADER_BYTES, Kernel, Loaded, Result, View};

/// `struct ring_call`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Call {
    count: u64,
    chunk: u64,
    messages: u64,
    staged: u64,
    staging: u64,
    timeout_ns: u64,
    slots: u32,
    kind: u32,
}

const _: () = assert!(size_of::<Call>() == 56);

/// `sizeof(struct ring_words)`.
const WORDS_BYTES: usize = 128;
/// Bytes of an element, of either type.
pub const ELEMENT_BYTES: usize = 4;
const PAGE_BYTES: usize = 4096;

unsafe extern "C" {
    fn all_reduce_ring(view: View, call: Call);
}

const KERNEL: Kernel<Call> = Kernel {
    name: "all_reduce_ring",
    source: concat!(
        include_str!("../../communicator-rust/kernels/team.cuh"),
        include_str!("../kernels/ring.cu")
    ),
    image: match IMAGE {
        Some(image) => Some(image),
        None => None,
    },
    threads: 256,
    cpu: all_reduce_ring,
};

/// What nvcc made of the kernel when this program was built; `None` where NVCC named no nvcc.
const IMAGE: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/image.rs"));

/// Who compiled the kernel for GPUs.
pub const COMPILER: &str = if IMAGE.is_some() { "nvcc" } else { "NVRTC" };

/// What is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Type {
    /// 32-bit integers, which wrap.
    U32,
    /// Floats, in the order of the ring.
    F32,
}

/// How large things are.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Elements of the vector.
    pub count: usize,
    /// Elements of a chunk.
    pub chunk: usize,
    /// Chunks that may be on the way to a rank before it has added them.
    pub slots: u32,
}

impl Shape {
    /// Refuses what the kernel cannot do.
    ///
    /// # Errors
    /// Says which value, and its range.
    pub fn check(self) -> Result<Self> {
        let one = |name: &str, value: usize, most: usize| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::Argument(format!(
                "--{name} {value}: must be 1 to {most}"
            )))
        };
        one("elements", self.count, 1 << 28)?;
        one("chunk", self.chunk, 1 << 24)?;
        // One request is posted for each slot, and its signal, and the ring has to hold them.
        one("slots", self.slots as usize, 16)?;
        Ok(self)
    }

    /// Where the staging slots begin, from the beginning of the rank's own part of the window.
    fn staging(self) -> usize {
        (WORDS_BYTES + self.count * ELEMENT_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of the rank's own part of the window.
    pub fn window_bytes(self) -> usize {
        self.staging() + self.slots as usize * self.chunk * ELEMENT_BYTES
    }

    /// Messages that a rank sends through staging in one call, among `size` ranks.
    fn staged(self, size: usize) -> u64 {
        ((size - 1) * self.count.div_ceil(size).div_ceil(self.chunk)) as u64
    }
}

/// A ring of ranks, whose windows have the shape.
#[derive(Debug)]
pub struct Ring<'a> {
    communicator: Communicator<'a>,
    kernel: Loaded<Call>,
    shape: Shape,
    calls: u64,
}

impl<'a> Ring<'a> {
    /// Loads the kernel; all ranks of a process do so before any of them reduces.
    ///
    /// # Errors
    /// CUDA's, NVRTC's.
    pub fn new(communicator: Communicator<'a>, shape: Shape) -> Result<Self> {
        Ok(Self {
            kernel: communicator.load(&KERNEL)?,
            communicator,
            shape,
            calls: 0,
        })
    }

    /// The ranks.
    pub fn communicator(&mut self) -> &mut Communicator<'a> {
        &mut self.communicator
    }

    /// Gives the vector up to the ring, as bytes, and gets the sum of all ranks' in its place. All ranks call it.
    ///
    /// # Errors
    /// The length is another; a rank is gone; the kernel's.
    pub fn all_reduce(&mut self, kind: Type, vector: &mut [u8]) -> Result<()> {
        let bytes = self.shape.count * ELEMENT_BYTES;
        if vector.len() != bytes {
            return Err(Error::Argument(format!(
                "a vector of {} bytes, not {bytes}",
                vector.len()
            )));
        }
        let team = self.communicator.team();
        let staged = self.shape.staged(usize::from(team.size()));
        let call = Call {
            count: self.shape.count as u64,
            chunk: self.shape.chunk as u64,
            messages: self.calls * 2 * staged,
            staged: self.calls * staged,
            staging: (HEADER_BYTES + self.shape.staging()) as u64,
            timeout_ns: team.patience().as_nanos() as u64,
            slots: self.shape.slots,
            kind: u32::from(kind == Type::F32),
        };
        self.communicator.write(WORDS_BYTES, vector)?;
        // SAFETY: it is the kernel that takes this structure, and the window is as it says.
        unsafe { self.communicator.run(&self.kernel, call) }?;
        self.calls += 1;
        self.communicator.read(WORDS_BYTES, vector)
    }

    /// Ends when all ranks do.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn finish(self) -> Result<()> {
        self.communicator.finish()
    }
}
