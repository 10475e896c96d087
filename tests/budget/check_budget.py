#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""What including the library costs, compared with tests/budget/budget.json.

For each .cpp file here, compiled by clang++-19 at -O0, as far as budget.json names it:
  own_lines       lines of joinable's headers after preprocessing that are not empty
  instantiations  class and function templates instantiated for types of joinable
  added           how many more of these than core.cpp has
  object_bytes    the object file, by g++ and by clang++-19 at -O2: including emits no code
A number more than 5 % above its budget fails, more than 2 % is noted; limits are absolute. The
standard headers that joinable's headers include must be in the list, and those that a file must
never reach may not come by way of others either. What depends on the machine or on the standard
library's version is printed, not judged: seconds, and all instantiations.

  python3 tests/budget/check_budget.py [NAME...]  compares
  python3 tests/budget/check_budget.py --update   writes what is measured as the budget; say why in
                                                  the commit. Lists and limits are edited by hand.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = HERE.parent.parent / "include"
BUDGET = HERE / "budget.json"
COMPILER = "clang++-19"
CUDA_INCLUDE = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
FAILS_ABOVE = 1.05
NOTED_ABOVE = 1.02


def run(*arguments, compiler=COMPILER):
    command = [compiler, "-std=c++20", f"-I{INCLUDE}", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout


def preprocess(source):
    """Lines of our headers that are not empty, and the standard's headers: included, reached."""
    lines, ours, reached, current = 0, set(), set(), None
    for line in run("-E", source).splitlines():
        marker = re.match(r'# \d+ "([^"]+)"', line)
        if marker:
            path = pathlib.Path(marker.group(1))
            current = path if path.is_relative_to(INCLUDE) else None
            if current:
                ours.add(current)
            elif re.search(r"/c\+\+/(\d+/|v1/)[a-z_]+$", str(path)):
                reached.add(path.name)
        elif current and line.strip():
            lines += 1
    included = set()
    for path in ours:
        included.update(re.findall(r"(?m)^\s*#\s*include <([a-z_/.]+)>", path.read_text()))
    return lines, {name for name in included if not name.startswith("joinable/")}, reached


def instantiate(source):
    """Instantiations for types of joinable, all instantiations, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "unit.o"
        started = time.monotonic()
        run("-c", "-ftime-trace", "-ftime-trace-granularity=0", source, "-o", output)
        seconds = time.monotonic() - started
        events = json.loads(output.with_suffix(".json").read_text())["traceEvents"]
    names = [
        event["args"]["detail"]
        for event in events
        if event["name"] in ("InstantiateClass", "InstantiateFunction")
    ]
    return sum("joinable::" in name for name in names), len(names), seconds


def object_bytes(source):
    """The larger of what g++ and clang make of a file at -O2: including must not emit code."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "unit.o"
        sizes = []
        for compiler in ("g++", COMPILER):
            run("-O2", f"-isystem{CUDA_INCLUDE}", "-c", source, "-o", output, compiler=compiler)
            sizes.append(output.stat().st_size)
    return max(sizes)


def judge(name, what, value, entry):
    """One line about the number, and what is wrong with it."""
    budget = entry["budget"].get(what, 0)
    limit = entry["limit"].get(what, value)
    line = f"  {what:14} {value:6}, budget {budget}" + (f", limit {limit}" if limit != value else "")
    if value > limit:
        return line, f"{name}: {what} is {value}, but the limit is {limit}: make it cheaper"
    if value > FAILS_ABOVE * budget:
        return line, (
            f"{name}: {what} is {value}, more than 5 % above its budget of {budget}: find what "
            "became expensive (git diff include; a heavier include, a new template for every "
            "participant), or run python3 tests/budget/check_budget.py --update and say why in "
            "the commit"
        )
    if value > NOTED_ABOVE * budget:
        return f"{line}: more than 2 % above", None
    if value * FAILS_ABOVE < budget:
        return f"{line}: more than 5 % below, lower it by --update", None
    return line, None


def judge_headers(name, included, reached, entry):
    listed = set(entry["std_headers"])
    for header in sorted(included - listed):
        yield (
            f"{name}: a header of joinable includes <{header}>, which is not among the std_headers "
            f"of {BUDGET.name}: do without it, or add it there and say why in the commit"
        )
    for header in sorted(listed - included):
        yield f"{name}: no header includes <{header}> any more: remove it from {BUDGET.name}"
    for header in sorted(reached & set(entry["never_reached"])):
        yield f"{name}: <{header}> is reached, but must not be: find who includes it by -H"


def measure(name, entry):
    """What is measured, headers that are included and reached, and what is printed but not judged."""
    source = HERE / f"{name}.cpp"
    measured = {}
    if "object_bytes" in entry["limit"]:
        measured["object_bytes"] = object_bytes(source)
    if "instantiations" not in entry["budget"]:
        return measured, set(), set(), f"{name}:"
    lines, included, reached = preprocess(source)
    own, everything, seconds = instantiate(source)
    measured |= {"own_lines": lines, "instantiations": own}
    return measured, included, reached, f"{name}: {everything} instantiations in all, compiled in {seconds:.1f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write what is measured")
    parser.add_argument("names", nargs="*", help="what to compare, core and these; without any, everything")
    options = parser.parse_args()
    if not shutil.which(COMPILER):
        print(f"skipped: {COMPILER} is not installed")
        return
    budget = json.loads(BUDGET.read_text())
    chosen = [name for name in budget if not options.names or name in ("core", *options.names)]
    if "nccl" in chosen and not (CUDA_INCLUDE / "nccl.h").exists():
        print(f"nccl: skipped, there is no {CUDA_INCLUDE / 'nccl.h'}")
        chosen.remove("nccl")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(chosen, pool.map(lambda name: measure(name, budget[name]), chosen)))
    errors = []
    for name, (measured, included, reached, title) in results.items():
        entry = budget[name]
        print(title)
        if "added" in entry["limit"]:
            measured["added"] = measured["instantiations"] - results["core"][0]["instantiations"]
        if options.update:
            entry["budget"] = measured
        for what, value in measured.items():
            line, error = judge(name, what, value, entry)
            print(line)
            errors += [error] if error else []
        if "std_headers" in entry:
            errors += judge_headers(name, included, reached, entry)
    for error in errors:
        print(error, file=sys.stderr)
    if options.update:
        BUDGET.write_text(json.dumps(budget, indent=2) + "\n")
    sys.exit(bool(errors))


main()
