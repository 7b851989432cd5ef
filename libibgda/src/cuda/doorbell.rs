// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA's gate: why a doorbell page is not registered, and what to do.
//!
//! `cuMemHostRegister` with IOMEMORY: nvidia.ko walks the page's mapping, and lets MMIO pass for CAP_SYS_ADMIN in the initial
//! user namespace, or for all with `PeerMappingOverride=1` (docs/threat-model.md, "NVIDIA's gate"; open-gpu-kernel-modules,
//! osmemdesc.c and os-mlock.c).

use crate::error::Error;
use cudarc::driver::{DriverError, sys::CUresult};
use std::fs;

/// What of this machine and process decides.
#[derive(Clone, Debug, Default)]
struct Gate {
    /// `PeerMappingOverride` of nvidia.ko's registry dwords.
    peer_mapping_override: Option<String>,
    /// CAP_SYS_ADMIN, effective.
    sys_admin: bool,
    /// The user namespace maps all ids to themselves: it is the initial one.
    initial_namespace: bool,
    /// `VmFlags` of the page's mapping, when /proc says them.
    page: Option<String>,
}

impl Gate {
    fn look(address: usize) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            peer_mapping_override: registry_dword(&read("/proc/driver/nvidia/params")),
            sys_admin: has_sys_admin(&read("/proc/self/status")),
            initial_namespace: read("/proc/self/uid_map").split_whitespace().eq([
                "0",
                "0",
                "4294967295",
            ]),
            page: page_flags(&read("/proc/self/smaps"), address),
        }
    }

    fn is_open(&self) -> bool {
        let forced = self.peer_mapping_override.as_deref();
        forced.is_some_and(|value| value != "0") || (self.sys_admin && self.initial_namespace)
    }

    fn describe(&self) -> String {
        format!(
            "PeerMappingOverride is {}, and this process has {}CAP_SYS_ADMIN in {} user namespace",
            self.peer_mapping_override.as_deref().unwrap_or("not set"),
            if self.sys_admin { "" } else { "no " },
            if self.initial_namespace {
                "the initial"
            } else {
                "another"
            }
        )
    }

    /// The mapping is one of page frame numbers, as MMIO is.
    fn is_mmio(&self) -> Option<bool> {
        let flags = self.page.as_deref()?;
        Some(
            flags
                .split_whitespace()
                .any(|flag| flag == "io" || flag == "pf"),
        )
    }
}

/// `RegistryDwords: "PeerMappingOverride=1;…"`.
fn registry_dword(params: &str) -> Option<String> {
    params
        .lines()
        .filter_map(|line| line.strip_prefix("RegistryDwords:"))
        .flat_map(|line| line.trim().trim_matches('"').split(';'))
        .filter_map(|pair| pair.split_once('='))
        .find(|(name, _)| name.trim() == "PeerMappingOverride")
        .map(|(_, value)| value.trim().to_owned())
}

fn has_sys_admin(status: &str) -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|line| u64::from_str_radix(line.trim(), 16).ok())
        .is_some_and(|capabilities| (capabilities >> CAP_SYS_ADMIN) & 1 == 1)
}

/// `VmFlags` of the mapping that an address is in.
fn page_flags(smaps: &str, address: usize) -> Option<String> {
    let mut inside = false;
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if inside {
                return Some(flags.trim().to_owned());
            }
            continue;
        }
        let range = line.split(' ').next().and_then(|word| word.split_once('-'));
        let Some((start, end)) = range else { continue };
        let bound = |text| usize::from_str_radix(text, 16).ok();
        if let (Some(start), Some(end)) = (bound(start), bound(end)) {
            inside = (start..end).contains(&address);
        }
    }
    None
}

const OPEN_IT: &str = "as root, open the gate for all: options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1\" in \
    /etc/modprobe.d, then reload nvidia.ko; or give the process CAP_SYS_ADMIN (a container: --cap-add SYS_ADMIN, and no user \
    namespace); else take the cpu-doorbell route";

/// The words for a doorbell page that was not registered.
pub(super) fn refused(what: String, error: DriverError, address: usize) -> Error {
    explain(super::failed(what, error), error.0, &Gate::look(address))
}

