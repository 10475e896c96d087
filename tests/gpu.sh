#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Checks on a machine with an NVIDIA GPU what other tests show over fake CUDA and NCCL libraries, and measures it.
#   bash tests/gpu.sh [--results FOLDER] --build            compiles programs into build/gpu; needs nvcc and doctest, no GPU
#   bash tests/gpu.sh [--results FOLDER] --run [number...]  runs all checks or these; compiles nothing, ends within 540 s
# It exits with 1 if something failed, else with 3 if something did not run, and with 0 only if all ran and passed. A
# missed aim is printed and fails nothing. All output also goes to FOLDER/gpu.txt. NCCL_HOME and CUDA_HOME name folders
# that are searched beside those of nvcc and of Python's wheels, TORCH_HOME that of PyTorch's wheel; GPU_ARCH names the
# architecture (sm_90).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export bin=build/gpu

# number | name | needs | most seconds | command, in the order of a whole run
checks=(
    "1|facts, and the device's own copy|facts|20|\$bin/facts"
    "3|kernels against the host, bit for bit|kernels|40|\$bin/kernels --no-skip"
    "4|order on streams, races provoked|streams|40|\$bin/streams order"
    "2|NCCL of one rank|ranks|90|NCCL_DEBUG=WARN \$bin/ranks one 1 | quiet"
    "7|packing beside the device's own copy|packing|40|\$bin/packing"
    "10|a perceptron beside PyTorch's|perceptron torch|60|\$bin/perceptron 1 \$notes.ours; python3 tests/gpu/ddp_torch.py 1 \$notes.ours"
    "5|a captured step|ranks two_ranks|40|\$bin/ranks captured 1; \$bin/ranks captured 2"
    "6|several ranks: sums, failures, a killed one|ranks two_ranks|120|for n in 2 3 4; do \$bin/ranks pair \$n; done"
    "8|overlap with a backward pass|streams|40|\$bin/streams overlap"
    "9|a guard on the device's timeline|timeline two_ranks|40|\$bin/timeline 1; \$bin/timeline 2"
    "12|host time of an all-reduce|ranks two_ranks|30|\$bin/ranks measure 1; \$bin/ranks host_time 2"
    "13|libtorch on the device|libtorch torch two_ranks|80|for n in 1 2; do \$bin/libtorch check \$n; done; \$bin/libtorch measure 1 \$notes.ours; python3 tests/gpu/ddp_torch.py 1 \$notes.ours"
    "11|memory, initialisation, races and barriers|kernels streams sanitizer|120|for tool in memcheck initcheck racecheck synccheck; do sanitize \$tool \$bin/kernels; sanitize \$tool \$bin/streams order --small; done"
)
# program | sources and libraries; those that compile longest come first
programs=(
    "ranks|tests/gpu/main.cpp tests/gpu/kernels.cu -l:libnccl.so.2"
    "perceptron|tests/gpu/perceptron.cpp tests/gpu/kernels.cu -l:libnccl.so.2 -l:libcublas.so.13"
    "timeline|tests/gpu/timeline.cpp tests/gpu/kernels.cu -l:libnccl.so.2 -l:libcupti.so.13"
    "streams|tests/gpu/streams.cu"
    "kernels|tests/joinable/device/cuda/kernels.test.cu tests/support/main.cpp"
    "packing|tests/gpu/packing.cu"
    "facts|tests/gpu/facts.cu"
    "libtorch|tests/gpu/libtorch.cpp tests/gpu/kernels.cu -isystem \$torch/include -isystem \$torch/include/torch/csrc/api/include -L\$torch/lib -Xlinker --no-as-needed -ltorch -ltorch_cuda -ltorch_cpu -lc10_cuda -lc10 -l:libnccl.so.2 --cudart=shared"
)

