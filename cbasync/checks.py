"""Checks of the exercises: each takes the learner's function and says what is wrong.

A failing check shows the smallest case that fails, what was expected, what came, and
one question that points at the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Bars = Sequence[tuple[float, float]]


class Case(NamedTuple):
    """One input with its answer, and the question to ask whoever misses it."""

    given: tuple[Any, ...]
    expected: Any
    question: str


def check(name: str, function: Callable[..., Any], cases: Sequence[Case]) -> None:
    """Try the cases from the smallest up; raise at the first that fails.

    >>> check("double", lambda x: x + x, [Case((2,), 4, "?")])
    double: right, 1 case
    """
    for case in cases:
        try:
            got = function(*case.given)
        except NotImplementedError:
            raise AssertionError(f"{name}: nothing written yet") from None
        if not _equal(got, case.expected):
            given = ", ".join(map(repr, case.given))
            raise AssertionError(
                f"{name}({given})\n  expected {case.expected!r}\n  got      {got!r}\n"
                f"  {case.question}"
            )
    print(f"{name}: right, {len(cases)} case{'s' if len(cases) != 1 else ''}")


def _equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        return bool(abs(got - expected) < 1e-6)
    return bool(got == expected)


def total_ms(function: Callable[[Bars], float]) -> None:
    """00: how long a run takes, from its bars (start, end)."""
    cases = [
        Case(([(0, 3)],), 3, "Where does the only bar start, and where does it end?"),
        Case(([(2, 5)],), 3, "Does the run start at 0?"),
        Case(([(0, 3), (5, 6)],), 6, "Is a pause part of the run?"),
        Case(([(4, 9), (1, 2)],), 8, "Do the bars come in order?"),
        Case(([(0, 9), (1, 2)],), 9, "Does the bar that starts last end last?"),
    ]
    check("total_ms", function, cases)


def idle_share(function: Callable[[Bars], float]) -> None:
    """11: the share of the GPU's time without work, from its bars (start, end)."""
    cases = [
        Case(([(0, 4)],), 0, "Is there any gap in a single bar?"),
        Case(([(0, 4), (5, 9)],), 1 / 9, "How long is the gap, and how long the run?"),
        Case(([(2, 4), (5, 6)],), 1 / 4, "Does the time before the first bar count?"),
        Case(([(5, 6), (0, 4)],), 1 / 6, "Do the bars come in order?"),
        Case(([(0, 4), (2, 6)],), 0, "Do two bars that overlap count twice?"),
        Case(([(0, 8), (1, 2), (9, 10)],), 1 / 10, "Which bar ends last, so far?"),
    ]
    check("idle_share", function, cases)
