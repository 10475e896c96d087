#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Prints the lines of communicator/nccl and device/cuda that no test over the fakes reaches.

  python3 tests/unreached.py [--build FOLDER]

Builds the suites of these rooms by g++ for gcov, runs them and adds up what all of them reached. The
page of NCCL's fake lists the lines that cannot be reached, with their reasons: any other one fails.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include/joinable"
PAGE = ROOT / "tests/support/fake_nccl/README.md"
ROOMS = ("communicator/nccl/", "device/cuda/")
PROGRAM = "test_devices"


def build_and_run(build):
    """Counts of earlier runs would be added to."""
    for counts in build.rglob("*.gcda"):
        counts.unlink()
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_COMPILER": "g++",
        "CMAKE_CXX_FLAGS": "--coverage -fprofile-update=atomic",
        "CMAKE_CXX_FLAGS_DEBUG": "-O0",
        "JOINABLE_BUILD_EXAMPLES": "OFF",
        "JOINABLE_BUILD_BENCHMARKS": "OFF",
        "JOINABLE_TEST_UNITS": "ON",
    }
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja"]
    subprocess.run(
        configure + [f"-D{name}={value}" for name, value in options.items()],
        check=True, stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", build, "--target", PROGRAM], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([build / "tests" / PROGRAM, "--minimal"], check=True)


def counts_of(build):
    """By header and line, how often any translation unit ran it."""
    counts = {}
    for notes in build.rglob("*.gcda"):
        found = subprocess.run(
            ["gcov", "--json-format", "--stdout", notes],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=build,
        )
        for file in json.loads(found.stdout)["files"]:
            path = pathlib.Path(file["file"])
            if not path.is_relative_to(INCLUDE):
                continue
            header = str(path.relative_to(INCLUDE))
            if header.startswith(ROOMS):
                lines = counts.setdefault(header, {})
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, 0) + line["count"]
    return counts


def begins_statement(text, number):
    """Lines within a call do not, nor ends of blocks: gcov also counts there what destroys objects when an
    exception passes. The end of an empty handler stands for the handler."""
    before = text[number - 2]
    if re.fullmatch(r"\s*\}[);]*", text[number - 1]):
        return "catch (" in before
    return re.search(r"(^|[{};:])\s*$", re.sub(r"//.*", "", before)) is not None


def unreached(counts):
    """(header, line, text) of each place, which goes on to the next line that was reached."""
    places = []
    for header, lines in sorted(counts.items()):
        text = (INCLUDE / header).read_text(encoding="utf-8").split("\n")
        is_open = False
        for number, count in sorted(lines.items()):
            if count == 0 and not is_open and not begins_statement(text, number):
                continue
            if count == 0 and not is_open:
                places.append((header, number, text[number - 1].strip()))
            is_open = count == 0
    return places


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/unreached")
    build = parser.parse_args().build.resolve()
    build_and_run(build)
    counts = counts_of(build)
    if not all(any(header.startswith(room) for header in counts) for room in ROOMS):
        sys.exit(f"nothing of {' or '.join(ROOMS)} was run: are the CUDA Toolkit and NCCL's header here?")
    listed = set(re.findall(r"(?m)^\| `([\w/]+\.hpp)` \| `(.+?)` \|", PAGE.read_text(encoding="utf-8")))
    found = set()
    errors = 0
    for header, number, text in unreached(counts):
        found.add((header, text))
        if (header, text) not in listed:
            errors += 1
            print(f"{header}:{number}: no test reaches this: {text}")
    for header, text in sorted(listed - found):
        errors += 1
        print(f"{PAGE.relative_to(ROOT)}: {header} has no such line, or a test reaches it: {text}")
    lines = sum(len(of_header) for of_header in counts.values())
    print(f"{lines} lines in {len(counts)} headers, {len(found)} places that no test reaches, {errors} errors")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
