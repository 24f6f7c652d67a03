"""Mutation testing: small mistakes planted one at a time, and who notices.

Each mutant is one change to the syntax tree of one module: a comparison or an operator
swapped, a condition negated, a number one off, a statement left out. A mutant is killed
when a test fails, or takes several times as long as without it: those are named, as a
busy machine can be at fault. One that survives is either a gap in the tests or a change
that changes nothing.

There are two rounds: quick tests of the books alone, and for those that survive them
the engine's.

Nothing is written: a child process imports the changed tree in place of the file. The
children are forked from a process that has torch loaded, so a mutant costs a second
where a fresh interpreter costs five. What is not changed: annotations, assertions,
error messages, and the `__repr__` and `__str__` that only people read.

    python tools/mutation.py                            all modules
    python tools/mutation.py cbasync/kv_cache.py        one of them
    python tools/mutation.py --match "kv_cache.py:113"  some of their mutants
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]

_BOOKS = ["kv_cache", "scheduler", "promises", "batch"]
_WHOLE = ["policy", "prefix_cache", "engine"]
TESTS: dict[str, tuple[list[str], list[str]]] = {  # the two rounds of each module
    "cbasync/scheduler.py": (_BOOKS, _WHOLE),
    "cbasync/kv_cache.py": (_BOOKS, _WHOLE),
    "cbasync/carry_over.py": (["promises", "batch"], ["engine"]),
    "cbasync/devices/races.py": (["edge_names"], ["races"]),
}
# One device is enough, and the whole table of planted races takes too long.
LEFT_OUT = ("threads", "cuda", "delays", "shipped", "mutants_on", "in_the_table")
CHOSEN = " and ".join(f"not {name}" for name in LEFT_OUT)

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One changed tree of one module."""

    file: str
    place: str  # line and column
    change: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.file}:{self.place}: {self.change}"


# ------------------------------------------------------------------ making them


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every small mistake that can be made at one node, as its replacement."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield _with(node, "ops", [SWAPS[type(op)]()])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if (
            type(op) in SWAPS
        ):
            yield _with(node, "op", SWAPS[type(op)]())
        case ast.Constant(value=bool() as value):
            yield _with(node, "value", not value)
        case ast.Constant(value=int() as value):
            yield _with(node, "value", value + 1)
            yield _with(node, "value", value - 1)
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield _with(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=[test]):
            yield _with(node, "ifs", [ast.UnaryOp(ast.Not(), test)])
        case ast.Continue() | ast.Break() | ast.Delete() | ast.AugAssign():
            yield "left out", ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield "left out", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "left out", ast.Pass()


def _with(node: ast.AST, field: str, value: Any) -> tuple[str, ast.AST]:
    other = copy.copy(node)
    setattr(other, field, value)
    return "becomes " + ast.unparse(other).splitlines()[0], other


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where a node may be replaced: its parent, the field, and the index in a list."""
    match node:
        case ast.Assert() | ast.Raise():
            return
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(value, ast.AST):
            yield node, field, None
            yield from places(value)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield node, field, index
                    yield from places(item)


def mutants(file: str, source: str) -> Iterator[Mutant]:
    r"""Every mutant of a module, one after the other.

    >>> for mutant in mutants("f.py", "def f(a):\n    return a < 2"):
    ...     print(mutant)
    f.py:2:12: a < 2 becomes a <= 2
    f.py:2:16: 2 becomes 3
    f.py:2:16: 2 becomes 1
    """
    tree = ast.parse(source)
    place = ""
    for parent, field, index in places(tree):
        here = getattr(parent, field)
        node = here if index is None else here[index]
        if hasattr(node, "lineno"):
            place = f"{node.lineno}:{node.col_offset + 1}"
        for change, other in changes(node):
            _put(parent, field, index, ast.copy_location(other, node))
            text = f"{ast.unparse(node).splitlines()[0]} {change}"
            changed = ast.fix_missing_locations(copy.deepcopy(tree))
            _put(parent, field, index, node)
            yield Mutant(file, place, text, changed)


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


# ------------------------------------------------------------------ running them


class _Planted(importlib.abc.MetaPathFinder):
    """Imports one module from a syntax tree and leaves the rest to Python."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.path, self.tree = str(ROOT / file), tree
        self.name = file.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        loader = _Loader(name, self.path)
        loader.tree = self.tree
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    tree: ast.Module

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.tree, self.path, "exec")


