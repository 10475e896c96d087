#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks the architecture: which header may include which, and that none is forgotten."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"

# A header includes lower layers, or its own layer without cycles. The first match counts.
LAYERS = [
    (r"(config|fwd)\.hpp", 0),
    (r"error\.hpp|detail/.*", 1),
    (r"tensor/(dtype|traits|tensor|parameter|shape|buffer)\.hpp", 2),
    (r"communicator/(communicator|capabilities|work)\.hpp", 2),
    (r"tensor/.*|hook/.*|bucket/(.*assignment|options|.*_view|tensor_size)\.hpp|join/options\.hpp", 3),
    (r"join/(guard|hooks|attachments)\.hpp|participant/.*", 5),
    (r"joinable\.hpp|join/.*|bucket/.*|communicator/detail/.*", 4),
    (r"communicator/.*", 5),
    (r"(core|join)\.hpp|interop/.*", 6),
]
OPT_IN = "interop/"  # need other libraries, so nobody gets them unasked; may refuse a compiler
REFUSAL = r"^#if .*\n#error .*\n#endif\n"
NOT_IN_CORE = {"thread", "mutex", "condition_variable", "ranges", "iostream", "regex"}

errors = []


def layer(header):
    for pattern, number in LAYERS:
        if re.fullmatch(pattern, header):
            return number
    errors.append(f"{header}: no layer is given for it in tests/layers.py")
    return 99


headers = {str(p.relative_to(INCLUDE / "joinable")): p.read_text() for p in sorted(INCLUDE.rglob("*.hpp"))}
includes = {
    name: re.findall(r"#include <joinable/(.*)>", text) for name, text in headers.items()
}

for name, text in headers.items():
    for included in includes[name]:
        if included not in headers:
            errors.append(f"{name}: includes {included}, which does not exist")
        elif layer(included) > layer(name):
            errors.append(f"{name} (layer {layer(name)}) includes {included} (layer {layer(included)})")
        elif included.startswith(OPT_IN):
            errors.append(f"{name}: includes {included}, which is opt-in: only users' sources include it")
    if re.search(r'^\s*#\s*include\s+"', text, re.M):
        errors.append(f"{name}: includes are written <joinable/...>, or this check cannot see them")
    if not text.startswith("// SPDX-License-Identifier: BSL-1.0\n#pragma once\n"):
        errors.append(f"{name}: starts without the SPDX line and #pragma once")
    code = re.sub(REFUSAL, "", text, flags=re.M) if name.startswith(OPT_IN) else text
    if name != "config.hpp" and re.search(r"^\s*#\s*(if|ifdef|ifndef|define)\b", code, re.M):
        errors.append(f"{name}: preprocessor conditions and macros belong in config.hpp")
    public = re.sub(r"namespace detail \{.*?\} // namespace detail", "", text, flags=re.S)
    if "v0::detail {" not in text:
        lines = public.split("\n")
        for i, line in enumerate(lines):
            if re.match(r"concept [A-Z]", line) and not any(
                lines[k].startswith("///") for k in range(max(0, i - 2), i)
            ):
                errors.append(f"{name}: {line.split(' =')[0]} has no docstring")


def reachable(name, seen):
    if name not in seen and name in headers:
        seen.add(name)
        for included in includes[name]:
            reachable(included, seen)
    return seen


def visit(name, path):
    if name in path:
        errors.append("cycle: " + " -> ".join(path[path.index(name):] + [name]))
        return
    if name in visited:
        return
    for included in includes.get(name, []):
        visit(included, path + [name])
    visited.add(name)


visited = set()
for name in headers:
    visit(name, [])

core = reachable("core.hpp", set())
full = reachable("join.hpp", set())
for name in headers:
    if name.startswith(OPT_IN):
        continue
    if name not in full:
        errors.append(f"join.hpp does not include {name}")
    elif name not in core and name != "join.hpp" and not name.startswith("communicator/"):
        errors.append(f"core.hpp does not include {name}")
for name in core:
    for header in re.findall(r"#include <([a-z_]+)>", headers[name]):
        if header in NOT_IN_CORE:
            errors.append(f"{name}: core.hpp must not include <{header}>")

listed = set(re.findall(r"include/joinable/(\S+\.hpp)", (ROOT / "CMakeLists.txt").read_text()))
for name in set(headers) ^ listed:
    errors.append(f"{name}: on disk and in the list of CMakeLists.txt must be the same")

for folder in ("tests", "examples"):
    for path in sorted(p for e in ("*.cpp", "*.hpp") for p in (ROOT / folder).rglob(e)):
        if not path.read_text().startswith("// SPDX-License-Identifier: BSL-1.0\n"):
            errors.append(f"{path.relative_to(ROOT)}: starts without the SPDX line")

for error in errors:
    print(error, file=sys.stderr)
print(f"{len(headers)} headers in 7 layers: " + (f"{len(errors)} errors" if errors else "as designed"))
sys.exit(bool(errors))
