// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control socket: reads and steers a running model.
//!
//! One JSON object a line in each direction: `{"command": "refusals", "args": ["10"], "id": 7}` is answered by one object
//! with the command's result, or with `"error"`; an `"id"` is repeated in the answer. Empty lines are ignored. A client
//! may stay (QEMU joins a guest's virtio-serial port to the socket), and what a guest sends may be cut or garbage: it is
//! answered with an error, and the connection goes on.
//!
//! A new command is a row in [`COMMANDS`] and a function.

pub mod client;
mod memory;
pub mod table;

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::fault;
use crate::log::Referee;
use crate::mem::SharedMemory;
use crate::pci::{self, ErrorKind};
use crate::vfio::Card;

/// The longest request line in bytes.
pub const MAX_LINE: usize = 64 * 1024;
/// Clients at one time; a further one is turned away.
pub const MAX_CLIENTS: usize = 64;
/// How long a client may leave an answer unread before it is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the commands work on.
pub struct Model {
    /// Every function of the process.
    pub devices: Vec<Arc<Card>>,
    /// Their referee.
    pub referee: Referee,
}

type Answer = Result<Value, String>;

/// A command of the control socket.
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// Its arguments, for `help`.
    pub usage: &'static str,
    /// What it does, in a sentence.
    pub help: &'static str,
    run: fn(&Model, &[String]) -> Answer,
}

/// Every command.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "config",
        usage: "FUNCTION",
        help: "config space as the host reads it; the table is for lspci -F",
        run: config,
    },
    Command {
        name: "counts",
        usage: "[FUNCTION]",
        help: "live objects and events of each function",
        run: counts,
    },
    Command {
        name: "error",
        usage: "FUNCTION correctable|uncorrectable BITS",
        help: "report errors in the function's AER and device status, by the bits of the AER status register (0x4000)",
        run: error,
    },
    Command {
        name: "fault",
        usage: fault::USAGE,
        help: "make a NIC misbehave; each fault strikes once, opcodes are names (CREATE_CQ) or numbers",
        run: |model, args| steer("fault", model, args),
    },
    Command {
        name: "help",
        usage: "",
        help: "this list",
        run: help,
    },
    Command {
        name: "insert",
        usage: "FUNCTION",
        help: "put a card back that was pulled, as after power-on; the host is not told",
        run: |model, args| match model.device(args)?.insert() {
            true => Ok(json!({"inserted": args[0]})),
            false => Err(format!("{} has not been pulled", args[0])),
        },
    },
    Command {
        name: "link",
        usage: fault::LINK_USAGE,
        help: "show or change the link at a NIC's port; loss, delay and rate are for packets that it sends",
        run: |model, args| steer("link", model, args),
    },
    Command {
        name: "memory",
        usage: "",
        help: "what of a guest's address space is memory, and what a mapped doorbell page; by the socket with the files",
        run: |model, _| Ok(memory::list(&model.devices).0),
    },
    Command {
        name: "ping",
        usage: "",
        help: "answers at once",
        run: |_, _| Ok(json!({"pong": true})),
    },
    Command {
        name: "process",
        usage: "",
        help: "what the model's process holds: memory of its own, memory shared with guests (KiB), threads, open files",
        run: |_, _| process().map_err(|error| format!("/proc/self: {error}")),
    },
    Command {
        name: "pull",
        usage: "FUNCTION",
        help: "tear the card out: reads give all ones, and it reaches nothing; the host is not told",
        run: |model, args| match model.device(args)?.pull() {
            true => Ok(json!({"pulled": args[0]})),
            false => Err(format!("{} has been pulled already", args[0])),
        },
    },
    Command {
        name: "refusals",
        usage: "[N]",
        help: "the last N things refused (20), oldest first, with object, field, value, rule and source",
        run: refusals,
    },
    Command {
        name: "uars",
        usage: "FUNCTION",
        help: "allocated UAR pages, with the user's uid and the foreign and lost doorbells on each since it was allocated",
        run: |model, args| steer("uars", model, args),
    },
];

