// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every refusal says of what object which field with which value broke which rule, where that rule is written, and where
//! it is in this program: there a reader finds it, word for word.

use std::collections::BTreeMap;
use std::path::Path;

use connectx::ifc::command::header;
use connectx::log::Record;

use crate::guest::{Pair, guests};
use crate::hostile::{Random, any_input, wild};

/// The source line that a record names, and those around it.
fn place(record: &Record) -> (String, Vec<String>) {
    let (file, line) = record.code.rsplit_once(':').unwrap();
    // Paths are relative to the workspace, tests run in the package.
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", record.code));
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let line: usize = line.parse().unwrap();
    assert!((1..=lines.len()).contains(&line), "{}", record.code);
    (text, lines[line - 1..(line + 2).min(lines.len())].to_vec())
}

/// All of the model's source.
fn source(dir: &Path, text: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            source(&path, text);
        } else {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

fn check(record: &Record, all: &str) {
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
    let (text, lines) = place(record);
    // A command's record has status and syndrome behind the rule.
    let rule = r.rule.split(" (status ").next().unwrap();
    assert!(
        text.contains(rule) || all.matches(rule).count() == 1,
        "the rule is neither in {} nor in one place of all: {rule}",
        record.code
    );
    let names = ["Reject::", "refuse", "foreign(", "lost("];
    assert!(
        lines
            .iter()
            .any(|line| names.iter().any(|name| line.contains(name))),
        "no refusal at {}: {lines:?}",
        record.code
    );
    let json = serde_json::to_value(record).unwrap();
    for key in [
        "function", "object", "field", "value", "rule", "source", "code",
    ] {
        assert!(json[key].is_string(), "{key} in {json}");
    }
}

#[test]
fn each_names_its_rule_and_the_rule_s_place() {
    let mut seen: BTreeMap<String, Record> = BTreeMap::new();
    let mut keep = |records: Vec<Record>| {
        for record in records {
            seen.entry(record.code.clone()).or_insert(record);
        }
    };
    let mut random = Random(0x5eed);
    let mut guest = guests(1).pop().unwrap();
    for round in 0..4000u64 {
        let mut input = any_input(&mut random);
        let user = if round % 3 == 0 { random.below(3) } else { 0 };
        header::uid.set(&mut input, user);
        guest.command(input, 16 + random.below(600) as usize);
        if round % 500 == 499 {
            keep(guest.referee.recent(1024));
        }
    }
    for _ in 0..30 {
        let mut pair = Pair::new();
        wild(&mut pair, &mut random);
        keep(pair.guests[0].referee.recent(1024));
    }
    let mut all = String::new();
    source(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    for record in seen.values() {
        check(record, &all);
    }
    println!("{} refusals were seen", seen.len());
    assert!(seen.len() > 25, "{:#?}", seen.keys());
}
