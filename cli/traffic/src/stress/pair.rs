// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two ends that can be lost, and come back.

use super::{
    report::{Mismatch, Places},
    round::{self, Layout, RECEIVES, Round},
};
use crate::{
    choice::Choice,
    ends::{self, End},
    poster::{Ended, Job, On, Poster},
    stop::Stop,
};
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ibgda::{Context, QueuePair, Route, Source, Status};
use ibgda_device::kernels::requests::ibgda_request;
use std::{
    thread,
    time::{Duration, Instant},
};

/// `IBGDA_STATE_READY`.
const READY: u32 = 1;
/// How long after a failure a loss is waited for that would explain it: the driver can be later than the first error.
const LOSS_COMES: Duration = Duration::from_secs(10);
/// How often Ctrl-C is looked for while a NIC is waited for.
const LOOK: Duration = Duration::from_millis(200);

/// What a run needs besides.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub on: On,
    pub qps: usize,
    pub layout: Layout,
    pub timeout: Duration,
}

/// Both ends, connected.
pub struct Pair {
    near: End,
    far: End,
    pub poster: Poster,
    settings: Settings,
}

/// How a round ended.
pub enum Outcome {
    Good,
    Wrong(Box<Mismatch>),
    /// A request failed: why, in words.
    Failed(String),
}

/// A NIC that is not there.
#[derive(Clone, Debug)]
pub struct Lost {
    pub nic: String,
    pub reason: &'static str,
}

/// Whether its NIC is lost, or has come back without the context.
fn is_lost(context: &Context) -> bool {
    let state = context.state();
    (state.state, state.generation) != (READY, context.pair().generation)
}

impl Pair {
    /// Opens both NICs.
    pub fn open(choice: &Choice, settings: Settings) -> Result<Self> {
        let open = |nic: &str| choice.open(nic).with_context(|| format!("NIC {nic}"));
        let contexts = [open(&choice.nic)?, open(&choice.peer_nic)?];
        Self::of(contexts, choice, settings).map_err(|(error, _)| error)
    }

    /// The same of NICs that are open, which are given back if it fails.
    fn of(
        contexts: [Context; 2],
        choice: &Choice,
        settings: Settings,
    ) -> Result<Self, (anyhow::Error, [Context; 2])> {
        let make = |context: &Context, receives| -> Result<(Vec<QueuePair>, _)> {
            let options = ends::options(receives, settings.timeout);
            let bytes = settings.layout.bytes() * settings.qps as u64;
            let region = context.alloc(usize::try_from(bytes)?, ibgda::Access::all())?;
            let qps = (0..settings.qps).map(|_| ends::queue_pair(context, &options));
            Ok((qps.collect::<Result<_>>()?, region))
        };
        let receives = RECEIVES.next_power_of_two() as u32;
        let made = make(&contexts[0], 0).and_then(|near| Ok((near, make(&contexts[1], receives)?)));
        let ((near_qps, near_region), (far_qps, far_region)) = match made {
            Ok(made) => made,
            Err(error) => return Err((error, contexts)),
        };
        let [near_context, far_context] = contexts;
        let near = End {
            qps: near_qps,
            region: near_region,
            context: near_context,
        };
        let far = End {
            qps: far_qps,
            region: far_region,
            context: far_context,
        };
        let gpu = (choice.route != Route::Loopback).then_some(choice.gpu);
        let poster =
            ends::join(&near, &far).and_then(|()| Poster::choose(settings.on, gpu, &near.qps[0]));
        match poster {
            Ok(poster) => Ok(Self {
                near,
                far,
                settings: Settings {
                    // After a loss as before it: the report names one.
                    on: poster.on(),
                    ..settings
                },
                poster,
            }),
            Err(error) => Err((error, [near.context, far.context])),
        }
    }

    /// Where its memory is.
    pub fn places(&self) -> Places {
        Places {
            pid: std::process::id(),
            near: self.near.region.address(),
            near_bytes: self.near.region.length(),
            far: self.far.region.address(),
            far_bytes: self.far.region.length(),
        }
    }

    /// Names of both NICs, and the route.
    pub fn names(&self) -> (String, String, Route) {
        let name = |end: &End| end.context.device_name().to_owned();
        (name(&self.near), name(&self.far), self.near.context.route())
    }

