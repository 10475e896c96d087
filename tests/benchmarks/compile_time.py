#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""What it costs to compile a file that includes the library, beside other libraries' headers.

  python3 tests/benchmarks/compile_time.py [--rounds N] [--before FOLDER] [--compilers g++ clang++-19] [--only REGEX]

Compiles one file after the other, N rounds of all, and prints a Markdown table per compiler: median
seconds of CPU (user and system), MiB at most, bytes of the object. The files: a trainer
(compile_time/trainer.cpp); files that only include an umbrella; these two in a program that compiles the
library once, and the source file of such a program; the standard headers that join.hpp includes; Eigen, range-v3 and
libtorch, where they are installed; a trainer of libtorch (compile_time/torch_trainer.cpp) alone and over ranks; the
header of an engine without and with its adapter. --before names another include/ folder of this library, to compare
with; --only leaves out files in whose row that regular expression finds nothing.
"""
import argparse
import importlib.util
import os
import pathlib
import re
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = HERE.parent.parent / "include"
ENGINES = {"eigen": "<Eigen/Core>", "armadillo": "<armadillo>", "xtensor": "<xtensor/xtensor.hpp>"}


def torch_includes():
    """Where the headers of PyPI's torch are, else those of Debian's libtorch-dev."""
    spec = importlib.util.find_spec("torch")
    root = pathlib.Path(spec.origin).parent / "include" if spec else pathlib.Path("/usr/include")
    return [root, root / "torch/csrc/api/include"]


def standard_headers(include, once=False):
    """What join.hpp includes of the standard library and the system, directly or through its own; `once`: in
    a program that compiles the library once."""
    seen, found, todo = set(), set(), ["joinable/join.hpp"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for header in re.findall(r"(?m)^#include <(\S*)>", (include / name).read_text()):
            if not once or not header.endswith(".ipp"):
                (todo.append if header.startswith("joinable/") else found.add)(header)
    return "".join(f"#include <{header}>\n" for header in sorted(found))


def measure(compiler, includes, source, folder):
    """Seconds of CPU, KiB at most and bytes of the object; nothing if it does not compile."""
    output = pathlib.Path(folder) / "unit.o"
    command = [compiler, "-std=c++20", "-O2", *(f"-I{path}" for path in includes), "-c", source, "-o", output]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        return None
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss, output.stat().st_size


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=pathlib.Path, help="include/ of another version of the library")
    parser.add_argument("--compilers", nargs="+", default=["g++", "clang++-19"])
    parser.add_argument("--only", default="", help="what the rows to measure have, as 'adapter'")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        def file(name, text):
            path = pathlib.Path(folder) / f"{name}.cpp"
            path.write_text(text)
            return path

        trainer = HERE / "compile_time/trainer.cpp"
        only = {name: file(name, f"#include <joinable/{name}.hpp>\n") for name in ("join", "core")}
        versions = [("", INCLUDE)] + ([("before: ", arguments.before)] if arguments.before else [])
        once = "#define JOINABLE_SEPARATE_COMPILATION\n"
        rows = []
        for label, include in versions:
            rows.append((f"{label}a trainer: DDP, Step, Join, threads", [include], trainer))
            rows += [(f"{label}`<joinable/{name}.hpp>` alone", [include], path) for name, path in only.items()]
        rows += [
            ("the standard headers of join.hpp", [], file("standard", standard_headers(INCLUDE))),
            ("a trainer, compiled once", [INCLUDE], file("trainer_once", once + trainer.read_text())),
            ("`<joinable/join.hpp>` alone, compiled once", [INCLUDE], file("join_once", once + only["join"].read_text())),
            ("its standard headers", [], file("standard_once", standard_headers(INCLUDE, once=True))),
            ("`<joinable/src.hpp>`, the one source file", [INCLUDE], file("src", once + "#include <joinable/src.hpp>\n")),
            ("`<Eigen/Dense>` alone", ["/usr/include/eigen3"], file("eigen", "#include <Eigen/Dense>\n")),
            ("`<range/v3/all.hpp>` alone", [], file("range", "#include <range/v3/all.hpp>\n")),
            ("`<torch/torch.h>` alone", torch_includes(), file("torch", "#include <torch/torch.h>\n")),
        ]
        torch_trainer = (HERE / "compile_time/torch_trainer.cpp").read_text()
        for label, text in (
            ("alone", ""), ("over ranks", "#define JOINABLE\n"), ("over ranks, compiled once", "#define JOINABLE\n" + once)
        ):
            source = file(f"torch_{label.replace(' ', '_')}", text + torch_trainer)
            rows.append((f"a trainer of libtorch {label}", [INCLUDE, *torch_includes()], source))
        for name, header in ENGINES.items():
            includes = [INCLUDE, "/usr/include/eigen3"]
            own = f"#include {header}\n"
            adapter = f"#include <joinable/interop/{name}.hpp>\n"
            rows += [
                (f"`{header}` without its adapter", includes, file(f"{name}_alone", own)),
                (f"`{header}` with its adapter", includes, file(f"{name}_adapter", own + adapter)),
            ]
        rows = [row for row in rows if re.search(arguments.only, row[0])]
        for compiler in arguments.compilers:
            measured = {row[0]: [] for row in rows}
            for _ in range(arguments.rounds):
                for name, includes, source in rows:
                    measured[name].append(measure(compiler, includes, source, folder))
            print(f"\n| {compiler} -O2 | CPU seconds | MiB | bytes of the object |\n|---|---|---|---|")
            for name, results in measured.items():
                if None in results:
                    print(f"| {name} | does not compile, or is not installed | | |")
                    continue
                seconds, kib, size = (statistics.median(values) for values in zip(*results))
                print(f"| {name} | {seconds:.2f} | {kib / 1024:.0f} | {size:.0f} |", flush=True)


main()
