// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which NICs, GPU and route traffic is to use.

use anyhow::{Result, bail};
use ibgda::{Bdf, Context, OpenOptions, Route};
use ibgda_cli::machine::{Machine, Nic, list};

/// For routes that need no GPU.
pub const ANY_GPU: Bdf = Bdf {
    domain: 0,
    bus: 0,
    device: 0,
    function: 0,
};

/// Options of every command that sends.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Arguments {
    /// The NIC that posts: its name, as mlx5_0, or PCI address; on the loopback route loopback0 to loopback3.
    #[arg(long, value_name = "NAME|BDF")]
    pub nic: Option<String>,
    /// The NIC at the other end, of this host; by default the same.
    #[arg(long, value_name = "NAME|BDF")]
    pub peer_nic: Option<String>,
    /// The GPU's PCI address; need not be said where there is one alone.
    #[arg(long, value_name = "BDF")]
    pub gpu: Option<Bdf>,
    /// How doorbells reach the NIC; auto is the best way that works. loopback is a model of the NIC in this process,
    /// for machines that have none.
    #[arg(long, default_value_t = Route::Auto, value_name = "ROUTE")]
    pub route: Route,
}

/// What they come to.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The NIC that posts.
    pub nic: String,
    /// The NIC at the other end.
    pub peer_nic: String,
    /// The GPU.
    pub gpu: Bdf,
    /// The route to ask for.
    pub route: Route,
    /// Said where it was not asked for: there is no NIC, so that it is the model.
    pub note: Option<&'static str>,
}

/// The library's type for a function of the command's.
pub fn bdf(function: ibgda_cli::bdf::Bdf) -> Bdf {
    Bdf {
        domain: function.domain,
        bus: function.bus,
        device: function.device,
        function: function.function,
    }
}

impl Arguments {
    /// Fills in what was not said, from what the machine has. Names are for libibgda to judge.
    pub fn choose(&self, machine: &Machine) -> Result<Choice> {
        let nowhere = self.nic.is_none() && machine.nics.is_empty() && self.route == Route::Auto;
        if self.route == Route::Loopback || nowhere {
            let name = |given: &Option<String>, default: &str| {
                given.clone().unwrap_or_else(|| default.to_owned())
            };
            return Ok(Choice {
                nic: name(&self.nic, "loopback0"),
                peer_nic: name(&self.peer_nic, "loopback1"),
                gpu: self.gpu.unwrap_or(ANY_GPU),
                route: Route::Loopback,
                note: nowhere.then_some("no RDMA NIC here, so a model of one in this process"),
            });
        }
        let Some(nic) = self.nic.clone() else {
            bail!(
                "which NIC? say --nic NAME; NICs here: {}; without one: --route loopback",
                list(machine.nics.iter().map(Nic::title))
            );
        };
        let gpu = match (self.gpu, machine.gpus.as_slice()) {
            (Some(gpu), _) => gpu,
            (None, [gpu]) => bdf(gpu.bdf),
            // A route that needs none is left, and libibgda knows.
            (None, []) if self.route == Route::Auto || self.route == Route::Proxy => ANY_GPU,
            (None, gpus) => bail!(
                "which GPU is to ring? say --gpu BDF; GPUs here: {}; without one: --route loopback",
                list(gpus.iter().map(|gpu| gpu.bdf.to_string()))
            ),
        };
        Ok(Choice {
            peer_nic: self.peer_nic.clone().unwrap_or_else(|| nic.clone()),
            nic,
            gpu,
            route: self.route,
            note: None,
        })
    }
}

impl Choice {
    /// Opens one of its NICs.
    pub fn open(&self, nic: &str) -> Result<Context> {
        Ok(Context::open(&OpenOptions {
            route: self.route,
            ..OpenOptions::new(nic, self.gpu)
        })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ibgda_cli::root::Root;

    fn nothing() -> Machine {
        Machine::read(&Root::new("/nonexistent"))
    }

    fn asked() -> Arguments {
        Arguments {
            nic: None,
            peer_nic: None,
            gpu: None,
            route: Route::Auto,
        }
    }

    #[test]
    fn a_machine_without_a_nic_has_the_model() {
        let choice = asked().choose(&nothing()).expect("the model");
        assert_eq!(
            (choice.nic.as_str(), choice.peer_nic.as_str(), choice.route),
            ("loopback0", "loopback1", Route::Loopback)
        );
        assert!(choice.note.is_some());
        let forced = Arguments {
            route: Route::Loopback,
            nic: Some("loopback2".into()),
            ..asked()
        };
        let choice = forced.choose(&nothing()).expect("the model");
        assert_eq!(choice.nic, "loopback2");
        assert!(choice.note.is_none());
    }

    #[test]
    fn what_cannot_be_known_is_asked_for() {
        let direct = Arguments {
            route: Route::Direct,
            ..asked()
        };
        let error = direct.choose(&nothing()).expect_err("which NIC?");
        assert!(error.to_string().contains("say --nic NAME"), "{error}");
        let named = Arguments {
            nic: Some("mlx5_0".into()),
            ..direct
        };
        let error = named.choose(&nothing()).expect_err("which GPU?");
        assert!(
            error.to_string().contains("say --gpu BDF; GPUs here: none"),
            "{error}"
        );
    }

    #[test]
    fn the_other_end_is_the_same_nic_if_none_is_named() {
        let gpu = "0000:04:00.0".parse().expect("an address");
        let named = Arguments {
            nic: Some("mlx5_0".into()),
            gpu: Some(gpu),
            ..asked()
        };
        let choice = named.choose(&nothing()).expect("complete");
        assert_eq!(
            (choice.nic, choice.peer_nic),
            ("mlx5_0".to_owned(), "mlx5_0".to_owned())
        );
        assert_eq!((choice.gpu, choice.route), (gpu, Route::Auto));
        let without = Arguments {
            nic: Some("rxe0".into()),
            ..asked()
        };
        let choice = without.choose(&nothing()).expect("route proxy needs none");
        assert_eq!(choice.gpu, ANY_GPU);
    }
}
