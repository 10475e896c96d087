#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Tests of the scripts that check the project: each must fail on a copy that was made wrong."""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Copy(unittest.TestCase):
    left_out = () # folders that a script does not need, or that take longest to read

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        left_out = {ROOT / name for name in self.left_out}
        for name in ("include", "single_include", "tests", "examples"):
            if ROOT / name not in left_out:
                leave_out = lambda parent, names: [n for n in names if pathlib.Path(parent, n) in left_out]
                shutil.copytree(ROOT / name, self.root / name, ignore=leave_out)
        for name in ("CMakeLists.txt", "README.md", "CHANGELOG.md", "LICENSE"):
            shutil.copy(ROOT / name, self.root)

    def run_script(self, *arguments):
        """Exit status and everything printed."""
        command = [sys.executable, self.root / arguments[0], *arguments[1:]]
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return result.returncode, result.stdout

    def passes(self, *arguments):
        status, output = self.run_script(*arguments)
        self.assertEqual(status, 0, output)

    def fails(self, *arguments, saying):
        """In one run all of `saying`, which is a text or several."""
        status, output = self.run_script(*arguments)
        self.assertNotEqual(status, 0, output)
        for text in (saying,) if isinstance(saying, str) else saying:
            self.assertIn(text, output)

    def replace(self, name, old, new):
        path = self.root / name
        text = path.read_text(encoding="utf-8")
        self.assertIn(old, text)
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def append(self, name, text):
        with open(self.root / name, "a", encoding="utf-8") as file:
            file.write(text)


class Amalgamate(Copy):
    left_out = ("tests/joinable", "tests/fail", "tests/benchmarks", "examples")
    script = "single_include/amalgamate.py"
    single = "single_include/joinable/join.hpp"

    def test_check_fails_after_a_header_changed_until_it_is_written(self):
        self.passes(self.script)
        self.passes(self.script, "--check")
        self.append("include/joinable/tensor/dtype.hpp", "// one more line\n")
        self.fails(self.script, "--check", saying="run python3 single_include/amalgamate.py")
        self.passes(self.script)
        self.passes(self.script, "--check")

    def test_check_fails_after_the_single_header_was_edited_or_removed(self):
        self.passes(self.script)
        self.append(self.single, "\n")
        self.fails(self.script, "--check", saying="is not what include/joinable gives now")
        (self.root / self.single).unlink()
        self.fails(self.script, "--check", saying="is not what include/joinable gives now")

    def test_the_same_headers_give_the_same_bytes(self):
        self.passes(self.script)
        first = (self.root / self.single).read_bytes()
        (self.root / self.single).unlink()
        self.passes(self.script)
        self.assertEqual(first, (self.root / self.single).read_bytes())
        self.assertNotIn(str(self.root).encode(), first)

    def test_what_is_included_under_a_condition_is_pasted_under_it(self):
        self.append(
            "include/joinable/join.hpp",
            "#if defined(__linux__)\n#include <joinable/tcp.hpp>\n#endif\n",
        )
        self.passes(self.script)
        text = (self.root / self.single).read_text(encoding="utf-8")
        hub = text[text.index("// ---- joinable/communicator/tcp/detail/hub.hpp\n"):]
        self.assertTrue(hub.split("\n", 2)[2].startswith("#if defined(__linux__)"), hub[:200])

    def test_what_cannot_be_pasted_is_refused(self):
        self.append(
            "include/joinable/join.hpp", "#if 1\n#else\n#include <joinable/tcp.hpp>\n#endif\n"
        )
        self.fails(self.script, saying="one #if without #else can be pasted")

    def test_an_include_in_quotes_is_refused(self):
        self.append("include/joinable/fwd.hpp", '#include "elsewhere.hpp"\n')
        self.fails(self.script, saying="includes are written <joinable/...>")


