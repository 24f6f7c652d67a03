"""Checks of the exercises: solutions pass, planted mistakes are caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cbasync import checks

# -- 01: tokens read -------------------------------------------------------------------


def tokens_read(prompt: int, new: int, cached: bool) -> int:
    if cached:
        return prompt + new - 1
    return sum(prompt + step for step in range(new))


def reads_the_last_token_too(prompt: int, new: int, cached: bool) -> int:
    return prompt + new if cached else tokens_read(prompt, new, cached)


def never_has_a_cache(prompt: int, new: int, cached: bool) -> int:
    return tokens_read(prompt, new, False)


def always_has_a_cache(prompt: int, new: int, cached: bool) -> int:
    return tokens_read(prompt, new, True)


def forgets_its_own_answer(prompt: int, new: int, cached: bool) -> int:
    return tokens_read(prompt, new, True) if cached else prompt * new


def counts_steps_from_one(prompt: int, new: int, cached: bool) -> int:
    if cached:
        return tokens_read(prompt, new, True)
    return sum(prompt + step for step in range(1, new + 1))


def forgets_prefill(prompt: int, new: int, cached: bool) -> int:
    return new if cached else tokens_read(prompt, new, False)


def test_check_of_tokens_read_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.tokens_read(tokens_read)
    assert capsys.readouterr().out == "tokens_read: right, 7 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (reads_the_last_token_too, r"1, 1, True"),
        (counts_steps_from_one, r"3, 1, False"),
        (never_has_a_cache, r"3, 2, True"),
        (forgets_prefill, r"3, 2, True"),
        (always_has_a_cache, r"3, 2, False"),
        (forgets_its_own_answer, r"3, 2, False"),
    ],
)
def test_check_of_tokens_read_finds_mistakes(
    mistake: Callable[[int, int, bool], int], case: str
) -> None:
    with pytest.raises(AssertionError, match=rf"^tokens_read\({case}\)\n  expected"):
        checks.tokens_read(mistake)


# -- 02: waits -------------------------------------------------------------------------


def waits(lengths: Sequence[int], rows: int) -> list[int]:
    free, steps = [0] * rows, []
    for length in lengths:
        row = free.index(min(free))
        steps.append(free[row])
        free[row] += length
    return steps


def waits_for_the_whole_batch(lengths: Sequence[int], rows: int) -> list[int]:
    steps, start = [], 0
    for first in range(0, len(lengths), rows):
        group = lengths[first : first + rows]
        steps += [start] * len(group)
        start += max(group)
    return steps


def takes_rows_in_turn(lengths: Sequence[int], rows: int) -> list[int]:
    free, steps = [0] * rows, []
    for number, length in enumerate(lengths):
        steps.append(free[number % rows])
        free[number % rows] += length
    return steps


def forgets_who_had_the_row(lengths: Sequence[int], rows: int) -> list[int]:
    free, steps = [0] * rows, []
    for length in lengths:
        row = free.index(min(free))
        steps.append(free[row])
        free[row] = length
    return steps


def knows_one_row(lengths: Sequence[int], rows: int) -> list[int]:
    return waits(lengths, 1)


def counts_from_one(lengths: Sequence[int], rows: int) -> list[int]:
    return [step + 1 for step in waits(lengths, rows)]


def leaves_a_step_late(lengths: Sequence[int], rows: int) -> list[int]:
    return waits([length + 1 for length in lengths], rows)


def test_check_of_waits_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.waits(waits)
    assert capsys.readouterr().out == "waits: right, 7 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (counts_from_one, r"\[2\], 1"),
        (leaves_a_step_late, r"\[2, 3\], 1"),
        (knows_one_row, r"\[2, 3\], 2"),
        (waits_for_the_whole_batch, r"\[1, 3, 2\], 2"),
        (takes_rows_in_turn, r"\[3, 1, 2\], 2"),
        (forgets_who_had_the_row, r"\[3, 1, 1, 2\], 2"),
    ],
)
def test_check_of_waits_finds_mistakes(
    mistake: Callable[[Sequence[int], int], list[int]], case: str
) -> None:
    with pytest.raises(AssertionError, match=rf"^waits\({case}\)\n  expected"):
        checks.waits(mistake)


# -- an untouched stub -----------------------------------------------------------------


@pytest.mark.parametrize("name", checks.__all__)
def test_check_says_that_nothing_is_written(name: str) -> None:
    def stub(*given: object) -> object:
        raise NotImplementedError

    with pytest.raises(AssertionError, match="nothing written yet"):
        getattr(checks, name)(stub)
