// SPDX-License-Identifier: MIT OR Apache-2.0
//! `connectx explain`: any bytes as any structure, and any text as a dump.
#![no_main]

use connectx::explain::{explain, hex, kinds};
use connectx::objects::qp::Service;
use connectx_fuzz::bounds;

#[global_allocator]
static MEMORY: bounds::Counting = bounds::Counting;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let held = bounds::Held::watch();
    bounds::begin();
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    let names: Vec<&str> = kinds().map(|(name, _)| name).collect();
    let kind = names[usize::from(*first) % names.len()];
    for service in [Service::Rc, Service::Ud, Service::Xrc, Service::RegUmr] {
        if let Ok(explanation) = explain(kind, service, rest) {
            let text = explanation.to_string();
            assert!(
                !text.is_empty() || rest.is_empty(),
                "{kind}: nothing said of {} bytes",
                rest.len()
            );
        }
    }
    if let Ok(text) = std::str::from_utf8(rest) {
        if let Ok(bytes) = hex::parse(text) {
            assert!(bytes.len() <= text.len(), "more bytes than digits");
        }
    }
    bounds::end();
    assert!(held.most() < 16 << 20, "{} bytes held", held.most());
});
