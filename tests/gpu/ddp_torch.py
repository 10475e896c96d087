# SPDX-License-Identifier: BSL-1.0
"""The iteration that iteration.hpp measures, with PyTorch's DistributedDataParallel over NCCL, and one table of all.

ddp_torch.py <ranks> <files of perceptron.cpp and libtorch.cpp>: the same perceptron of 25 million numbers, the same
definitions, variants in turn. Ranks that share a GPU seem to be on several machines. An aim that is missed is printed.
"""
import contextlib
import logging
import os
import socket
import statistics
import sys
import time
import warnings

LAYERS, WIDTH, ROUNDS, SECONDS = 8, 1768, 11, 12
CONFIGURATIONS = [(dtype, batch) for batch in (32, 4096) for dtype in ("f32", "bf16")]
OURS, LIBTORCH, THEIRS = "joinable", "libtorch", "PyTorch"


def table(rows):
    """rows: {(dtype, batch): {(program, variant): numbers of iteration.hpp's write()}}"""
    print("Microseconds of an iteration; exposed and ratio are beside the passes alone of the same program.")
    print("elapsed: between two events on the stream. GPU alone: the same where the host leaves all iterations on the")
    print("stream before the first one runs, so that no time of the host is in it; (*) where it could not.")
    line = "{:<10}{:<21}{:>9}{:>9}{:>8} |{:>10}{:>9}{:>8}{:>3} |{:>8}"
    for (dtype, batch), of in rows.items():
        head = ("elapsed", "exposed", "ratio", "GPU alone", "exposed", "ratio", "", "host")
        print(line.format(f"{dtype}, {batch}", "", *head))
        for (program, variant), numbers in of.items():
            passes, exposed, ratio, alone, alone_exposed, alone_ratio, host, is_alone = numbers
            elapsed = (f"{passes + exposed:.1f}", f"{exposed:.1f}", f"{ratio:.3f}")
            of_gpu = (f"{alone + alone_exposed:.1f}", f"{alone_exposed:.1f}", f"{alone_ratio:.3f}")
            print(line.format(program, variant, *elapsed, *of_gpu, "" if is_alone else "(*)", f"{host:.1f}"))


def verdicts(rows):
    """Aims are for both definitions of time; below 1 us there is nothing to compare."""
    for (dtype, batch), of in rows.items():

        def aim(text, is_met):
            print(f"aim, {dtype}, batch {batch}: {text}: {'met' if is_met else 'missed'}")

        for program in (OURS, LIBTORCH):
            views = of.get((program, "views"))
            if views and batch == 4096:
                text = f"{program}, views, ratio at most 1.01: {views[2]:.3f}, GPU alone {views[5]:.3f}"
                aim(text, max(views[2], views[5]) <= 1.01)
            elif views:
                text = f"{program}, views, exposed at most 10 us: {views[1]:.1f}, GPU alone {views[4]:.1f}"
                aim(text, max(views[1], views[4]) <= 10)
            for mine, other in (("copies", "copies"), ("views", "views"), ("views,guard", "views,Join")):
                a, b = of.get((program, mine)), of.get((THEIRS, other))
                if a and b:
                    text = f"{program}, {mine}, exposed at most as with {THEIRS}, {other}: {a[1]:.1f} and {b[1]:.1f}"
                    is_met = all(max(a[i], 1) <= max(b[i], 1) for i in (1, 4))
                    aim(f"{text}, GPU alone {a[4]:.1f} and {b[4]:.1f}", is_met)


def read(files):
    rows = {configuration: {} for configuration in CONFIGURATIONS}
    for file in files:
        if not os.path.exists(file):
            print(f"{file} is not here")
            continue
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                dtype, batch, program, variant, *numbers = line.split()
                rows.setdefault((dtype, int(batch)), {})[program, variant] = [float(number) for number in numbers]
    return rows


