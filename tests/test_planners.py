"""Assignment 5: the simulator beside the engine, its bounds, the bars, the checks."""

from __future__ import annotations

import json
import re
import sys
from itertools import product
from random import Random
from types import ModuleType

import pytest

from cbasync.checks import planner_checks
from cbasync.checks.planner_checks import idle_share, run_all
from cbasync.checks.planner_workloads import HOSTS, workloads
from cbasync.checks.planners import (
    Constant,
    Seen,
    Workload,
    best_constant,
    hindsight_us,
    least_idle_us,
    play,
)
from cbasync.config import EngineConfig
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine
from cbasync.grading.rubric import ASSIGNMENTS, load_items
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from tests.assignments.a5.baselines import EndsOnly, ends_only_share
from tests.loading import load

A5 = ASSIGNMENTS["a5"]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load(A5.hidden / "reference" / A5.file)


class Listed:
    """Depths from a list."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        self.depths = depths

    def ahead(self, seen: Seen) -> int:
        return self.depths[seen["batch"]]


# -- the simulator ---------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("host_us", [4000, 14_000])
def test_engine_on_the_virtual_clock_has_the_same_idle_time(
    depth: int, host_us: int
) -> None:
    costs = CostModel(
        "round",
        prepare=PhaseCost(host_us),
        compute=PhaseCost(10_000),
        update=PhaseCost(500),
    )
    batches = 9
    config = EngineConfig(max_num_seqs=1, depth=depth, max_model_len=32)
    with AsyncEngine(ScriptedRunner(), config, SimDevice(costs=costs)) as engine:
        engine.add_request([1], SamplingParams(max_tokens=batches))
        engine.run()
        idle_us = engine.timeline.idle_us
    workload = Workload([host_us] * batches, [0] * batches, 0)
    assert play(workload, Constant(depth)).idle_us == idle_us


@pytest.mark.parametrize(
    ("depth", "idle_us", "discarded"),
    [(0, 51_500, 0), (1, 14_500, 2), (2, 4500, 4), (3, 0, 4)],
)
def test_example_by_hand(depth: int, idle_us: int, discarded: int) -> None:
    """Only two batches come after the one in which the two requests end."""
    host_us = [4000, 4000, 4000, 4000, 24_000, 4000, 4000, 4000]
    workload = Workload(host_us, [0, 0, 0, 0, 0, 2, 0, 0], budget=3)
    run = play(workload, Constant(depth))
    assert (run.idle_us, run.discarded) == (idle_us, discarded)
    assert hindsight_us(workload) == 0


def test_planner_sees_what_has_happened_and_nothing_else() -> None:
    seen: list[Seen] = []

    class Curious(Constant):
        def ahead(self, now: Seen) -> int:
            seen.append(now)
            return self.depth

    workload = Workload([4000, 6000, 1000, 1000], [1, 0, 0, 0], budget=9)
    play(workload, Curious(1))
    rows = [[now[key] for key in ("host_us", "in_flight", "finished", "busy_us")]
            for now in seen]  # fmt: skip
    assert rows == [
        [None, 0, 0, 0],
        [4000, 1, 0, 10_000],  # the first batch computes from 4000 to 14000
        [6000, 2, 0, 14_000],
        [1000, 2, 0, 18_500],  # collected at 14500, prepared until 15500
    ]
    assert [now["ended"] for now in seen] == [[], [], [], [1]]
    assert [now["discarded"] for now in seen] == [0, 0, 0, 1]


def test_batch_that_ends_at_this_moment_is_finished() -> None:
    seen: list[int] = []

    class Curious(Constant):
        def ahead(self, now: Seen) -> int:
            seen.append(now["finished"])
            return self.depth

    play(Workload([4000, 10_000, 4000], [0, 0, 0], 0), Curious(2))
    assert seen == [0, 0, 1]


@pytest.mark.parametrize("answer", [-1, 4, 1.0, True, None, "1"])
def test_answer_that_is_no_depth_is_refused(answer: object) -> None:
    workload = Workload([4000], [0], 0)
    with pytest.raises(AssertionError, match="a whole number from 0 to 3"):
        play(workload, Constant(answer))  # type: ignore[arg-type]


def test_timeline_of_a_run_has_its_idle_time() -> None:
    workload = workloads(4, each=1, batches=30)[0]
    run = play(workload, Constant(1))
    assert run.timeline().idle_us == run.idle_us > 0


# -- bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_bounds_are_those_of_all_plans(seed: int) -> None:
    rng = Random(seed)
    host_us = [rng.choice((2000, 5000, 12_000, 26_000)) for _ in range(6)]
    ends = [rng.choice((0, 0, 1, 3)) for _ in range(6)]
    workload = Workload(host_us, ends, rng.randrange(8), max_ahead=2)
    runs = [play(workload, Listed(depths)) for depths in product(range(3), repeat=6)]
    kept = [run.idle_us for run in runs if run.discarded <= workload.budget]
    assert hindsight_us(workload) == min(kept)
    assert least_idle_us(workload) == min(run.idle_us for run in runs)
    assert best_constant(workload).idle_us >= min(kept)


def test_budget_that_is_just_enough_is_enough() -> None:
    host_us, ends = [4000, 4000, 14_000, 4000], [1, 0, 0, 0]
    idle_us = [best_constant(Workload(host_us, ends, k)).idle_us for k in (0, 1, 2)]
    assert idle_us == [23_500, 4500, 0]


@pytest.mark.parametrize("workload", workloads(2, each=1, batches=50))
def test_hindsight_is_between_the_bound_and_the_best_constant(
    workload: Workload,
) -> None:
    hindsight = hindsight_us(workload)
    assert least_idle_us(workload) <= hindsight <= best_constant(workload).idle_us


# -- workloads and bars ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_one_ahead_is_always_affordable_and_two_are_not(seed: int) -> None:
    given = workloads(seed)
    assert [w.kind for w in given] == [kind for kind in HOSTS for _ in range(2)]
    for workload in given:
        discarded = [play(workload, Constant(n)).discarded for n in range(3)]
        assert discarded[1] <= workload.budget < discarded[2]


def test_constant_depth_one_is_the_mark_of_the_metric() -> None:
    given = workloads(1)
    assert idle_share(run_all(lambda limits: Constant(1), given)) == 1
    assert idle_share(run_all(lambda limits: Constant(0), given)) > 2
    generous = [Workload(w.host_us, w.ends, 10**6, w.kind) for w in given]
    assert idle_share(run_all(lambda limits: Constant(3), generous)) == 0


def test_broken_budget_counts_as_taking_turns() -> None:
    given = workloads(1, each=1)
    turns = idle_share(run_all(lambda limits: Constant(0), given))
    far = idle_share(run_all(lambda limits: Constant(3), given))
    assert turns == far


@pytest.mark.parametrize("seed", range(1, 6))
def test_bars_lie_between_the_reference_and_the_best_constant(
    reference: ModuleType, seed: int
) -> None:
    """The reference passes whatever the seed of the year is; and it is not perfect."""
    given = workloads(seed)
    ours = run_all(reference.Planner, given)
    theirs = run_all(EndsOnly, given)
    for workload, run in [*ours, *theirs]:
        assert run.discarded <= workload.budget
    assert 0.1 < idle_share(ours) < ends_only_share(seed) < 1


# -- checks ----------------------------------------------------------------------------


@pytest.mark.parametrize("check", planner_checks.ALL)
def test_reference_passes_the_checks(
    reference: ModuleType, check: planner_checks.Check
) -> None:
    check(reference.Planner, 3)


def test_share_above_the_bar_names_the_worst_kind() -> None:
    with pytest.raises(AssertionError) as caught:
        planner_checks.share_below(lambda limits: Constant(1), 1, 0.5, "a bar")
    assert "at most 0.500: a bar" in str(caught.value)
    assert re.search(r"of the kind (bursts|rhythm|heavy|ramps):", str(caught.value))


def test_broken_budgets_are_named_where_the_share_is_bad() -> None:
    with pytest.raises(AssertionError, match="8 workloads broke their budget"):
        planner_checks.share_below(lambda limits: Constant(3), 1, 0.5, "a bar")


# -- what a student gets ---------------------------------------------------------------


def test_rubric_of_the_notebook_is_that_of_the_tests() -> None:
    notebook = json.loads((A5.folder / f"{A5.topic}.ipynb").read_text())
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", prose, re.MULTILINE)
    items = load_items(A5)
    assert rows == [(str(item.points), item.words) for item in items]
    assert sum(item.points for item in items) == 100


@pytest.mark.parametrize("name", ["reference", "wrong/hard_coded", "wrong/always_one"])
def test_visible_example_is_passed_by(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "planner", load(A5.hidden / name / A5.file))
    load(A5.folder / "test_visible.py").test_example()
