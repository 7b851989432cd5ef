// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a set of latencies comes to. All of them are kept, so that every percentile is one of them.

use crate::units::show_ns;
use serde::Serialize;
use std::fmt::Write as _;

/// Percentiles by the nearest rank, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub count: u64,
    pub min_ns: u64,
    pub median_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
}

/// The smallest value that `per_mille` of all are not above.
fn rank(sorted: &[u64], per_mille: usize) -> u64 {
    let place = (sorted.len() * per_mille).div_ceil(1000);
    sorted[place.max(1) - 1]
}

impl Summary {
    /// Of at least one value, in order.
    pub fn of(sorted: &[u64]) -> Option<Self> {
        let (&min_ns, &max_ns) = (sorted.first()?, sorted.last()?);
        Some(Self {
            count: sorted.len() as u64,
            min_ns,
            median_ns: rank(sorted, 500),
            p90_ns: rank(sorted, 900),
            p99_ns: rank(sorted, 990),
            p999_ns: rank(sorted, 999),
            max_ns,
        })
    }

    /// The columns of [`HEADER`].
    pub fn columns(&self) -> String {
        let mut text = format!("{:>10}", self.count);
        for ns in self.values() {
            let _ = write!(text, "{:>10}", show_ns(ns));
        }
        text
    }

    /// From the least to the largest.
    pub fn values(&self) -> [u64; 6] {
        [
            self.min_ns,
            self.median_ns,
            self.p90_ns,
            self.p99_ns,
            self.p999_ns,
            self.max_ns,
        ]
    }
}

/// What the columns of a summary are.
pub const HEADER: &str = "     count       min    median       p90       p99     p99.9       max";

/// Latencies from `from_ns` up to, without, `to_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bucket {
    pub from_ns: u64,
    pub to_ns: u64,
    pub count: u64,
}

/// Steps of an octave that buckets begin at, the finest first; below one, whole octaves.
const STEPS: [f64; 5] = [8.0, 4.0, 2.0, 1.0, 0.5];
const MOST_BUCKETS: usize = 24;

/// Buckets of equal width on a logarithmic scale, as fine as [`MOST_BUCKETS`] of them can be, from the least to the
/// largest of all sets; of each set, what is in them. None for no values.
pub fn common_buckets<const N: usize>(sets: [&[u64]; N]) -> [Vec<Bucket>; N] {
    let min = sets.iter().filter_map(|sorted| sorted.first()).min();
    let max = sets.iter().filter_map(|sorted| sorted.last()).max();
    let edges = match (min, max) {
        (Some(&min), Some(&max)) => edges(min, max),
        _ => Vec::new(),
    };
    sets.map(|sorted| {
        let below = |ns: u64| sorted.partition_point(|&value| value < ns);
        let bucket = |edges: &[u64]| Bucket {
            from_ns: edges[0],
            to_ns: edges[1],
            count: (below(edges[1]) - below(edges[0])) as u64,
        };
        edges.windows(2).map(bucket).collect()
    })
}

/// The same of one set.
pub fn buckets(sorted: &[u64]) -> Vec<Bucket> {
    let [buckets] = common_buckets([sorted]);
    buckets
}

fn edges(min: u64, max: u64) -> Vec<u64> {
    let place = |ns: u64, step: f64| ((ns.max(1) as f64).log2() * step).floor() as i64;
    let step = STEPS
        .into_iter()
        .find(|&step| place(max, step) - place(min, step) < MOST_BUCKETS as i64)
        .unwrap_or(0.25);
    let edge = |place: i64| (place as f64 / step).exp2().ceil() as u64;
    // Small numbers have edges that fall together.
    let mut edges: Vec<u64> = (place(min, step)..=place(max, step) + 1)
        .map(edge)
        .collect();
    edges.dedup();
    edges[0] = edges[0].min(min);
    if let Some(last) = edges.last_mut() {
        *last = (*last).max(max + 1);
    }
    edges
}

/// Width of the longest bar.
const BAR: u64 = 50;

/// The buckets as lines of text. One that is not empty has a bar.
pub fn bars(buckets: &[Bucket]) -> String {
    let most = buckets.iter().map(|bucket| bucket.count).max();
    let most = most.unwrap_or(0).max(1);
    let mut text = String::new();
    for bucket in buckets {
        let bar = (bucket.count * BAR).div_ceil(most) as usize;
        let _ = writeln!(
            text,
            "{:>9} to {:>9} {:<50} {}",
            show_ns(bucket.from_ns),
            show_ns(bucket.to_ns),
            "#".repeat(bar),
            bucket.count
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_the_nearest_rank() {
        let values: Vec<u64> = (1..=1000).collect();
        let summary = Summary::of(&values).expect("values");
        assert_eq!(summary.values(), [1, 500, 900, 990, 999, 1000]);
        assert_eq!(summary.count, 1000);
        let one = Summary::of(&[7]).expect("a value");
        assert_eq!(one.values(), [7; 6]);
        let two = Summary::of(&[3, 9]).expect("values");
        assert_eq!(two.values(), [3, 3, 9, 9, 9, 9]);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn every_value_is_in_one_bucket() {
        let mut random = fastrand::Rng::with_seed(7);
        for spread in [1, 2, 10, 30, 60] {
            let mut values: Vec<u64> = (0..500).map(|_| random.u64(0..1 << spread)).collect();
            values.sort_unstable();
            let buckets = buckets(&values);
            assert!(
                !buckets.is_empty() && buckets.len() <= MOST_BUCKETS,
                "{spread}: {buckets:?}"
            );
            let total: u64 = buckets.iter().map(|bucket| bucket.count).sum();
            assert_eq!(total, 500, "{spread}: {buckets:?}");
            for pair in buckets.windows(2) {
                assert!(pair[0].from_ns < pair[0].to_ns);
                assert_eq!(pair[0].to_ns, pair[1].from_ns);
            }
            for bucket in &buckets {
                let inside = values
                    .iter()
                    .filter(|&&ns| (bucket.from_ns..bucket.to_ns).contains(&ns));
                assert_eq!(inside.count() as u64, bucket.count);
            }
        }
        assert_eq!(buckets(&[]), []);
        let [low, high] = common_buckets([&[10, 20], &[4000]]);
        assert_eq!(low.len(), high.len());
        assert_eq!(low.iter().map(|bucket| bucket.count).sum::<u64>(), 2);
        assert_eq!(high.last().expect("buckets").count, 1);
        let same = buckets(&[1000; 3]);
        assert_eq!((same.len(), same[0].count), (1, 3));
        assert_eq!(buckets(&[0, 0])[0].count, 2);
    }

    #[test]
    fn what_is_not_empty_has_a_bar() {
        let bucket = |from_ns, count| Bucket {
            from_ns,
            to_ns: from_ns * 2,
            count,
        };
        let text = bars(&[bucket(1000, 1), bucket(2000, 0), bucket(4000, 100_000)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].contains(" # ") && lines[0].ends_with(" 1"),
            "{text}"
        );
        assert!(
            !lines[1].contains('#') && lines[1].ends_with(" 0"),
            "{text}"
        );
        assert!(lines[2].contains(&"#".repeat(50)), "{text}");
    }
}
