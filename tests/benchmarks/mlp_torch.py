# SPDX-License-Identifier: BSL-1.0
"""What mlp.bench.cpp measures, with PyTorch's DistributedDataParallel over Gloo: mlp_torch.py <blocks>. It starts
two ranks, or it is the one that RANK names, which meets the other at MASTER_ADDR."""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

MODELS = {"small": ([256, 256, 256, 10], 60), "large": ([1024, 2048, 2048, 10], 10)}


def perceptron(widths):
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def measure(rank, blocks):
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    loss = nn.CrossEntropyLoss()
    for name, (widths, iterations) in MODELS.items():
        torch.manual_seed(1)
        inputs = torch.randn(32, widths[0])
        targets = torch.arange(32) % 10
        alone = perceptron(widths)
        parallel = nn.parallel.DistributedDataParallel
        models = {
            "local": alone,
            "ddp": parallel(perceptron(widths)),
            "ddp_view": parallel(perceptron(widths), gradient_as_bucket_view=True),
        }
        flat = torch.zeros(sum(parameter.numel() for parameter in alone.parameters()))

        def run(what):
            if what == "all_reduce":
                dist.all_reduce(flat)
                return
            model = models.get(what, alone)
            model.zero_grad(set_to_none=True)
            loss(model(inputs), targets).backward()
            if what == "local":
                dist.barrier()
            if what == "local_then_sum":
                dist.all_reduce(flat)

        order = [*models, "local_then_sum", "all_reduce"]
        for block in range(-1, blocks):
            for what in order:
                times = []
                for _ in range(5 if block < 0 else iterations):
                    start = time.perf_counter()
                    run(what)
                    times.append((time.perf_counter() - start) * 1e6)
                if rank == 0 and block >= 0:
                    print("pytorch", name, what, f"{statistics.median(times):.2f}", flush=True)
            order = order[1:] + order[:1]
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(int(os.environ["RANK"]), int(sys.argv[1]))
    else:
        mp.spawn(measure, args=(int(sys.argv[1]),), nprocs=2)
