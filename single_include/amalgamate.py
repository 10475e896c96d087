#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes single_include/joinable/join.hpp: <joinable/join.hpp> and all that it includes, as one file.

  python3 single_include/amalgamate.py           writes the file
  python3 single_include/amalgamate.py --check   fails when the file is not what would be written

Every header is pasted once, before the first one that includes it; one that is only included
where a condition holds is pasted under that condition. The text depends on the headers
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


def lines_of(name):
    """Each line of a header but its first two, and the conditions that it stands under."""
    path = INCLUDE / name
    if not path.is_file():
        raise Unsupported(f"<{name}> is included, but include/{name} does not exist")
    text = path.read_text(encoding="utf-8")
    if not text.startswith(f"{LICENCE}\n#pragma once\n"):
        raise Unsupported(f"include/{name} does not start with the SPDX line and #pragma once")
    conditions = []
    for number, line in enumerate(text.splitlines()[2:], 3):
        directive = DIRECTIVE.match(line)
        keyword = directive.group(1) if directive else ""
        if keyword == "endif":
            conditions.pop()
        elif keyword in ("else", "elif"):
            conditions[-1] = None # not the condition of the #if
        yield number, line, tuple(conditions)
        if keyword in ("if", "ifdef", "ifndef"):
            conditions.append(line)


class Amalgamation:
    def __init__(self, name):
        self.system = set()  # included unconditionally: hoisted to the top, each once
        self.unconditional = set()
        self.find_unconditional(name)
        self.seen = {}  # by name, the condition under which a header is pasted
        self.sections = []
        self.add(name, ())

    def find_unconditional(self, name):
        self.unconditional.add(name)
        for _, line, conditions in lines_of(name):
            include = INCLUDES.fullmatch(line)
            if include and not conditions and include.group(2).startswith("joinable/"):
                if include.group(2) not in self.unconditional:
                    self.find_unconditional(include.group(2))

    def add(self, name, outer):
        """Pastes a header, and before it those that it includes. `outer`: the conditions of the line
        that includes it."""
        outer = () if name in self.unconditional else outer
        if name in self.seen:
            if self.seen[name] != outer:
                raise Unsupported(f"<{name}> is included under two conditions: {self.seen[name]}, {outer}")
            return
        self.seen[name] = outer
        if len(outer) > 1 or None in outer:
            raise Unsupported(f"<{name}> is included under {outer}; one #if without #else can be pasted")
        kept = []
        for number, line, conditions in lines_of(name):
            directive = DIRECTIVE.match(line)
            if not directive or directive.group(1) != "include":
                kept.append(line)
                continue
            include = INCLUDES.fullmatch(line)
            if not include:
                raise Unsupported(f"include/{name}:{number}: expected #include <header>, got {line}")
            quote, header, _ = include.groups()
            if quote == "<" and header.startswith("joinable/"):
                self.add(header, conditions or outer)
            elif quote == "<" and not conditions and not outer:
                self.system.add(header)
            elif quote == "<":
                kept.append(line)
            else:
                raise Unsupported(f"include/{name}:{number}: includes are written <joinable/...>")
        if outer:
            kept = [outer[0], "", *kept, "", "#endif"]
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
    try:
        amalgamation = Amalgamation("joinable/join.hpp")
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
