#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Checks the architecture: the rooms of include/joinable, and which room may include which.

  python3 tests/layers.py          checks
  python3 tests/layers.py --write  draws the picture in include/joinable/README.md anew

A room is a folder; X/detail/ belongs to X. The rules:
  R1  A room includes what its row of ROOMS names, and the table has no circle.
  R2  X/detail/ is included by X and the rooms inside X alone.
  R3  A header for users declares in namespace v0, one in detail/ or in an inner room in v0::detail. One that
      declares in v0::detail alone is for another room, or lies in detail/: see FOR_ENGINES.
  R4  No transport includes another one, but NCCL the one whose from_environment() it uses, and Gloo TCP's,
      by which its ranks meet and fail together.
  R5  System headers of one room are included by no other one: see OWNED.
  R6  No #if but where systems differ: see SYSTEMS_DIFFER. Macros are defined in config.hpp.
  R7  Nothing at namespace scope is initialised when a program starts.
  R8  Umbrellas include, and nothing else.
  R9  impl/X.ipp has what X.hpp declares and one source file may compile: X.hpp alone includes it, after
      all that it declares, and JOINABLE_DEFINITION is nowhere else.
  R10 Prose names the actor: it has none of the turns of BANNED. A docstring of a header does not begin with 'What'.
  R11 The first of PARTS includes none of the others.
  R12 The text of an error is for people: no code compares it, or looks for a part of it. Code asks for a type,
      a kind, ranks, or what else AbortReason has.
  R13 Rooms inside communicator/ include each other, and the rooms below them: see BELOW_COMMUNICATORS. They know
      neither agreements nor guards.
