// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda decode`: a dump of a WQE or CQE in words. The layouts and rules are those of the ConnectX model.

use crate::output::print;
use anyhow::{Context as _, Result, anyhow, bail};
use clap::ValueEnum;
use connectx::{
    explain::{self, Explanation, ServiceName},
    objects::qp::Service,
};
use ibgda_device::Status;
use serde::Serialize;
use std::{fmt::Write as _, io::Read as _, process::ExitCode};

/// Exit status when something is wrong in the dump.
const WRONG: u8 = 3;

/// Print a WQE or CQE field by field, with what is wrong in it.
///
/// Exit status 3 if something is wrong in it, and for a CQE also if it tells of an error.
#[derive(clap::Args)]
pub struct Arguments {
    /// What it is.
    #[arg(value_enum)]
    structure: Structure,
    /// Service of the queue pair that a WQE belongs to.
    #[arg(long, value_enum, default_value = "rc")]
    service: ServiceName,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// The dump in hexadecimal, as rdma-core, the kernel's log, hexdump -C or xxd print it; standard input if it is
    /// "-" or missing.
    hex: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Structure {
    /// Send work queue entry.
    Wqe,
    /// Completion queue entry.
    Cqe,
}

/// What an error CQE tells, in the device header's words.
#[derive(Debug, Serialize)]
struct Failure {
    syndrome: u8,
    vendor_syndrome: u8,
    status: &'static str,
    meaning: String,
    fix: &'static str,
}

#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    structure: &'static str,
    #[serde(flatten)]
    explanation: &'a Explanation,
    error: Option<Failure>,
}

/// Runs it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let (from, text) = match arguments.hex.as_slice() {
        [] => ("standard input", read()?),
        [dash] if dash == "-" => ("standard input", read()?),
        words => ("the arguments", words.join(" ")),
    };
    let bytes = explain::hex::parse(&text).map_err(|error| anyhow!("{from}: {error}"))?;
    let (text, wrong) = decode(
        arguments.structure,
        arguments.service.into(),
        arguments.json,
        &bytes,
    )?;
    print(&text)?;
    Ok(if wrong {
        ExitCode::from(WRONG)
    } else {
        ExitCode::SUCCESS
    })
}

/// Text of a dump is no longer.
const MOST: u64 = 1 << 20;

fn read() -> Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .take(MOST + 1)
        .read_to_string(&mut text)
        .context("standard input")?;
    if text.len() as u64 > MOST {
        bail!("standard input: more than {MOST} bytes: that is no dump of a structure");
    }
    Ok(text)
}

/// The text, and whether something is wrong.
fn decode(
    structure: Structure,
    service: Service,
    json: bool,
    bytes: &[u8],
) -> Result<(String, bool)> {
    let name = match structure {
        Structure::Wqe => "wqe",
        Structure::Cqe => "cqe",
    };
    let explanation = explain::explain(name, service, bytes).map_err(|error| anyhow!(error))?;
    let error = match structure {
        Structure::Wqe => None,
        Structure::Cqe => failure(bytes),
    };
    let wrong = !explanation.problems.is_empty() || error.is_some();
    if json {
        let document = Document {
            version: 1,
            structure: name,
            explanation: &explanation,
            error,
        };
        return Ok((serde_json::to_string_pretty(&document)? + "\n", wrong));
    }
    let mut text = explanation.to_string();
    if let Some(error) = error {
        let _ = writeln!(
            text,
            "it tells of an error: {}; fix: {}",
            error.meaning, error.fix
        );
    }
    Ok((text, wrong))
}

/// Offsets and opcodes of `struct mlx5_err_cqe` (include/linux/mlx5/device.h).
fn failure(cqe: &[u8]) -> Option<Failure> {
    let cqe: &[u8; 64] = cqe.try_into().ok()?;
    let is_error = [0xd, 0xe].contains(&(cqe[0x3f] >> 4));
    let syndrome = cqe[0x37];
    let status = Status(0x100 | u32::from(syndrome));
    is_error.then(|| Failure {
        syndrome,
        vendor_syndrome: cqe[0x36],
        status: status.name(),
        meaning: status.to_string(),
        fix: status.advice(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An RDMA WRITE of 256 bytes on QP 0x48, as rdma-core's mlx5_show_wqe would print it.
    const WQE: &str = "00000108 00004803 00000008 00000000 00000000 12340000 00001234 00000000 \
                       00000100 00001111 00000000 56780000";
    /// The peer refused it.
    fn cqe(opcode: u8, syndrome: u8) -> Vec<u8> {
        let mut cqe = vec![0; 64];
        cqe[0x36..0x40].copy_from_slice(&[0x88, syndrome, 0x08, 0, 0, 0x48, 0, 1, 0, opcode << 4]);
        cqe
    }

    #[test]
    fn a_sound_wqe_has_nothing_wrong() {
        let bytes = explain::hex::parse(WQE).unwrap();
        let (text, wrong) = decode(Structure::Wqe, Service::Rc, false, &bytes).unwrap();
        assert!(
            !wrong && text.contains("RDMA WRITE") && text.contains("0x1234"),
            "{text}"
        );
    }

    #[test]
    fn a_wqe_that_is_cut_off_is_wrong() {
        let bytes = explain::hex::parse(WQE).unwrap();
        let (text, wrong) = decode(Structure::Wqe, Service::Rc, false, &bytes[..32]).unwrap();
        assert!(wrong && text.contains("wrong: "), "{text}");
    }

    #[test]
    fn an_error_cqe_is_told_in_words_with_the_fix() {
        let (text, wrong) = decode(Structure::Cqe, Service::Rc, false, &cqe(0xd, 0x13)).unwrap();
        assert!(
            wrong && text.contains("IBGDA_ERR_REMOTE_ACCESS") && text.contains("; fix: check rkey"),
            "{text}"
        );
        let (text, wrong) = decode(Structure::Cqe, Service::Rc, false, &cqe(0, 0)).unwrap();
        assert!(!wrong && !text.contains("error:"), "{text}");
        let (text, _) = decode(Structure::Cqe, Service::Rc, true, &cqe(0xd, 0x15)).unwrap();
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["version"], 1);
        assert_eq!(document["structure"], "cqe");
        assert_eq!(
            document["error"]["status"],
            "IBGDA_ERR_TRANSPORT_RETRY_EXCEEDED"
        );
        let fields = document["fields"].as_array().unwrap();
        assert!(
            fields
                .iter()
                .any(|row| row["field"] == "qpn" && row["value"] == "0x48"),
            "{text}"
        );
    }
}
