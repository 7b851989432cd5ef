// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subcommands of `ibgda` that open NICs, between two NICs of the model: that each says what is so, and that wrong data,
//! failing requests and lost NICs do not pass. Times are the emulator's, and nothing is said of them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::machine::{
    self, Allowed, ask_model, gpus, nics, patience, settle, wait_for_rdma, wait_until,
};
use ibgda_vmtests::said::{PROGRAM, Running, ibgda};
use serde_json::Value;

const NAMES: [&str; 4] = ["--nic", "mlx5_0", "--peer-nic", "mlx5_1"];

fn allow() -> [Allowed; 2] {
    [0, 1].map(|nic| Allowed::pair(gpus()[0], nics()[nic]))
}

fn with<'a>(command: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [command, more].concat()
}

/// The command in the background.
fn start(arguments: &[&str]) -> Result<Running> {
    Running::start(Command::new(PROGRAM).args(arguments))
}

fn signal(running: &Running, signal: i32) {
    // SAFETY: a signal to a child that was not waited for.
    unsafe { libc::kill(running.child.id() as i32, signal) };
}

/// Changes byte after byte of a program's memory, over and over, until it ends.
fn corrupt(running: &mut Running, address: u64, bytes: u64) -> Result<()> {
    let child = &mut running.child;
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", child.id()))?;
    let end = Instant::now() + patience();
    let mut at = 0;
    while child.try_wait()?.is_none() {
        ensure!(Instant::now() < end, "nobody has noticed");
        let mut byte = [0];
        // It may be gone by now.
        if memory.read_exact_at(&mut byte, address + at).is_ok() {
            let _ = memory.write_all_at(&[!byte[0]], address + at);
        }
        at = (at + 97) % bytes;
        sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// The number behind a word, `0x` or decimal.
fn number_behind(text: &str, word: &str) -> Result<u64> {
    let rest = text
        .split_once(word)
        .with_context(|| format!("{word:?} in {text:?}"))?
        .1;
    let rest = rest.trim_start();
    let number = match rest.strip_prefix("0x") {
        Some(digits) => {
            let end = digits.find(|c: char| !c.is_ascii_hexdigit());
            u64::from_str_radix(&digits[..end.unwrap_or(digits.len())], 16)
        }
        None => {
            let end = rest.find(|c: char| !c.is_ascii_digit());
            rest[..end.unwrap_or(rest.len())].parse()
        }
    };
    number.with_context(|| format!("a number behind {word:?} in {text:?}"))
}

/// A file that the command writes.
fn scratch(name: &str) -> String {
    let path = format!("/tmp/traffic-{name}");
    let _ = fs::remove_file(&path);
    path
}

fn json(path: &str) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    serde_json::from_str(&text).with_context(|| format!("{path} is whole: {text}"))
}

/// Whether a file is SVG in which every element is closed, and the numbers are numbers.
fn svg(path: &str) -> Result<String> {
    let text = fs::read_to_string(path)?;
    let mut open = Vec::new();
    for tag in text.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').context("a tag ends")?;
        let name = tag.split_whitespace().next().unwrap_or_default();
        match tag.strip_prefix('/') {
            Some(name) => ensure!(open.pop() == Some(name), "</{name}> in {path}"),
            None if !tag.ends_with('/') => open.push(name),
            None => {}
        }
    }
    ensure!(open.is_empty() && text.starts_with("<svg ") && !text.contains("NaN"));
    Ok(text)
}

/// Of a row with percentiles.
fn in_order(row: &Value) -> bool {
    let names = [
        "min_ns",
        "median_ns",
        "p90_ns",
        "p99_ns",
        "p999_ns",
        "max_ns",
    ];
    let values: Vec<_> = names.iter().map(|&name| row[name].as_u64()).collect();
    values.is_sorted() && values[0] > Some(0)
}

