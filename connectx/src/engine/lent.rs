// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data of a packet that is being delivered. What is lent goes from the sender's memory to the receiver's without a stop.

use std::cell::Cell;
use std::ops::Range;

use super::completing;
use super::memory::{self, Accessor, Denied, PieceFn, Purpose};
use super::odp;
use super::requester::{accessor, local_failure};
use super::responder;
use super::wqe::part;
use crate::objects::device::{Device, Host, Reach};
use crate::wire::packet::Nak;
use crate::wire::payload::{Lender, Payload};

/// So few bytes are read first: that costs less than to look where they are.
const SMALL: usize = 512;

/// Memory of a sender.
#[derive(Clone, Copy)]
struct Piece {
    bus: u64,
    len: usize,
}

/// Where the data of the packet at hand is.
pub struct Located {
    small: [u8; SMALL],
    pieces: Vec<Piece>,
    reach: Option<Reach>,
    /// The sender's memory was taken away in the middle.
    broken: Cell<bool>,
}

impl Default for Located {
    fn default() -> Self {
        Self {
            small: [0; SMALL],
            pieces: Vec::new(),
            reach: None,
            broken: Cell::new(false),
        }
    }
}

/// Data of a packet, for its receiver.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    source: Source<'a>,
    start: usize,
    len: usize,
}

#[derive(Clone, Copy)]
enum Source<'a> {
    Bytes(&'a [u8]),
    Memory(&'a Located),
}

impl<'a> From<&'a [u8]> for Data<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self {
            source: Source::Bytes(bytes),
            start: 0,
            len: bytes.len(),
        }
    }
}

impl Data<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The data, if it lies in one piece: short data always does.
    pub fn bytes(&self) -> Option<&[u8]> {
        let (bytes, len) = match self.source {
            Source::Bytes(bytes) => (bytes, self.len),
            Source::Memory(_) => return None,
        };
        bytes.get(self.start..self.start + len)
    }

    /// A part of it, as far as there is.
    pub fn part(self, range: Range<usize>) -> Self {
        let start = range.start.min(self.len);
        Self {
            source: self.source,
            start: self.start + start,
            len: range.end.clamp(start, self.len) - start,
        }
    }

    /// A copy of it.
    pub(super) fn to_vec(self) -> Result<Vec<u8>, Denied> {
        let from = match self.source {
            Source::Memory(located) => located,
            Source::Bytes(_) => return self.bytes().map(<[u8]>::to_vec).ok_or(Denied::Bounds),
        };
        let reach = from.reach.as_ref().ok_or(Denied::Sender)?;
        let (mut skip, mut bytes) = (self.start, Vec::with_capacity(self.len));
        for piece in &from.pieces {
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let len = (piece.len - skip).min(self.len - bytes.len());
            let at = piece.bus + skip as u64;
            let lent = reach.at(at).lend(at, len, false, &mut |slice| {
                let done = bytes.len();
                bytes.resize(done + slice.len(), 0);
                slice.copy_to(&mut bytes[done..]);
            });
            if lent.is_err() {
                from.broken.set(true);
                return Err(Denied::Sender);
            }
            skip = 0;
        }
        Ok(bytes)
    }

    /// Writes it to a function's memory.
    pub fn store(&self, host: &Host, bus: u64) -> Result<(), Denied> {
        let from = match self.source {
            Source::Memory(located) => located,
            Source::Bytes(bytes) => {
                let bytes = bytes.get(self.start..self.start + self.len);
                let bytes = bytes.ok_or(Denied::Bounds)?;
                return host.write(bus, bytes).map_err(|_| Denied::Dma);
            }
        };
        let reach = from.reach.as_ref().ok_or(Denied::Sender)?;
        let (mut skip, mut done) = (self.start, 0);
        for piece in &from.pieces {
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let len = (piece.len - skip).min(self.len - done);
            let mut stored = Ok(());
            let at = piece.bus + skip as u64;
            let lent = reach.at(at).lend(at, len, false, &mut |slice| {
                if stored.is_ok() {
                    stored = host.fill(bus + done as u64, slice);
                    done += slice.len();
                }
            });
            stored.map_err(|_| Denied::Dma)?;
            if lent.is_err() {
                from.broken.set(true);
                return Err(Denied::Sender);
            }
            skip = 0;
            if done == self.len {
                break;
            }
        }
        Ok(())
    }
}

