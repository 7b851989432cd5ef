// SPDX-License-Identifier: MIT OR Apache-2.0
//! Outside a virtual machine of `ci/vm --outside-gpu`: a GPU, or CPU threads in its place, that use what the broker granted
//! inside. The library in the guest says which pages (libibgda's `outside`), the ConnectX model has the files that they are
//! of, and the kernels are those of `kernels/library`.

mod client;
mod model;
mod space;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use ibgda::{
    Processor,
    cuda::{Gpu, GpuKernels},
    processor::Threads,
};
use ibgda_device::kernels::{cpu, steps};
use std::{
    io::ErrorKind,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Runs kernels on a GPU for a process in a virtual machine, on the memory and the doorbell pages that it names.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// What runs them.
    #[arg(long, value_enum)]
    on: On,
    /// The socket of the guest's port; it may come later.
    #[arg(long)]
    guest: PathBuf,
    /// The model's control socket.
    #[arg(long)]
    model: PathBuf,
    /// Seconds to wait for the guest's socket.
    #[arg(long, default_value_t = 120)]
    wait: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    /// The first GPU that CUDA shows.
    Cuda,
    /// CPU threads, which stand in for one.
    Cpu,
}

/// Between two tries to connect.
const RETRY: Duration = Duration::from_millis(50);

fn processor(on: On) -> Result<(String, Arc<dyn Processor>)> {
    match on {
        On::Cpu => Ok(("CPU threads".to_owned(), Arc::new(Threads::new(cpu::STEPS)))),
        On::Cuda => {
            let gpu = Gpu::first()?;
            let (module, origin) = steps::load(gpu.context())?;
            let name = gpu.context().name()?;
            println!("{name} at {}, code by {origin}", gpu.bdf()?);
            Ok((name, Arc::new(GpuKernels::new(&gpu, &module))))
        }
    }
}

/// Connects as soon as QEMU listens.
fn connect(path: &Path, patience: Duration) -> Result<UnixStream> {
    let end = Instant::now() + patience;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error)
                if Instant::now() < end
                    && matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::ConnectionRefused
                    ) =>
            {
                thread::sleep(RETRY)
            }
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        }
    }
}

fn serve(arguments: &Arguments) -> Result<()> {
    let (name, processor) = processor(arguments.on)?;
    let stream = connect(&arguments.guest, Duration::from_secs(arguments.wait))?;
    println!("kernels run on {name}; the guest is there");
    client::serve(&stream, &name, &processor, &arguments.model)
}

fn main() -> ExitCode {
    match serve(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ibgda-gpu-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
