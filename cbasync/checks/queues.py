"""Checks of notebooks 05 and 06."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbasync.checks.case import Case, check

Bars = Sequence[tuple[float, float]]  # start and end
PhaseBars = Sequence[tuple[str, float, float]]  # phase, start and end
Op = tuple[str, float, Sequence[int]]  # stream, length, ops that it waits for


def idle_by_cause(function: Callable[[Bars, PhaseBars], dict[str, float]]) -> None:
    """05: for how long the GPU waited for what; time under no bar is the host's.

    A cause that took no time may be left out or be 0.
    """

    def without_zeros(gpu: Bars, others: PhaseBars) -> object:
        idle: object = function(gpu, others)
        if not isinstance(idle, dict):
            return idle
        return {cause: time for cause, time in idle.items() if time}

    one, two = [(0, 4), (6, 9)], [(0, 4), (6, 9), (11, 12)]
    cases = [
        Case(([(0, 4)], []), {}, "Is there any gap in a single bar?"),
        Case(
            (one, [("prepare", 4, 6)]),
            {"prepare": 2},
            "What goes on between the two bars of the GPU?",
        ),
        Case(
            ([(0, 4), (9, 12)], [("update", 4, 6), ("prepare", 6, 9)]),
            {"update": 2, "prepare": 3},
            "How many phases share this gap?",
        ),
        Case(
            ([(0, 4), (7, 9)], [("prepare", 4, 6)]),
            {"prepare": 2, "host": 1},
            "Is there a bar under every moment of the gap?",
        ),
        Case(
            ([(2, 4), (6, 9)], [("prepare", 0, 2), ("update", 4, 6)]),
            {"update": 2},
            "Does the GPU wait before its first batch?",
        ),
        Case(
            (one, [("prepare", 3, 6)]),
            {"prepare": 2},
            "What does the GPU do when prepare begins?",
        ),
        Case(
            (one, [("prepare", 4, 7)]),
            {"prepare": 2},
            "What does the GPU do when prepare ends?",
        ),
        Case(
            (two, [("prepare", 4, 6), ("prepare", 9, 11)]),
            {"prepare": 4},
            "How many gaps are there, and where is the time of each of them?",
        ),
    ]
    check("idle_by_cause", without_zeros, cases)


def starts(function: Callable[[Sequence[Op]], Sequence[float]]) -> None:
    """06: when each op starts, if all of them are launched at time 0."""
    cases = [
        Case(([("h2d", 6, [])],), [0], "Who is in front of the only op?"),
        Case(
            ([("h2d", 6, []), ("h2d", 6, [])],),
            [0, 6],
            "Can two ops of one stream run at the same time?",
        ),
        Case(
            ([("h2d", 6, []), ("compute", 9, [])],),
            [0, 0],
            "What is there that could hold the second op back?",
        ),
        Case(
            ([("h2d", 6, []), ("compute", 9, [0])],),
            [0, 6],
            "Which op does the second one wait for?",
        ),
        Case(
            ([("h2d", 6, []), ("compute", 9, [0]), ("d2h", 2, [1])],),
            [0, 6, 15],
            "How long an op takes, and when it is over: are they the same?",
        ),
        Case(
            ([("compute", 9, []), ("h2d", 2, []), ("compute", 5, [1])],),
            [0, 0, 9],
            "The wait is over: is the stream free, too?",
        ),
        Case(
            ([("h2d", 2, []), ("d2h", 7, []), ("compute", 5, [0, 1])],),
            [0, 0, 7],
            "Which of the two waits is over last?",
        ),
        Case(
            ([("h2d", 6, []), ("compute", 1, [0]), ("compute", 1, [])],),
            [0, 6, 7],
            "May an op overtake the one in front of it that waits?",
        ),
    ]
    check("starts", function, cases)
