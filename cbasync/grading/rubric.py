"""The assignments and their rubrics: which items there are, and what each one is worth.

An item is a function in `tests/assignments/aN/test_hidden.py` with a mark and at most
two arguments, `submission` and `seed`. pytest runs it with fixtures, `run_item` without
pytest: both ways it is the same function with the same arguments.

    @pytest.mark.points(10, "no block is owned twice")
    def test_no_block_is_owned_twice(submission: Submission, seed: int) -> None:
        checks.one_owner(adapters.block_manager(submission, 8), seed)
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cbasync.grading.faults import NotThere, NotWritten, SubmissionFault
from cbasync.grading.submission import DEFAULT_LIMITS, Limits, Submission

ROOT = Path(__file__).parents[2]  # of the checkout
SEED = 1  # of the hidden workloads, where nobody gives another
MARGIN_S = 30.0  # for the checker's own work, beside the submission's


@dataclass(frozen=True)
class Assignment:
    """An assignment: its folder's name and the one module that is handed in."""

    topic: str
    module: str

    @property
    def number(self) -> str:
        """`a1` of `a1_block_manager`."""
        return self.topic.partition("_")[0]

    @property
    def file(self) -> str:
        return f"{self.module}.py"

    @property
    def folder(self) -> Path:
        """Source notebook, starter and visible tests."""
        return ROOT / "notebooks" / "assignments" / self.topic

    @property
    def hidden(self) -> Path:
        """Hidden tests, reference and wrong submissions; not in the student version."""
        return ROOT / "tests" / "assignments" / self.number

    def find(self, folder: str | Path) -> Path:
        """Where in a submission the module lies: at the top, or in a folder a topic.

        A folder that is a link does not count: it could point at a reference.
        """
        inside = Path(folder) / self.topic
        there = (inside / self.file).is_file() and not inside.is_symlink()
        return inside if there else Path(folder)


_LIST = [
    Assignment("a1_block_manager", "block_manager"),
    Assignment("a2_policy", "policy"),
    Assignment("a3_find_the_race", "races"),
    Assignment("a4_ring_of_three", "carry"),
    Assignment("a5_least_idle", "planner"),
]
ASSIGNMENTS = {assignment.number: assignment for assignment in _LIST}


def seed_of(assignment: Assignment, seed: int) -> int:
    """The number that the items of an assignment get in place of the year's seed.

    Messages show it, with the workload that failed. From a long seed it says nothing of
    the other assignments; the items of one share it, since one bar of a rubric may be
    below another.

    >>> [seed_of(ASSIGNMENTS[number], 1) for number in ("a1", "a2")]
    [700410, 872388]
    """
    digest = hashlib.sha256(f"{assignment.number}, seed {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10**6


@dataclass(frozen=True)
class Item:
    """One line of a rubric."""

    name: str  # of the test function
    points: int
    words: str  # what must hold
    function: Callable[..., None]


@dataclass
class ItemResult:
    """What became of one item. Earned points are all or none."""

    name: str
    words: str
    points: int
    earned: int = 0
    message: str = "was not run"  # empty if it passed
    printed: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    checker_failed: bool = False  # a mistake of ours, for the teacher to look at

    @property
    def passed(self) -> bool:
        return self.earned == self.points


class CheckerTimeoutError(Exception):
    """The check itself, not the submission, did not come to an end."""


def points_of(function: Any) -> tuple[int, str] | None:
    """Points and words of a function's mark, None if it has none."""
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "points":
            points, words = mark.args
            if type(points) is not int or points < 1 or not words:
                raise ValueError(
                    f"points of {function.__name__} are {mark.args}: give a whole "
                    "number from 1 up, and what must hold in words"
                )
            return points, words
    return None


def load_items(assignment: Assignment) -> list[Item]:
    """The rubric of an assignment, in the order of its file.

    Raises `ValueError` in a student version, where it is not there, and for a rubric
    without any item.
    """
    path = assignment.hidden / "test_hidden.py"
    if not path.is_file():
        raise ValueError(
            f"no rubric of {assignment.number}: {path} is missing; grading needs the "
            "teacher's checkout, the student version has no hidden tests"
        )
    name = f"tests.assignments.{assignment.number}.test_hidden"
    module = sys.modules.get(name) or _import(name, path)
    items = []
    for key, value in vars(module).items():
        mark = points_of(value) if key.startswith("test_") else None
        if mark is not None:
            items.append(Item(key, *mark, value))
    if not items:
        raise ValueError(f"{path} has no item with points: mark some")
    return items


def _import(name: str, path: Path) -> Any:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # for `tests.assignments.adapters`
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """`CheckerTimeoutError` in the block after so long; in the main thread only."""

    def late(number: int, frame: FrameType | None) -> None:
        raise CheckerTimeoutError(f"the check itself took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_item(
    assignment: Assignment,
    item: Item,
    folder: str | Path,
    seed: int = SEED,
    limits: Limits = DEFAULT_LIMITS,
) -> ItemResult:
    """Judge one item in a fresh process of the submission."""
    wanted = inspect.signature(item.function).parameters
    with (
        Submission(assignment.find(folder), assignment.module, limits) as submission,
        watchdog(limits.item_s + MARGIN_S),
    ):
        given = {"submission": submission, "seed": seed_of(assignment, seed)}
        error: BaseException | None = None
        try:
            item.function(**{name: given[name] for name in wanted})
        except Exception as caught:
            error = caught
        return judge(item.name, item.points, item.words, submission, error)


def judge(
    name: str,
    points: int,
    words: str,
    submission: Submission,
    error: BaseException | None,
) -> ItemResult:
    """The result of an item that ended with this error, or with none."""
    result = ItemResult(name, words, points, printed=submission.printed)
    if error is None and not submission.asked:
        error = RuntimeError("the item passed without a call to the submission")
    if error is None:
        result.earned, result.message = points, ""
        result.metrics = dict(submission.metrics)
    elif isinstance(error, (AssertionError, SubmissionFault)):
        # A check may add the workload in which a submission failed by itself. It does
        # not matter, and stays hidden, where there was nothing to run.
        is_missing = isinstance(error, (NotThere, NotWritten)) or not submission.loaded
        notes = [] if is_missing else getattr(error, "__notes__", [])
        result.message = "\n".join([str(error) or "is not so", *notes])
    else:
        result.checker_failed = True
        result.message = f"the check itself failed: {type(error).__name__}: {error}"
    return result
