// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loss and return.

use crate::fixture::{
    Doorbell, Pair, REPORT, alone, eventfd, import_when_free, no_grants, signals, use_doorbells,
    wait_for_sink,
};
use ibgda_uapi::*;
use ibgda_vmtests::broker::Session;
use ibgda_vmtests::machine::{self, Allowed, Bdf, gpus, nics, wait_until};
use ibgda_vmtests::process::{End, fork};
use ibgda_vmtests::verbs::{Loopback, REGISTER, Verbs};
use std::fs;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// N8: the UAR object is destroyed while its page is mapped.
#[test]
fn destroying_the_uar_revokes_its_doorbell_alone() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let events = eventfd();
        session
            .set_eventfd(events.as_raw_fd())
            .expect("set the eventfd");
        let doorbell = Doorbell::import(&session, pair.nic);
        let other = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        let still = session.map(other.granted, 4096).expect("map");
        let handle = doorbell.granted.handle;
        session.populate(handle, mapping.address).expect("populate");
        doorbell.verbs.destroy(doorbell.uar);
        mapping.store(REGISTER, 1);
        assert_eq!(mapping.load(REGISTER), 1, "a store lands in the sink page");
        assert_eq!(
            session.populate(handle, mapping.address),
            Err(libc::ENOLINK)
        );
        session
            .populate(other.granted.handle, still.address)
            .expect("the other one is untouched");
        assert_eq!(session.status().state(), IBGDA_STATE_READY);
        assert_eq!(signals(&events), 1);
        let records = session.events(8).expect("a record");
        assert_eq!(records.len(), 1);
        assert_eq!(
            (records[0].type_, records[0].reason, records[0].handle),
            (IBGDA_EVENT_DOORBELL, IBGDA_REASON_UAR_DESTROYED, handle)
        );
    });
}

/// A loss, and what a session with a mapped doorbell must see of it.
fn lose_and_return(reason: u32, lose: impl FnOnce(Bdf) -> Box<dyn FnOnce()>) {
    let pair = Pair::new();
    let session = pair.session();
    let events = eventfd();
    session
        .set_eventfd(events.as_raw_fd())
        .expect("set the eventfd");
    let status = session.status();
    let doorbell = Doorbell::import(&session, pair.nic);
    let mapping = session.map(doorbell.granted, 4096).expect("map");
    let handle = doorbell.granted.handle;
    session.populate(handle, mapping.address).expect("populate");
    mapping.store(8, 0);

    let come_back = lose(pair.nic);
    wait_until("the session is lost", || {
        status.state() != IBGDA_STATE_READY
    });
    assert_eq!(status.reason(), reason);
    wait_for_sink(&mapping);
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK)
    );
    assert_eq!(
        session.import(&doorbell.dmabuf, &doorbell.verbs.uverbs()),
        Err(libc::ENOLINK)
    );
    if status.state() == IBGDA_STATE_LOST {
        assert!(
            matches!(
                session.rebind().err(),
                Some(libc::EAGAIN | libc::EINVAL | libc::ENODEV)
            ) || status.state() != IBGDA_STATE_LOST
        );
    }
    come_back();
    wait_until("the session is recovered", || {
        status.state() == IBGDA_STATE_RECOVERED
    });
    assert_eq!((status.generation(), status.reason()), (2, reason));
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK),
        "not before REBIND"
    );

    let bind = session.rebind().expect("rebind");
    assert_eq!(bind.generation, 2);
    assert_eq!(
        (status.state(), status.generation()),
        (IBGDA_STATE_READY, 2)
    );
    assert_eq!(session.rebind().err(), Some(libc::EINVAL), "not lost");
    assert_eq!(
        session.populate(handle, mapping.address),
        Err(libc::ENOLINK),
        "the old doorbell stays lost"
    );
    assert_eq!(mapping.load(REGISTER), 77, "and its mapping at the sink");

    assert!(signals(&events) >= 2);
    let records = session.events(16).expect("records");
    let kinds: Vec<u32> = records
        .iter()
        .map(|record| record.type_)
        .filter(|&kind| kind != IBGDA_EVENT_DOORBELL)
        .collect();
    assert_eq!(kinds, [IBGDA_EVENT_LOST, IBGDA_EVENT_RECOVERED]);
    assert_eq!(session.events(16).err(), Some(libc::EAGAIN));

    machine::wait_for_rdma(pair.nic);
    let new = Doorbell::import(&session, pair.nic);
    let rung = session.map(new.granted, 4096).expect("map");
    let mut qp = Loopback::new(&new.verbs, &new.uar);
    assert!(qp.write_rings(5, Duration::from_secs(10), |word| {
        rung.store(REGISTER, word)
    }));
}

