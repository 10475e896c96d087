#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Writes the reference to build/doxygen/html by doxygen, and fails on its warnings.

No errors are members of classes and deduction guides without a docstring (trivial ones have none),
and that doxygen knows nothing of std::ranges, where it sees a specialisation. One error is added: a
public concept without a page, or without the table of its expressions.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build/doxygen"
NO_ERRORS = [
    r"Member \w+\(.*\) -> .* is not documented",
    r"Member .* of (class|struct|union) .* is not documented",
    r"documented symbol 'constexpr bool (std::)?ranges::enable_\w+<.*was not declared or defined",
]

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

for warning in warnings:
    print(warning, file=sys.stderr)
print(f"reference of {len(concepts)} concepts in {OUTPUT.relative_to(ROOT)}/html: "
      + (f"{len(warnings)} errors" if warnings else "no warnings"))
sys.exit(bool(warnings))
