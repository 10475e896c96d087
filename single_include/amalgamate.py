#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes single_include/joinable/join.hpp: <joinable/join.hpp> and all that it includes, as one file.

  python3 single_include/amalgamate.py           writes the file
  python3 single_include/amalgamate.py --check   fails when the file is not what would be written

Every header is pasted once, before the first one that includes it. The text depends on the headers
alone (no date, no path), so that the same headers always give the same bytes.
"""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
OUTPUT = ROOT / "single_include/joinable/join.hpp"
LICENCE = "// SPDX-License-Identifier: BSL-1.0"
TOP = f"""{LICENCE}
#pragma once

// joinable as one header, for projects that copy one file. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.
"""

DIRECTIVE = re.compile(r"\s*#\s*(\w+)")
INCLUDES = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]\s*(//.*)?')


class Unsupported(Exception):
    """A header is written in a way that cannot be pasted."""


class Amalgamation:
    def __init__(self):
        self.system = set()  # included unconditionally: hoisted to the top, each once
        self.seen = set()
        self.sections = []

    def add(self, name):
        if name in self.seen:
            return
        self.seen.add(name)
        path = INCLUDE / name
        if not path.is_file():
            raise Unsupported(f"<{name}> is included, but include/{name} does not exist")
        text = path.read_text(encoding="utf-8")
        if not text.startswith(f"{LICENCE}\n#pragma once\n"):
            raise Unsupported(f"include/{name} does not start with the SPDX line and #pragma once")
        kept = []
        depth = 0  # of #if
        for number, line in enumerate(text.splitlines()[2:], 3):
            directive = DIRECTIVE.match(line)
            keyword = directive.group(1) if directive else ""
            depth += keyword in ("if", "ifdef", "ifndef")
            depth -= keyword == "endif"
            if keyword != "include":
                kept.append(line)
                continue
            include = INCLUDES.fullmatch(line)
            if not include:
                raise Unsupported(f"include/{name}:{number}: expected #include <header>, got {line}")
            quote, header, _ = include.groups()
            if quote == "<" and header.startswith("joinable/"):
                if depth:
                    raise Unsupported(
                        f"include/{name}:{number}: <{header}> is included under a condition, but a "
                        "header is pasted once for all: move the condition into that header"
                    )
                self.add(header)
            elif quote == "<" and not depth:
                self.system.add(header)
            elif quote == "<":
                kept.append(line)
            else:
                raise Unsupported(f"include/{name}:{number}: includes are written <joinable/...>")
        body = re.sub(r"\n{3,}", "\n\n", "\n".join(kept).strip("\n"))
        # tests/cmake/single_include.cmake reads these lines
        self.sections.append(f"// ---- {name}\n\n{body}\n")

    def text(self):
        includes = "".join(f"#include <{header}>\n" for header in sorted(self.system))
        return "\n".join([TOP, includes, *self.sections])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when it is stale")
    check = parser.parse_args().check
    amalgamation = Amalgamation()
    try:
        amalgamation.add("joinable/join.hpp")
    except Unsupported as error:
        sys.exit(f"single_include/amalgamate.py: {error}")
    text = amalgamation.text().encode()
    name = OUTPUT.relative_to(ROOT)
    if check:
        if not OUTPUT.is_file() or OUTPUT.read_bytes() != text:
            sys.exit(
                f"{name} is not what include/joinable gives now: "
                "run python3 single_include/amalgamate.py and commit the result"
            )
        print(f"{name} is up to date")
        return
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_bytes(text)
    print(f"{name}: {len(amalgamation.seen)} headers, {len(text.splitlines())} lines")


main()