/// Calls `f` with each contiguous piece of the sender's memory. `false` if the data is not to be sent any more.
fn pieces(
    device: &Device,
    lender: Lender,
    len: usize,
    f: &mut PieceFn<'_>,
) -> Result<bool, Denied> {
    match lender {
        Lender::Request {
            qpn,
            flight,
            offset,
        } => {
            let Some(qp) = device.qps.get(qpn) else {
                return Ok(false);
            };
            let Some(wqe) = qp.requester.in_flight(flight) else {
                return Ok(false);
            };
            let mut done = 0;
            for sge in part(&wqe.gather, offset, len) {
                memory::each(
                    device,
                    accessor(qp),
                    sge.into(),
                    Purpose::LocalRead,
                    &mut |host, bus, part| f(host, bus, part.start + done..part.end + done),
                )?;
                done += sge.len as usize;
            }
        }
        Lender::Response {
            qpn,
            pd,
            rkey,
            address,
        } => {
            let range = memory::Range {
                key: rkey,
                address,
                len: len as u64,
            };
            let who = Accessor { pd, qpn };
            memory::each(device, who, range, Purpose::RemoteRead, f)?;
        }
    }
    Ok(true)
}

/// Looks where the data of a packet from `device` is. `None` if the packet is not to be sent any more.
pub fn locate<'a>(
    device: &Device,
    payload: &'a Payload,
    located: &'a mut Located,
) -> Result<Option<Data<'a>>, Denied> {
    let (lender, len) = match payload {
        Payload::Bytes(bytes) => return Ok(Some(bytes.as_slice().into())),
        Payload::Lent { lender, len } => (*lender, *len),
    };
    if len <= SMALL {
        let small = &mut located.small;
        let found = pieces(device, lender, len, &mut |host, bus, part| {
            let into = small.get_mut(part).ok_or(Denied::Bounds)?;
            host.read(bus, into).map_err(|_| Denied::Dma)
        })?;
        let small = located.small.get(..len).unwrap_or_default();
        return Ok(found.then(|| small.into()));
    }
    located.pieces.clear();
    located.reach = device.host.reach();
    let list = &mut located.pieces;
    let found = pieces(device, lender, len, &mut |host, bus, part| {
        // Whether it is there shows now, before anything is done with it.
        let len = part.len();
        list.push(Piece { bus, len });
        host.lend(bus, len, false, &mut |_| ())
            .map_err(|_| Denied::Dma)
    })?;
    let data = Data {
        source: Source::Memory(located),
        start: 0,
        len,
    };
    Ok(found.then_some(data))
}

impl Located {
    /// Whether the sender's memory was taken away while the packet was delivered.
    pub fn take_broken(&self) -> bool {
        self.broken.take()
    }
}

/// Takes the data of a packet from `device` out of its memory, since it is not delivered at once. `false` if the packet is
/// not to be sent any more.
pub fn take(device: &mut Device, payload: &mut Payload) -> bool {
    let Payload::Lent { lender, len } = *payload else {
        return true;
    };
    let mut bytes = vec![0; len];
    let found = pieces(device, lender, len, &mut |host, bus, part| {
        let into = bytes.get_mut(part).ok_or(Denied::Bounds)?;
        host.read(bus, into).map_err(|_| Denied::Dma)
    });
    if let Err(denied) = found {
        failed(device, lender, denied);
    }
    *payload = Payload::Bytes(bytes);
    found == Ok(true)
}

/// What `device` was to send could not be read. `true` if the receiver is to get a NAK in its place.
pub fn failed(device: &mut Device, lender: Lender, denied: Denied) -> bool {
    match lender {
        Lender::Request { qpn, flight, .. } => {
            if let Some(mut qp) = device.qps.borrow_out(qpn) {
                let half = odp::Half::Requester { flight };
                if !odp::wait(device, &mut qp, half, denied, 0) {
                    qp.requester.fail(flight, local_failure(denied));
                    completing::complete(device, &mut qp);
                }
                device.qps.put_back(qpn, qp);
                device.schedule(qpn);
            }
            false
        }
        // The page was taken away between the look at it and this: as if the packet were lost, it is asked for again.
        Lender::Response { .. } if matches!(denied, Denied::Absent { .. }) => false,
        Lender::Response { qpn, .. } => {
            if let Some(mut qp) = device.qps.borrow_out(qpn) {
                responder::refuse(device, &mut qp, Nak::RemoteAccess);
                device.qps.put_back(qpn, qp);
            }
            true
        }
    }
}
