#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""PyTorch's step of Adam over Gloo, for the models of zero.bench.cpp: whole on every rank, and by ZeroRedundancyOptimizer.

  python3 tests/benchmarks/zero_torch.py [--ranks 2] [--megabytes 25]

Prints medians of milliseconds per step on rank 0. Needs PyTorch.
"""
import argparse
import os
import statistics
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.optim import ZeroRedundancyOptimizer


def model_of(megabytes):
    sizes = [size for _ in range(megabytes) for size in (1 << 18, 512)]
    parameters = [torch.nn.Parameter(torch.full((size,), 0.5)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.25)
    return parameters


def median_step(optimizer):
    times = []
    for _ in range(11):
        torch.distributed.barrier()
        start = time.perf_counter()
        optimizer.step()
        torch.distributed.barrier()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def run(rank, options):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=options.ranks)
    rows = {"whole": median_step(torch.optim.Adam(model_of(options.megabytes)))}
    for views in (False, True):
        name = "ZeroRedundancyOptimizer" + (", parameters_as_bucket_view" if views else "")
        rows[name] = median_step(
            ZeroRedundancyOptimizer(
                model_of(options.megabytes), torch.optim.Adam, parameters_as_bucket_view=views
            )
        )
    if rank == 0:
        for name, milliseconds in rows.items():
            print(f"{name:52} {milliseconds:8.1f} ms")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=25)
    arguments = parser.parse_args()
    torch.multiprocessing.spawn(run, (arguments,), arguments.ranks)
