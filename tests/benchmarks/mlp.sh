#!/bin/sh
# SPDX-License-Identifier: BSL-1.0
# Measures an iteration of two perceptrons (0.5 and 25 MB of gradients, batch 32) over 2 ranks: alone, averaged by
# DistributedDataParallel, and with one flat all-reduce of as many gradients. In turn over threads, processes, Gloo and
# MPI, as far as they are installed, and with PyTorch over Gloo:
#
#   ROUNDS=11 sh tests/benchmarks/mlp.sh
#
# Matrices are multiplied by OpenBLAS here, by what PyTorch was built with there. What is missing is installed from
# Debian's packages where this user may (INSTALL=0 leaves that out). Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/../.."
out=build/mlp
mkdir -p "$out"
. tests/benchmarks/peers.sh

build_mlp
ways="threads processes $peers"
python_with_gloo >/dev/null || install_package python3-torch || true
torch_python=$(python_with_gloo) || echo "PyTorch is left out: python3 has no torch, and it could not be installed"

: >"$out/results.txt"
for round in $(seq "${ROUNDS:-11}"); do
    echo "round $round, load $(cut -d' ' -f1 /proc/loadavg)" >&2
    echo "round $round" >>"$out/results.txt"
    for way in $ways; do
        launcher=
        # The program binds its ranks to cores itself.
        [ "$way" != mpi ] ||
            launcher="mpirun.openmpi --oversubscribe --allow-run-as-root --bind-to none --mca btl self,vader -n 2"
        $launcher "$out/mlp" "$way" 1 >>"$out/results.txt"
    done
    if [ -n "$torch_python" ]; then
        "$torch_python" tests/benchmarks/mlp_torch.py 1 >>"$out/results.txt"
    fi
done
python3 tests/benchmarks/mlp_table.py "$out/results.txt" | tee "$out/table.txt"