    /// One round of every queue pair at the same time.
    pub fn round(&mut self, random: &mut fastrand::Rng, rounds: &mut [Round]) -> Result<Outcome> {
        for round in rounds.iter_mut() {
            round.plan(random, &self.near.region, &self.far.region)?;
        }
        let timeout = self.settings.timeout;
        let posts = |round: &mut Round| std::mem::take(&mut round.posts);
        if let Some(failed) = run(
            &self.poster,
            &mut self.far.qps,
            rounds,
            timeout,
            posts,
            |_, _| {},
        )? {
            return Ok(Outcome::Failed(format!("posting receives: {failed}")));
        }
        let requests = |round: &mut Round| std::mem::take(&mut round.requests);
        let back = |round: &mut Round, requests| round.requests = requests;
        if let Some(failed) = run(
            &self.poster,
            &mut self.near.qps,
            rounds,
            timeout,
            requests,
            back,
        )? {
            return Ok(Outcome::Failed(self.explain(failed, rounds)));
        }
        let polls = |round: &mut Round| std::mem::take(&mut round.polls);
        let back = |round: &mut Round, polls| round.polls = polls;
        if let Some(failed) = run(
            &self.poster,
            &mut self.far.qps,
            rounds,
            timeout,
            polls,
            back,
        )? {
            return Ok(Outcome::Failed(format!("taking receives: {failed}")));
        }
        for (round, qp) in rounds.iter().zip(&self.near.qps) {
            let wrong = round.check(qp.number(), &self.near.region, &self.far.region)?;
            if let Some(wrong) = wrong {
                return Ok(Outcome::Wrong(Box::new(wrong)));
            }
        }
        Ok(Outcome::Good)
    }

    /// Adds which request it was.
    fn explain(&self, failed: String, rounds: &[Round]) -> String {
        let requests = self.near.qps.iter().zip(rounds).find_map(|(qp, round)| {
            let error = self.poster.first_error(qp).ok()??;
            round.request_of(error.wqe_index)
        });
        requests.map_or(failed.clone(), |request| format!("{request}: {failed}"))
    }

