// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines of any content to the control socket: each is answered by one object, and the model lives.
#![no_main]

use std::sync::Arc;

use connectx::bus::Bus;
use connectx::ctl::Model;
use connectx::hca::{Hca, HcaConfig};
use connectx::log::Referee;
use connectx::platform::Function;
use connectx::vfio::Card;
use connectx::wire::Fabric;
use connectx_fuzz::bounds;

#[global_allocator]
static MEMORY: bounds::Counting = bounds::Counting;

fn model() -> Model {
    let referee = Referee::in_memory();
    let fabric = Fabric::polled(referee.clone());
    let bus = Bus::new();
    let devices = (0..2)
        .map(|index| {
            let function: Arc<dyn Function> =
                Arc::new(Hca::new(&fabric, HcaConfig::numbered(index)));
            Card::new(function, index, &bus)
        })
        .collect();
    Model { devices, referee }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let model = model();
    let held = bounds::Held::watch();
    for line in data.split(|byte| *byte == b'\n') {
        bounds::begin();
        if let Some(answer) = model.answer(line) {
            assert!(answer.is_object(), "{answer}");
            assert!(serde_json_text(&answer).len() < 1 << 20);
        }
        bounds::end();
    }
    assert!(held.most() < 16 << 20, "{} bytes held", held.most());
});

fn serde_json_text(answer: &impl std::fmt::Display) -> String {
    answer.to_string()
}
