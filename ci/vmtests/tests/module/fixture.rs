// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests share: a pair that may meet, a doorbell and all that it came from, and a process for each test.

use ibgda_verbs_sys::uverbs::{Uar, UarType, alloc_uar, export_dmabuf};
use ibgda_vmtests::broker::{Granted, Mapping, Session};
use ibgda_vmtests::machine::{self, Allowed, Bdf, gpus, live_objects, nics, patience, wait_until};
use ibgda_vmtests::process::{End, in_child};
use ibgda_vmtests::verbs::{Loopback, REGISTER, Verbs};
use std::fs;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// One GPU and one NIC that may meet.
pub struct Pair {
    pub gpu: Bdf,
    pub nic: Bdf,
    pub allowed: Allowed,
}

impl Pair {
    pub fn new() -> Self {
        let (gpu, nic) = (gpus()[0], nics()[0]);
        Self {
            gpu,
            nic,
            allowed: Allowed::pair(gpu, nic),
        }
    }

    pub fn session(&self) -> Session {
        Session::bound(self.gpu, self.nic)
    }
}

/// A doorbell and all that it came from.
pub struct Doorbell {
    pub verbs: Verbs,
    pub uar: Uar,
    pub dmabuf: OwnedFd,
    pub granted: Granted,
}

impl Doorbell {
    pub fn import(session: &Session, nic: Bdf) -> Self {
        let verbs = Verbs::open(nic);
        let uar = verbs.alloc_uar();
        let dmabuf = verbs.export(&uar);
        let granted = session
            .import(&dmabuf, &verbs.uverbs())
            .expect("import a UAR");
        Self {
            verbs,
            uar,
            dmabuf,
            granted,
        }
    }
}

/// Runs a test in a process of its own, and sees that it leaves nothing behind. A page is its process's until that is dead:
/// in one process for all, each test would find the pages of those before it.
pub fn alone(test: impl FnOnce()) {
    warm_up();
    let before = holdings();
    let end = in_child(|| {
        test();
        0
    });
    assert_eq!(end, End::Exit(0));
    // Grants end, and modules are let go of, a moment after the process.
    let deadline = Instant::now() + patience();
    loop {
        let now = holdings();
        if now == before {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "the test has left something behind:\n{}",
            differences(&before, &now)
        );
        std::thread::sleep(Duration::from_millis(50));
        // What mlx5_ib keeps from its first use on is gone when the NIC was reset.
        warm_up();
    }
}

/// Uses each NIC once: mlx5_ib makes a few things at the first use, and keeps them.
fn warm_up() {
    let end = in_child(|| {
        for nic in nics() {
            if let Some(verbs) = Verbs::try_open(nic) {
                Loopback::new(&verbs, &verbs.alloc_uar());
            }
        }
        0
    });
    assert_eq!(end, End::Exit(0));
}

/// Everything that a test takes and must give back, to the single object: of the broker, of the kernel, and of the model.
pub type Holdings = BTreeMap<String, u64>;

fn holdings() -> Holdings {
    let lines = |file: &str| {
        let text = fs::read_to_string(Path::new("/sys/kernel/debug/ibgda").join(file));
        text.expect("read debugfs").lines().count() as u64 - 1
    };
    let mut holdings = Holdings::from([
        ("broker: sessions".into(), lines("sessions")),
        ("broker: grants".into(), lines("grants")),
    ]);
    for module in ["ibgda", "ib_uverbs", "mlx5_ib", "mlx5_core"] {
        let count = fs::read_to_string(format!("/sys/module/{module}/refcnt"));
        let count = count.expect("read refcnt").trim().parse();
        holdings.insert(
            format!("kernel: references to {module}"),
            count.expect("a number"),
        );
    }
    let text = fs::read_to_string("/sys/kernel/debug/dma_buf/bufinfo").expect("read bufinfo");
    // "Total 1 devices attached" for each, and at the end "Total 1 objects, 4096 bytes".
    for (what, word) in [("attachments", "devices"), ("dma-bufs", "objects,")] {
        let counts = text.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("Total")).then_some(())?;
            let count = words.next()?.parse::<u64>().ok()?;
            (words.next() == Some(word)).then_some(count)
        });
        holdings.insert(format!("kernel: {what}"), counts.sum());
    }
    for nic in 0..nics().len() {
        for (kind, count) in live_objects(nic) {
            holdings.insert(format!("model: {kind} of nic{nic}"), count);
        }
    }
    holdings
}