    /// The NICs that are lost, waited for after a failure for a while.
    pub fn lost(&self) -> Vec<Lost> {
        let end = Instant::now() + LOSS_COMES;
        loop {
            let lost: Vec<Lost> = [&self.near, &self.far]
                .into_iter()
                .filter(|end| is_lost(&end.context))
                .map(|end| Lost {
                    nic: end.context.device_name().to_owned(),
                    reason: end.context.state().reason_text(),
                })
                .collect();
            if !lost.is_empty() || Instant::now() >= end {
                return lost;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Drops what was made, binds what was lost again, and makes all anew.
    pub fn recover(self, choice: &Choice, patience: Duration, stop: &Stop) -> Result<Self> {
        let deadline = Instant::now() + patience;
        let routes = |pair: &Self| [&pair.near, &pair.far].map(|end| end.context.route());
        let (settings, before) = (self.settings, routes(&self));
        let mut contexts = [self.near, self.far].map(|end| end.context);
        loop {
            for context in &mut contexts {
                wait_for(context, deadline, stop)?;
            }
            match Self::of(contexts, choice, settings) {
                Ok(pair) => {
                    for (now, before) in routes(&pair).into_iter().zip(before) {
                        ensure!(
                            now == before,
                            "the NIC is back, and only route {now} works where {before} did"
                        );
                    }
                    return Ok(pair);
                }
                // It can be lost once more meanwhile.
                Err((error, given_back)) => {
                    if Instant::now() >= deadline || stop.asked() {
                        return Err(error.context("the NIC is back, and yet cannot be used"));
                    }
                    contexts = given_back;
                    thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }
}

/// Binds a NIC again, if it is lost.
fn wait_for(context: &mut Context, deadline: Instant, stop: &Stop) -> Result<()> {
    let name = context.device_name().to_owned();
    while is_lost(context) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Err(error) = context.rebind(left.min(LOOK)) else {
            continue;
        };
        // What the broker refuses stays so; a NIC that is not back, or not ready to be opened, does not.
        let refused = matches!(error.origin(), Source::Broker)
            && !matches!(error.errno(), libc::EAGAIN | libc::EHOSTDOWN)
            && context.state().state != READY;
        if refused || left.is_zero() {
            return Err(error).with_context(|| format!("{name} has not come back"));
        }
        if stop.asked() {
            bail!("interrupted while {name}, which was lost, was waited for");
        }
    }
    Ok(())
}

/// Runs a job of each round's on the queue pair of the same place; why one failed, if one did.
fn run(
    poster: &Poster,
    qps: &mut [QueuePair],
    rounds: &mut [Round],
    timeout: Duration,
    take: impl Fn(&mut Round) -> Vec<ibgda_request>,
    back: impl Fn(&mut Round, Vec<ibgda_request>),
) -> Result<Option<String>> {
    let mut requests: Vec<Vec<ibgda_request>> = rounds.iter_mut().map(take).collect();
    let mut jobs: Vec<Job<'_>> = qps
        .iter_mut()
        .zip(&mut requests)
        .filter(|(_, requests)| !requests.is_empty())
        .map(|(qp, requests)| Job { qp, requests })
        .collect();
    let ended = poster.jobs(&mut jobs, timeout)?;
    let failed = |(job, ended): (&Job<'_>, &Ended)| {
        let words = || {
            let at = match job.requests.get(ended.done) {
                Some(request) => {
                    format!("at request {} ({})", ended.done, round::describe(request))
                }
                None => format!("waiting for {} requests", ended.done),
            };
            format!("{at}: {}", poster.explain(job.qp, ended.status))
        };
        (ended.status != Status::OK).then(words)
    };
    let failed = jobs.iter().zip(&ended).find_map(failed);
    drop(jobs);
    for (round, requests) in rounds.iter_mut().zip(requests) {
        back(round, requests);
    }
    Ok(failed)
}

/// That a NIC was lost, as an error.
pub fn loss_as_error(lost: &[Lost], failed: &str) -> anyhow::Error {
    let nics: Vec<String> = lost
        .iter()
        .map(|lost| format!("{} was lost ({})", lost.nic, lost.reason))
        .collect();
    anyhow!("{}; {failed}", nics.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ibgda::loopback;

    #[test]
    fn a_pair_that_is_lost_comes_back() {
        let choice = Choice {
            nic: "loopback1".into(),
            peer_nic: "loopback2".into(),
            gpu: "0000:00:00.0".parse().expect("an address"),
            route: Route::Loopback,
            note: None,
        };
        let settings = Settings {
            on: On::Cpu,
            qps: 2,
            layout: Layout::new(4096),
            timeout: Duration::from_secs(10),
        };
        let mut pair = Pair::open(&choice, settings).expect("the model");
        let mut rounds = [0, 1].map(|index| Round::new(settings.layout, index));
        let mut random = fastrand::Rng::with_seed(3);
        let mut round = |pair: &mut Pair| pair.round(&mut random, &mut rounds).expect("run");
        assert!(matches!(round(&mut pair), Outcome::Good));
        loopback::lose("loopback1").expect("it is there");
        let Outcome::Failed(why) = round(&mut pair) else {
            panic!("the NIC is gone");
        };
        assert!(why.contains("IBGDA_ERR_NIC_LOST"), "{why}");
        let lost = pair.lost();
        assert_eq!((lost.len(), lost[0].nic.as_str()), (1, "loopback1"));
        let text = loss_as_error(&lost, "why").to_string();
        assert!(
            text.contains("loopback1 was lost (NIC reset); why"),
            "{text}"
        );
        let back = thread::spawn(|| {
            thread::sleep(Duration::from_millis(100));
            loopback::recover("loopback1")
        });
        let mut pair = pair
            .recover(&choice, Duration::from_secs(20), &Stop::default())
            .expect("it is back");
        back.join().expect("no panic").expect("it was lost");
        assert!(matches!(round(&mut pair), Outcome::Good));

        loopback::lose("loopback2").expect("it is there");
        let start = Instant::now();
        let Err(error) = pair.recover(&choice, Duration::from_secs(600), &Stop::of_a_user()) else {
            panic!("nobody has brought it back");
        };
        assert!(error.to_string().contains("interrupted"), "{error:#}");
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
