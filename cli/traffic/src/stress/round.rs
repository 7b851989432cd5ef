// SPDX-License-Identifier: MIT OR Apache-2.0
//! One round of one queue pair: random requests, and what all memory they touch should be after them.

use super::report::Mismatch;
use crate::pattern;
use anyhow::Result;
use ibgda::{MemoryRegion, abi::ibgda_region};
use ibgda_device::{
    abi::{IBGDA_FENCED, IBGDA_MAX_INLINE_BYTES, IBGDA_UNSIGNALED},
    kernels::requests::{ibgda_request, ibgda_request_kind as kind},
};
use std::{fmt::Write as _, ops::Range};

/// Requests of a round, if there is room for what they bring.
const REQUESTS: usize = 96;
/// Receives of a round, and the longest message that they take.
pub const RECEIVES: usize = 16;
const RECEIVE_BYTES: u64 = 4096;
const WORDS: u64 = 64;

/// Names of kinds, by their number.
pub const KINDS: [&str; 7] = [
    "put",
    "put-inline",
    "put-signal",
    "get",
    "fetch-add",
    "compare-swap",
    "send",
];

/// Where things lie in the part of a region that is one queue pair's.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    longest: u64,
}

impl Layout {
    /// For messages of up to so many bytes.
    pub fn new(longest: u64) -> Self {
        Self {
            longest: longest.next_multiple_of(64),
        }
    }

    /// Where puts come from, and go to: room for several of the longest.
    fn data(self) -> Range<u64> {
        0..(4 * self.longest).max(1 << 16)
    }

    /// Near: where gets and old words land. Far: what gets read.
    fn fetched(self) -> Range<u64> {
        let start = self.data().end;
        start..start + (4 * self.longest).max(1 << 15)
    }

    fn words(self) -> Range<u64> {
        let start = self.fetched().end;
        start..start + 8 * WORDS
    }

    fn signal(self) -> u64 {
        self.words().end
    }

    fn receives(self) -> Range<u64> {
        let start = self.signal() + 64;
        start..start + RECEIVES as u64 * RECEIVE_BYTES
    }

    /// Bytes of one queue pair, at either end.
    pub fn bytes(self) -> u64 {
        self.receives().end.next_multiple_of(4096)
    }
}

/// What should be in a piece of memory, by whom.
#[derive(Debug)]
struct Piece {
    far: bool,
    at: Range<u64>,
    request: usize,
}

/// One queue pair's memory at both ends, as it should be, and the requests of the round under way.
#[derive(Debug)]
pub struct Round {
    layout: Layout,
    /// Where its part begins in both regions.
    base: u64,
    near: Vec<u8>,
    far: Vec<u8>,
    pieces: Vec<Piece>,
    pub requests: Vec<ibgda_request>,
    /// Receives to post at the far end, and as many completions to take there.
    pub posts: Vec<ibgda_request>,
    pub polls: Vec<ibgda_request>,
    sent: Vec<u32>,
    pub bytes: u64,
}

fn range(at: &Range<u64>) -> Range<usize> {
    at.start as usize..at.end as usize
}

impl Round {
    /// The `index`th queue pair's.
    pub fn new(layout: Layout, index: usize) -> Self {
        let length = layout.bytes() as usize;
        Self {
            layout,
            base: index as u64 * layout.bytes(),
            near: vec![0; length],
            far: vec![0; length],
            pieces: Vec::new(),
            requests: Vec::new(),
            posts: Vec::new(),
            polls: Vec::new(),
            sent: Vec::new(),
            bytes: 0,
        }
    }

    /// Fills both ends with new data and makes the requests.
    pub fn plan(
        &mut self,
        random: &mut fastrand::Rng,
        near: &MemoryRegion,
        far: &MemoryRegion,
    ) -> Result<()> {
        random.fill(&mut self.near);
        random.fill(&mut self.far);
        near.write(self.base as usize, &self.near)?;
        far.write(self.base as usize, &self.far)?;
        self.requests.clear();
        self.pieces.clear();
        self.posts.clear();
        self.polls.clear();
        self.sent.clear();
        self.bytes = 0;
        let mut landing = self.layout.fetched();
        for _ in 0..REQUESTS {
            self.add(random, &near.region(), &far.region(), &mut landing);
        }
        Ok(())
    }