def run_tests(mutant: Mutant, names: list[str]) -> int:
    """Run tests with a changed tree in its module's place; pytest's exit code."""
    import pytest

    sys.meta_path.insert(0, _Planted(mutant.file, mutant.tree))
    # Without what only makes failures readable, or collects garbage once more.
    spare = ["--assert=plain", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    options = ["-x", "-q", "-W", "ignore", *spare, "-k", CHOSEN]
    tests = [f"tests/test_{name}.py" for name in names]
    return int(pytest.main([*options, mutant.file, *tests]))


def start(mutant: Mutant, names: list[str]) -> int:
    """Test a mutant in a child process of its own; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        code = run_tests(mutant, names)
    finally:
        os._exit(code)


def survivors(
    todo: list[Mutant], names: list[str], jobs: int, limit_s: float
) -> list[Mutant]:
    """Test all mutants, `jobs` at a time; those that no test noticed."""
    waiting, left = todo[::-1], []
    running: dict[int, tuple[Mutant, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[start(mutant, names)] = mutant, time.monotonic() + limit_s
        for pid, (mutant, deadline) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > deadline:
                print(f"too slow  {mutant}", flush=True)
                os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0)
            if done:
                del running[pid]
                if status == 0:
                    left.append(mutant)
        time.sleep(0.01)
    return left


def one_round(todo: list[Mutant], names: list[str], jobs: int) -> list[Mutant]:
    """The mutants of one module that these tests do not notice.

    The tests have to pass before it means anything that they fail; how long they take
    says when to give a mutant up that runs for ever.
    """
    if not todo:
        return []
    file, started = todo[0].file, time.monotonic()
    whole = Mutant(file, "", "unchanged", ast.parse((ROOT / file).read_text()))
    if not survivors([whole], names, 1, 600):
        sys.exit(f"the tests of {file} fail without any mutant: mend them first")
    return survivors(todo, names, jobs, 5 + 5 * (time.monotonic() - started))


def preload() -> None:
    """Load all that the children need but the package itself, which they read anew."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    for name in ("cbasync.llm", "tests.oracle", "cbasync.mutants"):
        importlib.import_module(name)
    for name in list(sys.modules):
        if name.split(".")[0] in ("cbasync", "tests"):
            del sys.modules[name]
    # A collection in a child would copy every page that it shares with this process.
    gc.disable()
    gc.freeze()


def main() -> int:
    """Test the chosen mutants; fail if too many survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE")
    parser.add_argument("--match", default="", help="only mutants with this text")
    parser.add_argument("--list", action="store_true", help="list them and stop")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=float, default=85.0, help="% to be killed")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    todo = {
        file: [
            mutant
            for mutant in mutants(file, (ROOT / file).read_text())
            if options.match in str(mutant)
        ]
        for file in options.files
    }
    if options.list:
        print(*(mutant for some in todo.values() for mutant in some), sep="\n")
        return 0
    preload()
    return _report(todo, options)


def _report(todo: dict[str, list[Mutant]], options: argparse.Namespace) -> int:
    total = killed = 0
    for file, some in todo.items():
        left = some
        for names in TESTS[file]:
            left = one_round(left, names, options.jobs)
        for mutant in left:
            print(f"survived  {mutant}")
        total, killed = total + len(some), killed + len(some) - len(left)
        print(f"{file}: {len(some) - len(left)} of {len(some)} killed", flush=True)
    share = 100 * killed / max(1, total)
    print(f"all: {killed} of {total} killed, {share:.1f} %")
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
