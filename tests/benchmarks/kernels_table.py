#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Compares two builds of the kernel benchmarks: kernels_table.py <built with -O2> <with -O3 -march=native>

Prints GB/s as medians over rounds, in which both builds run in turn and in random order inside, so that
what else the machine does meets both of them. What is read and what is written both count as moved.
"""
import json
import statistics
import subprocess
import sys

ROUNDS = 5
OPTIONS = [
    "--benchmark_format=json",
    "--benchmark_min_time=0.01",
    "--benchmark_repetitions=2",
    "--benchmark_enable_random_interleaving=true",
] + sys.argv[3:]


def measure(executable, into):
    run = subprocess.run([executable, *OPTIONS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    for result in sorted(json.loads(run.stdout)["benchmarks"], key=lambda result: result["family_index"]):
        if result["run_type"] == "iteration":
            into.setdefault(result["run_name"], []).append(result["bytes_per_second"] / 1e9)


if len(sys.argv) < 3:
    sys.exit(__doc__)
everywhere, native = {}, {}
for _ in range(ROUNDS):
    measure(sys.argv[1], everywhere)
    measure(sys.argv[2], native)
print(f"{'kernel':<38} {'-O2':>8} {'-O3 native':>10}  {'ratio':>5}  {'of memcpy':>9}")
for name in everywhere:
    here, there = statistics.median(everywhere[name]), statistics.median(native[name])
    copied = statistics.median(everywhere["memcpy/" + name.split("/")[1]])
    print(f"{name:<38} {here:>8.1f} {there:>10.1f}  {here / there:>5.2f}  {here / copied:>9.2f}")
