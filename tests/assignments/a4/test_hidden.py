"""Assignment 4, the rubric: a carry-over for a ring of three slots."""

from __future__ import annotations

import pytest

from cbasync.checks import ring_loop, rings
from cbasync.grading import Submission
from tests.assignments.adapters import carry, carry_function


@pytest.mark.points(10, "every input has an entry, and known tokens are left alone")
def test_known(submission: Submission, seed: int) -> None:
    rings.known(carry(submission), seed)


@pytest.mark.points(15, "tokens of the batch before are found")
def test_one_back(submission: Submission, seed: int) -> None:
    rings.one_back(carry(submission), seed)


@pytest.mark.points(15, "tokens of two batches before are found")
def test_two_back(submission: Submission, seed: int) -> None:
    rings.two_back(carry(submission), seed)


@pytest.mark.points(10, "what was collected comes from the host")
def test_collected(submission: Submission, seed: int) -> None:
    rings.collected(carry(submission), seed)


@pytest.mark.points(10, "ranks count the sampled rows only")
def test_ranks(submission: Submission, seed: int) -> None:
    rings.ranks(carry(submission), seed)


@pytest.mark.points(10, "a request that begins again finds all its tokens")
def test_again(submission: Submission, seed: int) -> None:
    rings.again(carry(submission), seed)


@pytest.mark.points(10, "placeholders are replaced, and nothing else")
def test_resolve(submission: Submission, seed: int) -> None:
    rings.resolved(carry_function(submission, "resolve"), seed)


@pytest.mark.points(5, "the model reads what it would read of each request alone")
def test_whole(submission: Submission, seed: int) -> None:
    rings.whole(carry(submission), carry_function(submission, "resolve"), seed)


@pytest.mark.points(10, "the loop: every batch goes through, without a race")
def test_no_race(submission: Submission, seed: int) -> None:
    ring_loop.no_race(carry_function(submission, "loop"), seed)


@pytest.mark.points(5, "the loop: the GPU is never without work")
def test_never_idle(submission: Submission, seed: int) -> None:
    ring_loop.never_idle(carry_function(submission, "loop"), seed)
