#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# On a machine with an NVIDIA GPU, proves what the other tests can only show over doubles of CUDA and NCCL, and
# measures it: bash tests/gpu.sh, at most 8 minutes, no network. Without a GPU it says so and ends with 0; --build
# compiles all the same. What is missing here is named. Ends with 1 when something fails, an aim that is missed is
# printed only. Several ranks share one GPU where there are too few; then they take turns, and what NCCL does is slow.
#
# CUDA_HOME and NCCL_HOME say where the CUDA Toolkit and NCCL are, CXX names the compiler.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
case "$#:${1-}" in
0: | 1:--build) ;;
*) echo "usage: bash tests/gpu.sh [--build]" >&2; exit 2 ;;
esac

seconds_in_all=470
out=build/gpu
failures=()
skipped=()
current=
section() { # name of the one that begins, after the verdict on the one that ends
    if [ -n "$current" ] && [ ${#failures[@]} -gt "$failed_before" ]; then
        echo "-- $current: FAIL"
    elif [ -n "$current" ]; then
        echo "-- $current: $([ "$passed" -gt 0 ] && echo PASS || echo nothing ran)"
    fi
    printf '\n== %s (%d s so far)\n' "$*" $SECONDS
    current=$*
    failed_before=${#failures[@]}
    passed=0
}
skip() { echo "skipped: $*"; skipped+=("${*%%,*}"); }
# Most seconds, a name, a command. Its output is shown; a hang ends.
run() {
    local limit=$1 name=$2 left=$((seconds_in_all - SECONDS)) status
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -le 0 ]; then
        echo "$name: FAIL, no time is left"
        failures+=("$name")
        return 1
    fi
    timeout -k 5 "$limit" "$@"
    status=$?
    if [ $status -eq 0 ]; then
        echo "$name: PASS"
        passed=$((passed + 1))
        return 0
    fi
    [ $status -ge 124 ] && echo "$name took longer than $limit s, or was killed"
    echo "$name: FAIL ($status)"
    failures+=("$name")
    return 1
}
finish() {
    section "verdict"
    [ ${#skipped[@]} -eq 0 ] || printf 'skipped: %s\n' "${skipped[@]}"
    if [ ${#failures[@]} -ne 0 ]; then
        printf 'FAIL: %s\n' "${failures[@]}"
        exit 1
    fi
    echo "PASS: ${1-everything that ran}"
    exit 0
}

printf '== what is here\n'
has_gpu=false
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep '^GPU'; then
    has_gpu=true
    nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader
elif [ "${1-}" != --build ]; then
    skip "there is no NVIDIA GPU here (nvidia-smi -L names none), so nothing can be run on one"
    exit 0
fi
cuda=${CUDA_HOME:-/usr/local/cuda}
PATH=$PATH:$cuda/bin
if ! command -v nvcc >/dev/null; then
    skip "nvcc is not here (CUDA_HOME=$cuda), so nothing can be built"
    exit 0
fi
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
cxx=${CXX:-g++}
if ! command -v "$cxx" >/dev/null; then
    skip "$cxx is not here (CXX), so nothing can be built"
    exit 0
fi
includes=(-Iinclude -Itests)
libraries=()
for folder in ${NCCL_HOME:+"$NCCL_HOME"} "$cuda" "$cuda"/targets/*-linux; do
    [ -d "$folder/include" ] && includes+=(-isystem "$folder/include")
    for lib in "$folder/lib64" "$folder/lib"; do
        [ -d "$lib" ] && libraries+=("-L$lib" "-Wl,-rpath,$lib")
    done
done
has_header() { echo "#include <$1>" | "$cxx" -std=c++20 "${includes[@]}" -x c++ -E - >/dev/null 2>&1; }
nvcc --version | tail -n 2 | head -n 1
"$cxx" --version | head -n 1

section "build"
mkdir -p "$out/objects"
compile() { # object, compiler and its arguments
    local object=$1
    shift
    timeout -k 5 240 "$@" -std=c++20 -O2 "${includes[@]}" -c -o "$out/objects/$object.o" >"$out/objects/$object.log" 2>&1
    echo $? >"$out/objects/$object.status"
}
link() { # program, objects, other libraries as -l...
    local program=$1 object others=()
    while [[ ${*: -1} == -l* ]]; do
        others+=("${*: -1}")
        set -- "${@:1:$#-1}"
    done
    shift
    for object in "$@"; do
        if [ "$(cat "$out/objects/$object.status" 2>/dev/null)" != 0 ]; then
            tail -n 20 "$out/objects/$object.log"
            echo "build of $program: FAIL"
            failures+=("build of $program")
            return 1
        fi
    done
    local objects=("${@/#/$out/objects/}")
    run 60 "build of $program" "$cxx" "${objects[@]/%/.o}" "${libraries[@]}" "${others[@]}" -lnccl -lcudart -pthread -o "$out/$program"
}
rm -f "$out"/objects/* "$out"/{cuda_kernels,real_nccl,ranks,perceptron,counts,train_text,exposed_*}
nvcc=(nvcc -ccbin "$cxx")
$has_gpu && nvcc+=(-arch=native)
programs=()
if has_header doctest/doctest.h; then
    programs+=("cuda_kernels kernel_test doctest")
    compile kernel_test "${nvcc[@]}" tests/joinable/device/cuda/kernels.test.cu &
    compile doctest "$cxx" tests/support/main.cpp &
else
    skip "doctest is not here, so test_cuda_kernels is not built"
fi
if has_header nccl.h; then
    programs+=("real_nccl real_nccl" "ranks ranks kernels")
    compile real_nccl "$cxx" tests/consumer/nccl.cpp &
    compile ranks "$cxx" tests/gpu/main.cpp &
    compile kernels "${nvcc[@]}" tests/gpu/kernels.cu &
    if has_header cublas_v2.h; then
        programs+=("perceptron perceptron kernels -lcublas")
        compile perceptron "$cxx" tests/gpu/perceptron.cpp &
    else
        skip "cuBLAS's header is not here, so no perceptron is measured beside PyTorch's"
    fi
    if has_header cupti.h; then
        programs+=("counts counts kernels -lcupti")
        compile counts "$cxx" tests/gpu/counts.cpp &
    else
        skip "CUPTI's header is not here, so a guard's work on the GPU is not counted"
    fi
    if has_header CLI/CLI.hpp; then
        programs+=("train_text train_text engine over_machines over_tcp without_gloo without_mpi with_cuda")
        compile train_text "$cxx" "-DJOINABLE_SOURCE_DIR=\"$PWD\"" examples/train_text/main.cpp &
        compile engine "$cxx" examples/train_text/engine.cpp &
        compile over_machines "$cxx" examples/train_text/over_machines.cpp &
        compile over_tcp "$cxx" examples/train_text/over_tcp.cpp &
        compile without_gloo "$cxx" examples/train_text/without_gloo.cpp &
        compile without_mpi "$cxx" examples/train_text/without_mpi.cpp &
        compile with_cuda "${nvcc[@]}" --fmad=false examples/train_text/with_cuda.cu &
    else
        skip "CLI11 is not here, so the example train_text is not built"
    fi
else
    skip "NCCL's header is not here (NCCL_HOME), so only the kernels are tested"
fi
wait
for program in "${programs[@]}"; do
    read -ra words <<<"$program"
    link "${words[0]}" "${words[@]:1}"
done
$has_gpu || finish "everything compiles and links; without a GPU nothing ran"

export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 # ranks of one machine, which seem to be on several
texts=$out/texts
mkdir -p "$texts"
for text in a:900 b:300 c:600 d:200; do
    printf "${text%%:*} text; %.0s" $(seq "${text#*:}") >"$texts/${text%%:*}.txt"
done
train=("$out/train_text" --device cuda --epochs 1 --bucket-bytes 8192 "$texts/a.txt")
# A training with each sharding; all print one digest.
same_digest=(bash -c '
    for sharding in none optimizer gradients parameters; do
        said=$("$@" --sharding $sharding) || { echo "$said"; exit 1; }
        digest=$(sed -n "s/^digest of parameters *//p" <<<"$said")
        echo "$sharding: $digest"
        [ -n "$digest" ] && [ "$digest" = "${first=$digest}" ] || exit 1
    done' -)
section "tests on a GPU"
[ -x "$out/cuda_kernels" ] && run 60 "kernels" "$out/cuda_kernels" --no-skip
# What this program says where it finds no GPU is no failure to it.
has_captured=(bash -c 'said=$("$@") || { echo "$said"; exit 1; }; echo "$said"; grep -q "its captured average" <<<"$said"' -)
[ -x "$out/real_nccl" ] && run 60 "NCCL of one rank, and a captured step" "${has_captured[@]}" "$out/real_nccl"
if [ -x "$out/train_text" ]; then
    run 60 "train_text, a thread" "${train[@]}" "$texts/d.txt" --ranks 1
    run 90 "train_text, 3 processes with uneven texts" "${train[@]}" "$texts"/{b,c,d}.txt --ranks 3 --communicator process
    for optimizer in sgd adamw; do
        run 90 "train_text, $optimizer sharded in four ways" "${same_digest[@]}" \
            "${train[@]}" "$texts"/{b,d}.txt --ranks 2 --communicator process --optimizer "$optimizer"
    done
fi

section "the same under compute-sanitizer"
if command -v compute-sanitizer >/dev/null; then
    checked=(compute-sanitizer --error-exitcode 9 --report-api-errors no --target-processes all)
    [ -x "$out/cuda_kernels" ] && run 60 "kernels, memcheck" "${checked[@]}" "$out/cuda_kernels" --no-skip
    [ -x "$out/cuda_kernels" ] && run 60 "kernels, racecheck" "${checked[@]}" --tool racecheck "$out/cuda_kernels" --no-skip
    [ -x "$out/real_nccl" ] && run 60 "NCCL of one rank, memcheck" "${has_captured[@]}" "${checked[@]}" "$out/real_nccl"
    [ -x "$out/train_text" ] && run 60 "train_text, memcheck" "${checked[@]}" "${train[@]}" "$texts/d.txt" --ranks 1
else
    skip "compute-sanitizer is not here"
fi

if [ -x "$out/ranks" ]; then
    section "several ranks: sums, uneven inputs, a rank that fails"
    for ranks in 1 2 4; do
        run 60 "checks over $ranks ranks" "$out/ranks" check "$ranks"
        run 60 "operations of $ranks ranks" "$out/ranks" operations "$ranks"
    done
    if [ -x "$out/counts" ]; then
        section "what a guard adds to the GPU's work"
        for ranks in 1 2; do
            run 40 "counts over $ranks ranks" "$out/counts" "$ranks"
        done
    fi
    section "measurements: medians of 11 rounds, the layer below and ours in turn"
    for ranks in 1 2; do
        run 100 "measurements over $ranks ranks" "$out/ranks" measure "$ranks"
    done
    if [ -x "$out/perceptron" ]; then
        for ranks in 1 2; do
            run 60 "a perceptron over $ranks ranks" "$out/perceptron" "$ranks" "$out/exposed_$ranks"
        done
    fi
    if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        for ranks in 1 2; do
            run 60 "PyTorch over $ranks ranks" python3 tests/gpu/ddp_torch.py "$ranks" "$out/exposed_$ranks"
        done
    else
        skip "PyTorch with CUDA is not here, so there is nothing to compare an iteration with"
    fi
fi
finish
