// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection in a process of its own (`one-side`), which a test tells what to do and asks what it saw.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

/// How long an answer may take. What a process does for it is bounded more closely, by the request.
const PATIENCE: Duration = Duration::from_secs(150);

/// The process. It is killed when this is dropped.
#[derive(Debug)]
pub struct Side {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
}

impl Side {
    /// Starts `command`, which ends with the words that start `one-side`, and waits until it has opened its NIC.
    pub fn spawn(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("one-side")?;
        let requests = child.stdin.take().context("piped")?;
        let output = child.stdout.take().context("piped")?;
        let (sender, answers) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Ok(Self {
            child,
            requests,
            answers,
        })
    }

    /// On a NIC, by a GPU, on the direct route. Its first answer says that it has opened the NIC.
    pub fn start(gpu: impl ToString, nic: impl ToString) -> Result<Self> {
        Self::start_on(gpu, nic, "direct")
    }

    /// The same on a route.
    pub fn start_on(gpu: impl ToString, nic: impl ToString, route: &str) -> Result<Self> {
        let mut command = Command::new("one-side");
        command.args([&gpu.to_string(), &nic.to_string(), route]);
        let side = Self::spawn(command)?;
        let opened = side.answer()?;
        ensure!(opened.get("error").is_none(), "one-side: {opened}");
        Ok(side)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to do something.
    pub fn tell(&mut self, request: &Value) -> Result<()> {
        writeln!(self.requests, "{request}").with_context(|| request.to_string())
    }

    /// What it answers.
    pub fn answer(&self) -> Result<Value> {
        match self.answers.recv_timeout(PATIENCE) {
            Ok(line) => serde_json::from_str(&line).with_context(|| line.clone()),
            Err(RecvTimeoutError::Timeout) => bail!("one-side did not answer in {PATIENCE:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("one-side has ended"),
        }
    }

    /// Both. An error of the library is an error.
    pub fn ask(&mut self, request: Value) -> Result<Value> {
        self.tell(&request)?;
        let answer = self.answer()?;
        ensure!(answer.get("error").is_none(), "{request}: {answer}");
        Ok(answer)
    }

    /// Kills it; the signal that ended it.
    pub fn kill(&mut self) -> Result<Option<i32>> {
        use std::os::unix::process::ExitStatusExt;
        self.child.kill()?;
        Ok(self.child.wait()?.signal())
    }

    /// Waits until its callback has had an event with these words; its text, and all events.
    pub fn hears(&mut self, words: &str) -> Result<String> {
        let answer = self.ask(json!({"do": "hear", "words": words, "patience_ms": 60_000}))?;
        let found = answer["found"].as_str();
        let found = found.with_context(|| format!("{words:?} was not heard of: {answer}"))?;
        Ok(found.to_owned())
    }

    /// That it hears of nothing in a while, beyond what it has heard of.
    pub fn hears_nothing_more(&mut self) -> Result<()> {
        let answer =
            self.ask(json!({"do": "hear", "words": "nothing has this", "patience_ms": 700}))?;
        ensure!(answer["others"] == json!([]), "{answer}");
        Ok(())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A write of each to the other, of which every byte comes.
pub fn exchange(near: &mut Side, far: &mut Side, seed: u64) -> Result<()> {
    let put = json!({"do": "put", "seed": seed, "bytes": 4096, "patience_ms": 60_000});
    let holds = json!({"do": "holds", "seed": seed, "bytes": 4096});
    for side in [&mut *near, &mut *far] {
        let answer = side.ask(put.clone())?;
        ensure!(answer["status"] == "IBGDA_OK", "{answer}");
    }
    for side in [near, far] {
        ensure!(
            side.ask(holds.clone())?["holds"] == true,
            "the data differs"
        );
    }
    Ok(())
}

/// Connects a new queue pair of each, whose options are those of `begin` in `one-side`. `change` is made to what each is
/// told of the other's.
pub fn join(
    near: &mut Side,
    far: &mut Side,
    options: &Value,
    change: impl Fn(&mut Vec<u8>),
) -> Result<()> {
    let begin = |side: &mut Side| -> Result<Value> {
        let mut request = options.clone();
        request["do"] = "begin".into();
        let mut card = side.ask(request)?;
        let mut address: Vec<u8> =
            serde_json::from_value(card["address"].take()).context("an address")?;
        change(&mut address);
        card["address"] = json!(address);
        card["do"] = "connect".into();
        Ok(card)
    };
    let (of_near, of_far) = (begin(near)?, begin(far)?);
    near.ask(of_far)?;
    far.ask(of_near)?;
    Ok(())
}
