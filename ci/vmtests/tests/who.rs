// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who may use the broker: an unprivileged user of the group, and containers without capabilities, move data; where
//! something is missing, the library's error and `ibgda doctor` say what, and what to do.
//!
//! vm: --nics 2 --gpus 1

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::{
    confined::Confined,
    machine::{Allowed, gpus, nics},
    side::{Side, exchange, join},
};
use serde_json::json;
use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

const DEVICE: &str = "/dev/ibgda";
/// A group for the device; which one does not matter. It is Debian's for RDMA.
const GROUP: &str = "rdma";

/// The machine: both pairs allowed, and the device as the package's udev rule has it.
struct Machine {
    group: u32,
    _allowed: [Allowed; 2],
    _turn: MutexGuard<'static, ()>,
}

impl Machine {
    fn take() -> Result<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let groups = fs::read_to_string("/etc/group")?;
        let group = groups
            .lines()
            .find_map(|line| line.strip_prefix(GROUP)?.strip_prefix(":x:"))
            .and_then(|rest| rest.split(':').next()?.parse().ok())
            .with_context(|| format!("no group {GROUP}"))?;
        let rules = fs::read_to_string("/src/packaging/ibgda-utils/60-ibgda.rules")?;
        ensure!(rules.contains(r#"GROUP="ibgda", MODE="0660""#), "{rules}");
        chown(DEVICE, None, Some(group))?;
        fs::set_permissions(DEVICE, fs::Permissions::from_mode(0o660))?;
        let (gpu, nics) = (gpus()[0], nics());
        Ok(Self {
            group,
            _allowed: [Allowed::pair(gpu, nics[0]), Allowed::pair(gpu, nics[1])],
            _turn: turn,
        })
    }
}

/// The doctor's words, as told to someone.
fn doctor(who: &Confined) -> Result<String> {
    let said = who.command(&["ibgda", "doctor"]).output()?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr))
}

fn has(text: &str, parts: &[&str]) -> Result<()> {
    for part in parts {
        ensure!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    Ok(())
}

fn side(mut command: Command, nic: usize) -> Result<Side> {
    command.args([gpus()[0].to_string(), nics()[nic].to_string()]);
    Side::spawn(command)
}

/// Both ends are such a process, and each writes to the other.
fn moves_data(who: &Confined) -> Result<()> {
    let mut sides = Vec::new();
    for nic in 0..2 {
        let side = side(who.command(&["one-side"]), nic)?;
        let opened = side.answer()?;
        ensure!(opened.get("error").is_none(), "{who:?}: {opened}");
        sides.push(side);
    }
    let [near, far] = &mut sides[..] else {
        unreachable!("two were made")
    };
    join(near, far, &json!({}), |_| ())?;
    exchange(near, far, 1).with_context(|| format!("{who:?}"))
}

/// Why such a process cannot open: the library's sentence.
fn refused(command: Command, errno: i32) -> Result<String> {
    let answer = side(command, 0)?.answer()?;
    ensure!(answer["errno"] == errno, "{answer}");
    Ok(answer["error"].as_str().context("a sentence")?.to_owned())
}

fn container(user_namespace: bool) -> Confined {
    Confined::Container {
        nodes: Confined::all_nodes(),
        user_namespace,
    }
}

#[test]
fn a_user_of_the_group_needs_no_capability() -> Result<()> {
    let machine = Machine::take()?;
    let user = Confined::User {
        group: Some(machine.group),
    };
    moves_data(&user)?;
    let said = doctor(&user)?;
    has(
        &said,
        &[
            "ok    abi: version",
            "ok    policy",
            "warn  memlock: 8192 KiB",
        ],
    )?;
    ensure!(!said.contains("\nfail"), "{said}");
    Ok(())
}

#[test]
fn a_user_who_is_not_in_the_group_is_told_of_it() -> Result<()> {
    let _machine = Machine::take()?;
    let user = Confined::User { group: None };
    let error = refused(user.command(&["one-side"]), libc::EACCES)?;
    has(&error, &["/dev/ibgda", "group ibgda"])?;
    has(
        &doctor(&user)?,
        &[
            "fail  device: no permission to open /dev/ibgda",
            "adduser USER ibgda",
        ],
    )
}

#[test]
fn a_container_needs_the_nodes_and_no_capability() -> Result<()> {
    let _machine = Machine::take()?;
    for user_namespace in [false, true] {
        let container = container(user_namespace);
        moves_data(&container)?;
        let said = doctor(&container)?;
        let which = match user_namespace {
            true => "ok    container: a user namespace of its own",
            false => "ok    container: a container without CAP_SYS_ADMIN",
        };
        has(
            &said,
            &[which, "ok    uverbs", "ok    policy", "warn  memlock"],
        )?;
        // What tells the doctor of the model's machine, which needs no such driver, is not in the container.
        let failed = said.lines().filter(|line| line.starts_with("fail"));
        let failed: Vec<&str> = failed
            .filter(|line| !line.contains("nvidia-driver"))
            .collect();
        ensure!(failed.is_empty(), "{failed:#?}");
    }
    Ok(())
}

#[test]
fn a_container_without_a_node_is_told_which() -> Result<()> {
    let _machine = Machine::take()?;
    for user_namespace in [false, true] {
        let without = |node: &str| {
            let mut nodes = Confined::all_nodes();
            nodes.retain(|known| known != node);
            Confined::Container {
                nodes,
                user_namespace,
            }
        };
        let no_broker = without("ibgda");
        let error = refused(no_broker.command(&["one-side"]), libc::ENOENT)?;
        has(&error, &["/dev/ibgda", "container"])?;
        has(
            &doctor(&no_broker)?,
            &["there is no /dev/ibgda here", "--device /dev/ibgda"],
        )?;

        let no_verbs = without("infiniband/uverbs0");
        let error = refused(no_verbs.command(&["one-side"]), libc::ENODEV)?;
        has(&error, &["mlx5_0", "/dev/infiniband"])?;
        has(
            &doctor(&no_verbs)?,
            &[
                "fail  uverbs: missing: /dev/infiniband/uverbs0 of mlx5_0",
                "--device /dev/infiniband",
            ],
        )?;
    }
    Ok(())
}

#[test]
fn too_little_locked_memory_is_named_as_what_is_missing() -> Result<()> {
    let _machine = Machine::take()?;
    for user_namespace in [false, true] {
        let container = container(user_namespace);
        let limit = ["prlimit", "--memlock=65536:65536"];
        let limited = |words: &[&str]| container.command(&[&limit[..], words].concat());
        let mut side = side(limited(&["one-side"]), 0)?;
        let opened = side.answer()?;
        ensure!(opened.get("error").is_none(), "{opened}");
        // Its regions alone are more.
        side.tell(&json!({"do": "begin"}))?;
        let refused = side.answer()?;
        ensure!(
            refused["errno"] == libc::ENOMEM || refused["errno"] == libc::EDQUOT,
            "{refused}"
        );
        has(
            refused["error"].as_str().context("a sentence")?,
            &["RLIMIT_MEMLOCK", "ulimit -l"],
        )?;
        let said = limited(&["ibgda", "doctor"]).output()?;
        has(
            &String::from_utf8_lossy(&said.stdout),
            &["warn  memlock: 64 KiB", "memlock unlimited"],
        )?;
    }
    Ok(())
}