/// N10: mlx5_ib is unbound.
#[test]
fn unbinding_the_rdma_driver_loses_the_session_and_binding_returns_it() {
    alone(|| {
        lose_and_return(IBGDA_REASON_NIC_REMOVED, |nic| {
            Box::new(machine::unbind_mlx5_ib(nic))
        });
    });
}

/// N9: fatal.
#[test]
fn a_fatal_error_of_the_nic_loses_the_session_and_its_recovery_returns_it() {
    alone(|| {
        lose_and_return(IBGDA_REASON_NIC_RESET, |nic| {
            machine::inject_error(nic, machine::FATAL);
            Box::new(move || machine::wait_for_rdma(nic))
        });
    });
}

/// N9: non-fatal.
#[test]
fn a_non_fatal_error_of_the_nic_loses_the_session_and_its_recovery_returns_it() {
    alone(|| {
        lose_and_return(IBGDA_REASON_NIC_RESET, |nic| {
            machine::inject_error(nic, machine::NON_FATAL);
            Box::new(move || machine::wait_for_rdma(nic))
        });
    });
}

/// N8, N9: firmware hands out the same pages after a reset.
#[test]
fn a_page_stays_its_owners_across_a_reset_of_the_nic() {
    alone(|| {
        let pair = Pair::new();
        // The first page that firmware hands out after a reset is the one it handed out first before.
        let mut owner = fork(|line| {
            let session = pair.session();
            let verbs = Verbs::open(pair.nic);
            let uars: Vec<_> = (0..4).map(|_| verbs.alloc_uar()).collect();
            for uar in &uars {
                session
                    .import(&verbs.export(uar), &verbs.uverbs())
                    .expect("import");
            }
            fs::write(
                REPORT,
                uars.iter()
                    .map(|uar| uar.page_id.to_string())
                    .collect::<Vec<_>>()
                    .join(" "),
            )
            .expect("write the report");
            line.go();
            line.wait();
            0
        });
        owner.wait();
        let held: Vec<u32> = fs::read_to_string(REPORT)
            .expect("read the report")
            .split(' ')
            .map(|page| page.parse().expect("a page"))
            .collect();
        fs::remove_file(REPORT).expect("remove the report");
        let session = pair.session();
        let status = session.status();
        machine::inject_error(pair.nic, machine::FATAL);
        wait_until("the session is recovered", || {
            status.state() == IBGDA_STATE_RECOVERED
        });
        machine::wait_for_rdma(pair.nic);
        session.rebind().expect("rebind");
        let verbs = Verbs::open(pair.nic);
        let mut refused = 0;
        let mut taken = Vec::new();
        for _ in 0..16 {
            let uar = verbs.alloc_uar();
            let dmabuf = verbs.export(&uar);
            let result = session.import(&dmabuf, &verbs.uverbs());
            if held.contains(&uar.page_id) {
                assert_eq!(
                    result,
                    Err(libc::EBUSY),
                    "page {} is the owner's",
                    uar.page_id
                );
                refused += 1;
                taken.push(dmabuf);
            } else {
                result.expect("a page of nobody's");
            }
        }
        assert!(
            refused > 0,
            "firmware handed out none of {held:?} again, so nothing was tested"
        );
        owner.go();
        assert_eq!(owner.end(), End::Exit(0));
        for dmabuf in taken {
            import_when_free(&session, &dmabuf, &verbs.uverbs());
        }
    });
}

/// N10: the GPU's function is removed.
#[test]
fn removing_the_gpu_loses_the_session() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        let status = session.status();
        let doorbell = Doorbell::import(&session, pair.nic);
        let mapping = session.map(doorbell.granted, 4096).expect("map");
        mapping.store(8, 0);
        fs::write(pair.gpu.sysfs().join("remove"), "1").expect("remove the GPU");
        assert_eq!(
            (status.state(), status.reason()),
            (IBGDA_STATE_LOST, IBGDA_REASON_GPU_REMOVED)
        );
        mapping.store(REGISTER, 77);
        assert_eq!(mapping.load(REGISTER), 77, "a store lands in the sink page");
        assert_eq!(session.rebind().err(), Some(libc::ENODEV));
        fs::write("/sys/bus/pci/rescan", "1").expect("rescan");
        wait_until("the GPU is back", || pair.gpu.sysfs().exists());
        assert_eq!(session.rebind().map(|bind| bind.generation), Ok(2));
        assert_eq!(status.state(), IBGDA_STATE_READY);
    });
}

