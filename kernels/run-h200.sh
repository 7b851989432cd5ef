#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# The device header on a real GPU: correctness against the model in the same process, compute-sanitizer over a short form of
# it, then the bench. Needs nvcc and a GPU; CUDA_ARCH is its architecture (default 90). The argument is libconnectx.a, built
# on any x86-64 machine by
#   cargo rustc -p connectx --lib --release --crate-type staticlib
# More arguments go to the bench (bench/main.cu).
set -euo pipefail
library=$(readlink -f -- "${1:?needs the path of libconnectx.a}")
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
dir=$(mktemp -d)
trap 'rm -rf -- "$dir"' EXIT
arch=${CUDA_ARCH:-90}

# compile FOLDER: every source of it, at the same time.
compile() {
    local folder=$1 source jobs=()
    mkdir -p "$dir/$folder"
    for source in "$folder"/*.cu; do
        nvcc -O3 -std=c++17 -lineinfo -gencode="arch=compute_$arch,code=sm_$arch" -Iinclude -I../connectx/include \
            -c "$source" -o "$dir/$folder/$(basename "$source" .cu).o" &
        jobs+=($!)
    done
    for source in "${jobs[@]}"; do
        wait "$source"
    done
}

echo "== correctness"
compile tests/gpu
nvcc "$dir"/tests/gpu/*.o "$library" -lpthread -ldl -lm -o "$dir/inproc"
timeout 100 "$dir/inproc"

for tool in memcheck initcheck synccheck; do
    echo "== compute-sanitizer $tool"
    timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 9 "$dir/inproc" quick >"$dir/$tool.log" || {
        tail -n 60 "$dir/$tool.log"
        exit 1
    }
    grep -E 'passed,|ERROR SUMMARY' "$dir/$tool.log"
done

echo "== bench"
compile bench
nvcc "$dir"/bench/*.o -lpthread -o "$dir/bench/bench"
timeout 200 "$dir/bench/bench" "$@"