    fn add(
        &mut self,
        random: &mut fastrand::Rng,
        near: &ibgda_region,
        far: &ibgda_region,
        landing: &mut Range<u64>,
    ) {
        let (layout, index) = (self.layout, self.requests.len());
        let kind = random.u32(..KINDS.len() as u32);
        let longest = match kind {
            kind::IBGDA_REQUEST_PUT_INLINE => u64::from(IBGDA_MAX_INLINE_BYTES),
            kind::IBGDA_REQUEST_FETCH_ADD | kind::IBGDA_REQUEST_COMPARE_SWAP => 8,
            kind::IBGDA_REQUEST_SEND => layout.longest.min(RECEIVE_BYTES),
            _ => layout.longest,
        };
        let mut bytes = length(random, longest);
        let mut request = ibgda_request {
            kind,
            lkey: near.lkey,
            rkey: far.rkey,
            ..Default::default()
        };
        let (near_base, far_base) = (near.address + self.base, far.address + self.base);
        let place = |random: &mut fastrand::Rng, area: Range<u64>, bytes: u64| {
            let start = random.u64(area.start..=area.end - bytes);
            start..start + bytes
        };
        match kind {
            kind::IBGDA_REQUEST_PUT
            | kind::IBGDA_REQUEST_PUT_INLINE
            | kind::IBGDA_REQUEST_PUT_SIGNAL => {
                let to = place(random, layout.data(), bytes);
                if kind == kind::IBGDA_REQUEST_PUT_INLINE {
                    random.fill(&mut request.data[..bytes as usize]);
                    self.far[range(&to)].copy_from_slice(&request.data[..bytes as usize]);
                } else {
                    let from = place(random, layout.data(), bytes);
                    request.local = near_base + from.start;
                    self.far[range(&to)].copy_from_slice(&self.near[range(&from)]);
                }
                request.remote = far_base + to.start;
                self.touch(true, to, index);
                if kind == kind::IBGDA_REQUEST_PUT_SIGNAL {
                    let signal = layout.signal()..layout.signal() + 8;
                    request.signal = far_base + signal.start;
                    request.value = random.u64(..);
                    self.far[range(&signal)].copy_from_slice(&request.value.to_ne_bytes());
                    self.touch(true, signal, index);
                }
            }
            kind::IBGDA_REQUEST_GET
            | kind::IBGDA_REQUEST_FETCH_ADD
            | kind::IBGDA_REQUEST_COMPARE_SWAP => {
                if landing.end - landing.start < bytes.next_multiple_of(8) {
                    return;
                }
                let from = if kind == kind::IBGDA_REQUEST_GET {
                    place(random, layout.fetched(), bytes)
                } else {
                    bytes = 8;
                    let word = layout.words().start + 8 * random.u64(..WORDS);
                    word..word + 8
                };
                let to = landing.start..landing.start + bytes;
                landing.start += bytes.next_multiple_of(8);
                self.near[range(&to)].copy_from_slice(&self.far[range(&from)]);
                request.local = near_base + to.start;
                request.remote = far_base + from.start;
                self.touch(false, to, index);
                if kind != kind::IBGDA_REQUEST_GET {
                    self.swap(random, &mut request, &from);
                    self.touch(true, from, index);
                }
            }
            _ => {
                let slot = self.sent.len();
                if slot == RECEIVES {
                    return;
                }
                let start = layout.receives().start + slot as u64 * RECEIVE_BYTES;
                let (from, to) = (place(random, layout.data(), bytes), start..start + bytes);
                request.local = near_base + from.start;
                self.far[range(&to)].copy_from_slice(&self.near[range(&from)]);
                self.touch(true, to, index);
                self.sent.push(bytes as u32);
                self.posts.push(ibgda_request {
                    kind: kind::IBGDA_REQUEST_RECV,
                    local: far_base + start,
                    lkey: far.lkey,
                    bytes: RECEIVE_BYTES as u32,
                    ..Default::default()
                });
                self.polls.push(ibgda_request {
                    kind: kind::IBGDA_REQUEST_POLL_RECV,
                    ..Default::default()
                });
            }
        }
        request.bytes = bytes as u32;
        // What has no completion of its own cannot be waited for.
        if random.u8(..) < 64 {
            request.flags |= IBGDA_UNSIGNALED;
        } else if random.u8(..) < 32 {
            request.wait = 1;
        }
        if random.u8(..) < 32 {
            request.flags |= IBGDA_FENCED;
        }
        self.bytes += bytes;
        self.requests.push(request);
    }

