"""What a check is made of: cases from the smallest up, each with its question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class CheckError(AssertionError):
    """What is wrong with a learner's function, in words.

    A notebook shows the words and no traceback: that would show the lines around a
    check, and with them the answers.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


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
            raise CheckError(f"{name}: nothing written yet") from None
        if not _equal(got, case.expected):
            given = ", ".join(map(repr, case.given))
            raise CheckError(
                f"{name}({given})\n  expected {case.expected!r}\n  got      {got!r}\n"
                f"  {case.question}"
            )
    print(f"{name}: right, {len(cases)} case{'s' if len(cases) != 1 else ''}")


def _equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        return bool(abs(got - expected) < 1e-6)
    return bool(got == expected)