class Layers(Copy):
    script = "tests/layers.py"
    left_out = ("tests/joinable", "tests/fail", "examples", "single_include")

    def add(self, name, text):
        path = self.root / "include/joinable" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        head = "" if path.exists() else "// SPDX-License-Identifier: BSL-1.0\n#pragma once\n"
        with open(path, "a", encoding="utf-8") as file:
            file.write(head + text)

    def test_the_tree_is_as_designed(self):
        self.passes(self.script)

    def test_r1_an_include_that_the_row_of_the_room_does_not_name_fails(self):
        self.add("tensor/shape.hpp", "#include <joinable/join/guard.hpp>\n")
        self.fails(self.script, saying="R1 tensor/shape.hpp: tensor does not include join")

    def test_r1_a_circle_in_the_table_fails(self):
        self.replace(self.script, '"hook": "base"', '"hook": "base join"')
        self.fails(self.script, saying="R1 circle: hook -> join -> hook")

    def test_r1_a_row_that_allows_what_nobody_includes_fails(self):
        self.replace(self.script, '"hook": "base"', '"hook": "base tensor"')
        self.fails(self.script, saying="R1 the row of hook names tensor, but no header there includes it")

    def test_r2_detail_of_another_room_fails(self):
        self.add("participant/step.hpp", "#include <joinable/join/detail/session.hpp>\n")
        self.fails(self.script, saying="R2 participant/step.hpp: includes join/detail/session.hpp")

    def test_r3_names_in_the_wrong_namespace_fail(self):
        self.add("join/detail/session.hpp", "namespace joinable { inline namespace v0 {\n}}\n")
        self.add("reduction/reduce.hpp", "namespace joinable { inline namespace v0 {\n}}\n")
        self.add("bucket/nothing.hpp", "#include <joinable/config.hpp>\n")
        self.fails(
            self.script,
            saying=(
                "R3 join/detail/session.hpp: declares in v0",
                "R3 reduction/reduce.hpp: declares in v0",
                "R3 bucket/nothing.hpp: declares nothing",
            ),
        )

    def test_r3_names_of_one_room_alone_lie_in_its_detail(self):
        self.add("bucket/cut.hpp", "namespace joinable { inline namespace v0 { namespace detail {\nstruct Cut {};\n}}}\n")
        self.fails(self.script, saying="R3 bucket/cut.hpp: is for bucket/ alone, so it lies in bucket/detail/")

    def test_r4_a_transport_that_includes_another_one_fails(self):
        self.add("communicator/tcp/options.hpp", "#include <joinable/communicator/shared_memory/thread.hpp>\n")
        self.fails(self.script, saying="R4 communicator/tcp/options.hpp: a transport includes another one")

    def test_r11_the_first_part_that_includes_another_one_fails(self):
        row = '"bucket": "base tensor device communicator agreement'
        self.replace(self.script, row, f"{row} trace")
        self.fails(self.script, saying="R11 bucket includes trace, of the part extras")

    def test_r12_code_that_decides_by_the_text_of_an_error_fails(self):
        self.add(
            "join/guard.hpp",
            'inline bool a(E const& e) { return e.what() == "x"sv; }\n'
            "inline bool b(AbortReason const& r) { return r.message.ends_with(last); }\n"
            'inline bool c(E const& e) { return std::string_view{e.what()}.find("left") == 0; }\n'
            "inline bool d(R const& r, R const& s) { return r.kind == s.kind && r.message == s.message; }\n"
            "inline bool e(M const& m, M const& n) { return m.tag == n.tag && m.is_send; }\n"
            "inline bool f(R const& r, T const& t) { return failure_text({1}, r.message) == t; }\n",
        )
        self.fails(
            self.script,
            saying=tuple(
                f"R12 join/guard.hpp: decides by the text of an error: inline bool {name}(" for name in "abcdf"
            ),
        )

    def test_r5_a_system_header_of_another_room_fails(self):
        self.add("bucket/memory.hpp", "#include <cuda_runtime_api.h>\n")
        self.add("join/guard.hpp", "#include <sys/mman.h>\n")
        self.fails(
            self.script,
            saying=(
                "R5 bucket/memory.hpp: includes <cuda_runtime_api.h>",
                "R5 join/guard.hpp: includes <sys/mman.h>",
            ),
        )

    def test_r6_conditions_and_macros_outside_config_fail(self):
        self.add("tensor/shape.hpp", "#if 1\n#endif\n#define SHAPE\n")
        self.fails(
            self.script,
            saying=(
                "R6 tensor/shape.hpp: what differs between",
                "R6 tensor/shape.hpp: macros are defined in config.hpp",
            ),
        )

    def test_r7_objects_at_namespace_scope_fail_and_functions_do_not(self):
        self.add(
            "device/host.hpp",
            "namespace joinable { inline namespace v0 { namespace detail {\n"
            "inline HostDevice\n    another_host;\ninline std::vector<int> numbers{1, 2};\n"
            "class Counted {\n    static inline std::vector<int> all;\n};\n}}} // namespace joinable::v0::detail\n",
        )
        self.fails(
            self.script,
            saying=(
                "each file would emit: inline HostDevice another_host",
                "each file would emit: inline std::vector<int> numbers",
                "each file would emit: static inline std::vector<int> all",
            ),
        )

    def test_r8_an_umbrella_that_declares_fails(self):
        self.add("tcp.hpp", "namespace joinable { class More; }\n")
        self.fails(self.script, saying="R8 tcp.hpp: an umbrella includes, and nothing else")

    def test_r10_a_turn_that_readers_stumble_over_fails(self):
        self.add("tensor/shape.hpp", "// Of the ranks, whoever comes first.\n// Out of the way: of a kind.\n")
        self.fails(
            self.script,
            saying=(
                "'whoever': name the rank, the thread or the caller",
                "'// Of the': begin with the subject",
            ),
        )
        self.add("tensor/shape.hpp", "// Ranks meet. Who comes last copies.\n// Who are they?\n/// What a shape has.\n")
        self.fails(
            self.script,
            saying=(
                "'. Who comes': name the rank, the thread or the caller",
                "R10 tensor/shape.hpp: a docstring begins with the thing that it describes: /// What a shape has.",
            ),
        )

    def test_a_folder_more_at_the_top_level_fails(self):
        (self.root / "docs").mkdir()
        self.fails(self.script, saying="docs: lies at the top level")

    def test_a_forgotten_header_fails(self):
        self.add("tensor/forgotten.hpp", "namespace joinable { inline namespace v0 {\n}}\n")
        self.fails(self.script, saying="join.hpp does not include tensor/forgotten.hpp")

    def test_what_is_written_from_the_headers_fails_when_it_is_stale(self):
        self.add("bucket/options.hpp", "#include <joinable/tensor/shape.hpp>\n")
        self.passes(self.script)
        self.add("join/round.hpp", "#include <joinable/device/device.hpp>\n")
        self.replace(self.script, '"join": "base tensor hook', '"join": "base tensor hook device')
        self.passes(self.script, "--write")
        self.passes(self.script)
        self.replace("include/joinable/README.md", "<b>bucket</b>", "<b>buckets</b>")
        self.fails(self.script, saying="run python3 tests/layers.py --write")


