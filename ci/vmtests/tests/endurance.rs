// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guarantee that no process is given a doorbell page while another that had it lives, over many deaths of processes and
//! many resets of the NIC, while GPUs keep storing to addresses that they were once given.
//!
//! CI runs a short form. The long one:
//! `./ci/vm --nics 1 --gpus 3 --timeout 7200 -- env IBGDA_KILLS=10000 IBGDA_RESETS=500 /opt/ibgda/tests/endurance --test-threads=1 --nocapture`
//! With a module that does not look at its table the test of resets fails, and says what was counted (without resets it is
//! the files that the module holds that keep firmware from handing a page out again):
//! `IBGDA_KMOD_CFG=ibgda_pages_for_all ./ci/vm --nics 1 --gpus 3 -- /opt/ibgda/tests/endurance --test-threads=1`
//!
//! vm: --nics 1 --gpus 3

use ibgda_uapi::*;
use ibgda_verbs_sys::uverbs::{Uar, UarType, alloc_uar, export_dmabuf};
use ibgda_vmtests::{
    broker::{Granted, Mapping, Session},
    machine::{
        self, Allowed, Bdf, StandInGpu, ask_model, bar0, gpus, live_objects, nics, wait_until,
    },
    process::{Child, End, fork},
    verbs::{Loopback, REGISTER, Verbs},
};
use std::{
    env,
    fs::{self, File},
    os::fd::{FromRawFd, OwnedFd},
    path::Path,
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

/// UAR pages that BAR0 may have.
const PAGES: usize = 16384;
/// Processes that live at once, to be killed.
const LANES: usize = 4;

/// What the processes of a test tell each other: whose each page is, and what went wrong.
struct Shared(Mapping);

impl Shared {
    const REISSUED: usize = PAGES;
    const GRANTED_TWICE: usize = PAGES + 1;
    const REFUSED: usize = PAGES + 2;
    const GRANTED: usize = PAGES + 3;
    const WORDS: usize = PAGES + 4;

    fn new() -> Self {
        let length = (Self::WORDS * 8).next_multiple_of(4096);
        // SAFETY: a new descriptor.
        let file = unsafe {
            let fd = libc::memfd_create(c"shared".as_ptr(), 0);
            assert!(fd >= 0, "memfd_create: {}", std::io::Error::last_os_error());
            File::from_raw_fd(fd)
        };
        file.set_len(length as u64).expect("size the shared memory");
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        Self(Mapping::new(&file, length, prot, libc::MAP_SHARED, 0).expect("map shared memory"))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < Self::WORDS);
        // SAFETY: inside the mapping, aligned, and accessed by atomic operations only.
        unsafe { AtomicU64::from_ptr(self.0.address.cast::<u64>().add(index)) }
    }

    fn count(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::SeqCst)
    }

    fn another_lives(&self, owner: u64) -> bool {
        owner != 0 && owner != u64::from(std::process::id()) && lives(owner)
    }

    /// Firmware has handed this page out to us.
    fn issued(&self, page: u32) {
        if self.another_lives(self.count(page as usize)) {
            self.word(Self::REISSUED).fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The broker has given this page to us.
    fn granted(&self, page: u32) {
        let me = u64::from(std::process::id());
        let before = self.word(page as usize).swap(me, Ordering::SeqCst);
        if self.another_lives(before) {
            self.word(Self::GRANTED_TWICE)
                .fetch_add(1, Ordering::SeqCst);
        }
        self.word(Self::GRANTED).fetch_add(1, Ordering::SeqCst);
    }

    /// Stray doorbells on pages that live processes have, `spared` not counted.
    fn strays(&self, spared: &[u32]) -> Vec<(u64, u64)> {
        let answer = ask_model("uars", &["nic0"]);
        let uars = answer["uars"].as_array().expect("uars").iter();
        let number = |value: &serde_json::Value| value.as_u64().expect("a number");
        uars.map(|uar| (number(&uar["page"]), number(&uar["strays"])))
            .filter(|(page, strays)| {
                let owner = self.count(*page as usize);
                *strays > 0 && !spared.contains(&(*page as u32)) && owner != 0 && lives(owner)
            })
            .collect()
    }

    /// What must not have happened.
    fn check(&self, what: &str, strays: &[(u64, u64)], reissued: u64) {
        let twice = self.count(Self::GRANTED_TWICE);
        assert!(
            twice == 0 && strays.is_empty() && reissued == 0,
            "{what}: {twice} grants of pages of live processes; stray doorbells on granted pages (page, count): \
             {strays:?}; {reissued} pages of live processes handed out by firmware"
        );
    }
}

/// Whether a process is there and not a zombie.
fn lives(pid: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        !matches!(state, Some('Z' | 'X') | None)
    })
}

