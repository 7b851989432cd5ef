// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda policy`: the pairs that are allowed now, in configfs. ibgda-policy(8) brings a file into force at boot.

use crate::{
    bdf::Bdf,
    machine::{Machine, list},
    output::print,
    root::Root,
};
use anyhow::{Context as _, Result, anyhow, bail};
use serde::Serialize;
use std::{fmt, fs, io};

const ALLOW: &str = "sys/kernel/config/ibgda/allow";
/// What is brought into force at boot.
const FILE: &str = "etc/ibgda/policy";

/// List or change which GPU may ring which NIC.
///
/// What is changed here holds at once and until the module is unloaded. The service ibgda-policy makes it what
/// /etc/ibgda/policy says when the machine starts or the service is reloaded: what is to stay belongs there too.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Print the pairs that are allowed now.
    List {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Allow a pair.
    Add {
        /// GPU@NIC: PCI functions, as 0000:65:00.0@0000:17:00.0; the NIC also by name, as mlx5_0; * is any.
        pair: String,
        /// Also when the kernel finds no way from one to the other peer to peer.
        #[arg(long)]
        any_path: bool,
    },
    /// No longer allow a pair. Sessions that relied on it are lost at once.
    Remove {
        /// GPU@NIC, as it is listed.
        pair: String,
    },
}

/// A pair of the policy; `None` is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pair {
    gpu: Option<Bdf>,
    nic: Option<Bdf>,
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |side: Option<Bdf>| side.map_or("*".into(), |bdf| bdf.to_string());
        write!(f, "{}@{}", side(self.gpu), side(self.nic))
    }
}

impl Pair {
    fn parse(text: &str, machine: &Machine) -> Result<Self> {
        let (gpu, nic) = text
            .split_once('@')
            .filter(|(_, nic)| !nic.contains('@'))
            .with_context(|| {
                format!("{text:?} is no pair: write GPU@NIC, as 0000:65:00.0@0000:17:00.0")
            })?;
        let side = |what: &str, text: &str| match text {
            "*" => Ok(None),
            text => match text.parse() {
                Ok(bdf) => Ok(Some(bdf)),
                Err(error) => Err(anyhow!("the {what}: {error}, nor *")),
            },
        };
        let named = machine
            .nics
            .iter()
            .find(|known| known.rdma.as_deref() == Some(nic));
        let pair = Self {
            gpu: side("GPU", gpu)?,
            nic: match named {
                Some(nic) => Some(nic.function.bdf),
                None => side("NIC", nic)?,
            },
        };
        if pair.gpu.is_some() && pair.gpu == pair.nic {
            bail!("{text:?}: the GPU and the NIC are the same function");
        }
        Ok(pair)
    }

    /// What is not as the pair says, now.
    fn notes(self, machine: &Machine) -> Vec<String> {
        let sides = [(self.gpu, "GPU"), (self.nic, "RDMA NIC")];
        let notes = sides.into_iter().filter_map(|(side, what)| {
            let bdf = side?;
            let is_it = match what {
                "GPU" => machine.gpus.iter().any(|gpu| gpu.bdf == bdf),
                _ => machine.nics.iter().any(|nic| nic.function.bdf == bdf),
            };
            if is_it {
                None
            } else if machine.functions.contains_key(&bdf) {
                Some(format!("{bdf} is no {what}"))
            } else {
                Some(format!("there is no PCI function {bdf} now"))
            }
        });
        notes.collect()
    }
}

/// One allowed pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// GPU@NIC.
    pub pair: String,
    /// Also without a way peer to peer.
    pub any_path: bool,
    /// Whether /etc/ibgda/policy has it too, so that it is in force after the next boot.
    pub in_file: bool,
}

impl Entry {
    /// Whether it speaks of these two.
    pub fn covers(&self, gpu: Bdf, nic: Bdf) -> bool {
        let matches = |side: &str, bdf: Bdf| side == "*" || side == bdf.to_string();
        let sides = self.pair.split_once('@');
        sides.is_some_and(|(left, right)| matches(left, gpu) && matches(right, nic))
    }
}