class Links(Copy):
    script = "tests/links.py"

    def test_a_link_that_leads_nowhere_fails(self):
        self.passes(self.script)
        self.append("include/joinable/README.md", "\n[x](../../README.md), [y](no/such.hpp)\n")
        self.fails(self.script, saying="README.md: the link no/such.hpp does not exist")
        self.append("examples/README.md", "\n[x]: ../../outside.md\n")
        self.fails(self.script, saying="the link ../../outside.md is not in the repository")

    def test_an_anchor_without_its_heading_fails(self):
        self.append("README.md", "\n## When: a `rank` fails!\n[x](#when-a-rank-fails-1)\n")
        self.append("examples/README.md", "\n[x](../README.md#when-a-rank-fails)\n")
        self.passes(self.script)
        self.append("examples/README.md", "\n[x](../README.md#when-all-is-well)\n")
        self.fails(self.script, saying="#when-all-is-well has no heading for #when-all-is-well")
        self.append("README.md", "\n[x](#nowhere), [y](CMakeLists.txt#line)\n")
        self.fails(
            self.script,
            saying=(
                "the link #nowhere has no heading for #nowhere",
                "has an anchor, and only .md files have headings",
            ),
        )

    def test_code_has_no_links(self):
        self.append("README.md", "\n```cpp\nlog[x](y); // # no heading\n```\n`[x](y)`\n")
        self.passes(self.script)


