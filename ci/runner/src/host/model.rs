// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ConnectX model's process, which serves the functions of all guests.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::child::{Guarded, describe};
use super::{Options, Outcome, log_file};

/// The model makes its sockets at once.
const READY: Duration = Duration::from_secs(20);
/// For it to end by itself, or when asked.
const END: Duration = Duration::from_secs(10);
/// The control socket's name, here and in the log directory.
const CONTROL: &str = "ctl.sock";

/// What its `--dir` is.
pub fn dir(options: &Options) -> PathBuf {
    options.run_dir.join("model")
}

/// Its control socket.
pub fn control(options: &Options) -> PathBuf {
    dir(options).join(CONTROL)
}

/// Starts the model and waits until its sockets are there. `None` where no device is asked for.
pub fn start(options: &Options) -> Result<Result<Option<Guarded>, Outcome>> {
    if options.nics + options.gpus == 0 {
        return Ok(Ok(None));
    }
    let dir = dir(options);
    fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    // Sockets go where paths are short, logs where the user wants them.
    for log in ["connectx.log", "connectx.jsonl"] {
        let target = options.log.join(log);
        File::create(&target).with_context(|| format!("making {}", target.display()))?;
        symlink(&target, dir.join(log))
            .with_context(|| format!("making a link to {}", target.display()))?;
    }
    let hosts = if options.peer.is_some() { "2" } else { "1" };
    // Whoever knows the log directory can steer the model, if the file system has sockets.
    let further = options.log.join(CONTROL);
    let _ = fs::remove_file(&further);
    let further = UnixListener::bind(&further)
        .map(drop)
        .map(|()| [OsString::from("--ctl"), further.into()]);
    let mut model = Guarded::spawn(
        Command::new(&options.model)
            .arg("serve")
            .args([
                "--nics",
                &options.nics.to_string(),
                "--gpus",
                &options.gpus.to_string(),
            ])
            .args(["--hosts", hosts])
            .args((options.iommu && !options.no_acs).then_some("--acs"))
            .args(
                (options.mapped_doorbells || options.outside_gpu.is_some())
                    .then_some("--doorbells=mapped"),
            )
            .args(options.vf.then_some("--vf"))
            .args(options.caps.iter().flat_map(|cap| ["--cap", cap]))
            .arg("--dir")
            .arg(&dir)
            .args(further.iter().flatten())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file(&options.log, "connectx.stderr")?),
    )?;
    let stdout = model
        .child()
        .stdout
        .take()
        .context("the model's output is not piped")?;
    let (sender, lines) = channel();
    // Goes on reading for as long as the model writes, so that it never waits for us.
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let deadline = Instant::now() + READY;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) if line == "ready" => return Ok(Ok(Some(model))),
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => {
                bail!("the model was not ready within {READY:?}")
            }
            Err(RecvTimeoutError::Disconnected) => {
                let how = model
                    .wait(END)?
                    .map_or("it closed its output".into(), describe);
                return Ok(Err(Outcome::ModelDied(format!(
                    "before it was ready, {how}"
                ))));
            }
        }
    }
}

/// The model ends by itself when QEMU is gone. If it ends badly, a command that ended well did not tell the whole truth.
pub fn end(mut model: Guarded, outcome: Outcome) -> Result<Outcome> {
    let bad = match model.wait(END)? {
        Some(status) if status.success() => return Ok(outcome),
        Some(status) => describe(status),
        None => {
            model.terminate(END)?;
            format!("still running {END:?} after QEMU had ended")
        }
    };
    Ok(match outcome {
        Outcome::Command(0) => Outcome::ModelDied(format!(
            "at the end, after the command had succeeded: {bad}"
        )),
        other => other,
    })
}
