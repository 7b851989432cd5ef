// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every refusal says of what object which field with which value broke which rule, where that rule is written, and where
//! it is in this program: there a reader finds it, word for word.
//!
//! The places in the program where something is refused are taken from its source. All that is named here as provoking
//! is run, and what it makes the model refuse is held against them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use connectx::engine::completion::FAILURES;
use connectx::ifc::command::{self, header};
use connectx::ifc::opcode;
use connectx::ifc::wqe::{send, syndrome};
use connectx::log::Record;
use connectx::objects::qp::Service;
use connectx::platform::Function;

use crate::guest::{
    Cq, Pair, Qp, Settings, Shape, Side, Srq, address_vector, guests, input, pointer, refusals_of,
    remote,
};
use crate::hostile::{Random, any_input, wild};
use crate::{
    atomics, blueflame, bounds, compression, device_memory, dynamic, errors, faults, hostile, kept,
    lifecycle, ownership, paging, queues, scatter, signatures, states, syndromes, traffic,
};

/// Places that are provoked. It can only go up: a new place comes with what provokes it.
const PROVOKED: usize = 128;

/// Parts of the model that refuse what drivers do; the others are its own programs and the stand-in GPU.
const PARTS: [&str; 3] = ["cmd", "engine", "objects"];

/// Names by which source refuses.
const NAMES: [&str; 8] = [
    "Reject::new(",
    "Reject::param(",
    "Reject::absent(",
    "Reject::busy(",
    "Reject::full(",
    "device.refuse(",
    "foreign(",
    "lost(",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// All of the model's source files.
fn files(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
}

/// Lines of a file in which something is refused. A function that is tracked speaks for its callers.
fn places(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let code = line.trim_start();
        if code == "#[cfg(test)]" {
            break;
        }
        if code == "#[track_caller]" {
            let end = format!("{}}}", &line[..line.len() - code.len()]);
            lines.by_ref().find(|(_, line)| *line == end);
            continue;
        }
        let comment = code.starts_with("//");
        if !comment && NAMES.iter().any(|name| line.contains(name)) {
            found.push(number + 1);
        }
    }
    found
}

fn check(record: &Record, texts: &BTreeMap<String, String>, all: &BTreeSet<String>) {
    let r = &record.refusal;
    for part in [
        &r.function,
        &r.object,
        &r.field,
        &r.value,
        &r.rule,
        &r.source,
    ] {
        assert!(!part.is_empty(), "{record:?}");
    }
    assert!(
        all.contains(&record.code),
        "{} is no place where source refuses: {r}",
        record.code
    );
    let (file, _) = record.code.rsplit_once(':').unwrap();
    // A command's record has status and syndrome behind the rule.
    let rule = r.rule.split(" (status ").next().unwrap();
    let count = |text: &String| text.matches(rule).count();
    assert!(
        count(&texts[file]) > 0 || texts.values().map(count).sum::<usize>() == 1,
        "the rule is neither in {file} nor in one place of all: {rule}"
    );
    let json = serde_json::to_value(record).unwrap();
    for key in [
        "function", "object", "field", "value", "rule", "source", "code",
    ] {
        assert!(json[key].is_string(), "{key} in {json}");
    }
}

/// Commands of any content, and work requests.
fn noise() {
    let mut random = Random(0x5eed);
    for _ in 0..4 {
        let mut guest = guests(1).pop().unwrap();
        for round in 0..500u64 {
            let mut input = any_input(&mut random);
            let user = if round % 3 == 0 { random.below(3) } else { 0 };
            header::uid.set(&mut input, user);
            guest.command(input, 16 + random.below(600) as usize);
        }
    }
    for _ in 0..30 {
        wild(&mut Pair::new(), &mut random);
    }
}

