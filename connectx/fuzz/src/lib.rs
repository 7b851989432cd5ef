// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzzing of the model. A program of steps ([`program`]) is what a guest does; [`mutate`] makes new ones of old ones;
//! [`harness`] runs one in a process and checks what must hold whatever the guest does; [`bounds`] counts work and memory.

pub mod bounds;
pub mod harness;
pub mod mutate;
pub mod program;

/// A fuzz target that runs programs of the given kinds of steps on a machine that is prepared in a way.
#[macro_export]
macro_rules! program_target {
    ($prepare:path, $kinds:expr) => {
        #[global_allocator]
        static MEMORY: $crate::bounds::Counting = $crate::bounds::Counting;

        libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
            $crate::mutate::mutate(data, size, max_size, seed, $kinds)
        });

        libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            $crate::harness::run($prepare(), data, $kinds);
        });
    };
}
