#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Installs what the tests need, builds all in Release and runs every test once.
# --all adds: benchmarks are checked, layers, links, the single header, reference, packages, formatting, costs of
# including and of short paths, headers alone, nvcc, guards over threads by MinGW, suites over processes, MPI, Gloo, machines of threads and sockets, thread
# sanitizer by clang 19, and the other sanitizers by clang 14, the oldest, over the single header and NCCL, with frames
# drawn at random by TCP; what this machine cannot have is skipped and named. Each step says what the one before it
# took; the last lines are ctest's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source tests/cmake/install.sh
all=false
case "$#:${1-}" in
0:) ;;
1:--all) all=true ;;
*) echo "usage: bash tests/run.sh [--all]" >&2; exit 2 ;;
esac

current=start
began=0
step() { # name of the step that begins
    printf '\n== %s took %d s, %d s in all\n== %s\n' "$current" $((SECONDS - began)) $SECONDS "$*"
    began=$SECONDS
    current=$*
}
if command -v ccache >/dev/null; then # CMake reads the first, ccache the second: headers are precompiled
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_SLOPPINESS=pch_defines,time_macros
    echo "ccache compiles what it has not compiled before"
fi
trap 'status=$?; for job in $(jobs -p); do pkill -P "$job" || true; kill "$job" 2>/dev/null || true; done; [ $status -eq 0 ] || echo "tests/run.sh: failed in step: $current" >&2' EXIT
report() { # log: what failed and what was skipped, and every hundredth test
    tee "$1" | awk '/^ *Start +[0-9]+:/ { next } /Test +#[0-9]+:.* Passed / { if (++passed % 100 == 0) print "  " $1 " tests"; next } { print }'
}
build_and_test() { # preset [arguments of cmake]
    step "$*"
    cmake --preset "$@" | { grep "skipped: " || true; }
    cmake --build "build/$1"
    rejoin
    echo "the line of each test goes to build/$1/tests.log"
    local status=0
    ctest --test-dir "build/$1" --output-on-failure --no-tests=error -j $((3 * $(nproc))) | # half of their time is waiting
        report "build/$1/tests.log" || status=$?
    grep -h "^skipped: " "build/$1/Testing/Temporary/LastTest.log" | sort -u || true # why, which ctest does not print
    return $status
}

if $all; then
    echo "this takes an hour or more on two cores; when run again, only what has changed"
else
    echo "this takes some ten minutes on two cores, half of them to compile; when run again, only what has changed"
fi
waiting=()
beside() { # name, command...: it runs beside the steps that follow, on a core that they may leave idle
    local log="build/${1//[^a-z]/_}.log"
    mkdir -p build
    ("${@:2}") >"$log" 2>&1 &
    waiting+=("$! $log $1")
}
rejoin() { # waits for those, and prints what they said
    local pid log name status
    for one in ${waiting[@]+"${waiting[@]}"}; do
        read -r pid log name <<<"$one"
        printf '\n== beside these steps: %s\n' "$name"
        status=0
        wait "$pid" || status=$?
        cat "$log"
        if [ $status -ne 0 ]; then
            current=$name
            return $status
        fi
    done
    waiting=()
}
# range-v3, libtorch and mdspan do not compile in a .cu file, and engines may be missing or warn there.
headers_with_nvcc() {
    if ! command -v nvcc >/dev/null; then
        echo "skipped: nvcc is not installed"
        return
    fi
    mkdir -p build/nvcc
    left_out=(! -path '*/interop/range_v3.hpp' ! -path '*/interop/torch*.hpp')
    for engine in eigen armadillo xtensor mdspan; do
        left_out+=(! -path "*/interop/$engine.hpp")
    done
    if ! echo '#include <nccl.h>' | nvcc -x cu -E - >/dev/null 2>&1; then
        echo "skipped: NCCL's header is not installed, so its communicators are not compiled"
        left_out+=(! -name 'nccl*.hpp' ! -path '*/nccl/*' ! -name 'captured_step.hpp')
    fi
    mpi=(-DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX)
    for word in $(mpicxx.openmpi -show 2>/dev/null); do # Debian has its headers in a folder of their own
        [[ $word != -I* ]] || mpi+=(-isystem "${word#-I}")
    done
    if ! echo '#include <mpi.h>' | nvcc "${mpi[@]}" -x cu -E - >/dev/null 2>&1; then
        echo "skipped: nvcc does not find MPI's header, so its communicator is not compiled"
        left_out+=(! -name 'mpi.hpp' ! -path '*/mpi/*')
    fi
    if ! [ -e /usr/include/gloo/context.h ]; then
        echo "skipped: Gloo's headers are not installed, so its communicator is not compiled"
        left_out+=(! -name 'gloo.hpp' ! -path '*/gloo/*')
    fi
    find include -name '*.hpp' "${left_out[@]}" -printf '#include <%P>\n' | sort >build/nvcc/all.cu
    nvcc -std=c++20 -Iinclude "${mpi[@]}" -Werror all-warnings -c build/nvcc/all.cu -o build/nvcc/all.o
}
cost_of_including() {
    if command -v clang++-19 >/dev/null; then
        python3 tests/budget/check_budget.py
    fi
}
instructions_of_short_paths() { # which are counted, so it does not matter what runs beside them
    if command -v valgrind >/dev/null; then
        python3 tests/budget/check_instructions.py
    fi
}

