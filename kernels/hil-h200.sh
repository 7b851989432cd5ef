#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Hardware in the loop (docs/hil.md) on a machine with an NVIDIA GPU and CUDA's NVRTC: boots the VM of a bundle, and lets the
# real GPU outside it drive the QPs that the stock mlx5 driver makes inside, by doorbell pages that the real ibgda.ko grants.
# As root:
#
#   kernels/hil-h200.sh BUNDLE.tar.xz LOGDIR [OPTION of ibgda-hil…]
#
# The bundle is made on any x86-64 machine by
#
#   ci/bundle hil.tar.xz ibgda-gpu-agent ibgda-hil
#
# Prints a numbered line for each part, with its result; the last line is "all parts passed", and the exit status 0. Takes
# less than 8 minutes with 16 processors: 100 resets of the NIC are most of it.
set -euo pipefail
(($# >= 2)) || {
    sed -n 's/^# \{0,1\}//; 3,14p' "$0" >&2
    exit 125
}
bundle=$(readlink -f -- "$1")
mkdir -p -- "$2"
logs=$(cd -- "$2" && pwd -P)
shift 2
(($#)) || set -- --losses 100

# Short: sockets lie below it.
dir=$(mktemp -d /tmp/hil.XXXXXX)
agent='' vm=''
# The VM ends, with all its processes, before what it uses.
cleanup() {
    [[ -z $vm ]] || { kill -- "$vm" && wait "$vm"; } 2>/dev/null || true
    [[ -z $agent ]] || kill -- "$agent" 2>/dev/null || true
    rm -rf --one-file-system -- "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
tar xf "$bundle" -C "$dir"
root=$dir/ibgda-bundle
mkdir "$dir/log"

# The agent runs here, with the bundle's own libraries and the driver's.
libraries=$root/usr/lib/x86_64-linux-gnu
cuda=$(ldconfig -p | sed -n 's|.* => \(.*\)/libcuda\.so\.1$|\1|p' | head -n 1)
nvrtc=$(ldconfig -p | sed -n 's|.* => \(.*\)/libnvrtc\.so.*|\1|p' | head -n 1)
path=$libraries:${nvrtc:-${CUDA_HOME:-/usr/local/cuda}/lib64}${cuda:+:$cuda}

nvidia-smi --query-gpu=name,driver_version,pci.bus_id --format=csv,noheader
CUDA_MODULE_LOADING=EAGER "$libraries/ld-linux-x86-64.so.2" --library-path "$path" \
    "$root/opt/ibgda/bin/ibgda-gpu-agent" --on cuda --guest "$dir/log/gpu.sock" --model "$dir/log/ctl.sock" &
agent=$!

status=0
# Waited for, since a signal interrupts a wait, but not a command.
timeout -k 20 460 "$root/vm" "$dir/log" --nics 2 --gpus 1 --module --outside-gpu wait --timeout 440 -- ibgda-hil "$@" &
vm=$!
wait "$vm" || status=$?
vm=''
cp -- "$dir"/log/*.{log,jsonl,stderr} "$logs" 2>/dev/null || true
if [[ -s $dir/log/kernel-problems.log ]]; then
    cat -- "$dir/log/kernel-problems.log"
    ((status)) || status=1
fi
# It ends with the VM.
wait "$agent" || { ((status)) || status=1; }
agent=''
echo "took $SECONDS s"
exit "$status"
