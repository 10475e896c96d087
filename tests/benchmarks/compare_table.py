#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""The results of compare.sh as a table, as CSV and as a picture: compare_table.py build/compare

Times are medians over rounds, ratios medians of those within a round. The interval holds the median of all rounds that
could be run with at least 95 % (order statistics, exact by the binomial distribution); it takes 6 rounds. An aim is met
if the interval includes it or is better, missed otherwise, and open if there are fewer rounds. What is exposed is a difference: rounds in which
the peer's is not positive are left out, and counted. The limit is the longest of a line's way between two cores, moving
as many bytes as the all-reduce does, and fetching half a buffer that the other core has written; for a sharded step,
reading and writing as many bytes.
"""
import csv
import dataclasses
import math
import pathlib
import statistics
import sys
import typing

from collectives_table import least_time, number

Round = dict[str, float]
Time = typing.Callable[[Round], float]


@dataclasses.dataclass
class Row:
    work: str
    ours: Time
    peer: str
    theirs: Time
    aim: float | None = None
    limit: Time | None = None
    why: str = ""  # the peer is faster, if it is


def at(name: str) -> Time:
    return lambda measured: measured[name]


def exposed(way: str, model: str, what: str) -> Time:
    """What an iteration takes longer than a local one."""
    return lambda measured: measured[f"mlp_{way} {model} {what}"] - measured[f"mlp_{way} {model} local"]


def limit_of(size: int) -> Time:
    ways = ("copy", "update", "pull") if size > 8 else ()

    def of_round(measured: Round) -> float:
        memory = {way: measured[f"limits {way} 2 limit {size}"] for way in ways}
        return least_time(measured["limits one_way 2 limit 8"], memory)

    return of_round


FEWEST = 6  # rounds for an interval of 95 %
SIZES = {8: "8 B", 65536: "64 KiB", 1 << 20: "1 MiB", 25 << 20: "25 MiB"}
OF_GLOO = "sums are in rank order, and ranks compare what they do before data moves"
OF_ALONE = "a rank alone sends nothing"


def rows(ranks: int) -> list[Row]:
    found = []
    for size, name in SIZES.items():
        for ours in ("threads", "processes", "processes_own"):
            for peer in ("openmpi", "mpich"):
                found.append(
                    Row(
                        f"all-reduce, {name}, {ours.replace('_own', ', own memory')}",
                        at(f"{ours} {ours} {ranks} same {size}"),
                        peer,
                        at(f"{peer} {peer} {ranks} same {size}"),
                        limit=limit_of(size) if ranks == 2 else None,
                    )
                )
    found.append(
        Row(
            "all-reduce, 25 MiB, processes with their own memory",
            at(f"processes_own processes_own {ranks} same {25 << 20}"),
            "threads",
            at(f"threads threads {ranks} same {25 << 20}"),
            why="a process cannot read another one's heap, so shares are copied into shared memory",
        )
    )
    for size in (1 << 20, 25 << 20):
        found.append(
            Row(
                f"GlooCommunicator, {SIZES[size]}",
                at(f"gloo {size} ours"),
                "bare Gloo",
                lambda measured, size=size: min(measured[f"gloo {size} ring"], measured[f"gloo {size} cube"]),
                1.15,
                why=OF_GLOO,
            )
        )
    for model, megabytes in (("large", "25 MB"), ("small", "0.5 MB")):
        for way in ("threads", "processes"):
            for what, layout in (("ddp", "on the heap"), ("ddp_view", "views"), ("ddp_arena", "in an arena")):
                on_heap = {"large": {"threads": 1.10, "processes": 1.30}, "small": {"threads": 1.08, "processes": 1.08}}
                in_arena = {"large": 1.10, "small": 1.08}
                aims = {"ddp": on_heap[model][way], "ddp_arena": in_arena[model]}
                found.append(
                    Row(
                        f"DDP iteration, {megabytes}, {layout}, {way}",
                        at(f"mlp_{way} {way} {model} {what}"),
                        "alone",
                        at(f"mlp_{way} {way} {model} local"),
                        aims.get(what),
                        why=OF_ALONE,
                    )
                )
        for what, layout in (("ddp", "on the heap"), ("ddp_view", "views")):
            found.append(
                Row(
                    f"DDP over Gloo, {megabytes}, {layout}, exposed",
                    exposed("gloo gloo", model, what),
                    "PyTorch",
                    exposed("pytorch pytorch", model, what),
                    1.0,
                )
            )
    for way, prefix in (("threads", "sharded"), ("processes", "processes")):
        found.append(
            Row(
                f"sharded step, 25 MiB, flat, {way}",
                at(f"zero {prefix}_flat/ranks:2/MB:25/iterations:1/repeats:5/manual_time_median"),
                "by parameters",
                at(f"zero {prefix}_by_parameters/ranks:2/MB:25/iterations:1/repeats:5/manual_time_median"),
                1.15,
                at("zero limit_sharded/ranks:2/MB:25/iterations:1/repeats:5/manual_time_median"),
                "values are packed and unpacked: parameters_as_bucket_view avoids it",
            )
        )
    found.append(
        Row(
            "a guarded iteration with one all-reduce",
            at(f"guard guarded_iteration/{ranks}/iterations:11/manual_time"),
            "unguarded",
            at(f"guard bare_all_reduce/{ranks}/iterations:11/manual_time"),
            1.2,
            why="a round needs a roll call, which is a sum of seven words",
        )
    )
    for ours in ("threads", "processes"):
        for peer in ("pytorch", "pytorch_views"):
            found.append(
                Row(
                    f"libtorch's perceptron, {ours}",
                    at(f"torch_{ours} iteration"),
                    peer.replace("_", ", ").replace("pytorch", "PyTorch over Gloo"),
                    at(f"torch_{peer} iteration"),
                )
            )
    return found


def read(path: pathlib.Path) -> list[Round]:
    rounds: list[Round] = []
    for line in path.read_text().splitlines():
        if line.startswith("round "):
            rounds.append({})
        else:
            name, _, time = line.rpartition(" ")
            try:
                rounds[-1][name] = float(time)
            except ValueError:
                print(f"no time: {line}", file=sys.stderr)
    return rounds


def times(rounds: list[Round], *functions: Time) -> list[tuple[float, ...]]:
    """Those of the rounds that have them all."""
    found = []
    for measured in rounds:
        try:
            found.append(tuple(function(measured) for function in functions))
        except KeyError:
            pass  # left out, or it ended with an error
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """At least 95 % of such intervals hold the median; all numbers where there are too few."""
    ordered = sorted(values)
    n = len(ordered)
    first = 0
    while 2 * sum(math.comb(n, k) for k in range(first + 2)) <= 0.05 * 2**n:
        first += 1
    if n < FEWEST:
        return -math.inf, math.inf
    return ordered[first], ordered[n - 1 - first]


@dataclasses.dataclass
class Compared:
    row: Row
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    rounds: int
    limit: float | None

    def cells(self) -> list[str]:
        aim_or_0 = self.row.aim or 0
        verdict = "open" if math.isinf(self.low) else "met" if self.low <= aim_or_0 else "missed"
        aim = "" if self.row.aim is None else f"{self.row.aim}, {verdict}"
        first = "we" if self.high < 1 else self.row.peer if self.low > 1 else "level"
        limit = "" if self.limit is None else number(self.limit)
        return [
            self.row.work, self.row.peer, number(self.ours), number(self.theirs),
            f"{number(self.ratio)} ({number(self.low)} to {number(self.high)})", str(self.rounds), limit, aim, first,
        ]


def compare(rounds: list[Round], ranks: int) -> tuple[list[Compared], list[str]]:
    found, missing = [], []
    for row in rows(ranks):
        pairs = [pair for pair in times(rounds, row.ours, row.theirs) if pair[1] > 0]
        if not pairs:
            missing.append(f"{row.work} beside {row.peer}")
            continue
        ratios = [ours / theirs for ours, theirs in pairs]
        limits = [limit for (limit,) in times(rounds, row.limit)] if row.limit else []
        found.append(
            Compared(
                row, statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs),
                statistics.median(ratios), *interval(ratios), len(pairs),
                statistics.median(limits) if limits else None,
            )
        )
    return found, missing


STYLE = """<style>text{font:13px system-ui,sans-serif;fill:#1f2328}.end{text-anchor:end}.page{fill:#fff}
.one{stroke:#8c959f}.range{stroke:#2a6fbb;stroke-width:5}.aim{stroke:#b42318;stroke-width:2}.dot{fill:#0b3d73}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.one{stroke:#6e7681}
.range{stroke:#4c9bf0}.aim{stroke:#ff8f83}.dot{fill:#cae3ff}}</style>"""


def draw(compared: list[Compared]) -> str:
    """The ratios, logarithmic: left of 1 this library is faster."""
    left, width, height = 470, 460, 22
    low = math.log2(min([0.5, *(c.low for c in compared if c.low > 0)]))
    high = math.log2(max([2, *(c.high for c in compared if math.isfinite(c.high))]))

    def x(ratio: float) -> float:
        return left + width * (math.log2(min(max(ratio, 2**low), 2**high)) - low) / (high - low)

    bottom = 70 + height * len(compared)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {bottom + 30}" role="img">',
        STYLE, f'<rect class="page" width="1000" height="{bottom + 30}"/>',
        '<text x="20" y="28" font-weight="600">Time of this library / time of the other: the median and its 95 % '
        "interval; red: the aim</text>",
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        parts.append(f'<text class="end" x="{x(2.0**power) + 8:.0f}" y="{bottom + 20}">{2.0**power:g}</text>')
    parts.append(f'<line class="one" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="45" y2="{bottom}"/>')
    for i, c in enumerate(compared):
        y = 60 + height * i
        parts.append(f'<text class="end" x="{left - 12}" y="{y + 4}">{c.row.work} / {c.row.peer}</text>')
        parts.append(f'<line class="range" x1="{x(c.low):.1f}" x2="{x(c.high):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot" cx="{x(c.ratio):.1f}" cy="{y}" r="4"/>')
        if c.row.aim is not None:
            aim = x(c.row.aim)
            parts.append(f'<line class="aim" x1="{aim:.1f}" x2="{aim:.1f}" y1="{y - 8}" y2="{y + 8}"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    versions = (out / "versions.txt").read_text()
    ranks = int(versions.split(" cores, ")[1].split()[0])
    rounds = read(out / "results.txt")
    compared, missing = compare(rounds, ranks)
    header = ["work", "beside", "ours, us", "theirs, us", "ratio (95 %)", "rounds", "limit, us", "aim", "first"]
    print(versions + f"{len(rounds)} rounds\n")
    for cells in [header, ["---"] * len(header), *(c.cells() for c in compared)]:
        print("| " + " | ".join(cells) + " |")
    print()
    for c in compared:
        if c.low > 1 and c.row.why:
            print(f"- {c.row.work}: {c.row.peer} is faster, because {c.row.why}.")
    for name in missing:
        print(f"- not measured: {name}")
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", "what", "microseconds"])
        for i, measured in enumerate(rounds):
            writer.writerows([i, name, time] for name, time in measured.items())
    (out / "ratios.svg").write_text(draw(compared))


if __name__ == "__main__":
    main()
