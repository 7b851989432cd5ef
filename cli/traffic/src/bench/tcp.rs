// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts: what the ends tell each other over TCP, a JSON object a line. The data goes from NIC to NIC.

use super::target::{Slots, Target};
use crate::{
    ends::{self, End},
    stop::Stop,
};
use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream, ToSocketAddrs as _},
    thread,
    time::{Duration, Instant},
};

const MAGIC: &str = "ibgda-bench";
const VERSION: u32 = 1;
/// No message is longer.
const MOST: usize = 1 << 16;
/// How often Ctrl-C is looked for.
const LOOK: Duration = Duration::from_millis(100);
/// How long one attempt to connect may take, and so Ctrl-C: a host that drops packets answers none.
const ATTEMPT: Duration = Duration::from_secs(1);
/// What a stranger may ask this end for.
const MOST_MEMORY: u64 = 1 << 32;
pub const MOST_QPS: usize = 64;

/// The far region, for work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    pub address: u64,
    pub rkey: u32,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
enum Message {
    /// The first of both sides.
    Hello {
        magic: String,
        version: u32,
    },
    /// Of the end that posts: make such a target, and join its queue pairs to these.
    Open {
        memory: u64,
        timeout_ms: u64,
        addresses: Vec<Vec<u8>>,
    },
    Opened {
        remote: Remote,
        nic: String,
        addresses: Vec<Vec<u8>>,
    },
    Prepare {
        seed: u64,
        length: u64,
    },
    Verify {
        slots: Slots,
    },
    /// Of what was asked last; `wrong` is what a check found.
    Done {
        wrong: Option<String>,
    },
    Failed {
        why: String,
    },
    Bye,
}

/// The connection. Each message must come within `wait`.
struct Link {
    stream: TcpStream,
    peer: String,
    wait: Duration,
    stop: Stop,
    read: Vec<u8>,
}

impl Link {
    fn new(stream: TcpStream, wait: Duration, stop: &Stop) -> Result<Self> {
        let peer = stream.peer_addr()?.to_string();
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(wait))?;
        Ok(Self {
            stream,
            peer,
            wait,
            stop: stop.clone(),
            read: Vec::new(),
        })
    }

    fn send(&mut self, message: &Message) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let sent = self.stream.write_all(&line);
        sent.with_context(|| format!("send to {}", self.peer))
    }

    /// The next line. A message of this end's that is under way is waited for even after Ctrl-C, if `patient`.
    fn line(&mut self, patient: bool) -> Result<Vec<u8>> {
        let deadline = Instant::now() + self.wait;
        loop {
            if let Some(end) = self.read.iter().position(|&byte| byte == b'\n') {
                let rest = self.read.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.read, rest));
            }
            ensure!(
                self.read.len() < MOST,
                "{} sends a line of more than {MOST} bytes: it is no {MAGIC}",
                self.peer
            );
            ensure!(
                patient || !self.stop.asked(),
                "interrupted while waiting for {}",
                self.peer
            );
            ensure!(
                Instant::now() < deadline,
                "{} has said nothing for {} s; is it still there? (--wait)",
                self.peer,
                self.wait.as_secs()
            );
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => bail!("{} has closed the connection", self.peer),
                Ok(count) => self.read.extend_from_slice(&bytes[..count]),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("hear from {}", self.peer));
                }
            }
        }
    }

    fn receive(&mut self, patient: bool) -> Result<Message> {
        let line = self.line(patient)?;
        match parse(&line).with_context(|| self.peer.clone())? {
            Message::Failed { why } => bail!("{} says: {why}", self.peer),
            message => Ok(message),
        }
    }

    fn greet(&mut self) -> Result<()> {
        self.send(&Message::Hello {
            magic: MAGIC.into(),
            version: VERSION,
        })?;
        let line = self.line(false)?;
        check_hello(&line).with_context(|| self.peer.clone())
    }
}

fn parse(line: &[u8]) -> Result<Message> {
    serde_json::from_slice(line).context("that is no message of ibgda bench")
}

/// Without the rest of the protocol, which another version may have otherwise.
fn check_hello(line: &[u8]) -> Result<()> {
    let hello: serde_json::Value = serde_json::from_slice(line).unwrap_or_default();
    ensure!(
        hello["magic"] == MAGIC,
        "that is no ibgda bench: it begins with {:?}",
        String::from_utf8_lossy(&line[..line.len().min(40)])
    );
    ensure!(
        hello["version"] == VERSION,
        "it speaks version {} of the protocol, this is version {VERSION}; use the same version of ibgda on both hosts",
        hello["version"]
    );
    Ok(())
}

