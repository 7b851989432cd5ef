// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two paths with the same memory each, and what should be in it after each request.

use super::verbs::{Path, Side, Verb};
use crate::{
    choice::Choice,
    ends::{self, End},
    pattern,
    poster::{Job, Poster},
};
use anyhow::{Context as _, Result, bail, ensure};
use ibgda::{QueuePair, Route, Status};
use ibgda_device::{
    abi::IBGDA_MAX_INLINE_BYTES,
    kernels::requests::{ibgda_request, ibgda_request_kind as kind},
};
use std::{fmt, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Write,
    WriteInline,
    Read,
    FetchAdd,
    CompareSwap,
}

const KINDS: [Kind; 5] = [
    Kind::Write,
    Kind::WriteInline,
    Kind::Read,
    Kind::FetchAdd,
    Kind::CompareSwap,
];

/// One request, for both paths.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: Kind,
    /// Offset at the far end.
    far: usize,
    length: usize,
    /// What goes there; of an atomic the operand.
    data: Vec<u8>,
    /// Whether a compare-and-swap is to find what it compares with.
    hits: bool,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} of {} bytes at offset {}",
            self.kind, self.length, self.far
        )
    }
}

/// Messages go from and come to this offset of the near memory.
const NEAR: usize = 0;

/// Both paths.
pub struct Lanes {
    near: End,
    far: End,
    path: Path,
    /// What the far memory of both should hold.
    expected: Vec<u8>,
    /// Length of the longest message.
    longest: usize,
    timeout: Duration,
    compared: u64,
    checks: u64,
}

/// How often the whole of both memories is compared, besides what a request touched.
const WHOLE: u64 = 64;

impl Lanes {
    /// Opens both NICs twice: by libibgda, and by libibverbs.
    pub fn open(choice: &Choice, longest: u64, timeout: Duration) -> Result<Self> {
        // Room for messages to lie at many places.
        let length = (2 * longest).max(64 << 10);
        let options = ends::options(0, timeout);
        let open = |nic: &str, length| {
            End::open(choice, nic, length, 1, &options).with_context(|| format!("NIC {nic}"))
        };
        let (near, far) = (open(&choice.nic, longest)?, open(&choice.peer_nic, length)?);
        ends::join(&near, &far)?;
        let names = [near.context.device_name(), far.context.device_name()];
        let path = Path::open(
            names,
            [longest as usize, length as usize],
            IBGDA_MAX_INLINE_BYTES,
            timeout,
        )
        .context("the CPU's path")?;
        let expected = pattern::bytes(1, length as usize);
        far.region.write(0, &expected)?;
        path.write(Side::Far, 0, &expected)?;
        Ok(Self {
            near,
            far,
            path,
            expected,
            longest: longest as usize,
            timeout,
            compared: 0,
            checks: 0,
        })
    }

    /// The queue pair of the GPU's path.
    pub fn qp(&self) -> &QueuePair {
        &self.near.qps[0]
    }

    /// The two NICs.
    pub fn names(&self) -> [&str; 2] {
        [
            self.near.context.device_name(),
            self.far.context.device_name(),
        ]
    }

    /// The GPU's path's route.
    pub fn route(&self) -> Route {
        self.near.context.route()
    }

    /// Bytes that were compared.
    pub fn compared(&self) -> u64 {
        self.compared
    }

    /// Where the destinations are, for whoever debugs this process.
    pub fn places(&self) -> String {
        format!(
            "destinations of {} bytes: of the CPU's path at {:#x}, of the GPU's at {:#x}",
            self.expected.len(),
            self.path.address(Side::Far),
            self.far.region.address()
        )
    }

    /// A random request.
    pub fn plan(&self, random: &mut fastrand::Rng) -> Request {
        let kind = KINDS[random.usize(..KINDS.len())];
        let longest = match kind {
            Kind::WriteInline => self.longest.min(IBGDA_MAX_INLINE_BYTES as usize),
            Kind::FetchAdd | Kind::CompareSwap => 8,
            _ => self.longest,
        };
        let (length, far) = match kind {
            Kind::FetchAdd | Kind::CompareSwap => (8, 8 * random.usize(..self.expected.len() / 8)),
            _ => {
                // As many short ones as long ones.
                let most = random.usize(0..=longest.ilog2() as usize);
                let length = random.usize(1..=(2 << most).min(longest));
                (length, random.usize(0..=self.expected.len() - length))
            }
        };
        let mut data = vec![0; length];
        random.fill(&mut data);
        Request {
            kind,
            far,
            length,
            data,
            hits: random.bool(),
        }
    }

    fn word(&self, at: usize) -> u64 {
        let bytes = self.expected[at..at + 8].try_into();
        u64::from_ne_bytes(bytes.expect("eight bytes"))
    }

    /// Sends it by both paths and changes what is expected; the times by the CPU's and the GPU's, ns.
    pub fn send_both(
        &mut self,
        poster: &Poster,
        request: &Request,
        cpu_first: bool,
    ) -> Result<[u64; 2]> {
        let before = match request.kind {
            Kind::Write | Kind::WriteInline => request.data.clone(),
            // What comes back differs from what is there in every byte.
            _ => pattern::inverse(&self.expected[request.far..request.far + request.length]),
        };
        self.near.region.write(NEAR, &before)?;
        self.path.write(Side::Near, NEAR, &before)?;
        let times = if cpu_first {
            let cpu = self.by_cpu(request)?;
            [cpu, self.by_gpu(poster, request)?]
        } else {
            let gpu = self.by_gpu(poster, request)?;
            [self.by_cpu(request)?, gpu]
        };
        Ok(times)
    }

