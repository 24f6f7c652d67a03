"""Assignment 1: what the judge of a block manager tells apart, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from cbasync.checks import block_manager
from cbasync.grading.rubric import ASSIGNMENTS
from tests.loading import load

A1 = ASSIGNMENTS["a1"]


def manager(name: str) -> Any:
    """The class of the reference, or of a wrong submission."""
    folder = A1.hidden / ("reference" if name == "reference" else f"wrong/{name}")
    return load(folder / A1.file).BlockManager


def hit_rate(name: str, seed: int) -> float:
    return block_manager.count_hits(manager(name), seed).rate


@pytest.mark.parametrize("seed", [*range(8), 4711])
def test_the_last_bar_lies_well_between_a_good_choice_and_a_fair_one(seed: int) -> None:
    _, bar = block_manager.hit_bars(manager("reference"), seed)
    assert hit_rate("reference", seed) > bar + 0.01
    assert hit_rate("prompts_from_the_front", seed) < bar - 0.005


@pytest.mark.parametrize("seed", range(4))
def test_a_refusal_that_empties_the_cache_is_found(seed: int) -> None:
    with pytest.raises(AssertionError, match="as without 'refused'"):
        block_manager.refusals(manager("forgets_at_refusal"), seed)


@pytest.mark.parametrize("seed", range(4))
def test_to_forget_at_the_release_is_no_fault_of_the_refusal(seed: int) -> None:
    block_manager.refusals(manager("forgets_at_release"), seed)


def test_only_the_first_of_two_blocks_that_hold_the_same_needs_to_be_found() -> None:
    ops: list[block_manager.Op] = [("admit", "a", [1, 2, 3, 4])]
    ops += [("admit", "b", [1, 2, 3, 4])]
    # All blocks but that of b are taken, so that of a, too.
    ops += [("release", "a"), ("admit", "x", [7] * 17), ("release", "x")]
    ops += [("admit", "c", [1, 2, 3, 4, 5])]
    cache = block_manager.play(manager("reference"), ops, 6, shares=True)
    assert cache.num_hits == 0
    ops[2:5] = []  # the first one is still there
    cache = block_manager.play(manager("reference"), ops, 6, shares=True)
    assert cache.num_hits == 4


def test_a_block_of_the_last_prompt_token_is_a_new_one() -> None:
    eight = list(range(8))
    ops: list[block_manager.Op] = [("admit", "a", eight), ("admit", "b", eight)]
    cache = block_manager.play(manager("reference"), ops, 8, shares=True)
    assert cache.num_hits == 4
    answer = {"table": list(cache.tables["a"]), "known": 8}
    with pytest.raises(AssertionError, match="known is 0, 4, 8"):
        cache.admitted("c", eight, answer)


def test_one_is_told_as_one() -> None:
    class Refuses:
        def admit(self, name: str, tokens: list[int]) -> None:
            return None

    with pytest.raises(AssertionError, match="it needs 1 block at most, 64 are free"):
        block_manager.tables(lambda *sizes: Refuses())  # type: ignore[arg-type]