/// The entries in force, or why they cannot be known, and what to do.
pub fn entries(root: &Root) -> Result<Vec<Entry>, (String, String)> {
    if !root.has(ALLOW) {
        return Err(if !root.has("sys/module/ibgda") {
            (
                "the module ibgda is not loaded".into(),
                "modprobe -a configfs mlx5_ib ib_uverbs ibgda".into(),
            )
        } else {
            (
                "configfs is not mounted at /sys/kernel/config".into(),
                "mount -t configfs configfs /sys/kernel/config".into(),
            )
        });
    }
    let file = root.text(FILE).unwrap_or_default();
    let in_file = |pair: &str, any_path: bool| {
        file.lines().any(|line| {
            let mut words = line
                .split('#')
                .next()
                .unwrap_or_default()
                .split_whitespace();
            words.next() == Some(pair) && words.any(|word| word == "any-path") == any_path
        })
    };
    let names = root.names(ALLOW).into_iter();
    let entries = names.map(|pair| {
        let any_path = root.text(&format!("{ALLOW}/{pair}/any_path")).as_deref() == Some("1");
        Entry {
            in_file: in_file(&pair, any_path),
            any_path,
            pair,
        }
    });
    Ok(entries.collect())
}

/// Runs it.
pub fn run(root: &Root, arguments: &Arguments) -> Result<()> {
    let machine = Machine::read(root);
    let entries = entries(root).map_err(|(why, fix)| anyhow!("{why}; fix: {fix}"))?;
    match &arguments.command {
        Command::List { json } => print(&listing(&entries, *json)?),
        Command::Add { pair, any_path } => {
            let pair = Pair::parse(pair, &machine)?;
            let said = add(root, &entries, pair, *any_path)?;
            for note in pair.notes(&machine) {
                eprintln!("ibgda: note: {note}");
            }
            print(&said)
        }
        Command::Remove { pair } => print(&remove(
            root,
            &entries,
            &Pair::parse(pair, &machine)?.to_string(),
        )?),
    }
}

fn listing(entries: &[Entry], json: bool) -> Result<String> {
    if json {
        let document = serde_json::json!({ "version": 1, "entries": entries });
        return Ok(serde_json::to_string_pretty(&document)? + "\n");
    }
    if entries.is_empty() {
        return Ok("no pair is allowed\n".into());
    }
    let lines = entries.iter().map(|entry| {
        let any_path = if entry.any_path { "  any-path" } else { "" };
        let in_file = if entry.in_file {
            ""
        } else {
            "  (not in /etc/ibgda/policy)"
        };
        format!("{}{any_path}{in_file}\n", entry.pair)
    });
    Ok(lines.collect())
}

/// Turns what configfs says to a change into words.
fn refused(what: &str, error: io::Error) -> anyhow::Error {
    let why = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "only root of the machine (CAP_SYS_ADMIN in the initial user namespace) changes the policy: use sudo, \
             outside of containers"
        }
        Some(libc::EINVAL) => "the module does not take it for a pair",
        Some(libc::EROFS) => "configfs is mounted read-only, as in a container: do it outside",
        _ => return anyhow::Error::new(error).context(what.to_owned()),
    };
    anyhow!("{what}: {why} ({error})")
}

fn add(root: &Root, entries: &[Entry], pair: Pair, any_path: bool) -> Result<String> {
    let pair = pair.to_string();
    let known = entries.iter().find(|entry| entry.pair == pair);
    let folder = root.path(&format!("{ALLOW}/{pair}"));
    match fs::create_dir(&folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(refused(&format!("{pair} was not added"), error)),
    }
    if any_path && !known.is_some_and(|known| known.any_path) {
        fs::write(folder.join("any_path"), "1").map_err(|error| {
            // What is half is nothing, if it was nothing before.
            if known.is_none() {
                let _ = fs::remove_dir(&folder);
            }
            refused(&format!("{pair} does not take any-path"), error)
        })?;
    }
    let word = if any_path { " any-path" } else { "" };
    let keep =
        format!("to keep it after a restart, add the line \"{pair}{word}\" to /etc/ibgda/policy");
    Ok(match known {
        Some(known) if known.any_path && !any_path => {
            format!(
                "{pair} was allowed already, with any-path; to take that back, remove and add it\n"
            )
        }
        Some(known) if known.any_path == any_path => format!("{pair} was allowed already\n"),
        _ => format!("{pair} is allowed now; {keep}\n"),
    })
}

