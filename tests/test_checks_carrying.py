"""Notebooks 09 and 10: checks, planted mistakes, and what their prose says."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from cbasync import checks
from cbasync.checks.carrying import Workload, _play, random_workload
from cbasync.config import CarryOverFamily, EngineConfig
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine
from cbasync.figures.carrying import (
    LENGTHS,
    STEPS,
    PromptsFirst,
    both_engines,
    calls_of,
    record,
    sampled_rows,
    stages_ms,
)
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput

Rows = Sequence[tuple[str, bool]]
Lengths = Sequence[tuple[str, int]]

# -- 09: carry-over --------------------------------------------------------------------


def carry_over(before: Rows, now: Lengths) -> list[int]:
    sampled = [name for name, is_sampled in before if is_sampled]
    ranks = {name: rank for rank, name in enumerate(sampled)}
    result = []
    for name, length in now:
        result += [ranks.get(name, -1)] * length
    return result


def takes_the_row(before: Rows, now: Lengths) -> list[int]:
    rows = {name: row for row, (name, sampled) in enumerate(before) if sampled}
    return [rows.get(name, -1) for name, length in now for _ in range(length)]


def forgets_who_is_sampled(before: Rows, now: Lengths) -> list[int]:
    return carry_over([(name, True) for name, _ in before], now)


def writes_one_number_a_request(before: Rows, now: Lengths) -> list[int]:
    return carry_over(before, [(name, 1) for name, _ in now])


def takes_zero_for_nothing(before: Rows, now: Lengths) -> list[int]:
    return [max(0, rank) for rank in carry_over(before, now)]


def counts_from_one(before: Rows, now: Lengths) -> list[int]:
    return [rank + 1 if rank >= 0 else -1 for rank in carry_over(before, now)]


def counts_in_this_batch(before: Rows, now: Lengths) -> list[int]:
    sampled = {name for name, is_sampled in before if is_sampled}
    carried = [name for name, _ in now if name in sampled]
    return carry_over([(name, True) for name in carried], now)


def keeps_the_old_order(before: Rows, now: Lengths) -> list[int]:
    lengths = dict(now)
    old = [(name, lengths[name]) for name, _ in before if name in lengths]
    return carry_over(before, [*old, *[row for row in now if row not in old]])


def test_check_of_carry_over_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.carry_over(carry_over)
    assert capsys.readouterr().out == "carry_over: right, 7 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (takes_zero_for_nothing, "[], [('A', 1)]"),
        (counts_from_one, "[('A', True)], [('A', 1)]"),
        (writes_one_number_a_request, "[], [('A', 3)]"),
        (forgets_who_is_sampled, "[('A', False)], [('A', 2)]"),
        (counts_in_this_batch, "[('A', True), ('B', True)], [('B', 1)]"),
        (takes_the_row, "[('A', False), ('B', True)], [('A', 2), ('B', 1)]"),
        (
            keeps_the_old_order,
            "[('C', False), ('A', True), ('B', True)], [('C', 3), ('B', 1), ('A', 1)]",
        ),
    ],
)
def test_check_of_carry_over_finds_mistakes(
    mistake: Callable[[Rows, Lengths], list[int]], case: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        checks.carry_over(mistake)
    assert str(caught.value).startswith(f"carry_over({case})\n  expected")


@pytest.mark.parametrize("scheduler", [Scheduler, PromptsFirst])
def test_the_solution_gives_what_the_engine_writes(scheduler: type[Scheduler]) -> None:
    steps = record(LENGTHS, scheduler)
    for before, now in pairwise(steps):
        lengths = list(zip(now.requests, now.query_lens, strict=True))
        assert carry_over(sampled_rows(before), lengths) == list(
            now.arrays["carry_over"]
        )


def test_where_arrows_cross_and_where_a_rank_is_not_a_row() -> None:
    """What the prose of 09 says about its run."""
    crossed, moved = set(), set()
    for before, now in pairwise(record(LENGTHS, PromptsFirst)):
        ranks = [rank for rank in now.arrays["carry_over"] if rank >= 0]
        if ranks != sorted(ranks):
            crossed.add(now.batch)
        rows = dict(zip(before.requests, range(9), strict=False))
        owners = [
            name
            for name, length in zip(now.requests, now.query_lens, strict=True)
            for _ in range(length)
        ]
        pairs = zip(owners, now.arrays["carry_over"], strict=True)
        if any(rank >= 0 and rows[name] != rank for name, rank in pairs):
            moved.add(now.batch)
    assert (crossed, moved) == ({3, 5}, {1, 2})


def batches_of(workload: Workload) -> list[SchedulerOutput]:
    """What the package's engine launches for a workload."""
    batches: list[SchedulerOutput] = []

    class Watched(AsyncEngine):
        def launch(self, output: SchedulerOutput) -> None:
            batches.append(output)
            super().launch(output)

    _play(Watched, workload)
    return batches


