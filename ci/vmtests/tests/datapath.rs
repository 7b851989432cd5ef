// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data path as rdma-core's provider uses it: fences, solicited events, data in completions, rings of every size.
//! Needs two NICs: `./ci/vm --nics 2`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use ibgda_verbs_sys::ibv_send_flags as flags;
use ibgda_vmtests::machine::nics;
use ibgda_vmtests::rdma::{Cq, Memory, Nic, Qp, Sizes, Srq, Work};
use ibgda_vmtests::tools::ctl;

/// For an event that must come, or for one that must not.
const PATIENCE: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_millis(200);

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One end of a connection. What is dropped last comes last.
struct End {
    qp: Qp,
    send: Cq,
    receive: Cq,
    memory: Memory,
    _srq: Option<Srq>,
    _nic: Nic,
}

/// Bytes that each end has.
const MEMORY: usize = 1 << 20;

struct Wanted {
    sizes: Sizes,
    cq: u32,
    srq: Option<u32>,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            sizes: Sizes {
                send: 64,
                receive: 64,
            },
            cq: 64,
            srq: None,
        }
    }
}

fn connected(wanted: &Wanted) -> Result<[End; 2]> {
    let end = |index: usize| -> Result<End> {
        let nic = Nic::open(nics()[index])?;
        let srq = wanted.srq.map(|size| Srq::new(&nic, size)).transpose()?;
        // The largest takes a good part of the machine's memory.
        let small = wanted.cq.min(1024);
        let send = Cq::new(&nic, if index == 0 { wanted.cq } else { small })?;
        let receive = Cq::new(&nic, small)?;
        let qp = Qp::new(&nic, &send, &receive, srq.as_ref(), wanted.sizes)?;
        let memory = Memory::new(&nic, MEMORY)?;
        Ok(End {
            qp,
            send,
            receive,
            memory,
            _srq: srq,
            _nic: nic,
        })
    };
    let ends = [end(0)?, end(1)?];
    for i in 0..2 {
        let peer = &ends[1 - i];
        ends[i].qp.connect(peer._nic.lid, peer.qp.number)?;
    }
    Ok(ends)
}

/// A link that takes its time, for as long as this lives.
struct Slow;

impl Slow {
    fn new(microseconds: &str) -> Result<Self> {
        for nic in ["nic0", "nic1"] {
            ctl(&["link", nic, "delay", microseconds])?;
        }
        Ok(Self)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        for nic in ["nic0", "nic1"] {
            ctl(&["link", nic, "delay", "0"]).expect("a fast link");
        }
    }
}

#[test]
fn a_fenced_send_carries_what_the_read_before_it_brought() -> Result<()> {
    let _turn = turn();
    for (flag, carried) in [(0, 0x11), (flags::IBV_SEND_FENCE, 0x22)] {
        let [mut a, mut b] = connected(&Wanted::default())?;
        a.memory.set(0, 0x11);
        b.memory.set(0, 0x22);
        b.qp.receive(1, b.memory.sge(64, 64))?;
        let slow = Slow::new("100000")?;
        let local = a.memory.sge(0, 8);
        // One doorbell for both.
        let read = Work::read(1, local, b.memory.remote(0));
        a.qp.post(&[read, Work::send(2, local).and(flag)])?;
        ensure!((a.send.next()?.id, a.send.next()?.id) == (1, 2));
        b.receive.next()?;
        drop(slow);
        ensure!(a.memory.word(0) == 0x22, "the READ");
        let got = b.memory.word(8);
        ensure!(got == carried, "{got:#x} with flags {flag:#x}");
    }
    Ok(())
}

#[test]
fn only_what_is_solicited_wakes_who_waits_for_that() -> Result<()> {
    let _turn = turn();
    let [a, b] = connected(&Wanted::default())?;
    for id in 0..3 {
        b.qp.receive(id, b.memory.sge(64, 64))?;
    }
    let send = Work::send(7, a.memory.sge(0, 8));
    b.receive.arm(true)?;
    a.qp.post(&[send])?;
    b.receive.next()?;
    ensure!(!b.receive.event(SILENCE)?, "nobody asked for an event");
    a.qp.post(&[send.and(flags::IBV_SEND_SOLICITED)])?;
    ensure!(b.receive.event(PATIENCE)?, "the sender asked for one");
    b.receive.next()?;
    b.receive.arm(false)?;
    a.qp.post(&[send])?;
    ensure!(b.receive.event(PATIENCE)?, "any completion was waited for");
    Ok(())
}