#[test]
fn routes_are_told_with_their_reasons() -> Result<()> {
    let (gpu, nic) = (gpus()[0], nics()[0]);
    let said = ibgda(&["route", "--route", "direct"])?.ended_with(1)?;
    said.output_has(&format!("{gpu}@mlx5_0: not direct: "))?
        .output_has(&format!("{gpu}@mlx5_1: not direct: "))?
        .output_has("the policy does not allow this pair")?
        .output_has("; fix: as root: ")?;
    // The one route that needs no grant, with the reason why it is that.
    let said = ibgda(&["route"])?.ended_with(0)?;
    said.output_has(&format!("{gpu}@mlx5_0: proxy, the best that works"))?
        .output_has("    not direct: ")?
        .output_has("the policy does not allow this pair")?;

    let _allowed = Allowed::pair(gpu, nic);
    let document = ibgda(&["route", "--route", "direct", "--json"])?;
    let document = document.ended_with(0)?.json()?;
    let pairs = document["pairs"].as_array().context("pairs")?;
    ensure!(
        document["version"] == 1 && document["asked_for"] == "direct" && pairs.len() == 2,
        "{document:#}"
    );
    ensure!(
        pairs[0]["route"] == "direct"
            && pairs[0]["nic"] == "mlx5_0"
            && pairs[0]["forced"] == true
            && pairs[0]["better"] == serde_json::json!([])
            && pairs[0]["from_gpu"]["works"].is_null()
            && pairs[1]["route"].is_null()
            && pairs[1]["refusal"]["errno"] == libc::EACCES,
        "{document:#}"
    );
    let said = ibgda(&["route", "--nic", "mlx5_0"])?.ended_with(0)?;
    said.output_has(&format!("{gpu}@mlx5_0: direct, the best that works"))?
        .output_has("not known whether CUDA lets the GPU have the doorbell page")?;
    // Each that the library knows is taken or refused, by the NIC's address too.
    let routes = document["routes"].as_array().context("routes")?;
    ensure!(routes.len() >= 4, "{routes:?}");
    let address = nic.to_string();
    for route in routes.iter().filter_map(Value::as_str) {
        let asked = ["route", "--nic", &address, "--route", route, "--json"];
        if ["auto", "loopback"].contains(&route) {
            continue;
        }
        let said = ibgda(&asked)?;
        let answer = &said.json()?["pairs"][0];
        println!("{answer}");
        if said.status == 0 {
            ensure!(answer["route"] == route && answer["forced"] == true);
            let better = answer["better"].as_array().context("better")?;
            ensure!(better.iter().all(|better| better["refusal"]["why"] != ""));
        } else {
            ensure!(answer["route"].is_null() && answer["refusal"]["why"] != "");
        }
    }
    let said = ibgda(&["route", "--nic", "mlx5_0", "--route", "cpu-doorbell"])?.ended_with(0)?;
    said.output_has("mlx5_0: cpu-doorbell, as asked for")?
        .output_has("not direct: by choice")?;
    ibgda(&["route", "--route", "loopback"])?
        .ended_with(0)?
        .output_has("loopback0: loopback, as asked for")?;
    for (arguments, status, words) in [
        (&["route", "--nic", "mlx5_9"][..], 1, "mlx5_9: no route: "),
        (
            &["route", "--route", "carrier-pigeon"],
            2,
            "there is no such route",
        ),
        (&["route", "--gpu", "gpu0"], 2, "is not a PCI function"),
    ] {
        let said = ibgda(arguments)?.ended_with(status)?;
        let all = format!("{}{}", said.output, said.errors);
        ensure!(all.contains(words), "{words:?} is missing: {said:#?}");
    }
    Ok(())
}

