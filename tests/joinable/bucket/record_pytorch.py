#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes recorded_by_pytorch.hpp: what PyTorch's communication hooks deliver to two ranks, with even and uneven inputs.

  python3 tests/joinable/bucket/record_pytorch.py

By hand, where PyTorch is installed. Gradients are small multiples of a power of two, so that they are the same everywhere:
four products of vectors, each smaller than the one before, and noise. So no two directions of a matrix are as strong as each
other, between which rounding would decide. The first right matrices of PowerSGD, which are random, are recorded, too.
"""
import os
import pathlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join

SHAPES = ((24, 40), (7,), (16, 9))
ROUNDS = 50
SHORTER = 30  # inputs of rank 1, if they are uneven
NOTED = (1, 2, 3, 4, 10, 30, 31, 50)
SAMPLES = 5  # elements of each gradient


def gradient(parameter, rank, round_):
    shape = SHAPES[parameter]
    columns = shape[-1]

    def number(i, j):
        return (
            ((5 * i + rank) % 17 - 8) * ((3 * j + parameter) % 13 - 6) / 8
            + ((7 * i + round_) % 11 - 5) * ((5 * j) % 19 - 9) / 32
            + ((3 * i) % 23 - 11) * ((11 * j + round_) % 29 - 14) / 256
            + ((11 * i + 2 * rank) % 13 - 6) * ((7 * j) % 31 - 15) / 1024
            + ((7 * i * i + 13 * j * j * (rank + 1) + 3 * round_ * (i + j)) % 64 - 32) / 16384
        )

    count = torch.Size(shape).numel()
    return torch.tensor([number(k // columns, k % columns) for k in range(count)]).reshape(shape)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))


def samples(gradient_):
    flat = gradient_.flatten()
    return [flat[(k * 37 + 5) % flat.numel()].item() for k in range(SAMPLES)]


def run(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = []
    for hook, matrix_rank in [("fp16", 0), ("bf16", 0), ("powersgd", 1), ("powersgd", 2), ("powersgd", 4)]:
        for inputs in (ROUNDS, SHORTER):
            model = torch.nn.parallel.DistributedDataParallel(Model())
            first = []
            if hook == "powersgd":
                state = powerSGD_hook.PowerSGDState(
                    None, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
                )
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
                randn = torch.randn

                def recorded(*sizes, **options):
                    q = randn(*sizes, **options)
                    first.extend(one.clone() for one in q.reshape(-1, q.shape[-2], q.shape[-1]))
                    return q

                powerSGD_hook.torch.randn = recorded
            else:
                model.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
            noted = []
            with Join([model]):
                for round_ in range(1, (inputs if rank == 1 else ROUNDS) + 1):
                    model.zero_grad()
                    model([gradient(p, rank, round_) for p in range(len(SHAPES))]).backward()
                    if round_ in NOTED:
                        noted.append([samples(weight.grad) for weight in model.module.weights])
            torch.randn = powerSGD_hook.torch.randn = randn if hook == "powersgd" else torch.randn
            by_rows = {one.shape[0]: one for one in first}  # columns of the gradient: 40 or 9
            rights = [by_rows[columns].t().flatten().tolist() if columns in by_rows else [] for columns in (40, 9)]
            results.append((hook, matrix_rank, inputs, rights, noted))
    if rank == 0:
        queue.put(results)
    dist.destroy_process_group()


def numbers(list_):
    return "{" + ", ".join(f"{x!r}F" if "." in repr(x) or "e" in repr(x) else f"{x}.0F" for x in list_) + "}"


def main():
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=run, args=(rank, 29511, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = queue.get()
    for process in ranks:
        process.join()
    lines = [
        "// SPDX-License-Identifier: BSL-1.0",
        f"// What PyTorch {torch.__version__.split('+')[0]}'s hooks deliver to two ranks: written by record_pytorch.py.",
        "#pragma once",
        "",
        "#include <string_view>",
        "#include <vector>",
        "",
        "namespace joinable_tests {",
        "",
        "struct RecordedHook {",
        "    std::string_view hook;",
        "    int rank;   ///< of the matrices",
        "    int inputs; ///< of rank 1",
        "    std::vector<std::vector<float>> rights; ///< the first right matrices of the gradients of two dimensions",
        "    /// By the rounds that were noted, by gradient: some elements of the average.",
        "    std::vector<std::vector<std::vector<float>>> averages;",
        "};",
        "",
        f"inline std::vector<int> const recorded_rounds{{{', '.join(map(str, NOTED))}}};",
        "",
        "inline std::vector<RecordedHook> recorded_hooks() {",
    ]
    names = {}  # the same seed gives even and uneven inputs the same right matrices
    for hook, matrix_rank, inputs, rights, noted in results:
        key = str(rights)
        if key not in names:
            names[key] = f"rights_{len(names)}"
            lines.append(f"    std::vector<std::vector<float>> const {names[key]}{{{', '.join(map(numbers, rights))}}};")
    lines.append("    return {")
    for hook, matrix_rank, inputs, rights, noted in results:
        lines.append(f'        {{"{hook}", {matrix_rank}, {inputs}, {names[str(rights)]},')
        lines.append("         {" + ",\n          ".join("{" + ", ".join(map(numbers, one)) + "}" for one in noted) + "}},")
    lines += ["    };", "}", "", "} // namespace joinable_tests", ""]
    pathlib.Path(__file__).with_name("recorded_by_pytorch.hpp").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
