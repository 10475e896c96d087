# SPDX-License-Identifier: BSL-1.0
"""What measurements.hpp calls exposed, with PyTorch's DistributedDataParallel over NCCL: ddp_torch.py <ranks>.

A perceptron of 25 million numbers; ranks that share a GPU seem to be on several machines.
"""
import os
import socket
import statistics
import sys

LAYERS, WIDTH, ROUNDS, CALLS = 8, 1768, 11, 5


def measure(rank, ranks, port):
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
            model(inputs).sum().backward()
        stop.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(stop) / CALLS

    rounds = [[microseconds(model) for model in models] for _ in range(ROUNDS + 2)][2:]
    if rank == 0:
        middle = lambda numbers: f"{statistics.median(numbers):.1f}"
        print(
            f"PyTorch {torch.__version__}: {LAYERS} gradients, {1e-6 * LAYERS * WIDTH**2:.1f} million numbers,"
            f" {ranks} ranks: exposed us: copies {middle([b - a for a, b, _ in rounds])},"
            f" views {middle([c - a for a, _, c in rounds])};"
            f" the passes alone {middle([a for a, _, _ in rounds])}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    torch.multiprocessing.spawn(measure, args=(int(sys.argv[1]), chosen), nprocs=int(sys.argv[1]))
