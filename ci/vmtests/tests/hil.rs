// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hardware in the loop (docs/hil.md), with CPU threads outside the virtual machine in the place of a GPU: the same agent, the
//! same pages, the same calls. And a fault that the programme must see.
//!
//! vm: --nics 2 --gpus 1 --outside-gpu cpu

use anyhow::{Context as _, Result, ensure};
use ibgda::Route;
use ibgda_device::kernels::steps::{BLIND_KERNEL, KERNEL};
use ibgda_hil::{
    Where, errors, latency, loss,
    machine::{self, Machine},
    many, verbs,
};

/// Runs a part, and prints what came of it; then nothing that no NIC should have seen was seen.
fn run(part: impl FnOnce(&Machine, &Where) -> Result<String>) -> Result<()> {
    let machine = Machine::take()?;
    println!("{}", part(&machine, &Where::outside()?)?);
    println!("{}", machine::nothing_wrong()?);
    Ok(())
}

#[test]
fn a_puts_gets_and_atomics_bring_their_data() -> Result<()> {
    run(|machine, at| verbs::one_sided(machine, at, Route::Direct))
}

#[test]
fn a_messages_and_signals_arrive() -> Result<()> {
    run(|machine, at| verbs::messages(machine, at, Route::Direct))?;
    run(|machine, at| verbs::signals(machine, at, Route::Direct))
}

#[test]
fn a_doorbells_are_carried_for_a_gpu_outside_too() -> Result<()> {
    run(|machine, at| verbs::one_sided(machine, at, Route::CpuDoorbell))
}

#[test]
fn a_ring_wraps_and_64_blocks_ring_64_pages() -> Result<()> {
    run(|machine, at| many::ring_wraps(machine, at, Route::Direct, 100_000))?;
    run(|machine, at| many::blocks(machine, at, Route::Direct, 64))
}

#[test]
fn errors_have_their_right_names_on_the_device() -> Result<()> {
    run(|machine, at| errors::wrong_rkey(machine, at, Route::Direct))?;
    run(|machine, at| errors::stopped(machine, at, Route::Direct))?;
    run(|machine, at| errors::link_cut(machine, at, Route::Direct))
}

#[test]
fn latency_is_measured_on_every_route() -> Result<()> {
    run(|machine, at| {
        let mut table = String::new();
        for (at, route) in [
            (at, Route::Direct),
            (at, Route::CpuDoorbell),
            (at, Route::Proxy),
            (&Where::inside(), Route::Direct),
        ] {
            let name = format!("{at}: {route}");
            let row = latency::measure(machine, at, route, &name, 300)?;
            ensure!(row.least > 0 && row.least <= row.median, "{row}");
            table += &format!("{row}\n");
        }
        Ok(table)
    })
}

#[test]
fn kernels_that_wait_hear_of_a_lost_nic_and_the_next_ones_go_on() -> Result<()> {
    run(|machine, at| {
        let losses = loss::again_and_again(machine, at, Route::Direct, KERNEL, 3)?;
        let (median, most) = loss::median_and_most(&losses)?;
        Ok(format!(
            "{} losses: median {median} ns, at most {most} ns",
            losses.len()
        ))
    })
}

/// The same kernel, with the status page left out of the device header: then a kernel waits until its deadline, and the
/// programme says so. Last, since the deadline is long.
#[test]
fn z_without_the_status_page_the_wait_lasts_to_its_deadline() -> Result<()> {
    let machine = Machine::take()?;
    let at = Where::outside()?;
    let error = loss::again_and_again(&machine, &at, Route::Direct, BLIND_KERNEL, 1)
        .err()
        .context("a kernel that does not look at the status page heard of the loss")?;
    let text = format!("{error:#}");
    ensure!(
        text.contains("returned IBGDA_TIMEOUT(0x1), not IBGDA_ERR_NIC_LOST"),
        "it failed for another reason: {text}"
    );
    println!("as it should be: {text}");
    Ok(())
}
