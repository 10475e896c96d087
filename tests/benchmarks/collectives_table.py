#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Compares what collectives.sh measured: collectives_table.py <results> <folder for pictures>

Times are medians over rounds, with the least and the most. Ratios are taken inside a round, then their
median: what else the machine does meets all that is measured in it. The limit of two ranks is the longest of a
line's way between two cores, reading and writing as many bytes as the all-reduce does (the faster of a copy and
an update in place), and reading half a buffer that the other core has just written.
"""
import collections
import math
import pathlib
import statistics
import sys

OURS = ("threads", "processes", "processes_own")
COLOURS = ["#1668b0", "#6a3fa0", "#9d86c9", "#c4501b", "#2f8f4e", "#8a6d1a"]


def read(path):
    """[{(ranks, mode, bytes): {name: microseconds}}], one for each round."""
    rounds = []
    for line in pathlib.Path(path).read_text().splitlines():
        if line.startswith("round"):
            rounds.append(collections.defaultdict(dict))
            continue
        name, ranks, mode, size, time = line.split()
        rounds[-1][int(ranks), mode, int(size)][name] = float(time)
    return rounds


def least_time(one_way, memory):
    """Of an all-reduce by two ranks. `memory` has what moving its bytes takes; it is empty for those of one line."""
    return max(one_way, min(memory.get("copy", 0), memory.get("update", 0)), memory.get("pull", 0))


def add_limits(measured):
    one_way = measured[2, "limit", 8]["one_way"]
    for (ranks, mode, size), times in list(measured.items()):
        if ranks == 2 and mode != "limit":
            times["limit"] = least_time(one_way, measured.get((2, "limit", size), {}))


def size_name(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def number(value):
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values):
    return f"{number(statistics.median(values))} [{number(min(values))}-{number(max(values))}]"


def rows_of(rounds):
    keys = {key for measured in rounds for key in measured if key[1] != "limit"}
    return sorted(keys, key=lambda key: (key[0], key[2], key[1] != "same"))


def print_table(header, rows):
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
    print()


def print_tables(rounds, names, base):
    print("Microseconds per all-reduce, on rank 0: median [least-most] over the rounds.\n")
    rows = []
    for key in rows_of(rounds):
        cells = [[measured[key][name] for measured in rounds if name in measured[key]] for name in names]
        rows.append([str(key[0]), size_name(key[2]), key[1], *(spread(c) if c else "-" for c in cells)])
    print_table(["ranks", "size", "buffers", *names], rows)
    print(f"Ratios to {base} in the same round: above 1, {base} is faster.\n")
    rows = []
    for key in rows_of(rounds):
        cells = []
        for name in names:
            if name != base:
                pairs = [measured[key] for measured in rounds if {name, base} <= measured[key].keys()]
                cells.append(spread([pair[name] / pair[base] for pair in pairs]) if pairs else "-")
        rows.append([str(key[0]), size_name(key[2]), key[1], *cells])
    print_table(["ranks", "size", "buffers", *(name for name in names if name != base)], rows)


class Panel:
    """Axes with logarithmic scales."""

    WIDTH, HEIGHT = 420, 300

    def __init__(self, left, title, unit, points):
        self.left, self.top = left, 60
        self.sizes = sorted({x for line in points.values() for x, _ in line})
        values = [y for line in points.values() for _, y in line]
        self.low, self.high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.parts = [f'<text x="{left}" y="{self.top - 15}" font-weight="bold">{title}</text>']
        for power in range(self.low, self.high + 1):
            y = self.y(10.0**power)
            self.parts.append(
                f'<line x1="{left}" x2="{left + self.WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,.{max(-power, 0)}f} {unit}</text>'
            )
        for size in self.sizes:
            self.parts.append(
                f'<text text-anchor="end" transform="translate({self.x(size) + 4:.1f} '
                f'{self.top + self.HEIGHT + 14}) rotate(-30)">{size_name(size)}</text>'
            )

    def x(self, size):
        low, high = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        return self.left + 20 + (math.log2(size) - low) / max(high - low, 1) * (self.WIDTH - 40)

    def y(self, value):
        return self.top + self.HEIGHT * (1 - (math.log10(value) - self.low) / max(self.high - self.low, 1))

    def line(self, points, colour, dash):
        path = " ".join(f"{self.x(size):.1f},{self.y(value):.1f}" for size, value in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {dash}/>'
        )
        if not dash:
            self.parts += [
                f'<circle cx="{self.x(size):.1f}" cy="{self.y(value):.1f}" r="3" fill="{colour}"/>'
                for size, value in points
            ]


def draw(rounds, names, ranks, mode, path):
    times = collections.defaultdict(list)
    for key in rows_of(rounds):
        for name in names:
            values = [measured[key][name] for measured in rounds if name in measured[key]]
            if key[:2] == (ranks, mode) and values:
                times[name].append((key[2], statistics.median(values)))
    if not times:
        return
    rates = {name: [(size, size / time / 1e3) for size, time in line] for name, line in times.items()}
    panels = [
        (Panel(80, "time of an all-reduce", "µs", times), times),
        (Panel(600, "bytes of a rank's buffer per time", "GB/s", rates), rates),
    ]
    body = []
    for panel, lines in panels:
        for i, (name, points) in enumerate(lines.items()):
            is_limit = name == "limit"
            panel.line(points, "#444" if is_limit else COLOURS[i], 'stroke-dasharray="6 4"' * is_limit)
        body += panel.parts
    for i, name in enumerate(times):
        colour = "#444" if name == "limit" else COLOURS[i]
        body.append(f'<rect x="{80 + 130 * i}" y="407" width="14" height="4" fill="{colour}"/>')
        body.append(f'<text x="{100 + 130 * i}" y="413">{name}</text>')
    buffers = "" if mode == "same" else ", of data that each rank has just written"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1050 425" font-family="sans-serif" '
        'font-size="11"><rect width="1050" height="425" fill="white"/>'
        f'<text x="80" y="24" font-size="15">In-place all-reduce of f32, {ranks} ranks{buffers}</text>'
        + "\n".join(body)
        + "</svg>\n",
        encoding="utf-8",
    )
    print(f"drawn: {path}")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    rounds = read(sys.argv[1])
    for measured in rounds:
        add_limits(measured)
    found = {name for measured in rounds for key in rows_of(rounds) for name in measured[key]}
    ours = [name for name in OURS if name in found]
    names = ours + sorted(found - {*ours, "limit"}) + ["limit"]
    print_tables(rounds, names, ours[0])
    print("Limits of two threads, microseconds:\n")
    sizes = sorted({key[2] for key in rounds[0] if key[1] == "limit"})
    limits = ["one_way", "copy", "update", "pull"]
    rows = []
    for size in sizes:
        found_at = [[m[2, "limit", size][n] for m in rounds if n in m[2, "limit", size]] for n in limits]
        rows.append([size_name(size), *(spread(values) if values else "-" for values in found_at)])
    print_table(["size", *limits], rows)
    for ranks, mode in sorted({key[:2] for key in rows_of(rounds)}):
        draw(rounds, names, ranks, mode, pathlib.Path(sys.argv[2]) / f"all_reduce_{ranks}_{mode}.svg")


if __name__ == "__main__":
    main()
