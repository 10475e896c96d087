#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Trains the network of train.cpp by PyTorch's own DistributedDataParallel and Join over Gloo, in Python, and prints
its losses beside those of train.cpp.

  bash run.sh --unweighted --save FILE; python3 compare.py FILE
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 8, 3)
        self.linear = torch.nn.Linear(8 * 5 * 5, 10)

    def forward(self, images):
        return self.linear(torch.max_pool2d(torch.relu(self.convolution(images)), 2).flatten(1))


def load(path):
    return torch.load(path, weights_only=False)  # tensors by name, and a type that PyTorch wants to be asked about


def train(rank, world, path):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    saved = load(path)
    dist.init_process_group("gloo", init_method="file://" + path + ".store", rank=rank, world_size=world)
    network = Network()
    network.load_state_dict({k[6:]: v for k, v in saved.items() if k.startswith("value.")})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=float(saved["momentum"]))
    ddp = DistributedDataParallel(network)
    count = sum(k.startswith(f"images.{rank}.") for k in saved)
    for epoch in range(int(saved["epochs"])):
        with Join([ddp]):
            for i in range(count):
                optimizer.zero_grad()
                scores = ddp(saved[f"images.{rank}.{i}"])
                cross_entropy(scores, saved[f"digits.{rank}.{i}"]).backward()
                optimizer.step()
        with torch.no_grad():
            loss = cross_entropy(network(saved["test.images"]), saved["test.digits"]).item()
        losses = [None] * world
        dist.all_gather_object(losses, loss)
        if rank == 0:
            here = float(saved["losses"][epoch])
            off = abs(here - losses[0])
            print(f"{epoch + 1:5} {min(losses):10.5f} to {max(losses):.5f} {here:16.5f} {off:11.0e}", flush=True)
    dist.destroy_process_group()


def main():
    path = os.path.abspath(sys.argv[1])
    world = 1 + max(int(k.split(".")[1]) for k in load(path) if k.startswith("images."))
    print(f"PyTorch {torch.__version__}, {world} processes over Gloo")
    print("epoch  losses of PyTorch  loss of joinable  difference", flush=True)
    if os.path.exists(path + ".store"):
        os.remove(path + ".store")
    multiprocessing.spawn(train, (world, path), nprocs=world)


if __name__ == "__main__":
    main()
