# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Tests that need no VM: pure logic, the model in a process, the device header on CPU threads.

suite host::cargo-test "$IBGDA_SRC/ci/enter" cargo test -q --workspace --exclude ibgda-vmtests --no-fail-fast
check host::python-layout "$IBGDA_SRC/ci/enter" python3 -B examples/python-ioctl/layout_test.py
