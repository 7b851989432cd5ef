// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual machine: its functions, the broker's policy, the model's counters, and ways to break things.

use anyhow::{Context as _, Result, ensure};
use ibgda::Bdf;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead, BufReader, ErrorKind, Write},
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

/// Two NICs, and a GPU that may drive both as long as this lives.
#[derive(Debug)]
pub struct Machine {
    /// In the order of the model: `nic0`, `nic1`.
    pub nics: [Bdf; 2],
    /// The stand-in, which is what the policy knows of the GPU outside.
    pub gpu: Bdf,
    allowed: Vec<PathBuf>,
}

fn functions(variable: &str, least: usize) -> Result<Vec<Bdf>> {
    let list = env::var(variable)
        .with_context(|| format!("{variable} is not set: run in ./ci/vm --nics 2 --gpus 1"))?;
    let found: Result<Vec<Bdf>, _> = list.split_whitespace().map(str::parse).collect();
    let found = found.with_context(|| format!("{variable}={list}"))?;
    ensure!(
        found.len() >= least,
        "{variable}={list}, and {least} are needed"
    );
    Ok(found)
}

impl Machine {
    /// Allows the pairs.
    pub fn take() -> Result<Self> {
        let nics = functions("IBGDA_NICS", 2)?;
        let gpu = functions("IBGDA_GPUS", 1)?[0];
        let mut machine = Self {
            nics: [nics[0], nics[1]],
            gpu,
            allowed: Vec::new(),
        };
        for nic in machine.nics {
            let entry = PathBuf::from(format!("/sys/kernel/config/ibgda/allow/{gpu}@{nic}"));
            match fs::create_dir(&entry) {
                Ok(()) => machine.allowed.push(entry),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| entry.display().to_string()),
            }
        }
        Ok(machine)
    }
}

impl Machine {
    /// Takes back what `take` has allowed.
    pub fn withdraw(&mut self) {
        for entry in self.allowed.drain(..) {
            if let Err(error) = fs::remove_dir(&entry) {
                eprintln!("rmdir {}: {error}", entry.display());
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// Tells the model something, or asks it.
pub fn ask_model(command: &str, arguments: &[&str]) -> Result<Value> {
    const PORT: &str = "/dev/virtio-ports/org.ibgda.model";
    let mut port = fs::File::options()
        .read(true)
        .write(true)
        .open(PORT)
        .with_context(|| format!("open {PORT}"))?;
    // An answer to somebody who did not wait for it has another number.
    let id = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let request = json!({"command": command, "args": arguments, "id": id});
    // The newline before ends whatever an earlier client left unfinished.
    port.write_all(format!("\n{request}\n").as_bytes())?;
    for line in BufReader::new(port).lines() {
        let mut answer: Value = serde_json::from_str(&line?)?;
        let its_id = answer
            .as_object_mut()
            .and_then(|answer| answer.remove("id"));
        if its_id == Some(json!(id)) {
            ensure!(
                answer.get("error").is_none(),
                "{command} {arguments:?}: {answer}"
            );
            return Ok(answer);
        }
    }
    anyhow::bail!("the model's port was closed")
}

/// Doorbells and requests that no NIC should have seen, of both NICs; all 0 in a machine in order.
pub const WRONG: [&str; 5] = [
    "foreign_doorbells",
    "stale_doorbells",
    "lost_doorbells",
    "doorbells_ahead",
    "torn_wqes",
];

/// The model's counters, summed over the NICs.
pub fn counts() -> Result<BTreeMap<String, u64>> {
    let answer = ask_model("counts", &[])?;
    let rows = answer["functions"]
        .as_array()
        .context("counts has functions")?;
    let mut sums = BTreeMap::new();
    for row in rows.iter().filter_map(Value::as_object) {
        for (name, count) in row {
            if let Some(count) = count.as_u64() {
                *sums.entry(name.clone()).or_default() += count;
            }
        }
    }
    Ok(sums)
}

/// That nothing of [`WRONG`] was counted, and that doorbells were found in memory: a line of what was.
pub fn nothing_wrong() -> Result<String> {
    let counts = counts()?;
    let count = |name: &str| {
        let found = counts.get(name).copied();
        found.with_context(|| format!("the model does not count {name}"))
    };
    for name in WRONG {
        ensure!(
            count(name)? == 0,
            "the model counts {} {name}",
            count(name)?
        );
    }
    let (found, late) = (count("found_doorbells")?, count("late_doorbells")?);
    ensure!(found > 0, "no doorbell was found in mapped memory");
    Ok(format!(
        "{}: all 0; {found} doorbells found in mapped pages, {late} of them perhaps more than 5 us old",
        WRONG.join(", ")
    ))
}

/// Makes the kernel see a fatal PCIe error of a function.
pub fn inject_fatal_error(function: Bdf) -> Result<()> {
    const DATA_LINK_PROTOCOL: u32 = 0x10;
    let mut record = [0; 32];
    record[..3].copy_from_slice(&[function.bus, function.device, function.function]);
    record[4..8].copy_from_slice(&DATA_LINK_PROTOCOL.to_ne_bytes());
    record[28..].copy_from_slice(&function.domain.to_ne_bytes());
    fs::write("/dev/aer_inject", record)
        .context("write /dev/aer_inject (is the module aer_inject loaded?)")
}
