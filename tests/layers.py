#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks the architecture: which header may include which, and that none is forgotten.

  python3 tests/layers.py            checks, the picture in include/joinable/README.md too
  python3 tests/layers.py --picture  draws that picture anew from the includes
"""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
PAGE = ROOT / "include/joinable/README.md"

# A header includes lower layers, or its own layer without cycles. The first match counts.
LAYERS = [
    (r"(config|fwd)\.hpp", 0),
    (r"error\.hpp|detail/.*", 1),
    (r"tensor/(dtype|traits|tensor|parameter|shape|buffer|reduce_op)\.hpp", 2),
    (r"communicator/(arena|communicator|capabilities|work)\.hpp", 2),
    (r"device/device\.hpp", 2),
    (r"device/(host|staged_collectives)\.hpp|communicator/(device_of|make_arena)\.hpp", 4),
    (r"tensor/.*|hook/.*|bucket/(.*assignment|options|.*_view|tensor_size)\.hpp|join/options\.hpp", 3),
    (r"join/(guard|hooks|attachments|explain)\.hpp|participant/.*", 5),
    (r"communicator/detail/nccl_arenas\.hpp", 5),
    (r"joinable\.hpp|join/.*|bucket/.*|communicator/(detail/.*|nccl_(options|work|group)\.hpp)", 4),
    (r"communicator/.*", 5),
    (r"data/.*", 3),
    (r"device/cuda_.*", 5),
    (r"(core|join|cuda|nccl|nccl_graphs|nvtx|tcp)\.hpp|interop/.*", 6),
]
# Nobody gets these unasked: they need other libraries, and may refuse a compiler; or a network.
OPT_IN = re.compile(
    r"interop/|participant/captured_step\.hpp|cuda\.hpp|device/(cuda|staged)_|(communicator/(detail/)?)?(nccl|tcp)[_.]|(participant/)?nvtx[_.]"
)
HAS_CONDITIONS = {"config.hpp", "communicator/detail/futex.hpp"}  # what differs between systems
# A header that is empty elsewhere: one condition around all that comes after our own headers.
LINUX_ONLY = (
    r"\n#if defined\(__linux__\) // elsewhere there are no (?:process ranks|such sockets)\n(.*)\n#endif\n$"
)
REFUSAL = r"^#if .*\n#error .*\n#endif\n"
TITLES = [
    "configuration",
    "errors and small tools",
    "what tensors and communicators are",
    "tensors, hooks and plans: nothing communicates yet",
    "one rank's side of the protocol",
    "what users name: guard, participants, communicators",
    "umbrellas",
]
# What core.hpp leaves to join.hpp: own communicators, and what plans before anything communicates.
NOT_FOR_GUARDS = (
    "communicator/", "data/", "bucket/bucketed_view", "bucket/fixed_assignment", "detail/kept_range"
)
NOT_IN_CORE = {"thread", "mutex", "condition_variable", "ranges", "iostream", "regex"}

errors = []
unknown = set()


def layer(header):
    for pattern, number in LAYERS:
        if re.fullmatch(pattern, header):
            return number
    unknown.add(header)
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
        elif OPT_IN.match(included) and not OPT_IN.match(name):
            errors.append(f"{name}: includes {included}, which is opt-in: only users' sources include it")
    if re.search(r'^\s*#\s*include\s+"', text, re.M):
        errors.append(f"{name}: includes are written <joinable/...>, or this check cannot see them")
    if not text.startswith("// SPDX-License-Identifier: BSL-1.0\n#pragma once\n"):
        errors.append(f"{name}: starts without the SPDX line and #pragma once")
    code = re.sub(REFUSAL, "", text, flags=re.M) if OPT_IN.match(name) else text
    code = re.sub(LINUX_ONLY, r"\n\1", code, flags=re.S)
    if name not in HAS_CONDITIONS and re.search(r"^\s*#\s*(if|ifdef|ifndef|define)\b", code, re.M):
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
    if OPT_IN.match(name):
        continue
    if name not in full:
        errors.append(f"join.hpp does not include {name}")
    elif name not in core and name != "join.hpp" and not name.startswith(NOT_FOR_GUARDS):
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



def picture():
    """A mermaid chart: a box per layer, in it a node per folder, arrows that the others do not imply."""
    nodes = {}  # (layer, folder) -> headers
    known = [name for name in headers if layer(name) < len(TITLES)]
    for name in known:
        nodes.setdefault((layer(name), str(pathlib.PurePath(name).parent)), []).append(name)
    node_of = {name: node for node, names in nodes.items() for name in names}
    below = {node: set() for node in nodes}
    for name in known:
        below[node_of[name]].update(node_of[i] for i in includes[name] if i in node_of)

    def beneath(node, path=()):
        direct = below[node] - {node, *path}
        return direct.union(*(beneath(other, (*path, node)) for other in direct))

    def identifier(node):
        return f"{'top' if node[1] == '.' else node[1].replace('/', '_')}{node[0]}"

    lines = ["```mermaid", "flowchart TB"]
    for number in sorted({node[0] for node in nodes}, reverse=True):
        lines.append(f'    subgraph layer{number} ["{number}: {TITLES[number]}"]')
        for node in sorted(node for node in nodes if node[0] == number):
            folder = "" if node[1] == "." else f"<b>{node[1]}/</b><br>"
            names = [pathlib.PurePath(name).stem for name in nodes[node]]
            rows = [", ".join(names[i : i + 3]) for i in range(0, len(names), 3)]
            lines.append(f'        {identifier(node)}["{folder}{"<br>".join(rows)}"]')
        lines.append("    end")
    for node in sorted(nodes, reverse=True):
        direct = below[node] - {node}
        implied = set().union(*(beneath(other, (node,)) for other in direct))
        for other in sorted(direct):
            # two folders of a layer may include each other's headers: neither arrow implies the other
            if other not in implied or other[0] == node[0]:
                lines.append(f"    {identifier(node)} --> {identifier(other)}")
    return "\n".join([*lines, "```"])


def drawn(page):
    """`page` with the picture of the headers between its markers."""
    parts = re.fullmatch(r"(.*<!-- picture[^\n]*-->\n).*?(<!-- end of picture -->.*)", page, re.S)
    if not parts:
        sys.exit(f"{PAGE.relative_to(ROOT)}: has no lines <!-- picture --> and <!-- end of picture -->")
    return f"{parts.group(1)}\n{picture()}\n\n{parts.group(2)}"


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--picture", action="store_true", help="draw the picture anew")
page = PAGE.read_text()
if parser.parse_args().picture:
    PAGE.write_text(drawn(page))
elif drawn(page) != page:
    errors.append(
        f"{PAGE.relative_to(ROOT)}: its picture is not what the headers include now: "
        "run python3 tests/layers.py --picture and commit the result"
    )

errors += [f"{name}: no layer is given for it in tests/layers.py" for name in sorted(unknown)]
for error in errors:
    print(error, file=sys.stderr)
print(f"{len(headers)} headers in 7 layers: " + (f"{len(errors)} errors" if errors else "as designed"))
sys.exit(bool(errors))
