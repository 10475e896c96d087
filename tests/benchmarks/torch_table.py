#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Training with libtorch: bench_torch beside PyTorch's DistributedDataParallel and Join over Gloo.

  python3 tests/benchmarks/torch_table.py PROGRAM [--ranks 2] [--rounds 5] [--iterations 30] [--only WAY]

Runs all, one after the other, several rounds, and prints a Markdown table: the median of milliseconds per
iteration, and the median of its ratios to ranks that train each alone at the same time. Needs PyTorch.
"""
import argparse
import os
import statistics
import subprocess
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 5


def train(rank, options, views, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=options.ranks)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    )
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(16, 1024), torch.randint(10, (16,))
    times = []
    with Join([ddp]):
        for _ in range(options.iterations + WARM_UP):
            begin = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - begin))
    if rank == 0:
        results.put(statistics.median(times[WARM_UP:]))
    torch.distributed.destroy_process_group()


def pytorch(options, views):
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train, (options, views, results), options.ranks)
    return results.get()


def joinable(options, kind, way):
    command = [options.program, kind, str(options.ranks), str(options.iterations), way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", help="bench_torch, as built")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--only", choices=["pytorch", "pytorch_views"], help="prints one time, in microseconds")
    options = parser.parse_args()
    if options.only:
        print("iteration", 1e3 * pytorch(options, options.only == "pytorch_views"))
        return
    ways = {
        "thread ranks, apart": lambda: joinable(options, "threads", "apart"),
        "one rank, the other core idle": lambda: joinable(options, "alone", "apart"),
        "apart, and a barrier after each iteration": lambda: joinable(options, "threads", "meet"),
    }
    shown = {"unsynced": "no sums", "copies": "heap", "views": "views", "kept": "views, `zero_grad(false)`"}
    for kind, ranks in ("threads", "thread"), ("processes", "process"):
        for way, name in shown.items():
            name = f"joinable, {ranks} ranks, {name}"
            ways[name] = lambda kind=kind, way=way: joinable(options, kind, way)
    ways["PyTorch, Gloo"] = lambda: pytorch(options, False)
    ways["PyTorch, Gloo, `gradient_as_bucket_view`"] = lambda: pytorch(options, True)
    times = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            times[name].append(way())
    apart = next(iter(times.values()))
    print(f"| PyTorch {torch.__version__}, {options.ranks} ranks | ms per iteration | / apart |\n|---|---|---|")
    for name, values in times.items():
        ratio = statistics.median(value / base for value, base in zip(values, apart))
        print(f"| {name} | {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}) | {ratio:.2f} |")


if __name__ == "__main__":
    main()
