// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual machine: which functions it has, the broker's policy, the model's counters, broken NICs.

use anyhow::{Context as _, Result, ensure};
use ibgda::Bdf;
use serde_json::{Value, json};
use std::{
    env, fs,
    io::{BufRead, BufReader, ErrorKind, Write},
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Two NICs and a GPU that may drive both, for one test at a time.
pub struct Machine {
    pub nics: Vec<Bdf>,
    pub gpu: Bdf,
    pub allowed: Vec<Allowed>,
    _turn: MutexGuard<'static, ()>,
}

fn functions(variable: &str, count: usize) -> Vec<Bdf> {
    let list = env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: run me in ./ci/vm --nics 2 --gpus 1"));
    let functions: Vec<Bdf> = list
        .split_whitespace()
        .map(|bdf| bdf.parse().expect("PCI addresses from ci/vm"))
        .collect();
    assert!(
        functions.len() >= count,
        "{variable} has {} functions, {count} are needed",
        functions.len()
    );
    functions
}

impl Machine {
    /// Waits for this test's turn, then allows the pairs.
    pub fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (nics, gpu) = (functions("IBGDA_NICS", 2), functions("IBGDA_GPUS", 1)[0]);
        let allowed = nics
            .iter()
            .take(2)
            .map(|&nic| Allowed::new(gpu, nic))
            .collect();
        Self {
            nics,
            gpu,
            allowed,
            _turn: turn,
        }
    }
}

/// An entry of the allow-list, which lasts as long as this value; one that was there before stays.
pub struct Allowed(Option<PathBuf>);

impl Allowed {
    fn new(gpu: Bdf, nic: Bdf) -> Self {
        let entry = PathBuf::from(format!("/sys/kernel/config/ibgda/allow/{gpu}@{nic}"));
        match fs::create_dir(&entry) {
            Ok(()) => Self(Some(entry)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Self(None),
            Err(error) => panic!("mkdir {}: {error}", entry.display()),
        }
    }
}

impl Drop for Allowed {
    fn drop(&mut self) {
        if let Some(entry) = self.0.take() {
            fs::remove_dir(&entry)
                .unwrap_or_else(|error| eprintln!("rmdir {}: {error}", entry.display()));
        }
    }
}

/// How many live objects of these kinds each NIC in the model has. Keys that mlx5_ib keeps for later are free, and no one's.
pub fn model_objects(kinds: &[&str]) -> Result<Value> {
    let mut counts = ask_model(json!({"command": "counts"}))?;
    for function in counts["functions"]
        .as_array_mut()
        .context("counts has functions")?
    {
        let function = function
            .as_object_mut()
            .context("a function's counts are an object")?;
        let kept = function.get("mkey_free").and_then(Value::as_u64);
        if let (Some(kept), Some(keys)) = (kept, function.get_mut("mkey")) {
            *keys = json!(keys.as_u64().unwrap_or_default() - kept);
        }
        function.retain(|name, _| name == "name" || kinds.contains(&name.as_str()));
    }
    Ok(counts)
}

/// One counter, summed over all functions.
pub fn model_count(name: &str) -> Result<u64> {
    let counts = ask_model(json!({"command": "counts"}))?;
    let functions = counts["functions"]
        .as_array()
        .context("counts has functions")?;
    let found: Vec<u64> = functions
        .iter()
        .filter_map(|function| function[name].as_u64())
        .collect();
    ensure!(!found.is_empty(), "the model does not count {name}");
    Ok(found.iter().sum())
}

fn ask_model(request: Value) -> Result<Value> {
    const PORT: &str = "/dev/virtio-ports/org.ibgda.model";
    let mut port = fs::File::options()
        .read(true)
        .write(true)
        .open(PORT)
        .with_context(|| format!("open {PORT}"))?;
    // The newline before ends whatever an earlier client left unfinished.
    port.write_all(format!("\n{request}\n").as_bytes())
        .with_context(|| format!("write {PORT}"))?;
    let mut line = String::new();
    BufReader::new(port)
        .read_line(&mut line)
        .with_context(|| format!("read {PORT}"))?;
    let answer: Value =
        serde_json::from_str(&line).with_context(|| format!("the model answered {line:?}"))?;
    ensure!(answer.get("error").is_none(), "the model answered {answer}");
    Ok(answer)
}

/// Tells the model to do something, as `connectx ctl COMMAND ARGS…` does.
#[allow(dead_code, reason = "not every test program breaks the model")]
pub fn tell_model(command: &str, args: &[&str]) -> Result<()> {
    ask_model(json!({"command": command, "args": args})).map(drop)
}

/// Makes the kernel see a fatal PCIe error (Data Link Protocol) of a function, through the aer_inject module.
pub fn inject_fatal_error(function: Bdf) -> Result<()> {
    const DATA_LINK_PROTOCOL: u32 = 0x10;
    let mut record = [0; 32];
    record[..3].copy_from_slice(&[function.bus, function.device, function.function]);
    record[4..8].copy_from_slice(&DATA_LINK_PROTOCOL.to_ne_bytes());
    record[28..].copy_from_slice(&function.domain.to_ne_bytes());
    fs::write("/dev/aer_inject", record)
        .context("write /dev/aer_inject (is the module aer_inject loaded?)")
}
