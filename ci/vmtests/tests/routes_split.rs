// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which route libibgda takes where GPU and NIC do not reach each other peer to peer.
//!
//! vm: --nics 1 --gpus 1 --split

use anyhow::{Context as _, Result, ensure};
use ibgda::{Bdf, Context, OpenOptions, Path, Route};
use ibgda_vmtests::machine::{Allowed, gpus, nics};

#[test]
fn the_doorbell_goes_through_the_cpu_unless_the_gpu_is_said_to_reach_the_nic() -> Result<()> {
    let (gpu, nic) = (gpus()[0], nics()[0]);
    let bdf: Bdf = gpu.to_string().parse()?;
    let open = |route| {
        Context::open(&OpenOptions {
            route,
            ..OpenOptions::new(nic.to_string(), bdf)
        })
    };
    let entry = Allowed::pair(gpu, nic);
    for route in [Route::Direct, Route::CpuDoorbell] {
        let error = open(route).err().context("bound without any_path")?;
        ensure!(
            error.errno() == libc::EXDEV && error.to_string().contains("any_path"),
            "{route}: {error}"
        );
    }
    // What the GPU cannot reach, a CPU does.
    let context = open(Route::Auto)?;
    ensure!(context.route() == Route::Proxy);
    let report = context.route_report();
    ensure!(
        !report.is_refused_by_policy() && report.to_string().contains("any_path"),
        "{report}"
    );

    entry.set_any_path("1")?;
    let context = open(Route::Auto)?;
    ensure!(context.pair().path == Path::None);
    ensure!(
        context.route() == Route::CpuDoorbell,
        "{}",
        context.route_report()
    );
    let [(better, why)] = context.route_report().better() else {
        anyhow::bail!("{}", context.route_report());
    };
    ensure!(
        *better == Route::Direct && why.errno() == libc::EXDEV,
        "{why}"
    );
    for part in [
        gpu.to_string(),
        nic.to_string(),
        "peer to peer".into(),
        "ask for route direct".into(),
    ] {
        ensure!(
            why.to_string().contains(&part),
            "{part:?} is missing in {why}"
        );
    }
    // The administrator's word, and the caller's.
    ensure!(open(Route::Direct)?.route() == Route::Direct);
    Ok(())
}
