#!/bin/sh
# SPDX-License-Identifier: BSL-1.0
# Measures in-place all-reduces of f32 beside other libraries and the limits of the machine, in turn, and
# writes a table and a picture to build/collectives/:
#
#   ROUNDS=11 BUDGET=0.1 RANKS="2 4" sh tests/benchmarks/collectives.sh
#
# ROUNDS is how often everything is measured, BUDGET how many seconds for one size each time. Other libraries
# are installed from Debian's packages where this user may (INSTALL=0 leaves that out), and left out if they
# are not to be had. Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/../.."
out=build/collectives
rounds=${ROUNDS:-11}
export BUDGET="${BUDGET:-0.1}"
mkdir -p "$out"

. tests/benchmarks/peers.sh

peers=
command -v mpicc.openmpi >/dev/null || install_package libopenmpi-dev openmpi-bin || true
if command -v mpicc.openmpi >/dev/null; then
    peers="$peers openmpi"
    mpicc.openmpi -O2 tests/benchmarks/collectives_mpi.c -o "$out/openmpi"
else
    echo "Open MPI is left out: it is not installed, and could not be"
fi
python_with_gloo >/dev/null || install_package python3-torch || true
if torch_python=$(python_with_gloo); then
    peers="$peers gloo"
else
    echo "Gloo is left out: python3 has no torch, and it could not be installed"
fi
${CXX:-c++} -std=c++20 -O2 -DNDEBUG -pthread -Iinclude tests/benchmarks/collectives.bench.cpp -o "$out/joinable"

# measure <implementation> <ranks>
measure() {
    case $1 in
    openmpi)
        if [ "$2" -le "$cores" ]; then
            mpirun.openmpi -np "$2" --bind-to core "$out/openmpi" openmpi
        else
            mpirun.openmpi -np "$2" --oversubscribe --mca mpi_yield_when_idle 1 "$out/openmpi" openmpi
        fi
        ;;
    gloo) "$torch_python" tests/benchmarks/collectives_gloo.py "$2" ;;
    *) "$out/joinable" "$@" ;;
    esac
}

# Every round begins with another one, so that none always follows the same.
: >"$out/results.txt"
order="threads processes processes_own $peers"
for round in $(seq "$rounds"); do
    echo "round $round of $rounds, load $(cut -d' ' -f1 /proc/loadavg)" >&2
    echo "round $round" >>"$out/results.txt"
    "$out/joinable" limits >>"$out/results.txt"
    for ranks in ${RANKS:-2 4}; do
        for implementation in $order; do
            measure "$implementation" "$ranks" >>"$out/results.txt" 2>"$out/errors.txt" || {
                echo "$implementation with $ranks ranks ends with an error in round $round:" >&2
                tail -5 "$out/errors.txt" >&2
                case $peers in *"$implementation"*) ;; *) exit 1 ;; esac # without others' numbers it goes on
            }
        done
    done
    # shellcheck disable=SC2086 # a list
    set -- $order
    first=$1
    shift
    order="$* $first"
done
python3 tests/benchmarks/collectives_table.py "$out/results.txt" "$out" | tee "$out/table.txt"
