// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client of the control socket, directly or through a guest's virtio-serial port.
//!
//! A port has no connections: it may hold the unread answer to a process that was killed, or the beginning of its
//! request. So a request begins with an empty line, carries an id of its own, and other answers are skipped.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

/// Where a guest finds the model.
pub const PORT: &str = "/dev/virtio-ports/org.ibgda.model";
/// Pause before trying again what only time can change.
const RETRY: Duration = Duration::from_millis(20);

/// Sends one command and returns its result, waiting at most `timeout` altogether.
pub fn request(
    path: &Path,
    command: &str,
    args: &[String],
    timeout: Duration,
) -> anyhow::Result<Value> {
    let deadline = Instant::now() + timeout;
    let mut channel = open(path, deadline).with_context(|| path.display().to_string())?;
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let id = format!("{}-{}", std::process::id(), since_epoch.as_nanos());
    let line = format!(
        "\n{}\n",
        json!({"command": command, "args": args, "id": id})
    );
    let mut channel = Channel {
        file: &mut channel,
        deadline,
    };
    channel
        .send(line.as_bytes())
        .with_context(|| format!("sending to {}", path.display()))?;
    let mut answer = channel
        .receive(&id)
        .with_context(|| format!("waiting for {}", path.display()))?;
    let object = answer
        .as_object_mut()
        .ok_or_else(|| anyhow!("the answer is no object"))?;
    object.remove("id");
    match object.get("error") {
        Some(error) => bail!("{}", error.as_str().unwrap_or("error without text")),
        None => Ok(answer),
    }
}

/// A virtio-serial port lets in one process at a time: wait for it.
fn open(path: &Path, deadline: Instant) -> io::Result<File> {
    loop {
        let socket = std::fs::metadata(path)?.file_type().is_socket();
        let opened = if socket {
            UnixStream::connect(path).and_then(|stream| {
                stream.set_nonblocking(true)?;
                Ok(File::from(OwnedFd::from(stream)))
            })
        } else {
            OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path)
        };
        match opened {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                if Instant::now() >= deadline {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "another process keeps the port",
                    ));
                }
                std::thread::sleep(RETRY);
            }
            other => return other,
        }
    }
}

struct Channel<'a> {
    file: &'a mut File,
    deadline: Instant,
}

impl Channel<'_> {
    fn wait(&self, for_what: PollFlags) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the model does not answer",
                ));
            }
            let timeout =
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut fds = [PollFd::new(self.file.as_fd(), for_what)];
            poll(&mut fds, timeout)?;
            let ready = fds[0].revents().unwrap_or(PollFlags::empty());
            if ready.intersects(for_what) {
                return Ok(());
            }
            if !ready.is_empty() {
                // Hung up: a port says so while its other end is reconnecting.
                std::thread::sleep(RETRY);
            }
        }
    }

    fn send(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            self.wait(PollFlags::POLLOUT)?;
            match self.file.write(data) {
                Ok(n) => data = &data[n..],
                Err(error) if retry(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads lines until one answers `id`.
    fn receive(&mut self, id: &str) -> io::Result<Value> {
        let mut pending = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            self.wait(PollFlags::POLLIN)?;
            match self.file.read(&mut chunk) {
                Ok(0) if self.file.metadata()?.file_type().is_socket() => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the model hung up",
                    ));
                }
                Ok(0) => std::thread::sleep(RETRY),
                Ok(n) => pending.extend_from_slice(&chunk[..n]),
                Err(error) if retry(&error) => {}
                Err(error) => return Err(error),
            }
            while let Some(end) = pending.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                match serde_json::from_slice::<Value>(&line) {
                    Ok(answer) if answer["id"] == id => return Ok(answer),
                    _ => {}
                }
            }
        }
    }
}

fn retry(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead;
    use std::os::unix::net::UnixListener;

    /// Answers one request with what `answer` makes of it.
    fn serve_once(
        answer: impl FnOnce(Value, &mut UnixStream) + Send + 'static,
    ) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = io::BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            while line.trim().is_empty() {
                line.clear();
                reader.read_line(&mut line).unwrap();
            }
            answer(serde_json::from_str(&line).unwrap(), &mut stream);
        });
        dir
    }

    fn ask(dir: &tempfile::TempDir, timeout: Duration) -> anyhow::Result<Value> {
        request(&dir.path().join("s"), "ping", &["a".into()], timeout)
    }

    #[test]
    fn stale_answers_are_skipped() {
        let dir = serve_once(|request, stream| {
            assert_eq!(request["args"], json!(["a"]));
            let id = &request["id"];
            write!(stream, "half an ans\n{{\"id\":\"old\",\"error\":\"x\"}}\n").unwrap();
            writeln!(stream, "{}", json!({"pong": true, "id": id})).unwrap();
        });
        assert_eq!(
            ask(&dir, Duration::from_secs(20)).unwrap(),
            json!({"pong": true})
        );
    }

    #[test]
    fn errors_and_silence_are_errors() {
        let dir = serve_once(|request, stream| {
            writeln!(
                stream,
                "{}",
                json!({"error": "no such thing", "id": request["id"]})
            )
            .unwrap();
        });
        let error = ask(&dir, Duration::from_secs(20)).unwrap_err();
        assert!(format!("{error:#}").contains("no such thing"));

        let dir = serve_once(|_, stream| {
            let _ = stream.read(&mut [0; 1]);
        });
        let error = ask(&dir, Duration::from_millis(50)).unwrap_err();
        assert!(
            format!("{error:#}").contains("does not answer"),
            "{error:#}"
        );

        let dir = serve_once(|_, _| {});
        let error = ask(&dir, Duration::from_secs(20)).unwrap_err();
        assert!(format!("{error:#}").contains("hung up"), "{error:#}");

        let dir = tempfile::tempdir().unwrap();
        assert!(ask(&dir, Duration::from_secs(1)).is_err());
    }
}
