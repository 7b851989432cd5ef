// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program from outside: its sockets, its end, its control client.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vfio_user::Client;

const CONNECTX: &str = env!("CARGO_BIN_EXE_connectx");
const PATIENCE: Duration = Duration::from_secs(20);

/// A running model, killed if a test fails before its end.
struct Model {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Model {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(dir: &Path, nics: &str, gpus: &str) -> Child {
    spawn_with(dir, &["--nics", nics, "--gpus", gpus])
}

fn spawn_with(dir: &Path, args: &[&str]) -> Child {
    Command::new(CONNECTX)
        .arg("serve")
        .args(args)
        .arg("--dir")
        .arg(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

impl Model {
    fn start(nics: &str, gpus: &str) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), nics, gpus)
    }

    fn start_in(dir: tempfile::TempDir, nics: &str, gpus: &str) -> Self {
        Self::start_with(dir, &["--nics", nics, "--gpus", gpus])
    }

    fn start_with(dir: tempfile::TempDir, args: &[&str]) -> Self {
        let mut child = spawn_with(dir.path(), args);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let model = Self { child, dir };
        assert_eq!(line, "ready\n");
        model
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// Waits for the end: exit status and standard error.
    fn end(&mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let mut errors = String::new();
                self.child
                    .stderr
                    .take()
                    .unwrap()
                    .read_to_string(&mut errors)
                    .unwrap();
                return (status.code(), errors);
            }
            assert!(Instant::now() < deadline, "the model does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ctl(&self, args: &[&str]) -> Output {
        let socket = self.dir.path().join("ctl.sock");
        Command::new(CONNECTX)
            .args(["ctl", "--socket"])
            .arg(socket)
            .args(args)
            .output()
            .unwrap()
    }
}

#[test]
fn sigterm_ends_it_cleanly() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut model = Model::start("2", "1");
        for name in [
            "nic0.sock",
            "nic1.sock",
            "gpu0.sock",
            "ctl.sock",
            "connectx.log",
            "connectx.jsonl",
        ] {
            assert!(model.dir.path().join(name).exists(), "{name}");
        }
        model.signal(signal);
        assert_eq!(model.end(), (Some(0), String::new()));
        assert!(!model.dir.path().join("nic0.sock").exists());
        assert!(!model.dir.path().join("ctl.sock").exists());
    }
}

#[test]
fn it_ends_when_the_last_client_goes() {
    let mut model = Model::start("1", "1");
    let client = |name: &str| {
        let mut client = Client::new(&model.dir.path().join(name)).unwrap();
        client.region_read(7, 0, &mut [0; 4]).unwrap();
        client
    };
    let (nic, gpu) = (client("nic0.sock"), client("gpu0.sock"));
    drop(nic);
    // A function can be unplugged and plugged in again while another is in use.
    let again = client("nic0.sock");
    drop(again);
    let answer = model.ctl(&["ping"]);
    assert!(answer.status.success());
    drop(gpu);
    assert_eq!(model.end(), (Some(0), String::new()));
}

