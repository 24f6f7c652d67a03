"""Assignment 2, the rubric: a scheduler policy."""

from __future__ import annotations

import pytest

from cbasync.checks import policies as checks
from cbasync.grading import Submission
from tests.assignments import adapters

REFERENCE = adapters.reference("a2")


def rush_hours(seed: int) -> list[int]:
    """Seeds of workloads that nobody has seen."""
    return [1000 * (seed + 1) + number for number in range(3)]


@pytest.mark.points(10, "every plan is a list of names and numbers that make sense")
def test_well_formed(submission: Submission, seed: int) -> None:
    checks.well_formed(adapters.policy(submission), seed)


@pytest.mark.points(10, "token budget and seats are kept")
def test_limits(submission: Submission, seed: int) -> None:
    checks.limits(adapters.policy(submission), seed)


@pytest.mark.points(10, "nobody waits for tokens and seats that are left over")
def test_no_waste(submission: Submission, seed: int) -> None:
    checks.no_waste(adapters.policy(submission), seed)


@pytest.mark.points(20, "nobody starves")
def test_nobody_starves(submission: Submission, seed: int) -> None:
    checks.nobody_starves(adapters.policy(submission), seed)


@pytest.mark.points(15, "mean latency of the given rush hour, half of the gain")
def test_latency_given(submission: Submission) -> None:
    at_most = checks.latency_bar(REFERENCE.plan, 0.5, [0])
    checks.latency(adapters.policy(submission), at_most, [0])


@pytest.mark.points(15, "mean latency of other rush hours, half of the gain")
def test_latency_half(submission: Submission, seed: int) -> None:
    seeds = rush_hours(seed)
    at_most = checks.latency_bar(REFERENCE.plan, 0.5, seeds)
    checks.latency(adapters.policy(submission), at_most, seeds)


@pytest.mark.points(20, "mean latency of other rush hours, nine tenths of the gain")
def test_latency_most(submission: Submission, seed: int) -> None:
    seeds = rush_hours(seed)
    at_most = checks.latency_bar(REFERENCE.plan, 0.9, seeds)
    checks.latency(adapters.policy(submission), at_most, seeds)
