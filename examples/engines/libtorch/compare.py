#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Trains the networks of train.cpp by PyTorch's own DistributedDataParallel and Join over Gloo, in Python, on the same
data and from the same initial values, and prints losses and times of both.

  compare.py PROGRAM FOLDER [--ranks N] [--epochs N] [--momentum N]

PROGRAM is train_libtorch as built, FOLDER that of data.py. Exit status: 0 if losses agree, 77 without PyTorch.
"""
import argparse
import math
import pathlib
import subprocess
import sys
import tempfile
import time

try:
    import torch
except ImportError:
    print(f"skipped: {sys.executable} has no PyTorch; pip install torch numpy")
    sys.exit(77)
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# The most that the losses of the first 10 steps, and the relative held-out losses at the end may differ.
LIMITS = {"f64": (1e-9, 1e-9), "f32": (1e-4, 1e-2)}
FEATURES, HEADS = 32, 4


def convolution(start, end, width, stride):
    return nn.Sequential(
        nn.Conv2d(start, end, width, stride, width // 2, bias=False), nn.BatchNorm2d(end, track_running_stats=False)
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = convolution(1, 8, 3, 1)
        self.first = convolution(8, 8, 3, 1)
        self.second = convolution(8, 8, 3, 1)
        self.third = convolution(8, 16, 3, 2)
        self.fourth = convolution(16, 16, 3, 1)
        self.shortcut = convolution(8, 16, 1, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        x = torch.relu(self.stem(images))
        x = torch.relu(x + self.second(torch.relu(self.first(x))))
        x = torch.relu(self.shortcut(x) + self.fourth(torch.relu(self.third(x))))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.attention = nn.Linear(FEATURES, 3 * FEATURES)
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.second_norm = nn.LayerNorm(FEATURES)
        self.widen = nn.Linear(FEATURES, 4 * FEATURES)
        self.narrow = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x):
        length = x.size(1)
        parts = self.attention(self.norm(x)).view(len(x), length, 3 * HEADS, FEATURES // HEADS)
        query, key, value = parts.transpose(1, 2).chunk(3, 1)
        later = torch.ones((length, length), dtype=torch.bool).triu(1)
        scores = query @ key.transpose(2, 3) / (FEATURES // HEADS) ** 0.5
        mixed = torch.softmax(scores.masked_fill(later, -1e9), -1) @ value
        x = x + self.mix(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(torch.relu(self.widen(self.second_norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter = nn.Embedding(128, FEATURES)
        self.place = nn.Embedding(32, FEATURES)
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(FEATURES, 128)

    def forward(self, letters):
        return self.head(self.second(self.first(self.letter(letters) + self.place(torch.arange(letters.size(1))))))


def read_records(file, size):
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8).view(-1, size)


def read_digits(folder):
    records = read_records(folder / "digits.bin", 145)
    return (records[:, 1:].to(torch.get_default_dtype()) / 255).view(-1, 1, 12, 12), records[:, 0].long()


def read_text(folder):
    lines = read_records(folder / "text.txt", 34).long()
    return lines[:, :32], lines[:, 1:33]


NETWORKS = {"residual": (Residual, read_digits), "transformer": (Transformer, read_text)}


def loss_of(scores, labels):
    return cross_entropy(scores.flatten(0, -2), labels.flatten())


def shard_of(count, rank, ranks, batch):
    """Where the batches of a rank begin and end: it has rank + 1 shares of the samples."""
    shares = ranks * (ranks + 1) // 2
    begin, end = (count * r * (r + 1) // 2 // shares for r in (rank, rank + 1))
    return [(i, min(i + batch, end)) for i in range(begin, end, batch)]


def train(rank, ranks, name, saved, folder):
    make, read = NETWORKS[name]
    inputs, labels = read(folder)
    train_count = len(inputs) - len(inputs) // 5
    test = inputs[train_count:], labels[train_count:]
    network = make()
    network.load_state_dict({k[6:]: v for k, v in saved.items() if k.startswith("value.")})
    optimizer = torch.optim.SGD(
        network.parameters(), lr=float(saved["learning_rate"]), momentum=float(saved["momentum"])
    )
    ddp = DistributedDataParallel(network)
    steps, held_out, seconds = [], [], 0
    for _ in range(int(saved["epochs"])):
        start = time.perf_counter()
        with Join([ddp]):  # divides by the number of ranks, also when some have joined
            for begin, end in shard_of(train_count, rank, ranks, int(saved["batch_size"])):
                optimizer.zero_grad()
                loss = loss_of(ddp(inputs[begin:end]), labels[begin:end])
                loss.backward()
                optimizer.step()
                steps.append(loss.item())
        seconds += time.perf_counter() - start
        with torch.no_grad():
            held_out.append(loss_of(network(test[0]), test[1]).item())
    return steps, held_out, seconds


def report(name, dtype, saved, results):
    """Prints the losses of both, and returns whether they agree."""
    here = [saved[f"steps.{rank}"].tolist() for rank in range(len(results))]
    there = [steps for steps, _, _ in results]
    assert [len(steps) for steps in here] == [len(steps) for steps in there]
    print(f"\n{name}, {dtype}: batches of each rank: {', '.join(str(len(steps)) for steps in here)}")
    print("step   loss of PyTorch  loss of joinable  difference, at most so far")
    longest = len(here) - 1
    most = early = 0
    for step in range(len(here[longest])):
        for one, other in zip(here, there):
            if step < len(one):
                difference = abs(one[step] - other[step])
                most = max(most, math.inf if math.isnan(difference) else difference)
        early = most if step < 10 else early
        if step + 1 in (1, 2, 5, 10) or (step + 1) % 50 == 0 or step + 1 == len(here[longest]):
            print(f"{step + 1:4} {there[longest][step]:17.8f} {here[longest][step]:17.8f} {most:27.0e}")
    one, other = results[0][1][-1], float(saved["held_out"][-1])
    relative = abs(one - other) / one
    rounds = len(here[longest])
    print(f"held out {one:13.8f} {other:17.8f} {relative:19.0e} of it")
    print(f"ms a step {1e3 * results[0][2] / rounds:12.2f} {1e3 * float(saved['seconds']) / rounds:17.2f}", flush=True)
    limits = LIMITS[dtype]
    return early <= limits[0] and relative <= limits[1]


def train_all(rank, ranks, saves, folder, store, verdict):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    agree = True
    for (name, dtype), file in saves.items():
        torch.set_default_dtype(torch.float64 if dtype == "f64" else torch.float32)
        saved = torch.load(file, weights_only=False)  # tensors by name, and a type that PyTorch wants to be asked about
        results = [None] * ranks
        dist.all_gather_object(results, train(rank, ranks, name, saved, folder))
        if rank == 0:
            agree = report(name, dtype, saved, results) and agree
    if rank == 0:
        verdict.put(agree)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", default="1")
    parser.add_argument("--momentum", default="0.6")  # more of it lets rounding in f32 grow beyond the limits
    options = parser.parse_args()
    print(f"PyTorch {torch.__version__}, {options.ranks} processes over Gloo; joinable, {options.ranks} threads")
    with tempfile.TemporaryDirectory() as work:
        saves = {}
        for name in NETWORKS:
            for dtype in LIMITS:
                file = f"{work}/{name}.{dtype}"
                flags = [f"--network={name}", f"--dtype={dtype}", f"--save={file}", f"--ranks={options.ranks}"]
                flags += ["--unweighted", f"--epochs={options.epochs}", f"--momentum={options.momentum}"]
                print(f"joinable trains the {name} network in {dtype}", flush=True)
                subprocess.run([options.program, options.folder, *flags], stdout=subprocess.DEVNULL, check=True)
                saves[name, dtype] = file
        print("PyTorch trains them", flush=True)
        verdict = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (options.ranks, saves, options.folder, f"{work}/store", verdict)
        multiprocessing.spawn(train_all, arguments, options.ranks)
        agree = verdict.get()
    print(f"\nlosses agree: {'yes' if agree else 'no'}")
    sys.exit(not agree)


if __name__ == "__main__":
    main()
