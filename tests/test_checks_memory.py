"""Checks and figures of notebooks 03 and 04: planted mistakes, and what prose says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cbasync import checks
from cbasync.checks.memory import Part
from cbasync.figures import flat, memory
from cbasync.kv_cache import slot_mapping
from cbasync.steps import record_steps

# -- 03: slot mapping ------------------------------------------------------------------

Table = Sequence[int]


def includes_the_stop(table: Table, start: int, stop: int, size: int) -> list[int]:
    return [table[t // size] * size + t % size for t in range(start, stop)] + [stop]


def names_blocks(table: Table, start: int, stop: int, size: int) -> list[int]:
    return [table[t // size] + t % size for t in range(start, stop)]


def begins_each_at_its_block(
    table: Table, start: int, stop: int, size: int
) -> list[int]:
    return slot_mapping(table, 0, stop - start, size)


def knows_only_four(table: Table, start: int, stop: int, size: int) -> list[int]:
    return slot_mapping(table, start, stop, 4)


def takes_the_whole_table(table: Table, start: int, stop: int, size: int) -> list[int]:
    stop = stop if len(table) == 1 else len(table) * size
    return slot_mapping(table, start, stop, size)


def goes_straight_on(table: Table, start: int, stop: int, size: int) -> list[int]:
    return [table[0] * size + t for t in range(start, stop)]


def reads_the_table_backwards(
    table: Table, start: int, stop: int, size: int
) -> list[int]:
    return slot_mapping(table[::-1], start, stop, size)


def counts_blocks_from_start(
    table: Table, start: int, stop: int, size: int
) -> list[int]:
    return [table[(t - start) // size] * size + t % size for t in range(start, stop)]


def keeps_the_logical_place(table: Table, start: int, stop: int, size: int) -> range:
    return range(start, stop)


def test_check_of_slot_mapping_passes_the_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.slot_mapping(slot_mapping)
    assert capsys.readouterr().out == "slot_mapping: right, 8 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (includes_the_stop, r"\[0\], 0, 1, 4"),
        (keeps_the_logical_place, r"\[0\], 0, 1, 4"),
        (names_blocks, r"\[2\], 0, 3, 4"),
        (begins_each_at_its_block, r"\[2\], 1, 3, 4"),
        (knows_only_four, r"\[1\], 0, 2, 3"),
        (takes_the_whole_table, r"\[7, 2\], 0, 2, 4"),
        (reads_the_table_backwards, r"\[7, 2\], 0, 2, 4"),
        (goes_straight_on, r"\[7, 2\], 0, 6, 4"),
        (counts_blocks_from_start, r"\[7, 2\], 3, 6, 4"),
    ],
)
def test_check_of_slot_mapping_finds_mistakes(
    mistake: Callable[[Table, int, int, int], Sequence[int]], case: str
) -> None:
    with pytest.raises(AssertionError, match=rf"^slot_mapping\({case}\)\n  expected"):
        checks.slot_mapping(mistake)


# -- 04: arrays of a flat batch --------------------------------------------------------

Arrays = tuple[list[int], list[int], list[int]]


def flat_arrays(parts: Sequence[Part]) -> Arrays:
    query_start_loc: list[int] = [0]
    positions: list[int] = []
    logits_indices: list[int] = []
    for start, length, known in parts:
        positions += range(start, start + length)
        query_start_loc.append(len(positions))
        if start + length == known:
            logits_indices.append(len(positions) - 1)
    return query_start_loc, positions, logits_indices


def flat_arrays_where(
    parts: Sequence[Part], is_sampled: Callable[[int, int, int], bool]
) -> Arrays:
    """Right but for the question which parts are sampled."""
    starts, positions, _ = flat_arrays(parts)
    chosen = [is_sampled(*part) for part in parts]
    ends = zip(starts[1:], chosen, strict=True)
    return starts, positions, [end - 1 for end, sampled in ends if sampled]


def forgets_the_last_end(parts: Sequence[Part]) -> Arrays:
    starts, positions, indices = flat_arrays(parts)
    return starts[:-1], positions, indices


def forgets_the_zero(parts: Sequence[Part]) -> Arrays:
    starts, positions, indices = flat_arrays(parts)
    return starts[1:], positions, indices


def points_behind_the_part(parts: Sequence[Part]) -> Arrays:
    starts, positions, indices = flat_arrays(parts)
    return starts, positions, [index + 1 for index in indices]


def samples_the_first_token(parts: Sequence[Part]) -> Arrays:
    starts, positions, _ = flat_arrays(parts)
    return starts, positions, starts[:-1]


def samples_only_decodes(parts: Sequence[Part]) -> Arrays:
    return flat_arrays_where(parts, lambda start, length, known: length == 1)


def samples_every_part(parts: Sequence[Part]) -> Arrays:
    return flat_arrays_where(parts, lambda start, length, known: True)


def forgets_the_last_chunk(parts: Sequence[Part]) -> Arrays:
    return flat_arrays_where(parts, lambda start, length, known: length in (1, known))


def counts_places_of_the_row(parts: Sequence[Part]) -> Arrays:
    starts, positions, indices = flat_arrays(parts)
    return starts, list(range(len(positions))), indices


def counts_in_its_own_request(parts: Sequence[Part]) -> Arrays:
    starts, positions, indices = flat_arrays(parts)
    return starts, positions, [positions[index] for index in indices]


def counts_in_its_own_part(parts: Sequence[Part]) -> Arrays:
    starts, positions, _ = flat_arrays(parts)
    ended = [length - 1 for start, length, known in parts if start + length == known]
    return starts, positions, ended


def skips_parts_without_a_token(parts: Sequence[Part]) -> Arrays:
    return flat_arrays([p for p in parts if p[0] + p[1] == p[2] or len(parts) == 1])


def lists_lengths(parts: Sequence[Part]) -> Arrays:
    _, positions, indices = flat_arrays(parts)
    return [0, *(length for _, length, _ in parts)], positions, indices


def test_check_of_flat_arrays_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.flat_arrays(flat_arrays)
    assert capsys.readouterr().out == "flat_arrays: right, 8 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (forgets_the_last_end, r"(0, 1, 1)"),
        (forgets_the_zero, r"(0, 1, 1)"),
        (points_behind_the_part, r"(0, 1, 1)"),
        (samples_the_first_token, r"(0, 3, 3)"),
        (samples_only_decodes, r"(0, 3, 3)"),
        (counts_places_of_the_row, r"(4, 1, 5)"),
        (counts_in_its_own_request, r"(4, 1, 5)"),
        (samples_every_part, r"(0, 2, 3)"),
        (forgets_the_last_chunk, r"(1, 2, 3)"),
        (counts_in_its_own_part, r"(0, 2, 2), (3, 1, 4)"),
        (lists_lengths, r"(0, 2, 2), (3, 1, 4)"),
        (skips_parts_without_a_token, r"(0, 2, 5), (3, 1, 4)"),
    ],
)
def test_check_of_flat_arrays_finds_mistakes(
    mistake: Callable[[Sequence[Part]], Arrays], case: str
) -> None:
    shown = re.escape(f"flat_arrays([{case}])")
    with pytest.raises(AssertionError, match=rf"^{shown}\n  expected"):
        checks.flat_arrays(mistake)


# -- figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "steps"), [(4, 12), (18, 20)])
def test_the_six_requests_take_as_many_steps_as_notebook_03_says(
    block_size: int, steps: int
) -> None:
    assert len(memory.engine_memory(block_size)) == steps


@pytest.mark.parametrize("num_blocks", range(5, 13))
def test_nobody_is_preempted_with_more_than_8_blocks(num_blocks: int) -> None:
    config = replace(memory.MEMORY, num_blocks=num_blocks)
    steps = record_steps(list(memory.LENGTHS.values()), config)
    has_pauses = False
    for name in memory.LENGTHS:
        batches = [step.batch for step in steps if name in step.requests]
        has_pauses |= len(batches) != batches[-1] - batches[0] + 1
    assert has_pauses == (num_blocks <= 8)
    if num_blocks == 8:
        assert "r3" not in steps[2].requests


def test_places_of_a_step_are_those_that_the_engine_wrote() -> None:
    """The slot mapping of all batches so far, without what has been given back."""
    written: dict[tuple[str, int], int] = {}
    for step in record_steps(list(memory.LENGTHS.values()), memory.MEMORY):
        names = [
            name
            for name, length in zip(step.requests, step.query_lens, strict=True)
            for _ in range(length)
        ]
        tokens = zip(names, step.arrays["positions"], strict=True)
        written |= dict(zip(tokens, step.arrays["slot_mapping"], strict=True))
        held = memory.engine_memory(4)[step.batch]
        drawn = memory.places_of(held, 4)
        assert {
            place: token for token, place in written.items()
        }.items() >= drawn.items()


@pytest.mark.parametrize("budget", [2, 5, 8, 64])
def test_arrays_of_the_parts_are_those_of_the_engine(budget: int) -> None:
    """The solution of the exercise, against what the engine wrote for the device."""
    parts, arrays = flat.engine_parts(budget), flat.engine_arrays(budget)
    for batch, engine in zip(parts, arrays, strict=True):
        assert tuple(engine[1:]) == flat_arrays([part[1:] for part in batch])


def first_token(budget: int, name: str) -> int:
    """The step in which the first token of a request is sampled."""
    return next(
        step
        for step, batch in enumerate(flat.engine_parts(budget))
        for part in batch
        if part.name == name and part.start + part.length == part.known
    )


def test_what_notebook_04_says_of_budgets() -> None:
    steps = {budget: len(flat.engine_parts(budget)) for budget in (*range(2, 25), 64)}
    assert {b for b, count in steps.items() if count == 9} == {*range(7, 25), 64}
    assert (min(steps.values()), steps[6]) == (9, 10)
    assert first_token(8, "r3") == first_token(64, "r3") + 3
    for batch in flat.engine_parts(2):  # r3 gets nothing while two others take part
        names = {part.name for part in batch}
        assert "r3" not in names or len(names) < 3


def test_wrong_arrays_of_a_learner_are_drawn_all_the_same() -> None:
    names = ["r0", "r1"]
    for batch in (
        flat.FlatBatch(names, [0, 2], [0, 1, 0], [9]),
        flat.FlatBatch(names, [], [], []),
        flat.FlatBatch(names, [0, 7, 3, 2], [4], [-1]),
    ):
        assert flat.flat_batch_svg({"yours": batch}).endswith("</svg>\n")