/// Two functions, the first with objects of every kind. Gives their numbers too.
fn world() -> (Pair, Vec<u32>) {
    let mut guests = guests(2);
    // The commands that make them.
    guests[0].record = Some(Vec::new());
    let sides = [Side::new(&mut guests[0]), Side::new(&mut guests[1])];
    for i in 0..2 {
        let to = Settings::to(2 - i as u16, sides[1 - i].qp.qpn);
        sides[i].qp.connect(&mut guests[i], to);
    }
    let guest = &mut guests[0];
    let pd = sides[0].pd;
    let xrcd = guest.alloc(opcode::ALLOC_XRCD);
    let events = Cq::new(guest, 4);
    let pool = Srq::new(guest, pd, 2, None);
    let xrc = Srq::new(guest, pd, 2, Some((xrcd, &events)));
    guest.window(pd);
    guest.command(input(opcode::CREATE_UCTX, 64), 16);
    guest.command(input(opcode::ALLOC_MEMIC, 32), 16);
    let numbers = vec![
        0,
        sides[0].qp.qpn,
        sides[0].send.cqn,
        sides[0].key >> 8,
        pool.number,
        xrc.number,
        guest.events.eqn,
        guest.uar,
        pd,
        xrcd,
        0xff_ffff,
    ];
    (Pair { guests, sides }, numbers)
}

/// Commands that make objects, and every command on objects of every kind.
fn originals() -> Vec<(Vec<u8>, usize)> {
    let (mut pair, numbers) = world();
    let guest = &mut pair.guests[0];
    for (op, len, output) in connectx::cmd::known() {
        let ends = matches!(
            op,
            opcode::DISABLE_HCA | opcode::TEARDOWN_HCA | opcode::ENABLE_HCA | opcode::INIT_HCA
        );
        let name = opcode::name(op).unwrap_or_default();
        if ends || name.starts_with("DE") || name.starts_with("TO_") {
            continue;
        }
        for number in &numbers {
            let mut bytes = input(op, len + 32);
            header::object.set(&mut bytes, u64::from(*number));
            guest.command(bytes, output);
        }
    }
    guest.record.take().unwrap()
}

/// Every command that makes or changes something, with each of its bytes wrong, and in the name of others.
fn commands() {
    let mut seen = BTreeSet::new();
    for (original, output) in &originals() {
        // One of each is enough.
        if !seen.insert((header::opcode.get(original), original.len())) {
            continue;
        }
        // A guest's refusals are counted when it goes, and the last 1024 of them.
        for value in [0xff, 0, 0x06] {
            let (mut pair, _) = world();
            let guest = &mut pair.guests[0];
            for at in (4..original.len().min(0x130)).filter(|at| *at != 4 && *at != 5) {
                let mut input = original.clone();
                input[at] = value;
                guest.command(input, *output);
            }
        }
        let (mut pair, _) = world();
        let guest = &mut pair.guests[0];
        let user = guest.command(input(opcode::CREATE_UCTX, 64), 16);
        let user = command::create_uctx_out::uid.get(&user);
        for uid in [user, 0x3ff] {
            let mut input = original.clone();
            header::uid.set(&mut input, uid);
            guest.command(input, *output);
        }
        guest.command(original[..original.len().min(12)].to_vec(), *output);
        guest.command(original.clone(), 4);
    }
    let mut guest = guests(1).pop().unwrap();
    guest.command(input(0x7ff, 64), 16);
    for op in [
        opcode::DEALLOC_PD,
        opcode::DEALLOC_UAR,
        opcode::DEALLOC_XRCD,
        opcode::DESTROY_CQ,
        opcode::DESTROY_EQ,
        opcode::DESTROY_MKEY,
        opcode::DESTROY_QP,
        opcode::DESTROY_RMP,
        opcode::DESTROY_SQ,
        opcode::DESTROY_UCTX,
        opcode::DESTROY_UMEM,
        opcode::DESTROY_XRC_SRQ,
    ] {
        guest.on_object(op, 0xff_fffe);
    }
    // A slot that is not handed over.
    guest.ram.set(guest.slot(3) + 0x3f, &[0]);
    guest.ring_commands(1 << 3);
}

/// Objects that others need, destroyed.
fn in_use() {
    let (mut pair, _) = world();
    let Pair { guests, sides } = &mut pair;
    let (guest, side) = (&mut guests[0], &sides[0]);
    for (op, number) in [
        (opcode::DEALLOC_PD, side.pd),
        (opcode::DEALLOC_UAR, guest.uar),
        (opcode::DESTROY_CQ, side.send.cqn),
        (opcode::DESTROY_EQ, guest.completions.eqn),
    ] {
        assert_ne!(guest.on_object(op, number), 0);
    }
}