/// Those that work between GPU and NIC here.
fn routes() -> Result<Vec<String>> {
    let document = ibgda(&["route", "--nic", "mlx5_0", "--json"])?.json()?;
    let all = document["routes"].as_array().context("routes")?;
    let all = all.iter().filter_map(Value::as_str);
    let mut working = Vec::new();
    for route in all.filter(|route| !["auto", "loopback"].contains(route)) {
        if ibgda(&["route", "--nic", "mlx5_0", "--route", route])?.status == 0 {
            working.push(route.to_owned());
        }
    }
    ensure!(working.len() >= 2, "{working:?}");
    Ok(working)
}

#[test]
fn latency_and_rate_are_measured_on_every_route() -> Result<()> {
    let _allowed = allow();
    let before = [settle(0), settle(1)];
    let picture = scratch("bench.svg");
    for route in routes()? {
        let route = route.as_str();
        let command = with(&["bench"], &NAMES);
        let command = with(
            &command,
            &["--route", route, "--size", "8,5000", "--count", "200"],
        );
        let command = with(&command, &["--qps", "2", "--json", "--svg", &picture]);
        let document = ibgda(&command)?.ended_with(0)?.json()?;
        ensure!(
            document["route"] == route
                && document["nic"] == "mlx5_0"
                && document["peer_nic"] == "mlx5_1"
                && document["posted_by"] == "cpu"
                && document["interrupted"] == false,
            "{document:#}"
        );
        let said_who = document["poster"].as_str().unwrap_or_default();
        ensure!(said_who.starts_with("CPU threads, which stand in for the GPU"));
        let [latency, rate] = ["latency", "rate"].map(|what| document[what].as_array());
        let (latency, rate) = (latency.context("latency")?, rate.context("rate")?);
        ensure!(latency.len() == 2 && rate.len() == 2, "{document:#}");
        for (row, bytes) in latency.iter().zip([8, 5000]) {
            let buckets = row["histogram"].as_array().context("histogram")?;
            let counts = buckets.iter().filter_map(|bucket| bucket["count"].as_u64());
            ensure!(
                row["bytes"] == bytes && row["count"] == 200 && counts.sum::<u64>() == 200,
                "{row:#}"
            );
            ensure!(in_order(row), "{row:#}");
        }
        for (row, bytes) in rate.iter().zip([8, 5000]) {
            ensure!(row["bytes"] == bytes && row["qps"] == 2 && row["count"] == 200);
            ensure!(row["messages_per_s"].as_f64() > Some(0.0), "{row:#}");
        }
        // With those of latency that are not counted.
        let verified = document["verified_bytes"].as_u64();
        ensure!(verified >= Some(2 * 200 * 5008), "{document:#}");
        let drawn = svg(&picture)?;
        ensure!(
            drawn.matches(route).count() == 3,
            "two panels of latency, one of rate"
        );
    }
    let said = ibgda(&["bench", "latency", "--nic", "mlx5_0", "--count", "100"])?.ended_with(0)?;
    said.output_has("RDMA WRITE from mlx5_0 to mlx5_0, route direct, seed ")?
        .output_has("posted by CPU threads, which stand in for the GPU (")?
        .output_has("median")?
        .output_has(" us")?
        .output_has("#")?
        .output_has("every byte as it should be")?;
    ensure!(
        !said.output.contains("rate,") && said.errors.is_empty(),
        "{said:#?}"
    );
    // Nothing of it is left in the NICs.
    ensure!(before == [settle(0), settle(1)]);
    Ok(())
}

