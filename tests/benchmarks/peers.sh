# shellcheck shell=sh disable=SC2154 # out
# SPDX-License-Identifier: BSL-1.0
# For the scripts beside it, which set `out` to a folder: how they get what they compare with.
cores=$(env -u OMP_NUM_THREADS nproc) # which would say that number
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONDONTWRITEBYTECODE=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# A python3 that has PyTorch, of which Gloo is a part: Debian's package is for Debian's own.
python_with_gloo() {
    for python in python3 /usr/bin/python3; do
        "$python" -c "import torch.distributed" 2>/dev/null && echo "$python" && return
    done
    return 1
}
install_package() {
    [ "${INSTALL:-1}" = 1 ] && command -v apt-get >/dev/null || return 1
    apt-cache show "$1" >/dev/null 2>&1 || return 1
    echo "installing $*" >&2
    apt-get install -y --no-install-recommends "$@" >"$out/install.log" 2>&1
}
# $out/mlp. Sets `peers` to the libraries that it is built with, by Debian's names: gloo, mpi.
build_mlp() {
    # Other packages have a cblas.h, too, but not OpenBLAS's blasint.
    has_header cblas.h "blasint size;" || install_package libopenblas-dev
    peers=
    options=
    if has_header gloo/context.h; then
        options="-DMLP_WITH_GLOO -lgloo"
        peers=gloo
    fi
    if has_openmpi; then
        options="$options -DMLP_WITH_MPI $mpi"
        peers="$peers mpi"
    fi
    # shellcheck disable=SC2086 # several words
    build mlp.bench.cpp "$out/mlp" $options -lopenblas
}
build() { # source, program, options
    source=$1
    program=$2
    shift 2
    ${CXX:-c++} -std=c++20 -O2 -DNDEBUG -pthread -Iinclude -Itests "tests/benchmarks/$source" "$@" -o "$program"
}
has_header() { # what follows it must compile
    printf '#include <%s>\n%s\n' "$1" "${2-}" | ${CXX:-c++} -x c++ -fsyntax-only - 2>/dev/null
}
has_openmpi() { # sets `mpi` to its options
    command -v mpirun.openmpi >/dev/null && mpi=$(mpicxx.openmpi --showme 2>/dev/null) || return 1
    mpi="-DOMPI_SKIP_MPICXX ${mpi#* }"
}