def measure(rank, ranks, port, files):
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    begun = time.monotonic()
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        os.environ["NCCL_HOSTID"] = f"joinable-{rank}"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)

    def agreed(value): # on rank 0's
        told = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(told, 0)
        return told.item()

    def timed(iterate, calls, held_seconds):
        """Microseconds of the GPU and of the host, and whether the GPU waited until the host had left all work."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        if held_seconds > 0:
            torch.cuda._sleep(int(2e9 * held_seconds))
        start.record()
        host = time.perf_counter()
        for _ in range(calls):
            iterate()
        host = time.perf_counter() - host
        is_held = not start.query()
        stop.record()
        torch.cuda.synchronize()
        return 1000 * start.elapsed_time(stop) / calls, 1e6 * host / calls, is_held

    def compare(dtype, batch, until):
        def perceptron():
            torch.manual_seed(1)
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(device, dtype)

        inputs = torch.rand(batch, WIDTH, device=device, dtype=dtype) * 2 - 1
        ones = torch.ones_like(inputs)

        def iteration(model):
            def iterate():
                # A gradient is written, not added to, as in perceptron.cpp; adding to a view takes DDP longer.
                model.zero_grad(set_to_none=True)
                model(inputs).backward(ones)

            return iterate

        views = DistributedDataParallel(perceptron(), gradient_as_bucket_view=True)
        variants = [
            ("passes", iteration(perceptron()), contextlib.nullcontext),
            ("copies", iteration(DistributedDataParallel(perceptron())), contextlib.nullcontext),
            ("views", iteration(views), contextlib.nullcontext),
            ("views,Join", iteration(views), lambda: Join([views])),
        ]
        calls, longest = 2, 0
        rounds = []
        while len(rounds) < ROUNDS + 2:
            one = []
            for _, iterate, context in variants:
                with context():
                    elapsed = timed(iterate, calls, 0)
                    # The sleep is twice as long as the host takes, at 2 GHz.
                    one.append((elapsed, timed(iterate, min(calls, 5), 2e-6 * min(calls, 5) * elapsed[1] + 0.001)))
            rounds.append(one)
            if len(rounds) <= 2: # they warm up, and buckets are cut
                longest = max(elapsed[0] for elapsed, _ in one)
                calls = int(agreed(min(max(20_000 / longest, 1), 50)))
            elif len(rounds) >= 5 and agreed(time.monotonic() > until):
                break
        rounds = rounds[2:]
        middle = lambda number: statistics.median(number(one) for one in rounds)
        result = {}
        for v, (name, _, _) in enumerate(variants):
            result[THEIRS, name] = [
                middle(lambda one: one[0][0][0]),
                middle(lambda one: one[v][0][0] - one[0][0][0]),
                middle(lambda one: one[v][0][0] / one[0][0][0]),
                middle(lambda one: one[0][1][0]),
                middle(lambda one: one[v][1][0] - one[0][1][0]),
                middle(lambda one: one[v][1][0] / one[0][1][0]),
                middle(lambda one: one[v][0][1]),
                all(one[v][1][2] and one[0][1][2] for one in rounds),
            ]
        return result

    rows = read(files) if rank == 0 else {}
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    for i, (dtype, batch) in enumerate(CONFIGURATIONS):
        measured = compare(dtypes[dtype], batch, begun + SECONDS * (i + 1) / len(CONFIGURATIONS))
        if rank == 0:
            rows[dtype, batch].update(measured)
    if rank == 0:
        millions = 1e-6 * LAYERS * WIDTH**2
        print(f"PyTorch {torch.__version__}, {LAYERS} gradients, {millions:.1f} million numbers, {ranks} ranks")
        table(rows)
        verdicts(rows)
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    if sys.argv[1] == "1": # a further process would import PyTorch once more
        measure(0, 1, chosen, sys.argv[2:])
    else:
        import torch.multiprocessing

        torch.multiprocessing.spawn(measure, args=(int(sys.argv[1]), chosen, sys.argv[2:]), nprocs=int(sys.argv[1]))
