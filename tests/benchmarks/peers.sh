# SPDX-License-Identifier: BSL-1.0
# For the scripts beside it, which set `out` to a folder: how they get what they compare with.
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