class Readme(Copy):
    script = "tests/readme.py"

    def test_what_the_pages_print_has_to_be_so(self):
        self.replace("README.md", "// Throws: PeerFailed", "// Throws: Mismatch")
        self.replace("README.md", "// 11 inputs", "// 12 inputs")
        self.replace("README.md", "// learned 3.00", "// learned 4.00")
        self.replace("README.md", "bash tests/run.sh", "bash tests/walk.sh")
        self.append("README.md", "\n```rust\nfn main() {}\n```\n")
        for folder in ("examples", "examples/guide"):  # nothing wrong is there, and their code takes longest
            for page in (self.root / folder).glob("*.md"):
                page.write_text("")
        status, output = self.run_script(self.script, "--options=--param=ggc-min-heapsize=1000000") # as the presets have it
        self.assertEqual(status, 1, output)
        for text in (
            "README.md:8: ended with", "says that it prints\n12 inputs", "says that it prints\nlearned 4.00",
            "there is no tests/walk.sh", "the language is none that is tested", "at most 150",
        ):
            self.assertIn(text, output)

    def test_what_does_not_compile_fails_and_names_its_line(self):
        (self.root / "examples/README.md").write_text("\n```cpp\ncomm.skips();\n```\n")
        self.fails(self.script, "--page", "examples/README.md", "--library=none", saying="examples/README.md:3:")

    def test_a_block_of_a_source_file_is_compiled_and_one_without_its_library_skipped(self):
        page = self.root / "examples/reference.md"
        page.write_text(
            "```cpp\n#include <vector>\nint size(std::vectors<int> const&);\n```\n"
            "```cpp\n#include <joinable/nccl.hpp>\nan error;\n```\n"
        )
        self.replace(self.script, '"nccl.h"', '"no_such.h"')
        arguments = (self.script, "--page", "examples/reference.md")
        self.fails(*arguments, saying="examples/reference.md:3:")
        page.write_text(page.read_text().replace("vectors", "vector"))
        status, output = self.run_script(*arguments)
        self.assertEqual(status, 0, output)
        self.assertIn("skipped: examples/reference.md:5: no_such.h is not found", output)


@unittest.skipUnless(shutil.which("doxygen"), "doxygen is not installed")
class Reference(Copy):
    script = "tests/reference/build.py"

    def test_what_lacks_a_docstring_or_a_table_fails(self):
        self.append(
            "include/joinable/core.hpp",
            "namespace joinable { inline namespace v0 {\n"
            "void undocumented();\n"
            "/// A concept without a table.\ntemplate <class T>\nconcept Plain = true;\n"
            "template <class T>\nconcept Bare = true;\n"
            "/// Refers to #nothing_that_exists.\nvoid wrong();\n"
            "}} // namespace joinable::v0\n",
        )
        self.fails(
            self.script,
            saying=(
                "undocumented() (function) of namespace joinable",
                "concept Plain has no table",
                "concept Bare has no page",
                "'nothing_that_exists' could not be resolved",
            ),
        )

    def test_a_public_name_without_an_example_fails(self):
        self.append(
            "include/joinable/core.hpp",
            "namespace joinable { inline namespace v0 {\n/// Documented.\nvoid told_to_nobody();\n"
            "/// Documented.\nvoid told_in_code();\n}} // namespace joinable::v0\n",
        )
        self.append(
            "examples/README.md",
            "`joinable::told_to_nobody()`\n```cpp\njoinable::told_in_code(); // joinable::told_to_nobody()\n"
            "other::told_to_nobody();\n```\n",
        )
        status, output = self.run_script(self.script)
        self.assertEqual(status, 1, output)
        self.assertIn("told_to_nobody is public, but has no example: write one in", output)
        self.assertNotIn("told_in_code", output)


