// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resets, errors and removal of a NIC at any time, under the stock driver and with traffic. Needs two NICs:
//! `./ci/vm --nics 2`.
//!
//! `IBGDA_AER_COUNT` says how many fatal PCI errors in a row there are (20), `IBGDA_RESET_COMMANDS` at how many commands
//! of a probe the model resets itself (`all`, or a number: that many, spread over the probe; 12).

mod events;

use std::fs;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use ibgda_vmtests::machine::{self, Bdf};
use ibgda_vmtests::monitor::Monitor;
use ibgda_vmtests::pair::{PATIENCE, Pair, bound, count, driver, up, wait};
use ibgda_vmtests::tools::ctl;
use serde_json::Value;

/// Sets how the driver recovers from a fatal error.
fn health(nic: Bdf, setting: &[&str]) -> Result<()> {
    let device = format!("pci/{nic}");
    let output = Command::new("devlink")
        .args(["health", "set", &device, "reporter", "fw_fatal"])
        .args(setting)
        .output()
        .context("devlink")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "devlink health set: {said}");
    Ok(())
}

/// The driver recovers however short the time since it last did; else it gives up on a NIC that fails twice a minute.
fn recover_always(nic: Bdf) -> Result<()> {
    health(nic, &["grace_period", "0"])
}

/// The number in an environment variable.
fn setting(name: &str, default: u32) -> Result<u32> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}")),
        Err(_) => Ok(default),
    }
}

fn fatal_errors(nic: Bdf) -> Result<u64> {
    let text = fs::read_to_string(nic.sysfs().join("aer_dev_fatal"))?;
    let total = text.split_whitespace().last().context("empty counter")?;
    Ok(total.parse()?)
}

#[test]
fn fatal_errors_in_a_row_with_traffic_are_recovered_and_cost_no_memory() -> Result<()> {
    let pair = Pair::take()?;
    let count = setting("IBGDA_AER_COUNT", 20)?;
    let warm = (count / 10).max(5);
    let mut settled = None;
    for round in 0..count {
        let traffic = pair.busy()?;
        let before = fatal_errors(pair.nic)?;
        machine::inject_error(pair.nic, machine::FATAL);
        pair.lost_and_back()
            .with_context(|| format!("error {round}"))?;
        ensure!(fatal_errors(pair.nic)? == before + 1);
        drop(traffic);
        let process = ctl(&["process"])?;
        if round == 0 || round == warm || (round + 1) % (count / 20).max(1) == 0 {
            println!("after {} errors: {process}", round + 1);
        }
        if round == warm {
            settled = Some(process);
        }
    }
    pair.works()?;
    let (settled, end) = (settled.context("too few errors")?, ctl(&["process"])?);
    let own = |of: &Value| of["own_kib"].as_u64().context("no own_kib");
    // Less than a record of 64 bytes for each error, or what an allocator keeps.
    let allowed = own(&settled)? + u64::from(count) / 16 + 1024;
    ensure!(own(&end)? <= allowed, "memory grew from {settled} to {end}");
    for kind in ["threads", "files"] {
        ensure!(settled[kind] == end[kind], "{kind}: {settled} became {end}");
    }
    Ok(())
}

#[test]
fn a_reset_under_the_driver_is_noticed_by_its_health_poll() -> Result<()> {
    let pair = Pair::take()?;
    for method in ["flr", "bus"] {
        let methods = pair.nic.sysfs().join("reset_method");
        fs::write(&methods, method).with_context(|| format!("reset method {method}"))?;
        recover_always(pair.nic)?;
        let traffic = pair.busy()?;
        fs::write(pair.nic.sysfs().join("reset"), "1")?;
        pair.lost_and_back().context(method)?;
        drop(traffic);
        pair.works().context(method)?;
    }
    Ok(())
}

#[test]
fn a_command_that_is_never_answered_times_out_and_the_driver_goes_on() -> Result<()> {
    let pair = Pair::take()?;
    ctl(&["fault", "nic0", "command-timeout", "1500"])?;
    driver("unbind", pair.nic)?;
    driver("bind", pair.nic)?;
    wait("the port", || up(pair.nic))?;
    // With the first program the driver tries out write combining, on a queue of its own, and makes its queue for UMR.
    pair.works()?;
    ctl(&["fault", "nic0", "swallow", "CREATE_CQ"])?;
    ensure!(pair.works().is_err(), "its CREATE_CQ was not answered");
    pair.works()?;
    // Until the slot is handed back, the driver would wait for it when it is unbound (docs/mlx5-races.md).
    ctl(&["fault", "nic0", "clear"])?;
    driver("unbind", pair.nic)?;
    driver("bind", pair.nic)?;
    wait("the port", || up(pair.nic))?;
    pair.works()
}