/// Two hosts number their functions on, and a bus address of one reaches nothing of the other's.
#[test]
fn hosts_have_buses_of_their_own() {
    const CONFIG: u32 = 7;
    const BAR: u64 = 0x8000_0000;
    let dir = tempfile::tempdir().unwrap();
    let further = dir.path().join("further.sock");
    let further_path = further.to_str().unwrap();
    let model = Model::start_with(dir, &["--hosts", "2", "--ctl", further_path]);
    assert!(further.exists());
    let client = |name: &str| Client::new(&model.dir.path().join(name)).unwrap();
    let mut nics = [client("nic0.sock"), client("nic1.sock")];
    let mut gpus = [client("gpu0.sock"), client("gpu1.sock")];
    let set = |client: &mut Client, region: u32, offset: u64, value: u32| {
        client
            .region_write(region, offset, &value.to_le_bytes())
            .unwrap();
    };
    for nic in &mut nics {
        set(nic, CONFIG, 0x10, BAR as u32);
        set(nic, CONFIG, 0x14, 0);
        set(nic, CONFIG, 4, 6);
    }
    let count = |nic: usize| {
        let answer = model.ctl(&["--json", "counts", &format!("nic{nic}")]);
        let answer: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap();
        answer["functions"][0]["stale_doorbells"].as_u64().unwrap()
    };
    for (host, gpu) in gpus.iter_mut().enumerate() {
        set(gpu, CONFIG, 4, 6);
        // The stand-in GPU's first engine stores three times to a page that was given to no one.
        let address = BAR as u32 + (32 << 20) - 4096 + 0x800;
        for (register, value) in [
            (0x00, address),
            (0x04, 0),
            (0x08, 8),
            (0x0c, 1),
            (0x10, 3),
            (0x14, 1),
        ] {
            set(gpu, 0, 0x1000 + register, value);
        }
        let deadline = Instant::now() + PATIENCE;
        while count(host) < 3 {
            assert!(Instant::now() < deadline, "no doorbell for nic{host}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert_eq!([count(0), count(1)], [3, 3]);
}

#[test]
fn leftovers_of_a_killed_model_are_replaced() {
    let mut model = Model::start("1", "0");
    model.child.kill().unwrap();
    model.child.wait().unwrap();
    let dir = std::mem::replace(&mut model.dir, tempfile::tempdir().unwrap());
    assert!(dir.path().join("nic0.sock").exists());
    let mut model = Model::start_in(dir, "1", "0");
    model.signal(Signal::SIGTERM);
    assert_eq!(model.end().0, Some(0));
}

#[test]
fn failures_to_start_are_told() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("nic0.sock"), "precious").unwrap();
    let output = spawn(dir.path(), "1", "0").wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.contains("nic0.sock exists and is no socket"),
        "{errors}"
    );
    assert_eq!(output.stdout, b"");

    std::fs::write(dir.path().join("file"), "").unwrap();
    let output = spawn(&dir.path().join("file/sub"), "1", "0")
        .wait_with_output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));

    let model = Model::start("0", "1");
    let output = spawn(model.dir.path(), "0", "1")
        .wait_with_output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("another model serves in"), "{errors}");
    assert!(model.ctl(&["ping"]).status.success());

    let output = spawn(dir.path(), "33", "0").wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_control_client_prints_tables_and_json() {
    let model = Model::start("1", "1");
    let text = |output: &Output| String::from_utf8(output.stdout.clone()).unwrap();
    let table = text(&model.ctl(&["counts"]));
    assert!(table.starts_with("name "), "{table}");
    assert!(
        table
            .lines()
            .any(|l| l.split_whitespace().collect::<Vec<_>>() == ["stores", "-", "0"]),
        "{table}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&text(&model.ctl(&["--json", "counts"]))).unwrap();
    assert_eq!(json["functions"][0]["name"], "nic0");
    assert_eq!(json["functions"][1]["name"], "gpu0");
    assert_eq!(json["functions"][1]["refusals"], 0);
    let unknown = model.ctl(&["fly"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no command \"fly\""));
}

#[test]
fn explain_reads_dumps_and_tells_by_its_exit_status() {
    let explain = |args: &[&str]| {
        Command::new(CONNECTX)
            .arg("explain")
            .args(args)
            .output()
            .unwrap()
    };
    let list = explain(&["list"]);
    assert!(
        String::from_utf8_lossy(&list.stdout)
            .lines()
            .any(|line| line.starts_with("qpc "))
    );
    // A NOP of QP 7: one segment.
    let good = explain(&[
        "wqe",
        "00 00 01 00",
        "00 00 07 01",
        "00 00 00 08",
        "00000000",
    ]);
    assert_eq!(good.status.code(), Some(0));
    let bad = explain(&[
        "--json",
        "wqe",
        "00 00 01 7f",
        "00 00 07 01",
        "00 00 00 08",
        "00000000",
    ]);
    assert_eq!(bad.status.code(), Some(3));
    let json: serde_json::Value = serde_json::from_slice(&bad.stdout).unwrap();
    assert!(json["problems"][0].as_str().unwrap().contains("opcode"));
    for args in [&["wqe", "xyz"][..], &["nonsense", "00"]] {
        let output = explain(args);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stderr.starts_with(b"connectx: "));
    }
}
