// SPDX-License-Identifier: MIT OR Apache-2.0
//! One error type: what failed, with which values, why, and what to do.

use std::{fmt, io};

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Where an error came from, for programs; [`Error`]'s text is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// An argument was refused before anything was done.
    Argument,
    /// An ioctl of `/dev/ibgda`, or opening it.
    Broker,
    /// A call of libibverbs or libmlx5, or the kernel behind it.
    Verbs,
    /// The NIC's firmware.
    Firmware {
        /// Command status (`status` of the output).
        status: u8,
        /// Syndrome, for the vendor.
        syndrome: u32,
    },
    /// A peer's address blob.
    Address,
    /// The model of the loopback route.
    Model,
    /// The agent of a GPU outside this virtual machine.
    Agent,
    /// The CUDA driver.
    Cuda {
        /// `CUresult`; 0 when there is no driver to ask.
        code: u32,
    },
}

/// What failed, why, and what to do about it.
#[derive(Clone, Debug)]
pub struct Error {
    what: String,
    why: String,
    advice: String,
    errno: i32,
    source: Source,
}

impl Error {
    pub(crate) fn new(
        source: Source,
        errno: i32,
        what: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            what: what.into(),
            why: why.into(),
            advice: advice.into(),
            errno,
            source,
        }
    }

    pub(crate) fn argument(
        what: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self::new(Source::Argument, libc::EINVAL, what, why, advice)
    }

    /// A libibverbs or libmlx5 call that set `errno`.
    pub(crate) fn verbs(what: impl Into<String>, errno: i32) -> Self {
        let (why, advice) = match errno {
            libc::EPERM | libc::EACCES => (
                "no permission",
                "may this user open /dev/infiniband/uverbs*?",
            ),
            libc::ENOMEM => (
                "no memory, or more locked memory than allowed",
                "raise RLIMIT_MEMLOCK (ulimit -l)",
            ),
            libc::EOPNOTSUPP | libc::EPROTONOSUPPORT => (
                "the device or the kernel does not support it",
                "DevX needs a ConnectX of mlx5_ib with log_max_uctx; the doorbell export Linux 7.1",
            ),
            libc::EIO | libc::ENODEV => (
                "the NIC is gone or being reset",
                "wait for its return and rebind the context",
            ),
            libc::EINVAL => (
                "the kernel or the NIC takes no such value",
                "is it larger than the NIC can do? see ibv_devinfo -v",
            ),
            libc::EFAULT => (
                "the memory is not mapped, or cannot be given to the NIC",
                "pass memory that this process may read and write",
            ),
            _ => ("", ""),
        };
        Self::errno_with(Source::Verbs, what, errno, why, advice)
    }

    /// As [`Error::verbs`], taking `errno` from the failed call that just returned.
    pub(crate) fn last_verbs(what: impl Into<String>) -> Self {
        Self::verbs(
            what,
            io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        )
    }

    pub(crate) fn errno_with(
        source: Source,
        what: impl Into<String>,
        errno: i32,
        why: &str,
        advice: &str,
    ) -> Self {
        let system = io::Error::from_raw_os_error(errno);
        let why = if why.is_empty() {
            system.to_string()
        } else {
            format!("{why}: {system}")
        };
        Self::new(source, errno, what, why, advice)
    }

    pub(crate) fn firmware(what: impl Into<String>, status: u8, syndrome: u32) -> Self {
        let (name, errno) = firmware_status(status);
        Self::new(
            Source::Firmware { status, syndrome },
            errno,
            what,
            format!("firmware answered {name} (status {status:#04x}, syndrome {syndrome:#010x})"),
            "the NIC's log (dmesg; connectx.log of the model) says which field it refused",
        )
    }

    /// The same, with more to do about it.
    #[cfg(feature = "cuda")]
    pub(crate) fn and_advice(mut self, more: &str) -> Self {
        if !self.advice.is_empty() {
            self.advice.push_str("; ");
        }
        self.advice.push_str(more);
        self
    }

    /// The `errno` that says the same to C.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// Who said no.
    pub fn origin(&self) -> Source {
        self.source
    }

    /// What failed, with its values.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Why it failed.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// What to do about it; may be empty.
    pub fn advice(&self) -> &str {
        &self.advice
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        if self.advice.is_empty() {
            Ok(())
        } else {
            write!(f, "; {}", self.advice)
        }
    }
}

impl std::error::Error for Error {}

/// Command status of mlx5 firmware (`MLX5_CMD_STAT_*`), and the errno that mlx5_core gives it.
fn firmware_status(status: u8) -> (&'static str, i32) {
    match status {
        0x01 => ("INTERNAL_ERR: internal error", libc::EIO),
        0x02 => ("BAD_OP: operation not supported", libc::EINVAL),
        0x03 => ("BAD_PARAM: a parameter is out of range", libc::EINVAL),
        0x04 => ("BAD_SYS_STATE: system state does not allow it", libc::EIO),
        0x05 => ("BAD_RES: bad resource, or not this user's", libc::EINVAL),
        0x06 => ("RES_BUSY: resource busy", libc::EBUSY),
        0x08 => ("LIM: limit exceeded", libc::ENOMEM),
        0x09 => ("BAD_RES_STATE: bad resource state", libc::EINVAL),
        0x0a => ("BAD_INDEX: index out of range", libc::EINVAL),
        0x0f => ("NO_RES: no resources left", libc::EAGAIN),
        0x10 => (
            "BAD_QP_STATE: the QP's state does not allow it",
            libc::EINVAL,
        ),
        0x30 => ("BAD_PKT: bad management packet", libc::EINVAL),
        0x40 => (
            "BAD_SIZE_OUTS_CQES: too many outstanding CQEs",
            libc::EINVAL,
        ),
        0x50 => ("BAD_INP_LEN: bad input length", libc::EIO),
        0x51 => ("BAD_OUTP_LEN: bad output length", libc::EIO),
        _ => ("a status without a name", libc::EIO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firmware_errors_name_status_and_syndrome() {
        let error = Error::firmware("CREATE_QP (depth 16)", 0x05, 0x1234);
        assert_eq!(
            error.origin(),
            Source::Firmware {
                status: 5,
                syndrome: 0x1234
            }
        );
        assert_eq!(error.errno(), libc::EINVAL);
        let text = error.to_string();
        for part in ["CREATE_QP (depth 16)", "BAD_RES", "0x05", "0x00001234"] {
            assert!(text.contains(part), "{part:?} is missing in {text:?}");
        }
    }

    #[test]
    fn errno_is_put_in_words_and_kept() {
        let error = Error::verbs("ibv_reg_mr (8192 bytes)", libc::ENOMEM);
        assert_eq!(error.errno(), libc::ENOMEM);
        assert!(error.to_string().contains("RLIMIT_MEMLOCK"));
        let error = Error::verbs("ibv_open_device", libc::EMFILE);
        assert!(error.to_string().contains("open files"), "{error}");
    }
}
