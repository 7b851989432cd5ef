// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection: `one-side GPU NIC [ROUTE]` opens the NIC, then does what each line of its input asks, and answers
//! with a line. What a kernel does is done on this process's thread.
//!
//! An answer that is not of success has `error`, the library's sentence, and `errno`. A `status` is the name of a device
//! call's, with `text` for its words and `ms` for how long it took.
//!
//! | do | with | |
//! |---|---|---|
//! | begin | depth, ack_timeout, post_timeout_ms | makes a region and a queue pair in place of those before; answers a card |
//! | connect | a card of the other | |
//! | put | seed, bytes, key (what is xored to the rkey), patience_ms | writes to the other, and waits for the completion |
//! | burst | count, key | posts so many, the first with a changed rkey, then rings once; waits for none |
//! | fill | most | posts until one is refused |
//! | quiet | patience_ms | waits for all that is posted |
//! | poll | patience_ms | waits for a completion |
//! | error | | the first error of the send CQ |
//! | holds | seed, bytes | whether a put of these has come |
//! | hear | words, patience_ms | waits for an event with these words; then those that came before it are forgotten |
//! | state | | the broker's word |
//! | rebind | patience_ms | joins the NIC again |

use anyhow::{Context as _, Result};
use ibgda::{
    Access, AsyncEvent, Context, MemoryRegion, OpenOptions, QpAddress, QueuePair, QueuePairOptions,
    Route, Status, abi::IBGDA_NO_DOORBELL,
};
use ibgda_test_kernels::{Poller, Poster};
use serde_json::{Value, json};
use std::{
    env,
    io::stdin,
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

const REGION_BYTES: usize = 1 << 16;

/// What `begin` makes.
struct Ends {
    qp: QueuePair,
    /// What it writes from, and what the other writes to.
    source: MemoryRegion,
    target: MemoryRegion,
    /// Address and rkey of the other's target.
    remote: (u64, u32),
}

struct Side {
    context: Context,
    heard: Receiver<AsyncEvent>,
    ends: Option<Ends>,
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed as u8)
        .collect()
}

fn status(status: Result<(), Status>, start: Instant) -> Value {
    let status = status.err().unwrap_or(Status::OK);
    json!({"status": status.name(), "text": status.to_string(), "ms": start.elapsed().as_millis() as u64})
}

impl Ends {
    fn poster(&mut self) -> Poster {
        // SAFETY: the QP and what it names outlive each call of the poster; this is the only thread that posts.
        unsafe { Poster::new(self.qp.device_handle()) }
    }

    fn put(&mut self, key: u32, bytes: u32, flags: u32) -> Result<u64, Status> {
        let (local, lkey) = (self.source.address(), self.source.lkey());
        let (remote, rkey) = self.remote;
        self.poster()
            .put(remote, rkey ^ key, local, lkey, bytes, flags)
    }
}

impl Side {
    fn ends(&mut self) -> Result<&mut Ends> {
        self.ends.as_mut().context("begin comes first")
    }

    fn begin(&mut self, with: &Value) -> Result<Value> {
        let number = |name: &str, or: u64| with[name].as_u64().unwrap_or(or);
        let options = QueuePairOptions {
            send_depth: number("depth", 16) as u32,
            ack_timeout: number("ack_timeout", 14) as u8,
            post_timeout: Duration::from_millis(number("post_timeout_ms", 2000)),
            ..Default::default()
        };
        // What was made before goes first: its NIC may be lost.
        self.ends = None;
        let cq = self.context.create_cq(options.send_depth)?;
        let ends = Ends {
            qp: self.context.create_qp(&options, &cq, None)?,
            source: self.context.alloc(REGION_BYTES, Access::all())?,
            target: self.context.alloc(REGION_BYTES, Access::all())?,
            remote: (0, 0),
        };
        let card = json!({
            "address": ends.qp.address().to_bytes().to_vec(),
            "remote": ends.target.address(),
            "rkey": ends.target.rkey(),
            "qpn": ends.qp.number(),
        });
        self.ends = Some(ends);
        Ok(card)
    }

