# SPDX-License-Identifier: BSL-1.0
"""The results of mlp.sh as a table: medians over rounds, of ratios within a round."""
import statistics
import sys

rounds = []
with open(sys.argv[1], encoding="utf-8") as results:
    for line in results:
        name, *rest = line.split()
        if name == "round":
            rounds.append({})
            continue
        model, what, time = rest
        rounds[-1].setdefault((name, model), {})[what] = float(time)


def cell(values):
    values = sorted(values)
    return f"{statistics.median(values):.3g} [{values[0]:.3g}-{values[-1]:.3g}]"


print(f"{len(rounds)} rounds: median [least-most]; microseconds. Exposed is an iteration less a local one; after a pass")
print("caches hold other things than gradients, so the flat sum is also taken there.\n")
print("| ranks, model, gradients | local | iteration | / local | flat sum | exposed / it | exposed / it after a pass |")
print("|---|---|---|---|---|---|---|")
for name, model in rounds[0]:
    for what, layout in (("ddp", "on the heap"), ("ddp_view", "views"), ("ddp_arena", "in an arena")):
        times = [single[name, model] for single in rounds if what in single.get((name, model), {})]
        if not times:  # PyTorch has no arenas
            continue
        columns = [
            [time["local"] for time in times],
            [time[what] for time in times],
            [time[what] / time["local"] for time in times],
            [time["all_reduce"] for time in times],
            [(time[what] - time["local"]) / time["all_reduce"] for time in times],
            [(time[what] - time["local"]) / (time["local_then_sum"] - time["local"]) for time in times],
        ]
        print(f"| {name}, {model}, {layout} | " + " | ".join(map(cell, columns)) + " |")