fn remove(root: &Root, entries: &[Entry], pair: &str) -> Result<String> {
    let known = entries
        .iter()
        .find(|entry| entry.pair == pair)
        .with_context(|| {
            let all = list(entries.iter().map(|entry| entry.pair.clone()));
            format!("{pair} is not in force, so it cannot be removed; in force: {all}")
        })?;
    fs::remove_dir(root.path(&format!("{ALLOW}/{pair}")))
        .map_err(|error| refused(&format!("{pair} was not removed"), error))?;
    Ok(if known.in_file {
        format!(
            "{pair} is no longer allowed, until /etc/ibgda/policy, which still has it, is applied again\n"
        )
    } else {
        format!("{pair} is no longer allowed\n")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Fixture, PAIR};

    #[test]
    fn entries_say_what_is_kept_and_what_they_cover() {
        let fixture = Fixture::healthy();
        let entries = entries(&fixture.root).unwrap();
        assert_eq!(entries.len(), 1);
        assert!(entries[0].in_file && !entries[0].any_path);
        let bdf = |text: &str| text.parse::<Bdf>().unwrap();
        assert!(entries[0].covers(bdf("0000:04:00.0"), bdf("0000:05:00.0")));
        assert!(!entries[0].covers(bdf("0000:05:00.0"), bdf("0000:04:00.0")));
        let wide = Entry {
            pair: "*@0000:05:00.0".into(),
            ..entries[0].clone()
        };
        assert!(wide.covers(bdf("0000:09:00.0"), bdf("0000:05:00.0")));
        assert!(!wide.covers(bdf("0000:09:00.0"), bdf("0000:05:00.1")));
        fixture.write(&format!("{ALLOW}/{PAIR}/any_path"), "1\n");
        let text = listing(&super::entries(&fixture.root).unwrap(), false).unwrap();
        assert_eq!(
            text,
            format!("{PAIR}  any-path  (not in /etc/ibgda/policy)\n")
        );
    }

    #[test]
    fn pairs_that_are_none_are_refused_with_the_side() {
        let machine = Machine::read(&Fixture::healthy().root);
        let parse = |text: &str| Pair::parse(text, &machine);
        assert_eq!(parse("04:00.0@mlx5_0").unwrap().to_string(), PAIR);
        assert_eq!(
            parse("0000:0A:00.0@*").unwrap().to_string(),
            "0000:0a:00.0@*"
        );
        for (text, said) in [
            ("0000:04:00.0", "is no pair: write GPU@NIC"),
            ("*@*@*", "is no pair"),
            (
                "0000:04:20.0@*",
                "the GPU: \"0000:04:20.0\" is not a PCI function",
            ),
            ("*@mlx5_7", "the NIC: \"mlx5_7\" is not a PCI function"),
            ("*@", "the NIC: \"\""),
            ("04:00.0@0000:04:00.0", "the same function"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let notes = parse("0000:05:00.0@0000:77:00.0").unwrap().notes(&machine);
        assert_eq!(
            notes,
            [
                "0000:05:00.0 is no GPU",
                "there is no PCI function 0000:77:00.0 now"
            ]
        );
    }

    #[test]
    fn changes_say_what_they_did_and_what_stays() {
        let fixture = Fixture::healthy();
        let machine = Machine::read(&fixture.root);
        let now = || entries(&fixture.root).unwrap();
        let pair = Pair::parse("*@mlx5_0", &machine).unwrap();
        let said = add(&fixture.root, &now(), pair, true).unwrap();
        assert!(
            said.contains("add the line \"*@0000:05:00.0 any-path\" to /etc/ibgda/policy"),
            "{said}"
        );
        assert!(
            add(&fixture.root, &now(), pair, true)
                .unwrap()
                .contains("already")
        );
        assert!(
            add(&fixture.root, &now(), pair, false)
                .unwrap()
                .contains("already, with any-path")
        );
        let error = remove(&fixture.root, &now(), "*@*")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("not in force") && error.contains(PAIR),
            "{error}"
        );
    }

    #[test]
    fn a_missing_module_and_a_missing_mount_are_told_apart() {
        let fixture = Fixture::healthy();
        fixture.remove("sys/kernel/config");
        assert!(
            entries(&fixture.root)
                .unwrap_err()
                .1
                .starts_with("mount -t configfs")
        );
        fixture.remove("sys/module/ibgda");
        assert!(entries(&fixture.root).unwrap_err().0.contains("not loaded"));
    }

    #[test]
    fn refusals_of_the_kernel_have_words() {
        for (errno, word) in [
            (libc::EPERM, "only root"),
            (libc::EROFS, "read-only"),
            (libc::ENOSPC, "space"),
        ] {
            let error = refused("x was not added", io::Error::from_raw_os_error(errno));
            let text = format!("{error:#}");
            assert!(
                text.starts_with("x was not added: ") && text.contains(word),
                "{text}"
            );
        }
    }
}
