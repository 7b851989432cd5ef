#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Builds the bench: build.sh OUTPUT [nvcc's arguments…]. NVCC is the compiler (default nvcc), CUDA_ARCH the architecture
# (default 90). With nvcc from pip, give -L and the folder of its libcudart_static.a: nvcc looks for lib64, pip has lib.
set -euo pipefail
output=$(realpath -m -- "${1:?needs the name of the program to make}")
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
exec "${NVCC:-nvcc}" -O3 -DNDEBUG -std=c++17 -Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas \
    -gencode="arch=compute_${CUDA_ARCH:-90},code=sm_${CUDA_ARCH:-90}" \
    -I../include ./*.cu "$@" -lpthread -ldl -lrt -o "$output"