def test_without_another_order_rank_and_row_are_equal() -> None:
    """So a row in place of a rank stays unnoticed: what 09 warns of."""
    chunks = 0
    for number in range(30, 100):
        for batch in batches_of(random_workload(number)):
            ranks = [o.rank for o in batch.occurrences]
            chunks += -1 in ranks and len(ranks) > 1
            assert ranks[:-1] == list(range(len(ranks) - 1))
    assert chunks > 10, "chunks beside decodes are what this is about"


def num_batches(family: CarryOverFamily, depth: int) -> int:
    """Batches of a run in which an urgent long prompt takes all tokens of a batch."""
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=4, depth=depth, carry_over=family
    )
    engine = AsyncEngine(ScriptedRunner(), config, SimDevice(), policy="priority")
    with engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=9), priority=1)
        for _ in range(3):
            engine.step()
        engine.add_request([4] * 7, SamplingParams(max_tokens=5), priority=0)
        engine.run()
    return engine.scheduler.num_launched


def test_one_batch_ahead_nobody_notices_that_ranks_reach_one_batch_back() -> None:
    assert num_batches("slot", 1) == num_batches("row", 1)
    assert num_batches("slot", 3) > num_batches("row", 3)


# -- 10: the loop ----------------------------------------------------------------------


def calls(num_batches: int, depth: int) -> list[str]:
    result: list[str] = []
    launched, in_flight = 0, deque[int]()
    while launched < num_batches or in_flight:
        is_launching = launched < num_batches
        if is_launching:
            result.append(f"launch {launched}")
            in_flight.append(launched)
            launched += 1
        if not is_launching or len(in_flight) > depth:
            result.append(f"collect {in_flight.popleft()}")
    return result


def takes_turns(num_batches: int, depth: int) -> list[str]:
    return calls(num_batches, 0)


def knows_one_depth(num_batches: int, depth: int) -> list[str]:
    return calls(num_batches, 1)


def never_drains(num_batches: int, depth: int) -> list[str]:
    return calls(num_batches, depth)[: 2 * num_batches - depth]


def waits_a_batch_too_early(num_batches: int, depth: int) -> list[str]:
    return calls(num_batches, max(0, depth - 1))


def runs_a_batch_too_far(num_batches: int, depth: int) -> list[str]:
    return calls(num_batches, depth + 1)


def collects_all_it_has(num_batches: int, depth: int) -> list[str]:
    result = []
    for first in range(0, num_batches, depth + 1):
        group = range(first, min(first + depth + 1, num_batches))
        result += [f"launch {n}" for n in group] + [f"collect {n}" for n in group]
    return result


def collects_the_newest(num_batches: int, depth: int) -> list[str]:
    result = calls(num_batches, depth)
    places = [n for n, call in enumerate(result) if call.startswith("collect")]
    in_flight: list[str] = []
    for n, call in enumerate(result):
        if n in places:
            result[n] = f"collect {in_flight.pop()}"
        else:
            in_flight.append(call.split()[1])
    return result


