#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""PyTorch's step of Adam over Gloo, for the models of zero.bench.cpp: whole on every rank, and by ZeroRedundancyOptimizer.
Then whole rounds, with passes that compute next to nothing: by DistributedDataParallel, beside either, and by FSDP.

  python3 tests/benchmarks/zero_torch.py [--ranks 2] [--megabytes 25]

Prints medians of milliseconds per step or round on rank 0, or why there is none. Needs PyTorch.
"""
import argparse
import os
import statistics
import time

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def model_of(megabytes):
    sizes = [size for _ in range(megabytes) for size in (1 << 18, 512)]
    parameters = [torch.nn.Parameter(torch.full((size,), 0.5)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.25)
    return parameters


class Layer(torch.nn.Module):
    """A matrix and a vector of those sizes; a pass reads one element of each."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.full((512, 512), 0.5))
        self.vector = torch.nn.Parameter(torch.full((512,), 0.5))

    def forward(self, number):
        return number + self.matrix[0, 0] + self.vector[0]


def network_of(megabytes):
    return torch.nn.Sequential(*(Layer() for _ in range(megabytes)))


def median_round(network, optimizer):
    number = torch.ones(1)

    def run():
        optimizer.zero_grad()
        network(number).sum().backward()
        optimizer.step()

    return median(run)


def beside_a_model(megabytes, make):
    network = DistributedDataParallel(network_of(megabytes))
    return median_round(network, make(network.parameters(), torch.optim.Adam))


def by_fsdp1(megabytes):
    network = FullyShardedDataParallel(
        network_of(megabytes), auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return median_round(network, torch.optim.Adam(network.parameters()))


def by_fsdp2(megabytes):
    network = network_of(megabytes)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return median_round(network, torch.optim.Adam(network.parameters()))


def whole(parameters, optimizer):
    return optimizer(parameters)


def measure(rows, name, f, *arguments):
    try:
        rows[name] = f"{f(*arguments):8.1f} ms"
    except Exception as error: # on all ranks, because all run the same
        rows[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def median_step(optimizer):
    return median(optimizer.step)


def median(run):
    times = []
    for _ in range(11):
        torch.distributed.barrier()
        start = time.perf_counter()
        run()
        torch.distributed.barrier()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def run(rank, options):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=options.ranks)
    rows = {}
    measure(rows, "step, whole", lambda: median_step(torch.optim.Adam(model_of(options.megabytes))))
    for views in (False, True):
        measure(
            rows,
            "step, ZeroRedundancyOptimizer" + (", parameters_as_bucket_view" if views else ""),
            lambda: median_step(
                ZeroRedundancyOptimizer(
                    model_of(options.megabytes), torch.optim.Adam, parameters_as_bucket_view=views
                )
            ),
        )
    for name, make in (("whole", whole), ("ZeroRedundancyOptimizer", ZeroRedundancyOptimizer)):
        measure(rows, f"round, DistributedDataParallel, {name}", beside_a_model, options.megabytes, make)
    measure(rows, "round, FullyShardedDataParallel", by_fsdp1, options.megabytes)
    measure(rows, "round, fully_shard", by_fsdp2, options.megabytes)
    if rank == 0:
        for name, result in rows.items():
            print(f"{name:58} {result}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=25)
    arguments = parser.parse_args()
    torch.multiprocessing.spawn(run, (arguments,), arguments.ranks)