#[test]
fn two_hosts_measure_together() -> Result<()> {
    let _allowed = allow();
    let mut far = start(&["bench", "--nic", "mlx5_1", "--listen", "0", "--json"])?;
    let port = number_behind(&far.hears("listening on")?, "TCP port")?;
    let to = format!("localhost:{port}");
    let near = [
        "bench", "--nic", "mlx5_0", "--size", "64", "--count", "300", "--json",
    ];
    let near = ibgda(&with(&near, &["--connect", &to]))?
        .ended_with(0)?
        .json()?;
    let peer = near["peer_nic"].as_str().unwrap_or_default();
    ensure!(peer.starts_with("mlx5_1 at "), "{near:#}");
    ensure!(near["latency"][0]["count"] == 300 && near["rate"][0]["count"] == 300);
    let far = far.end()?.ended_with(0)?.json()?;
    ensure!(
        far["served"]["bytes"] == near["verified_bytes"],
        "{far:#} {near:#}"
    );

    // Neither waits for ever.
    ibgda(&["bench", "--nic", "mlx5_1", "--listen", "0", "--wait", "1s"])?
        .ended_with(1)?
        .errors_have("nobody has connected within 1 s")?;
    ibgda(&["bench", "--nic", "mlx5_0", "--connect", &to, "--wait", "1s"])?
        .ended_with(1)?
        .errors_have("nobody listens after 1 s")?;
    // A peer that is killed is noticed by the one that is left.
    let mut far = start(&["bench", "--nic", "mlx5_1", "--listen", "0"])?;
    let port = number_behind(&far.hears("listening on")?, "TCP port")?;
    let to = format!("localhost:{port}");
    let near = [
        "bench",
        "latency",
        "--nic",
        "mlx5_0",
        "--count",
        "10000000",
        "--connect",
        &to,
    ];
    let mut near = start(&near)?;
    near.says("posted by")?;
    signal(&far, libc::SIGKILL);
    let said = near.end()?.ended_with(1)?;
    ensure!(
        said.errors.contains("has closed the connection")
            || said.errors.contains("reset by peer")
            || said.errors.contains("Broken pipe")
            || said.errors.contains("IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED")
            || said.errors.contains("IBGDA_ERR_REMOTE"),
        "{said:#?}"
    );
    Ok(())
}

#[test]
fn a_measurement_that_is_interrupted_tells_what_it_has() -> Result<()> {
    let _allowed = allow();
    let command = ["bench", "latency", "--nic", "mlx5_0", "--count", "10000000"];
    let mut bench = start(&command)?;
    bench.says("posted by")?;
    signal(&bench, libc::SIGINT);
    let said = bench.end()?.ended_with(0)?;
    said.output_has("interrupted; ")?
        .output_has("every byte as it should be")?;
    Ok(())
}

#[test]
fn both_paths_bring_the_same_data() -> Result<()> {
    let _allowed = allow();
    let before = [settle(0), settle(1)];
    let picture = scratch("shadow.svg");
    let command = with(&["shadow"], &NAMES);
    let command = with(&command, &["--count", "300", "--json", "--svg", &picture]);
    let document = ibgda(&command)?.ended_with(0)?.json()?;
    ensure!(
        document["route"] == "direct" && document["posted_by"] == "cpu",
        "{document:#}"
    );
    for lane in ["cpu", "gpu"] {
        let lane = &document[lane];
        ensure!(lane["count"] == 300 && in_order(lane), "{document:#}");
    }
    let [gpu, cpu] = ["gpu", "cpu"].map(|lane| document[lane]["median_ns"].as_f64());
    let ratio = gpu.zip(cpu).map(|(gpu, cpu)| gpu / cpu);
    ensure!(
        document["ratio"]["median"].as_f64() == ratio,
        "{document:#}"
    );
    let kinds = document["requests"].as_object().context("requests")?;
    ensure!(
        kinds.len() == 5 && kinds.values().filter_map(Value::as_u64).sum::<u64>() == 300,
        "{document:#}"
    );
    let drawn = svg(&picture)?;
    ensure!(
        drawn.contains("CPU&apos;s path") || drawn.contains("CPU's path"),
        "{drawn}"
    );
    ensure!(
        drawn.contains("GPU&apos;s path") || drawn.contains("GPU's path"),
        "{drawn}"
    );
    let said = ibgda(&with(
        &["shadow", "--count", "100", "--route", "cpu-doorbell"],
        &NAMES,
    ))?;
    let said = said.ended_with(0)?;
    said.output_has("GPU over CPU")?
        .output_has("all equal")?
        .errors_have("route cpu-doorbell")?;
    ensure!(before == [settle(0), settle(1)]);
    Ok(())
}