"""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
PAGE = ROOT / "include/joinable/README.md"
LISTS = ROOT / "CMakeLists.txt"

# What each room includes. An inner room is for the library only: users include none of its headers.
MEMORY = "communicator/shared_memory"
ROOMS = {
    "base": "",
    "tensor": "base",
    "reduction": "base tensor",
    "device": "base tensor reduction",
    "device/cuda": "base tensor device",
    "hook": "base",
    "communicator": "base tensor device",
    f"{MEMORY}/board": "base tensor device communicator",
    f"{MEMORY}/engine": f"base tensor reduction device communicator {MEMORY}/board",
    f"{MEMORY}/group": f"base tensor communicator {MEMORY}/board {MEMORY}/engine",
    f"{MEMORY}/process": f"base device communicator {MEMORY}/board {MEMORY}/group",
    MEMORY: f"base tensor device communicator {MEMORY}/board {MEMORY}/group {MEMORY}/process",
    "communicator/algorithms": "base tensor reduction communicator",
    "communicator/any": "base tensor device communicator",
    "communicator/hierarchical": "base tensor device communicator communicator/any",
    "communicator/tcp": "base reduction communicator",
    "communicator/mpi": "base tensor reduction device communicator",
    "communicator/gloo": "base tensor reduction device communicator communicator/tcp",
    "communicator/nccl": f"base tensor device device/cuda communicator {MEMORY}",
    "agreement": "base communicator",
    "optimizer": "base tensor reduction device",
    "optimizer/cuda": "tensor device device/cuda optimizer",
    "bucket": "base tensor device communicator agreement",
    "bucket/compression": "base tensor reduction device communicator agreement bucket",
    "join": "base tensor hook communicator agreement",
    "participant": f"base tensor hook device communicator {MEMORY} agreement bucket join",
    "participant/captured": "base tensor communicator communicator/nccl agreement bucket join participant",
    "participant/sharded": "base tensor device communicator agreement optimizer bucket join participant",
    "checkpoint": "base tensor reduction hook device communicator agreement optimizer bucket join participant participant/sharded",
    "trace": "base tensor hook communicator agreement bucket join",
    "data": "base communicator",
    "interop": "base tensor communicator agreement optimizer bucket join participant participant/sharded data",
}
# The parts of the library, in which the picture is drawn; a reader of the first needs none of the others.
PARTS = {
    "joinable: guards, tensors, buckets, data parallelism, ranks of one machine": ROOMS.keys(), # less those below
    "transports": {
        "communicator/algorithms", "communicator/any", "communicator/hierarchical", "communicator/tcp", "communicator/mpi",
        "communicator/gloo", "communicator/nccl", "device/cuda", "participant/captured",
    },
    "sharded training": {"optimizer", "optimizer/cuda", "participant/sharded", "checkpoint"},
    "extras": {"bucket/compression", "trace", "interop"},
}
FOR_ENGINES = {"communicator/staged_collectives.hpp", "participant/refresh.hpp"} # which headers of engines include
INNER = {"reduction", *(room for room in ROOMS if room.startswith(f"{MEMORY}/"))}
TRANSPORTS = {MEMORY, "communicator/tcp", "communicator/mpi", "communicator/gloo", "communicator/nccl"}
BELOW_COMMUNICATORS = {"base", "tensor", "reduction", "device", "device/cuda"}
BELOW = {("communicator/nccl", MEMORY), ("communicator/gloo", "communicator/tcp")}
OWNED = {
    r"sys/.*|linux/.*|pthread\.h": {
        "communicator", f"{MEMORY}/board", f"{MEMORY}/process", MEMORY, "communicator/tcp", "communicator/gloo",
        "checkpoint",
    },
    r"cuda.*": {"device/cuda", "optimizer/cuda", "communicator/nccl"},
    r"nccl\.h": {"communicator/nccl"},
    r"mpi\.h": {"communicator/mpi"},
    r"gloo/.*": {"communicator/gloo"},
    r"nvtx3/.*|range/v3/.*|Eigen/.*|armadillo|xtensor/.*|mdspan|(ATen|c10|torch)/.*": {"interop"},
    r"nlohmann/.*": {"checkpoint"},
}
# Nobody gets these unasked: CMakeLists.txt says why.
IN_LISTS = LISTS.read_text()
OPT_IN, NOT_OPT_IN = (
    "|".join(re.findall(r'"([^"]*)"', IN_LISTS[IN_LISTS.index(f"set({name}"):].split('"\n)', 1)[0] + '"'))
    for name in ("joinable_opt_in", "joinable_not_opt_in")
)
OPT_IN = re.compile(f"(?!{NOT_OPT_IN})(?:{OPT_IN})")
PUBLIC = r"namespace joinable \{ inline namespace v0 \{" # and what ctags understand
# What lies beside the folders: documents lie in the room that they describe.
TOP = {
    ".ci", ".clang-format", ".clang-tidy", ".git", ".gitignore", "CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json",
    "LICENSE", "README.md", "examples", "include", "single_include", "tests", "build",
}
SYSTEMS_DIFFER = {
    "config.hpp", # compilers, too
    "communicator/shared_memory/board/system.hpp", # which config.hpp must not include
    "communicator/shared_memory/process.hpp", # these refuse process ranks, or are empty, where there is no Linux
    "communicator/shared_memory/impl/process.ipp",
    "communicator/shared_memory/run_processes.hpp",
    "communicator/shared_memory/impl/run_processes.ipp",
    "communicator/tcp/communicator.hpp", # refused there in a sentence, as checkpoints are
    "checkpoint/checkpoint.hpp",
    "communicator/file_limit.hpp", # other systems than Linux have none to ask for
    "participant/over_shared_memory.hpp",
    "optimizer/detail/update_loop.hpp", # has loops that nvcc cannot compile
}
REFUSAL = r"^#if .*\n#error .*\n#endif\n" # of a compiler that an opt-in header cannot have
# What core.hpp leaves to join.hpp: own communicators and collectives of tensors, what plans before anything
# communicates, and what sharded training needs.
NOT_FOR_GUARDS = (
    "reduction/", "communicator/", "data/", "bucket/bucketed_view",
    "tensor/flat_parameters", "tensor/variant",
    "detail/kept_range", "participant/over_shared_memory", "optimizer/settings", "participant/needs_header",
)
# Turns that readers stumble over, in comments, texts and pages, and what to write instead.
BANNED = [ # a part of the turn, without which a file is not searched for it; the turn; what is better
    ("hoever", r"\b[Ww]hoever\b", "name the rank, the thread or the caller"),
    ("gets on", r"\bgets on\b", "makes progress"),
    (" gone", r"\b(is|are|be) gone\b", "say what destroyed, freed or ended it"),
    (" at it", r"\b(is|are|was|be) at it\b", "name what it does"),
    ("comes for", r"\bcomes for\b", "use a plain verb"),
    ("is to be had", r"\bis to be had\b", "use a plain verb"),
    ("of no account", r"\bof no account\b", "use a plain verb"),
    ("Who ", r"(?:^[ /#*|-]*|[.:] )Who \w+ (?![^?\n]*\?)", "name the rank, the thread or the caller"),
    ("what comes of", r"\bwhat comes of\b", "say what results"),
    (" it all", r"\bsa(y|ys|id) it all\b", "say what it does"),
    ("Of ", r"(?:^[ /#*|-]*|[.:] )Of (a|an|the|what|each|all|its|those|some|one|two) ", "begin with the subject"),
]
SPOKEN = {".md", ".hpp", ".ipp", ".cpp", ".cu", ".py", ".sh", ".txt", ".cmake"}
READS_TEXT = "|".join([
    r"what\(\)\S* *[!=]=", r"[!=]= *[\w.>()-]*what\(\)", r"(?:\.|->)message *[!=]=", r"[!=]= *[\w.()]+(?:\.|->)message\b",
    r"(?:(?:\.|->)message|what\(\)[)}]*)\.(?:r?find|starts_with|ends_with|contains|substr|compare)", r"\bstr(?:n?cmp|str)\(",
    r"\bfailure_text\(.*\) *[!=]=", r"[!=]= *failure_text\(",
])
NOT_IN_CORE = {"thread", "mutex", "condition_variable", "ranges", "iostream", "regex"}

errors = []
headers = {str(p.relative_to(INCLUDE / "joinable")): p.read_text() for p in sorted(INCLUDE.rglob("*.[hi]pp"))}


def header_of(name):
    """The header that declares what the .ipp file of that name defines; the name of a header as it is."""
    return re.sub(r"impl/(\w+)\.ipp$", r"\1.hpp", name)


for name in headers: # X.ipp is checked as a header is, and what X.hpp says to include it is not
    if name.endswith(".ipp"):
        header = header_of(name)
        inclusion = f"#if JOINABLE_HAS_DEFINITIONS\n#include <joinable/{name}>\n#endif\n"
        if inclusion not in headers.get(header, ""):
            errors.append(f"R9 {name}: {header} does not say {inclusion.split(chr(10))[:2]}")
            continue
        before, after = headers[header].split(inclusion)
        if "#include <joinable/config.hpp>\n" not in before:
            errors.append(f"R9 {header}: does not include config.hpp, so it may not see that it has definitions")
        headers[header] = before + after
        if re.sub(r"JOINABLE_INSTANTIATE\(.*\)|(inline )?namespace( \w+)? \{|[}\s]|//.*|#(if|endif).*", "", after):
            errors.append(f"R9 {header}: declares something after it has included {name}")
includes = {
    name: re.findall(r"(?m)^#include <joinable/(.*)>", text) for name, text in headers.items()
}
for name in headers: # of the two, the header comes first
    if name.endswith(".ipp"):
        includes[name] = [other for other in includes[name] if other != header_of(name)]
        includes.get(header_of(name), []).append(name)
allowed = {room: row.split() for room, row in ROOMS.items()}


def room_of(header):
    """The folder, without detail/ and impl/. Headers beside the rooms are umbrellas, or what all are based on."""
    folder = str(pathlib.PurePath(header_of(header)).parent)
    if folder == "." and header not in ("config.hpp", "fwd.hpp", "error.hpp"):
        return "umbrella"
    return re.sub(r"/?detail$", "", folder).strip(".") or "base"


def inside(header, folder):
    return header.startswith(folder + "/")


def is_for_users(text):
    """Whether something is declared outside of namespace detail."""
    code = re.sub(r"(?m)^#.*|//.*", "", text)
    for internal in (rf"(?ms)^{PUBLIC} namespace detail \{{.*?^\}}\}}\}}", r"(?ms)^namespace detail \{.*?^\}"):
        code = re.sub(internal, "", code)
    return bool(re.sub(PUBLIC + r"\s*\}\}", "", code).strip())


used = {room: set() for room in ROOMS} # by room, the rooms that its headers include
for name in headers:
    room = room_of(name)
    if room == "umbrella":
        continue
    if room not in ROOMS:
        errors.append(f"{name}: its folder is no room of tests/layers.py")
        continue
    for included in includes[name]:
        other = room_of(included)
        if included not in headers:
            errors.append(f"{name}: includes {included}, which does not exist")
            continue
        if included.endswith(".ipp") and header_of(included) != name:
            errors.append(f"R9 {name}: includes {included}, which only {header_of(included)} may")
        if OPT_IN.match(header_of(included)) and not OPT_IN.match(header_of(name)):
            errors.append(f"{name}: includes {included}, which is opt-in: only users' sources include it")
        if other != room and other not in allowed[room]:
            errors.append(f"R1 {name}: {room} does not include {other}, but it includes {included}")
        elif other != room:
            used[room].add(other)
        owner = re.match(r"(.*?)/?detail/", included)
        if owner and owner.group(1) and not inside(name, owner.group(1)):
            errors.append(f"R2 {name}: includes {included}, which is for {owner.group(1)}/ alone")
        if {room, other} <= TRANSPORTS and room != other and (room, other) not in BELOW:
            errors.append(f"R4 {name}: a transport includes another one, {included}")
for room, rooms in allowed.items():
    for other in rooms:
        if other not in ROOMS:
            errors.append(f"R1 the row of {room} names {other}, which is no room")
        elif other not in used[room]:
            errors.append(f"R1 the row of {room} names {other}, but no header there includes it: remove it")
        if inside(f"{room}/", "communicator") and not inside(f"{other}/", "communicator") and other not in BELOW_COMMUNICATORS:
            errors.append(f"R13 the row of {room} names {other}, which is no room below communicators")


def part_of(room):
    return next((part for part, rooms in reversed(PARTS.items()) if room in rooms))


first = next(iter(PARTS))
for room in (room for room in ROOMS if part_of(room) == first):
    for other in allowed[room]:
        if part_of(other) != first:
            errors.append(f"R11 {room} includes {other}, of the part {part_of(other)}")


def level(room, path=()):
    """How many rooms lie below; computed, not written."""
    if room in path:
        errors.append("R1 circle: " + " -> ".join([*path[path.index(room):], room]))
        return 0
    return 1 + max((level(other, (*path, room)) for other in allowed.get(room, ())), default=-1)


levels = {room: level(room) for room in ROOMS}


def at_namespace_scope(text):
    """The text without what stands in braces that open no namespace."""
    kept, depth, scopes = [], 0, []
    for part in re.split(r"([{}])", re.sub(r"//[^\n]*|\"(\\.|[^\"\\])*\"", "", text)):
        if part == "{":
            is_namespace = not depth and re.search(r"namespace[\w:\s]*$", "".join(kept[-1:]))
            scopes.append(bool(is_namespace))
            depth += not is_namespace
            kept.append(";")
        elif part == "}":
            depth -= not scopes.pop() if scopes else 0
            kept.append(";" if not depth else "")
        elif not depth:
            kept.append(part)
    return "".join(kept)


for name, text in headers.items():
    room = room_of(name)
    code = re.sub(REFUSAL, "", text, flags=re.M) if OPT_IN.match(header_of(name)) else text
    if name.endswith(".hpp") and name != "config.hpp" and "JOINABLE_DEFINITION" in text:
        errors.append(f"R9 {name}: what is compiled once lies in impl/{pathlib.PurePath(name).stem}.ipp")
    if re.search(r'^\s*#\s*include\s+"', text, re.M):
        errors.append(f"{name}: includes are written <joinable/...>, or this check cannot see them")
    if not text.startswith("// SPDX-License-Identifier: BSL-1.0\n#pragma once\n"):
        errors.append(f"{name}: starts without the SPDX line and #pragma once")
    if room == "umbrella":
        rest = re.sub(r"(?m)^\s*//.*$|^#pragma once$|^#include <.*>.*$", "", text)
        if name == "src.hpp":
            rest = re.sub(r"#define JOINABLE_SOURCE|#if defined\(__linux__\)|#endif", "", rest)
        if rest.strip():
            errors.append(f"R8 {name}: an umbrella includes, and nothing else: {rest.strip().splitlines()[0]}")
        continue
    is_inner = "/detail/" in f"/{name}" or room in INNER
    if is_inner and re.search(rf"^{PUBLIC}$", text, re.M):
        errors.append(f"R3 {name}: declares in v0, but what is not for users is in v0::detail")
    if not is_inner and not re.search(rf"^{PUBLIC}", text, re.M) and room != "base":
        errors.append(f"R3 {name}: declares nothing in namespace joinable")
    elif name.endswith(".hpp") and not is_inner and room != "base" and name not in FOR_ENGINES and not is_for_users(text):
        others = {room_of(other) for other in headers if name in includes[other]} - {"umbrella"}
        if not any(other != room and not inside(other, room) for other in others):
            errors.append(f"R3 {name}: is for {room}/ alone, so it lies in {room}/detail/")
    for system in re.findall(r"(?m)^#include <(?!joinable/)(.*)>", text):
        for pattern, owners in OWNED.items():
            if re.fullmatch(pattern, system) and not {room, name} & owners:
                errors.append(f"R5 {name}: includes <{system}>, which only {', '.join(sorted(owners))} may")
    if name not in SYSTEMS_DIFFER and re.search(r"^\s*#\s*(if|ifdef|ifndef)\b", code, re.M):
        errors.append(f"R6 {name}: what differs between compilers and systems belongs in config.hpp")
    if name != "config.hpp" and re.search(r"^\s*#\s*define\b", code, re.M):
        errors.append(f"R6 {name}: macros are defined in config.hpp")
    for line in re.findall(rf"(?m)^(?!\s*//).*(?:{READS_TEXT}).*$", text):
        errors.append(f"R12 {name}: decides by the text of an error: {line.strip()}")
    for statement in at_namespace_scope(code).split(";"):
        plain = " ".join(statement.split())
        declared, _, value = plain.partition("=")
        is_object = re.search(r"(^| )(inline|static) (?!.*\b(constexpr|namespace|using)\b)[^(]*$", declared)
        if is_object and not re.fullmatch(r" *(nullptr|\d+)", value):
            errors.append(f"R7 {name}: an object at namespace scope, which each file would emit: {plain}")
    for line in re.findall(r"(?m)^\s*(?:static inline|inline static) (?!constexpr)(?!\w[^;=]*\().*$", code):
        errors.append(f"R7 {name}: a static member, which each file would emit: {line.strip()}")
    for line in re.findall(r"(?m)^\s*/// What .*$", text):
        errors.append(f"R10 {name}: a docstring begins with the thing that it describes: {line.strip()}")
    if not is_inner:
        public = re.sub(r"namespace detail \{.*?\} // namespace detail", "", text, flags=re.S)
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
    if OPT_IN.match(header_of(name)):
        continue
    if name not in full:
        errors.append(f"join.hpp does not include {name}")
    elif name not in core and name != "join.hpp" and not name.startswith(NOT_FOR_GUARDS):
        errors.append(f"core.hpp does not include {name}")
for name in core:
    for header in re.findall(r"#include <([a-z_]+)>", headers[name]):
        if header in NOT_IN_CORE:
            errors.append(f"{name}: core.hpp must not include <{header}>")

for path in sorted(ROOT.iterdir()):
    if path.name not in TOP:
        errors.append(f"{path.name}: lies at the top level, where only {', '.join(sorted(TOP))} lie")
for folder in ("tests", "examples"):
    for path in sorted(p for e in ("*.cpp", "*.hpp") for p in (ROOT / folder).rglob(e)):
        if not path.read_text().startswith("// SPDX-License-Identifier: BSL-1.0\n"):
            errors.append(f"{path.relative_to(ROOT)}: starts without the SPDX line")
spoken = [*ROOT.glob("*"), *(p for folder in ("include", "tests", "examples") for p in (ROOT / folder).rglob("*"))]
for path in sorted(spoken):
    if path.suffix in SPOKEN and path.name not in ("layers.py", "scripts_test.py"):
        text = path.read_text()
        for part, turn, instead in BANNED:
            for found in re.finditer(turn, text, re.M) if part in text else ():
                number = text.count("\n", 0, found.start()) + 1
                errors.append(f"R10 {path.relative_to(ROOT)}:{number}: '{found[0].strip()}': {instead}")


def picture():
    """A mermaid chart: a node per room, higher ones first, and the arrows that others do not imply."""
    def beneath(room):
        return used[room].union(*(beneath(other) for other in used[room]))

    lines = ["```mermaid", "flowchart TB"]
    for number, part in enumerate(reversed(PARTS)):
        lines.append(f'    subgraph part{number} ["{part}"]')
        for room in sorted((room for room in ROOMS if part_of(room) == part), key=lambda room: -levels[room]):
            here = [name for name in headers if room_of(name) == room and name.endswith(".hpp")]
            names = [pathlib.PurePath(name).stem for name in here if "/detail/" not in f"/{name}"]
            more = sum("/detail/" in f"/{name}" for name in here)
            names += [f"detail/ ({more})"] if more else []
            rows = [", ".join(names[i : i + 3]) for i in range(0, len(names), 3)]
            title = f"<b>{room}</b> {levels[room]}"
            lines.append(f'        {room.replace("/", "_")}["{title}<br>{"<br>".join(rows)}"]')
        lines.append("    end")
    for room in sorted(ROOMS, key=lambda room: -levels[room]):
        implied = set().union(*(beneath(other) for other in used[room]))
        for other in sorted(used[room] - implied):
            lines.append(f"    {room.replace('/', '_')} --> {other.replace('/', '_')}")
    return "\n".join([*lines, "```"])


def with_picture(page):
    parts = re.fullmatch(r"(.*<!-- picture[^\n]*-->\n).*?(<!-- end of picture -->.*)", page, re.S)
    if not parts:
        sys.exit(f"{PAGE.relative_to(ROOT)}: has no lines <!-- picture --> and <!-- end of picture -->")
    return f"{parts.group(1)}\n{picture()}\n\n{parts.group(2)}"


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--write", action="store_true", help="draw the picture anew")
write = parser.parse_args().write
before = PAGE.read_text()
after = with_picture(before)
if write:
    PAGE.write_text(after)
elif after != before:
    errors.append(
        f"{PAGE.relative_to(ROOT)}: is not what the headers are now: "
        "run python3 tests/layers.py --write and commit the result"
    )

for error in dict.fromkeys(errors):
    print(error, file=sys.stderr)
count = sum(name.endswith(".hpp") for name in headers)
rooms = f"{count} headers, {len(ROOMS)} rooms, {max(levels.values()) + 1} levels: "
print(rooms + (f"{len(errors)} errors" if errors else "as designed"))
sys.exit(bool(errors))
