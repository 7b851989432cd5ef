#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# The library on a real GPU, through its public calls alone, with the model in the process for a NIC: transfers by kernels of
# nvcc and of NVRTC, errors, loss, memory registration, dma-bufs, NVIDIA's gate. Needs NVIDIA's driver and CUDA's NVRTC.
#
# The argument is the folder that pack-h200-library.sh makes on any x86-64 machine, target/h200-library by default.
#
# Each step prints a numbered line with its result; the last line is "all steps passed", and the exit status 0. "not tried"
# in a line says why a step was left out.
set -euo pipefail
folder=$(readlink -f -- "${1:-$(dirname -- "${BASH_SOURCE[0]}")/../target/h200-library}")
program=$folder/ibgda-loopback
[[ -x $program ]] || {
    printf '%s is missing: ci/toolbox kernels/pack-h200-library.sh makes it\n' "$program" >&2
    exit 1
}
export LD_LIBRARY_PATH=$folder:${CUDA_HOME:-/usr/local/cuda}/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

echo "== library"
nvidia-smi --query-gpu=name,driver_version,pci.bus_id --format=csv,noheader
timeout 120 "$program" --on gpu

echo "== library, CPU threads"
timeout 60 "$program" --on cpu | tail -n 1

# Without CAP_SYS_ADMIN, as most users are: the same, and NVIDIA's gate is shut.
if ((EUID == 0)) && command -v setpriv >/dev/null; then
    echo "== library, without capabilities"
    copy=$(mktemp -d)
    trap 'rm -rf -- "$copy"' EXIT
    cp -- "$folder"/* "$copy"
    chmod 755 "$copy" "$copy"/*
    export LD_LIBRARY_PATH=$copy:$LD_LIBRARY_PATH
    timeout 120 setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all \
        "$copy/ibgda-loopback" --on gpu
fi