#[test]
fn a_byte_that_differs_between_the_paths_is_found() -> Result<()> {
    let _allowed = allow();
    let mut shadow = start(&with(&["shadow", "--count", "10000000"], &NAMES))?;
    let places = shadow.hears("destinations of")?;
    let bytes = number_behind(&places, "destinations of")?;
    let address = number_behind(&places, "of the GPU's at")?;
    corrupt(&mut shadow, address, bytes)?;
    let said = shadow.end()?.ended_with(1)?;
    println!("{}", said.errors);
    // Of the far memory, or of what a read or an atomic brought back from it.
    let (_, wrong) = said
        .errors
        .split_once(": offset ")
        .with_context(|| said.errors.clone())?;
    let expected = number_behind(wrong, "memory should be")?;
    ensure!(number_behind(wrong, "by the CPU's path it is")? == expected);
    ensure!(number_behind(wrong, "by the GPU's")? != expected);
    said.errors_have("seed ")?;
    Ok(())
}

/// Waits until the report of a run says so.
fn report_says(path: &str, what: &str, condition: impl Fn(&Value) -> bool) {
    wait_until(what, || json(path).is_ok_and(|report| condition(&report)));
}

/// A NIC can be back before its port is: that is waited for as the NIC is, on the proxy route too.
#[test]
fn stress_waits_for_the_port_of_a_nic_that_is_back() -> Result<()> {
    let _allowed = allow();
    let path = scratch("stress-port.json");
    let command = with(&["stress", "--for", "1h", "--route", "proxy"], &NAMES);
    let mut stress = start(&with(
        &command,
        &["--report", &path, "--report-every", "1s"],
    ))?;
    report_says(&path, "data has moved", |report| {
        report["totals"]["rounds"].as_u64() > Some(0)
    });
    machine::inject_error(nics()[1], machine::FATAL);
    ask_model("link", &["nic1", "down"]);
    let mut back = || -> Result<()> {
        let state = Path::new("/sys/class/infiniband/mlx5_1/ports/1/state");
        wait_until("the NIC is gone", || !state.exists());
        wait_until("the NIC is back", || state.exists());
        // Longer than one try to join it.
        sleep(Duration::from_secs(2));
        ensure!(stress.child.try_wait()?.is_none(), "it did not wait");
        Ok(())
    };
    let seen = back();
    ask_model("link", &["nic1", "up"]);
    seen?;
    report_says(&path, "the loss is over", |report| {
        report["losses"]
            .as_array()
            .is_some_and(|losses| !losses.is_empty())
    });
    signal(&stress, libc::SIGINT);
    stress.end()?.ended_with(0)?;
    wait_for_rdma(nics()[1]);
    Ok(())
}

