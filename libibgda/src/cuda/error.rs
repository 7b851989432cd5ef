// SPDX-License-Identifier: MIT OR Apache-2.0
//! CUDA's error codes in words, with name and number.

use crate::error::{Error, Result, Source};
use cudarc::driver::{DriverError, sys::CUresult};

/// Gives a driver's error its words.
pub(super) trait Explain<T> {
    fn explain(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Explain<T> for std::result::Result<T, DriverError> {
    fn explain(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| failed(what(), error))
    }
}

/// What a call of the driver has against it.
pub(super) fn failed(what: impl Into<String>, error: DriverError) -> Error {
    // cuGetErrorString has words for what is not in `words`; the driver is loaded, since it has just answered.
    let driver = || {
        let text = error.error_string().ok()?.to_str().ok()?;
        Some(text.to_owned())
    };
    describe(what, error.0, driver)
}

fn describe(
    what: impl Into<String>,
    code: CUresult,
    driver: impl FnOnce() -> Option<String>,
) -> Error {
    let number = code as u32;
    let (why, advice) = words(code);
    let why = if why.is_empty() {
        driver().unwrap_or_else(|| "the driver has no words for it".to_owned())
    } else {
        why.to_owned()
    };
    Error::new(
        Source::Cuda { code: number },
        errno(code),
        what,
        format!("{why} ({code:?}, {number})"),
        advice,
    )
}

fn errno(code: CUresult) -> i32 {
    match code {
        CUresult::CUDA_ERROR_INVALID_VALUE => libc::EINVAL,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => libc::ENOMEM,
        CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_INVALID_DEVICE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => libc::ENODEV,
        CUresult::CUDA_ERROR_NOT_PERMITTED => libc::EPERM,
        CUresult::CUDA_ERROR_NOT_SUPPORTED => libc::EOPNOTSUPP,
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => libc::EEXIST,
        _ => libc::EIO,
    }
}

/// What a code means, and what to do, where there is more to say than cuGetErrorString does.
fn words(code: CUresult) -> (&'static str, &'static str) {
    match code {
        CUresult::CUDA_ERROR_INVALID_VALUE => ("the driver refused a value", ""),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => (
            "no memory, on the GPU or to pin on the host",
            "free GPU memory, or raise RLIMIT_MEMLOCK (ulimit -l)",
        ),
        CUresult::CUDA_ERROR_DEINITIALIZED => (
            "the driver is shutting down",
            "drop what is CUDA's before the process ends",
        ),
        CUresult::CUDA_ERROR_STUB_LIBRARY => (
            "the library is the stub that programs are linked with",
            "take CUDA's stubs folder out of LD_LIBRARY_PATH",
        ),
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => (
            "another process has the GPU for itself",
            "see nvidia-smi -q -d COMPUTE for its compute mode",
        ),
        CUresult::CUDA_ERROR_NO_DEVICE => (
            "CUDA shows no GPU",
            "see nvidia-smi; is CUDA_VISIBLE_DEVICES empty, or the container without --gpus?",
        ),
        CUresult::CUDA_ERROR_INVALID_DEVICE => (
            "CUDA shows no such GPU",
            "see nvidia-smi for what there is; does CUDA_VISIBLE_DEVICES hide it?",
        ),
        CUresult::CUDA_ERROR_INVALID_IMAGE | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => (
            "the code is not for this GPU",
            "build the kernels for its compute capability, or leave them to NVRTC",
        ),
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => (
            "the PTX is of a newer CUDA than the driver",
            "install a newer driver, or compile to machine code",
        ),
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => (
            "GPU memory has an uncorrectable error",
            "see nvidia-smi -q -d ECC",
        ),
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => (
            "a kernel touched memory that the GPU cannot reach",
            "was a handle of the host passed, or memory freed too early? compute-sanitizer says where",
        ),
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT => (
            "the display's watchdog ended a kernel",
            "use a GPU without a display, or shorter waits",
        ),
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => (
            "the memory is registered with CUDA already, with another range or by somebody else",
            "register it once",
        ),
        CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED => (
            "the memory is not registered with CUDA",
            "register it first",
        ),
        CUresult::CUDA_ERROR_NOT_PERMITTED => (
            "the driver does not permit it to this process",
            "needs CAP_SYS_ADMIN, or a parameter of nvidia.ko",
        ),
        CUresult::CUDA_ERROR_NOT_SUPPORTED => {
            ("this GPU, driver or platform does not support it", "")
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => (
            "the machine's GPUs are not ready",
            "is nvidia-fabricmanager running?",
        ),
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => (
            "libcuda and nvidia.ko are of different versions",
            "reload nvidia.ko, or reboot",
        ),
        _ => ("", ""),
    }
}

/// As [`failed`], where no driver is.
#[cfg(test)]
pub(super) fn failed_for_test(what: &str, code: CUresult) -> Error {
    describe(what, code, || None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_name_number_and_words() {
        let error = describe(
            "cuMemHostRegister (4096 bytes)",
            CUresult::CUDA_ERROR_NOT_PERMITTED,
            || None,
        );
        assert_eq!(error.errno(), libc::EPERM);
        assert_eq!(error.origin(), Source::Cuda { code: 800 });
        let text = error.to_string();
        for part in [
            "cuMemHostRegister (4096 bytes)",
            "CUDA_ERROR_NOT_PERMITTED",
            "800",
            "CAP_SYS_ADMIN",
        ] {
            assert!(text.contains(part), "{part:?} is missing in {text:?}");
        }
    }

    #[test]
    fn a_code_without_words_here_has_the_drivers() {
        let code = CUresult::CUDA_ERROR_MISALIGNED_ADDRESS;
        let error = describe("launch", code, || Some("misaligned address".to_owned()));
        assert_eq!(
            error.to_string(),
            "launch: misaligned address (CUDA_ERROR_MISALIGNED_ADDRESS, 716)"
        );
        let error = describe("launch", code, || None);
        assert!(error.to_string().contains("716"), "{error}");
    }
}