/// Doorbells that belong to nothing.
fn doorbells() {
    let (pair, _) = world();
    let guest = &pair.guests[0];
    let own = u64::from(guest.uar) * 4096;
    for (at, value) in [
        (own + 0x20, 0xff_ffffu64),
        (own + 0x800, 0xff_ffff << 8),
        (own + 0x100, 1),
        (own + 0x40, 0xff << 56),
        (own + 0x10_0000, 1),
    ] {
        guest.hca.bar_write(0, at, &value.to_be_bytes());
    }
    let eq = u64::from(guest.events.eqn) << 56;
    let (mut other, _) = world();
    let page = u64::from(other.guests[0].alloc(opcode::ALLOC_UAR)) * 4096;
    let guest = &other.guests[0];
    guest.hca.bar_write(0, page + 0x40, &eq.to_be_bytes());
    let cqn = u64::from(other.sides[0].send.cqn);
    guest.hca.bar_write(0, page + 0x20, &cqn.to_be_bytes());
    // Before its record, and in a state that does not send.
    let qpn = other.sides[0].qp.qpn;
    let ahead = (9u64 << 40) | (u64::from(qpn) << 8);
    guest.hca.bar_write(0, own + 0x800, &ahead.to_be_bytes());
    let guest = &mut other.guests[0];
    assert_eq!(guest.on_object(opcode::TO_RST_QP, qpn), 0);
    guest.hca.bar_write(0, own + 0x800, &ahead.to_be_bytes());
}

/// Records that claim more than a queue has.
fn too_much_posted() {
    for receive in [false, true] {
        let mut pair = Pair::new();
        let Pair { guests, sides } = &mut pair;
        let [a, b] = sides;
        if receive {
            guests[1].ram.set(b.qp.dbr, &9u32.to_be_bytes());
        }
        a.qp.put(&guests[0], send::SEND, 8, 0, &[pointer(4, a.key, a.at)]);
        if !receive {
            guests[0].ram.set(a.qp.dbr + 4, &17u32.to_be_bytes());
        }
        a.qp.ring(&guests[0], guests[0].uar);
    }
}

/// A completion queue, and an event queue, that nobody reads.
fn overruns() {
    let mut guest = guests(1).pop().unwrap();
    let mut side = Side::new(&mut guest);
    side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
    let write = [remote(side.at, side.key), pointer(4, side.key, side.at)];
    for _ in 0..80 {
        side.qp.post(&guest, send::RDMA_WRITE, 0, &write);
    }
    let mut guest = guests(1).pop().unwrap();
    let mut side = Side::new(&mut guest);
    side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
    let write = [remote(side.at, side.key), pointer(4, side.key, side.at)];
    for _ in 0..300 {
        side.qp.post(&guest, send::RDMA_WRITE, 0, &write);
        side.send.wait(&guest);
        side.send.arm(&guest);
    }
}

/// A datagram with another Q_Key than its receiver's.
fn wrong_q_key() {
    let mut guest = guests(1).pop().unwrap();
    let side = Side::new(&mut guest);
    let (pd, uar) = (side.pd, guest.uar);
    let shape = Shape::of(Service::Ud);
    let mut qp = Qp::shaped(&mut guest, pd, uar, &side.send, &side.receive, shape).unwrap();
    qp.connect(&mut guest, Settings::to(1, qp.qpn));
    qp.receive(&guest, side.key, side.at, 4096);
    let mut segments = address_vector(1, qp.qpn, 0x7777_7777).to_vec();
    segments.push(pointer(4, side.key, side.at));
    qp.post(&guest, send::SEND, 0, &segments);
}

