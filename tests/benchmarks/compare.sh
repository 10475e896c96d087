#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Measures all-reduces, guards, iterations of a model and steps of a sharded optimizer, beside other libraries and the
# limits of the machine, and writes one table:
#
#   ROUNDS=30 bash tests/benchmarks/compare.sh
#
# All programs run once in each round, in a drawn order, and ratios are taken within a round. RANKS is 2, or 4 on a
# machine with as many cores; models and sharded steps have 2 ranks. Peers are Open MPI, MPICH, Gloo, libtorch and
# PyTorch; those that are missing are installed from Debian's packages where this user may (INSTALL=0 leaves that out),
# or named. PyTorch is that of python3, or Debian's. Nothing else should run on the machine meanwhile. It writes
# build/compare: table.md, results.csv and ratios.svg.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=build/compare
rm -rf "$out"
ranks=${RANKS:-2}
mkdir -p "$out"
# shellcheck source=tests/benchmarks/peers.sh
. tests/benchmarks/peers.sh
export BUDGET=${BUDGET:-0.05} SIZES=${SIZES:-8 65536 1048576 26214400}

programs=(limits threads processes processes_own guard zero mlp_threads mlp_processes)
add() { # what is measured, the command that says whether it can be; tells what is missing
    local name=$1
    shift
    if "$@"; then
        programs+=("$name")
    else
        echo "left out: $name, which could not be built: is its library installed?" | tee -a "$out/versions.txt"
    fi
}
version() { dpkg-query -W -f='${Package} ${Version}\n' "$@" 2>/dev/null || true; }
: >"$out/versions.txt"
has_header benchmark/benchmark.h || install_package libbenchmark-dev ||
    { echo "Google Benchmark is missing: install libbenchmark-dev" >&2 && exit 1; }
build collectives.bench.cpp "$out/joinable"
build guard.bench.cpp "$out/guard" -lbenchmark_main -lbenchmark
build zero.bench.cpp "$out/zero" -lbenchmark_main -lbenchmark
mpi_program() { # openmpi or mpich
    command -v "mpicc.$1" >/dev/null || install_package "lib$1-dev" || return 1
    "mpicc.$1" -O2 tests/benchmarks/collectives_mpi.c -o "$out/$1"
}
add openmpi mpi_program openmpi
add mpich mpi_program mpich
has_header gloo/context.h || install_package libgloo-dev || true
build_mlp || { echo "OpenBLAS is missing: install libopenblas-dev" >&2 && exit 1; }
in_peers() { case " $peers " in *" $1 "*) ;; *) return 1 ;; esac }
add mlp_gloo in_peers gloo
gloo_program() { in_peers gloo && build gloo.bench.cpp "$out/gloo" -lgloo; }
add gloo gloo_program
torch_program() {
    local include=/usr/include/torch/csrc/api/include
    [ -e "$include/torch/torch.h" ] || install_package libtorch-dev || return 1
    build torch.bench.cpp "$out/torch" -isystem "$include" -ltorch -ltorch_cpu -lc10
}
add torch_threads torch_program
python_with_gloo >/dev/null || install_package python3-torch || true
has_pytorch() { torch_python=$(python_with_gloo); }
add mlp_pytorch has_pytorch
if has_pytorch && [ -x "$out/torch" ]; then programs+=(torch_processes torch_pytorch torch_pytorch_views); fi
{
    sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1
    echo "$cores cores, $ranks ranks, $(date +%F), $(${CXX:-c++} --version | head -1)"
    version openmpi-bin mpich libgloo-dev libtorch-dev libopenblas0-pthread
    if has_pytorch; then "$torch_python" -c "import torch; print('PyTorch', torch.__version__)"; fi
} >>"$out/versions.txt"

of_benchmark() { # times of Google Benchmark in microseconds: a program, a filter
    "$1" --benchmark_filter="$2" --benchmark_format=csv |
        awk -F, '/^"/ { gsub(/"/, "", $1); print $1, $3 * ($5 == "ns" ? 1e-3 : $5 == "ms" ? 1e3 : 1) }'
}
launch() { # openmpi or mpich, and a program: one core each, if there are so many
    case $1:$((ranks <= cores)) in
    openmpi:1) mpirun.openmpi -n "$ranks" --bind-to core "${@:2}" ;;
    openmpi:0) mpirun.openmpi -n "$ranks" --oversubscribe --mca mpi_yield_when_idle 1 "${@:2}" ;;
    mpich:1) mpirun.mpich -n "$ranks" -bind-to core "${@:2}" ;;
    mpich:0) mpirun.mpich -n "$ranks" "${@:2}" ;;
    esac
}
torch_table() { # libtorch's or PyTorch's way; milliseconds become microseconds
    "$torch_python" tests/benchmarks/torch_table.py "$out/torch" --ranks "$ranks" --only "$1"
}
measure() { # prints lines whose last word is a time in microseconds, and whose others name it
    case $1 in
    limits) "$out/joinable" limits ;;
    threads | processes | processes_own) "$out/joinable" "$1" "$ranks" ;;
    openmpi | mpich) launch "$1" "$out/$1" "$1" ;;
    guard) of_benchmark "$out/guard" "^(bare_all_reduce|guarded_iteration)/$ranks/" ;;
    zero) of_benchmark "$out/zero" "^(limit_sharded|(sharded|processes)_(flat|by_parameters))/.*ranks:2/MB:25/" ;;
    gloo) # one line for each size
        "$out/gloo" "$ranks" 30 | sed -nE 's/^ *([0-9]+) bytes.* ring ([0-9]+), by cube ([0-9]+); ours ([0-9]+);.*/\1 \2 \3 \4/p' |
            while read -r size ring cube ours; do
                printf '%s ring %s\n%s cube %s\n%s ours %s\n' "$size" "$ring" "$size" "$cube" "$size" "$ours"
            done
        ;;
    mlp_pytorch) "$torch_python" tests/benchmarks/mlp_torch.py 1 ;;
    mlp_*) "$out/mlp" "${1#mlp_}" 1 ;;
    torch_pytorch*) torch_table "${1#torch_}" ;;
    torch_*) "$out/torch" "${1#torch_}" "$ranks" 30 | awk '{ print "iteration", $1 * 1000 }' ;;
    esac
}
export -f measure of_benchmark launch torch_table
export out ranks cores torch_python
: >"$out/results.txt"
for round in $(seq "${ROUNDS:-30}"); do
    echo "round $round of ${ROUNDS:-30}, load $(cut -d' ' -f1 /proc/loadavg)" >&2
    echo "round $round" >>"$out/results.txt"
    for program in $(printf '%s\n' "${programs[@]}" | shuf); do
        if ! timeout 300 bash -c 'set -euo pipefail; measure "$1"' - "$program" >"$out/times.txt" 2>"$out/errors.txt"; then
            echo "$program ends with an error in round $round:" >&2
            tail -5 "$out/errors.txt" >&2
            case $program in openmpi | mpich | *pytorch*) continue ;; *) exit 1 ;; esac # peers may fail, we may not
        fi
        sed "s/^/$program /" "$out/times.txt" >>"$out/results.txt"
    done
done
python3 tests/benchmarks/compare_table.py "$out" | tee "$out/table.md"
