#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes single_include/joinable/join.hpp: <joinable/join.hpp> and all that it includes, as one file.

  python3 single_include/amalgamate.py           writes the file
  python3 single_include/amalgamate.py --check   fails when the file is not what would be written

Every header is pasted once, where it is first included; one that is only included where conditions
hold is pasted under them. The text depends on the headers alone (no date, no path), so that the
same headers always give the same bytes.
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

# How X.hpp includes X.ipp, after what it declares.
DEFINITIONS = re.compile(r"(#if JOINABLE_HAS_DEFINITIONS)\n(#include <.*\.ipp>)\n#endif")
DIRECTIVE = re.compile(r"\s*#\s*(\w+)")
INCLUDES = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]\s*(//.*)?')


class Unsupported(Exception):
    """A header is written in a way that cannot be pasted."""


def lines_of(name):
    """Each line of a header but its first two, and the conditions that it stands under. The condition
    of X.ipp is only said with the line that includes it, because that is pasted elsewhere."""
    path = INCLUDE / name
    if not path.is_file():
        raise Unsupported(f"<{name}> is included, but include/{name} does not exist")
    text = path.read_text(encoding="utf-8")
    if not text.startswith(f"{LICENCE}\n#pragma once\n"):
        raise Unsupported(f"include/{name} does not start with the SPDX line and #pragma once")
    conditions = []
    for number, line in enumerate(DEFINITIONS.sub(r"\1 \2", text).splitlines()[2:], 3):
        if line.startswith("#if JOINABLE_HAS_DEFINITIONS "):
            condition, include = line.split(" #")
            yield number, f"#{include}", (*conditions, condition)
            continue
        directive = DIRECTIVE.match(line)
        keyword = directive.group(1) if directive else ""
        if keyword == "endif":
            conditions.pop()
        elif keyword in ("else", "elif"):
            conditions[-1] = None # not the condition of the #if
        yield number, line, tuple(conditions)
        if keyword in ("if", "ifdef", "ifndef"):
            conditions.append(line.partition(" //")[0])


class Amalgamation:
    def __init__(self, name):
        self.system = set()  # included unconditionally: hoisted to the top, each once
        self.conditions = {}  # by name, those under which a header is pasted
        self.find_conditions(name, ())
        self.seen = set()
        self.sections = []
        self.add(name)

    def find_conditions(self, name, outer):
        """What all lines have in common that include a header. `outer`: the conditions of one of them."""
        if None in outer:
            raise Unsupported(f"<{name}> is included by an #if that has an #else; one #if without #else can be pasted")
        known = self.conditions.get(name)
        if known is not None:
            outer = tuple(condition for condition in known if condition in outer)
        if outer == known:
            return
        self.conditions[name] = outer
        for _, line, conditions in lines_of(name):
            include = INCLUDES.fullmatch(line)
            if include and include.group(2).startswith("joinable/"):
                self.find_conditions(include.group(2), (*outer, *(c for c in conditions if c not in outer)))

    def add(self, name):
        """Pastes a header, and before its own text the headers that this includes."""
        if name in self.seen:
            return
        self.seen.add(name)
        outer = self.conditions[name]
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
            if header.endswith(".ipp"): # it needs what comes before
                self.paste(name, kept, outer)
                kept = []
            if quote == "<" and header.startswith("joinable/"):
                self.add(header)
            elif quote == "<" and not conditions and not outer:
                self.system.add(header)
            elif quote == "<":
                kept.append(line)
            else:
                raise Unsupported(f"include/{name}:{number}: includes are written <joinable/...>")
        self.paste(name, kept, outer)

    def paste(self, name, kept, outer):
        body = "\n".join(kept).strip("\n")
        if not body and name.endswith(".hpp") and any(s.startswith(f"// ---- {name}\n") for s in self.sections):
            return # nothing follows what it includes last
        if outer:
            body = "\n".join([*outer, "", body, "", *["#endif"] * len(outer)])
        body = re.sub(r"\n{3,}", "\n\n", body)
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
