"""Checks of notebooks 00, 01, 02 and 11."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbasync.checks.case import Case, check

Bars = Sequence[tuple[float, float]]


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


def tokens_read(function: Callable[[int, int, bool], int]) -> None:
    """01: how many tokens a model reads for an answer, with and without a cache."""
    cases = [
        Case((1, 1, True), 1, "What must be read before there is a first token?"),
        Case(
            (3, 1, False), 3, "Is the new token itself read in the step it comes from?"
        ),
        Case((3, 2, True), 4, "With a cache, what does the second step not know yet?"),
        Case((3, 2, False), 7, "Without a cache, what does the second step read?"),
        Case((3, 3, False), 12, "By how much does each step read more than the last?"),
        Case((4, 32, True), 35, "Who reads the last token?"),
        Case(
            (4, 32, False), 624, "Which steps are there, and what does each one read?"
        ),
    ]
    check("tokens_read", function, cases)


def waits(function: Callable[[Sequence[int], int], Sequence[int]]) -> None:
    """02: the step at which each request enters a continuous batch."""
    cases = [
        Case(([2], 1), [0], "Who is in front of the only request?"),
        Case(([2, 3], 1), [0, 2], "When is the only row free again?"),
        Case(([2, 3], 2), [0, 0], "Is a row free for the second request?"),
        Case(([1, 3, 2], 2), [0, 0, 1], "Which row is free first, and from when on?"),
        Case(([3, 1, 2], 2), [0, 0, 1], "Must the first row be the first one free?"),
        Case(([3, 1, 1, 2], 2), [0, 0, 1, 2], "When is a row free after two requests?"),
        Case(([2, 9, 3, 7, 2], 3), [0, 0, 0, 2, 3], "Which row is free at step 3?"),
    ]
    check("waits", function, cases)