def test_check_of_calls_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.calls(calls)
    assert capsys.readouterr().out == "calls: right, 7 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (never_drains, "1, 1"),
        (knows_one_depth, "2, 0"),
        (runs_a_batch_too_far, "2, 0"),
        (takes_turns, "2, 1"),
        (waits_a_batch_too_early, "2, 1"),
        (collects_the_newest, "2, 1"),
        (collects_all_it_has, "3, 1"),
    ],
)
def test_check_of_calls_finds_mistakes(
    mistake: Callable[[int, int], list[str]], case: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        checks.calls(mistake)
    assert str(caught.value).startswith(f"calls({case})\n  expected")


# -- 10: the engine that the notebook builds -------------------------------------------

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "10_async_engine.ipynb"
PUBLISHED = ROOT / "data" / "results" / "published-eager.json"
EDGES = ("h2d_done", "compute_done", "d2h_done")


def engine_cells() -> list[str]:
    """Sources of the cells that make up the engine."""
    cells: list[Any] = nbformat.read(NOTEBOOK, as_version=4).cells
    return [c.source for c in cells if "engine" in c.metadata.get("tags", [])]


@pytest.fixture(scope="module")
def built() -> type[Any]:
    """The engine class of the notebook."""
    names: dict[str, Any] = {}
    for source in engine_cells():
        exec(source, names)
    engine: type[Any] = names["MyAsyncEngine"]
    return engine


def test_the_engine_of_the_notebook_is_short_and_is_ours() -> None:
    source = "\n".join(engine_cells())
    assert len(source.splitlines()) < 150
    methods = set(re.findall(r"def (\w+)", source))
    shared = {"schedule", "launch", "collect", "step", "has_work", "add_request"}
    assert shared <= methods
    assert all(hasattr(AsyncEngine, name) for name in shared)
    for name in ("Scheduler", "IOSlot", "BatchBuilder", "make_carry_over", "Access"):
        assert re.search(rf"import .*\b{name}\b", source)


def test_the_engine_of_the_notebook_gives_the_tokens_of_the_one_that_takes_turns(
    built: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    checks.async_engine(built)
    told = re.fullmatch(
        r"async_engine: right, 100 workloads, (\d+) rows discarded\n",
        capsys.readouterr().out,
    )
    assert told
    assert int(told[1]) > 50, "late stops are what these workloads are for"


def test_workloads_hold_what_the_notebook_says() -> None:
    workloads = [random_workload(number) for number in range(100)]
    assert {w.config.depth for w in workloads} == {1, 2, 3}
    assert {w.config.carry_over for w in workloads} == {"slot", "row"}
    jobs = [(w.config, *job) for w in workloads for job in w.jobs]
    assert sum(len(p) > c.max_num_batched_tokens for c, _, p, _ in jobs) > 20
    assert sum(arrival > 0 for _, arrival, _, _ in jobs) > 20
    assert sum(bool(params.stop_token_ids) for *_, params in jobs) > 20


def fails(kind: Callable[..., Any]) -> str:
    """What the check says about an engine; it must not pass."""
    with pytest.raises(
        AssertionError, match=r"^async_engine, workload \d+\n"
    ) as caught:
        checks.async_engine(kind)
    return str(caught.value)


@pytest.mark.parametrize("edge", EDGES)
def test_check_of_the_engine_finds_a_missing_event(built: type[Any], edge: str) -> None:
    def broken(runner: Any, config: EngineConfig, device: SimDevice) -> Any:
        device.ablate = frozenset({edge})
        return built(runner, config, device)

    assert "expected" in fails(broken)


def test_check_of_the_engine_finds_one_slot_too_few(built: type[Any]) -> None:
    class OneTooFew(built):  # type: ignore[misc]
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.io_slots.pop()

    fails(OneTooFew)


def test_check_of_the_engine_finds_tokens_that_are_not_carried(
    built: type[Any],
) -> None:
    class Forgetful(built):  # type: ignore[misc]
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.carry_over.source = lambda previous: torch.zeros(1).long()

    fails(Forgetful)


def test_check_of_the_engine_finds_the_slot_before_last(built: type[Any]) -> None:
    class Late(built):  # type: ignore[misc]
        previous: Any
        older: Any = None

        def launch(self, output: SchedulerOutput) -> None:
            newer = self.previous
            self.previous = self.older
            super().launch(output)
            self.older = newer

    fails(Late)


def test_check_of_the_engine_finds_tokens_that_are_not_booked(
    built: type[Any],
) -> None:
    class Unbooked(built):  # type: ignore[misc]
        def collect(self) -> None:
            self.table.book = lambda columns, tokens: None
            super().collect()

    fails(Unbooked)


@pytest.mark.timeout(60)
def test_check_of_the_engine_finds_one_that_never_drains(built: type[Any]) -> None:
    class Endless(built):  # type: ignore[misc]
        def step(self) -> None:
            output = self.schedule()
            if output is not None:
                self.launch(output)
            if len(self.in_flight) > self.config.depth:
                self.collect()

    with pytest.raises(AssertionError, match="Who collects a batch"):
        checks.async_engine(Endless)


def test_an_error_of_the_engine_comes_with_its_workload(built: type[Any]) -> None:
    class Broken(built):  # type: ignore[misc]
        def step(self) -> None:
            raise OSError("planted")

    with pytest.raises(OSError, match="planted") as caught:
        checks.async_engine(Broken)
    assert caught.value.__notes__[0].startswith("async_engine, workload 0\n  depth")


def test_numbers_in_the_prose_of_10(built: type[Any]) -> None:
    drawings = [both_engines(depth=depth) for depth in (1, 2, 3)]
    in_turns = [round(sync.timeline.total_us) for sync, _ in drawings]
    ahead = [round(overlapped.timeline.total_us) for _, overlapped in drawings]
    assert (in_turns, ahead) == ([210_000] * 3, [154_000] * 3)
    cold = [
        stages_ms(d[1].timeline, n)["cold start"] for n, d in enumerate(drawings, 1)
    ]
    assert cold == sorted(cold)
    assert cold[0] < cold[1] < cold[2]
    published = json.loads(PUBLISHED.read_text())
    kernel_ms = [published[name]["kernels"] for name in ("sync", "async")]
    assert [f"{k['kernel_ms_per_step']:.2f}" for k in kernel_ms] == ["7.43", "7.44"]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_token_costs_depth_tokens(built: type[Any], depth: int) -> None:
    engine = built(ScriptedRunner(), EngineConfig(depth=depth), SimDevice())
    params = SamplingParams(max_tokens=9, stop_token_ids=[266])
    request = engine.add_request([0, 1, 2, 3], params)
    leased = []
    while engine.has_work:
        engine.step()
        leased.append(engine.scheduler.blocks.pool.num_leased)
    assert request.output_token_ids == [25, 180, 266]
    assert request.discarded_tokens == depth
    assert leased.count(1) == depth
    assert leased[-1] == 0


def test_calls_of_the_engine_are_those_of_the_solution() -> None:
    for depth in (1, 2, 3):
        assert calls_of(both_engines(depth=depth)[1].timeline) == calls(STEPS, depth)
