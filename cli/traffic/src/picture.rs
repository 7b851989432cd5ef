// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pictures as SVG, which has its fonts from whoever shows it.

use crate::stats::Bucket;
use anyhow::{Result, anyhow};
use plotters::{coord::Shift, prelude::*};
use std::fmt::Display;

/// Latencies of one name.
pub struct Series<'a> {
    pub name: String,
    pub buckets: &'a [Bucket],
}

/// One of the pictures of a file, which are below each other.
pub enum Panel<'a> {
    Latencies {
        title: String,
        series: Vec<Series<'a>>,
    },
    /// Message length in bytes, messages a second.
    Rates {
        title: String,
        points: Vec<(u64, f64)>,
    },
}

const WIDTH: u32 = 900;
const HEIGHT: u32 = 420;
const COLOURS: [RGBColor; 2] = [RGBColor(31, 119, 180), RGBColor(214, 95, 14)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn drawn<T>(result: std::result::Result<T, impl Display>) -> Result<T> {
    result.map_err(|error| anyhow!("draw: {error}"))
}

/// The text of the file.
pub fn svg(panels: &[Panel<'_>]) -> Result<String> {
    let mut text = String::new();
    {
        let size = (WIDTH, HEIGHT * panels.len().max(1) as u32);
        let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
        drawn(root.fill(&WHITE))?;
        for (area, panel) in root
            .split_evenly((panels.len().max(1), 1))
            .iter()
            .zip(panels)
        {
            match panel {
                Panel::Latencies { title, series } => latencies(area, title, series)?,
                Panel::Rates { title, points } => rates(area, title, points)?,
            }
        }
        drawn(root.present())?;
    }
    Ok(text)
}

const MICROSECOND: f64 = 1e3;

fn latencies(area: &Area<'_>, title: &str, series: &[Series<'_>]) -> Result<()> {
    let all = || series.iter().flat_map(|series| series.buckets);
    let least = all().map(|bucket| bucket.from_ns.max(1)).min().unwrap_or(1);
    let most = all().map(|bucket| bucket.to_ns).max().unwrap_or(2);
    let total = |buckets: &[Bucket]| {
        let total: u64 = buckets.iter().map(|bucket| bucket.count).sum();
        total.max(1) as f64
    };
    let share = |bucket: &Bucket, total: f64| 100.0 * bucket.count as f64 / total;
    let shares = series.iter().flat_map(|series| {
        let total = total(series.buckets);
        let share = move |bucket| share(bucket, total);
        series.buckets.iter().map(share)
    });
    let highest = shares.fold(1.0, f64::max);
    let range = least as f64 / MICROSECOND..most.max(least + 1) as f64 / MICROSECOND;
    let mut chart = drawn(
        ChartBuilder::on(area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(range.log_scale(), 0.0..highest * 1.1),
    )?;
    drawn(
        chart
            .configure_mesh()
            .x_desc("latency, us (logarithmic)")
            .y_desc("share of the requests, %")
            .draw(),
    )?;
    for (series, colour) in series.iter().zip(COLOURS) {
        let total = total(series.buckets);
        let bars = series.buckets.iter().map(|bucket| {
            let x = [bucket.from_ns.max(1), bucket.to_ns].map(|ns| ns as f64 / MICROSECOND);
            let corners = [(x[0], 0.0), (x[1], share(bucket, total))];
            Rectangle::new(corners, colour.mix(0.5).filled())
        });
        drawn(chart.draw_series(bars))?
            .label(series.name.as_str())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    drawn(
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw(),
    )
}

fn rates(area: &Area<'_>, title: &str, points: &[(u64, f64)]) -> Result<()> {
    let least = points.iter().map(|point| point.0).min().unwrap_or(1) as f64;
    let most = points.iter().map(|point| point.0).max().unwrap_or(1) as f64;
    let highest = points.iter().map(|point| point.1).fold(1.0, f64::max);
    let mut chart = drawn(
        ChartBuilder::on(area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(90)
            .build_cartesian_2d(
                (least..most.max(least * 2.0)).log_scale(),
                0.0..highest * 1.1,
            ),
    )?;
    drawn(
        chart
            .configure_mesh()
            .x_desc("message length, bytes (logarithmic)")
            .y_desc("messages a second")
            .draw(),
    )?;
    let points = || points.iter().map(|&(bytes, rate)| (bytes as f64, rate));
    drawn(chart.draw_series(LineSeries::new(points(), COLOURS[0].stroke_width(2))))?;
    let dots = points().map(|point| Circle::new(point, 4, COLOURS[0].filled()));
    drawn(chart.draw_series(dots)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::buckets;

    /// Whether every element is closed, in order; an element by its name.
    fn elements(svg: &str) -> Vec<String> {
        let (mut open, mut all) = (Vec::new(), Vec::new());
        for tag in svg.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').expect("a tag ends");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name.trim()), "in {svg}");
            } else if !tag.starts_with(['?', '!']) {
                let name = tag.split_whitespace().next().expect("a name");
                let name = name.trim_end_matches('/').to_owned();
                all.push(name.clone());
                if !tag.ends_with('/') {
                    open.push(name);
                }
            }
        }
        assert!(open.is_empty(), "{open:?} in {svg}");
        all
    }

    #[test]
    fn pictures_are_whole_svg() {
        let (slow, fast) = (buckets(&[900, 1000, 40_000]), buckets(&[500, 600]));
        let series = vec![
            Series {
                name: "CPU <path>".into(),
                buckets: &slow,
            },
            Series {
                name: "GPU".into(),
                buckets: &fast,
            },
        ];
        let text = svg(&[
            Panel::Latencies {
                title: "latency".into(),
                series,
            },
            Panel::Rates {
                title: "rate".into(),
                points: vec![(8, 5e6), (4096, 1e6)],
            },
        ])
        .expect("drawn");
        let all = elements(&text);
        assert_eq!(all[0], "svg");
        for name in ["rect", "text", "polyline", "circle"] {
            assert!(all.iter().any(|element| element == name), "{name}: {text}");
        }
        assert!(!text.contains("NaN"), "{text}");
    }

    #[test]
    fn one_value_and_none_are_drawn_too() {
        for values in [&[][..], &[0], &[7, 7]] {
            let buckets = buckets(values);
            let series = vec![Series {
                name: "x".into(),
                buckets: &buckets,
            }];
            let text = svg(&[Panel::Latencies {
                title: "t".into(),
                series,
            }])
            .expect("drawn");
            elements(&text);
            assert!(!text.contains("NaN"), "{text}");
        }
        let text = svg(&[Panel::Rates {
            title: "t".into(),
            points: vec![(8, 0.0)],
        }]);
        elements(&text.expect("drawn"));
    }
}
