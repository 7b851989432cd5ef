// SPDX-License-Identifier: MIT OR Apache-2.0
//! The NICs behind an IOMMU that translates, as two functions of one card with Access Control Services.
//!
//! vm: --nics 2 --gpus 0 --iommu --card

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use ibgda_verbs_sys::ibv_wc_status as status;
use ibgda_vmtests::machine::{self, Bdf};
use ibgda_vmtests::pair::{Pair, count, wait};
use ibgda_vmtests::rdma::{Cq, Memory, Nic, Qp, Work};
use ibgda_vmtests::tools::{ctl, model_counter};

/// The number of a function's IOMMU group.
fn group(nic: Bdf) -> Result<String> {
    let link = fs::read_link(nic.sysfs().join("iommu_group"))?;
    let name = link.file_name().context("no group")?;
    Ok(name.to_string_lossy().into_owned())
}

#[test]
fn each_function_has_a_translating_domain_of_its_own() -> Result<()> {
    let pair = Pair::take()?;
    for nic in [pair.nic, pair.peer] {
        let kind = fs::read_to_string(nic.sysfs().join("iommu_group/type"))?;
        ensure!(kind.trim() == "DMA", "{nic}: {kind}");
        let said = Command::new("lspci")
            .args(["-vvv", "-s", &nic.to_string()])
            .output()?;
        let said = String::from_utf8_lossy(&said.stdout);
        ensure!(said.contains("Access Control Services"), "{said}");
    }
    // Two functions of a device are kept apart only if they say that they send nothing to each other inside it.
    let groups = [group(pair.nic)?, group(pair.peer)?];
    ensure!(groups[0] != groups[1], "both are in group {}", groups[0]);
    pair.works()
}

#[test]
fn a_program_that_is_killed_leaves_no_access_to_its_memory_behind() -> Result<()> {
    let pair = Pair::take()?;
    let faults =
        || -> Result<u64> { Ok(count("dma_faults")? + model_counter("nic1", "dma_faults")?) };
    let before = faults()?;
    for _ in 0..5 {
        let mut traffic = pair.busy()?;
        for child in &mut traffic.0 {
            // `timeout` is the child; what it runs is killed with its group.
            let group = child.id();
            Command::new("pkill")
                .args(["-KILL", "-P", &group.to_string()])
                .status()?;
            child.wait()?;
        }
    }
    wait("the queue pairs to go", || {
        count("qp").is_ok_and(|live| live <= 8)
    })?;
    ensure!(faults()? == before, "{}", ctl(&["refusals"])?);
    pair.works()
}

#[test]
fn an_address_that_is_not_mapped_fails_the_request_and_is_told() -> Result<()> {
    let pair = Pair::take()?;
    let nic = Nic::open(pair.nic)?;
    let memory = Memory::new(&nic, 4096)?;
    let cq = Cq::new(&nic, 64)?;
    let ends = Qp::pair(&nic, &cq, None)?;
    let lkey = memory.keys().0;
    let work = Work::write(0, memory.sge(0, 8), memory.remote(8));
    ends[0].post(&[work])?;
    cq.next()?;
    let before = count("dma_faults")?;
    ctl(&["fault", "nic0", "stray", &lkey.to_string()])?;
    ends[0].post(&[work])?;
    let failed = cq.any()?.status;
    ensure!(failed == status::IBV_WC_LOC_PROT_ERR, "status {failed}");
    ensure!(count("dma_faults")? > before);
    let refusals = ctl(&["refusals", "5"])?;
    let told = refusals["refusals"]
        .as_array()
        .context("no list")?
        .iter()
        .any(|refusal| {
            let object = refusal["object"].as_str().unwrap_or_default();
            object.contains(&format!("mkey {lkey:#x}"))
                && refusal["rule"] == "the memory behind the key is reachable"
        });
    ensure!(told, "{refusals}");
    drop((ends, cq, memory, nic));
    pair.works()
}

#[test]
fn a_fatal_error_is_recovered_and_the_mappings_with_it() -> Result<()> {
    let pair = Pair::take()?;
    for _ in 0..2 {
        let traffic = pair.busy()?;
        machine::inject_error(pair.nic, machine::FATAL);
        pair.lost_and_back()?;
        drop(traffic);
        // Both functions are below the port that was reset.
        wait("the peer", || ibgda_vmtests::pair::up(pair.peer))?;
    }
    pair.works()
}
