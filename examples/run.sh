#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Installs what the main example needs, builds it, and runs it with the arguments given.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tests/cmake/install.sh"
install cmake ninja-build g++ libcli11-dev

# A folder of its own: that of the tests is compiled with other options.
build=$root/build/examples
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DJOINABLE_BUILD_TESTS=OFF -DJOINABLE_BUILD_BENCHMARKS=OFF >/dev/null
[ -e "$build/examples/train_text" ] || echo "compiles the example, 9 files, about a minute and a half on two cores, once; then it trains for some seconds"
cmake --build "$build" --target train_text
exec "$build/examples/train_text" "$@"
