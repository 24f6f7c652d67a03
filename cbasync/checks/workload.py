"""Checks on random workloads: from small to large, and then smaller again.

A workload is a list of steps that can be dropped one by one and still make sense. When
one fails, as many steps as possible are dropped, so that what is shown is short.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from random import Random
from types import ModuleType
from typing import Any, TypeVar

Step = TypeVar("Step")

MAX_TRIES = 400  # runs to make one failing workload smaller


class Mistake(AssertionError):  # noqa: N818 - a word of the exercises
    """What a run of one workload found: expected, got, and a question about it."""

    def __init__(self, expected: str, got: Any, question: str) -> None:
        super().__init__(expected)
        self.expected, self.got, self.question = expected, got, question

    def told(self, name: str, given: str) -> AssertionError:
        """The error a learner sees, with the workload that it happened in."""
        return AssertionError(
            f"{name}\n  given     {_indented(given)}\n  expected  {self.expected}\n"
            f"  got       {self.got if isinstance(self.got, str) else repr(self.got)}\n"
            f"  {self.question}"
        )


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")


def generator(*names: object) -> Random:
    """Random numbers that depend on these names and on nothing else.

    >>> generator("blocks", 7).randrange(100) == generator("blocks", 7).randrange(100)
    True
    """
    return Random("/".join(map(str, names)))


def judge(
    name: str,
    workloads: Iterable[Sequence[Step]],
    run: Callable[[Sequence[Step]], None],
    show: Callable[[Sequence[Step]], str],
) -> None:
    """Run workloads in order; raise with the first that fails, made small.

    `run` raises `Mistake`. Three numbers are too many for this one:

    >>> def run(numbers):
    ...     if len(numbers) > 2:
    ...         raise Mistake("at most two", len(numbers), "How many are given?")
    >>> judge("few", [[1], [1, 2, 3, 4, 5, 6]], run, str)
    Traceback (most recent call last):
    ...
    AssertionError: few
      given     [4, 5, 6]
      expected  at most two
      got       3
      How many are given?

    Any other error of the code under test goes through, with the workload beside it.
    """
    number = 0
    for number, workload in enumerate(workloads, 1):  # noqa: B007 - counted
        try:
            run(workload)
        except NotImplementedError:
            raise AssertionError(f"{name}: nothing written yet") from None
        except Mistake as mistake:
            steps, smallest = _smaller(workload, mistake, run)
            raise smallest.told(name, show(steps)) from None
        except Exception as error:
            error.add_note(f"{name}\n  given     {_indented(show(workload))}")
            raise
    print(f"{name}: right, {number} workload{'s' if number != 1 else ''}")


def _smaller(
    steps: Sequence[Step], mistake: Mistake, run: Callable[[Sequence[Step]], None]
) -> tuple[Sequence[Step], Mistake]:
    """Drop steps, many at a time and then one by one, while the rest still fails."""
    size, tries = max(1, len(steps) // 2), 0
    while tries < MAX_TRIES:
        before, start = len(steps), 0
        while start < len(steps) and tries < MAX_TRIES:
            fewer = [*steps[:start], *steps[start + size :]]
            tries += 1
            try:
                run(fewer)
            except Mistake as found:
                steps, mistake = fewer, found
                continue
            except Exception:  # another trouble than the one to be shown
                pass
            start += size
        if size == 1 and len(steps) == before:
            break
        size = max(1, size // 2)
    return steps, mistake


def is_whole(value: Any, least: int, limit: int) -> bool:
    """Whether an answer is a whole number from `least` to `limit - 1`.

    >>> is_whole(3, 0, 4), is_whole(4, 0, 4), is_whole(True, 0, 4), is_whole(2.0, 0, 4)
    (True, False, False, False)
    """
    return type(value) is int and least <= value < limit


def attempt(check: Callable[..., None], *given: Any, module: ModuleType) -> None:
    """Run a check, say in short what is wrong, and let the next one run.

    `module` is the student's: an error that is not the check's own is told with the
    last line of it that was reached.
    """
    try:
        check(*given)
    except AssertionError as error:
        print(error, "\n")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if f.filename == module.__file__]
        name = f"{module.__name__}.py"
        where = f" ({name}, line {lines[-1]})" if lines else ""
        print(f"{check.__name__}: {type(error).__name__}: {error}{where}\n")