fn provocations() {
    for provoke in [
        noise,
        commands,
        in_use,
        doorbells,
        too_much_posted,
        overruns,
        wrong_q_key,
        atomics::an_atomic_that_is_none_fails_here,
        atomics::an_unaligned_target_is_an_invalid_request,
        atomics::the_mode_of_the_queue_pair_says_what_it_answers,
        blueflame::a_send_queue_has_its_own_commands_and_states,
        blueflame::a_copy_through_a_foreign_page_rings_nothing,
        bounds::lists_of_all_objects_together_have_a_limit,
        bounds::one_page_cannot_be_given_for_ever,
        bounds::a_umem_stays_while_a_key_has_its_pages,
        compression::what_the_device_does_not_compress_is_refused,
        device_memory::device_memory_is_given_once_and_taken_when_no_key_names_it,
        dynamic::a_wrong_key_is_counted_refused_and_an_event_when_armed,
        dynamic::a_stream_fails_alone_until_there_are_too_many,
        dynamic::a_target_is_drained_before_it_goes_and_takes_its_responders_along,
        errors::a_wrong_remote_key_stops_both_sides,
        errors::a_key_without_the_right_is_no_key,
        errors::a_queue_pair_without_the_right_refuses,
        errors::a_key_of_another_domain_is_refused,
        errors::a_malformed_wqe_fails_here,
        errors::an_overrun_completion_queue_says_so,
        errors::transitions_out_of_order_are_refused,
        faults::a_reordered_completion_is_overtaken_once_or_comes_alone,
        hostile::any_register_access_is_survived,
        hostile::short_and_long_inputs_are_refused,
        hostile::memory_that_is_gone_is_a_counted_fault,
        kept::a_shared_queue_with_more_posted_than_it_has_fails,
        kept::a_command_without_a_place_for_its_output_does_nothing,
        lifecycle::commands_wait_for_their_phase,
        lifecycle::references_keep_objects,
        lifecycle::users_are_kept_apart,
        ownership::no_command_takes_another_user_s_object,
        ownership::creations_are_carried_out_for_who_owns_everything,
        paging::a_page_that_cannot_be_provided_fails_the_access,
        paging::after_a_reset_nothing_waits,
        paging::only_the_scheme_that_there_is_can_be_turned_on,
        queues::a_queue_fits_its_umem_or_is_refused,
        queues::a_umem_of_another_user_is_refused,
        queues::a_queue_moves_to_larger_memory_without_losing_anything,
        scatter::what_does_not_fit_an_entry_is_refused,
        signatures::a_format_that_is_none_is_refused,
        signatures::a_key_without_its_values_or_room_is_refused,
        states::every_command_in_every_state,
        states::every_optional_parameter_of_every_transition,
        syndromes::every_failure_is_earned,
        traffic::a_window_opens_for_its_queue_pair_until_it_is_invalidated,
        traffic::the_peer_cannot_close_what_does_not_permit_it,
    ] {
        provoke();
    }
}

#[test]
fn each_names_its_rule_and_the_rule_s_place() {
    let mut sources = Vec::new();
    files(&root(), &mut sources);
    // Records name files as the compiler does, from the workspace.
    let texts: BTreeMap<String, String> = sources
        .into_iter()
        .map(|(path, text)| {
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
            (format!("connectx/src/{name}"), text)
        })
        .collect();
    let part = |file: &str| {
        let mut words = file.split('/').skip(2);
        words.next().is_some_and(|first| PARTS.contains(&first))
    };
    let all: BTreeSet<String> = texts
        .iter()
        .filter(|(file, _)| part(file))
        .flat_map(|(file, text)| places(text).into_iter().map(move |n| format!("{file}:{n}")))
        .collect();

    let records = refusals_of(provocations);
    let mut seen: BTreeMap<&str, &Record> = BTreeMap::new();
    for record in &records {
        seen.entry(&record.code).or_insert(record);
    }
    for record in seen.values() {
        check(record, &texts, &all);
    }

    // Every group of commands, every part of the engine.
    let file = |code: &str| code.rsplit_once(':').unwrap().0.to_owned();
    let with_places: BTreeSet<String> = all.iter().map(|code| file(code)).collect();
    let refused: BTreeSet<String> = seen.keys().map(|code| file(code)).collect();
    let silent: Vec<_> = with_places.difference(&refused).collect();
    assert!(silent.is_empty(), "nothing was refused in {silent:?}");

    // Every error that a completion can have, but the flush, which follows from one.
    let errors: BTreeSet<String> = records
        .iter()
        .filter(|record| record.refusal.field == "syndrome")
        .map(|record| record.refusal.value.clone())
        .collect();
    for (failure, what) in FAILURES {
        let value = (u16::from(failure.vendor) << 8) | u16::from(failure.syndrome);
        let found = errors.contains(&format!("{value:#x}"));
        assert!(found || failure.syndrome == syndrome::WR_FLUSH, "{what}");
    }

    let missing: Vec<&String> = all
        .iter()
        .filter(|code| !seen.contains_key(code.as_str()))
        .collect();
    println!("{} places of {} refused; not these:", seen.len(), all.len());
    for code in &missing {
        println!("  {code}");
    }
    assert!(
        seen.len() >= PROVOKED,
        "{} places refused, not {missing:#?}",
        seen.len()
    );
}
