#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes the reference to build/doxygen/html by doxygen, and fails on its warnings.

No errors are members of classes and deduction guides without a docstring (trivial ones have none),
and that doxygen knows nothing of std::ranges, where it sees a specialisation. Two errors are added: a
public concept without a page, or without the table of its expressions, and a public name without an example: no block of
code of a page, all of which tests/readme.py compiles, and no program of examples/ has joinable:: with that name. Text and
comments do not count.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build/doxygen"
NO_ERRORS = [
    r"Member \w+\(.*\) -> .* is not documented",
    r"Member .* of (class|struct|union) .* is not documented",
    r"documented symbol 'constexpr bool (std::)?ranges::enable_\w+<.*was not declared or defined",
]



def public_names():
    """Names that users may write: of namespace joinable and the namespaces in it, no members and no specialisations."""
    types, members = set(), set()
    for compound in xml.etree.ElementTree.parse(OUTPUT / "xml/index.xml").getroot():
        name = compound.findtext("name")
        if compound.get("kind") in ("class", "struct", "union", "concept") and name.startswith("joinable::"):
            types.add(name)
        elif compound.get("kind") == "namespace" and re.match(r"joinable\b", name):
            members.update(
                f"{name}::{member.findtext('name')}" for member in compound.findall("member")
                if member.get("kind") != "enumvalue" and "operator" not in member.findtext("name")
            )
    types = {name for name in types if "<" not in name and name.rpartition("::")[0] not in types}
    return {name.removeprefix("joinable::") for name in types | members}


def names_in_code():
    """The names behind joinable:: in the code of README.md, the guide and the examples, without comments."""
    names = set()
    for path in [ROOT / "README.md", *(ROOT / "examples").rglob("*")]:
        if path.suffix not in (".md", ".hpp", ".cpp", ".cu"):
            continue
        code = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            code = "\n".join(re.findall(r"(?ms)^```\w*\n(.*?)^```$", code))
        for qualified in re.findall(r"joinable::((?:\w+::)*\w+)", re.sub(r"//.*", "", code)):
            parts = qualified.split("::")  # of Sharding::none, Sharding is a name
            names.update("::".join(parts[:count]) for count in range(1, len(parts) + 1))
    return names


def errors_of_names():
    for name in sorted(public_names() - names_in_code()):
        yield f"{name} is public, but has no example: write one in examples/reference.md, or move it to detail"


shutil.rmtree(OUTPUT / "xml", ignore_errors=True)
OUTPUT.mkdir(parents=True, exist_ok=True)
result = subprocess.run(
    ["doxygen", "tests/reference/Doxyfile"], cwd=ROOT, capture_output=True, text=True, check=False
)
warnings = [
    line for line in result.stderr.splitlines() if not any(re.search(p, line) for p in NO_ERRORS)
]
if result.returncode != 0:
    warnings.append(f"doxygen failed with status {result.returncode}")

concepts = set()
for path in sorted((ROOT / "include").rglob("*.hpp")):
    text = re.sub(r"(?s)namespace \w*:*detail \{.*?\} // namespace \w*:*detail", "", path.read_text())
    if not re.search(r"namespace v0 \{ namespace detail \{", text):
        concepts.update(re.findall(r"(?m)^concept (\w+)", text))
for concept in sorted(concepts):
    page = OUTPUT / f"html/conceptjoinable_1_1{concept}.html"
    if not page.is_file():
        warnings.append(f"concept {concept} has no page: give it a docstring")
    elif "markdownTable" not in page.read_text():
        warnings.append(f"concept {concept} has no table of its expressions in its docstring")

warnings += errors_of_names()

for warning in warnings:
    print(warning, file=sys.stderr)
print(f"reference of {len(concepts)} concepts in {OUTPUT.relative_to(ROOT)}/html: "
      + (f"{len(warnings)} errors" if warnings else "no warnings"))
sys.exit(bool(warnings))
