# SPDX-License-Identifier: BSL-1.0
"""What measurements.hpp calls exposed, with PyTorch's DistributedDataParallel over NCCL, beside joinable's.

ddp_torch.py <ranks> <file that perceptron.cpp wrote>: the same perceptron of 25 million numbers. Ranks that share a
GPU seem to be on several machines.
"""
import os
import socket
import statistics
import sys

LAYERS, WIDTH, ROUNDS, CALLS = 8, 1768, 11, 5


def verdict(name, ours, theirs):
    """What is exposed of an iteration; below 1 us there is nothing to compare."""
    ratio = max(ours, 1.0) / max(theirs, 1.0)
    print(f"exposed with {name}, joinable / PyTorch: {ratio:.2f}, aim 1: {'met' if ratio <= 1 else 'missed'}", flush=True)


def measure(rank, ranks, port, file):
    import torch
    import torch.distributed as dist
    from torch import nn

    gpus = torch.cuda.device_count()
    if ranks > gpus:
        os.environ["NCCL_HOSTID"] = f"joinable-{rank}"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank % gpus)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)

    def perceptron():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()

    models = [
        perceptron(),
        nn.parallel.DistributedDataParallel(perceptron()),
        nn.parallel.DistributedDataParallel(perceptron(), gradient_as_bucket_view=True),
    ]
    inputs = torch.randn(32, WIDTH, device="cuda")

    def microseconds(model):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(CALLS):
            model.zero_grad(set_to_none=True) # a gradient is written, not added to, as in perceptron.cpp
            model(inputs).sum().backward()
        stop.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(stop) / CALLS

    rounds = [[microseconds(model) for model in models] for _ in range(ROUNDS + 2)][2:]
    if rank == 0:
        copies = statistics.median(b - a for a, b, _ in rounds)
        views = statistics.median(c - a for a, _, c in rounds)
        passes = statistics.median(a for a, _, _ in rounds)
        print(
            f"PyTorch {torch.__version__}: {LAYERS} gradients, {1e-6 * LAYERS * WIDTH**2:.1f} million numbers,"
            f" {ranks} ranks: exposed us: copies {copies:.1f}, views {views:.1f}; the passes alone {passes:.1f}",
            flush=True,
        )
        if os.path.exists(file):
            with open(file) as written:
                ours = [float(number) for number in written.read().split()]
            print(f"the passes alone, joinable's by cuBLAS / PyTorch's: {ours[2] / passes:.2f}", flush=True)
            verdict("copies", ours[0], copies)
            verdict("views", ours[1], views)
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    torch.multiprocessing.spawn(measure, args=(int(sys.argv[1]), chosen, sys.argv[2]), nprocs=int(sys.argv[1]))