fn wanted(variable: &str, usual: u32) -> u32 {
    env::var(variable).map_or(usual, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is a number"))
    })
}

/// Numbers that are the same in each run (Knuth's generator).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A UAR with what comes with it.
struct Page {
    uar: Uar,
    dmabuf: OwnedFd,
}

fn page(shared: &Shared, verbs: &Verbs) -> Option<Page> {
    let uar = alloc_uar(verbs.uverbs(), UarType::NonCached).ok()?;
    shared.issued(uar.page_id);
    let dmabuf = export_dmabuf(verbs.uverbs(), uar.mmap_offset).ok()?;
    Some(Page { uar, dmabuf })
}

fn import(shared: &Shared, session: &Session, verbs: &Verbs, page: &Page) -> Option<Granted> {
    match session.import(&page.dmabuf, &verbs.uverbs()) {
        Ok(granted) => {
            shared.granted(page.uar.page_id);
            Some(granted)
        }
        Err(libc::EBUSY) => {
            shared.word(Shared::REFUSED).fetch_add(1, Ordering::SeqCst);
            None
        }
        Err(errno) => panic!("import: errno {errno}"),
    }
}

/// A process that has pages, to one of which its GPU stores the doorbell of a queue pair on another; with `gives_back` it
/// has returned all it can return, and its GPU goes on. It says what pages it has, and waits.
fn holder(shared: &Shared, gpu: Bdf, nic: Bdf, engine: &StandInGpu, gives_back: bool) -> Child {
    let mut child = fork(|line| {
        let session = Session::bound(gpu, nic);
        let verbs = Verbs::open(nic);
        let mut pages = Vec::new();
        while pages.len() < 4 {
            let page = page(shared, &verbs).expect("a UAR");
            if let Some(granted) = import(shared, &session, &verbs, &page) {
                pages.push((page, granted));
            }
        }
        let queue_pairs = [
            Loopback::new(&verbs, &pages[0].0.uar),
            Loopback::new(&verbs, &pages[1].0.uar),
        ];
        let address = bar0(nic) + pages[0].1.bar_offset + REGISTER as u64;
        engine.keep_storing(address, queue_pairs[1].stray_doorbell(), 500);
        drop(queue_pairs);
        if gives_back {
            for (page, granted) in pages {
                session.release(granted.handle).expect("release");
                verbs.destroy(page.uar);
            }
            drop((session, verbs));
            line.go();
            line.wait();
            return 0;
        }
        line.go();
        line.wait();
        0
    });
    child.wait();
    child
}

/// The pages that the table has as a process's.
fn pages_of(shared: &Shared, pid: i32) -> Vec<u32> {
    (0..PAGES as u32)
        .filter(|&page| shared.count(page as usize) == pid as u64)
        .collect()
}

/// Takes doorbells, rings them and gives them back, until it is killed.
fn use_doorbells(shared: &Shared, gpu: Bdf, nic: Bdf) -> ! {
    let session = Session::bound(gpu, nic);
    loop {
        let verbs = Verbs::open(nic);
        let page = page(shared, &verbs).expect("a UAR");
        for _ in 0..3 {
            let Some(granted) = import(shared, &session, &verbs, &page) else {
                break;
            };
            let mapping = session.map(granted, 4096).expect("map");
            session
                .populate(granted.handle, mapping.address)
                .expect("populate");
            let mut queue_pair = Loopback::new(&verbs, &page.uar);
            for value in 1..4 {
                assert!(
                    queue_pair.write_rings(value, Duration::from_secs(20), |word| {
                        mapping.store(REGISTER, word)
                    })
                );
            }
            drop(queue_pair);
            session.release(granted.handle).expect("release");
        }
    }
}

