// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the guests' kernels complained about, though the commands may have ended well.

use std::fs;

use super::vm::Vm;

/// Parts of the lines with which the kernel reports a fault of its own.
const FAULTS: &[&str] = &[
    "BUG: ",
    "kernel BUG at ",
    "Oops: ",
    "WARNING: ",
    "general protection fault",
    "UBSAN: ",
    "refcount_t: ",
    "INFO: task ",
    "rcu: INFO: ",
    "possible circular locking",
    "unregister_netdevice: waiting",
    "unreferenced object ",
    "ODEBUG: ",
];

/// Writes them to `kernel-problems.log`, if there are any, and says so.
pub fn report(vms: &[Vm<'_>]) {
    let mut found = Vec::new();
    for vm in vms {
        let text = fs::read(vm.log.join("kernel.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let label = vm.label();
        found.extend(faults(&text).iter().map(|line| format!("{label}{line}")));
    }
    let (Some(first), Some(vm)) = (found.first(), vms.first()) else {
        return;
    };
    let _ = fs::write(
        vm.options.log.join("kernel-problems.log"),
        found.join("\n") + "\n",
    );
    eprintln!(
        "ci/vm: the guest's kernel reported {} problem(s), the first: {first}",
        found.len()
    );
}

fn faults(log: &str) -> Vec<&str> {
    log.lines()
        .filter(|line| FAULTS.iter().any(|fault| line.contains(fault)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_and_plain_messages_are_not() {
        let log = "[    1.0] ibgda: loading out-of-tree module taints kernel.\n\
                   [    2.0] BUG: kernel NULL pointer dereference, address: 0000000000000000\n\
                   [    2.1] Oops: Oops: 0000 [#1] SMP NOPTI\n\
                   [    3.0] WARNING: drivers/pci/pci.c:2274 at pci_disable_device+0x5a/0x90, CPU#0: sh/1\n";
        assert_eq!(faults(log).len(), 3);
    }
}