fn counts(model: &Model, args: &[String]) -> Answer {
    let wanted = args.first();
    let functions: Vec<Value> = model
        .devices
        .iter()
        .map(|card| card.function())
        .filter(|f| wanted.is_none_or(|name| name == f.name()))
        .map(|f| {
            let mut row = Map::new();
            row.insert("name".into(), f.name().into());
            row.extend(
                f.counts()
                    .into_iter()
                    .map(|(name, n)| (name.into(), n.into())),
            );
            row.insert("refusals".into(), model.referee.count(f.name()).into());
            row.into()
        })
        .collect();
    match wanted {
        Some(name) if functions.is_empty() => Err(format!("no function {name}")),
        _ => Ok(json!({"functions": functions})),
    }
}

fn config(model: &Model, args: &[String]) -> Answer {
    let device = model.device(args)?;
    let mut bytes = vec![0; pci::SIZE];
    device.config().read(0, &mut bytes);
    let line = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let lines: Vec<String> = bytes.chunks(16).map(line).collect();
    Ok(json!({"function": device.function().name(), "lines": lines}))
}

fn error(model: &Model, args: &[String]) -> Answer {
    let device = model.device(args)?;
    let kind = match args.get(1).map(String::as_str) {
        Some("correctable") => ErrorKind::Correctable,
        Some("uncorrectable") => ErrorKind::Uncorrectable,
        _ => return Err("the second argument is correctable or uncorrectable".into()),
    };
    let bits = args
        .get(2)
        .and_then(|bits| number(bits))
        .ok_or("the third argument is a 32-bit number")?;
    match device.config().report_errors(kind, bits) {
        0 => Err(format!(
            "{bits:#x} has no bit of an error that the function can report"
        )),
        reported => Ok(json!({"reported": format!("{reported:#x}")})),
    }
}

/// A decimal number, or a hexadecimal one after 0x.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Guests' memory that the model has touched counts as resident too, so what it may leak is told apart from that.
fn process() -> io::Result<Value> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let value = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Ok(json!({
        "own_kib": value("RssAnon:"),
        "shared_kib": value("RssShmem:"),
        "threads": value("Threads:"),
        "files": std::fs::read_dir("/proc/self/fd")?.count(),
    }))
}

fn steer(command: &str, model: &Model, args: &[String]) -> Answer {
    let device = model.device(args)?;
    let words: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    tracing::info!(
        "{}: {command} {}",
        device.function().name(),
        words.join(" ")
    );
    device.function().steer(command, &words)
}

fn help(_: &Model, _: &[String]) -> Answer {
    let rows = COMMANDS
        .iter()
        .map(|c| json!({"command": c.name, "arguments": c.usage, "does": c.help}));
    Ok(json!({"commands": rows.collect::<Vec<_>>()}))
}

