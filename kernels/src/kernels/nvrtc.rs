// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels compiled at run time, by NVRTC, with the device header that this crate carries.

use crate::HEADERS;
use cudarc::nvrtc::{result, sys};
use std::{
    ffi::{CString, c_char},
    fmt,
    ptr::{self, NonNull},
};

/// A source that was compiled.
#[derive(Debug)]
pub struct Compiled {
    /// Assembly, or for an architecture `sm_…` machine code.
    pub image: Vec<u8>,
    /// What the compiler has to say, warnings for example.
    pub log: String,
}

/// Why a source was not compiled.
#[derive(Clone, Debug)]
pub enum Error {
    /// There is no libnvrtc.
    Missing,
    /// NVRTC's error (`nvrtcResult` by name and number), and what the compiler says of the source.
    Failed {
        /// The call, and its result.
        what: String,
        /// The compiler's words; may be empty.
        log: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(
                f,
                "libnvrtc.so is not found; install CUDA's NVRTC, or put its folder into LD_LIBRARY_PATH"
            ),
            Self::Failed { what, log } => write!(f, "{what}\n{log}"),
        }
    }
}

impl std::error::Error for Error {}

/// A program of NVRTC, which ends with this value.
struct Program(NonNull<sys::_nvrtcProgram>);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once. An error would say that it is not one.
        let _ = unsafe { result::destroy_program(self.0.as_ptr()) };
    }
}

fn failed(call: &str, error: result::NvrtcError) -> Error {
    Error::Failed {
        what: format!("{call}: {:?} ({})", error.0, error.0 as u32),
        log: String::new(),
    }
}

/// Compiles a source that may include the device header, for `sm_90` or `compute_90`, say.
///
/// # Errors
/// No NVRTC, or what it has against the source or the architecture.
pub fn compile(source: &str, architecture: &str) -> Result<Compiled, Error> {
    // SAFETY: libraries named so are NVRTC's.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Missing);
    }
    let text = |text: &str| {
        CString::new(text).map_err(|_| Error::Failed {
            what: "a source has a NUL".to_owned(),
            log: String::new(),
        })
    };
    let (source, name) = (text(source)?, c"kernel.cu");
    let mut headers = Vec::new();
    for (name, contents) in HEADERS {
        headers.push((text(name)?, text(contents)?));
    }
    let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
    let contents: Vec<_> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
    let mut program = ptr::null_mut();
    // SAFETY: all strings end in NUL and live to the end of this function; NVRTC copies them.
    unsafe {
        sys::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            contents.as_ptr(),
            names.as_ptr(),
        )
    }
    .result()
    .map_err(|error| failed("nvrtcCreateProgram", error))?;
    let program = Program(NonNull::new(program).expect("created"));
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
    ];
    // SAFETY: the program exists, as in each call below.
    let compiled = unsafe { result::compile_program(program.0.as_ptr(), &options) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(program.0.as_ptr()) };
    let log = log.map_or_else(
        |error| format!("nvrtcGetProgramLog: {error:?}"),
        |log| string(&log),
    );
    if let Err(error) = compiled {
        let Error::Failed { what, .. } = failed("nvrtcCompileProgram", error) else {
            unreachable!("failed makes no other")
        };
        return Err(Error::Failed { what, log });
    }
    let image = if architecture.starts_with("sm_") {
        cubin(&program)
    } else {
        // SAFETY: as above.
        unsafe { result::get_ptx(program.0.as_ptr()) }
            .map(|ptx| string(&ptx).into_bytes())
            .map_err(|error| failed("nvrtcGetPTX", error))
    };
    Ok(Compiled { image: image?, log })
}

fn cubin(program: &Program) -> Result<Vec<u8>, Error> {
    let mut bytes = 0;
    // SAFETY: the program exists; the size is written.
    unsafe { sys::nvrtcGetCUBINSize(program.0.as_ptr(), &mut bytes) }
        .result()
        .map_err(|error| failed("nvrtcGetCUBINSize", error))?;
    let mut image = vec![0; bytes];
    // SAFETY: the buffer has the size that NVRTC says.
    unsafe { sys::nvrtcGetCUBIN(program.0.as_ptr(), image.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| failed("nvrtcGetCUBIN", error))?;
    Ok(image)
}

/// Up to the NUL.
fn string(chars: &[c_char]) -> String {
    chars
        .iter()
        .take_while(|&&char| char != 0)
        .map(|&char| char::from(char as u8))
        .collect()
}
