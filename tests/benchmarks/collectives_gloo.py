# SPDX-License-Identifier: BSL-1.0
"""What collectives.bench.cpp measures, by Gloo: collectives_gloo.py <ranks>

Prints "<name> <ranks> <mode> <bytes> <microseconds>". Needs PyTorch, whose process groups Gloo is.
"""
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20]
BUDGET = float(os.environ.get("BUDGET", "0.1"))


def time_of(data, is_fresh):
    def prepare():
        if is_fresh:
            data.zero_()
        dist.barrier()

    def agree(number):
        agreed = torch.tensor([number])
        dist.broadcast(agreed, 0)
        return int(agreed)

    for _ in range(3):
        prepare()
        dist.all_reduce(data)
    start = time.perf_counter()
    for _ in range(5):
        prepare()
        dist.all_reduce(data)
    one = (time.perf_counter() - start) / 5
    batch = agree(1 if is_fresh else min(max(int(20e-6 / one), 1), 200))
    batches = agree(min(max(int(BUDGET / one / batch), 7), 5000))
    times = []
    for _ in range(batches):
        prepare()
        start = time.perf_counter()
        for _ in range(batch):
            dist.all_reduce(data)
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times)


def measure_rank(rank, ranks, port):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for size in SIZES:
        data = torch.full((size // 4,), float(rank + 1))
        dist.all_reduce(data)
        assert bool((data == ranks * (ranks + 1) / 2).all()), "the sum is wrong"
        for is_fresh in (False, True) if size >= 64 << 10 else (False,):
            data.zero_()
            taken = time_of(data, is_fresh)
            if rank == 0:
                mode = "fresh" if is_fresh else "same"
                print(f"gloo {ranks} {mode} {size} {taken * 1e6:.4f}", flush=True)
    dist.barrier() # PyTorch 2 aborts where rank 0 ends, and with it the store, before the others
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(measure_rank, (world, port), nprocs=world)
