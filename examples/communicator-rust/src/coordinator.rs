// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where ranks meet: hands to all what each has to say, and tells all when one is gone.

use crate::{
    error::{Result, meeting},
    frame::Frame,
};
use nix::sys::socket::{setsockopt, sockopt};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long a connection may take to say who it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks for new connections.
const LOOK: Duration = Duration::from_millis(5);

/// A thread at which the ranks of a team meet. It ends when all have left.
#[derive(Debug)]
pub struct Coordinator {
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Coordinator {
    /// Listens for `size` ranks, which must all come within `patience`, to the beginning and to each exchange.
    ///
    /// # Errors
    /// The address cannot be listened at.
    pub fn start(address: &str, size: u16, patience: Duration) -> Result<Self> {
        let what = || format!("listen at {address} for {size} ranks");
        let listener = TcpListener::bind(address).map_err(|error| meeting(what(), &error))?;
        let bound = listener
            .local_addr()
            .map_err(|error| meeting(what(), &error))?;
        listener
            .set_nonblocking(true)
            .map_err(|error| meeting(what(), &error))?;
        let thread = thread::spawn(move || Meeting::new(size, patience).run(listener));
        Ok(Self {
            address: bound,
            thread: Some(thread),
        })
    }

    /// Where ranks find it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Coordinator {
    /// Waits until all ranks have left or are gone; bounded, as is every wait of the thread.
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of it has been printed.
            let _ = thread.join();
        }
    }
}

/// Ends a connection whose other end has vanished without a word within half a minute.
pub(crate) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &10)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &5)?;
    setsockopt(stream, sockopt::TcpKeepCount, &4)?;
    Ok(())
}

/// A connection, and who it says it is: it may be a second one that says so.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Speaker {
    rank: u16,
    connection: u64,
}

enum Event {
    Joined(Speaker, u16, TcpStream),
    Said(Speaker, Frame),
    Gone(Speaker, String),
}

struct Meeting {
    size: u16,
    patience: Duration,
    /// Those that have come and not left.
    members: BTreeMap<u16, (u64, TcpStream)>,
    /// Came, whatever became of them.
    came: u16,
    pieces: BTreeMap<u16, Vec<u8>>,
    /// When what is waited for has to be complete: all ranks, or an exchange.
    deadline: Option<Instant>,
    /// Which rank failed first, and why: the cause of the rest.
    failed: Option<(u16, String)>,
    connections: u64,
}

impl Meeting {
    fn new(size: u16, patience: Duration) -> Self {
        Self {
            size,
            patience,
            members: BTreeMap::new(),
            came: 0,
            pieces: BTreeMap::new(),
            deadline: Some(Instant::now() + patience),
            failed: None,
            connections: 0,
        }
    }

    fn run(mut self, listener: TcpListener) {
        let (sender, events) = channel();
        // Dropped when all are here, so that later connections are refused.
        let mut listener = Some(listener);
        loop {
            if let Some(listener) = &listener {
                self.accept(listener, &sender);
            }
            match self.next(&events, listener.is_some()) {
                Some(event) => self.take(event),
                None if self.deadline.is_some_and(|end| Instant::now() >= end) => self.late(),
                None => {}
            }
            // Who comes after a failure is told of it, as far as the patience goes.
            if self.came == self.size || (self.failed.is_some() && self.deadline.is_none()) {
                listener = None;
            }
            if listener.is_none() && self.members.is_empty() {
                return;
            }
            if self.failed.is_some() && self.deadline.is_none() {
                // The second patience is over too: whoever is left does not listen.
                return;
            }
        }
    }

