#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Follows every relative link of every .md file of the repository, and every #anchor into one.

A link leads to a file or folder of the repository; an anchor names a heading as GitHub writes it.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOT_OURS = {"build", ".git"}


def prose(text):
    """`text` without code, in which nothing is a link."""
    text = re.sub(r"(?ms)^ *(```+|~~~+).*?^ *\1 *$", "", text)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text):
    """What GitHub makes of the headings: lower case, without punctuation; a second one gets -1."""
    without_code = re.sub(r"(?ms)^ *(```+|~~~+).*?^ *\1 *$", "", text)
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', without_code))
    times = {}
    for heading in re.findall(r"(?m)^#+ +(.*?) *#*$", without_code):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link shows its text
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(name + (f"-{times[name]}" if name in times else ""))
        times[name] = times.get(name, 0) + 1
    return found


def links(text):
    inline = re.findall(r"\]\(\s*<?([^)>\s]+)>?[^)]*\)", prose(text))
    references = re.findall(r"(?m)^ *\[[^\]]+\]: *<?([^>\s]+)>?", prose(text))
    html = re.findall(r'(?:href|src)="([^"]+)"', prose(text))
    return [link for link in inline + references + html if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


def error_of(page, link):
    """Why `link` in `page` leads nowhere; None if it leads somewhere."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or NOT_OURS & set(target.relative_to(ROOT).parts):
        return "is not in the repository"
    if not target.exists():
        return "does not exist"
    if anchor and target.suffix != ".md":
        return "has an anchor, and only .md files have headings"
    if anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
        return f"has no heading for #{anchor}"
    return None


pages = [p for p in sorted(ROOT.rglob("*.md")) if not NOT_OURS & set(p.relative_to(ROOT).parts)]
count = 0
errors = []
for page in pages:
    for link in links(page.read_text(encoding="utf-8")):
        count += 1
        error = error_of(page, link)
        if error:
            errors.append(f"{page.relative_to(ROOT)}: the link {link} {error}")

for error in errors:
    print(error, file=sys.stderr)
print(f"{count} relative links in {len(pages)} pages: " + (f"{len(errors)} errors" if errors else "all lead somewhere"))
sys.exit(bool(errors))
