#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Builds the programs that run-h200-library.sh runs, with code by nvcc, and puts them into target/h200-library with the libraries
# that a machine with a GPU need not have (rdma-core's). No GPU is needed here:
#
#   ci/toolbox kernels/pack-h200-library.sh
set -euo pipefail
to=target/h200-library
programs=(ibgda-loopback ibgda-communicator ibgda-all-reduce ibgda-traffic)
NVCC=nvcc cargo build -q "${programs[@]/#/--package=}" --target-dir "$CARGO_TARGET_DIR/carried"
mkdir -p "$to"
for program in "${programs[@]}"; do
    strip -s -o "$to/$program" "$CARGO_TARGET_DIR/carried/debug/$program"
done
# Those of glibc and of the compiler are of the machine itself: libcuda is linked with them.
ldd "$to/ibgda-loopback" | awk '$3 ~ /lib(ibverbs|mlx5|nl)/ { print $3 }' | xargs -I '{}' cp -L -- '{}' "$to"
du -sh "$to"
# What of glibc they need.
objdump -T "$to"/* | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1