step "install"
install ca-certificates cmake ninja-build g++ python3 doctest-dev librapidcheck-dev libcli11-dev \
    libbenchmark-dev librange-v3-dev nlohmann-json3-dev
install_optional /usr/include/eigen3/Eigen/Core libeigen3-dev || true # engines whose types have adapters
install_optional /usr/include/armadillo libarmadillo-dev || true
install_optional /usr/include/xtensor/xtensor.hpp libxtensor-dev || true
install_optional /usr/sbin/ip iproute2 || true # a link between two network namespaces
if $all; then # large, and a minute of compiling
    install_optional /usr/include/torch/csrc/api/include/torch/torch.h libtorch-dev || true
    install_optional /usr/include/dlib/dnn.h libdlib-dev || true
fi
if $all; then
    install doxygen build-essential debhelper lintian python3-venv
    install_optional mpirun.openmpi openmpi-bin libopenmpi-dev || true
    install_optional mpirun.mpich mpich libmpich-dev || true
    install_optional /usr/include/gloo/context.h libgloo-dev || true
    install_optional clang-format-19 clang-format-19 || true
    install_optional valgrind valgrind || true
    install_optional clang++-19 clang-19 libclang-rt-19-dev || true
    install_optional /usr/lib/llvm-19/include/c++/v1/mdspan libc++-19-dev libc++abi-19-dev || true
    install_optional clang++-14 clang-14 libclang-rt-14-dev || true
    step "layers and their picture"
    python3 tests/layers.py
    step "links of the pages"
    python3 tests/links.py
    step "single header is up to date"
    python3 single_include/amalgamate.py --check
    step "reference"
    python3 tests/reference/build.py
    step "the scripts fail when they should"
    python3 tests/scripts_test.py
    beside "headers together, with nvcc" headers_with_nvcc
    beside "cost of including, by clang-19" cost_of_including
    beside "instructions of short paths, by g++" instructions_of_short_paths
    step "formatting"
    if command -v clang-format-19 >/dev/null; then
        find include tests examples -name "*.[hci]pp" -print0 | xargs -0 clang-format-19 --dry-run -Werror
    fi
    step "without Linux, by MinGW"
    bash tests/mingw.sh || [ $? -eq 77 ]
    rejoin
    step "headers alone, with g++"
    cmake --preset release -DCMAKE_CXX_FLAGS=--param=ggc-min-heapsize=1000000 >/dev/null # as joinable_dev has it
    cmake --build build/release --target all_verify_interface_header_sets joinable_nccl_headers
    install_by_pip build/conan conan '==2.*' || true
    beside "packages" env "PATH=$PATH:$root/build/conan/bin" python3 tests/packaging/build.py
    if command -v nvcc >/dev/null; then # whose last file takes one core for a while
        build_and_test cuda
    fi
    oldest=g++
    if command -v clang++-19 >/dev/null; then
        oldest=clang++-19
        build_and_test tsan
    fi
    if command -v clang++-14 >/dev/null; then
        oldest=clang++-14
    fi
    build_and_test asan-single-include -DCMAKE_CXX_COMPILER=$oldest
    beside "frames that no rank sends, for 20 s" \
        build/asan-single-include/tests/fuzz_tcp_frames --seconds 20 --seed "$(date +%s)"
fi
# With -O0 the compiler takes half of the time for tests. They link the library compiled once, which keeps them fast.
options=(-DJOINABLE_TEST_OPTIONS=-O0 -DJOINABLE_BUILD_BENCHMARKS=$all)
if $all; then # examples as users have them; nobody runs the benchmarks here, so they are checked alone
    options+=(-DJOINABLE_CHECK_BENCHMARKS=ON "-DJOINABLE_TEST_RANKS=threads;processes;mpi;gloo;machines;sockets")
else
    options+=("-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" -DJOINABLE_TEST_RANKS=threads)
fi
build_and_test release "${options[@]}"
