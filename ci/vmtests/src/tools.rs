// SPDX-License-Identifier: MIT OR Apache-2.0
//! rdma-core's and perftest's programs, which come in pairs: a server, and a client that is told the server's host.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// How long a program may run, in seconds; much longer than it takes. Sixteen queue pairs and all sizes are gigabytes.
const LIMIT: &str = "900";
/// For a server whose client has failed.
const GRACE: Duration = Duration::from_secs(10);
/// For a server to listen.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the other machine of `ci/vm --peer` runs what it is sent; such a test has this line:
/// `vm: --peer 'busybox nc -ll -p 7 -e /bin/sh'`.
const SHELL_PORT: u16 = 7;

/// How a program ended and what it said.
#[derive(Clone, Debug)]
pub struct Ended {
    pub line: String,
    pub status: i32,
    pub output: String,
}

impl Ended {
    pub fn ok(&self) -> bool {
        self.status == 0
    }

    /// An error unless it ended well.
    pub fn passed(&self) -> Result<()> {
        let Self {
            line,
            status,
            output,
        } = self;
        ensure!(*status == 0, "{line}: status {status}\n{output}");
        Ok(())
    }
}

/// Which machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Here,
    /// The other machine of `ci/vm --peer`.
    Peer,
}

impl Place {
    /// Its name on this machine.
    pub fn host(self) -> Result<String> {
        match self {
            Self::Here => Ok("localhost".into()),
            Self::Peer => {
                std::env::var("IBGDA_PEER").context("no IBGDA_PEER: run this in ./ci/vm --peer")
            }
        }
    }

    /// Runs a program to its end, which is bounded.
    pub fn run(self, words: &[&str]) -> Result<Ended> {
        let line = words.join(" ");
        match self {
            Self::Here => {
                let child = start(words)?;
                end(line, child)
            }
            Self::Peer => {
                let (status, output) = shell(&format!("timeout {LIMIT} {line}"))?;
                let line = format!("on the other machine: {line}");
                Ok(Ended {
                    line,
                    status,
                    output,
                })
            }
        }
    }

    /// The same in a thread.
    pub fn spawn(self, words: &[&str]) -> Result<Running> {
        let line = words.join(" ");
        Ok(match self {
            Self::Here => {
                let child = start(words)?;
                let pid = Some(child.id() as libc::pid_t);
                let thread = thread::spawn(move || end(line, child));
                Running { pid, thread }
            }
            Self::Peer => {
                let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
                let words = move || self.run(&words.iter().map(String::as_str).collect::<Vec<_>>());
                Running {
                    pid: None,
                    thread: thread::spawn(words),
                }
            }
        })
    }
}

/// Starts a program on this machine, with an end to how long it may run.
fn start(words: &[&str]) -> Result<Child> {
    let mut command = Command::new("timeout");
    command.arg(LIMIT).args(words);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().with_context(|| words.join(" "))
}

/// Waits for it.
fn end(line: String, child: Child) -> Result<Ended> {
    let Output {
        status,
        mut stdout,
        stderr,
    } = child.wait_with_output().with_context(|| line.clone())?;
    stdout.extend(stderr);
    Ok(Ended {
        line,
        status: status.code().unwrap_or(-1),
        output: String::from_utf8_lossy(&stdout).into_owned(),
    })
}

/// A program that runs.
pub struct Running {
    /// Of `timeout`, on this machine.
    pid: Option<libc::pid_t>,
    thread: JoinHandle<Result<Ended>>,
}

impl Running {
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    pub fn end(self) -> Result<Ended> {
        self.thread
            .join()
            .expect("running a program does not panic")
    }

    /// Gives it a while to end by itself, then ends it. One on the other machine has only its own limit.
    fn stop(self) -> Result<Ended> {
        let deadline = Instant::now() + GRACE;
        while !self.has_ended() && Instant::now() < deadline {
            sleep(Duration::from_millis(20));
        }
        if let (Some(pid), false) = (self.pid, self.has_ended()) {
            // SAFETY: a signal to a child, which the thread waits for and has not been seen to end; at worst nobody gets it.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        self.end()
    }
}

/// Runs a line of the shell's on the other machine; its status and output.
fn shell(line: &str) -> Result<(i32, String)> {
    let host = Place::Peer.host()?;
    let stream = TcpStream::connect((host.as_str(), SHELL_PORT));
    let mut stream = stream.with_context(|| format!("connecting to the shell of {host}"))?;
    let script = format!("exec 2>&1\n( {line} ) </dev/null\necho \"status $?\"\nexit\n");
    stream.write_all(script.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let (output, status) = text
        .rsplit_once("status ")
        .with_context(|| format!("{host} did not say how {line:?} ended: {text}"))?;
    Ok((status.trim().parse()?, output.to_owned()))
}

/// Runs a server at a place and a client here with the same words, except for the device and the client's host. What
/// they said; no client, if the server ended before one could connect.
pub fn pair(server: (Place, &str), client: &str, words: &[&str]) -> Result<(Ended, Option<Ended>)> {
    let (program, rest) = words.split_first().context("no program")?;
    let (place, device) = server;
    let host = place.host()?;
    let line = |device, more: &[&'_ str]| -> Vec<String> {
        let parts = [&[program, "-d", device], rest, more].concat();
        parts.iter().map(|&part| part.to_owned()).collect()
    };
    let run = line(device, &[]);
    let server = place.spawn(&run.iter().map(String::as_str).collect::<Vec<_>>())?;
    // A server listens on a TCP port that only trying shows to be ready.
    let deadline = Instant::now() + PATIENCE;
    let run = line(client, &[&host]);
    let run: Vec<&str> = run.iter().map(String::as_str).collect();
    let mut said = None;
    while !server.has_ended() {
        let client = Place::Here.run(&run)?;
        let refused = !client.ok() && client.output.contains("Couldn't connect");
        said = Some(client);
        if !refused || Instant::now() > deadline {
            break;
        }
        said = None;
        sleep(Duration::from_millis(50));
    }
    let failed = said.as_ref().is_some_and(|client| !client.ok());
    let server = if failed { server.stop() } else { server.end() };
    Ok((server?, said))
}

/// The same, and both must end well.
pub fn pair_passes(server: (Place, &str), client: &str, words: &[&str]) -> Result<()> {
    let (server, client) = pair(server, client, words)?;
    server.passed()?;
    client
        .context("the server ended before there was a client")?
        .passed()
}

/// Asks or tells the model.
pub fn ctl(args: &[&str]) -> Result<Value> {
    let ended = Command::new("connectx")
        .args(["ctl", "--json"])
        .args(args)
        .output()?;
    ensure!(
        ended.status.success(),
        "connectx ctl {args:?}: {}",
        String::from_utf8_lossy(&ended.stderr)
    );
    Ok(serde_json::from_slice(&ended.stdout)?)
}

/// One of the model's counters.
pub fn model_counter(function: &str, counter: &str) -> Result<u64> {
    let answer = ctl(&["counts", function])?;
    let row = &answer["functions"][0];
    row[counter]
        .as_u64()
        .with_context(|| format!("no counter {counter} in {row}"))
}

/// Waits until something holds.
pub fn wait(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        sleep(Duration::from_millis(20));
    }
    Ok(())
}