@unittest.skipUnless(shutil.which("clang++-19"), "clang++-19 is not installed")
class Budget(Copy):
    script = "tests/budget/check_budget.py"
    left_out = ("tests/joinable", "tests/fail", "single_include", "examples")

    def test_what_became_expensive_fails_and_says_what_to_do(self):
        self.append(
            "include/joinable/config.hpp",
            "#include <regex>\n[[gnu::used]] inline char emitted[8192] = {1};\n",
        )
        path = self.root / "tests/budget/budget.json"
        budget = json.loads(path.read_text())
        budget["four_hooks"]["limit"]["added"] = 1
        budget["core"]["budget"]["own_lines"] //= 2
        budget["core"]["limit"]["own_lines"] *= 2 # the lines above do not reach it
        path.write_text(json.dumps(budget))
        status, output = self.run_script(self.script, "four_hooks", "tcp")
        self.assertNotEqual(status, 0)
        self.assertIn("check_budget.py --update and say why", output)
        self.assertIn("but the limit is 1: make it cheaper", output)
        self.assertRegex(output, "tcp: object_bytes is [0-9]+, but the limit is 4096")
        self.assertIn("<regex>, which is not among the std_headers", output)
        self.assertIn("<regex> is reached, but must not be", output)


class Instructions(unittest.TestCase):
    def test_a_path_that_became_slower_fails_and_another_compiler_is_not_judged(self):
        counts = "import runpy, subprocess; from types import SimpleNamespace as Said; " \
            "subprocess.run = lambda command, **_: Said(returncode=0, stdout='%d', stderr='Collected : %d'); " \
            "runpy.run_path('tests/budget/check_instructions.py', run_name='__main__')"
        budget = json.loads((ROOT / "tests/budget/instructions.json").read_text())
        most = max(budget["instructions"].values())
        for version, count, wanted, said in (
            (budget["g++"], 1000 * most * 2, 1, "guarded_iteration, shadow_round"),
            (budget["g++"], 1000, 0, "guarded_iteration"),
            (budget["g++"] + 1, 1000 * most * 2, 0, "nothing is judged"),
        ):
            result = subprocess.run(
                [sys.executable, "-c", counts % (version, count)],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )
            self.assertEqual(result.returncode, wanted, result.stderr)
            self.assertIn(said, result.stdout + result.stderr)


class Packaging(Copy):
    script = "tests/packaging/build.py"
    left_out = ("tests/joinable", "tests/fail", "tests/benchmarks") # lintian takes its time for each file

    @unittest.skipUnless(shutil.which("dh") and shutil.which("lintian"), "debhelper or lintian is not installed")
    def test_an_error_of_lintian_and_a_consumer_that_does_not_compile_fail(self):
        self.replace("include/joinable/config.hpp", "VERSION_PATCH 0", "VERSION_PATCH 7")
        self.replace("tests/packaging/debian/copyright", "2026 The joinable authors", "<years> <likewise for another author>")
        self.append("tests/consumer/main.cpp", "#error planted\n")
        before = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        status, output = self.run_script(self.script, "debian")
        self.assertEqual(status, 1, output)
        self.assertIn("E: libjoinable-dev: helper-templates-in-copyright", output)
        self.assertIn("error: #error planted", output)
        self.assertTrue((self.root / "build/packaging/debian/joinable_0.2.7-1.dsc").is_file(), output)
        shutil.rmtree(self.root / "build")
        self.assertEqual(before, {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()})

    def test_a_package_whose_tools_are_missing_is_skipped_and_an_unknown_one_is_refused(self):
        path, os.environ["PATH"] = os.environ["PATH"], str(self.root)
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        status, output = self.run_script(self.script)
        self.assertEqual(status, 0, output)
        for tools in ("debian is built, because dpkg-buildpackage, dh, lintian", "conan is built", "vcpkg is built"):
            self.assertIn(f"skipped: no package for {tools}", output)
        self.fails(self.script, "rpm", saying="packages are debian, conan, vcpkg")


