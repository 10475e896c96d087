#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes single_include/joinable/: each header that users include, with all that it includes, as one file.

  python3 single_include/amalgamate.py           writes the files
  python3 single_include/amalgamate.py --check   fails when one is not what would be written

Every header is pasted once, where it is first included; one that is only included where conditions
hold is pasted under them. An opt-in header includes "join.hpp" and what else lies beside it, and has
what these lack; what two of the files have is guarded, so that a program includes any of them. The
text depends on the headers alone (no date, no path), so that the same headers always give the same
bytes.
"""
import argparse
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
OUTPUT = ROOT / "single_include/joinable"
# Each after those that it includes, and those that need another library last.
NAMES = (
    "join zero compression groups refresh trace tcp shared_memory algorithms shadowed hierarchical any_communicator per_device src checkpoint mpi gloo cuda nvtx nccl nccl_graphs"
).split()
# What a file includes beside it, because it needs most of that.
BESIDE = {"checkpoint": "zero", "gloo": "tcp", "nccl": "cuda"}
LICENCE = "// SPDX-License-Identifier: BSL-1.0"
TOP = f"""{LICENCE}
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
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
    def __init__(self, name, others):
        """`others`: by name, the files beside this one that may be included."""
        self.others = others
        self.name = f"joinable/{name}.hpp"
        self.beside = []  # included
        self.system = set()  # included unconditionally: hoisted to the top, each once
        self.conditions = {}  # by name, those under which a header is pasted
        self.find_conditions(self.name, ())
        self.sections = []  # header, conditions and text
        self.seen = set()
        for beside in ("join", BESIDE.get(name)):
            if beside in others:
                self.include_beside(beside)
        self.add(self.name)

    def include_beside(self, name):
        if name not in self.beside:
            self.beside.append(name)
            other = self.others[name]
            self.seen.update(h for h in other.seen if set(other.conditions.get(h, ())) <= set(self.conditions.get(h, ())))

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
        beside = name.removeprefix("joinable/").removesuffix(".hpp")
        if beside in self.others:
            self.include_beside(beside)
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
        if not body and name.endswith(".hpp") and any(section[0] == name for section in self.sections):
            return # nothing follows what it includes last
        self.sections.append((name, outer, body))

    def text(self, shared):
        """`shared`: the names of headers that more than one file has."""
        parts = collections.Counter()
        pasted = []
        for name, outer, body in self.sections:
            parts[name] += 1
            before, after = list(outer), ["#endif"] * len(outer)
            if name in shared and body:
                guard = re.sub(r"\W", "_", f"{name.upper()}_PART_{parts[name]}")
                before += [f"#ifndef {guard}", f"#define {guard}"]
                after += ["#endif"]
            if before:
                body = "\n".join([*before, "", body, "", *after])
            body = re.sub(r"\n{3,}", "\n\n", body)
            # tests/cmake/single_include.cmake reads these lines
            pasted.append(f"// ---- {name}\n\n{body}\n")
        if self.name == "joinable/src.hpp": # it has nothing but includes, which follow its macro
            return "\n".join([TOP, *pasted, *(f'#include "{name}.hpp"' for name in self.beside), ""])
        includes = "".join(f"#include <{header}>\n" for header in sorted(self.system))
        beside = "".join(f'#include "{name}.hpp"\n' for name in self.beside)
        return "\n".join([TOP, *([includes] if includes else []), *([beside] if beside else []), *pasted])


def texts():
    """By name, the text of each file."""
    files = {}
    for name in NAMES:
        files[name] = Amalgamation(name, files)
    count = collections.Counter()
    for file in files.values():
        count.update({section[0] for section in file.sections})
    shared = {name for name, n in count.items() if n > 1}
    return {OUTPUT / f"{name}.hpp": file.text(shared).encode() for name, file in files.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when one is stale")
    check = parser.parse_args().check
    try:
        wanted = texts()
    except Unsupported as error:
        sys.exit(f"single_include/amalgamate.py: {error}")
    if check:
        stale = [path for path, text in wanted.items() if not path.is_file() or path.read_bytes() != text]
        if stale:
            sys.exit(
                f"{stale[0].relative_to(ROOT)} is not what include/joinable gives now: "
                "run python3 single_include/amalgamate.py and commit the result"
            )
        print(f"{len(wanted)} single headers are up to date")
        return
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        path.write_bytes(text)
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")


main()
