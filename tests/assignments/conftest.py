"""Grades one submission: `pytest tests/assignments --submission DIR`.

DIR holds the handed-in modules, at its top or in one folder for each assignment. An
item of a rubric is a test with `@pytest.mark.points(10, "what must hold")`; it gets its
points if it passes. Without --submission there is nothing to grade and nothing is
collected.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbasync.grading.report import Grade, as_text, write_json
from cbasync.grading.rubric import (
    ASSIGNMENTS,
    MARGIN_S,
    SEED,
    Assignment,
    ItemResult,
    judge,
    load_items,
    points_of,
    seed_of,
    watchdog,
)
from cbasync.grading.submission import Limits, Submission

RESULTS = pytest.StashKey[dict[str, dict[str, ItemResult]]]()
SUBMISSION = pytest.StashKey[Submission]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("assignments", "grading of a submission").addoption
    add("--submission", metavar="DIR", help="the folder that was handed in")
    add("--seed", type=int, default=SEED, help=f"hidden workloads (default: {SEED})")
    add("--gradebook", metavar="FILE", help="write points and messages as JSON")
    seconds = Limits().call_s
    add(
        "--call-seconds",
        type=float,
        default=seconds,
        help=f"most seconds of a call (default: {seconds:g})",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}
    folder = config.getoption("--submission", None)
    if folder is not None and not Path(folder).is_dir():
        raise pytest.UsageError(f"--submission is {folder}: there is no such folder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is a test of the package; wrong submissions are no tests at all."""
    if config.getoption("--submission", None) is None:
        return True
    if {"wrong", "reference"} & set(collection_path.parts):
        return True
    return None


def assignment_of(item: pytest.Item) -> Assignment:
    """By the folder of the test file."""
    return ASSIGNMENTS[item.path.parent.name]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of the assignment's hidden workloads."""
    return seed_of(assignment_of(request.node), request.config.getoption("--seed"))


@pytest.fixture
def submission(request: pytest.FixtureRequest) -> Iterator[Submission]:
    """The module that this test's assignment asks for, in a fresh process."""
    config = request.config
    assignment = assignment_of(request.node)
    folder = assignment.find(config.getoption("--submission"))
    limits = Limits(call_s=config.getoption("--call-seconds"))
    with (
        Submission(folder, assignment.module, limits) as opened,
        watchdog(limits.item_s + MARGIN_S),
    ):
        request.node.stash[SUBMISSION] = opened
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Book the item; the message stands where pytest would show a traceback."""
    report = yield
    mark = points_of(getattr(item, "function", None))
    if mark is None or call.when != "call":
        return report
    opened = item.stash.get(SUBMISSION, None)
    if opened is None:
        return report
    error = call.excinfo.value if call.excinfo else None
    result = judge(item.name, *mark, opened, error)
    number = assignment_of(item).number
    item.config.stash[RESULTS].setdefault(number, {})[item.name] = result
    if not result.passed:
        report.outcome = "failed"
        if not result.checker_failed:
            report.longrepr = result.message
    return report


def grades(config: pytest.Config) -> list[Grade]:
    """What was run, filled up with what the rubric has and was not run."""
    student = Path(config.getoption("--submission")).resolve().name
    seed = int(config.getoption("--seed"))
    found = []
    for number, results in sorted(config.stash[RESULTS].items()):
        rubric = load_items(ASSIGNMENTS[number])
        lines = [
            results.get(item.name, ItemResult(item.name, item.words, item.points))
            for item in rubric
        ]
        found.append(Grade(student, number, seed, lines))
    return found


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run without any item is no pass, whatever pytest calls it."""
    config = session.config
    if config.getoption("--submission", None) is None:
        return
    if not config.stash[RESULTS] and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    path = config.getoption("--gradebook")
    if path:
        write_json(path, grades(config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--submission", None) is None:
        return
    terminalreporter.section("points")
    for grade in grades(config):
        terminalreporter.write_line(as_text(grade))
