#!/usr/bin/env bash
# SPDX-License-Identifier: BSL-1.0
# Measures what each reduction of the main example costs: 2 ranks, on two machines by TCP over a link of 100 Mbit/s, and
# as threads of one. The machines are two network namespaces of this one (../network/link.sh), so this takes the right to
# make them. All reductions take turns in each round. Prints the bytes that a rank sends for gradients in a training round,
# and medians over the rounds: of a training round, and of its ratio to all-reduce in the same round.
#
#   ROUNDS=5 bash tests/benchmarks/travel.sh build/examples/examples/train_text
#
# RATE: of the link, 100mbit unless given. bash examples/run.sh builds the program.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/network/link.sh
. "$here/../network/link.sh"
train=$(realpath "$1")
folder=$(mktemp -d)
clean() {
    link_close
    rm -rf "$folder"
}
trap clean EXIT
link_open_at "${RATE:-100mbit}"

cd "$here/../.." # the text is this repository's
patience=300 # seconds that one program may take
export JOINABLE_ADDR=10.77.0.1 JOINABLE_PORT=4711 JOINABLE_SECRET=$name JOINABLE_JOB=$name
over_link() { # further arguments of the example
    JOINABLE_RANK=1 JOINABLE_WORLD_SIZE=2 ip netns exec "$b" timeout $patience "$train" --communicator tcp "$@" >/dev/null &
    JOINABLE_RANK=0 JOINABLE_WORLD_SIZE=2 ip netns exec "$a" timeout $patience "$train" --communicator tcp "$@"
    wait $!
}
in_memory() { timeout $patience "$train" --communicator thread --ranks 2 "$@"; }
ways=("all-reduce" "fp16" "bf16" "int8" "topk --density 0.1" "topk --density 0.01" "powersgd --vectors 2")
for round in $(seq "${ROUNDS:-5}"); do
    echo "round $round, load $(cut -d' ' -f1 /proc/loadavg)" >&2
    for place in over_link in_memory; do
        for way in "${ways[@]}"; do
            # shellcheck disable=SC2086 # several words
            $place --epochs 1 --batch 128 --reduction $way |
                awk -v key="$round $place $way" '/^each round/ { us = $3 } /bytes sent by each/ { bytes = $2 }
                    END { print key "\t" us "\t" (bytes == "" ? 48256 : bytes) }' >>"$folder/times"
        done
    done
done
python3 - "$folder/times" <<'END'
import collections
import statistics
import sys

times, sizes = collections.defaultdict(dict), {}
for line in open(sys.argv[1], encoding="utf-8"):
    key, microseconds, size = line.rstrip("\n").split("\t")
    turn, place, way = key.split(" ", 2)
    times[way, place][turn] = float(microseconds)
    sizes[way] = int(size)
print(f"{'--reduction':22} {'bytes':>7} {'ms on the link':>15} {'ratio':>7} {'us in memory':>13} {'ratio':>7}")
for way, size in sizes.items():
    row = f"{way:22} {size:7}"
    for place, unit, width in (("over_link", 1000, 15), ("in_memory", 1, 13)):
        mine, whole = times[way, place], times["all-reduce", place]
        ratio = statistics.median(mine[turn] / whole[turn] for turn in mine)
        row += f" {statistics.median(mine.values()) / unit:{width}.2f} {ratio:7.2f}"
    print(row)
END