#[test]
fn stress_outlives_a_reset_and_goes_on_from_its_report() -> Result<()> {
    let _allowed = allow();
    let path = scratch("stress.json");
    let command = with(&["stress", "--for", "1h", "--qps", "2"], &NAMES);
    let command = with(
        &command,
        &[
            "--report",
            &path,
            "--report-every",
            "1s",
            "--max-size",
            "4K",
        ],
    );
    let mut stress = start(&command)?;
    report_says(&path, "data has moved", |report| {
        report["totals"]["rounds"].as_u64() > Some(0)
    });
    ensure!(json(&path)?["state"] == "running");
    machine::inject_error(nics()[1], machine::FATAL);
    report_says(&path, "the loss is over", |report| {
        report["losses"]
            .as_array()
            .is_some_and(|losses| !losses.is_empty())
    });
    signal(&stress, libc::SIGINT);
    let said = stress.end()?.ended_with(0)?;
    said.output_has("mlx5_1 was lost (NIC reset), and back after ")?
        .output_has("interrupted, no error so far")?;
    let first = json(&path)?;
    println!("{first:#}");
    ensure!(
        first["state"] == "interrupted" && first["error"].is_null(),
        "{first:#}"
    );
    ensure!(first["losses"][0]["recovered_after_s"].as_f64() > Some(0.0));
    let total = |report: &Value| report["totals"]["requests"].as_u64();
    let kinds = first["totals"]["by_kind"].as_object().context("by_kind")?;
    ensure!(kinds.len() == 7, "{first:#}");

    wait_for_rdma(nics()[1]);
    let mut resumed = start(&["stress", "--resume", &path, "--report-every", "1s"])?;
    report_says(&path, "the totals have grown", |report| {
        total(report) > total(&first)
    });
    signal(&resumed, libc::SIGTERM);
    resumed.end()?.ended_with(0)?.output_has(" 2 runs; ")?;
    let second = json(&path)?;
    let seeds = second["seeds"].as_array().context("seeds")?;
    ensure!(seeds.len() == 2 && seeds[0] == first["seeds"][0] && seeds[0] != seeds[1]);
    ensure!(second["elapsed_s"].as_f64() > first["elapsed_s"].as_f64());
    ensure!(second["losses"] == first["losses"], "{second:#}");

    // One whose time is over has nothing to go on with.
    let path = scratch("stress-short.json");
    let command = with(
        &["stress", "--for", "5s", "--report", &path, "--json"],
        &NAMES,
    );
    let report = ibgda(&command)?.ended_with(0)?.json()?;
    ensure!(
        report == json(&path)? && report["state"] == "done" && total(&report) > Some(0),
        "{report:#}"
    );
    ibgda(&["stress", "--resume", &path])?
        .ended_with(1)?
        .errors_have("it has run its whole time; nothing is left")?;

    let command = with(&["stress", "--for", "1h", "--fail-on-loss"], &NAMES);
    let command = with(&command, &["--report", &path, "--report-every", "1s"]);
    let _ = fs::remove_file(&path);
    let mut stress = start(&command)?;
    report_says(&path, "data has moved", |report| total(report) > Some(0));
    machine::inject_error(nics()[0], machine::FATAL);
    let said = stress.end()?.ended_with(1)?;
    said.errors_have("mlx5_0 was lost (NIC reset); --fail-on-loss was given")?;
    ensure!(json(&path)?["state"] == "failed");
    wait_for_rdma(nics()[0]);
    Ok(())
}

#[test]
fn stress_finds_a_wrong_byte() -> Result<()> {
    let _allowed = allow();
    let path = scratch("stress-wrong.json");
    let command = with(&["stress", "--for", "1h", "--qps", "2"], &NAMES);
    let mut stress = start(&with(&command, &["--report", &path]))?;
    let memory = stress.hears("memory: ")?;
    let far = memory.split_once("near, ").context("far")?.1;
    let (address, bytes) = (number_behind(far, "at")?, number_behind(far, "")?);
    corrupt(&mut stress, address, bytes)?;
    let said = stress.end()?.ended_with(1)?;
    println!("{}", said.errors);
    said.errors_have("wrong data: QP 0x")?
        .errors_have("far memory, offset ")?;
    let report = json(&path)?;
    let wrong = &report["mismatch"];
    let offset = wrong["offset"].as_u64().context("offset")?;
    ensure!(
        report["state"] == "failed" && wrong["address"] == address + offset,
        "{report:#}"
    );
    let [expected, seen] =
        ["expected", "seen"].map(|name| wrong[name].as_str().unwrap_or_default());
    // The wrong byte comes first. Which one it is, nobody knows: stress may have written between our read and our write.
    ensure!(
        expected.len() == seen.len() && expected[..2] != seen[..2] && expected[2..] == seen[2..],
        "{report:#}"
    );
    ibgda(&["stress", "--resume", &path])?
        .ended_with(1)?
        .errors_have("it has failed (")?;
    Ok(())
}

