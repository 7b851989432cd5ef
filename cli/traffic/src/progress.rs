// SPDX-License-Identifier: MIT OR Apache-2.0
//! A line that tells how far a command is: on a terminal alone.

use indicatif::{ProgressBar, ProgressStyle};

/// A line for `length` steps; with `template` as indicatif has them.
pub fn line(length: u64, template: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(length);
    bar.set_style(
        ProgressStyle::with_template(template)
            .expect("a template of this program's")
            .progress_chars("=> "),
    );
    bar
}

/// For a number of requests.
pub const REQUESTS: &str = "{msg:24} [{bar:40}] {pos}/{len} {per_sec}, {eta} left";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_sound() {
        for template in [REQUESTS, crate::stress::PROGRESS] {
            line(10, template).finish_and_clear();
        }
    }
}
