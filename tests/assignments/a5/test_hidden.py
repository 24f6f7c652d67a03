"""Rubric of assignment 5: the least idle time with at most k discarded rows."""

import pytest

from cbasync.checks import planner_checks
from cbasync.grading import Submission
from tests.assignments.a5.baselines import ends_only_share
from tests.assignments.adapters import planner_maker


@pytest.mark.points(10, "answers are whole numbers within the limits, on any workload")
def test_usable_answers(submission: Submission, seed: int) -> None:
    planner_checks.usable_answers(planner_maker(submission), seed)


@pytest.mark.points(10, "a planner remembers its own run and no other")
def test_own_memory(submission: Submission, seed: int) -> None:
    planner_checks.own_memory(planner_maker(submission), seed)


@pytest.mark.points(20, "k is kept, and half of the idle time of taking turns is gone")
def test_budget_kept(submission: Submission, seed: int) -> None:
    runs = planner_checks.budget_kept(planner_maker(submission), seed)
    submission.metrics["idle_share"] = planner_checks.idle_share(runs)


@pytest.mark.points(15, "idle share at most 1: as good as the best constant depths")
def test_best_constant(submission: Submission, seed: int) -> None:
    words = "the best constant depth of each workload"
    planner_checks.share_below(planner_maker(submission), seed, 1.0, words)


@pytest.mark.points(20, "idle share halfway from there to a rule that watches ends")
def test_halfway(submission: Submission, seed: int) -> None:
    bar = (1 + ends_only_share(seed)) / 2
    words = "halfway from the best constant depth to a rule that only watches ends"
    planner_checks.share_below(planner_maker(submission), seed, bar, words)


@pytest.mark.points(25, "idle share at most that of a rule that watches ends")
def test_ends_only(submission: Submission, seed: int) -> None:
    bar = ends_only_share(seed)
    words = "a rule that only watches how often requests end"
    planner_checks.share_below(planner_maker(submission), seed, bar, words)
