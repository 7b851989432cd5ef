// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel memory that nothing points to any more, where the kernel can tell (CONFIG_DEBUG_KMEMLEAK: the debug kernel).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

const KMEMLEAK: &str = "/sys/kernel/debug/kmemleak";

/// An object is not reported before it is so old (mm/kmemleak.c, MSECS_MIN_AGE).
const MIN_AGE: Duration = Duration::from_secs(5);

/// Objects that a log need show to tell what leaks.
const SHOWN: usize = 16;

/// A function of an allocation's backtrace and why what it allocated is no finding.
const KNOWN: &[(&str, &str)] = &[
    (
        "dma_buf_phys_vec_to_sgt",
        // It sets orig_nents to 0, with which sg_free_table() frees nothing: 32 bytes for each mapping of a dma-buf of
        // uverbs or vfio-pci, of Linux 7.3. An importer cannot mend it without knowing how a later kernel does.
        "scatter lists that the kernel's own dma_buf_free_sgt() forgets",
    ),
    ("dup_task_struct", THREADS),
    ("copy_signal", THREADS),
    ("prepare_creds", THREADS),
    ("task_exec_state_copy", THREADS),
];

/// Uverbs keeps threads that open a context while the device goes, with or without ibgda.ko (docs/mlx5-races.md): their
/// task_struct and what that points to. ibgda.ko holds threads by their `struct pid` and takes no credentials.
const THREADS: &str = "of threads that uverbs forgets when the device goes while they open it";

/// Has the kernel look, and puts what it finds into its log. The objects are a process's to lose: those of the boot are
/// reported too, since the kernel that we build has none.
pub fn report() -> Result<()> {
    if !Path::new(KMEMLEAK).exists() {
        return Ok(());
    }
    sleep(MIN_AGE);
    // What the first scan finds may just have moved; an object counts when its checksum is the same in the second.
    for _ in 0..2 {
        fs::write(KMEMLEAK, "scan").context("starting a scan for leaks")?;
    }
    let found = fs::read_to_string(KMEMLEAK).context("reading the leaks")?;
    let (known, unknown) = sort(&found);
    let mut log = OpenOptions::new().write(true).open("/dev/kmsg")?;
    let mut say = |line: &str| {
        // A record a write.
        log.write_all(format!("kmemleak: {line}\n").as_bytes())
    };
    for (why, count) in known.iter().filter(|(_, count)| *count > 0) {
        say(&format!("{count} known: {why}"))?;
    }
    for object in unknown.iter().take(SHOWN) {
        object.lines().try_for_each(&mut say)?;
    }
    if unknown.len() > SHOWN {
        say(&format!("and {} more", unknown.len() - SHOWN))?;
    }
    Ok(())
}

/// How many objects there are of each known kind, and the others.
fn sort(found: &str) -> (Vec<(&'static str, usize)>, Vec<String>) {
    let mut objects: Vec<String> = Vec::new();
    for line in found.lines() {
        match objects.last_mut() {
            Some(object) if !line.starts_with("unreferenced") => {
                object.push('\n');
                object.push_str(line);
            }
            _ => objects.push(line.to_owned()),
        }
    }
    let is = |object: &String, function: &str| object.contains(&format!(" {function}+"));
    let count = |(function, why): &(&str, &'static str)| {
        (*why, objects.iter().filter(|o| is(o, function)).count())
    };
    let known = KNOWN.iter().map(count).collect();
    objects.retain(|object| !KNOWN.iter().any(|(function, _)| is(object, function)));
    (known, objects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_leaks_are_counted_and_others_kept_whole() {
        let found = "unreferenced object 0x1 (size 32):\n  backtrace:\n    dma_buf_phys_vec_to_sgt+0x355/0xcf0\n\
                     unreferenced object 0x2 (size 64):\n  backtrace:\n    other_dma_buf_phys_vec_to_sgt+0x1/0x2\n";
        let (known, others) = sort(found);
        assert_eq!(known[0].1, 1);
        assert_eq!(others.len(), 1);
        assert!(others[0].starts_with("unreferenced object 0x2") && others[0].contains("other_"));
    }
}
