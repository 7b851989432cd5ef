#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# The library on a real GPU, through its public calls alone, with the model in the process for a NIC: transfers by kernels of
# nvcc and of NVRTC, errors, loss, memory registration, dma-bufs, NVIDIA's gate. Needs NVIDIA's driver and CUDA's NVRTC.
#
# The argument is the folder that pack-h200-library.sh makes on any x86-64 machine, target/h200-library by default.
#
# Each step prints a numbered line with its result; the last is "all steps passed". "not tried" in a line says why a step was
# left out. Then the ranks of examples/communicator-rust (code by NVRTC) and examples/all-reduce (by nvcc), all on one GPU,
# each kernel with its own stream, and ibgda bench and stress (cli/traffic, by nvcc). The last line of all is
# "h200-library: passed", and the exit status 0; whatever fails ends the script with its reason, and a status that is not 0.
set -euo pipefail
folder=$(readlink -f -- "${1:-$(dirname -- "${BASH_SOURCE[0]}")/../target/h200-library}")
program=$folder/ibgda-loopback
for path in "$folder"/ibgda-{loopback,communicator,all-reduce,traffic}; do
    [[ -x $path ]] || {
        printf '%s is missing: ci/toolbox kernels/pack-h200-library.sh makes it\n' "$path" >&2
        exit 1
    }
done
export LD_LIBRARY_PATH=$folder:${CUDA_HOME:-/usr/local/cuda}/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

echo "== library"
nvidia-smi --query-gpu=name,driver_version,pci.bus_id --format=csv,noheader
timeout 120 "$program" --on gpu

echo "== library, CPU threads"
timeout 60 "$program" --on cpu | tail -n 1

# Kernels of several ranks wait for each other: none may be loaded when another already runs.
export CUDA_MODULE_LOADING=EAGER
ranks() {
    local name=$1
    shift
    echo "== $name $*"
    timeout 120 "$folder/ibgda-$name" --route loopback --threads --on gpu "$@"
}
for count in 2 4; do
    ranks communicator --ranks "$count" --rounds 50
    ranks all-reduce --ranks "$count" --elements 1000003 --chunk 16384
    # One slot, of which each is waited for; segments of one element.
    ranks all-reduce --ranks "$count" --elements 10000 --chunk 64 --slots 1
    ranks all-reduce --ranks "$count" --elements 5 --chunk 1
done
echo "== all-reduce, rank 1 with a wrong rkey: the others name it"
status=0
said=$(ranks all-reduce --ranks 4 --fail 1@3 2>&1) || status=$?
printf '%s\n' "$said"
((status == 1)) || { printf 'FAILED: status %s, should be 1\n' "$status" && exit 1; }
for rank in 0 2 3; do
    grep -q "^rank $rank: rank 1 is gone: all_reduce_ring, .*IBGDA_ERR_REMOTE_ACCESS" <<<"$said" || {
        printf 'FAILED: rank %s does not say who failed, and why\n' "$rank"
        exit 1
    }
done

echo "== ibgda bench"
timeout 120 "$folder/ibgda-traffic" bench --route loopback --on gpu --size 8,4096 --count 5000
echo "== ibgda stress"
timeout 120 "$folder/ibgda-traffic" stress --route loopback --on gpu --for 5s

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
echo "h200-library: passed"
