"""Where the names of a student's functions meet the checks, and nowhere else.

A check drives an object with methods of its own choice; an adapter gives it one that
asks the submission. If an exercise renames a function, it is renamed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cbasync.checks.planners import MakePlanner, Seen
from cbasync.checks.race_scripts import Line, Script
from cbasync.checks.ring import Row
from cbasync.grading import Remote, Submission
from cbasync.grading.rubric import ASSIGNMENTS
from tests.loading import load

# -- a3: find the race -----------------------------------------------------------------


class RaceFinder:
    """The four functions of `races.py`."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    def comes_before(self, script: Script, first: str, second: str) -> bool:
        answer: bool = self._submission.call("comes_before", script, first, second)
        return answer

    def missing_edge(self, script: Script) -> list[str] | None:
        edge: list[str] | None = self._submission.call("missing_edge", script)
        return edge

    def shown(self, bars: list[Line]) -> list[list[str]]:
        pairs: list[list[str]] = self._submission.call("shown", bars)
        return pairs

    def mended(self, script: Script) -> Script:
        mended: Script = self._submission.call("mended", script)
        return mended


# -- reference solutions, to measure what may be asked for -----------------------------


def reference(number: str) -> Any:
    """The module of an assignment's reference solution, imported here."""
    assignment = ASSIGNMENTS[number]
    return load(assignment.hidden / "reference" / assignment.file)


# -- a1: a block manager with sharing --------------------------------------------------


class RemoteManager:
    """A `BlockManager` that lives with the submission."""

    def __init__(self, remote: Remote) -> None:
        self._call = remote.call

    def admit(self, name: str, tokens: list[int]) -> Any:
        return self._call("admit", name, tokens)

    def append(self, name: str, token: int) -> Any:
        return self._call("append", name, token)

    def fork(self, name: str, child: str) -> Any:
        return self._call("fork", name, child)

    def release(self, name: str) -> Any:
        return self._call("release", name)

    def num_free(self) -> Any:
        return self._call("num_free")


def block_manager(submission: Submission) -> Callable[[int, int], RemoteManager]:
    """Makes managers of the submission's class."""
    return lambda *sizes: RemoteManager(submission.make("BlockManager", *sizes))


# -- a2: a scheduler policy ------------------------------------------------------------


def policy(submission: Submission) -> Callable[..., Any]:
    """The submission's `plan(budget, seats, requests)`."""
    return lambda *given: submission.call("plan", *given)


# -- a4: a carry-over for a ring of three ----------------------------------------------


class RemoteCarry:
    """A `CarryOver` that lives with the submission."""

    def __init__(self, remote: Remote) -> None:
        self._call = remote.call

    def prepare(self, batch: int, rows: list[Row]) -> Any:
        return self._call("prepare", batch, rows)

    def collect(self, batch: int) -> Any:
        return self._call("collect", batch)


def carry(submission: Submission) -> Callable[[int], RemoteCarry]:
    """Makes objects of the submission's class."""
    return lambda num_slots: RemoteCarry(submission.make("CarryOver", num_slots))


def carry_function(submission: Submission, name: str) -> Callable[..., Any]:
    """One of the functions beside it: `resolve` or `loop`."""
    return lambda *given: submission.call(name, *given)


# -- a5: least idle --------------------------------------------------------------------


class RemotePlanner:
    """A `Planner` of `planner.py`."""

    def __init__(self, planner: Remote) -> None:
        self._planner = planner

    def ahead(self, seen: Seen) -> int:
        depth: int = self._planner.call("ahead", seen)
        return depth


def planner_maker(submission: Submission) -> MakePlanner:
    """Makes a planner for the limits of a run."""
    return lambda limits: RemotePlanner(submission.make("Planner", limits))
