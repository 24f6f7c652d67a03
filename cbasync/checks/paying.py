"""Checks of notebook 12: what running ahead saves, and what late ends take back."""

from __future__ import annotations

from collections.abc import Callable

from cbasync.checks.case import Case, check


def gain(function: Callable[[float, float, float], float]) -> None:
    """12: the share of the time saved, from the times of host, GPU and both copies."""
    cases = [
        Case(
            (1, 9, 0),
            0.1,
            "Is it the part saved, between 0 and 1, and not the part left?",
        ),
        Case((9, 1, 0), 0.1, "Who sets the pace here?"),
        Case(
            (5, 5, 0), 0.5, "Both need equally long. How long is a step of each kind?"
        ),
        Case((0, 4, 0), 0.0, "What is there to hide?"),
        Case((2, 6, 2), 0.4, "What does a batch wait for in turns, besides those two?"),
        Case(
            (4, 4, 4),
            0.5,
            "Two batches go round, in 12 ms each: one arrives every 6 ms.",
        ),
        Case((1, 6, 1), 0.25, "Are the copies the reason why this step takes so long?"),
        Case((6, 2, 2), 0.4, "The host never waits here. What does?"),
        Case((1, 2, 17), 0.5, "What if both are faster than the way round?"),
    ]
    check("gain", function, cases)


def gain_with_stops(function: Callable[[float, float, int, int], float]) -> None:
    """12: the share saved if each answer ends, unforeseen, after so many tokens."""
    cases = [
        Case((1, 9, 10, 0), 0.0, "At depth 0, what differs from taking turns?"),
        Case(
            (5, 5, 1, 1),
            0.0,
            "In how many batches does an answer of 1 token hold its row?",
        ),
        Case((1, 9, 10, 1), 0.01, "Which run has the row more: both, or one of them?"),
        Case((9, 1, 10, 1), 0.01, "Who sets the pace here?"),
        Case((1, 9, 3, 1), -0.2, "Can running ahead take longer than taking turns?"),
        Case((1, 9, 10, 2), -0.08, "How many batches late does the host see the end?"),
        Case((5, 5, 2, 3), -0.25, "Is a row more in vain for each batch of the depth?"),
        Case((8, 32, 100, 1), 0.192, "Does the loss shrink when answers are longer?"),
    ]
    check("gain_with_stops", function, cases)