find_folders() {
    local nvcc home
    ! nvcc=$(readlink -f "$(command -v nvcc)") || CUDA_HOME=${CUDA_HOME:-${nvcc%/bin/nvcc}}
    folders=
    for home in ${NCCL_HOME-} "${CUDA_HOME:-/usr/local/cuda}" $(python3 -c 'import nvidia
for path in nvidia.__path__: print(path + "/nccl", path + "/cu13")' 2>/dev/null); do
        folders+=" -isystem $home/include -L$home/lib -L$home/lib64"
        LD_LIBRARY_PATH=$home/lib:$home/lib64:${LD_LIBRARY_PATH-}
    done
    torch=${TORCH_HOME:-$(python3 -c 'import importlib.util; print(*importlib.util.find_spec("torch").submodule_search_locations)' 2>/dev/null)}
    LD_LIBRARY_PATH=${torch:+$torch/lib:}$LD_LIBRARY_PATH
    export torch LD_LIBRARY_PATH folders
}

compile() { # a line of `programs`
    local program=${1%%|*} sources=${1#*|} log
    rm -f "$bin/$program"
    if [ "$program" = libtorch ] && ! [ -d "$torch/include/torch" ]; then
        echo "NOT BUILT: libtorch: python3 has no PyTorch; set TORCH_HOME to the folder torch of its wheel"
        return
    fi
    # shellcheck disable=SC2086 # words
    log=$(timeout -k 5 600 nvcc -std=c++20 -O2 -arch="${GPU_ARCH:-sm_90}" -Iinclude -Itests $folders \
        -Xlinker --allow-shlib-undefined -Xlinker -s -o "$bin/$program" ${sources//\$torch/$torch} 2>&1) && echo "built: $program" && return
    cat <<<"NOT BUILT: $program"$'\n'"$(tail -n 20 <<<"$log")" # in one piece: others print, too
    return 1
}
build() {
    command -v nvcc >/dev/null || { echo "NOT BUILT: nvcc is missing; set CUDA_HOME, or add it to the PATH"; return 3; }
    echo "compiling ${#programs[@]} programs, about 3 minutes on two cores"
    mkdir -p "$bin"
    export -f compile
    printf '%s\n' "${programs[@]}" | xargs -d '\n' -P "$(nproc)" -n 1 bash -c 'compile "$@"' - || return 1
    [ -x "$bin/libtorch" ] || return 3
}

# Says why something that checks need is not here; nothing if it is.
missing() {
    case $1 in
    gpu) nvidia-smi -L 2>/dev/null | grep -q '^GPU' || echo "there is no NVIDIA GPU (nvidia-smi -L names none)" ;;
    torch) python3 -c 'import torch; torch.ones(1).cuda()' &>/dev/null || echo "python3 has no PyTorch that uses the GPU" ;;
    sanitizer) timeout 20 bash -c 'sanitize memcheck $bin/facts --probe' &>/dev/null || echo "compute-sanitizer runs no kernel here" ;;
    two_ranks) timeout 20 $bin/ranks meet 2 &>/dev/null || echo "two ranks of NCCL do not meet on this GPU" ;;
    *) [ -x "$bin/$1" ] || echo "$bin/$1 is missing; bash tests/gpu.sh --build makes it" ;;
    esac
}
sanitize() { # tool, a program and its arguments
    compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no "${@:2}"
}
quiet() { # NCCL may warn only after the program aborts a communicator
    tee "$notes.said"
    ! sed '/^-- first abort/q' "$notes.said" | grep 'NCCL WARN' >&2
}
run() { # numbers
    local check number name needs limit command need why left status failed=() skipped=()
    local -A known
    export -f sanitize quiet
    export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 notes # ranks of one machine, which seem to be on several
    notes=$(mktemp -d)/notes
    nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader 2>/dev/null
    for check in "${checks[@]}"; do
        IFS='|' read -r number name needs limit command <<<"$check"
        [ $# -eq 0 ] || [[ " $* " == *" $number "* ]] || continue
        printf '\n== %s: %s (%d s so far)\n' "$number" "$name" $SECONDS
        why=
        for need in gpu $needs; do
            [ -n "$why" ] || why=${known[$need]=$(missing "$need")}
        done
        left=$((${GPU_SECONDS:-540} - SECONDS))
        [ -n "$why" ] || [ $left -gt 0 ] || why="no time is left"
        if [ -n "$why" ]; then
            echo "== $number NOT RUN: $why"
            skipped+=("$number")
            continue
        fi
        timeout -k 5 $((left < limit ? left : limit)) bash -euo pipefail -c "$command"
        status=$?
        [ $status -eq 0 ] || failed+=("$number")
        echo "== $number $([ $status -eq 0 ] && echo PASS || echo "FAIL ($status$([ $status -lt 124 ] || echo ': it took too long, or was killed'))")"
    done
    rm -r "${notes%/notes}"
    printf '\n== after %d s: failed: %s; not run: %s\n' $SECONDS "${failed[*]:-none}" "${skipped[*]:-none}"
    [ ${#failed[@]} -eq 0 ] || return 1
    [ ${#skipped[@]} -eq 0 ] || return 3
}

results=/dev/null
if [ "${1-}" = --results ] && [ -d "${2-}" ]; then
    results=$2/gpu.txt
    shift 2
fi
find_folders
unknown=$(comm -13 <(printf '%s\n' "${checks[@]%%|*}" | sort) <(printf '%s\n' "${@:2}" | sort))
case "${1-}:$#:$unknown" in
--build:1:*) build 2>&1 | tee "$results" ;;
--run:*:) run "${@:2}" 2>&1 | tee "$results" ;;
*) sed -n '3,9s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
