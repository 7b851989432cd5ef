// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank's connection to the others.

use crate::{
    coordinator::keep_alive,
    error::{Error, Result, meeting},
    frame::Frame,
    view::MOST_RANKS,
};
use std::{
    fmt, io,
    net::{Shutdown, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Between two tries to reach the coordinator, which may start later than a rank.
const RETRY: Duration = Duration::from_millis(50);

/// This rank among the others.
pub struct Team {
    rank: u16,
    size: u16,
    patience: Duration,
    stream: TcpStream,
    heard: Mutex<Receiver<Vec<Vec<u8>>>>,
    watch: Arc<Watch>,
    reader: Option<JoinHandle<()>>,
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Hook = Box<dyn Fn() + Send>;

/// What was heard of a failure, and whom to tell.
#[derive(Default)]
struct Watch {
    state: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Default)]
struct Watched {
    /// Which rank, and why; no rank: the coordinator itself.
    failure: Option<(Option<u16>, String)>,
    hook: Option<Hook>,
    leaving: bool,
}

impl Watch {
    fn failed(&self, rank: Option<u16>, why: String) {
        let mut state = lock(&self.state);
        if state.leaving || state.failure.is_some() {
            return;
        }
        state.failure = Some((rank, why));
        if let Some(hook) = &state.hook {
            hook();
        }
        self.changed.notify_all();
    }

    fn error(&self) -> Option<Error> {
        let (rank, why) = lock(&self.state).failure.clone()?;
        Some(match rank {
            Some(rank) => Error::RankGone { rank, why },
            None => Error::Meeting {
                what: "the coordinator is gone".into(),
                why,
            },
        })
    }
}

impl Team {
    /// Joins a team of `size` ranks at its coordinator, as rank `rank`. No wait is longer than `patience`.
    ///
    /// # Errors
    /// A size or rank that cannot be; nobody listens at the address; the team has another size, or this rank already.
    pub fn join(address: &str, rank: u16, size: u16, patience: Duration) -> Result<Self> {
        if !(2..=MOST_RANKS as u16).contains(&size) || rank >= size {
            return Err(Error::Argument(format!(
                "rank {rank} of {size}: a team has 2 to {MOST_RANKS} ranks, counted from 0"
            )));
        }
        let what = || format!("rank {rank} meets the others at {address}");
        let begin = || -> io::Result<_> {
            let stream = connect(address, patience)?;
            keep_alive(&stream)?;
            stream.set_write_timeout(Some(patience))?;
            Frame::Hello { rank, size }.write(&mut &stream)?;
            Ok((stream.try_clone()?, stream))
        };
        let (mut reading, stream) = begin().map_err(|error| meeting(what(), &error))?;
        let watch = Arc::new(Watch::default());
        let (sender, heard) = channel();
        let told = Arc::clone(&watch);
        let reader = thread::spawn(move || {
            loop {
                match Frame::read(&mut reading) {
                    Ok(Frame::All(pieces)) => {
                        // The receiver is there as long as this thread.
                        let _ = sender.send(pieces);
                    }
                    Ok(Frame::Failed { rank, why }) => told.failed(Some(rank), why),
                    Ok(other) => return told.failed(None, format!("it said {other:?}")),
                    Err(error) => return told.failed(None, error.to_string()),
                }
            }
        });
        Ok(Self {
            rank,
            size,
            patience,
            stream,
            heard: Mutex::new(heard),
            watch,
            reader: Some(reader),
        })
    }

    /// Which rank this is.
    pub fn rank(&self) -> u16 {
        self.rank
    }

    /// How many there are.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The longest that anything waits.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Gives `piece` to all ranks, and returns what each has given, by rank. All ranks call it, in the same order.
    ///
    /// # Errors
    /// A rank is gone, or does not come; the coordinator is gone.
    pub fn exchange(&self, piece: &[u8]) -> Result<Vec<Vec<u8>>> {
        let heard = lock(&self.heard);
        if let Some(error) = self.watch.error() {
            return Err(error);
        }
        // If the connection is gone the reader knows more of it.
        let _ = Frame::Piece(piece.to_vec()).write(&mut &self.stream);
        // The coordinator's patience ends first, and it knows who is missing.
        let end = Instant::now() + self.patience + Duration::from_secs(1);
        loop {
            match heard.recv_timeout(RETRY) {
                Ok(pieces) if pieces.len() == usize::from(self.size) => return Ok(pieces),
                Ok(pieces) => {
                    return Err(Error::Argument(format!("{} ranks spoke", pieces.len())));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {
                    if let Some(error) = self.watch.error() {
                        return Err(error);
                    }
                }
                Err(_) => {
                    return Err(self.failure(RETRY).unwrap_or_else(|| Error::Meeting {
                        what: "an exchange of all ranks".into(),
                        why: format!("nothing came within {} s", self.patience.as_secs_f32()),
                    }));
                }
            }
        }
    }

    /// What was heard of a failure of another, now or within `patience`.
    pub fn failure(&self, patience: Duration) -> Option<Error> {
        let state = lock(&self.watch.state);
        let waited = self
            .watch
            .changed
            .wait_timeout_while(state, patience, |state| state.failure.is_none());
        drop(waited);
        self.watch.error()
    }

    /// Has `hook` called as soon as a rank is gone, by another thread; at once if one is already. `None`: no more.
    pub fn on_failure(&self, hook: Option<Hook>) {
        let mut state = lock(&self.watch.state);
        if let (Some(hook), Some(_)) = (&hook, &state.failure) {
            hook();
        }
        state.hook = hook;
    }

    /// Tells the others that this rank cannot go on, and why.
    pub fn fail(&self, why: &str) {
        lock(&self.watch.state).leaving = true;
        let frame = Frame::Failed {
            rank: self.rank,
            why: why.to_owned(),
        };
        // If the connection is gone, they know.
        let _ = frame.write(&mut &self.stream);
    }

    /// Tells the others that this rank is done.
    pub fn leave(&self) {
        lock(&self.watch.state).leaving = true;
        let _ = Frame::Leave.write(&mut &self.stream);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        lock(&self.watch.state).leaving = true;
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Until the coordinator listens, at most `patience`.
fn connect(address: &str, patience: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now()).max(RETRY);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        if Instant::now() + RETRY >= end {
            return Err(last);
        }
        thread::sleep(RETRY);
    }
}
