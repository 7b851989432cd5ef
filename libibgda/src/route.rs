// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a doorbell gets from a kernel to the NIC, and why it does not go a better way.

use crate::{
    broker::{Pair, Path},
    error::{Error, Result, Source},
};
use std::{fmt, str::FromStr};

/// How a kernel's doorbells reach the NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// In [`OpenOptions`](crate::OpenOptions): the best that works.
    #[default]
    Auto,
    /// The GPU stores to the NIC's doorbell register.
    Direct,
    /// The GPU stores to a word in host memory, and a thread of the library carries it to the register: kernels need
    /// `IBGDA_CPU_DOORBELL`. Adds the way through the CPU to each doorbell, and after a pause of the traffic up to an
    /// eighth of that pause, and at most a millisecond, until the thread looks again.
    CpuDoorbell,
    /// A thread of the library posts by verbs what kernels write: on any NIC that has verbs, without the broker, a policy
    /// entry, or a GPU on the bus. Kernels need `IBGDA_CPU_DOORBELL`. The pauses of the thread are as on
    /// [`Route::CpuDoorbell`], and each request and each completion goes through it.
    Proxy,
    /// The NIC is the ConnectX model in this process: no NIC, no broker, no root. Never found, only asked for, and with
    /// the crate's feature `loopback` only.
    Loopback,
}

impl Route {
    /// What can be used, the best first.
    pub(crate) const BEST_FIRST: [Self; 3] = [Self::Direct, Self::CpuDoorbell, Self::Proxy];

    /// Of these, those for which the broker grants doorbell pages.
    pub(crate) const GRANTED: [Self; 2] = [Self::Direct, Self::CpuDoorbell];

    /// Every one.
    const ALL: [Self; 5] = [
        Self::Auto,
        Self::Direct,
        Self::CpuDoorbell,
        Self::Proxy,
        Self::Loopback,
    ];

    /// Every one, [`Route::Auto`] first.
    pub fn all() -> &'static [Self] {
        &Self::ALL
    }

    /// Whether kernels ring in a word of memory, which a thread looks at (`IBGDA_CPU_DOORBELL`).
    pub(crate) fn is_by_word(self) -> bool {
        matches!(self, Self::CpuDoorbell | Self::Proxy)
    }

    /// Its name on command lines: `auto`, `direct`, `cpu-doorbell`, `proxy`, `loopback`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::CpuDoorbell => "cpu-doorbell",
            Self::Proxy => "proxy",
            Self::Loopback => "loopback",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Route {
    type Err = Error;

    /// Reads what [`Route::name`] gives. `EINVAL`: anything else.
    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|route| route.name() == text)
            .ok_or_else(|| {
                Error::argument(
                    format!("route {text:?}"),
                    "there is no such route",
                    "use auto, direct, cpu-doorbell, proxy or loopback",
                )
            })
    }
}

/// Which route a context uses, and why not a better one. Its `Display` says so in a line for each route.
#[derive(Clone, Debug)]
pub struct RouteReport {
    route: Route,
    forced: bool,
    better: Vec<(Route, Error)>,
}

impl RouteReport {
    /// Of a context without a NIC, for which there is no other.
    #[cfg(feature = "loopback")]
    pub(crate) fn loopback() -> Self {
        Self {
            route: Route::Loopback,
            forced: true,
            better: Vec::new(),
        }
    }

    /// The route in use; never [`Route::Auto`].
    pub fn route(&self) -> Route {
        self.route
    }

    /// Whether that route was asked for, rather than found.
    pub fn is_forced(&self) -> bool {
        self.forced
    }

    /// The better routes that are not used, the best first, each with the reason.
    pub fn better(&self) -> &[(Route, Error)] {
        &self.better
    }

    /// Whether the policy refuses the GPU this NIC, so that a better route was tried in vain: perhaps by mistake.
    pub fn is_refused_by_policy(&self) -> bool {
        let refused = |why: &Error| (why.origin(), why.errno()) == (Source::Broker, libc::EACCES);
        self.better.iter().any(|(_, why)| refused(why))
    }
}

impl fmt::Display for RouteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.forced {
            "was asked for"
        } else {
            "is the best that works"
        };
        write!(f, "{}: in use, since it {how}", self.route)?;
        if self.is_refused_by_policy() {
            write!(
                f,
                "\nPOLICY: it refuses a better route, see below; {} needs no permission, since no GPU rings the NIC on it",
                self.route
            )?;
        }
        for (route, why) in &self.better {
            write!(f, "\n{route}: not used: {why}")?;
        }
        Ok(())
    }
}

