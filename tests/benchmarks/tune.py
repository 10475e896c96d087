#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Measures every number of communicator/shared_memory/board/tuning.hpp beside others, and prints that
header anew with the best.

    python3 tests/benchmarks/tune.py [rounds]

Builds collectives.bench.cpp once for each value, runs all values of a number in turn, and compares all-reduces of
the sizes that it decides, by the ranks that it concerns. A value takes the place of today's if its times are 5 % shorter in the
middle. Takes some minutes, in which nothing else should run on the machine.
"""
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "tune"
HEADER = pathlib.Path("joinable/communicator/shared_memory/board/tuning.hpp")
KIB = 1024
CORES = os.cpu_count()

# For each number: other values, as factors of today's; the sizes in bytes that it decides; how many ranks, and which.
NUMBERS = {
    "slot_bytes": ([1 / 8, 1 / 2, 1, 2, 4], [256, KIB, 2 * KIB, 4 * KIB, 8 * KIB], CORES, "threads"),
    "one_chunk_bytes": ([0, 1 / 4, 1, 4], [16 * KIB, 64 * KIB, 256 * KIB, KIB * KIB], CORES, "threads"),
    "chunks_per_rank": ([1 / 4, 1 / 2, 1, 2, 4], [512 * KIB, 4 * KIB * KIB], CORES, "threads"),
    "largest_chunk_bytes": ([1 / 4, 1 / 2, 1, 2, 4], [4 * KIB * KIB, 32 * KIB * KIB], CORES, "threads"),
    "slice_bytes": ([1 / 4, 1 / 2, 1, 2, 4], [1024 * KIB, 4096 * KIB, 25 * KIB * KIB], CORES, "processes_own"),
    "crowded_slice_bytes": ([1 / 4, 1 / 2, 1, 2, 4], [4096 * KIB, 25 * KIB * KIB], 2 * CORES, "processes_own"),
    "slices_per_ring": ([1 / 2, 1, 2], [1024 * KIB, 4096 * KIB, 25 * KIB * KIB], CORES, "processes_own"),
    "spins": ([1 / 4, 1, 4], [8, KIB, 64 * KIB], CORES, "threads"),
    "crowded_spins": ([1 / 4, 1, 4], [8, KIB, 64 * KIB], 2 * CORES, "threads"),
    "yields": ([1 / 4, 1, 4], [8, KIB, 64 * KIB], 2 * CORES, "threads"),
}


def declaration(name):
    return re.compile(rf"(inline constexpr [\w:]+ {name} = )([^;]+);")


def today(text, name):
    expression = declaration(name).search(text)[2]
    return eval(re.sub(r"std::size_t\{(\d+)\}|(\d)U\b", r"\1\2", expression))  # numbers and << alone


def build(text, name, value):
    folder = OUT / f"{name}_{value}"
    shutil.copytree(ROOT / "include", folder, dirs_exist_ok=True)
    (folder / HEADER).write_text(declaration(name).sub(rf"\g<1>{value};", text), encoding="utf-8")
    program = OUT / f"{name}_{value}.program"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-DNDEBUG", "-pthread", f"-I{folder}"]
    source = ROOT / "tests" / "benchmarks" / "collectives.bench.cpp"
    subprocess.run([*command, source, "-o", program], check=True)
    shutil.rmtree(folder)
    return program


def times(program, sizes, ranks, kind):
    environment = {"BUDGET": "0.05", **os.environ, "SIZES": " ".join(map(str, sizes))}
    run = subprocess.run([program, kind, str(ranks)], env=environment, check=True, capture_output=True, text=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    return {int(size): float(time) for _, _, mode, size, time in lines if mode == "same"}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    text = (ROOT / "include" / HEADER).read_text(encoding="utf-8")
    tuned = text
    for name, (factors, sizes, ranks, kind) in NUMBERS.items():
        now = today(text, name)
        values = sorted({max(0, round(now * factor)) for factor in factors})
        programs = {value: build(text, name, value) for value in values}
        ratios = {value: {size: [] for size in sizes} for value in values}
        for _ in range(rounds):
            measured = {value: times(programs[value], sizes, ranks, kind) for value in values}
            for value in values:
                for size in sizes:
                    ratios[value][size].append(measured[value][size] / measured[now][size])
        print(f"\n{name}, {ranks} ranks ({kind}): times over those of today's value, medians of {rounds} rounds")
        print("| value | " + " | ".join(f"{size} B" for size in sizes) + " | mean |")
        print("|---" * (len(sizes) + 2) + "|")
        means = {}
        for value in values:
            medians = [statistics.median(ratios[value][size]) for size in sizes]
            means[value] = math.exp(statistics.fmean(map(math.log, medians)))
            cells = " | ".join(f"{median:.2f}" for median in medians)
            print(f"| {value} | {cells} | {means[value]:.2f} |", flush=True)
        best = min(means, key=means.get)
        if means[best] < 0.95:
            tuned = declaration(name).sub(rf"\g<1>{best};", tuned)
    print("\n" + tuned)


if __name__ == "__main__":
    main()