/// Waits until nothing that a process did is left, but for what the model counted `before`.
fn all_is_back(before: &std::collections::BTreeMap<String, u64>) {
    wait_until("every grant has ended", || {
        let grants = fs::read_to_string("/sys/kernel/debug/ibgda/grants");
        grants.expect("read debugfs").lines().count() == 1
    });
    let end = Instant::now() + machine::patience();
    while live_objects(0) != *before && Instant::now() < end {
        sleep(Duration::from_millis(20));
    }
    assert_eq!(live_objects(0), *before, "what the model counts is back");
}

/// Removes the module and loads it again.
fn reload() {
    let run = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output();
        output.is_ok_and(|output| output.status.success())
    };
    wait_until("the module can go", || run("rmmod", "ibgda"));
    assert!(run("insmod", "/opt/ibgda/ibgda.ko"), "insmod");
    wait_until("the device is there", || Path::new("/dev/ibgda").exists());
}

/// The model's counts when they no longer change: mlx5_ib keeps a few things from the first use on.
fn settled(gpu: Bdf, nic: Bdf) -> std::collections::BTreeMap<String, u64> {
    let shared = Shared::new();
    let child = fork(|_| use_doorbells(&shared, gpu, nic));
    sleep(Duration::from_millis(500));
    child.kill();
    child.end();
    machine::settle(0)
}

#[test]
fn killed_processes_leave_their_pages_to_nobody_while_another_lives() {
    let kills = wanted("IBGDA_KILLS", 60);
    let (gpus, nic) = (gpus(), nics()[0]);
    let allowed = Allowed::entry(&format!("*@{nic}"));
    let before = settled(gpus[0], nic);
    let shared = Shared::new();
    // They end with this function, before the processes that told them to store.
    let engines: Vec<_> = gpus[..2].iter().map(|&gpu| StandInGpu::new(gpu)).collect();
    let mut holders: Vec<_> = engines
        .iter()
        .zip(&gpus)
        .enumerate()
        .map(|(index, (engine, &gpu))| holder(&shared, gpu, nic, engine, index == 0))
        .collect();
    let held: Vec<u32> = holders
        .iter()
        .flat_map(|holder| pages_of(&shared, holder.pid))
        .collect();
    let stores: Vec<_> = engines.iter().map(StandInGpu::stores).collect();

    let mut dice = Dice(u64::from(kills));
    let spawn = || fork(|_| use_doorbells(&shared, gpus[2], nic));
    let mut lanes: Vec<_> = (0..LANES).map(|_| spawn()).collect();
    let mut strays = Vec::new();
    for kill in 0..kills {
        sleep(Duration::from_micros(dice.below(40_000)));
        let lane = dice.below(LANES as u64) as usize;
        lanes[lane].kill();
        let ended = std::mem::replace(&mut lanes[lane], spawn());
        assert_eq!(ended.end(), End::Signal(libc::SIGKILL), "a process failed");
        if kill % 50 == 0 || kill + 1 == kills {
            strays.extend(shared.strays(&held));
        }
        if kill % 1000 == 999 {
            println!(
                "{} kills, {} grants",
                kill + 1,
                shared.count(Shared::GRANTED)
            );
        }
    }
    for lane in lanes {
        lane.kill();
        assert_eq!(lane.end(), End::Signal(libc::SIGKILL), "a process failed");
    }
    for (engine, stores) in engines.iter().zip(stores) {
        assert!(engine.stores() > stores, "a GPU has not gone on storing");
    }
    drop(engines);
    for mut holder in holders.drain(..) {
        holder.go();
        assert_eq!(holder.end(), End::Exit(0));
    }
    assert!(shared.count(Shared::GRANTED) > u64::from(kills) / 4);
    shared.check(
        &format!("{kills} kills"),
        &strays,
        shared.count(Shared::REISSUED),
    );
    drop(allowed);
    all_is_back(&before);
    reload();
}