#[test]
fn a_request_that_fails_without_a_loss_ends_stress() -> Result<()> {
    let _allowed = allow();
    let path = scratch("stress-cut.json");
    let command = with(&["stress", "--for", "1h", "--report", &path], &NAMES);
    let mut stress = start(&with(&command, &["--report-every", "1s"]))?;
    report_says(&path, "data has moved", |report| {
        report["totals"]["rounds"].as_u64() > Some(0)
    });
    ask_model("link", &["nic1", "down"]);
    let said = stress.end().and_then(|said| said.ended_with(1));
    ask_model("link", &["nic1", "up"]);
    wait_for_rdma(nics()[1]);
    let said = said?;
    said.errors_have("IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED")?
        .errors_have("seed ")?;
    ensure!(json(&path)?["state"] == "failed");
    Ok(())
}

#[test]
fn wrong_arguments_are_refused_with_the_reason() -> Result<()> {
    let no_pair = ibgda(&["bench", "--nic", "mlx5_0", "--route", "direct"])?.ended_with(1)?;
    no_pair.errors_have("the policy does not allow this pair")?;
    let _allowed = allow();
    for (arguments, status, words) in [
        (
            &["bench"][..],
            1,
            "which NIC? say --nic NAME; NICs here: mlx5_0 (",
        ),
        (&["bench", "--nic", "mlx5_7"], 1, "mlx5_7"),
        (
            &["bench", "--nic", "mlx5_0", "--on", "gpu"],
            1,
            "kernels cannot run on the GPU",
        ),
        (&["bench", "--size", "0"], 1, "1 byte to 1 GiB"),
        (&["bench", "--size", "8,x"], 2, "no number of bytes"),
        (&["bench", "--size", "64M"], 1, "more than --memory"),
        (&["bench", "--memory", "1"], 1, "4 KiB to 4 GiB"),
        (&["bench", "--batch", "65"], 2, "65 is not in 1..=64"),
        (&["bench", "--count", "0"], 2, "--count"),
        (&["bench", "loudness"], 2, "possible values: latency, rate"),
        (
            &["bench", "--svg", "/no/where.svg"],
            1,
            "/no/where.svg cannot be written",
        ),
        (
            &["bench", "--listen", "1", "--connect", "a:1"],
            2,
            "cannot be used with",
        ),
        (
            &[
                "bench",
                "--nic",
                "mlx5_0",
                "--connect",
                "nowhere",
                "--wait",
                "1",
            ],
            1,
            "HOST:PORT",
        ),
        (
            &["bench", "--route", "loopback", "--listen", "0"],
            1,
            "does not leave this process",
        ),
        (
            &["bench", "--route", "loopback", "--nic", "mlx5_0"],
            1,
            "they are loopback0 to",
        ),
        (
            &["shadow", "--route", "loopback"],
            1,
            "the loopback route has none",
        ),
        (
            &["shadow", "--nic", "mlx5_0", "--max-size", "1"],
            1,
            "8 bytes to 16 MiB",
        ),
        (
            &["stress", "--for", "soon"],
            2,
            "is no time such as 30s, 5m or 2h",
        ),
        (&["stress", "--qps", "65"], 2, "65 is not in 1..=64"),
        (&["stress", "--resume", "/no/report"], 1, "/no/report"),
        (
            &["stress", "--resume", "/proc/version"],
            1,
            "that is no JSON",
        ),
        (
            &["stress", "--resume", "r", "--nic", "mlx5_0"],
            2,
            "cannot be used with",
        ),
    ] {
        ibgda(arguments)?.ended_with(status)?.errors_have(words)?;
    }
    ibgda(&["bench", "--help"])?
        .ended_with(0)?
        .output_has("Usage: ibgda bench ")?;
    Ok(())
}