fn explain(error: Error, code: CUresult, gate: &Gate) -> Error {
    let name = format!("{code:?}, {}", code as u32);
    let (why, advice) = match code {
        CUresult::CUDA_ERROR_NOT_PERMITTED => (
            format!(
                "NVIDIA's driver registers MMIO only where its gate is open: {} ({name})",
                gate.describe()
            ),
            OPEN_IT,
        ),
        CUresult::CUDA_ERROR_INVALID_VALUE if gate.is_mmio() == Some(false) => (
            format!("the page is ordinary memory, not MMIO of a NIC ({name})"),
            "pass the broker's mapping of a doorbell page; ordinary memory is registered as such",
        ),
        CUresult::CUDA_ERROR_INVALID_VALUE => (
            format!(
                "NVIDIA's driver found no page of MMIO there: not filled yet, or its build cannot walk such mappings \
                 (nvidia.ko under a licence that may not use follow_pfnmap_start of Linux 6.12 and later); {} ({name})",
                gate.describe()
            ),
            "use the open kernel modules (nvidia-open); else take the cpu-doorbell route",
        ),
        CUresult::CUDA_ERROR_NOT_SUPPORTED => (
            format!(
                "this GPU, driver or platform registers no MMIO (vGPU, WSL, confidential computing) ({name})"
            ),
            "take the cpu-doorbell route",
        ),
        _ if !gate.is_open() => (format!("{}; {}", error.why(), gate.describe()), OPEN_IT),
        _ => return error,
    };
    Error::new(error.origin(), error.errno(), error.what(), why, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHAT: &str = "cuMemHostRegister of 4096 bytes at 0x7f0000000000 (Doorbell)";

    fn told(code: CUresult, gate: &Gate) -> String {
        explain(super::super::error::failed_for_test(WHAT, code), code, gate).to_string()
    }

    fn has(text: &str, parts: &[&str]) {
        for part in parts {
            assert!(text.contains(part), "{part:?} is missing in {text:?}");
        }
    }

    #[test]
    fn a_shut_gate_says_how_to_open_it() {
        let gate = Gate {
            initial_namespace: true,
            ..Gate::default()
        };
        assert!(!gate.is_open());
        let text = told(CUresult::CUDA_ERROR_NOT_PERMITTED, &gate);
        has(
            &text,
            &[
                WHAT,
                "PeerMappingOverride is not set",
                "no CAP_SYS_ADMIN in the initial user namespace",
                "CUDA_ERROR_NOT_PERMITTED, 800",
                "NVreg_RegistryDwords",
                "cpu-doorbell",
            ],
        );
        let container = Gate {
            sys_admin: true,
            ..Gate::default()
        };
        assert!(!container.is_open());
        has(
            &told(CUresult::CUDA_ERROR_NOT_PERMITTED, &container),
            &["has CAP_SYS_ADMIN in another user namespace"],
        );
    }

    #[test]
    fn an_invalid_value_is_told_by_what_the_page_is() {
        let page = |flags: &str| Gate {
            page: Some(flags.to_owned()),
            ..Gate::default()
        };
        let memory = told(
            CUresult::CUDA_ERROR_INVALID_VALUE,
            &page("rd wr sh mr mw me ms sd"),
        );
        has(&memory, &["ordinary memory", "CUDA_ERROR_INVALID_VALUE, 1"]);
        let mmio = told(
            CUresult::CUDA_ERROR_INVALID_VALUE,
            &page("rd wr sh mr mw me ms pf io de dd"),
        );
        has(
            &mmio,
            &[
                "follow_pfnmap_start",
                "nvidia-open",
                "(CUDA_ERROR_INVALID_VALUE, 1)",
            ],
        );
        let unknown = told(CUresult::CUDA_ERROR_INVALID_VALUE, &Gate::default());
        has(&unknown, &["found no page of MMIO"]);
    }

    #[test]
    fn other_codes_keep_their_words_and_say_if_the_gate_is_shut() {
        let shut = told(CUresult::CUDA_ERROR_UNKNOWN, &Gate::default());
        has(
            &shut,
            &["CUDA_ERROR_UNKNOWN, 999", "PeerMappingOverride is not set"],
        );
        let open = Gate {
            peer_mapping_override: Some("1".to_owned()),
            ..Gate::default()
        };
        assert!(open.is_open());
        let text = told(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &open);
        has(&text, &["CUDA_ERROR_OUT_OF_MEMORY, 2", "RLIMIT_MEMLOCK"]);
        assert!(!text.contains("PeerMappingOverride"), "{text}");
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        let params = "EnableMSI: 1\nRegistryDwords: \"RMA=1;PeerMappingOverride=1\"\nRmMsg: \"\"\n";
        assert_eq!(registry_dword(params).as_deref(), Some("1"));
        assert_eq!(registry_dword("RegistryDwords: \"\"\n"), None);
        assert_eq!(registry_dword(""), None);
        assert!(has_sys_admin("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_sys_admin("CapEff:\t00000000a80425fb\n"));
        let smaps = "7f00-8f00 rw-s 00000000 00:01 7 /memfd:x\nSize: 4 kB\nVmFlags: rd wr sh\n\
                     9000-a000 rw-s 00000000 00:05 9 /dev/ibgda\nVmFlags: rd wr pf io\n";
        assert_eq!(page_flags(smaps, 0x9fff).as_deref(), Some("rd wr pf io"));
        assert_eq!(page_flags(smaps, 0x7f00).as_deref(), Some("rd wr sh"));
        assert_eq!(page_flags(smaps, 0xa000), None);
    }

    #[test]
    fn a_page_of_this_process_is_seen_as_memory() {
        let here = 0u64;
        let gate = Gate::look((&raw const here).addr());
        assert_eq!(gate.is_mmio(), Some(false), "{gate:?}");
    }
}
