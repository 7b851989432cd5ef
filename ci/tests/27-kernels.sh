# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The device header under the compilers that only ci/toolbox has. No GPU is needed.

while IFS= read -r path; do
    name=${path#kernels/}
    check "kernels::nvcc::${name%.cu}" "$IBGDA_SRC/ci/toolbox" kernels/tests/nvcc "$path"
done < <(cd "$IBGDA_SRC" && git ls-files -- 'kernels/*.cu')

kernels_sass() {
    "$IBGDA_SRC/ci/toolbox" kernels/tests/sass >"$CHECK_DIR/sass" || {
        cat -- "$CHECK_DIR/sass"
        return 1
    }
}

check kernels::sass kernels_sass
[[ ! -s $CHECK_DIR/sass ]] || sed 's/^/  /' "$CHECK_DIR/sass"

suite kernels::litmus "$IBGDA_SRC/ci/toolbox" kernels/tests/litmus/run
suite kernels::threads "$IBGDA_SRC/ci/enter" kernels/tests/threads/run
suite kernels::thread_sanitizer "$IBGDA_SRC/ci/enter" kernels/tests/threads/run -fsanitize=thread
