// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guest's ports on the host: sockets, each with a thread that copies it out.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread;

use anyhow::{Context, Result};

use super::qemu::PORTS;
use super::session::Event;
use super::vm::Vm;
use crate::protocol::{self, Report, Request};

/// The host's ends of all ports.
pub struct Streams {
    control: Arc<OnceLock<UnixStream>>,
    /// Bytes of standard output, standard error and the kernel's log so far.
    pub copied: [Arc<AtomicU64>; 3],
}

impl Streams {
    /// Listens on every port's socket; QEMU connects to them when it starts. Events come with the guest's number.
    pub fn listen(vm: &Vm<'_>, index: usize, events: &Sender<(usize, Event)>) -> Result<Self> {
        let [control, stdout, stderr, kernel] =
            PORTS.map(|port| bind(&vm.run_dir.join(port.socket)));
        let log = vm.log.join("kernel.log");
        let log = File::create(&log).with_context(|| format!("making {}", log.display()))?;
        let streams = Self {
            control: Arc::default(),
            copied: Default::default(),
        };
        // The first guest's output is passed on as it is.
        let label = if index == 0 {
            String::new()
        } else {
            vm.label()
        };
        let tell = || {
            let events = events.clone();
            move |event: Event| events.send((index, event)).is_ok()
        };
        streams.copy(0, stdout?, Labelled::new(io::stdout(), &label), tell());
        streams.copy(1, stderr?, Labelled::new(io::stderr(), &label), tell());
        streams.copy(2, kernel?, log, tell());
        streams.listen_for_reports(control?, tell());
        Ok(streams)
    }

    /// Sends a request to the guest, which has reported before.
    pub fn request(&self, request: &Request) -> Result<()> {
        let mut control = self
            .control
            .get()
            .context("the guest's agent is not connected")?;
        protocol::send(&mut control, request).context("sending to the guest's agent")
    }

    fn copy(
        &self,
        index: usize,
        listener: UnixListener,
        mut to: impl Write + Send + 'static,
        tell: impl Fn(Event) -> bool + Send + 'static,
    ) {
        let copied = Arc::clone(&self.copied[index]);
        thread::spawn(move || {
            let Ok((mut from, _)) = listener.accept() else {
                return;
            };
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                if let Err(error) = to.write_all(&buffer[..length]).and_then(|()| to.flush()) {
                    tell(Event::NotWritten(error));
                    return;
                }
                copied.fetch_add(length as u64, Ordering::Release);
                tell(Event::Copied);
            }
        });
    }

    fn listen_for_reports(
        &self,
        listener: UnixListener,
        tell: impl Fn(Event) -> bool + Send + 'static,
    ) {
        let control = Arc::clone(&self.control);
        thread::spawn(move || {
            let Ok((stream, _)) = listener.accept() else {
                return;
            };
            let Ok(reader) = stream.try_clone() else {
                return;
            };
            let _ = control.set(stream);
            let mut reader = BufReader::new(reader);
            loop {
                let event = match protocol::receive::<Report>(&mut reader) {
                    Ok(Some(report)) => Event::Report(report),
                    Ok(None) => return,
                    Err(error) => Event::Garbled(error),
                };
                let last = matches!(event, Event::Garbled(_));
                if !tell(event) || last {
                    return;
                }
            }
        });
    }
}

fn bind(path: &Path) -> Result<UnixListener> {
    let _ = fs::remove_file(path);
    UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()))
}

/// Puts a label before each line; nothing waits for a line to be complete.
struct Labelled<W> {
    to: W,
    label: Vec<u8>,
    at_start: bool,
}

impl<W: Write> Labelled<W> {
    fn new(to: W, label: &str) -> Self {
        Self {
            to,
            label: label.into(),
            at_start: true,
        }
    }
}

impl<W: Write> Write for Labelled<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.label.is_empty() {
            return self.to.write(bytes);
        }
        // In one piece, so that the other guest's output does not come between.
        let mut text = Vec::with_capacity(bytes.len() + self.label.len());
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            if self.at_start {
                text.extend(&self.label);
            }
            text.extend(line);
            self.at_start = line.ends_with(b"\n");
        }
        self.to.write_all(&text)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_the_label_once_however_it_arrives() {
        let mut labelled = Labelled::new(Vec::new(), "b: ");
        for part in ["one\ntw", "o", "\n", "\nlast"] {
            labelled.write_all(part.as_bytes()).unwrap();
        }
        assert_eq!(labelled.to, b"b: one\nb: two\nb: \nb: last");
    }

    #[test]
    fn without_a_label_nothing_is_changed() {
        let mut plain = Labelled::new(Vec::new(), "");
        plain.write_all(b"a\0\nb").unwrap();
        assert_eq!(plain.to, b"a\0\nb");
    }
}