/// N9: a PCI error strikes while doorbells are imported, mapped, populated, faulted in and released. None of that is a
/// command to the NIC: mlx5_core has a race between those and errors (docs/mlx5-races.md).
#[test]
fn a_pci_error_in_the_midst_of_imports_and_faults_is_recovered() {
    alone(|| {
        let pair = Pair::new();
        for (round, error) in [machine::FATAL, machine::NON_FATAL, machine::FATAL]
            .into_iter()
            .enumerate()
        {
            machine::wait_for_rdma(pair.nic);
            let session = pair.session();
            let status = session.status();
            let verbs = Verbs::open(pair.nic);
            let dmabufs: Vec<_> = (0..3).map(|_| verbs.export(&verbs.alloc_uar())).collect();
            let (session, uverbs) = (&session, &verbs.uverbs());
            let stop = AtomicBool::new(false);
            let started = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                let users: Vec<_> = dmabufs
                    .iter()
                    .map(|dmabuf| {
                        let (stop, started) = (&stop, &started);
                        scope.spawn(move || {
                            let (mut before, mut after) = (0, 0);
                            while !stop.load(Ordering::Relaxed) {
                                let granted = match session.import(dmabuf, uverbs) {
                                    Ok(granted) => granted,
                                    Err(libc::ENOLINK | libc::EINVAL) => {
                                        after += 1;
                                        continue;
                                    }
                                    Err(error) => panic!("import: errno {error}"),
                                };
                                let mapping = session.map(granted, 4096).expect("map");
                                let populated = session.populate(granted.handle, mapping.address);
                                assert!(matches!(populated, Ok(()) | Err(libc::ENOLINK)));
                                mapping.store(8, 0);
                                session.release(granted.handle).expect("release");
                                before += 1;
                                if before == 1 {
                                    started.fetch_add(1, Ordering::Relaxed);
                                }
                            }
                            (before, after)
                        })
                    })
                    .collect();
                wait_until("all have imported", || {
                    started.load(Ordering::Relaxed) == dmabufs.len()
                });
                std::thread::sleep(Duration::from_millis(30 * round as u64));
                machine::inject_error(pair.nic, error);
                wait_until("the session is lost", || {
                    status.state() != IBGDA_STATE_READY
                });
                wait_until("the session is recovered", || {
                    status.state() == IBGDA_STATE_RECOVERED
                });
                stop.store(true, Ordering::Relaxed);
                for user in users {
                    let (before, after) = user.join().expect("the thread ends well");
                    assert!(before > 0 && after > 0, "{before} before, {after} after");
                }
            });
            assert_eq!(
                (status.generation(), status.reason()),
                (2, IBGDA_REASON_NIC_RESET)
            );
            session.rebind().expect("rebind");
        }
        machine::wait_for_rdma(pair.nic);
    });
}

/// N11: everything at once, with policy and unbind.
#[test]
fn losses_in_the_midst_of_everything_leave_nothing_behind() {
    alone(|| {
        let (gpu, nic) = (gpus()[0], nics()[0]);
        let mut allowed = Some(Allowed::pair(gpu, nic));
        let session = Session::bound(gpu, nic);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let users: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| use_doorbells(&session, nic, || !stop.load(Ordering::Relaxed)))
                })
                .collect();
            let pause = || std::thread::sleep(Duration::from_millis(150));
            // Without PCI errors: mlx5_core has a race between those and a command that starts (docs/mlx5-races.md).
            for _ in 0..4 {
                pause();
                drop(allowed.take());
                pause();
                allowed = Some(Allowed::pair(gpu, nic));
                pause();
                machine::unbind_mlx5_ib(nic)();
            }
            pause();
            stop.store(true, Ordering::Relaxed);
            for user in users {
                assert!(user.join().expect("the thread ends well") > 0);
            }
        });
        drop(allowed);
    });
    wait_until("every grant has ended", no_grants);
}
