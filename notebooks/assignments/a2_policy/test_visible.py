"""What you can run yourself: `pytest test_visible.py` in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from policy import plan

from cbasync.checks import policies as checks


def test_a_prompt_is_cut_to_the_budget() -> None:
    request = {"name": "a", "waited_ms": 0.0, "prompt_left": 9, "output_left": 3}
    assert plan(4, 1, [request]) == [["a", 4]]


def test_well_formed() -> None:
    checks.well_formed(plan)


def test_limits() -> None:
    checks.limits(plan)


def test_no_waste() -> None:
    checks.no_waste(plan)


def test_nobody_starves() -> None:
    checks.nobody_starves(plan)


def test_latency() -> None:
    for at_most_ms in checks.LATENCY_BARS_MS:
        checks.latency(plan, at_most_ms)
