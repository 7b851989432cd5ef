// SPDX-License-Identifier: MIT OR Apache-2.0
//! Callbacks: what is heard of a wrong rkey, a port, the loss and the return of a NIC, and that they end with the
//! context.

use crate::{
    Names, check,
    link::{Link, PATIENCE, ROUTES, open},
    support::{Machine, ask_model, inject_fatal_error},
};
use anyhow::{Context as _, Result, bail, ensure};
use ibgda::{AsyncEvent, AsyncEventKind, Context, Route, Status, capi};
use std::{
    cell::Cell,
    ffi::{CStr, c_void},
    fs,
    ptr::null_mut,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

pub fn listen(context: &Context) -> Result<Receiver<AsyncEvent>> {
    let (told, heard) = channel();
    context.on_error(move |event| {
        let _ = told.send(event.clone());
    })?;
    Ok(heard)
}

/// The first event that `what` takes, and how long it was waited for.
pub fn hear<T>(
    heard: &Receiver<AsyncEvent>,
    what: impl Fn(&AsyncEvent) -> Option<T>,
) -> Result<(T, Duration)> {
    let start = Instant::now();
    let end = start + Duration::from_nanos(PATIENCE);
    let mut others = Vec::new();
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        match heard.recv_timeout(left) {
            Ok(event) => match what(&event) {
                Some(found) => return Ok((found, start.elapsed())),
                None => others.push(event.to_string()),
            },
            Err(_) => break,
        }
    }
    bail!("not heard of; only {others:?}")
}

fn monotonic_ns() -> u64 {
    ibgda_test_kernels::test_clock_ns()
}

fn monitors() -> Result<usize> {
    let mut found = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let name = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        found += usize::from(name.trim() == "ibgda-monitor");
    }
    Ok(found)
}

#[test]
fn a_wrong_rkey_is_heard_of_once_with_qp_and_cause() -> Result<()> {
    let machine = Machine::take();
    for route in ROUTES {
        let mut link = Link::new(&machine, route)?;
        let heard = listen(&link.near)?;
        link.fails_at_a_wrong_rkey(false)?;
        let ((event, cqn, error), waited) = hear(&heard, |event| match event.kind() {
            AsyncEventKind::QueueError { cqn, error } => Some((event.clone(), cqn, error)),
            _ => None,
        })?;
        println!("{route}: a refused request was heard of {waited:?} after the kernel returned");
        ensure!(
            (cqn, error.qpn) == (link.qp.send_cq().number(), link.qp.number()),
            "{event:?}"
        );
        ensure!(error.syndrome == 0x13, "{event:?}");
        let text = event.to_string();
        for part in [
            format!("{:#x}", link.qp.number()),
            "rkey".into(),
            "RDMA_WRITE".into(),
        ] {
            ensure!(text.contains(&part), "{part:?} is missing in {text:?}");
        }
        ensure!(!event.advice().is_empty());
        ensure!(
            heard.recv_timeout(Duration::from_millis(100)).is_err(),
            "heard of it twice"
        );
    }
    Ok(())
}

#[test]
fn loss_and_return_of_the_nic_are_heard_of_before_and_after_rebinding() -> Result<()> {
    let failed = AsyncEventKind::Verbs {
        event: ibgda_verbs_sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL,
    };
    let machine = Machine::take();
    for route in ROUTES {
        let mut context = open(&machine, 0, route)?;
        let heard = listen(&context)?;
        for _ in 0..2 {
            let generation = context.pair().generation;
            inject_fatal_error(machine.nics[0])?;
            let failures = Cell::new(0);
            let hear = |what: &dyn Fn(&AsyncEvent) -> Option<(AsyncEvent, u64)>| {
                hear(&heard, |event| {
                    failures.set(failures.get() + u32::from(event.kind() == failed));
                    what(event)
                })
            };
            let ((event, came), _) = hear(&|event| match event.kind() {
                AsyncEventKind::NicLost {
                    generation: of,
                    reason: 1,
                } if of == generation => Some((event.clone(), monotonic_ns())),
                _ => None,
            })?;
            println!(
                "{route}: the loss was heard of {:.3} ms after the module knew",
                came.saturating_sub(event.time_ns()) as f64 / 1e6
            );
            ensure!(
                came - event.time_ns() < PATIENCE / 30,
                "{event:?} at {came}"
            );
            ensure!(event.to_string().contains("NIC reset"), "{event}");
            hear(&|event| match event.kind() {
                AsyncEventKind::NicRecovered { generation: of } if of == generation + 1 => {
                    Some((event.clone(), 0))
                }
                _ => None,
            })?;
            ensure!(
                failures.get() <= 1,
                "{route}: told {} times that the device failed",
                failures.get()
            );
            context.rebind(Duration::from_nanos(PATIENCE))?;
        }
    }
    Ok(())
}

