#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# The device header on a real GPU, against the model in the same process. Needs nvcc and a GPU; CUDA_ARCH is its
# architecture (default 90). The argument is libconnectx.a, built on any x86-64 machine by
#   cargo rustc -p connectx --lib --release --crate-type staticlib
set -euo pipefail
library=$(readlink -f -- "${1:?needs the path of libconnectx.a}")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
dir=$(mktemp -d)
trap 'rm -rf -- "$dir"' EXIT
for source in tests/gpu/{main,exclusive,modes,operations}.cu; do
    nvcc -O3 -std=c++17 -lineinfo -gencode="arch=compute_${CUDA_ARCH:-90},code=sm_${CUDA_ARCH:-90}" \
        -Iinclude -I../connectx/include -c "$source" -o "$dir/$(basename "$source" .cu).o" &
done
wait
nvcc "$dir"/*.o "$library" -lpthread -ldl -lm -o "$dir/inproc"
timeout 300 "$dir/inproc"
