#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Installs what this example needs, builds it, makes its data, and runs it with the arguments given; or, if the first one
# is "compare", compare.py with the others, by $PYTHON (python3). For another libtorch than Debian's set TORCH_ROOT to its
# folder, as to site-packages/torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
source "$root/tests/cmake/install.sh"
install cmake ninja-build g++ libcli11-dev python3
if [ -z "${TORCH_ROOT-}" ]; then
    install libtorch-dev
fi

echo "compiling, which takes about a minute"
# -U: TORCH_ROOT may be another one than last time.
cmake -S "$root" -B "$root/build/examples" -G Ninja -DCMAKE_BUILD_TYPE=Release -U "JOINABLE_TORCH_*" \
    -DJOINABLE_TORCH_ROOT="${TORCH_ROOT-}" -DJOINABLE_BUILD_TESTS=OFF -DJOINABLE_BUILD_BENCHMARKS=OFF >/dev/null
cmake --build "$root/build/examples" --target train_libtorch
here=$root/examples/engines/libtorch
program=$root/build/examples/examples/train_libtorch
data=$root/build/examples/libtorch_data
python3 "$here/data.py" "$data"
if [ "${1-}" = compare ]; then
    exec "${PYTHON:-python3}" "$here/compare.py" "$program" "$data" "${@:2}"
fi
exec "$program" "$data" "$@"