#[test]
fn a_nic_that_resets_itself_at_any_command_of_a_probe_can_be_bound_again() -> Result<()> {
    let pair = Pair::take()?;
    let probe = |pair: &Pair| -> Result<u64> {
        let before = count("commands")?;
        driver("bind", pair.nic)?;
        wait("the port", || up(pair.nic))?;
        Ok(count("commands")? - before)
    };
    // Else the driver waits a minute for the command in which the NIC is lost.
    ctl(&["fault", "nic0", "command-timeout", "1500"])?;
    driver("unbind", pair.nic)?;
    let commands = probe(&pair)?;
    let wanted = match std::env::var("IBGDA_RESET_COMMANDS").as_deref() {
        Ok("all") => commands,
        _ => u64::from(setting("IBGDA_RESET_COMMANDS", 12)?).min(commands),
    };
    println!("a probe has {commands} commands, {wanted} of them are tried");
    for nth in 0..wanted {
        let command = nth * commands / wanted;
        driver("unbind", pair.nic)?;
        let resets = count("resets")?;
        ctl(&["fault", "nic0", "reset", "after", &command.to_string()])?;
        let began = Instant::now();
        let probed = driver("bind", pair.nic);
        let took = began.elapsed();
        println!(
            "command {command}: the probe ended after {:.1} s: {}",
            took.as_secs_f32(),
            probed.map_or_else(
                |error| format!("{:#}", error.root_cause()),
                |()| "bound".into()
            )
        );
        ensure!(took < PATIENCE, "the probe took {took:?}");
        ensure!(count("resets")? > resets, "there were fewer commands");
        ctl(&["fault", "nic0", "clear"])?;
        ctl(&["fault", "nic0", "command-timeout", "1500"])?;
        if bound(pair.nic) {
            driver("unbind", pair.nic)?;
        }
        probe(&pair).with_context(|| format!("after a reset at command {command}"))?;
    }
    pair.works()
}

/// An empty slot is looked at, and nothing is found there; then the card is put back and its button pressed.
fn plug_in(pair: &Pair, monitor: &mut Monitor) -> Result<()> {
    fs::write("/sys/bus/pci/rescan", "1")?;
    ensure!(!pair.nic.sysfs().exists(), "a card that has been pulled");
    ctl(&["insert", "nic0"])?;
    monitor.press_button("nic0")?;
    wait("the NIC to be back", || up(pair.nic))?;
    pair.works()
}

/// The driver does not try for a minute to get back a NIC that is gone.
fn do_not_recover(nic: Bdf) -> Result<()> {
    health(nic, &["auto_recover", "false"])
}

#[test]
fn a_nic_is_unplugged_and_plugged_in_under_traffic() -> Result<()> {
    let pair = Pair::take()?;
    let mut monitor = Monitor::open()?;
    let gone = || !pair.nic.sysfs().exists();

    let traffic = pair.busy()?;
    monitor.press_button("nic0")?;
    wait("the NIC to be let go", gone)?;
    ctl(&["pull", "nic0"])?;
    drop(traffic);
    plug_in(&pair, &mut monitor)?;

    // Torn out without a word: registers read as ones, and the driver finds out.
    do_not_recover(pair.nic)?;
    let traffic = pair.busy()?;
    ctl(&["pull", "nic0"])?;
    wait("the port to go", || !up(pair.nic))?;
    monitor.press_button("nic0")?;
    wait("the NIC to be let go", gone)?;
    drop(traffic);
    plug_in(&pair, &mut monitor)
}

#[test]
fn a_nic_is_torn_out_during_a_probe() -> Result<()> {
    let pair = Pair::take()?;
    let mut monitor = Monitor::open()?;
    ctl(&["fault", "nic0", "command-timeout", "1500"])?;
    driver("unbind", pair.nic)?;
    let commands = || machine::model_counts(0)["commands"];
    let before = commands();
    let nic = pair.nic;
    let probe = std::thread::spawn(move || driver("bind", nic));
    wait("the midst of the probe", || commands() > before + 60)?;
    machine::ask_model("pull", &["nic0"]);
    ensure!(!probe.is_finished(), "the probe was faster");
    let began = Instant::now();
    let probed = probe.join().expect("binding does not panic");
    println!("the probe ended {:?} later: {probed:?}", began.elapsed());
    monitor.press_button("nic0")?;
    wait("the NIC to be let go", || !pair.nic.sysfs().exists())?;
    ctl(&["fault", "nic0", "clear"])?;
    plug_in(&pair, &mut monitor)
}

/// With it they do: `iommu.rs`.
#[test]
fn without_an_iommu_the_nics_have_no_access_control_services() -> Result<()> {
    let pair = Pair::take()?;
    for nic in [pair.nic, pair.peer] {
        let listed = Command::new("lspci")
            .args(["-vvv", "-s", &nic.to_string()])
            .output()?;
        let said = String::from_utf8_lossy(&listed.stdout);
        ensure!(said.contains("Advanced Error Reporting"), "{said}");
        ensure!(!said.contains("Access Control Services"), "{said}");
    }
    Ok(())
}

#[test]
fn the_driver_reloads_and_finds_no_firmware_to_activate() -> Result<()> {
    let pair = Pair::take()?;
    let device = format!("pci/{}", pair.nic);
    let reload = |more: &[&str]| -> Result<(bool, String)> {
        let output = Command::new("devlink")
            .args(["dev", "reload", &device])
            .args(more)
            .output()
            .context("devlink")?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((output.status.success(), said))
    };
    let forgotten = count("never_reclaimed")?;
    let (done, said) = reload(&[])?;
    ensure!(done, "devlink dev reload: {said}");
    wait("the port", || up(pair.nic))?;
    ensure!(
        count("never_reclaimed")? == forgotten,
        "{}",
        ctl(&["refusals"])?
    );
    let (done, said) = reload(&["action", "fw_activate"])?;
    // The model has no management capability registers, and without them the driver refuses by itself.
    ensure!(
        !done && said.contains("FW activate is unsupported"),
        "{said}"
    );
    pair.works()
}
