"""What you can run yourself, in this folder: `pytest test_visible.py`.

One small example, the checks, and your idle share on workloads that the grader does not
use: it takes another seed.
"""

import sys
from pathlib import Path

import pytest

from cbasync.checks import planner_checks
from cbasync.checks.planner_workloads import workloads
from cbasync.checks.planners import Constant, Workload, play

sys.path.insert(0, str(Path(__file__).parent))
import planner

SEED = 0
EXAMPLE = Workload(
    host_us=[4000, 4000, 4000, 4000, 24_000, 4000, 4000, 4000],
    ends=[0, 0, 0, 0, 0, 2, 0, 0],
    budget=3,
)


def test_example():
    run = play(EXAMPLE, planner.Planner(EXAMPLE.limits))
    assert run.discarded <= EXAMPLE.budget
    assert run.idle_us <= play(EXAMPLE, Constant(1)).idle_us


@pytest.mark.parametrize("check", planner_checks.ALL, ids=lambda check: check.__name__)
def test_check(check):
    check(planner.Planner, SEED)


def test_idle_share():
    runs = planner_checks.run_all(planner.Planner, workloads(SEED))
    assert planner_checks.idle_share(runs) <= 1
