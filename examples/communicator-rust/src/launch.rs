// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a team's ranks are started: as processes or threads here, or as one process that is told which rank it is.

use crate::{
    coordinator::Coordinator,
    error::{Error, Result, meeting},
    processor::Processor,
    team::Team,
    view::MOST_RANKS,
};
use ibgda::{Bdf, Route};
use std::{
    env,
    io::{self, Write as _},
    process::{Child, Command},
    thread,
    time::Duration,
};

/// What all programs that start a team take.
#[derive(Clone, Debug, clap::Args)]
pub struct Launch {
    /// PCI address of the GPU. The loopback route needs none.
    #[arg(long, env = "IBGDA_GPUS", default_value = "0000:00:00.0")]
    pub gpu: String,
    /// NICs, separated by spaces; rank r has the one at place r, counted round. The loopback route has its own.
    #[arg(long, env = "IBGDA_NICS", default_value = "")]
    pub nics: String,
    /// How doorbells get to the NIC: auto, direct, cpu-doorbell, proxy or loopback.
    #[arg(long, default_value_t = Route::Auto)]
    pub route: Route,
    /// Where kernels run: cpu or gpu.
    #[arg(long, default_value = "cpu")]
    pub on: String,
    /// How many ranks.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=MOST_RANKS as i64))]
    pub ranks: u16,
    /// All ranks as threads of one process, as the loopback route needs it.
    #[arg(long, conflicts_with = "rank")]
    pub threads: bool,
    /// Only this rank; rank 0 listens at --meet.
    #[arg(long, requires = "meet")]
    pub rank: Option<u16>,
    /// HOST:PORT at which the ranks meet.
    #[arg(long)]
    pub meet: Option<String>,
    /// The longest that anything waits, in seconds.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub patience: u64,
    /// Only this rank, whose coordinator listens already: how a rank is started as a process.
    #[arg(long, hide = true)]
    pub child: bool,
}

impl Launch {
    /// The GPU's address: the first of several.
    ///
    /// # Errors
    /// It is none.
    pub fn gpu(&self) -> Result<Bdf> {
        let first = self.gpu.split_whitespace().next().unwrap_or_default();
        first
            .parse()
            .map_err(|error| Error::Argument(format!("--gpu {first:?}: {error}")))
    }

    /// The NIC of a rank.
    ///
    /// # Errors
    /// There is none.
    pub fn nic(&self, rank: u16) -> Result<String> {
        if self.route == Route::Loopback {
            return Ok(format!(
                "loopback{}",
                usize::from(rank) % ibgda::loopback::NICS
            ));
        }
        let nics: Vec<_> = self.nics.split_whitespace().collect();
        if nics.is_empty() {
            return Err(Error::Argument(
                "--nics names no NIC; or take --route loopback".into(),
            ));
        }
        Ok(nics[usize::from(rank) % nics.len()].to_owned())
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience)
    }

    /// Runs `body` as each rank of the team that this process is to run. A rank's failure is told to all others, and printed
    /// by each. True: all ranks here have done well.
    ///
    /// # Errors
    /// Before there are ranks: arguments, the address, no GPU.
    pub fn run<F>(&self, body: F) -> Result<bool>
    where
        F: Fn(&Team, &Processor) -> Result<()> + Sync,
    {
        if self.route == Route::Loopback && !self.threads {
            return Err(Error::Argument(
                "the loopback route's NICs are of one process: pass --threads".into(),
            ));
        }
        // Every rank's NIC has a name before any rank begins.
        (0..self.ranks).try_for_each(|rank| self.nic(rank).map(drop))?;
        self.gpu()?;
        match (self.rank, self.threads) {
            (Some(rank), _) => {
                let meet = self.meet.clone().unwrap_or_default();
                let listens = rank == 0 && !self.child;
                let _coordinator = listens
                    .then(|| Coordinator::start(&meet, self.ranks, self.patience()))
                    .transpose()?;
                Ok(self.one(&meet, rank, &self.on.parse()?, &body))
            }
            (None, true) => {
                // One for all, so that kernels of several ranks share it.
                let processor: Processor = self.on.parse()?;
                let meet = self.meet.as_deref().unwrap_or("127.0.0.1:0");
                let coordinator = Coordinator::start(meet, self.ranks, self.patience())?;
                let address = coordinator.address().to_string();
                Ok(thread::scope(|scope| {
                    let one = |rank| {
                        let (address, processor, body) = (&address, &processor, &body);
                        scope.spawn(move || self.one(address, rank, processor, body))
                    };
                    let ranks: Vec<_> = (0..self.ranks).map(one).collect();
                    // All of them are waited for, whatever the first has done.
                    let ended: Vec<_> = ranks
                        .into_iter()
                        .map(|rank| rank.join().unwrap_or(false))
                        .collect();
                    ended.into_iter().all(|good| good)
                }))
            }
            (None, false) => {
                let meet = self.meet.as_deref().unwrap_or("127.0.0.1:0");
                let coordinator = Coordinator::start(meet, self.ranks, self.patience())?;
                self.processes(&coordinator.address().to_string())
            }
        }
    }

    fn one<F>(&self, meet: &str, rank: u16, processor: &Processor, body: &F) -> bool
    where
        F: Fn(&Team, &Processor) -> Result<()>,
    {
        let ran = Team::join(meet, rank, self.ranks, self.patience()).and_then(|team| {
            let ran = body(&team, processor);
            match &ran {
                Ok(()) => team.leave(),
                // They have heard of that one.
                Err(Error::RankGone { .. }) => team.leave(),
                Err(error) => team.fail(&error.to_string()),
            }
            ran
        });
        if let Err(error) = &ran {
            // In one piece: other ranks write there too.
            let line = format!("rank {rank}: {error}\n");
            let _ = io::stderr().write_all(line.as_bytes());
        }
        ran.is_ok()
    }

    /// This program once more for each rank.
    fn processes(&self, meet: &str) -> Result<bool> {
        let program = env::current_exe().map_err(|error| meeting("find this program", &error))?;
        let mut children: Vec<Child> = Vec::new();
        let mut good = true;
        for rank in 0..self.ranks {
            let started = Command::new(&program)
                .args(env::args_os().skip(1))
                .args(["--child", "--rank", &rank.to_string(), "--meet", meet])
                .spawn();
            match started {
                Ok(child) => children.push(child),
                Err(error) => {
                    // The others hear from the coordinator that it does not come.
                    eprintln!("rank {rank}: start {}: {error}", program.display());
                    good = false;
                }
            }
        }
        for child in &mut children {
            let ended = child
                .wait()
                .map_err(|error| meeting("wait for a rank", &error))?;
            good &= ended.success();
        }
        Ok(good)
    }
}
