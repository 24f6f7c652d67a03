"""Rubric of assignment 3: find the race in an event script, and mend it."""

import pytest

from cbasync.checks import race_checks
from cbasync.grading import Submission
from tests.assignments.adapters import RaceFinder


@pytest.mark.points(10, "comes_before knows queues, the host and launches")
def test_queues(submission: Submission, seed: int) -> None:
    race_checks.queues(RaceFinder(submission), seed)


@pytest.mark.points(10, "comes_before knows events")
def test_events(submission: Submission, seed: int) -> None:
    race_checks.events(RaceFinder(submission), seed)


@pytest.mark.points(15, "missing_edge where a line was removed")
def test_removed_lines(submission: Submission, seed: int) -> None:
    race_checks.removed_lines(RaceFinder(submission), seed)


@pytest.mark.points(10, "missing_edge where a line was misplaced")
def test_misplaced_lines(submission: Submission, seed: int) -> None:
    race_checks.misplaced_lines(RaceFinder(submission), seed)


@pytest.mark.points(10, "missing_edge in scripts of any shape")
def test_any_script(submission: Submission, seed: int) -> None:
    race_checks.any_script(RaceFinder(submission), seed)


@pytest.mark.points(10, "shown finds bars that overlap")
def test_overlaps(submission: Submission, seed: int) -> None:
    race_checks.overlaps(RaceFinder(submission), seed)


@pytest.mark.points(5, "shown finds bars in the wrong order, and no others")
def test_turned_round(submission: Submission, seed: int) -> None:
    race_checks.turned_round(RaceFinder(submission), seed)


@pytest.mark.points(10, "mended adds lines, and nothing races any more")
def test_race_free(submission: Submission, seed: int) -> None:
    race_checks.race_free(RaceFinder(submission), seed)


@pytest.mark.points(15, "mended loses no overlap")
def test_overlap_kept(submission: Submission, seed: int) -> None:
    race_checks.overlap_kept(RaceFinder(submission), seed)


@pytest.mark.points(5, "mended adds two lines for an edge at most")
def test_few_lines(submission: Submission, seed: int) -> None:
    race_checks.few_lines(RaceFinder(submission), seed)
