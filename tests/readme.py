#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Compiles and runs the code in README.md, the guide and the examples of all names exactly as it is printed.

  python3 tests/readme.py --compiler g++ --include include --work build/readme

| block                            | what is done with it                                               |
|----------------------------------|--------------------------------------------------------------------|
| cpp with a main()                | a program, built by the CMakeLists.txt that the page prints         |
| cpp that begins with an #include | of a source file, compiled where its headers are found              |
| and has no main()                |                                                                     |
| cpp that begins with a template  | a declaration, beside the engine of tests/support/readme.hpp        |
| cpp that calls run_threads() or  | the body of main()                                                  |
| run_processes(), or that needs   |                                                                    |
| none of the next row's three     |                                                                    |
| other cpp                        | what one of two ranks does: `comm`, `model` and `batches` are there |
| cmake                            | the CMakeLists.txt: configured with this tree as joinable           |
| cuda                             | a source file for nvcc, where it is found                           |
| sh                               | each script that it runs exists                                     |

A block that ends with "// Output:" prints the lines behind it, one with "// Throws: E" ends by that
exception, and no other one throws. None takes a minute, and each runs in an empty folder. A block with a Checkpoint
is skipped where nlohmann_json is not found. Declarations are those of README.md and of all pages, which are one program,
because headers take most of its compile time; blocks of a source file are one file. README.md has its first code before line 25 and at most 150 lines.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    "README.md", "examples/README.md", *sorted(f"examples/guide/{path.name}" for path in ROOT.glob("examples/guide/*.md")),
    "examples/reference.md",
]
# What headers of the library need, of libraries that may be missing.
NEEDED = {
    "joinable/checkpoint.hpp": "nlohmann/json_fwd.hpp", "joinable/gloo.hpp": "gloo/config.h",
    "joinable/interop/torch.hpp": "torch/torch.h", "joinable/interop/torch_data.hpp": "torch/torch.h",
    "joinable/interop/torch_optimizer.hpp": "torch/torch.h", "joinable/interop/torch_sharded.hpp": "torch/torch.h",
    "joinable/mpi.hpp": "mpi.h", "joinable/nccl.hpp": "nccl.h",
    "joinable/nccl_graphs.hpp": "nccl.h", "joinable/nvtx.hpp": "nvtx3/nvToolsExt.h",
}
LIMIT = 60  # seconds, for what ends in a fraction of one
BODY = """
static void {name}() {{
{code}
}}
"""
RANK = """
static void {name}() {{
    joinable::run_threads(2, [](joinable::ThreadCommunicator& comm) {{
        [[maybe_unused]] Model model;
        [[maybe_unused]] std::vector<Batch> const batches = batches_of(comm.rank());
{code}
    }});
}}
"""
CALL = """
    if (argument == "{name}") {{
        {name}();
    }}"""
CALL_THAT_THROWS = """
    if (argument == "{name}") {{
        try {{
            {name}();
        }} catch (joinable::{exception} const&) {{
            return 0;
        }}
        return 1;
    }}"""


class Block:
    """A block of code of a page."""

    def __init__(self, page, line, language, code):
        self.page = page
        self.place = f"{page}:{line}"
        self.language = language
        self.code = f'#line {line + 1} "{page}"\n{code}'  # so that compilers name the page
        self.text = code
        self.name = f"block_of_line_{line}_of_{re.sub('[^a-z]', '_', page.lower())}"
        throws = re.search(r"^// Throws: (\w+)$", code, re.M)
        self.exception = throws and throws.group(1)
        output = re.search(r"^// Output:\n((?://.*\n)*)", code, re.M)
        self.output = re.sub(r"(?m)^// ?", "", output.group(1)) if output else None

    def is_cpp(self):
        return self.language == "cpp"

    def is_program(self):
        return self.is_cpp() and "int main(" in self.code

    def is_declaration(self):
        return self.is_cpp() and self.text.startswith("template")

    def is_source(self):
        return self.is_cpp() and self.text.startswith("#include") and not self.is_program()

    def is_fragment(self):
        return self.is_cpp() and not (self.is_program() or self.is_declaration() or self.is_source())

    def wrapped(self):
        starts_ranks = re.search(r"joinable::run_(threads|processes)\(", self.text)
        is_of_rank = re.search(r"\b(comm|model|batches)\b", self.text)
        return (RANK if is_of_rank and not starts_ranks else BODY).format(name=self.name, code=self.code)

    def call(self):
        form = CALL_THAT_THROWS if self.exception else CALL
        return form.format(name=self.name, exception=self.exception)