/// Whether rdma-core asks for data in completions is up to it: the data is where the program looks for it in any case, and
/// the model's own tests look at the entries.
#[test]
fn short_data_arrives_whether_in_a_completion_or_in_memory() -> Result<()> {
    let _turn = turn();
    for entry in ["64", "128"] {
        // SAFETY: the tests take turns, and no other thread of this process reads the environment.
        unsafe { std::env::set_var("MLX5_CQE_SIZE", entry) };
        let [mut a, mut b] = connected(&Wanted::default())?;
        for len in [1usize, 8, 31, 32, 33, 64, 65] {
            for index in 0..16 {
                let value = 0x0101_0101_0101_0101 * (len as u64 + index as u64);
                a.memory.set(index, value);
                b.memory.set(index, !value);
                a.memory.set(1024 + index, 0);
                b.memory.set(1024 + index, 0);
            }
            let whole = len / 8;
            b.qp.receive(3, b.memory.sge(8192, 128))?;
            a.qp.post(&[Work::send(1, a.memory.sge(0, len))])?;
            a.send.next()?;
            let got = b.receive.next()?;
            ensure!(got.len as usize == len, "{got:?}");
            let read = Work::read(2, a.memory.sge(8192, len), b.memory.remote(0));
            a.qp.post(&[read])?;
            ensure!(a.send.next()?.len as usize == len);
            for index in 0..whole {
                ensure!(
                    b.memory.word(1024 + index) == a.memory.word(index),
                    "SEND {len}"
                );
                ensure!(
                    a.memory.word(1024 + index) == b.memory.word(index),
                    "READ {len}"
                );
            }
            let tail = |bits: u64| bits & ((1u64 << (8 * (len % 8))) - 1);
            ensure!(tail(b.memory.word(1024 + whole)) == tail(a.memory.word(whole)));
            ensure!(b.memory.word(1025 + whole) == 0, "no more than {len}");
        }
    }
    // SAFETY: as above.
    unsafe { std::env::remove_var("MLX5_CQE_SIZE") };
    Ok(())
}

/// Goes round the rings, each request checked by its place in memory.
fn go_round(a: &mut End, b: &mut End, depth: u32, rounds: u32) -> Result<()> {
    let depth = depth.clamp(1, 256) as u64;
    let mut value = 0;
    for _ in 0..rounds {
        let mut work = Vec::new();
        for id in 0..depth {
            value += 1;
            a.memory.set(id as usize, value);
            let at = id as usize * 8;
            let write = Work::write(id, a.memory.sge(at, 8), b.memory.remote(at));
            // One completion for all, so that the smallest CQ does.
            work.push(if id + 1 == depth {
                write
            } else {
                write.silent()
            });
        }
        a.qp.post(&work)?;
        ensure!(a.send.next()?.id == depth - 1);
        for id in 0..depth as usize {
            ensure!(
                b.memory.word(id) == a.memory.word(id),
                "request {id} of {depth}"
            );
        }
    }
    Ok(())
}

/// The largest number that works, between one that does and one that need not.
fn largest(mut works: u32, mut fails: u32, mut f: impl FnMut(u32) -> bool) -> u32 {
    while fails - works > 1 {
        let middle = works + (fails - works) / 2;
        if f(middle) {
            works = middle;
        } else {
            fails = middle;
        }
    }
    works
}

