#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""How many instructions the library's short paths take, compared with tests/budget/instructions.json.

Compiles instructions/paths.cpp by g++ at -O2 and runs each path under callgrind, which counts every
instruction, so load of the machine does not matter. No path waits: each has one rank, or a peer that
replays what it said when both ran. A count more than 3 % above its budget fails. The budget holds for
one major version of g++: another one is printed, not judged.

  python3 tests/budget/check_instructions.py [NAME...]  compares
  python3 tests/budget/check_instructions.py --update   writes what is measured as the budget; say why
                                                        in the commit
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = HERE.parent.parent / "include"
BUDGET = HERE / "instructions.json"
ITERATIONS = 1000  # of paths.cpp
FAILS_ABOVE = 1.03


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stderr}")
    return result


def count(program, path):
    """Instructions of one iteration."""
    said = run(
        "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no",
        "--toggle-collect=joinable_measured", program, path,
    ).stderr
    return int(re.search(r"Collected : (\d+)", said).group(1)) // ITERATIONS


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="NAME")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    budget = json.loads(BUDGET.read_text())
    known = budget["instructions"]
    unknown = [path for path in options.paths if path not in known]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: not in {BUDGET.name}, which has {', '.join(known)}")
    version = int(run("g++", "-dumpversion").stdout.split(".")[0])
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "paths"
        run(
            "g++", "-std=c++20", "-O2", "-DNDEBUG", f"-I{INCLUDE}", HERE / "instructions/paths.cpp",
            "-o", program, "-pthread",
        )
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            names = options.paths or list(known)
            measured = dict(zip(names, pool.map(lambda path: count(program, path), names)))
    if options.update:
        budget["g++"] = version
        known.update(measured)
        BUDGET.write_text(json.dumps(budget, indent=2) + "\n")
        return
    is_judged = version == budget["g++"]
    if not is_judged:
        print(f"skipped: the budget is of g++ {budget['g++']}, and this is {version}: nothing is judged")
    failed = []
    for path, value in measured.items():
        share = 100 * value / known[path] - 100
        print(f"  {path:20} {value:7} instructions an iteration, {share:+.1f} % of its budget")
        if is_judged and value > FAILS_ABOVE * known[path]:
            failed.append(path)
    if failed:
        sys.exit(
            f"{', '.join(failed)}: more than 3 % above the budget: find what became slower by "
            "callgrind_annotate, or run python3 tests/budget/check_instructions.py --update and say why "
            "in the commit"
        )


if __name__ == "__main__":
    main()
