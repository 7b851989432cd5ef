// SPDX-License-Identifier: MIT OR Apache-2.0
//! A ring all-reduce in which reduction and RDMA are one kernel (`kernels/ring.cu`), on the ranks of `examples/communicator-rust`.
//! Every result is compared with a plain sum, to the last bit.
//!
//! ```text
//! ibgda-all-reduce --gpu 0000:65:00.0 --nics "mlx5_0 mlx5_1" --ranks 4        # four processes
//! ibgda-all-reduce --route loopback --threads --ranks 4 --on gpu              # without a NIC
//! ```
//!
//! The vectors lie in host memory, which a GPU reaches over PCIe: it is the same on every route. With GPU memory, the
//! window is what `Context::map_device` registers instead of `Context::alloc`, and nothing else changes.

mod plain;
mod ring;

use clap::Parser;
use ibgda_communicator::{Communicator, Error, Options, Processor, Result, Team, launch::Launch};
use ring::{Ring, Shape, Type};
use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// A ring all-reduce by one kernel, compared with a plain sum.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    launch: Launch,
    /// Elements of the vector, of four bytes.
    #[arg(long, default_value_t = 100_003)]
    elements: usize,
    /// Elements of a chunk: what is sent, and added up, at a time.
    #[arg(long, default_value_t = 4096)]
    chunk: usize,
    /// Chunks that may be on the way to a rank before it has added them.
    #[arg(long, default_value_t = 4)]
    slots: u32,
    /// How often, of each type.
    #[arg(long, default_value_t = 4)]
    calls: u32,
    /// Only this type; else both, in turn.
    #[arg(long = "type", value_enum)]
    kind: Option<Type>,
    /// Let this rank write with a wrong rkey from its call N on, to see what the others do: RANK@N.
    #[arg(long, value_parser = parse_fault)]
    fail: Option<(u16, u32)>,
}

fn parse_fault(text: &str) -> std::result::Result<(u16, u32), String> {
    let both = text.split_once('@');
    let parsed = both.and_then(|(rank, call)| Some((rank.parse().ok()?, call.parse().ok()?)));
    parsed.ok_or_else(|| "write RANK@CALL, such as 1@3".to_owned())
}

impl Arguments {
    fn shape(&self) -> Result<Shape> {
        Shape {
            count: self.elements,
            chunk: self.chunk,
            slots: self.slots,
        }
        .check()
    }

    fn types(&self) -> Vec<Type> {
        self.kind
            .map_or(vec![Type::U32, Type::F32], |kind| vec![kind])
    }
}

fn reduce(arguments: &Arguments, team: &Team, processor: &Processor) -> Result<()> {
    let (rank, size, launch) = (team.rank(), team.size(), &arguments.launch);
    let shape = arguments.shape()?;
    let options = Options {
        nic: launch.nic(rank)?,
        gpu: launch.gpu()?,
        route: launch.route,
        window_bytes: shape.window_bytes(),
    };
    let communicator = Communicator::new(team, processor, &options)?;
    let context = communicator.context();
    let code = if launch.on == "cpu" {
        ""
    } else {
        ring::COMPILER
    };
    println!(
        "rank {rank}: NIC {}, route {}, kernels {processor} {code}",
        context.device_name(),
        context.route()
    );
    let mut ring = Ring::new(communicator, shape)?;
    // No kernel runs before all ranks have loaded theirs.
    team.exchange(&[])?;
    let mut spent = Duration::ZERO;
    let mut call = 0;
    for _ in 0..arguments.calls {
        for kind in arguments.types() {
            call += 1;
            if arguments
                .fail
                .is_some_and(|fault| fault.0 == rank && fault.1 == call)
            {
                let next = usize::from((rank + 1) % size);
                ring.communicator().view().windows[next].rkey ^= 0xff00;
            }
            let mut vector = plain::vector(kind, rank, call, shape.count);
            let start = Instant::now();
            ring.all_reduce(kind, &mut vector)?;
            spent += start.elapsed();
            if let Some(difference) = plain::difference(kind, size, call, &vector) {
                let error = Error::Argument(format!("call {call}, {kind:?}: {difference}"));
                return Err(ring.communicator().fail(error));
            }
        }
    }
    ring.finish()?;
    println!(
        "rank {rank}: {call} all-reduces of {} elements over {size} ranks equal the plain sum, {:.3} ms each",
        shape.count,
        spent.as_secs_f64() * 1e3 / f64::from(call.max(1))
    );
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let checked = arguments.shape().map(drop);
    match checked.and_then(|()| {
        arguments
            .launch
            .run(|team, processor| reduce(&arguments, team, processor))
    }) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
