# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# rdma-core's own Python tests, in the guest, all of them: what each does is compared with docs/pyverbs.md.

suite vm::pyverbs vm_clean --timeout 1800 --nics 2 --gpus 0 --no-ibgda -- /src/ci/pyverbs/run
