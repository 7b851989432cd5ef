// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `ibgda` command in the virtual machine: what it says of a machine in order, and of one that is not. Needs two
//! NICs: `./ci/vm --nics 2 --gpus 1`.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::machine::{
    self, Allowed, ask_model, entry_path, gpus, nics, unbind_mlx5_ib, wait_for_rdma,
};
use ibgda_vmtests::said::{PROGRAM, Said, ibgda};
use serde_json::Value;

/// The same as a user who is nobody.
fn as_nobody(arguments: &[&str]) -> Result<Said> {
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", PROGRAM];
    Said::new(
        Command::new("setpriv")
            .args(nobody)
            .args(arguments)
            .output()
            .context("setpriv")?,
    )
}

/// `ibgda events` in the background. Its own time-out ends it if the test does not.
struct Events {
    child: Child,
    errors: BufReader<std::process::ChildStderr>,
}

impl Events {
    /// Started, and bound to the pair.
    fn watch(arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(PROGRAM)
            .args(["events", "--json", "--timeout", "150"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let errors = BufReader::new(child.stderr.take().context("stderr")?);
        let mut events = Self { child, errors };
        events.until("watching")?;
        Ok(events)
    }

    /// Reads what it says of itself up to this word. It ends by itself, and then this does.
    fn until(&mut self, word: &str) -> Result<()> {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            ensure!(
                self.errors.read_line(&mut line)? != 0,
                "it ended without {word:?}"
            );
        }
        Ok(())
    }

    /// Its records, when it has ended.
    fn records(self) -> Result<Vec<Value>> {
        let said = Said::new(self.child.wait_with_output()?)?.ended_with(0)?;
        let lines = said.output.lines().map(serde_json::from_str);
        Ok(lines.collect::<Result<_, _>>()?)
    }
}

/// One test for all that reads error counters: a reset raises them until the machine restarts.
#[test]
fn a_machine_has_nothing_to_fix_until_a_nic_fails() -> Result<()> {
    let (gpu, nics) = (gpus()[0], nics());
    let pairs = [0, 1].map(|nic| Allowed::pair(gpu, nics[nic]));
    let said = ibgda(&["doctor"])?.ended_with(0)?;
    println!("{}", said.output);
    for line in said.output.lines().filter(|line| !line.starts_with("ok  ")) {
        ensure!(
            line.starts_with("n/a ") || line.contains(" 0 warn, 0 fail, "),
            "{line}"
        );
    }
    for line in [
        "ok    kernel-rust: CONFIG_RUST=y".into(),
        "ok    abi: version 1, features 0x".into(),
        format!(
            "ok    policy {gpu}@{}: allowed by {gpu}@{}",
            nics[1], nics[1]
        ),
        format!(
            "ok    path {gpu}@{}: PIX, below one PCIe switch; the broker binds it: below one PCIe switch",
            nics[0]
        ),
        "n/a   peer-mapping: this is the model's VM".into(),
        format!(
            "ok    acs {gpu}@{}: no bridge between the two redirects",
            nics[0]
        ),
        format!("ok    link {gpu}: 32 GT/s x16, all that it can do"),
        format!("ok    aer {}: no errors since boot", nics[0]),
        format!("ok    aer-recovery {}: the port ", nics[0]),
        "ok    port mlx5_0/1: ACTIVE, LinkUp, InfiniBand".into(),
        "ok    address mlx5_0/1: LID 0x1".into(),
        "ok    memlock: ".into(),
    ] {
        said.output_has(&line)?;
    }
    // With one of the two NICs allowed, the GPU has what it needs.
    let [first, second] = pairs;
    drop(second);
    ibgda(&["doctor"])?.ended_with(0)?.output_has(&format!(
        "n/a   policy {gpu}@{}: not allowed; the GPU has another",
        nics[1]
    ))?;

    let (gpu_name, nic_name) = (gpu.to_string(), nics[0].to_string());
    let mut events = Events::watch(&["--gpu", &gpu_name, "--nic", &nic_name, "--count", "3"])?;
    machine::inject_error(nics[0], machine::FATAL);
    // It comes back to the NIC, and so sees the next loss too.
    events.until("bound again to mlx5_0, generation 2")?;
    drop(first);
    let records = events.records()?;
    let told: Vec<_> = records
        .iter()
        .map(|record| {
            (
                record["event"].as_str(),
                record["reason"].as_str(),
                record["generation"].as_u64(),
            )
        })
        .collect();
    let reset = Some("nic-reset");
    ensure!(
        told == [
            (Some("lost"), reset, Some(1)),
            (Some("recovered"), reset, Some(2)),
            (Some("lost"), Some("policy"), Some(2)),
        ],
        "{records:#?}"
    );
    let times: Vec<_> = records
        .iter()
        .map(|record| record["time_ns"].as_u64())
        .collect();
    ensure!(times.is_sorted() && times[0] > Some(0), "{times:?}");

    wait_for_rdma(nics[0]);
    let _allowed = [0, 1].map(|nic| Allowed::pair(gpu, nics[nic]));
    // A warning is no failure.
    ibgda(&["doctor"])?
        .ended_with(0)?
        .output_has(&format!(
            "warn  aer {}: uncorrectable errors since boot: 1 fatal; fix: dmesg",
            nics[0]
        ))?
        .output_has(" 1 warn, 0 fail, ")?;
    Ok(())
}

#[test]
fn what_is_missing_fails_with_the_fix() -> Result<()> {
    let (gpu, nic) = (gpus()[0], nics()[0]);
    let line = format!(
        "fail  policy {gpu}@{nic}: not allowed, as nothing is by default; fix: as root: ibgda policy add {gpu}@{nic}"
    );
    let allowed = Allowed::pair(gpu, nic);
    drop(allowed);
    ibgda(&["doctor"])?.ended_with(1)?.output_has(&line)?;
    let said = ibgda(&[
        "doctor",
        "--gpu",
        &gpu.to_string(),
        "--nic",
        "mlx5_0",
        "--json",
    ])?
    .ended_with(1)?;
    let document = said.json()?;
    ensure!(
        document["version"] == 1 && document["summary"]["fail"] == 1,
        "{document:#}"
    );
    let findings = document["findings"].as_array().context("no findings")?;
    let failed = findings
        .iter()
        .find(|finding| finding["status"] == "fail")
        .context("none failed")?;
    ensure!(
        failed["check"] == "policy" && failed["subject"] == format!("{gpu}@{nic}"),
        "{failed}"
    );

    let _allowed = Allowed::pair(gpu, nic);
    let said = as_nobody(&["doctor"])?.ended_with(1)?;
    said.output_has("fail  device: no permission to open /dev/ibgda")?
        .output_has("warn  memlock: 8192 KiB")?;
    said.output_has(&format!(
        "n/a   acs {gpu}@{nic}: only root can read configuration space"
    ))?;

    let bind = unbind_mlx5_ib(nic);
    let said = ibgda(&["doctor", "--nic", &nic.to_string()]);
    bind();
    let said = said?.ended_with(1)?;
    said.output_has(&format!(
        "fail  nics {nic}: no verbs device (mlx5_core); fix: modprobe mlx5_ib"
    ))?;
    said.output_has("the second no RDMA NIC that mlx5_ib drives")?;

    for (arguments, status, words) in [
        (&["doctor", "--nic", "mlx5_9"][..], 1, "NICs here: mlx5_0"),
        (
            &["doctor", "--gpu", "0000:00:00.0"],
            1,
            "0000:00:00.0 is no GPU",
        ),
        (
            &["doctor", "--gpu", "gpu0"],
            2,
            "is not a PCI function such as",
        ),
        (&["doctor", "--speed"], 2, "--speed"),
        (&[], 2, "Usage"),
    ] {
        ibgda(arguments)?.ended_with(status)?.errors_have(words)?;
    }
    Ok(())
}

/// Moves a file away, and back when dropped.
struct Away(&'static str);

const ASIDE: &str = "/dev/aside";

impl Away {
    fn new(path: &'static str) -> Result<Self> {
        fs::rename(path, ASIDE).context(path)?;
        Ok(Self(path))
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        fs::rename(ASIDE, self.0).unwrap_or_else(|error| panic!("move {} back: {error}", self.0));
    }
}

#[test]
fn what_is_taken_away_is_missed() -> Result<()> {
    let (gpu, nic) = (gpus()[0], nics()[1]);
    let _allowed = Allowed::pair(gpu, nic);
    let doctor = ["doctor", "--nic", "mlx5_1"];
    let missed = |line: &str| ibgda(&doctor)?.ended_with(1)?.output_has(line).map(drop);

    ask_model("link", &["nic1", "down"]);
    let said = missed("fail  port mlx5_1/1: DOWN");
    ask_model("link", &["nic1", "up"]);
    wait_for_rdma(nic);
    said?;

    let away = Away::new("/dev/infiniband/uverbs1")?;
    missed("fail  uverbs: missing: /dev/infiniband/uverbs1 of mlx5_1")?;
    drop(away);
    let away = Away::new("/dev/ibgda")?;
    missed(
        "fail  device: the module is loaded, but there is no /dev/ibgda here; fix: in a container: --device",
    )?;
    drop(away);

    // In a user namespace of its own, root has a machine in which all works but what asks for the real one.
    let inside = Command::new("unshare")
        .args(["-Ur", PROGRAM])
        .args(doctor)
        .output()?;
    let said = Said::new(inside)?.ended_with(0)?;
    said.output_has("ok    container: a user namespace of its own")?
        .output_has(&format!("n/a   acs {gpu}@{nic}: only root can read"))?
        .output_has("warn  memlock: 8192 KiB")?;
    Ok(())
}

#[test]
fn the_matrix_of_gpus_and_nics() -> Result<()> {
    let (gpu, nics) = (gpus()[0], nics());
    let said = ibgda(&["topo"])?.ended_with(0)?;
    println!("{}", said.output);
    let rows: Vec<Vec<&str>> = said
        .output
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    ensure!(
        rows[0] == ["GPU0", "NIC0", "NIC1", "CPU", "affinity", "NUMA", "node"],
        "{rows:?}"
    );
    ensure!(rows[1][..4] == ["GPU0", "X", "PIX", "PIX"], "{rows:?}");
    ensure!(
        rows[3] == ["NIC1", "PIX", "PIX", "X", "0-1", "unknown"],
        "{rows:?}"
    );
    said.output_has(&format!("NIC1    {}  mlx5_1\n", nics[1]))?
        .output_has("below one PCIe switch")?;
    let document = ibgda(&["topo", "--json"])?.ended_with(0)?.json()?;
    ensure!(
        document["devices"][0]["bdf"] == gpu.to_string(),
        "{document:#}"
    );
    ensure!(
        document["paths"].as_array().context("no paths")?.len() == 9,
        "{document:#}"
    );
    Ok(())
}

#[test]
fn the_policy_is_listed_and_changed() -> Result<()> {
    let pair = format!("{}@{}", gpus()[0], nics()[1]);
    ibgda(&["policy", "list"])?
        .ended_with(0)?
        .output_has("no pair is allowed")?;
    // The NIC by its name too.
    let by_name = format!("{}@mlx5_1", gpus()[0]);
    let said = ibgda(&["policy", "add", &by_name])?.ended_with(0)?;
    said.output_has(&format!("{pair} is allowed now; to keep it"))?
        .output_has("/etc/ibgda/policy")?;
    ensure!(entry_path(&pair).is_dir());
    ibgda(&["policy", "add", &pair])?
        .ended_with(0)?
        .output_has("allowed already")?;
    ibgda(&["policy", "add", "--any-path", &pair])?
        .ended_with(0)?
        .output_has("any-path")?;
    let said = ibgda(&["policy", "list"])?.ended_with(0)?;
    said.output_has(&format!("{pair}  any-path  (not in /etc/ibgda/policy)\n"))?;
    let document = ibgda(&["policy", "list", "--json"])?
        .ended_with(0)?
        .json()?;
    let entry = serde_json::json!({ "pair": pair, "any_path": true, "in_file": false });
    ensure!(
        document == serde_json::json!({ "version": 1, "entries": [entry] }),
        "{document:#}"
    );

    for (change, words) in [
        ("add", "was not added: only root"),
        ("remove", "was not removed: only root"),
    ] {
        let pair = if change == "add" {
            "*@*"
        } else {
            pair.as_str()
        };
        as_nobody(&["policy", change, pair])?
            .ended_with(1)?
            .errors_have(words)?;
    }
    ensure!(entry_path(&pair).is_dir() && !entry_path("*@*").exists());

    ibgda(&["policy", "remove", &by_name])?
        .ended_with(0)?
        .output_has("no longer allowed\n")?;
    ensure!(!entry_path(&pair).exists());
    for (change, pair, words) in [
        (
            "remove",
            pair.as_str(),
            "is not in force, so it cannot be removed; in force: none",
        ),
        ("add", "0000:05:00.0", "is no pair: write GPU@NIC"),
        (
            "add",
            "0000:05:00.9@*",
            "the GPU: \"0000:05:00.9\" is not a PCI function",
        ),
        (
            "add",
            "*@mlx5_9",
            "the NIC: \"mlx5_9\" is not a PCI function",
        ),
    ] {
        ibgda(&["policy", change, pair])?
            .ended_with(1)?
            .errors_have(words)?;
    }
    // What is not there now may come, so it is only noted.
    let said = ibgda(&["policy", "add", "*@0000:fe:1f.7"])?.ended_with(0)?;
    said.errors_have("there is no PCI function 0000:fe:1f.7 now")?;
    ibgda(&["policy", "remove", "*@0000:fe:1f.7"])?.ended_with(0)?;
    ibgda(&["--root", "/nonexistent", "policy", "list"])?
        .ended_with(1)?
        .errors_have("is not loaded; fix: modprobe")?;
    Ok(())
}

#[test]
fn events_that_cannot_be_watched_or_do_not_come() -> Result<()> {
    let (gpu, nic) = (gpus()[0].to_string(), nics()[1].to_string());
    let watch = ["events", "--gpu", &gpu, "--nic", &nic];
    let said = ibgda(&watch)?.ended_with(1)?;
    said.errors_have("the policy does not allow this pair")?
        .errors_have(&format!("; fix: as root: ibgda policy add {gpu}@{nic}"))?;
    as_nobody(&watch)?
        .ended_with(1)?
        .errors_have("no permission to open /dev/ibgda")?;
    ibgda(&["events", "--gpu", &nic, "--nic", &nic])?
        .ended_with(1)?
        .errors_have("is no GPU")?;

    let _allowed = Allowed::pair(gpus()[0], nics()[1]);
    let for_a_second = [&watch[..], &["--timeout", "1"]].concat();
    let said = ibgda(&for_a_second)?.ended_with(0)?;
    ensure!(said.output.is_empty(), "{said:?}");
    let in_vain = [&for_a_second[..], &["--count", "1"]].concat();
    ibgda(&in_vain)?
        .ended_with(1)?
        .errors_have("0 of 1 records came within 1 s")?;
    Ok(())
}

#[test]
fn dumps_are_decoded() -> Result<()> {
    // An RDMA WRITE as rdma-core writes it, and its completion.
    let wqe = "00000108 00004803 00000008 00000000 00000000 12340000 00001234 00000000 \
               00000100 00001111 00000000 56780000";
    let said = ibgda(&["decode", "wqe", wqe])?.ended_with(0)?;
    said.output_has("RDMA WRITE")?
        .output_has("nothing is wrong with it by itself")?;
    let mut child = Command::new(PROGRAM)
        .args(["decode", "cqe", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("stdin")?;
    // As mlx5_ib prints it (dump_cqe) when the peer refuses the rkey.
    for (line, bytes) in [
        "",
        "",
        "",
        "00 00 00 00 00 00 88 13 08 00 00 48 00 01 00 d2",
    ]
    .iter()
    .enumerate()
    {
        let zeros = "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00";
        let bytes = if bytes.is_empty() { zeros } else { bytes };
        writeln!(input, "[  123.456789] {:08x}: {bytes}", 16 * line)?;
    }
    drop(input);
    let said = Said::new(child.wait_with_output()?)?.ended_with(3)?;
    said.output_has("a request has failed")?
        .output_has("IBGDA_ERR_REMOTE_ACCESS, 0x113); fix: check rkey")?;
    ibgda(&["decode", "cqe", "00", "0g"])?
        .ended_with(1)?
        .errors_have("the arguments: line 1: \"0g\"")?;
    ibgda(&["decode", "eqe", "00"])?
        .ended_with(2)?
        .errors_have("possible values: wqe, cqe")?;
    Ok(())
}
