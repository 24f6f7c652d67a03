"""What you can run yourself, in this folder.

The command is `../../../.venv/bin/python -m pytest test_visible.py`.

First four small examples, then the checks that also grade you. The grader runs them
with another seed, so with other scripts.
"""

import sys
from pathlib import Path

import pytest

from cbasync.checks import race_checks
from cbasync.checks.race_scripts import host, launch, record, synchronize, wait

sys.path.insert(0, str(Path(__file__).parent))
import races

SEED = 0

NO_WAIT = [
    host("prepare 0", writes=["ids"]),
    launch("h2d", "h2d 0", ["ids"], ["device_ids"]),
    record("h2d", "h2d_done"),
    launch("compute", "compute 0", ["device_ids"], ["tokens"]),
]
RIGHT = [*NO_WAIT[:3], wait("compute", "h2d_done"), NO_WAIT[3]]
EARLY_RECORD = [
    launch("compute", "compute 0", ["device_ids"], ["tokens"]),
    record("compute", "compute_done"),
    wait("d2h", "compute_done"),
    record("d2h", "d2h_done"),
    launch("d2h", "d2h 0", ["tokens"], ["host_tokens"]),
    synchronize("d2h_done"),
    host("update 0", ["host_tokens"]),
]
# The record on d2h stands for the wait above it, so for the copy on h2d.
WAIT_RECORDED = [
    launch("h2d", "h2d 0", ["ids"], ["device_ids"]),
    record("h2d", "h2d_done"),
    wait("d2h", "h2d_done"),
    record("d2h", "d2h_done"),
    synchronize("d2h_done"),
    host("update 0", ["device_ids"]),
]


def bar(line, start_us, end_us):
    return line | {"start_us": start_us, "end_us": end_us}


def test_example_comes_before():
    assert races.comes_before(RIGHT, "h2d 0", "compute 0") is True
    assert races.comes_before(NO_WAIT, "h2d 0", "compute 0") is False
    assert races.comes_before(WAIT_RECORDED, "h2d 0", "update 0") is True


def test_example_missing_edge():
    assert races.missing_edge(RIGHT) is None
    assert races.missing_edge(WAIT_RECORDED) is None
    assert list(races.missing_edge(NO_WAIT)) == ["h2d 0", "compute 0"]
    assert list(races.missing_edge(EARLY_RECORD)) == ["d2h 0", "update 0"]


def test_example_shown():
    bars = [bar(NO_WAIT[1], 0, 20), bar(NO_WAIT[3], 10, 90)]
    copy_back = launch("d2h", "d2h 0", ["tokens"], ["host_tokens"])
    bars.append(bar(copy_back, 90, 110))  # starts as soon as compute 0 has ended
    assert [list(pair) for pair in races.shown(bars)] == [["h2d 0", "compute 0"]]


def test_example_mended():
    assert races.mended(RIGHT) == RIGHT
    assert race_checks.overlap_lost(NO_WAIT, races.mended(NO_WAIT)) == ""


@pytest.mark.parametrize("check", race_checks.ALL, ids=lambda check: check.__name__)
def test_check(check):
    check(races, SEED)