#[test]
fn a_port_that_goes_down_and_comes_back_is_heard_of() -> Result<()> {
    let machine = Machine::take();
    let context = open(&machine, 0, Route::Auto)?;
    let heard = listen(&context)?;
    let port = |up: bool| {
        move |event: &AsyncEvent| match event.kind() {
            AsyncEventKind::Port { port: 1, active } if active == up => Some(()),
            _ => None,
        }
    };
    ask_model("link", &["nic0", "down"])?;
    let down = hear(&heard, port(false));
    ask_model("link", &["nic0", "up"])?;
    down?;
    hear(&heard, port(true))?;
    // The next test needs it active.
    let end = Instant::now() + Duration::from_nanos(PATIENCE);
    while let Err(error) = open(&machine, 0, Route::Auto) {
        ensure!(Instant::now() < end, "{error}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// By a context whose callback was set before, and by one that did not listen then.
#[test]
fn a_withdrawn_permission_is_heard_of_with_its_reason_even_late() -> Result<()> {
    let mut machine = Machine::take();
    let early = open(&machine, 0, Route::CpuDoorbell)?;
    let late = open(&machine, 0, Route::Direct)?;
    let lost = |event: &AsyncEvent| match event.kind() {
        AsyncEventKind::NicLost { reason: 4, .. } => Some(event.clone()),
        _ => None,
    };
    let heard = listen(&early)?;
    machine.withdraw();
    for heard in [heard, listen(&late)?] {
        let (event, _) = hear(&heard, lost)?;
        ensure!(event.to_string().contains("policy withdrawn"), "{event}");
    }
    Ok(())
}

#[test]
fn callbacks_may_use_the_library_and_end_with_the_context() -> Result<()> {
    let machine = Machine::take();
    ensure!(monitors()? == 0, "of earlier tests");
    let link = Link::new(&machine, Route::CpuDoorbell)?;
    ensure!(monitors()? == 0, "nobody listens");
    let held = Arc::new(Mutex::new(None));
    let (told, heard) = channel();
    link.near.on_error({
        let held = Arc::downgrade(&held);
        move |event| {
            // Makes a queue of the context, and drops the context.
            let made = held.upgrade().and_then(|held| {
                let context: Context = held.lock().ok()?.take()?;
                Some(
                    context.create_cq(16).is_ok() && !context.route_report().to_string().is_empty(),
                )
            });
            let _ = told.send((event.kind(), made));
        }
    })?;
    let end = Instant::now() + Duration::from_secs(10);
    while monitors()? != 1 {
        ensure!(Instant::now() < end, "nobody listens still");
        thread::sleep(Duration::from_millis(1));
    }
    let Link {
        near,
        far,
        source,
        target,
        mut qp,
        peer,
    } = link;
    *held.lock().expect("nobody panics") = Some(near);
    let mut poster = crate::link::poster(&mut qp);
    let (local, lkey) = (source.address(), source.lkey());
    let bad = poster.put(target.address(), target.rkey() ^ 0xff00, local, lkey, 8, 0)?;
    ensure!(poster.wait(bad, PATIENCE) == Err(Status::REMOTE_ACCESS));
    let (kind, made) = heard.recv_timeout(Duration::from_nanos(PATIENCE))?;
    ensure!(
        matches!(kind, AsyncEventKind::QueueError { .. }) && made == Some(true),
        "{kind:?}, {made:?}"
    );
    // The callback and its sender go with the context.
    ensure!(
        heard.recv_timeout(Duration::from_nanos(PATIENCE)).is_err(),
        "called again"
    );
    let end = Instant::now() + Duration::from_secs(10);
    while monitors()? != 0 {
        ensure!(
            Instant::now() < end,
            "the thread did not end with the context"
        );
        thread::sleep(Duration::from_millis(5));
    }
    drop((far, target, qp, peer));
    Ok(())
}

/// What the C callback writes down.
#[derive(Default)]
struct Notes(Mutex<Vec<(u32, u32, String)>>);

unsafe extern "C" fn note(event: *const capi::ibgda_async_event, user: *mut c_void) {
    // SAFETY: the library passes a valid event, and the pointer that the test has set, to notes that outlive the
    // context.
    let (event, notes) = unsafe { (&*event, &*user.cast::<Notes>()) };
    let text = [event.what, event.why, event.advice].map(|text| {
        // SAFETY: terminated, and valid during the call.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    });
    let mut notes = notes.0.lock().expect("nobody panics");
    notes.push((event.kind, event.reason, text.join("; ")));
}

#[test]
fn c_programs_hear_of_the_loss_too() -> Result<()> {
    let machine = Machine::take();
    let names = Names::of(&machine)?;
    let attr = names.attr(capi::IBGDA_ROUTE_CPU_DOORBELL);
    let notes = Box::new(Notes::default());
    let user = (&raw const *notes).cast_mut().cast();
    let mut context = null_mut();
    // SAFETY: the arguments are valid; the notes outlive the context.
    unsafe {
        check(capi::ibgda_open(&attr, &mut context))?;
        check(capi::ibgda_set_error_callback(context, Some(note), user))?;
    }
    inject_fatal_error(machine.nics[0])?;
    let heard = |kind| {
        let notes = notes.0.lock().expect("nobody panics");
        notes.iter().find(|note| note.0 == kind).cloned()
    };
    let end = Instant::now() + Duration::from_nanos(PATIENCE);
    while heard(capi::IBGDA_ASYNC_NIC_RECOVERED).is_none() {
        ensure!(Instant::now() < end, "{:?}", notes.0.lock());
        thread::sleep(Duration::from_millis(5));
    }
    let (_, reason, text) =
        heard(capi::IBGDA_ASYNC_NIC_LOST).context("lost before it came back")?;
    ensure!(
        reason == 1 && text.contains("NIC reset") && text.contains("rebind"),
        "{text}"
    );
    // SAFETY: nobody else uses the context.
    unsafe {
        check(capi::ibgda_rebind(context, PATIENCE / 1_000_000))?;
        check(capi::ibgda_set_error_callback(context, None, null_mut()))?;
        check(capi::ibgda_close(context))?;
    }
    Ok(())
}