    /// Makes an atomic of a request, and does it to the word that should be.
    fn swap(&mut self, random: &mut fastrand::Rng, request: &mut ibgda_request, word: &Range<u64>) {
        let place = range(word);
        let old = u64::from_ne_bytes(self.far[place.clone()].try_into().expect("a word"));
        request.value = random.u64(..);
        let new = if request.kind == kind::IBGDA_REQUEST_FETCH_ADD {
            old.wrapping_add(request.value)
        } else if random.bool() {
            request.compare = old;
            request.value
        } else {
            request.compare = !old;
            old
        };
        self.far[place].copy_from_slice(&new.to_ne_bytes());
    }

    fn touch(&mut self, far: bool, at: Range<u64>, request: usize) {
        self.pieces.push(Piece { far, at, request });
    }

    /// Compares all of both ends, after all requests are complete.
    pub fn check(
        &self,
        qp: u32,
        near: &MemoryRegion,
        far: &MemoryRegion,
    ) -> Result<Option<Mismatch>> {
        for (region, expected, is_far) in [(far, &self.far, true), (near, &self.near, false)] {
            let mut seen = vec![0; expected.len()];
            region.read(self.base as usize, &mut seen)?;
            if let Some(at) = pattern::difference(&seen, expected) {
                let address = region.address() + self.base + at as u64;
                return Ok(Some(
                    self.mismatch(qp, is_far, at, address, &seen, expected),
                ));
            }
        }
        for (slot, (poll, &bytes)) in self.polls.iter().zip(&self.sent).enumerate() {
            if poll.received != bytes {
                return Ok(Some(Mismatch {
                    qp,
                    wqe_index: Some(poll.index),
                    request: Some(format!("receive {slot} of the round")),
                    memory: "length of a message, not of".into(),
                    offset: 0,
                    address: 0,
                    expected: format!("{bytes} bytes"),
                    seen: format!("{} bytes", poll.received),
                }));
            }
        }
        Ok(None)
    }

    fn mismatch(
        &self,
        qp: u32,
        far: bool,
        at: usize,
        address: u64,
        seen: &[u8],
        expected: &[u8],
    ) -> Mismatch {
        let covers = |piece: &&Piece| piece.far == far && piece.at.contains(&(at as u64));
        // The last that wrote there.
        let piece = self.pieces.iter().rev().find(covers);
        let request = piece.map(|piece| &self.requests[piece.request]);
        let shown = at..expected.len().min(at + 16);
        Mismatch {
            qp,
            wqe_index: request.map(|request| request.index),
            request: request.map(describe),
            memory: if far { "far" } else { "near" }.into(),
            offset: self.base + at as u64,
            address,
            expected: hex(&expected[shown.clone()]),
            seen: hex(&seen[shown]),
        }
    }

    /// The request of a WQE.
    pub fn request_of(&self, wqe_index: u64) -> Option<String> {
        let request = self.requests.iter().find(|r| r.index == wqe_index);
        request.map(describe)
    }

    /// How many of each kind.
    pub fn kinds(&self) -> impl Iterator<Item = &'static str> {
        self.requests
            .iter()
            .map(|request| KINDS[request.kind as usize])
    }
}

