// SPDX-License-Identifier: MIT OR Apache-2.0
//! QEMU's monitor, for plugging cards in and out.

use crate::pair::wait;
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::fs;

/// QEMU's monitor, of which both ends are QEMU's.
#[derive(Debug)]
pub struct Monitor(fs::File);

impl Monitor {
    pub fn open() -> Result<Self> {
        let port = "/dev/virtio-ports/org.ibgda.monitor";
        let file = fs::File::options().read(true).write(true).open(port);
        let mut monitor = Self(file.context(port)?);
        // Refused from the second time on.
        let _ = monitor.run("qmp_capabilities", json!({}));
        Ok(monitor)
    }

    pub fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        use std::io::{BufRead, BufReader, Write};
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let id = format!("{}-{number}", std::process::id());
        let request = json!({"execute": command, "arguments": arguments, "id": id});
        self.0.write_all(format!("{request}\n").as_bytes())?;
        for line in BufReader::new(&self.0).lines() {
            let answer: Value = serde_json::from_str(&line?)?;
            if answer["id"] == id.as_str() {
                ensure!(answer.get("error").is_none(), "{command}: {answer}");
                return Ok(answer["return"].clone());
            }
        }
        anyhow::bail!("the monitor has gone")
    }

    /// Presses the attention button of a device's slot: the guest lets go of the card, or looks for one. That is all that
    /// `device_del` does at a slot without a power controller; QEMU keeps its end of the card (docs/qemu-bugs.md).
    pub fn press_button(&mut self, device: &str) -> Result<()> {
        // Refused while the last press is younger than 5 s.
        wait("the button", || {
            let pressed = self.run("device_del", json!({"id": device}));
            pressed.is_ok()
        })
    }
}