#[test]
fn send_queues_of_every_size_go_round() -> Result<()> {
    let _turn = turn();
    let nic = Nic::open(nics()[0])?;
    let most = nic.attributes()?.max_qp_wr as u32;
    let cq = Cq::new(&nic, 16)?;
    let fits = |send: u32| Qp::new(&nic, &cq, &cq, None, Sizes { send, receive: 1 }).is_ok();
    // A request of a reliable queue pair may take several basic blocks, of which max_qp_wr is the number.
    let largest = largest(1, most + 1, fits);
    ensure!(largest >= most / 4, "{largest} of {most}");
    println!("max_qp_wr {most}, the largest send queue {largest}");
    for send in [1, 2, 3, 4, 7, 8, 64, 100, 1024, largest] {
        let [mut a, mut b] = connected(&Wanted {
            sizes: Sizes { send, receive: 1 },
            ..Wanted::default()
        })?;
        let given = a.qp.sizes.send;
        ensure!(given >= send, "{given} of {send}");
        // Its basic blocks more than once, however many that are.
        let depth = given.min(256);
        go_round(&mut a, &mut b, depth, 4 * most.min(8 * given) / depth + 3)?;
    }
    Ok(())
}

#[test]
fn receive_queues_of_every_size_go_round() -> Result<()> {
    let _turn = turn();
    let nic = Nic::open(nics()[0])?;
    let attributes = nic.attributes()?;
    let cq = Cq::new(&nic, 16)?;
    let fits = |receive: u32| Qp::new(&nic, &cq, &cq, None, Sizes { send: 1, receive }).is_ok();
    // max_qp_wr is for requests of any length; those with one piece are shorter.
    let (promised, most) = (attributes.max_qp_wr as u32, largest(1, 1 << 17, fits));
    println!("max_qp_wr {promised}, the largest receive queue {most}");
    ensure!((promised..1 << 17).contains(&most), "{most} of {promised}");
    for (shared, most) in [(false, most), (true, attributes.max_srq_wr as u32)] {
        for size in [1, 2, 3, 4, 7, 8, 64, 100, 1024, most] {
            let wanted = Wanted {
                sizes: Sizes {
                    send: 64,
                    receive: if shared { 0 } else { size },
                },
                srq: shared.then_some(size),
                ..Wanted::default()
            };
            let [mut a, mut b] = connected(&wanted)?;
            let post = |b: &End, id: u64| {
                let into = b.memory.sge(4096 + (id as usize % 64) * 8, 8);
                match &b._srq {
                    Some(srq) => srq.post(id, into),
                    None => b.qp.receive(id, into),
                }
            };
            for id in 0..u64::from(size) {
                post(&b, id)?;
            }
            for id in 0..u64::from(2 * size.min(2000) + 3) {
                a.memory.set(0, id + 1);
                a.qp.post(&[Work::send(id, a.memory.sge(0, 8))])?;
                a.send.next()?;
                let got = b.receive.next()?;
                ensure!(
                    got.id == id,
                    "{got:?} is not {id} of {size}, shared {shared}"
                );
                ensure!(b.memory.word(512 + (id as usize % 64)) == id + 1);
                // The request that was used is posted again.
                post(&b, id + u64::from(size))?;
            }
            b.memory.set(0, 0);
        }
        let refused = connected(&Wanted {
            sizes: Sizes {
                send: 64,
                receive: if shared { 0 } else { most + 1 },
            },
            srq: shared.then_some(most + 1),
            ..Wanted::default()
        });
        ensure!(refused.is_err(), "{} of {most}", most + 1);
    }
    Ok(())
}

#[test]
fn completion_queues_of_every_size_go_round() -> Result<()> {
    let _turn = turn();
    let most = Nic::open(nics()[0])?.attributes()?.max_cqe as u32;
    for cq in [1, 2, 3, 4, 7, 8, 64, 100, 1024, most] {
        let [a, b] = connected(&Wanted {
            cq,
            ..Wanted::default()
        })?;
        let given = a.send.entries();
        ensure!(given >= cq, "{given} of {cq}");
        let together = u64::from(given.min(64));
        for round in 0..(2 * u64::from(given.min(1100)) / together + 3) {
            let write = |id| Work::write(id, a.memory.sge(0, 8), b.memory.remote(0));
            let work: Vec<Work> = (0..together).map(|i| write(round * together + i)).collect();
            a.qp.post(&work)?;
            for work in &work {
                ensure!(a.send.next()?.id == work.id, "{cq} entries");
            }
        }
    }
    let nic = Nic::open(nics()[0])?;
    if Cq::new(&nic, most + 1).is_ok() {
        bail!("{} entries of {most}", most + 1);
    }
    Ok(())
}