def blocks_of(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match.group(1), match.group(2))


def run(*command):
    """Exit status and everything printed; a status of None where it does not end."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
                cwd=folder,
            )
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        return None, f"did not end within {LIMIT} seconds"


def build(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")


def check(block, *command):
    """What is wrong with what a block does when it runs."""
    status, printed = run(*command)
    if status == 1 and block.exception:
        return [f"{block.place}: does not throw {block.exception}"]
    if status != 0:
        return [f"{block.place}: ended with {status}: {printed}"]
    if block.output is not None and printed != block.output:
        return [f"{block.place}: says that it prints\n{block.output}but prints\n{printed}"]
    return []


def system_headers(options):
    """Where other libraries are. The compiler finds /usr/include by itself, and only in its own place."""
    return [f"-isystem{path}" for path in options.headers.split(":") if path and path != "/usr/include"]


def has_header(options, name):
    """Whether it is there: what it costs to compile it, libtorch's 14 s, is spent only where it is used."""
    done = subprocess.run(
        [options.compiler, *system_headers(options), "-x", "c++", "-E", "-"],
        input=f"#if !__has_include(<{name}>)\n#error\n#endif\n",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, check=False,
    )
    return done.returncode == 0


def check_fragments(blocks, options, work):
    """One program of the fragments of all pages."""
    fragments = [block for block in blocks if block.is_fragment()]
    json = NEEDED["joinable/checkpoint.hpp"]
    if any("joinable::Checkpoint" in block.text for block in fragments) and not has_header(options, json):
        for block in fragments:
            if "joinable::Checkpoint" in block.text:
                print(f"skipped: {block.place}: {json} is not found")
        fragments = [block for block in fragments if "joinable::Checkpoint" not in block.text]
    if not fragments:
        return []
    parts = ["#include <support/readme.hpp>\n"]
    declaring = list(blocks_of("README.md")) + [block for block in blocks if block.page != "README.md"]
    for page in dict.fromkeys(block.page for block in declaring): # a page sees no declarations of later ones
        parts += [block.code for block in declaring if block.page == page and block.is_declaration()]
        parts += [block.wrapped() for block in fragments if block.page == page]
    parts.append("\nint main(int, char** arguments) {\n    std::string_view const argument{arguments[1]};")
    parts += [block.call() for block in fragments]
    parts.append("\n}\n")
    (work / "fragments.cpp").write_text("".join(parts), encoding="utf-8")
    once = ["-DJOINABLE_SEPARATE_COMPILATION", options.library] if options.library else []
    build(
        options.compiler, *options.options.split(), "-std=c++20", "-Wall", "-Wextra", "-Werror",
        f"-I{options.include}", f"-I{ROOT / 'tests'}", "-pthread", work / "fragments.cpp", *once, "-o", work / "fragments",
    )
    return [e for block in fragments for e in check(block, work / "fragments", block.name)]


