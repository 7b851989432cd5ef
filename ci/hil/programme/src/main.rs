// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the programme of hardware in the loop and prints what came of it, a numbered line for each part. The first part that
//! fails ends it.

use anyhow::Result;
use clap::{Parser, ValueEnum};
use ibgda::Route;
use ibgda_device::kernels::steps::KERNEL;
use ibgda_hil::{
    Where, errors, latency, loss,
    machine::{self, Machine},
    many, verbs,
};
use std::{fmt::Display, time::Instant};

/// What a GPU outside this virtual machine does with what the broker grants inside.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Where kernels run.
    #[arg(long, value_enum, default_value = "outside")]
    on: On,
    /// The parts to run; all of them if none is named.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// WQEs through one ring.
    #[arg(long, default_value_t = 100_000)]
    wqes: u64,
    /// QPs, and blocks of a kernel, at a time.
    #[arg(long, default_value_t = 64)]
    blocks: usize,
    /// Losses of the NIC.
    #[arg(long, default_value_t = 3)]
    losses: usize,
    /// Puts on each route.
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    /// On a GPU outside, through its agent.
    Outside,
    /// On CPU threads of this machine.
    Inside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// put, put_inline, get, atomics, send and recv, put_signal.
    Verbs,
    /// The ring wraps; many QPs.
    Many,
    /// Wrong rkey, QP stopped, link cut.
    Errors,
    /// Latency by route.
    Latency,
    /// AER while kernels wait.
    Loss,
}

/// Numbers and times the lines.
struct Lines {
    start: Instant,
    count: u32,
}

impl Lines {
    fn say(&mut self, text: impl Display) {
        self.count += 1;
        println!(
            "{:2}  {:7.3} s  {text}",
            self.count,
            self.start.elapsed().as_secs_f64()
        );
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut lines = Lines {
        start: Instant::now(),
        count: 0,
    };
    let machine = Machine::take()?;
    let at = match arguments.on {
        On::Outside => Where::outside()?,
        On::Inside => Where::inside(),
    };
    let wanted = |part| arguments.parts.is_empty() || arguments.parts.contains(&part);
    let route = Route::Direct;
    lines.say(format!("kernels run on: {at}"));
    if wanted(Part::Verbs) {
        lines.say(verbs::one_sided(&machine, &at, route)?);
        lines.say(verbs::messages(&machine, &at, route)?);
        lines.say(verbs::signals(&machine, &at, route)?);
    }
    if wanted(Part::Many) {
        lines.say(many::ring_wraps(&machine, &at, route, arguments.wqes)?);
        lines.say(many::blocks(&machine, &at, route, arguments.blocks)?);
    }
    if wanted(Part::Errors) {
        lines.say(errors::wrong_rkey(&machine, &at, route)?);
        lines.say(errors::stopped(&machine, &at, route)?);
        lines.say(errors::link_cut(&machine, &at, route)?);
    }
    if wanted(Part::Latency) {
        let inside = Where::inside();
        for (at, route, name) in [
            (&at, Route::Direct, format!("{at}: direct")),
            (&at, Route::CpuDoorbell, format!("{at}: cpu-doorbell")),
            (&at, Route::Proxy, format!("{at}: proxy")),
            (&inside, Route::Direct, "CPU of the VM: direct".to_owned()),
            (
                &inside,
                Route::CpuDoorbell,
                "CPU of the VM: cpu-doorbell".to_owned(),
            ),
        ] {
            let latency = latency::measure(&machine, at, route, &name, arguments.rounds)?;
            lines.say(latency);
        }
    }
    if wanted(Part::Loss) {
        let losses = loss::again_and_again(&machine, &at, route, KERNEL, arguments.losses)?;
        let (median, most) = loss::median_and_most(&losses)?;
        lines.say(format!(
            "{} fatal PCIe errors while 3 kernels waited: each returned \"NIC lost\"; from the injection to the last return \
             {:.2} ms median, {:.2} ms at most; each time rebound, and the next kernel's puts arrived",
            losses.len(),
            median as f64 / 1e6,
            most as f64 / 1e6
        ));
        let times: Vec<String> = losses
            .iter()
            .map(|loss| loss.returned.to_string())
            .collect();
        println!("ns from injection to return: {}", times.join(" "));
    }
    if arguments.on == On::Outside {
        lines.say(machine::nothing_wrong()?);
    }
    println!("all parts passed");
    Ok(())
}
