#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Measures 2 ranks on two machines, over a link that takes 1 ms each way: all-reduces by MPI and Gloo beside ours over
# them, and the iterations of mlp.sh, also with PyTorch over Gloo. All take turns in each round. The machines are two
# network namespaces of this one (../network/link.sh), so this takes the right to make them:
#
#   ROUNDS=5 bash tests/benchmarks/delay.sh
#
# DELAY: milliseconds each way. ONE_IN: one packet in so many is lost (0, the default: none). TURNS: of each all-reduce.
# PyTorch is that of python3. Nothing else should run on the machine meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=build/delay
mkdir -p "$out"
# shellcheck source=tests/network/link.sh
. tests/network/link.sh
# shellcheck source=tests/benchmarks/peers.sh
. tests/benchmarks/peers.sh

build_mlp
case $peers in *gloo*) build gloo.bench.cpp "$out/bench_gloo" -lgloo ;; esac
# shellcheck disable=SC2086 # several words
case $peers in *mpi*) build mpi.bench.cpp "$out/bench_mpi" $mpi ;; esac
[ -n "$peers" ] || { echo "skipped: neither Gloo nor Open MPI is installed" && exit 77; }
torch_python=$(python_with_gloo) || echo "PyTorch is left out: python3 has no torch"

folder=$(mktemp -d)
clean() {
    link_close
    rm -rf "$folder"
}
trap clean EXIT
link_open "${DELAY:-1}" "${ONE_IN:-0}"
[ "$link" != plain ] || exit 77
export GLOO_SOCKET_IFNAME=$name MASTER_ADDR=10.77.0.1

patience=300 # seconds that one program may take
by_gloo() {  # a program and its arguments; each rank gets its number, its address and an empty folder of both
    local shared status=0
    shared=$(mktemp -d "$folder/ranks.XXXXXX")
    on "$b" "$@" 1 10.77.0.2 "$shared" &
    on "$a" "$@" 0 10.77.0.1 "$shared" || status=$?
    wait $! && return $status
}
by_torch() { # blocks
    RANK=1 on "$b" "$torch_python" tests/benchmarks/mlp_torch.py "$1" &
    RANK=0 on "$a" "$torch_python" tests/benchmarks/mlp_torch.py "$1"
    wait $!
}
by_mpi() { link_mpirun "$(command -v mpirun.openmpi)" "$folder" 1 "$@"; }
on() { # machine, a program and its arguments
    local space=$1
    shift
    ip netns exec "$space" timeout $patience "$@"
}
: >"$out/sums.txt"
: >"$out/mlp.txt"
for round in $(seq "${ROUNDS:-5}"); do
    echo "round $round, load $(cut -d' ' -f1 /proc/loadavg)" >&2
    echo "round $round" | tee -a "$out/mlp.txt" >>"$out/sums.txt"
    echo "link $(link_probe 300000000)" >>"$out/sums.txt"
    for way in $peers; do
        case $way in # Gloo's program takes the ranks first
        gloo) by_gloo "$out/bench_gloo" 2 "${TURNS:-50}" ;;
        mpi) by_mpi "$out/bench_mpi" "${TURNS:-50}" ;;
        esac | sed "s/^ */$way /" >>"$out/sums.txt"
        "by_$way" "$out/mlp" "$way" 1 >>"$out/mlp.txt"
    done
    [ -z "$torch_python" ] || by_torch 1 >>"$out/mlp.txt"
done
echo "$link: ${DELAY:-1} ms each way, one packet in ${ONE_IN:-0} lost (0: none), $(link_lost) lost in all"
{
    python3 tests/benchmarks/delay_table.py "$out/sums.txt"
    python3 tests/benchmarks/mlp_table.py "$out/mlp.txt"
} | tee "$out/table.txt"
