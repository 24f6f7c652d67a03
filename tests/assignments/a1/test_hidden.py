"""Assignment 1, the rubric: a block manager with sharing."""

from __future__ import annotations

import pytest

from cbasync.checks import block_manager as checks
from cbasync.grading import Submission
from tests.assignments import adapters

REFERENCE = adapters.reference("a1")


@pytest.mark.points(10, "every request has the blocks that it needs")
def test_tables(submission: Submission, seed: int) -> None:
    checks.tables(adapters.block_manager(submission), seed)


@pytest.mark.points(15, "everybody finds his own tokens in the cache")
def test_contents(submission: Submission, seed: int) -> None:
    checks.contents(adapters.block_manager(submission), seed)


@pytest.mark.points(15, "requests that begin alike share")
def test_beginnings(submission: Submission, seed: int) -> None:
    checks.beginnings(adapters.block_manager(submission), seed)


@pytest.mark.points(15, "a fork copies a shared block before it writes")
def test_copies(submission: Submission, seed: int) -> None:
    checks.copies(adapters.block_manager(submission), seed)


@pytest.mark.points(15, "who fits is let in, and a refusal changes nothing")
def test_refusals(submission: Submission, seed: int) -> None:
    checks.refusals(adapters.block_manager(submission), seed)


@pytest.mark.points(10, "all blocks are free at the end")
def test_all_free(submission: Submission, seed: int) -> None:
    checks.all_free(adapters.block_manager(submission), seed)


@pytest.mark.points(10, "what was released is found again")
def test_hit_rate_half(submission: Submission, seed: int) -> None:
    at_least, _ = checks.hit_bars(REFERENCE.BlockManager, seed)
    checks.hit_rate(adapters.block_manager(submission), at_least, seed)


@pytest.mark.points(10, "what will be asked for again is given away last")
def test_hit_rate_most(submission: Submission, seed: int) -> None:
    _, at_least = checks.hit_bars(REFERENCE.BlockManager, seed)
    checks.hit_rate(adapters.block_manager(submission), at_least, seed)