fn refusals(model: &Model, args: &[String]) -> Answer {
    let n = match args.first() {
        Some(n) => n
            .parse()
            .map_err(|_| format!("{n:?} is no number of records"))?,
        None => 20,
    };
    Ok(json!({"refusals": model.referee.recent(n)}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    command: String,
    #[serde(default)]
    args: Vec<String>,
    id: Option<Value>,
}

impl Model {
    /// The device that the first argument names.
    fn device(&self, args: &[String]) -> Result<&Card, String> {
        let name = args
            .first()
            .ok_or("the first argument is a function, such as nic0")?;
        let found = self
            .devices
            .iter()
            .find(|card| card.function().name() == name);
        let card = found.ok_or_else(|| format!("no function {name}"))?;
        Ok(card)
    }

    /// Answers one request line; `None` for an empty one.
    pub fn answer(&self, line: &[u8]) -> Option<Value> {
        self.answer_with_files(line).map(|(answer, _)| answer)
    }

    /// As [`Model::answer`], with the files that go along.
    fn answer_with_files(&self, line: &[u8]) -> Option<(Value, Vec<Arc<SharedMemory>>)> {
        let line = line.trim_ascii();
        if line.is_empty() {
            return None;
        }
        let mut files = Vec::new();
        let (id, answer) = match serde_json::from_slice::<Request>(line) {
            Ok(request) if request.command == "memory" => {
                let (answer, them) = memory::list(&self.devices);
                files = them;
                (request.id, Ok(answer))
            }
            Ok(request) => (request.id.clone(), self.run(&request)),
            Err(error) => (None, Err(format!("not a request: {error}"))),
        };
        let mut answer = answer.unwrap_or_else(|error| json!({"error": error}));
        if let (Some(id), Some(object)) = (id, answer.as_object_mut()) {
            object.insert("id".into(), id);
        }
        Some((answer, files))
    }

    fn run(&self, request: &Request) -> Answer {
        let known = COMMANDS.iter().find(|c| c.name == request.command);
        let command = known.ok_or_else(|| format!("no command {:?}; try help", request.command))?;
        (command.run)(self, &request.args)
    }

    /// Serves clients for ever; each gets a thread. Returns only when the listener fails.
    pub fn serve(self: &Arc<Self>, listener: &UnixListener) -> io::Result<()> {
        let clients = Arc::new(AtomicUsize::new(0));
        loop {
            let (stream, _) = listener.accept()?;
            if clients.load(Ordering::Relaxed) >= MAX_CLIENTS {
                tracing::warn!("control socket: more than {MAX_CLIENTS} clients, one turned away");
                continue;
            }
            clients.fetch_add(1, Ordering::Relaxed);
            let (model, guard) = (Arc::clone(self), Departure(Arc::clone(&clients)));
            let spawned = std::thread::Builder::new()
                .name("ctl-client".into())
                .spawn(move || {
                    let _guard = guard;
                    if let Err(error) = model.converse(&stream) {
                        tracing::info!("control client dropped: {error}");
                    }
                });
            if let Err(error) = spawned {
                tracing::warn!("control client dropped: no thread: {error}");
            }
        }
    }

    fn converse(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let mut reader = BufReader::new(stream);
        while let Some(line) = read_line(&mut reader)? {
            let answer = match line {
                Line::Whole(line) => self.answer_with_files(&line),
                Line::TooLong => {
                    let error = format!("a request is at most {MAX_LINE} bytes long");
                    Some((json!({"error": error}), Vec::new()))
                }
            };
            if let Some((answer, files)) = answer {
                let mut text = answer.to_string();
                text.push('\n');
                let sent = memory::send_first(stream, text.as_bytes(), &files)?;
                (&mut &*stream).write_all(&text.as_bytes()[sent..])?;
            }
        }
        Ok(())
    }
}

struct Departure(Arc<AtomicUsize>);

impl Drop for Departure {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

enum Line {
    Whole(Vec<u8>),
    TooLong,
}

/// The next line without its end, or `None` at the end of the stream (where an unfinished line is dropped).
fn read_line(reader: &mut impl BufRead) -> io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut too_long = false;
    loop {
        let chunk = reader.fill_buf()?;
        if chunk.is_empty() {
            return Ok(None);
        }
        let end = chunk.iter().position(|&b| b == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        too_long |= line.len() + part.len() > MAX_LINE;
        if too_long {
            line.clear();
        } else {
            line.extend_from_slice(part);
        }
        let used = part.len() + usize::from(end.is_some());
        reader.consume(used);
        if end.is_some() {
            return Ok(Some(if too_long {
                Line::TooLong
            } else {
                Line::Whole(line)
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Refusal;
    use std::io::Read;

    fn gpu() -> Arc<Card> {
        let function = Arc::new(crate::gpu::Gpu::new(0, Referee::in_memory()).unwrap());
        Card::new(function, 0, &crate::bus::Bus::new())
    }

    fn model() -> Arc<Model> {
        let referee = Referee::in_memory();
        for i in 0..3 {
            referee.refuse(Refusal {
                function: "nic0".into(),
                object: format!("qp {i}"),
                field: "state".into(),
                value: "RST".into(),
                rule: "a doorbell needs RTS".into(),
                source: "test".into(),
            });
        }
        Arc::new(Model {
            devices: vec![gpu()],
            referee,
        })
    }

    #[test]
    fn requests_are_answered_with_their_id() {
        let m = model();
        let answer = |text: &str| m.answer(text.as_bytes()).unwrap();
        assert_eq!(
            answer(r#"{"command":"ping","id":5}"#),
            json!({"pong": true, "id": 5})
        );
        assert_eq!(answer(r#"{"command":"ping"}"#), json!({"pong": true}));
        let counts = answer(r#"{"command":"counts"}"#);
        assert_eq!(counts["functions"][0]["name"], "gpu0");
        assert_eq!(counts["functions"][0]["refusals"], 0);
        let two = answer(r#"{"command":"refusals","args":["2"]}"#);
        assert_eq!(two["refusals"][0]["object"], "qp 1");
        assert_eq!(two["refusals"][1]["seq"], 3);
        let help = answer(r#"{"command":"help"}"#);
        assert_eq!(help["commands"].as_array().unwrap().len(), COMMANDS.len());
        assert!(m.answer(b"  \r").is_none());
    }

    #[test]
    fn errors_are_reported_in_config_space() {
        let m = model();
        let run = |command: &str, args: &[&str]| {
            let request = json!({"command": command, "args": args});
            m.answer(request.to_string().as_bytes()).unwrap()
        };
        let status = |m: &Model| m.devices[0].config().dword(0x104);
        assert_eq!(
            run("error", &["gpu0", "uncorrectable", "0x4000"]),
            json!({"reported": "0x4000"})
        );
        assert_eq!(status(&m), 0x4000);
        let config = run("config", &["gpu0"]);
        assert!(
            config["lines"][0]
                .as_str()
                .unwrap()
                .starts_with("de 10 35 23")
        );
        assert!(
            crate::ctl::table::render("config", &config).contains("\n100: 01 00 02 1c 00 40 00 00")
        );
        for args in [
            &["gpu0", "uncorrectable", "1"][..],
            &["gpu0", "uncorrectable", "x"],
            &["gpu0", "uncorrectable"],
            &["gpu0", "fatal", "1"],
            &["nic7", "correctable", "1"],
            &[],
        ] {
            assert!(run("error", args)["error"].is_string(), "{args:?}");
        }
        assert_eq!(status(&m), 0x4000);
    }

    #[test]
    fn a_card_is_pulled_once_and_inserted_once() {
        let m = model();
        let run = |command: &str| {
            let request = json!({"command": command, "args": ["gpu0"]});
            m.answer(request.to_string().as_bytes()).unwrap()
        };
        assert!(run("insert")["error"].is_string());
        assert_eq!(run("pull"), json!({"pulled": "gpu0"}));
        assert!(run("pull")["error"].is_string());
        assert_eq!(run("insert"), json!({"inserted": "gpu0"}));
        assert!(run("insert")["error"].is_string());
    }

    #[test]
    fn bad_requests_get_errors() {
        let m = model();
        for (text, why) in [
            (&br#"{"command":"fly","id":1}"#[..], "no command \"fly\""),
            (
                br#"{"command":"counts","args":["nic9"]}"#,
                "no function nic9",
            ),
            (br#"{"command":"refusals","args":["-1"]}"#, "is no number"),
            (br#"{"comm"#, "not a request"),
            (br#"{"command":"ping","argz":[]}"#, "argz"),
            (b"[]", "not a request"),
            (b"\xff\xfe", "not a request"),
        ] {
            let answer = m.answer(text).unwrap();
            let error = answer["error"].as_str().unwrap();
            assert!(error.contains(why), "{error}");
        }
        assert_eq!(m.answer(br#"{"command":"fly","id":1}"#).unwrap()["id"], 1);
    }

    #[test]
    fn connections_survive_garbage_and_cuts() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("ctl.sock")).unwrap();
        let m = model();
        let server = Arc::clone(&m);
        std::thread::spawn(move || server.serve(&listener));
        let connect = || {
            let s = UnixStream::connect(dir.path().join("ctl.sock")).unwrap();
            s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            s
        };
        // One that leaves in the middle of a line, and one that says nothing for as long as it likes.
        connect().write_all(b"{\"comma").unwrap();
        let _silent = connect();
        let mut s = connect();
        s.write_all(&vec![b'x'; 3 * MAX_LINE]).unwrap();
        s.write_all(b"\n\n\n{\"command\":").unwrap();
        s.write_all(b"\"ping\",\"id\":\"a\"}\n").unwrap();
        let mut lines = BufReader::new(&mut s).lines();
        let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert!(first["error"].as_str().unwrap().contains("at most"));
        let second: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(second, json!({"pong": true, "id": "a"}));
    }

    /// A client of the socket gets the files, and finds in them what the guest has at the addresses.
    #[test]
    fn memory_comes_with_its_files() {
        use nix::cmsg_space;
        use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
        use std::os::fd::{AsRawFd, FromRawFd};

        let fabric = crate::wire::Fabric::new(Referee::in_memory());
        let hca = crate::hca::Hca::new(&fabric, crate::hca::HcaConfig::numbered(0));
        let one = crate::polling::mapped::Threads::One;
        let poller = crate::polling::mapped::Poller::new(&fabric, Duration::ZERO, one).unwrap();
        hca.map_doorbells(&poller).unwrap();
        let card = Card::new(Arc::new(hca), 0, &crate::bus::Bus::new());
        let ram = SharedMemory::new("ram", 8192).unwrap();
        ram.write(4096, b"guest").unwrap();
        let file = ram.file().try_clone().unwrap();
        card.give_memory(0x10_0000, 4096, file, 4096).unwrap();
        let model = Arc::new(Model {
            devices: vec![gpu(), card],
            referee: Referee::in_memory(),
        });
        let (client, server) = UnixStream::pair().unwrap();
        let served = Arc::clone(&model);
        let server = std::thread::spawn(move || served.converse(&server));
        (&client).write_all(b"{\"command\":\"memory\"}\n").unwrap();
        let (mut text, mut space) = ([0; 4096], cmsg_space!([i32; 8]));
        let mut slice = [std::io::IoSliceMut::new(&mut text)];
        let flags = MsgFlags::empty();
        let message = recvmsg::<()>(client.as_raw_fd(), &mut slice, Some(&mut space), flags);
        let message = message.unwrap();
        let files: Vec<std::fs::File> = message
            .cmsgs()
            .unwrap()
            .flat_map(|part| match part {
                ControlMessageOwned::ScmRights(numbers) => numbers,
                _ => Vec::new(),
            })
            // SAFETY: just received, and nobody else's.
            .map(|number| unsafe { std::fs::File::from_raw_fd(number) })
            .collect();
        let len = message.bytes;
        let answer: Value = serde_json::from_slice(&text[..len]).unwrap();
        let row = &answer["memory"][0];
        assert_eq!(
            *row,
            json!({"function": "nic0", "kind": "memory", "address": 0x10_0000, "bytes": 4096,
                   "file": 0, "offset": 4096})
        );
        // No BAR is placed, so there are no doorbells.
        assert_eq!(
            (answer["memory"].as_array().unwrap().len(), files.len()),
            (1, 1)
        );
        let mut there = [0; 5];
        std::os::unix::fs::FileExt::read_exact_at(&files[0], &mut there, 4096).unwrap();
        assert_eq!(&there, b"guest");
        drop(client);
        server.join().unwrap().unwrap();
    }

    #[test]
    fn clients_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ctl.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let m = model();
        std::thread::spawn(move || m.serve(&listener));
        let kept: Vec<UnixStream> = (0..MAX_CLIENTS)
            .map(|_| UnixStream::connect(&path).unwrap())
            .collect();
        for mut client in &kept {
            client.write_all(b"{\"command\":\"ping\"}\n").unwrap();
            client.read_exact(&mut [0; 1]).unwrap();
        }
        let mut extra = UnixStream::connect(&path).unwrap();
        extra
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert_eq!(extra.read(&mut [0; 1]).unwrap(), 0);
    }
}