/// The far end, from the end that posts.
pub struct Client {
    link: Link,
    pub remote: Remote,
    pub nic: String,
}

impl Client {
    /// Connects, which may take until the other host listens, and joins the queue pairs.
    pub fn connect(
        to: &str,
        near: &End,
        wait: Duration,
        timeout: Duration,
        stop: &Stop,
    ) -> Result<Self> {
        let mut link = Link::new(dial(to, wait, stop)?, wait, stop)?;
        link.greet()?;
        link.send(&Message::Open {
            memory: near.region.length(),
            timeout_ms: timeout.as_millis() as u64,
            addresses: near.addresses(),
        })?;
        let Message::Opened {
            remote,
            nic,
            addresses,
        } = link.receive(false)?
        else {
            bail!("{} answers with something else", link.peer);
        };
        near.connect(&addresses)?;
        let nic = format!("{nic} at {}", link.peer);
        Ok(Self { link, remote, nic })
    }

    fn ask(&mut self, message: &Message) -> Result<Option<String>> {
        self.link.send(message)?;
        match self.link.receive(true)? {
            Message::Done { wrong } => Ok(wrong),
            other => bail!("{} answers with {other:?}", self.link.peer),
        }
    }

    /// As [`Target::prepare`].
    pub fn prepare(&mut self, seed: u64, length: u64) -> Result<()> {
        self.ask(&Message::Prepare { seed, length }).map(drop)
    }

    /// As [`Target::verify`].
    pub fn verify(&mut self, slots: Slots) -> Result<Option<String>> {
        self.ask(&Message::Verify { slots })
    }

    /// Says that all is done, or why not. The other end ends too, whether it hears it or not.
    pub fn bye(mut self, measured: &Result<()>) {
        let _ = self.link.send(&match measured {
            Ok(()) => Message::Bye,
            Err(error) => Message::Failed {
                why: format!("{error:#}"),
            },
        });
    }
}

fn dial(to: &str, wait: Duration, stop: &Stop) -> Result<TcpStream> {
    let deadline = Instant::now() + wait;
    let addresses = to.to_socket_addrs();
    let addresses: Vec<_> = addresses
        .with_context(|| format!("{to:?} is no HOST:PORT that can be found"))?
        .collect();
    ensure!(!addresses.is_empty(), "{to:?} has no address");
    loop {
        let mut last = None;
        for address in &addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            match TcpStream::connect_timeout(address, left.clamp(LOOK, ATTEMPT)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        let last = last.expect("there are addresses");
        ensure!(!stop.asked(), "interrupted");
        if Instant::now() >= deadline {
            return Err(last).with_context(|| {
                format!(
                    "{to}: nobody listens after {} s; is ibgda bench --listen running there?",
                    wait.as_secs()
                )
            });
        }
        thread::sleep(LOOK);
    }
}

/// What the listening end did.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Served {
    pub peer: String,
    /// Checks of the data, all of them good.
    pub checks: u64,
    pub bytes: u64,
}

/// Waits for one peer and serves it to its end. `open` makes the end for it; `listening` is told the port.
pub fn serve(
    port: u16,
    wait: Duration,
    stop: &Stop,
    listening: impl FnOnce(u16) -> Result<()>,
    open: impl FnOnce(u64, usize, Duration) -> Result<End>,
) -> Result<Served> {
    // Both families, or IPv4 where there is no other.
    let listener =
        TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
    let listener = listener.with_context(|| format!("listen on port {port}"))?;
    listening(listener.local_addr()?.port())?;
    let mut link = Link::new(accept(&listener, wait, stop)?, wait, stop)?;
    drop(listener);
    link.greet()?;
    let served = answer(&mut link, open);
    if let Err(error) = &served {
        let _ = link.send(&Message::Failed {
            why: format!("{error:#}"),
        });
    }
    served
}

fn accept(listener: &TcpListener, wait: Duration, stop: &Stop) -> Result<TcpStream> {
    let deadline = Instant::now() + wait;
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("accept"),
        }
        ensure!(!stop.asked(), "interrupted");
        ensure!(
            Instant::now() < deadline,
            "nobody has connected within {} s (--wait)",
            wait.as_secs()
        );
        thread::sleep(Duration::from_millis(20));
    }
}

