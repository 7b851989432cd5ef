// SPDX-License-Identifier: MIT OR Apache-2.0
//! examples/mpi, compiled in the guest against the checkout's headers and library, and started by Open MPI.

use crate::program::allow_all;
use anyhow::Result;
use ibgda_vmtests::machine::{gpus, nics};
use ibgda_vmtests::said::Said;
use std::{env, fs, process::Command};

const PROGRAM: &str = "/tmp/ibgda-mpi-alltoall";

fn compile() -> Result<()> {
    let mut command = Command::new("mpicc");
    command
        .args([
            "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-o", PROGRAM,
        ])
        .args(["/src/examples/mpi/alltoall.c"])
        .args(["-I/src/libibgda/include", "-I/src/kernels/include"])
        .args(["-L/opt/ibgda/lib", "-libgda"]);
    Said::by(&mut command)?.ended_with(0).map(drop)
}

/// All is on one host, and that one has no network and few processors.
fn mpirun(ranks: u32, nics: &[String]) -> Command {
    let mut command = Command::new("timeout");
    command
        .args([
            "300",
            "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
        ])
        .args(["-np", &ranks.to_string(), PROGRAM])
        .arg(gpus()[0].to_string())
        .args(nics)
        .env("OMPI_MCA_pml", "ob1")
        .env("OMPI_MCA_btl", "self,sm")
        .env("TMPDIR", env::temp_dir());
    command
}

#[test]
fn ranks_of_mpi_exchange_blocks() -> Result<()> {
    let _allowed = allow_all();
    compile()?;
    let nics: Vec<_> = nics().iter().map(ToString::to_string).collect();
    for ranks in [2, 4] {
        let said = Said::by(&mut mpirun(ranks, &nics))?;
        let said = said.ended_with(0)?;
        for rank in 0..ranks {
            said.output_has_all(&[&format!("rank {rank} of {ranks} on NIC ")])?;
        }
    }
    fs::remove_file(PROGRAM)?;
    Ok(())
}

#[test]
fn a_rank_without_a_nic_ends_all_and_says_why() -> Result<()> {
    let _allowed = allow_all();
    compile()?;
    let nics = [nics()[0].to_string(), "mlx5_9".to_owned()];
    Said::by(&mut mpirun(2, &nics))?
        .ended_with(1)?
        .errors_have_all(&[
            "rank 1: open: NIC \"mlx5_9\": ",
            "see ibv_devices for what there is",
        ])?;
    fs::remove_file(PROGRAM)?;
    Ok(())
}