fn differences(before: &Holdings, now: &Holdings) -> String {
    let differs = now
        .iter()
        .filter(|&(what, count)| before.get(what) != Some(count));
    let lines = differs.map(|(what, count)| {
        let before = before.get(what).copied().unwrap_or(0);
        format!("{what}: {count}, {before} before\n")
    });
    lines.collect()
}

pub fn eventfd() -> File {
    // SAFETY: a new descriptor, which we own.
    unsafe { File::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }
}

pub fn signals(mut eventfd: &File) -> u64 {
    let mut count = [0; 8];
    eventfd
        .read_exact(&mut count)
        .map_or(0, |()| u64::from_ne_bytes(count))
}

pub fn module_is_loaded() -> bool {
    Path::new("/sys/module/ibgda").exists()
}

pub fn run(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).status();
    status
        .unwrap_or_else(|error| panic!("{program}: {error}"))
        .success()
}

/// `EBUSY` while `condition` is being fulfilled by somebody else's clean-up.
pub fn import_when_free(
    session: &Session,
    dmabuf: &impl AsRawFd,
    uverbs: &impl AsRawFd,
) -> Granted {
    let mut granted = None;
    wait_until("the page is free", || {
        match session.import(dmabuf, uverbs) {
            Ok(new) => {
                granted = Some(new);
                true
            }
            Err(libc::EBUSY) => false,
            Err(error) => panic!("import: errno {error}"),
        }
    });
    granted.expect("imported")
}

pub fn monotonic() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: written only.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

pub const REPORT: &str = "/tmp/ibgda-report";

/// Tells the test that a process it is not the parent of got to its end.
pub fn report(text: &str) {
    fs::write(REPORT, text).expect("write the report");
}

/// Waits until the model's counts stay the same.
pub fn settle() {
    machine::settle(0);
}

/// Imports, maps, rings and releases, whatever happens to the NIC meanwhile; how many doorbells were rung.
pub fn use_doorbells(session: &Session, nic: Bdf, mut go_on: impl FnMut() -> bool) -> u32 {
    let expected = |error: i32| {
        let fine = [
            libc::ENOLINK,
            libc::EAGAIN,
            libc::EHOSTDOWN,
            libc::EACCES,
            libc::EINVAL,
            libc::EBUSY,
            libc::ENOENT,
            libc::EDQUOT,
        ];
        assert!(fine.contains(&error), "errno {error}");
    };
    let mut rung = 0;
    while go_on() {
        let Some(verbs) = Verbs::try_open(nic) else {
            continue;
        };
        let Ok(uar) = alloc_uar(verbs.uverbs(), UarType::NonCached) else {
            continue;
        };
        let Ok(dmabuf) = export_dmabuf(verbs.uverbs(), uar.mmap_offset) else {
            continue;
        };
        for _ in 0..4 {
            let granted = match session.import(&dmabuf, &verbs.uverbs()) {
                Ok(granted) => granted,
                Err(error) => {
                    expected(error);
                    let _ = session.rebind().map_err(expected);
                    continue;
                }
            };
            let mapping = session
                .map(granted, 4096)
                .expect("map what was just granted");
            let _ = session
                .populate(granted.handle, mapping.address)
                .map_err(expected);
            mapping.store(8, 0);
            let _ = session.events(64).map_err(expected);
            session.release(granted.handle).expect("release");
            rung += 1;
        }
    }
    rung
}

pub fn no_grants() -> bool {
    fs::read_to_string("/sys/kernel/debug/ibgda/grants")
        .expect("read debugfs")
        .lines()
        .count()
        == 1
}

/// Waits until a store of a lost session lands in the sink page: the status page tells first, then the mapping is taken.
pub fn wait_for_sink(mapping: &Mapping) {
    wait_until("a store lands in the sink page", || {
        mapping.store(REGISTER, 77);
        mapping.load(REGISTER) == 77
    });
}
