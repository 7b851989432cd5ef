// SPDX-License-Identifier: MIT OR Apache-2.0
//! The link to the other guest of `--peer`.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::ready::{modprobe, run};
use crate::protocol::PEERS;

/// How often to look whether someone listens.
pub const LOOK: Duration = Duration::from_millis(20);

/// The one Ethernet interface; names are the kernel's, since there is no udev.
const INTERFACE: &str = "eth0";

/// Gives the interface to the other guest its address, and both guests their names.
pub fn set_up(index: usize) -> Result<()> {
    let own = PEERS.get(index).context("there are two guests")?;
    modprobe(&["virtio_net"])?;
    let address = format!("{}/24", own.address);
    run("ip", &["address", "add", &address, "dev", INTERFACE])?;
    run("ip", &["link", "set", INTERFACE, "up"])?;
    let mut hosts = String::from("127.0.0.1 localhost\n::1 localhost\n");
    for peer in &PEERS {
        hosts += &format!("{} {}\n", peer.address, peer.name);
    }
    fs::write("/etc/hosts", hosts).context("writing /etc/hosts")
}

/// Whether a process of the guest listens on a TCP port.
pub fn someone_listens() -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .any(|table| fs::read_to_string(table).is_ok_and(|text| has_listener(&text)))
}

/// Whether a table of sockets as in `/proc/net/tcp` has one in the state TCP_LISTEN, which is 10.
fn has_listener(table: &str) -> bool {
    table
        .lines()
        .skip(1)
        .any(|line| line.split_whitespace().nth(3) == Some("0A"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_told_from_connections() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let line = |state: &str| {
            format!(
                "   0: 0100007F:4965 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0\n"
            )
        };
        assert!(!has_listener(head));
        assert!(!has_listener(&format!("{head}{}", line("01"))));
        assert!(has_listener(&format!("{head}{}{}", line("01"), line("0A"))));
    }
}