    /// Operand and comparand of an atomic.
    fn operands(&self, request: &Request) -> (u64, u64) {
        let operand = u64::from_ne_bytes(request.data[..8].try_into().expect("eight bytes"));
        let there = self.word(request.far);
        (operand, if request.hits { there } else { !there })
    }

    fn by_cpu(&mut self, request: &Request) -> Result<u64> {
        let verb = match request.kind {
            Kind::Write => Verb::Write,
            Kind::WriteInline => Verb::WriteInline,
            Kind::Read => Verb::Read,
            Kind::FetchAdd => Verb::FetchAdd {
                add: self.operands(request).0,
            },
            Kind::CompareSwap => {
                let (swap, compare) = self.operands(request);
                Verb::CompareSwap { compare, swap }
            }
        };
        let length = request.length as u32;
        let took = self
            .path
            .send(verb, NEAR as u64, request.far as u64, length);
        Ok(took.context("by the CPU's path")?.as_nanos() as u64)
    }

    fn by_gpu(&mut self, poster: &Poster, request: &Request) -> Result<u64> {
        let (near, far) = (self.near.region.region(), self.far.region.region());
        let mut raw = ibgda_request {
            local: near.address + NEAR as u64,
            lkey: near.lkey,
            remote: far.address + request.far as u64,
            rkey: far.rkey,
            bytes: request.length as u32,
            wait: 1,
            ..Default::default()
        };
        raw.kind = match request.kind {
            Kind::Write => kind::IBGDA_REQUEST_PUT,
            Kind::WriteInline => {
                raw.data[..request.length].copy_from_slice(&request.data);
                kind::IBGDA_REQUEST_PUT_INLINE
            }
            Kind::Read => kind::IBGDA_REQUEST_GET,
            Kind::FetchAdd => {
                raw.value = self.operands(request).0;
                kind::IBGDA_REQUEST_FETCH_ADD
            }
            Kind::CompareSwap => {
                (raw.value, raw.compare) = self.operands(request);
                kind::IBGDA_REQUEST_COMPARE_SWAP
            }
        };
        let mut requests = [raw];
        let ended = poster.jobs(
            &mut [Job {
                qp: &mut self.near.qps[0],
                requests: &mut requests,
            }],
            self.timeout,
        )?[0];
        ensure!(
            ended.status == Status::OK,
            "by the GPU's path: {}",
            poster.explain(&self.near.qps[0], ended.status)
        );
        Ok(requests[0].ended_ns.saturating_sub(requests[0].begun_ns))
    }

    /// Compares what came back, and what is there, with what should be. To be called once after each request.
    pub fn check(&mut self, request: &Request) -> Result<()> {
        let there = request.far..request.far + request.length;
        let old = self.expected[there.clone()].to_vec();
        match request.kind {
            Kind::Write | Kind::WriteInline => {
                self.expected[there.clone()].copy_from_slice(&request.data);
            }
            Kind::Read => {}
            Kind::FetchAdd => {
                let sum = self
                    .word(request.far)
                    .wrapping_add(self.operands(request).0);
                self.expected[there.clone()].copy_from_slice(&sum.to_ne_bytes());
            }
            Kind::CompareSwap => {
                if request.hits {
                    self.expected[there.clone()].copy_from_slice(&request.data[..8]);
                }
            }
        }
        let near = match request.kind {
            Kind::Write | Kind::WriteInline => &request.data,
            _ => &old,
        };
        let mut seen = [vec![0; request.length], vec![0; request.length]];
        self.path.read(Side::Near, NEAR, &mut seen[0])?;
        self.near.region.read(NEAR, &mut seen[1])?;
        same(&seen, near, "near", NEAR)?;
        self.path.read(Side::Far, request.far, &mut seen[0])?;
        self.far.region.read(request.far, &mut seen[1])?;
        same(&seen, &self.expected[there], "far", request.far)?;
        self.compared += 4 * request.length as u64;
        self.checks += 1;
        if self.checks % WHOLE == 0 {
            self.check_all()?;
        }
        Ok(())
    }

    /// The whole far memory of both.
    pub fn check_all(&mut self) -> Result<()> {
        let mut seen = [vec![0; self.expected.len()], vec![0; self.expected.len()]];
        self.path.read(Side::Far, 0, &mut seen[0])?;
        self.far.region.read(0, &mut seen[1])?;
        same(&seen, &self.expected, "far", 0)?;
        self.compared += 2 * self.expected.len() as u64;
        Ok(())
    }
}

/// An error that says where either differs from what is expected.
fn same(seen: &[Vec<u8>; 2], expected: &[u8], memory: &str, offset: usize) -> Result<()> {
    let [cpu, gpu] = seen;
    let first = [cpu, gpu].map(|seen| pattern::difference(seen, expected));
    let Some(at) = first.into_iter().flatten().min() else {
        return Ok(());
    };
    bail!(
        "offset {} of the {memory} memory should be {:#04x}; by the CPU's path it is {:#04x}, by the GPU's {:#04x}",
        offset + at,
        expected[at],
        cpu[at],
        gpu[at]
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_in_either_is_named() {
        let expected = pattern::bytes(9, 64);
        let both = || [expected.clone(), expected.clone()];
        same(&both(), &expected, "far", 0).expect("equal");
        for lane in 0..2 {
            let mut seen = both();
            seen[lane][40] ^= 0xff;
            let error = same(&seen, &expected, "far", 100).expect_err("differs");
            let error = error.to_string();
            assert!(
                error.starts_with("offset 140 of the far memory should be"),
                "{error}"
            );
            let wrong = format!("{:#04x}", !expected[40]);
            assert_eq!(error.matches(&wrong).count(), 1, "{error}");
        }
    }
}