/// What a request is.
pub fn describe(request: &ibgda_request) -> String {
    let kind = KINDS.get(request.kind as usize).unwrap_or(&"request");
    format!("{kind} of {} bytes", request.bytes)
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// 1 to `longest`, as many short ones as long ones.
fn length(random: &mut fastrand::Rng, longest: u64) -> u64 {
    let log = random.u32(0..=longest.ilog2());
    random.u64(1..=(2u64 << log).min(longest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ibgda::{Access, Context, OpenOptions, Route};

    fn region(context: &Context, layout: Layout) -> MemoryRegion {
        let bytes = 2 * layout.bytes() as usize;
        context.alloc(bytes, Access::all()).expect("memory")
    }

    fn loopback() -> Context {
        let gpu = "0000:00:00.0".parse().expect("an address");
        Context::open(&OpenOptions {
            route: Route::Loopback,
            ..OpenOptions::new("loopback3", gpu)
        })
        .expect("the model")
    }

    #[test]
    fn a_layout_has_no_overlaps_and_room_for_the_longest() {
        for longest in [8, 100, 4096, 1 << 20] {
            let layout = Layout::new(longest);
            let parts = [
                layout.data(),
                layout.fetched(),
                layout.words(),
                layout.signal()..layout.signal() + 8,
                layout.receives(),
            ];
            for pair in parts.windows(2) {
                assert!(pair[0].end <= pair[1].start, "{parts:?}");
            }
            assert!(layout.data().end >= 4 * longest && layout.receives().end <= layout.bytes());
            assert_eq!(layout.signal() % 8 + layout.words().start % 8, 0);
        }
    }

    #[test]
    fn requests_are_those_of_the_seed_and_stay_inside() {
        let (context, layout) = (loopback(), Layout::new(5000));
        let (near, far) = (region(&context, layout), region(&context, layout));
        let mut kinds = [0; KINDS.len()];
        let mut round = Round::new(layout, 1);
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..20 {
            round.plan(&mut random, &near, &far).expect("planned");
            assert!(round.requests.len() <= REQUESTS && round.sent.len() <= RECEIVES);
            for request in &round.requests {
                kinds[request.kind as usize] += 1;
                let own = |region: &MemoryRegion| {
                    let start = region.address() + layout.bytes();
                    start..start + layout.bytes()
                };
                let bytes = u64::from(request.bytes);
                if request.kind != kind::IBGDA_REQUEST_PUT_INLINE {
                    assert!(own(&near).contains(&request.local), "{request:?}");
                    assert!(own(&near).contains(&(request.local + bytes - 1)));
                }
                assert!(request.wait == 0 || request.flags & IBGDA_UNSIGNALED == 0);
                if request.kind != kind::IBGDA_REQUEST_SEND {
                    assert!(own(&far).contains(&request.remote), "{request:?}");
                    assert!(own(&far).contains(&(request.remote + bytes - 1)));
                }
            }
        }
        assert!(kinds.iter().all(|&count| count > 50), "{kinds:?}");
        let mut again = Round::new(layout, 1);
        again
            .plan(&mut fastrand::Rng::with_seed(5), &near, &far)
            .expect("planned");
        let mut first = Round::new(layout, 1);
        first
            .plan(&mut fastrand::Rng::with_seed(5), &near, &far)
            .expect("planned");
        assert_eq!(first.requests, again.requests);
        assert_eq!(first.far, again.far);
    }

    #[test]
    fn a_byte_that_is_wrong_is_named_with_the_last_request_that_wrote_it() {
        let (context, layout) = (loopback(), Layout::new(256));
        let (near, far) = (region(&context, layout), region(&context, layout));
        let mut round = Round::new(layout, 1);
        round
            .plan(&mut fastrand::Rng::with_seed(1), &near, &far)
            .expect("planned");
        for (index, request) in round.requests.iter_mut().enumerate() {
            request.index = 1000 + index as u64;
        }
        // As if all had been done.
        let base = layout.bytes() as usize;
        near.write(base, &round.near).expect("near");
        far.write(base, &round.far).expect("far");
        for (poll, &bytes) in round.polls.iter_mut().zip(&round.sent) {
            poll.received = bytes;
        }
        assert_eq!(round.check(7, &near, &far).expect("read"), None);
        let piece = round.pieces.iter().rev().find(|piece| piece.far);
        let piece = piece.expect("something was put");
        let (at, request) = (piece.at.start as usize, piece.request);
        far.write(base + at, &[!round.far[at]]).expect("far");
        let wrong = round.check(7, &near, &far).expect("read");
        let wrong = wrong.expect("it is seen");
        assert_eq!(wrong.offset as usize, base + at);
        assert_eq!(wrong.address, far.address() + wrong.offset);
        assert_eq!(wrong.wqe_index, Some(1000 + request as u64));
        assert!(
            wrong.words().starts_with("QP 0x7: WQE 10") && wrong.words().contains("far memory"),
            "{}",
            wrong.words()
        );
        assert_eq!(wrong.expected[..2], format!("{:02x}", round.far[at]));
        assert_eq!(wrong.seen[..2], format!("{:02x}", !round.far[at]));

        far.write(base, &round.far).expect("far");
        // What nobody touches: the padding behind the signal.
        let at = layout.signal() as usize + 20;
        far.write(base + at, &[!round.far[at]]).expect("far");
        let wrong = round.check(7, &near, &far).expect("read").expect("seen");
        assert_eq!(wrong.wqe_index, None);
        assert!(wrong.words().contains("no request"), "{}", wrong.words());

        far.write(base, &round.far).expect("far");
        round.polls[0].received += 1;
        let wrong = round.check(7, &near, &far).expect("read").expect("seen");
        assert!(wrong.words().contains("length of a message"));
    }
}