#[test]
fn pages_stay_their_owners_over_resets_of_the_nic_while_their_gpus_go_on() {
    let resets = wanted("IBGDA_RESETS", 4);
    let (gpus, nic) = (gpus(), nics()[0]);
    let allowed = Allowed::entry(&format!("*@{nic}"));
    let before = settled(gpus[0], nic);
    let shared = Shared::new();
    let watch = Session::bound(gpus[0], nic);
    let status = watch.status();
    let mut holders: Vec<Option<(StandInGpu, Child)>> = gpus.iter().map(|_| None).collect();
    let mut strays = Vec::new();
    for reset in 0..resets {
        let slot = reset as usize % gpus.len();
        if let Some((engine, mut holder)) = holders[slot].take() {
            // A context's GPU stops with it.
            drop(engine);
            holder.go();
            assert_eq!(holder.end(), End::Exit(0));
        }
        let engine = StandInGpu::new(gpus[slot]);
        let child = holder(&shared, gpus[slot], nic, &engine, reset % 2 == 1);
        holders[slot] = Some((engine, child));
        let held: Vec<u32> = holders
            .iter()
            .flatten()
            .flat_map(|(_, holder)| pages_of(&shared, holder.pid))
            .collect();

        machine::inject_error(nic, machine::FATAL);
        wait_until("the session is recovered", || {
            status.state() == IBGDA_STATE_RECOVERED
        });
        machine::wait_for_rdma(nic);
        watch.rebind().expect("rebind");

        // Firmware hands out the same pages again.
        let mut newcomer = fork(|line| {
            let session = Session::bound(gpus[0], nic);
            let verbs = Verbs::open(nic);
            let pages: Vec<_> = (0..24).filter_map(|_| page(&shared, &verbs)).collect();
            let granted: Vec<_> = pages
                .iter()
                .filter_map(|page| Some((page, import(&shared, &session, &verbs, page)?)))
                .collect();
            for (page, granted) in granted.iter().take(4) {
                let mapping = session.map(*granted, 4096).expect("map");
                let mut queue_pair = Loopback::new(&verbs, &page.uar);
                for value in 1..4 {
                    let time = Duration::from_secs(20);
                    let rung =
                        queue_pair.write_rings(value, time, |word| mapping.store(REGISTER, word));
                    assert!(rung, "a doorbell of a page given anew");
                }
            }
            line.go();
            line.wait();
            0
        });
        newcomer.wait();
        for (engine, _) in holders.iter().flatten() {
            let stores = engine.stores();
            wait_until("a GPU has gone on storing", || {
                engine.stores() > stores + 20
            });
        }
        let newest = pages_of(&shared, newcomer.pid);
        assert!(!newest.is_empty(), "the newcomer was given nothing");
        // With the table's check the newcomer has none of them; without it they are what is looked for.
        let spared: Vec<u32> = held
            .into_iter()
            .filter(|page| !newest.contains(page))
            .collect();
        strays.extend(shared.strays(&spared));
        newcomer.go();
        assert_eq!(newcomer.end(), End::Exit(0));
        if reset % 50 == 49 {
            println!(
                "{} resets, {} grants, {} refused",
                reset + 1,
                shared.count(Shared::GRANTED),
                shared.count(Shared::REFUSED)
            );
        }
    }
    for (engine, mut holder) in holders.into_iter().flatten() {
        drop(engine);
        holder.go();
        assert_eq!(holder.end(), End::Exit(0));
    }
    // A reset makes firmware forget, so it hands out pages of live processes: that is what the table is for.
    let refused = shared.count(Shared::REFUSED);
    shared.check(&format!("{resets} resets"), &strays, 0);
    assert!(
        refused >= u64::from(resets),
        "firmware handed out {refused} pages of live processes in {resets} resets: too few to test anything"
    );
    drop((watch, status, allowed));
    all_is_back(&before);
    reload();
}
