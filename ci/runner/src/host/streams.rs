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

use super::Options;
use super::qemu::PORTS;
use super::session::Event;
use crate::protocol::{self, Report, Request};

/// The host's ends of all ports.
pub struct Streams {
    control: Arc<OnceLock<UnixStream>>,
    /// Bytes of standard output, standard error and the kernel's log so far.
    pub copied: [Arc<AtomicU64>; 3],
}

impl Streams {
    /// Listens on every port's socket; QEMU connects to them when it starts.
    pub fn listen(options: &Options, events: &Sender<Event>) -> Result<Self> {
        let [control, stdout, stderr, kernel] =
            PORTS.map(|port| bind(&options.run_dir.join(port.socket)));
        let log = options.log.join("kernel.log");
        let log = File::create(&log).with_context(|| format!("making {}", log.display()))?;
        let streams = Self {
            control: Arc::default(),
            copied: Default::default(),
        };
        streams.copy(0, stdout?, io::stdout(), events);
        streams.copy(1, stderr?, io::stderr(), events);
        streams.copy(2, kernel?, log, events);
        streams.listen_for_reports(control?, events.clone());
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
        events: &Sender<Event>,
    ) {
        let copied = Arc::clone(&self.copied[index]);
        let events = events.clone();
        thread::spawn(move || {
            let Ok((mut from, _)) = listener.accept() else {
                return;
            };
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                if let Err(error) = to.write_all(&buffer[..length]).and_then(|()| to.flush()) {
                    let _ = events.send(Event::NotWritten(error));
                    return;
                }
                copied.fetch_add(length as u64, Ordering::Release);
                let _ = events.send(Event::Copied);
            }
        });
    }

    fn listen_for_reports(&self, listener: UnixListener, events: Sender<Event>) {
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
                if events.send(event).is_err() || last {
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
