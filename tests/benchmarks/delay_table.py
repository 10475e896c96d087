# SPDX-License-Identifier: BSL-1.0
"""The all-reduces of delay.sh as a table: medians over rounds, and of ratios within a round to the first of a program."""
import re
import statistics
import sys

links = []
times = {}  # (way, bytes) -> what -> a time for each round
with open(sys.argv[1], encoding="utf-8") as results:
    for line in results:
        if line.startswith("link "):
            links.append([float(number) for number in line.split()[1:]])
        elif found := re.match(r"(\w+) (\d+) bytes, \d+ ranks: (.*)", line):
            row = times.setdefault((found[1], int(found[2])), {})
            for item in re.split("[,;] ", found[3]):
                what, time = item.rsplit(" ", 1)
                row.setdefault(what, []).append(float(time))


def cell(values):
    values = sorted(values)
    return f"{statistics.median(values):.4g} [{values[0]:.4g}-{values[-1]:.4g}]"


for what, values in zip(("round trip, us", "MB/s"), zip(*links)):
    print(f"the link by a plain connection, {what}: {cell(values)}")
print("\n| way | bytes | what | microseconds | / the first |")
print("|---|---|---|---|---|")
for (way, size), row in times.items():
    first = next(iter(row.values()))
    for what, values in row.items():
        ratios = [value / bare for value, bare in zip(values, first)]
        print(f"| {way} | {size} | {what} | {cell(values)} | {cell(ratios)} |")
print()
