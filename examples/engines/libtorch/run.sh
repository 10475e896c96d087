#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Installs what this example needs, builds it, and runs it with the arguments given. For another libtorch than
# Debian's set TORCH_ROOT to its folder, as to site-packages/torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
source "$root/tests/cmake/install.sh"
install cmake ninja-build g++ libcli11-dev
if [ -z "${TORCH_ROOT-}" ]; then
    install libtorch-dev
fi

echo "compiling, which takes about a minute"
cmake -S "$root" -B "$root/build/examples" -G Ninja -DCMAKE_BUILD_TYPE=Release -DJOINABLE_TORCH_ROOT="${TORCH_ROOT-}" \
    -DJOINABLE_BUILD_TESTS=OFF -DJOINABLE_BUILD_BENCHMARKS=OFF >/dev/null
cmake --build "$root/build/examples" --target train_libtorch
exec "$root/build/examples/examples/train_libtorch" "$@"
