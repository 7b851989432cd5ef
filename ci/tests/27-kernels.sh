# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The device header under the compilers that only ci/toolbox has. No GPU is needed.

while IFS= read -r path; do
    check "kernels::nvcc::${path%.cu}" "$IBGDA_SRC/ci/toolbox" kernels/tests/nvcc "$path"
done < <(cd "$IBGDA_SRC" && git ls-files -- '*.cu')

kernels_sass() {
    "$IBGDA_SRC/ci/toolbox" kernels/tests/sass >"$CHECK_DIR/sass" || {
        cat -- "$CHECK_DIR/sass"
        return 1
    }
}

check kernels::sass kernels_sass
[[ ! -s $CHECK_DIR/sass ]] || sed 's/^/  /' "$CHECK_DIR/sass"

# The kernels that are loaded, compiled at build time. A target directory of its own: the others are built without nvcc.
suite kernels::image "$IBGDA_SRC/ci/toolbox" env NVCC=nvcc cargo test -q -p ibgda-device --features cuda \
    --target-dir /target/carried

suite kernels::litmus "$IBGDA_SRC/ci/toolbox" kernels/tests/litmus/run
for path in "$IBGDA_SRC"/kernels/tests/threads/*.cpp; do
    path=${path##*/}
    check "kernels::threads::${path%.cpp}" "$IBGDA_SRC/ci/enter" kernels/tests/threads/run "$path"
    check "kernels::thread_sanitizer::${path%.cpp}" "$IBGDA_SRC/ci/enter" kernels/tests/threads/run "$path" -fsanitize=thread
done

# Of the workspace, so that what it depends on is what host::cargo-test has built.
suite kernels::nvrtc "$IBGDA_SRC/ci/toolbox" cargo test -q --workspace --exclude ibgda-vmtests \
    --features ibgda-test-kernels/nvrtc,ibgda-communicator/nvrtc --test nvrtc