/// Takes the route that is wanted, or the best of `routes`, which come best first, for which `attempt` makes what it needs.
pub(crate) fn choose<T>(
    routes: &[Route],
    wanted: Route,
    mut attempt: impl FnMut(Route) -> Result<T>,
) -> Result<(T, RouteReport)> {
    let mut better = Vec::new();
    for &route in routes {
        if wanted != Route::Auto && wanted != route {
            better.push((route, passed_over(route, wanted)));
            continue;
        }
        match attempt(route) {
            Ok(made) => {
                let report = RouteReport {
                    route,
                    forced: wanted != Route::Auto,
                    better,
                };
                return Ok((made, report));
            }
            Err(error) if wanted == route => return Err(error),
            Err(error) => better.push((route, error)),
        }
    }
    // All were tried in vain; the last has the least needs.
    let (_, last) = better.last().expect("there are routes");
    // Routes that fail for one reason say it once.
    let mut reasons: Vec<(String, String)> = Vec::new();
    for (route, why) in &better {
        let why = why.to_string();
        match reasons.last_mut() {
            Some((routes, same)) if *same == why => *routes = format!("{routes}, {route}"),
            _ => reasons.push((route.to_string(), why)),
        }
    }
    let all: Vec<String> = reasons
        .iter()
        .map(|(routes, why)| format!("{routes}: {why}"))
        .collect();
    Err(Error::new(
        last.origin(),
        last.errno(),
        "choose a route",
        all.join("; "),
        "",
    ))
}

fn passed_over(route: Route, wanted: Route) -> Error {
    Error::new(
        Source::Argument,
        libc::ECANCELED,
        "by choice",
        format!("route {wanted} was asked for"),
        format!("ask for auto, or for {route}"),
    )
}

/// Whether a GPU's stores reach the NIC, as far as anyone but the administrator knows. One who forces the direct route
/// has his word for it: the policy's `any_path`.
pub(crate) fn reaches(pair: &Pair) -> Result<()> {
    match pair.path {
        Path::Switch | Path::HostBridge => Ok(()),
        Path::None => Err(Error::new(
            Source::Broker,
            libc::EXDEV,
            format!("doorbells from GPU {} to NIC {}", pair.gpu, pair.nic),
            "the kernel knows no way for the GPU's stores to the NIC, peer to peer (any_path of the policy let the pair pass)",
            "put both below one PCIe switch without ACS redirect; or, knowing that they arrive, ask for route direct",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(errno: i32) -> Error {
        Error::new(
            Source::Broker,
            errno,
            "try it",
            "it cannot be",
            "do something else",
        )
    }

    #[test]
    fn auto_takes_the_best_that_works_and_says_why_not_a_better_one() {
        let (made, report) = choose(&Route::BEST_FIRST, Route::Auto, Ok).expect("all work");
        assert_eq!((made, report.route()), (Route::Direct, Route::Direct));
        assert!(!report.is_forced() && report.better().is_empty());

        let attempt = |route| match route {
            Route::Direct => Err(refusal(libc::EXDEV)),
            route => Ok(route),
        };
        let (made, report) = choose(&Route::BEST_FIRST, Route::Auto, attempt).expect("one works");
        assert_eq!(
            (made, report.route()),
            (Route::CpuDoorbell, Route::CpuDoorbell)
        );
        let [(route, why)] = report.better() else {
            panic!("{report:?}");
        };
        assert_eq!((*route, why.errno()), (Route::Direct, libc::EXDEV));
        let text = report.to_string();
        assert_eq!(
            text,
            "cpu-doorbell: in use, since it is the best that works\n\
             direct: not used: try it: it cannot be; do something else"
        );
    }

    #[test]
    fn a_forced_route_is_taken_or_refused_with_its_reason() {
        let (made, report) = choose(&Route::BEST_FIRST, Route::CpuDoorbell, Ok).expect("it works");
        assert_eq!(made, Route::CpuDoorbell);
        assert!(report.is_forced());
        assert!(
            report
                .to_string()
                .contains("direct: not used: by choice: route cpu-doorbell was asked for")
        );
        for route in Route::BEST_FIRST {
            let mut tried = Vec::new();
            let error = choose(&Route::BEST_FIRST, route, |route| -> Result<()> {
                tried.push(route);
                Err(refusal(libc::EPERM))
            })
            .expect_err("it does not work");
            assert_eq!((error.errno(), error.why()), (libc::EPERM, "it cannot be"));
            assert_eq!(tried, [route], "no other is tried");
        }
    }

    #[test]
    fn when_none_works_every_reason_is_told() {
        let error = choose(&Route::BEST_FIRST, Route::Auto, |route| -> Result<()> {
            Err(match route {
                Route::Direct => Error::argument("try it", "it is too far", ""),
                _ => refusal(libc::EAGAIN),
            })
        })
        .expect_err("none works");
        assert_eq!(error.errno(), libc::EAGAIN);
        for part in [
            "direct: try it: it is too far; cpu",
            "cpu-doorbell, proxy: try it",
        ] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn a_refusal_of_the_policy_is_told_before_all_else() {
        let attempt = |route| match route {
            Route::Proxy => Ok(route),
            _ => Err(refusal(libc::EACCES)),
        };
        let (_, report) = choose(&Route::BEST_FIRST, Route::Auto, attempt).expect("one works");
        assert!(report.is_refused_by_policy());
        let text = report.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[1].starts_with("POLICY: "), "{text}");
        let (_, report) = choose(&Route::BEST_FIRST, Route::Proxy, Ok).expect("it works");
        assert!(!report.is_refused_by_policy(), "nobody asked it");
    }

    #[test]
    fn names_are_read_and_others_refused_with_the_choice() {
        for route in Route::ALL {
            assert_eq!(route.name().parse::<Route>().expect("its own name"), route);
        }
        let error = "Direct".parse::<Route>().expect_err("no such route");
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(error.to_string().contains("cpu-doorbell"), "{error}");
    }
}
