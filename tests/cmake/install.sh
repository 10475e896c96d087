# SPDX-License-Identifier: BSL-1.0
# Sourced: functions that install Debian packages by apt, as root or with sudo, only what is missing; and one for PyPI.

install() { # PACKAGE...
    local package missing=()
    for package in "$@"; do
        # " installed " for each architecture that has it
        if [[ " $(dpkg-query -W -f='${db:Status-Status} ' "$package" 2>/dev/null)" != *" installed "* ]]; then
            missing+=("$package")
        fi
    done
    if [ ${#missing[@]} -eq 0 ]; then
        return
    fi
    if ! command -v apt-get >/dev/null; then
        echo "there is no apt-get here: going on as if you had installed what Debian calls ${missing[*]}" >&2
        return
    fi
    local command="apt-get install --no-install-recommends ${missing[*]}" as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            echo "packages are missing and there is no sudo; let root run: $command" >&2
            return 1
        fi
        as_root=(sudo)
    fi
    echo "installing ${missing[*]}"
    local log
    # An update may fail for a source that none of these packages comes from.
    if ! log=$({
        "${as_root[@]}" apt-get update -qq
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $command -y -qq
    } 2>&1); then
        tail -n 3 <<<"$log" >&2
        echo "could not install the packages; is there a network? By hand: ${as_root[*]:+sudo }$command" >&2
        return 1
    fi
}

# What not every release of Debian has: whether PROGRAM is there, or the file of that path, after installing
# the packages if apt knows them. Says so when it is not.
install_optional() { # PROGRAM PACKAGE...
    local program=$1
    shift
    if command -v apt-get >/dev/null && apt-get install --dry-run "$@" >/dev/null 2>&1; then
        install "$@" || exit 1
    fi
    if [ ! -e "$program" ] && ! command -v "$program" >/dev/null; then
        echo "skipped: there is no $program, and apt does not know $* (as of its last update)"
        return 1
    fi
}

# For a program that Debian does not have: whether PROGRAM of the PyPI package of that name is installed, or is
# after an attempt to install it in FOLDER, whose bin/ the caller adds to PATH. Says so when it is not.
install_by_pip() { # FOLDER PROGRAM [VERSION]
    if ! command -v "$2" >/dev/null && [ ! -x "$1/bin/$2" ] &&
        ! { python3 -m venv "$1" && "$1/bin/pip" install --quiet --retries 0 "$2${3-}"; } >/dev/null 2>&1; then
        echo "skipped: there is no $2, and pip cannot install it; is there a network?"
        return 1
    fi
}
