"""Checks of notebooks 03 and 04: places in the cache, arrays of a flat batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbasync.checks.case import Case, check

Part = tuple[int, int, int]
"""A request's part in a batch: first token, number of tokens, tokens known of it."""


def slot_mapping(
    function: Callable[[Sequence[int], int, int, int], Sequence[int]],
) -> None:
    """03: the places in the cache of the tokens `start .. stop-1` of one request."""
    cases = [
        Case(([0], 0, 1, 4), [0], "Is the token `stop` one of them?"),
        Case(([2], 0, 3, 4), [8, 9, 10], "At which place does block 2 begin?"),
        Case(([2], 1, 3, 4), [9, 10], "How far into its block is the token `start`?"),
        Case(([1], 0, 2, 3), [3, 4], "How many places does a block have here?"),
        Case(([7, 2], 0, 2, 4), [28, 29], "Are all places of the table asked for?"),
        Case(
            ([7, 2], 0, 6, 4),
            [28, 29, 30, 31, 8, 9],
            "Which block holds token 4, and does it lie behind the first one?",
        ),
        Case(
            ([7, 2], 3, 6, 4),
            [31, 8, 9],
            "Which entry of the table is token 4's, if you count from token 0?",
        ),
        Case(
            ([5, 0, 3], 2, 9, 3),
            [17, 0, 1, 2, 9, 10, 11],
            "Where does the request go on after each of its blocks?",
        ),
    ]
    check("slot_mapping", function, cases)


def flat_arrays(
    function: Callable[
        [Sequence[Part]], tuple[Sequence[int], Sequence[int], Sequence[int]]
    ],
) -> None:
    """04: query_start_loc, positions and logits_indices of a batch, from its parts."""
    cases = [
        Case(([(0, 1, 1)],), ([0, 1], [0], [0]), "Where does the only part end?"),
        Case(
            ([(0, 3, 3)],),
            ([0, 3], [0, 1, 2], [2]),
            "Which token of a prompt does the next one follow?",
        ),
        Case(
            ([(4, 1, 5)],),
            ([0, 1], [4], [0]),
            "Where does this token stand in its own request?",
        ),
        Case(
            ([(0, 2, 3)],),
            ([0, 2], [0, 1], []),
            "Has the request been read to its end after this batch?",
        ),
        Case(
            ([(1, 2, 3)],),
            ([0, 2], [1, 2], [1]),
            "This chunk does not begin its prompt. Does it end it?",
        ),
        Case(
            ([(0, 2, 2), (3, 1, 4)],),
            ([0, 2, 3], [0, 1, 3], [1, 2]),
            "How many tokens of the row are in front of the second part?",
        ),
        Case(
            ([(0, 2, 5), (3, 1, 4)],),
            ([0, 2, 3], [0, 1, 3], [2]),
            "Does a part that is not sampled still take its places in the row?",
        ),
        Case(
            ([(3, 1, 4), (2, 3, 7), (0, 2, 2)],),
            ([0, 1, 4, 6], [3, 2, 3, 4, 0, 1], [0, 5]),
            "Which parts end where their request does?",
        ),
    ]
    check("flat_arrays", function, cases)
