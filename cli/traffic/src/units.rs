// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers with units, as they are read and printed.

use anyhow::{Result, anyhow, ensure};
use std::time::Duration;

/// Splits `64K` into its number and what follows.
fn number(text: &str) -> Option<(u64, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

/// Reads a number of bytes, as `8`, `64K`, `1M` or `1G`, of 1024.
pub fn bytes(text: &str) -> Result<u64> {
    let wrong = || anyhow!("{text:?} is no number of bytes such as 8, 64K or 1M");
    let (number, unit) = number(text).ok_or_else(wrong)?;
    let factor: u64 = match unit.trim_end_matches("iB") {
        "" => 1,
        "K" | "k" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return Err(wrong()),
    };
    number.checked_mul(factor).ok_or_else(wrong)
}

/// Reads a time, as `90`, `90s`, `5m` or `2h`; without a unit, seconds. 1 second to 1000 hours.
pub fn time(text: &str) -> Result<Duration> {
    let wrong = || anyhow!("{text:?} is no time such as 30s, 5m or 2h");
    let (number, unit) = number(text).ok_or_else(wrong)?;
    let factor: u64 = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let seconds = number.checked_mul(factor).ok_or_else(wrong)?;
    ensure!(
        (1..=3_600_000).contains(&seconds),
        "{text:?} is not between 1 s and 1000 h"
    );
    Ok(Duration::from_secs(seconds))
}

/// `850 ns`, `12.3 us`, `4.56 ms`, `1.20 s`: three digits at least.
pub fn show_ns(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// `8 B`, `64 KiB`, `1.50 MiB`.
pub fn show_bytes(bytes: u64) -> String {
    let (shift, unit) = match bytes {
        0..1024 => return format!("{bytes} B"),
        1024..0x10_0000 => (10, "KiB"),
        0x10_0000..0x4000_0000 => (20, "MiB"),
        _ => (30, "GiB"),
    };
    if bytes % (1 << shift) == 0 {
        return format!("{} {unit}", bytes >> shift);
    }
    format!(
        "{} {unit}",
        three_digits(bytes as f64 / f64::from(1u32 << shift))
    )
}

/// `950`, `12.3 k`, `4.56 M`, of 1000.
pub fn show_count(count: f64) -> String {
    match count {
        c if c < 1e3 => three_digits(c),
        c if c < 1e6 => format!("{} k", three_digits(c / 1e3)),
        c if c < 1e9 => format!("{} M", three_digits(c / 1e6)),
        c => format!("{} G", three_digits(c / 1e9)),
    }
}

fn three_digits(value: f64) -> String {
    let places = match value {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.places$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, expected) in [
            ("0", 0),
            ("8", 8),
            ("64K", 65536),
            ("64KiB", 65536),
            ("1M", 1 << 20),
        ] {
            assert_eq!(bytes(text).expect(text), expected);
        }
        for text in [
            "",
            "K",
            "8X",
            "-1",
            "1.5M",
            "99999999999999999999",
            "99999999999G",
        ] {
            let error = bytes(text).expect_err(text).to_string();
            assert!(error.contains("is no number of bytes"), "{error}");
        }
    }

    #[test]
    fn times_are_read() {
        for (text, seconds) in [("5", 5), ("5s", 5), ("5m", 300), ("2h", 7200)] {
            assert_eq!(time(text).expect(text), Duration::from_secs(seconds));
        }
        for (text, words) in [
            ("0", "not between"),
            ("1001h", "not between"),
            ("h", "is no time"),
            ("5d", "is no time"),
            ("99999999999999999h", "is no time"),
        ] {
            let error = time(text).expect_err(text).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn numbers_are_shown_with_their_units() {
        for (ns, text) in [
            (0, "0 ns"),
            (850, "850 ns"),
            (12_340, "12.3 us"),
            (4_560_000, "4.56 ms"),
            (2_000_000_000, "2.00 s"),
        ] {
            assert_eq!(show_ns(ns), text);
        }
        for (bytes, text) in [(8, "8 B"), (65536, "64 KiB"), (3 << 19, "1.50 MiB")] {
            assert_eq!(show_bytes(bytes), text);
        }
        assert_eq!(show_count(12_345.0), "12.3 k");
        assert_eq!(show_count(4.0), "4.00");
    }
}
