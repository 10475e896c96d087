#!/usr/bin/env python3
# SPDX-License-Identifier: BSL-1.0
"""Builds a package of each kind from a copy of this tree, and a program over each package.

  python3 tests/packaging/build.py [--work build/packaging] [debian] [conan] [vcpkg]

| package | built by                          | checked by                                            |
|---------|-----------------------------------|-------------------------------------------------------|
| debian  | dpkg-buildpackage: source, binary | lintian: no errors; its own test, over its files      |
| conan   | conan create                      | its test_package                                      |
| vcpkg   | vcpkg install, an overlay port    | the same consumer, over what was installed            |

A package whose tools are not installed is skipped and named. Without arguments all three are built. Nothing is
written outside of the folder --work, and nothing is downloaded. In a recipe, @VERSION@ is the version of the library
and @SOURCE@ the folder of the copy.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_OURS = {"build", "__pycache__"}


class Failed(Exception):
    """A command failed; the text has what it printed."""


def run(*command, cwd=None, **environment):
    """What the command prints."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def version():
    """The version, from the three lines that CMakeLists.txt reads it from."""
    text = (ROOT / "include/joinable/config.hpp").read_text(encoding="utf-8")
    return ".".join(re.findall(r"#define JOINABLE_VERSION_\w+ (\d+)", text))


def files_of_the_tree():
    """All that git tracks; in a copy without git, all but what was built."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        names = run("git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-z").split("\0")
        paths = [ROOT / name for name in names if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not NOT_OURS & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def copy_tree(folder):
    for path in files_of_the_tree():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def copy_recipe(source, name, folder):
    """Copies a recipe out of the copied tree `source` to `folder`, and fills it in."""
    recipe = source / "tests/packaging" / name
    for path in [path for path in recipe.rglob("*") if path.is_file()]:
        target = folder / path.relative_to(recipe)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8").replace("@VERSION@", version()).replace("@SOURCE@", str(source))
        target.write_text(text, encoding="utf-8")
        shutil.copymode(path, target)


def debian(work):
    source = work / f"joinable-{version()}"
    copy_tree(source)
    with tarfile.open(work / f"joinable_{version()}.orig.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    copy_recipe(source, "debian", source / "debian")
    run("dpkg-buildpackage", "--unsigned-source", "--unsigned-changes", cwd=source)
    [changes] = work.glob("*.changes")
    [package] = work.glob("*.deb")
    run("dpkg-deb", "--extract", package, work / "root")
    (work / "test").mkdir()
    failures = []
    for check in (
        lambda: run("lintian", "--allow-root", "--fail-on", "error", changes),
        lambda: run("debian/tests/consumer", cwd=source, AUTOPKGTEST_TMP=work / "test", CMAKE_PREFIX_PATH=work / "root/usr"),
    ):
        try:
            check()
        except Failed as failed:
            failures.append(str(failed))
    if failures:
        raise Failed("\n".join(failures))


def conan(work):
    source = work / "joinable"
    copy_tree(source)
    copy_recipe(source, "conan", source)
    home = {"CONAN_HOME": work / "home"}
    run("conan", "profile", "detect", **home)
    run(
        "conan", "create", source, f"--version={version()}", "--no-remote", "--settings=compiler.cppstd=20",
        "--conf=tools.cmake.cmaketoolchain:generator=Ninja", **home,
    )


def vcpkg(work):
    source = work / "joinable"
    copy_tree(source)
    copy_recipe(source, "vcpkg", work / "ports/joinable")
    run(
        "vcpkg", "install", "joinable", "--classic", f"--overlay-ports={work / 'ports'}", "--binarysource=clear",
        *(f"--x-{root}-root={work / root}" for root in ("buildtrees", "install", "packages")),
        f"--downloads-root={work / 'downloads'}", VCPKG_FORCE_SYSTEM_BINARIES=1, VCPKG_DISABLE_METRICS=1,
    )
    [prefix] = [path.parents[1] for path in (work / "install").glob("*/share/joinable")]
    run("cmake", "-S", source / "tests/packaging/consumer", "-B", work / "test", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", work / "test")
    run(work / "test/consumer")


PACKAGES = {
    debian: ["dpkg-buildpackage", "dh", "lintian"],
    conan: ["conan", "ninja"],
    vcpkg: ["vcpkg", "ninja"],
}


def build(package, work):
    """Whether it went well, and a line or more about it."""
    name = package.__name__
    if missing := [tool for tool in PACKAGES[package] if not shutil.which(tool)]:
        return True, f"skipped: no package for {name} is built, because {', '.join(missing)} is not installed"
    work = work.resolve() / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began = time.monotonic()
    try:
        package(work)
    except Failed as failed:
        return False, f"{name}: {failed}"
    return True, f"{name}: {version()} is built, and a program over it runs ({time.monotonic() - began:.0f} s)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/packaging")
    parser.add_argument("packages", nargs="*", metavar="debian | conan | vcpkg")
    options = parser.parse_args()
    by_name = {package.__name__: package for package in PACKAGES}
    if set(options.packages) - set(by_name):
        parser.error(f"packages are {', '.join(by_name)}")
    chosen = [by_name[name] for name in options.packages or by_name]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda package: build(package, options.work), chosen))
    for _, text in results:
        print(text)
    return 0 if all(well for well, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
