#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Compiles join.hpp, zero.hpp and the suites of guards, buckets and participants over thread ranks by MinGW, and runs
# them under wine where that is installed. Debian's packages are g++-mingw-w64-x86-64-posix and wine.
#
#   bash tests/mingw.sh             # some eight minutes on two cores
#
# Files that need rapidcheck are left out, because Debian builds it for Linux only, and so are those that start
# processes or write files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
compiler=x86_64-w64-mingw32-g++-posix
if ! command -v $compiler >/dev/null; then
    echo "skipped: $compiler is not installed"
    exit 77
fi
out=build/mingw
mkdir -p $out/include
ln -sfn /usr/include/doctest $out/include/doctest # of all that is in /usr/include, this alone
options=(-std=c++20 -O1 -Wall -Wextra -DJOINABLE_SEPARATE_COMPILATION -Iinclude -Itests
    -Itests/support/rank_kinds/threads -isystem $out/include)

# Process ranks, named memory, TCP and checkpoints are refused in a sentence.
refused() { # a header, what is written, the sentence
    if printf '#include <joinable/%s>\nvoid f() { %s }\n' "$1" "$2" |
        $compiler "${options[@]}" -x c++ -fsyntax-only - 2>$out/refusal; then
        echo "tests/mingw.sh: $2 with <joinable/$1> is not refused" >&2
        exit 1
    fi
    grep -q "$3" $out/refusal || {
        echo "tests/mingw.sh: $2 with <joinable/$1> is refused without \"$3\":" >&2
        cat $out/refusal >&2
        exit 1
    }
}
refused join.hpp "joinable::run_processes(2, [](auto&) {});" "run_processes: process ranks need Linux"
refused join.hpp "joinable::ProcessCommunicator* comm = nullptr;" "process ranks need Linux"
refused tcp.hpp "" "tcp.hpp> needs the sockets of Linux"
refused shared_memory.hpp "" "shared_memory.hpp> needs the sockets of Linux"
refused checkpoint.hpp "" "checkpoint.hpp> needs the files of Linux"

sources=()
for source in tests/joinable/{join,bucket,participant}/*.test.cpp; do
    if grep -q "<over_ranks.hpp>" "$source" &&
        ! grep -Eq "rapidcheck|support/(drawn|draw|folder|named_ranks|process_ranks|nccl_ranks|fake_cuda|wait_for_process|forked)" "$source"; then
        sources+=("$source")
    fi
done
if [ ${#sources[@]} -lt 30 ]; then
    echo "tests/mingw.sh: of the suites only ${#sources[@]} files are found" >&2
    exit 1
fi
echo "compiles ${#sources[@]} files of tests"
objects=()
cat >$out/src.cpp <<'END'
#include <joinable/src.hpp>
// MinGW frees the memory of thread_local objects before it destroys them (GCC's bug 80816), and doctest has such
// vectors. Here they are not destroyed.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) noexcept {
    return 0;
}
END
for source in $out/src.cpp tests/support/main.cpp "${sources[@]}"; do
    object=$out/$(tr / _ <<<"${source%.*}").o
    objects+=("$object")
    printf '%s\0-o\0%s\0' "$source" "$object"
done >$out/files
xargs -0 -n 3 -P "$(nproc)" $compiler "${options[@]}" -x c++ -c <$out/files
$compiler "${objects[@]}" -static -o $out/suites.exe
if command -v wine >/dev/null; then
    WINEDEBUG=-all timeout 900 wine $out/suites.exe >$out/suites.log 2>&1 || true # wine returns 0 also after a crash
    tail -4 $out/suites.log
    grep -q "Status: SUCCESS" $out/suites.log || { echo "tests/mingw.sh: the suites failed: $out/suites.log" >&2 && exit 1; }
else
    echo "skipped: wine is not installed, so the suites are compiled and not run"
fi