    fn hear(&self, words: &str, patience: Duration) -> Value {
        let end = Instant::now() + patience;
        let mut others = Vec::new();
        while let Ok(event) = self
            .heard
            .recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            let text = event.to_string();
            if text.contains(words) {
                return json!({"found": text, "others": others});
            }
            others.push(text);
        }
        json!({"others": others})
    }

    fn does(&mut self, request: &Value) -> Result<Value> {
        let number = |name: &str| request[name].as_u64().unwrap_or(0);
        let patience = Duration::from_millis(number("patience_ms"));
        let patience_ns = patience.as_nanos() as u64;
        let start = Instant::now();
        match request["do"].as_str().unwrap_or_default() {
            "begin" => self.begin(request),
            "connect" => {
                let ends = self.ends()?;
                let address: Vec<u8> = serde_json::from_value(request["address"].clone())?;
                ends.remote = (number("remote"), number("rkey") as u32);
                ends.qp.connect(&QpAddress::from_bytes(&address)?)?;
                Ok(json!({}))
            }
            "put" => {
                let (ends, bytes) = (self.ends()?, number("bytes"));
                ends.source
                    .write(0, &pattern(number("seed"), bytes as usize))?;
                let done = ends
                    .put(number("key") as u32, bytes as u32, 0)
                    .and_then(|request| ends.poster().wait(request, patience_ns));
                Ok(status(done, start))
            }
            "burst" => {
                let ends = self.ends()?;
                let mut key = number("key") as u32;
                let mut posted = Ok(());
                for _ in 0..number("count") {
                    posted = posted.and(ends.put(key, 8, IBGDA_NO_DOORBELL).map(drop));
                    key = 0;
                }
                let rung = posted.and_then(|()| ends.poster().write_doorbell(number("count")));
                Ok(status(rung, start))
            }
            "fill" => {
                let ends = self.ends()?;
                let mut posted = 0;
                let mut last = Ok(());
                while posted < number("most") && last.is_ok() {
                    last = ends.put(0, 8, 0).map(drop);
                    posted += u64::from(last.is_ok());
                }
                let mut answer = status(last, start);
                answer["posted"] = posted.into();
                Ok(answer)
            }
            "quiet" => Ok(status(self.ends()?.poster().quiet(patience_ns), start)),
            "poll" => {
                // SAFETY: the CQ lives in the QP, and this is the only thread that polls.
                let mut poller = unsafe { Poller::new(self.ends()?.qp.send_cq().device_handle()) };
                Ok(status(poller.poll(patience_ns).0.ok(), start))
            }
            "error" => Ok(match self.ends()?.qp.send_cq().error() {
                Some(error) => json!({
                    "text": error.to_string(),
                    "syndrome": error.syndrome,
                    "qpn": error.qpn,
                    "index": error.wqe_index,
                }),
                None => json!({}),
            }),
            "holds" => {
                let mut there = vec![0; number("bytes") as usize];
                self.ends()?.target.read(0, &mut there)?;
                Ok(json!({"holds": there == pattern(number("seed"), there.len())}))
            }
            "hear" => Ok(self.hear(request["words"].as_str().unwrap_or_default(), patience)),
            "state" => {
                let state = self.context.state();
                Ok(json!({"state": state.state, "reason": state.reason}))
            }
            "rebind" => {
                self.context.rebind(patience)?;
                Ok(json!({}))
            }
            other => anyhow::bail!("there is no request {other:?}"),
        }
    }
}

fn open() -> Result<Side> {
    let mut words = env::args().skip(1);
    let (Some(gpu), Some(nic)) = (words.next(), words.next()) else {
        anyhow::bail!("usage: one-side GPU NIC [ROUTE]");
    };
    // Not auto, which would find one that needs neither the broker nor permission.
    let route = words
        .next()
        .map_or(Ok(Route::Direct), |word| word.parse())?;
    let context = Context::open(&OpenOptions {
        route,
        ..OpenOptions::new(nic, gpu.parse()?)
    })?;
    let (told, heard) = channel();
    context.on_error(move |event| {
        let _ = told.send(event.clone());
    })?;
    Ok(Side {
        context,
        heard,
        ends: None,
    })
}

fn answer(result: Result<Value>) {
    println!(
        "{}",
        result.unwrap_or_else(|error| {
            let errno = error
                .downcast_ref()
                .map(|error: &ibgda::Error| error.errno());
            json!({"error": format!("{error:#}"), "errno": errno})
        })
    );
}

fn main() {
    let mut side = match open() {
        Ok(side) => side,
        Err(error) => return answer(Err(error)),
    };
    answer(Ok(
        json!({"pid": std::process::id(), "nic": side.context.device_name()}),
    ));
    for line in stdin().lines().map_while(Result::ok) {
        let request = serde_json::from_str(&line).with_context(|| line.clone());
        answer(request.and_then(|request| side.does(&request)));
    }
}
