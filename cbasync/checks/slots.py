"""Checks of notebooks 07 and 08: which edge is missing, whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbasync.checks.case import Case, check

Touch = tuple[str, int]
"""A phase and the number of its batch."""


def missing_edge(function: Callable[[Touch, Touch], str]) -> None:
    """07: the edge that should order two accesses to one buffer of a slot."""
    cases = [
        Case(
            (("h2d", 0), ("compute", 0)),
            "h2d_done",
            "Both are of batch 0. Which goes first, and which event stands behind it?",
        ),
        Case(
            (("compute", 0), ("d2h", 0)),
            "compute_done",
            "Which of the three events is recorded behind the first of the two?",
        ),
        Case(
            (("d2h", 0), ("update", 0)),
            "d2h_done",
            "What must be over before the CPU reads?",
        ),
        Case(
            (("h2d", 0), ("prepare", 1)),
            "slot_refill",
            "Are both of one batch? And does the CPU touch this buffer?",
        ),
        Case(
            (("compute", 0), ("h2d", 1)),
            "slot_reuse",
            "Is it a host buffer or a device buffer that both of them need?",
        ),
        Case(
            (("d2h", 0), ("compute", 1)),
            "slot_reuse",
            "Whose tokens does this copy take back: those of the batch that computes?",
        ),
        Case(
            (("d2h", 1), ("update", 0)),
            "slot_refill",
            "Is the CPU always the one that overwrites?",
        ),
        Case(
            (("h2d", 3), ("prepare", 5)),
            "slot_refill",
            "Must two batches be neighbours to meet in one buffer?",
        ),
        Case(
            (("compute", 4), ("d2h", 4)),
            "compute_done",
            "Does the number itself matter, or only whether both have the same one?",
        ),
    ]
    check("missing_edge", function, cases)


def turns(function: Callable[[int, int], Sequence[str]]) -> None:
    """08: what the host does in which order, for so many batches and slots."""
    cases = [
        Case(
            (1, 1),
            ["launch 0 A", "collect 0 A"],
            "Who reads the tokens of the last batch?",
        ),
        Case(
            (2, 1),
            ["launch 0 A", "collect 0 A", "launch 1 A", "collect 1 A"],
            "There is one slot. When may batch 1 have it?",
        ),
        Case(
            (1, 2),
            ["launch 0 A", "collect 0 A"],
            "Is there anything to launch into slot B?",
        ),
        Case(
            (2, 2),
            ["launch 0 A", "launch 1 B", "collect 0 A", "collect 1 B"],
            "What is free while batch 0 is in flight, and which batch is done first?",
        ),
        Case(
            (3, 2),
            [
                *("launch 0 A", "launch 1 B", "collect 0 A"),
                *("launch 2 A", "collect 1 B", "collect 2 A"),
            ],
            "As soon as one slot is free, what is the next thing to do?",
        ),
        Case(
            (4, 3),
            [
                *("launch 0 A", "launch 1 B", "launch 2 C", "collect 0 A"),
                *("launch 3 A", "collect 1 B", "collect 2 C", "collect 3 A"),
            ],
            "How many batches fit into three slots, and what are their letters?",
        ),
    ]
    check("turns", function, cases)
