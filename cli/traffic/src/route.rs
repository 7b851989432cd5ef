// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ibgda route`: which route libibgda would take.

use crate::choice::{ANY_GPU, bdf};
use anyhow::Result;
use ibgda::{Bdf, Context, Error, OpenOptions, Route, cuda::Gpu};
use ibgda_cli::{
    machine::{Machine, Nic, list},
    output::print,
    root::Root,
};
use serde::Serialize;
use std::{fmt::Write as _, process::ExitCode};

/// Say which route doorbells would take for each pair of GPU and NIC, and why not a better one.
///
/// For each pair it opens a context of libibgda's, as an application would, and closes it again: what it says is the
/// library's own choice. Exit status 1 if no pair has the route.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only this NIC: its name, as mlx5_0, or PCI address.
    #[arg(long, value_name = "NAME|BDF")]
    nic: Option<String>,
    /// Only the GPU at this PCI address.
    #[arg(long, value_name = "BDF")]
    gpu: Option<Bdf>,
    /// Ask for this route, instead of the best that works.
    #[arg(long, default_value_t = Route::Auto, value_name = "ROUTE")]
    route: Route,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Why not.
#[derive(Serialize)]
struct Refusal {
    what: String,
    why: String,
    fix: Option<String>,
    errno: i32,
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        Self {
            what: error.what().to_owned(),
            why: error.why().to_owned(),
            fix: (!error.advice().is_empty()).then(|| error.advice().to_owned()),
            errno: error.errno(),
        }
    }
}

impl Refusal {
    fn words(&self) -> String {
        let mut words = format!("{}: {}", self.what, self.why);
        if let Some(fix) = &self.fix {
            let _ = write!(words, "; fix: {fix}");
        }
        words
    }
}

#[derive(Serialize)]
struct Better {
    route: &'static str,
    refusal: Refusal,
}

/// Whether the GPU itself can store to the NIC's doorbell page, as CUDA says.
#[derive(Serialize)]
struct FromGpu {
    /// `None`: there is no CUDA to ask.
    works: Option<bool>,
    refusal: Option<Refusal>,
}

#[derive(Serialize)]
struct Answer {
    gpu: String,
    nic: String,
    /// What is used; `None` when there is none, or not that which was asked for.
    route: Option<&'static str>,
    forced: bool,
    better: Vec<Better>,
    refusal: Option<Refusal>,
    from_gpu: Option<FromGpu>,
}

#[derive(Serialize)]
struct Document {
    version: u32,
    asked_for: &'static str,
    /// Every route that this build knows.
    routes: Vec<&'static str>,
    pairs: Vec<Answer>,
}