fn answer(
    link: &mut Link,
    open: impl FnOnce(u64, usize, Duration) -> Result<End>,
) -> Result<Served> {
    let Message::Open {
        memory,
        timeout_ms,
        addresses,
    } = link.receive(false)?
    else {
        bail!("{} begins with something else", link.peer);
    };
    ensure!(
        memory <= MOST_MEMORY && (1..=MOST_QPS).contains(&addresses.len()),
        "{} asks for {memory} bytes and {} queue pairs; the most are {MOST_MEMORY} and {MOST_QPS}",
        link.peer,
        addresses.len()
    );
    let end = open(memory, addresses.len(), Duration::from_millis(timeout_ms))?;
    end.connect(&addresses)?;
    let region = end.region.region();
    link.send(&Message::Opened {
        remote: Remote {
            address: region.address,
            rkey: region.rkey,
        },
        nic: end.context.device_name().to_owned(),
        addresses: end.addresses(),
    })?;
    let mut target = Target::new(end);
    let mut served = Served {
        peer: link.peer.clone(),
        ..Default::default()
    };
    loop {
        let wrong = match link.receive(false)? {
            Message::Prepare { seed, length } => {
                target.prepare(seed, length)?;
                None
            }
            Message::Verify { slots } => {
                let wrong = target.verify(slots)?;
                served.checks += u64::from(wrong.is_none());
                served.bytes += slots.bytes * slots.count;
                wrong
            }
            Message::Bye => return Ok(served),
            other => bail!("{} says {other:?}", link.peer),
        };
        link.send(&Message::Done {
            wrong: wrong.clone(),
        })?;
        if let Some(wrong) = wrong {
            bail!("wrong data arrived: {wrong}");
        }
    }
}

/// For the end that listens: as `memory` and `qps` ask.
pub fn open_target(
    choice: &crate::choice::Choice,
    memory: u64,
    qps: usize,
    timeout: Duration,
) -> Result<End> {
    End::open(choice, &choice.nic, memory, qps, &ends::options(0, timeout))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Shutdown;

    fn hello(version: u32) -> Vec<u8> {
        let hello = Message::Hello {
            magic: MAGIC.into(),
            version,
        };
        serde_json::to_vec(&hello).expect("text")
    }

    #[test]
    fn another_version_and_another_program_are_refused() {
        check_hello(&hello(VERSION)).expect("the same");
        let error = check_hello(&hello(7)).expect_err("another").to_string();
        assert!(
            error.contains("version 7") && error.contains("use the same version"),
            "{error}"
        );
        let error = check_hello(b"SSH-2.0-OpenSSH\r\n").expect_err("no bench");
        assert!(
            error.to_string().contains("begins with \"SSH-2.0"),
            "{error}"
        );
        assert!(parse(b"{\"message\":\"jump\"}").is_err());
    }

    fn listener() -> (TcpListener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = listener.local_addr().expect("address").port();
        (listener, port)
    }

    #[test]
    fn a_peer_that_says_nothing_or_too_much_or_goes_is_an_error_in_time() {
        let wait = Duration::from_millis(300);
        for (said, words) in [
            (Vec::new(), "has said nothing"),
            (vec![b'x'; MOST + 1], "a line of more than"),
            (b"\x16\x03\x01\n".to_vec(), "that is no ibgda bench"),
            (b"half".to_vec(), "has closed"),
        ] {
            let (listener, port) = listener();
            let silent = said.is_empty();
            let peer = thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("accept");
                stream.write_all(&said).expect("write");
                if !silent {
                    stream.shutdown(Shutdown::Write).expect("shutdown");
                }
                // Until the other side has had enough.
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let stream = TcpStream::connect(("127.0.0.1", port)).expect("connect");
            let mut link = Link::new(stream, wait, &Stop::default()).expect("link");
            let error = link.greet().expect_err(words);
            assert!(format!("{error:#}").contains(words), "{error:#}");
            drop(link);
            peer.join().expect("the peer ends");
        }
    }

    #[test]
    fn where_nobody_listens_or_connects_it_ends_in_time() {
        let wait = Duration::from_millis(200);
        let (listener, port) = listener();
        let stop = Stop::default();
        let error = accept(&listener, wait, &stop).expect_err("nobody");
        assert!(
            error.to_string().contains("nobody has connected"),
            "{error}"
        );
        drop(listener);
        let error = dial(&format!("127.0.0.1:{port}"), wait, &stop).expect_err("nobody");
        assert!(format!("{error:#}").contains("nobody listens"), "{error:#}");
        let error = dial("no-port-here", wait, &stop).expect_err("no port");
        assert!(format!("{error:#}").contains("HOST:PORT"), "{error:#}");
    }
}
