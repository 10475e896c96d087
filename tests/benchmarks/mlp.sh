#!/bin/sh
# SPDX-License-Identifier: BSL-1.0
# Measures an iteration of two perceptrons (0.5 and 25 MB of gradients, batch 32) over 2 ranks: alone, averaged by
# DistributedDataParallel, and with one flat all-reduce of as many gradients. In turn with PyTorch over Gloo:
#
#   ROUNDS=11 sh tests/benchmarks/mlp.sh
#
# Ranks over Open MPI are measured, too, where it is installed (Debian: openmpi-bin libopenmpi-dev).
# Matrices are multiplied by OpenBLAS here, by what PyTorch was built with there. What is missing is installed from
# Debian's packages where this user may (INSTALL=0 leaves that out). Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/../.."
out=build/mlp
mkdir -p "$out"
. tests/benchmarks/peers.sh

# Other packages have a cblas.h, too, but not OpenBLAS's blasint.
printf '#include <cblas.h>\nblasint size;\n' | ${CXX:-c++} -x c++ -fsyntax-only - 2>/dev/null ||
    install_package libopenblas-dev
${CXX:-c++} -std=c++20 -O2 -DNDEBUG -pthread -Iinclude tests/benchmarks/mlp.bench.cpp -lopenblas -o "$out/mlp"
has_mpi=false
if command -v mpirun.openmpi >/dev/null && command -v mpicxx.openmpi >/dev/null; then
    OMPI_CXX=${CXX:-c++} mpicxx.openmpi -DOMPI_SKIP_MPICXX -DJOINABLE_MLP_OVER_MPI -std=c++20 -O2 -DNDEBUG -pthread \
        -Iinclude tests/benchmarks/mlp.bench.cpp -lopenblas -o "$out/mlp_mpi"
    has_mpi=true
else
    echo "MPI is left out: Open MPI is not installed"
fi
python_with_gloo >/dev/null || install_package python3-torch || true
torch_python=$(python_with_gloo) || echo "PyTorch is left out: python3 has no torch, and it could not be installed"

: >"$out/results.txt"
for round in $(seq "${ROUNDS:-11}"); do
    echo "round $round, load $(cut -d' ' -f1 /proc/loadavg)" >&2
    echo "round $round" >>"$out/results.txt"
    "$out/mlp" threads 1 >>"$out/results.txt"
    "$out/mlp" processes 1 >>"$out/results.txt"
    if $has_mpi; then # the program binds its ranks to cores itself
        mpirun.openmpi --oversubscribe --allow-run-as-root --bind-to none --mca btl self,vader -n 2 \
            "$out/mlp_mpi" mpi 1 >>"$out/results.txt"
    fi
    if [ -n "$torch_python" ]; then
        "$torch_python" tests/benchmarks/mlp_torch.py 1 >>"$out/results.txt"
    fi
done
python3 tests/benchmarks/mlp_table.py "$out/results.txt" | tee "$out/table.txt"