    fn next(&self, events: &Receiver<Event>, listening: bool) -> Option<Event> {
        let until = self.deadline.map_or(self.patience, |end| {
            end.saturating_duration_since(Instant::now())
        });
        match events.recv_timeout(if listening { LOOK.min(until) } else { until }) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        }
    }

    fn take(&mut self, event: Event) {
        let (speaker, frame) = match event {
            Event::Joined(speaker, size, stream) => return self.join(speaker, size, stream),
            Event::Said(speaker, frame) => (speaker, Ok(frame)),
            Event::Gone(speaker, why) => (speaker, Err(why)),
        };
        let rank = speaker.rank;
        if self.members.get(&rank).map(|member| member.0) != Some(speaker.connection) {
            return;
        }
        match frame {
            Ok(Frame::Piece(piece)) => return self.piece(rank, piece),
            Ok(Frame::Leave) => {}
            Ok(Frame::Failed { why, .. }) => self.fail(rank, &why),
            Ok(other) => self.fail(rank, &format!("it said {other:?}, which no rank does")),
            Err(why) => self.fail(rank, &format!("its process has ended, or its host ({why})")),
        }
        self.members.remove(&rank);
    }

    fn join(&mut self, speaker: Speaker, size: u16, mut stream: TcpStream) {
        let Speaker { rank, connection } = speaker;
        let why = if size != self.size {
            format!("this team has {} ranks, not {size}", self.size)
        } else if rank >= size {
            format!("there is no rank {rank} among {size}")
        } else if let Entry::Vacant(free) = self.members.entry(rank) {
            if let Some((rank, why)) = self.failed.clone() {
                // Its own thread sees that it is gone.
                let _ = Frame::Failed { rank, why }.write(&mut stream);
            }
            free.insert((connection, stream));
            self.came += 1;
            if self.came == self.size && self.failed.is_none() {
                let speaking = !self.pieces.is_empty();
                self.deadline = speaking.then(|| Instant::now() + self.patience);
            }
            return;
        } else {
            format!("there is a rank {rank} already")
        };
        // Whether it hears it or not, it is not of this team.
        let _ = Frame::Failed { rank, why }.write(&mut stream);
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn piece(&mut self, rank: u16, piece: Vec<u8>) {
        if self.pieces.is_empty() && self.came == self.size {
            self.deadline = Some(Instant::now() + self.patience);
        }
        if self.pieces.insert(rank, piece).is_some() {
            return self.fail(rank, "it spoke twice in one exchange");
        }
        if self.pieces.len() == usize::from(self.size) {
            let pieces = std::mem::take(&mut self.pieces);
            self.deadline = None;
            self.tell(&Frame::All(pieces.into_values().collect()));
        }
    }

    /// What was waited for did not come.
    fn late(&mut self) {
        if self.failed.is_some() {
            self.deadline = None;
            return;
        }
        let all = self.came == self.size;
        let missing = (0..self.size).find(|rank| {
            if all {
                !self.pieces.contains_key(rank)
            } else {
                !self.members.contains_key(rank)
            }
        });
        let (seconds, to) = (
            self.patience.as_secs_f32(),
            if all { "the exchange" } else { "the meeting" },
        );
        self.fail(
            missing.unwrap_or(0),
            &format!("it did not come to {to} within {seconds} s"),
        );
    }

    /// Tells all others; the first failure is the cause of the rest.
    fn fail(&mut self, rank: u16, why: &str) {
        if self.failed.is_none() {
            self.failed = Some((rank, why.to_owned()));
            self.tell(&Frame::Failed {
                rank,
                why: why.to_owned(),
            });
            self.deadline = Some(Instant::now() + self.patience);
        }
    }

    fn tell(&mut self, frame: &Frame) {
        for (_, stream) in self.members.values_mut() {
            // Its own thread sees that it is gone.
            let _ = frame.write(stream);
        }
    }

    /// Takes what connections there are. Each has a thread of its own, so that one that says nothing holds up nobody.
    fn accept(&mut self, listener: &TcpListener, events: &Sender<Event>) {
        while let Ok((stream, _)) = listener.accept() {
            let (events, connection) = (events.clone(), self.connections);
            self.connections += 1;
            thread::spawn(move || hear(stream, connection, &events));
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        for (_, stream) in self.members.values() {
            // The thread that reads from it ends by this.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn hear(mut stream: TcpStream, connection: u64, events: &Sender<Event>) {
    let hello = || -> io::Result<_> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(HELLO_PATIENCE))?;
        stream.set_read_timeout(Some(HELLO_PATIENCE))?;
        keep_alive(&stream)?;
        let frame = Frame::read(&mut &stream)?;
        stream.set_read_timeout(None)?;
        Ok((frame, stream.try_clone()?))
    };
    let Ok((Frame::Hello { rank, size }, writer)) = hello() else {
        return;
    };
    let speaker = Speaker { rank, connection };
    let mut open = events.send(Event::Joined(speaker, size, writer)).is_ok();
    while open {
        let event = match Frame::read(&mut stream) {
            Ok(frame) => Event::Said(speaker, frame),
            Err(error) => {
                open = false;
                Event::Gone(speaker, error.to_string())
            }
        };
        open &= events.send(event).is_ok();
    }
}