def check_sources(blocks, options, work):
    """One source file of the blocks of all pages that include other libraries. The definitions of the library are compiled elsewhere."""
    found = []
    for block in blocks:
        if block.is_source():
            needed = [NEEDED[name] for name in re.findall(r"#include <(.*)>", block.text) if name in NEEDED]
            missing = [name for name in needed if not has_header(options, name)]
            found += [] if missing else [block.code]
            if missing:
                print(f"skipped: {block.place}: {missing[0]} is not found")
    if found:
        (work / "sources.cpp").write_text("".join(found), encoding="utf-8")
        build(
            options.compiler, *options.options.split(), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
            f"-I{options.include}", *system_headers(options), "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX",
            "-DJOINABLE_SEPARATE_COMPILATION", work / "sources.cpp",
        )


def check_program(page, blocks, options, work):
    """The program of a page, as somebody builds it who copies both blocks into an empty folder."""
    programs = [block for block in blocks if block.is_program()]
    projects = [block for block in blocks if block.language == "cmake"]
    if not programs and not projects:
        return []
    if len(programs) != 1 or len(projects) != 1:
        return [f"{page}: expected one program and one CMakeLists.txt"]
    folder = work / "program"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.cpp").write_text(programs[0].code, encoding="utf-8")
    (folder / "CMakeLists.txt").write_text(projects[0].text, encoding="utf-8")
    build(
        "cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", f"-DCMAKE_CXX_COMPILER={options.compiler}",
        f"-DCMAKE_CXX_FLAGS={options.options} -Wall -Wextra -Werror", f"-DFETCHCONTENT_SOURCE_DIR_JOINABLE={ROOT}",
    )
    build("cmake", "--build", folder / "build")
    return check(programs[0], folder / "build/train")


def check_scripts(blocks):
    return [
        f"{block.place}: there is no {script}"
        for block in blocks if block.language == "sh"
        for script in re.findall(r"(?m)^(?:bash|sh|python3) (\S+)", block.text)
        if not (ROOT / script).is_file()
    ]


def check_cuda(blocks, options, work):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    for block in blocks:
        if block.language == "cuda" and nvcc:
            source = work / f"{block.name}.cu"
            source.write_text(block.code, encoding="utf-8")
            build(nvcc, "-std=c++20", f"-I{options.include}", "-Werror", "all-warnings", "-ptx", source, "-o", work / "kernels.ptx")
        elif block.language == "cuda":
            print(f"skipped: {block.place}: nvcc is not found")


def check_shape(blocks):
    """What README.md promises to who opens it."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    first = min(int(block.place.split(":")[1]) for block in blocks if block.is_cpp())
    errors = []
    if lines > 150:
        errors.append(f"README.md: has {lines} lines, and at most 150 are read")
    if first >= 25:
        errors.append(f"README.md: its first code is in line {first}, and should be before line 25")
    return errors


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--compiler", default="g++")
parser.add_argument("--include", type=pathlib.Path, default=ROOT / "include")
parser.add_argument("--library", help="compiled once, for the fragments; without it they have it in headers")
parser.add_argument("--options", default="", help="further options of the compiler")
parser.add_argument("--headers", default="", help="folders of the headers of MPI, NCCL and libtorch, with : between them")
parser.add_argument("--page", action="append", help="one page or several, instead of all")
parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/readme")
options = parser.parse_args()
options.work = options.work.resolve()
options.work.mkdir(parents=True, exist_ok=True)
pages = {page: list(blocks_of(page)) for page in options.page or PAGES}
every = [block for blocks in pages.values() for block in blocks]

errors = (check_shape(pages["README.md"]) if "README.md" in pages else []) + check_scripts(every)
tested = ("cmake", "cpp", "cuda", "sh")
errors += [f"{b.place}: the language is none that is tested" for b in every if b.language not in tested]
check_cuda(every, options, options.work)
errors += check_fragments(every, options, options.work)
check_sources(every, options, options.work)
for page, blocks in pages.items():
    errors += check_program(page, blocks, options, options.work)
for error in errors:
    print(error, file=sys.stderr)
print(f"{len(every)} blocks of code in {len(pages)} pages: " + (f"{len(errors)} errors" if errors else "all do what they say"))
sys.exit(bool(errors))