/// Runs it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let root = Root::new("/");
    let machine = Machine::read(&root);
    let devices = root.names("sys/class/infiniband");
    let document = Document {
        version: 1,
        asked_for: arguments.route.name(),
        routes: Route::all().iter().map(|route| route.name()).collect(),
        pairs: pairs(arguments, &machine, &devices)?
            .into_iter()
            .map(|(gpu, nic)| ask(gpu, nic, arguments.route))
            .collect(),
    };
    print(&if arguments.json {
        serde_json::to_string_pretty(&document)? + "\n"
    } else {
        words(&document)
    })?;
    let any = document.pairs.iter().any(|pair| pair.route.is_some());
    Ok(if any {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The pairs to ask for: what is named, whether sysfs shows it or not, and all that sysfs shows of what is not. `devices` are
/// all verbs devices, among them those of no PCI function.
fn pairs(
    arguments: &Arguments,
    machine: &Machine,
    devices: &[String],
) -> Result<Vec<(Bdf, String)>> {
    let (first, route) = (machine.gpus.first(), arguments.route);
    if route == Route::Loopback {
        let nic = arguments.nic.as_deref().unwrap_or("loopback0");
        let gpu = arguments.gpu.or(first.map(|gpu| bdf(gpu.bdf)));
        return Ok(vec![(gpu.unwrap_or(ANY_GPU), nic.to_owned())]);
    }
    let gpus = match arguments.gpu {
        Some(gpu) => vec![gpu],
        None if first.is_none() && [Route::Auto, Route::Proxy].contains(&route) => vec![ANY_GPU],
        None => machine.gpus.iter().map(|gpu| bdf(gpu.bdf)).collect(),
    };
    let mut nics: Vec<String> = match &arguments.nic {
        Some(nic) => vec![nic.clone()],
        None => machine.nics.iter().map(name).collect(),
    };
    if arguments.nic.is_none() {
        let known = nics.clone();
        let others = devices.iter().filter(|device| !known.contains(device));
        nics.extend(others.cloned());
    }
    anyhow::ensure!(
        !gpus.is_empty() && !nics.is_empty(),
        "no pair of GPU and NIC; GPUs here: {}; NICs: {}; the model needs neither: --route loopback",
        list(machine.gpus.iter().map(|gpu| gpu.bdf.to_string())),
        list(machine.nics.iter().map(Nic::title))
    );
    Ok(gpus
        .iter()
        .flat_map(|&gpu| nics.iter().map(move |nic| (gpu, nic.clone())))
        .collect())
}

/// What to call it by: a NIC without a verbs device is refused by its address.
fn name(nic: &Nic) -> String {
    let bdf = nic.function.bdf.to_string();
    nic.rdma.clone().unwrap_or(bdf)
}

fn ask(gpu: Bdf, nic: String, route: Route) -> Answer {
    let opened = Context::open(&OpenOptions {
        route,
        ..OpenOptions::new(nic.clone(), gpu)
    });
    let answer = |route, refusal| Answer {
        gpu: gpu.to_string(),
        nic,
        route,
        forced: false,
        better: Vec::new(),
        refusal,
        from_gpu: None,
    };
    match opened {
        Err(error) => answer(None, Some(Refusal::from(&error))),
        Ok(context) => {
            let report = context.route_report();
            Answer {
                forced: report.is_forced(),
                better: report
                    .better()
                    .iter()
                    .map(|(route, why)| Better {
                        route: route.name(),
                        refusal: why.into(),
                    })
                    .collect(),
                from_gpu: (report.route() == Route::Direct).then(|| from_gpu(&context, gpu)),
                ..answer(Some(report.route().name()), None)
            }
        }
    }
}

fn from_gpu(context: &Context, gpu: Bdf) -> FromGpu {
    let (works, error) = match Gpu::open(gpu) {
        Err(error) => (None, Some(error)),
        Ok(gpu) => match context.check_gpu_doorbell(&gpu) {
            Ok(()) => (Some(true), None),
            Err(error) => (Some(false), Some(error)),
        },
    };
    FromGpu {
        works,
        refusal: error.as_ref().map(Refusal::from),
    }
}

fn words(document: &Document) -> String {
    let mut text = String::new();
    for pair in &document.pairs {
        let _ = match (&pair.route, &pair.refusal) {
            (Some(route), _) => {
                let how = if pair.forced {
                    "as asked for"
                } else {
                    "the best that works"
                };
                writeln!(text, "{}@{}: {route}, {how}", pair.gpu, pair.nic)
            }
            (None, Some(refusal)) => {
                let what = match document.asked_for {
                    "auto" => "no route".to_owned(),
                    asked => format!("not {asked}"),
                };
                let why = refusal.words();
                writeln!(text, "{}@{}: {what}: {why}", pair.gpu, pair.nic)
            }
            (None, None) => unreachable!("an answer has a route or a reason"),
        };
        for better in &pair.better {
            let _ = writeln!(text, "    not {}: {}", better.route, better.refusal.words());
        }
        let _ = match &pair.from_gpu {
            Some(FromGpu {
                works: Some(true), ..
            }) => writeln!(
                text,
                "    CUDA lets kernels of the GPU have the doorbell page"
            ),
            Some(FromGpu {
                works,
                refusal: Some(refusal),
            }) => {
                let what = match works {
                    None => "not known whether CUDA lets the GPU have the doorbell page",
                    _ => "CUDA does not let the GPU have the doorbell page",
                };
                writeln!(text, "    {what}: {}", refusal.words())
            }
            _ => Ok(()),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(route: Route) -> Arguments {
        Arguments {
            nic: None,
            gpu: None,
            route,
            json: false,
        }
    }

    fn nothing() -> Machine {
        Machine::read(&Root::new("/nonexistent"))
    }

    #[test]
    fn a_machine_without_pairs_says_what_it_has() {
        let error = pairs(&arguments(Route::Auto), &nothing(), &[]).expect_err("no pair");
        let error = error.to_string();
        assert!(
            error.contains("GPUs here: none; NICs: none") && error.contains("--route loopback"),
            "{error}"
        );
    }

    #[test]
    fn verbs_devices_of_no_function_are_asked_for_too() {
        let devices = ["rxe0".to_owned()];
        let asked = pairs(&arguments(Route::Auto), &nothing(), &devices).expect("one");
        assert_eq!(asked, [(ANY_GPU, "rxe0".to_owned())]);
        pairs(&arguments(Route::Direct), &nothing(), &devices).expect_err("it needs a GPU");
    }

    #[test]
    fn the_model_has_its_route_and_no_other() {
        let asked = pairs(&arguments(Route::Loopback), &nothing(), &[]).expect("the model");
        assert_eq!(asked.len(), 1);
        let answer = ask(asked[0].0, asked[0].1.clone(), Route::Loopback);
        assert_eq!(answer.route, Some("loopback"));
        assert!(answer.forced && answer.better.is_empty() && answer.refusal.is_none());
    }

    #[test]
    fn a_nic_that_is_none_is_an_answer_with_the_way_out() {
        let gpu = "0000:04:00.0".parse().expect("an address");
        let document = Document {
            version: 1,
            asked_for: "loopback",
            routes: Vec::new(),
            pairs: vec![ask(gpu, "loopback9".into(), Route::Loopback)],
        };
        let text = words(&document);
        assert!(
            text.starts_with("0000:04:00.0@loopback9: not loopback: ")
                && text.contains("fix: they are loopback0 to loopback3"),
            "{text}"
        );
    }
}