class Mutate(Copy):
    script = "tests/mutate.py"

    def test_each_mutation_finds_its_text_once_and_its_tests(self):
        self.passes(self.script, "--list")
        _, output = self.run_script(self.script, "--list")
        for line in output.splitlines():
            for test in line.split(" against ")[1].split()[0:1]:
                self.assertTrue((self.root / "tests/joinable" / test).exists(), line)

    def test_a_text_that_is_gone_or_there_twice_fails(self):
        line = 'list.add("sync_every", options.sync_every);'
        header = "include/joinable/join/detail/impl/entry.ipp"
        self.replace(header, line, line + "\n    " + line)
        self.fails(self.script, "--list", saying="has its text 2 times, not once: " + line)
        self.replace(header, line + "\n    " + line, "")
        self.fails(self.script, "--list", saying="has its text 0 times, not once: " + line)

    def test_a_name_that_no_mutation_has_fails(self):
        self.fails(self.script, "nothing", saying="no mutation is called nothing")


class Gpu(unittest.TestCase):
    """tests/gpu.sh on a stand-in for a machine: its programs and tools are scripts of a line."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "tests/gpu").mkdir(parents=True)
        (self.root / "tests/gpu.sh").write_text((ROOT / "tests/gpu.sh").read_text(encoding="utf-8"), encoding="utf-8")
        self.tool("nvidia-smi", "echo GPU 0: of a test")
        self.tool("python3", f"echo {self.root}/wheels/nccl; echo {self.root}/wheels/cu13")
        self.tool("compute-sanitizer", 'shift 6; exec "$@"')
        for name in "ranks perceptron timeline streams kernels packing facts libtorch".split():
            self.program(name, "exit 0")

    def script(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/bash\n" + text + "\n", encoding="utf-8")
        path.chmod(0o755)

    def tool(self, name, text):
        self.script(self.root / "path" / name, text)

    def program(self, name, text):
        self.script(self.root / "build/gpu" / name, text)

    def run_script(self, *arguments, **environment):
        result = subprocess.run(
            ["bash", self.root / "tests/gpu.sh", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env={"PATH": f"{self.root}/path:/usr/bin:/bin", **environment},
        )
        return result.returncode, result.stdout

    def expect(self, status, *texts, arguments=("--run",), **environment):
        found, output = self.run_script(*arguments, **environment)
        self.assertEqual(found, status, output)
        for text in texts:
            self.assertIn(text, output)
        return output

    def test_all_that_pass_are_all_checks(self):
        output = self.expect(0, "failed: none; not run: none")
        numbers = re.findall(r"^== (\d+) PASS$", output, re.MULTILINE)
        self.assertEqual(sorted(numbers, key=int), [str(n) for n in range(1, 14)], output)
        self.assertEqual(numbers[:6], ["1", "3", "4", "2", "7", "10"], output)

    def test_without_a_gpu_no_check_counts_as_passed(self):
        self.tool("nvidia-smi", "exit 9")
        self.expect(3, "== 1 NOT RUN: there is no NVIDIA GPU", "not run: 1 3 4 2 7 10 5 6 8 9 12 13 11")

    def test_what_is_missing_is_named_and_does_not_count_as_passed(self):
        (self.root / "build/gpu/packing").unlink()
        self.expect(3, "== 7 NOT RUN: build/gpu/packing is missing", "not run: 7\n")
        self.expect(0, "== 1 PASS", arguments=("--run", "1"))
        self.expect(3, arguments=("--run", "7", "1"))

    def test_a_failure_counts_more_than_what_did_not_run(self):
        self.program("packing", "echo wrong; exit 1")
        (self.root / "build/gpu/timeline").unlink()
        self.expect(1, "wrong\n== 7 FAIL (1)", "failed: 7; not run: 9")

    def test_every_command_of_a_check_counts(self):
        self.program("ranks", '[ "$1 $2" != "pair 3" ]')
        self.expect(1, "failed: 6; not run: none")

    def test_a_hang_ends_and_fails_that_check_alone(self):
        self.program("facts", '[ "$1" = --probe ] || exec sleep 60')
        self.tool("timeout", '[[ "$*" != -k*bin/facts* ]] || set -- -k 5 1 "${@:4}"; exec /usr/bin/timeout "$@"')
        self.expect(1, "== 1 FAIL (124: it took too long, or was killed)", "failed: 1; not run: none")

    def test_no_check_gets_more_than_the_time_that_is_left(self):
        self.tool("timeout", '[ "$1" != -k ] || echo "limit: $3"; exec /usr/bin/timeout "$@"')
        limits = [int(n) for n in re.findall(r"^limit: (\d+)$", self.expect(0, GPU_SECONDS="90"), re.MULTILINE)]
        self.assertIn(40, limits)  # a check's own limit
        self.assertTrue(max(limits) <= 90, limits)  # some may take 120 s
        self.expect(3, "== 1 NOT RUN: no time is left", "failed: none; not run: 1 3", GPU_SECONDS="0")

    def test_probes_that_fail_skip_what_needs_them_and_nothing_else(self):
        self.program("ranks", '[ "$1" != meet ]')
        self.tool("compute-sanitizer", "exit 1")
        self.expect(3, "== 5 NOT RUN: two ranks of NCCL do not meet", "not run: 5 6 9 12 13 11\n")
        self.tool("python3", "exit 1")
        self.expect(3, "== 10 NOT RUN: python3 has no PyTorch", arguments=("--run", "10"))

    def test_nccl_may_warn_only_after_the_first_abort(self):
        self.program("ranks", "echo '-- first abort'; echo NCCL WARN late")
        self.expect(0, arguments=("--run", "2"))
        self.program("ranks", "echo NCCL WARN early; echo '-- first abort'")
        self.expect(1, "failed: 2", arguments=("--run", "2"))

    def test_the_build_finds_wheels_and_links_no_library_of_theirs_statically(self):
        self.tool("nvcc", f'echo "$@" >>{self.root}/calls; while [ "$1" != -o ]; do shift; done; touch $2; chmod +x $2')
        self.expect(3, "built: ranks", "NOT BUILT: libtorch: python3 has no PyTorch", arguments=("--build",))
        torch = self.root / "torch"
        (torch / "include/torch").mkdir(parents=True)
        self.expect(0, "built: libtorch", arguments=("--build",), TORCH_HOME=str(torch))
        calls = (self.root / "calls").read_text(encoding="utf-8")
        self.assertEqual(calls.count(" -o build/gpu/"), 7 + 8, calls)
        self.assertIn(f"-L{torch}/lib -Xlinker --no-as-needed -ltorch ", calls)
        self.assertIn(f"-isystem {self.root}/wheels/nccl/include -L{self.root}/wheels/nccl/lib", calls)
        linked = {word for word in re.findall(r" -l(\S+)", calls) if "torch" not in word and "c10" not in word}
        self.assertEqual(linked, {":libnccl.so.2", ":libcublas.so.13", ":libcupti.so.13"})
        self.tool("nvcc", '[[ "$*" != *packing* ]] || { echo "an error"; exit 1; }')
        self.expect(1, "NOT BUILT: packing\nan error", arguments=("--build",))
        self.assertFalse((self.root / "build/gpu/packing").exists())
        (self.root / "path/nvcc").unlink()
        self.expect(3, "NOT BUILT: nvcc is missing", arguments=("--build",))

    def test_output_goes_to_the_folder_for_results_too(self):
        output = self.expect(0, arguments=("--results", str(self.root), "--run", "1"))
        self.assertEqual((self.root / "gpu.txt").read_text(encoding="utf-8"), output)

    def test_unknown_numbers_and_words_are_refused(self):
        for arguments in [(), ("--fast",), ("--run", "14"), ("--build", "1"), ("--results", "nowhere", "--run")]:
            self.expect(2, "--run [number...]", arguments=arguments)


LONGEST = ("Readme", "Budget") # these begin first, so that no core waits for them at the end


def main():
    """Without arguments all classes, each in a process of its own, as many at once as there are cores."""
    if len(sys.argv) > 1:
        unittest.main()
    cases = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    names = sorted({type(test).__name__ for case in cases for test in case}, key=lambda name: (name not in LONGEST, name))
    run = lambda name: subprocess.run([sys.executable, __file__, name], check=False).returncode
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        sys.exit(any([code != 0 for code in pool.map(run, names)])) # negative after a signal


if __name__ == "__main__":
    main()
