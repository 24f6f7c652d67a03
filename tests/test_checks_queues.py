"""Checks and figures of notebooks 05 and 06: solutions pass, mistakes are caught."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cbasync import checks
from cbasync.config import EngineConfig
from cbasync.devices.access import Access
from cbasync.devices.costs import ARTICLE
from cbasync.devices.sim import SimDevice
from cbasync.engine import SyncEngine
from cbasync.figures.queues import (
    BATCHES,
    EDGES,
    QUEUES,
    ROUND,
    in_turns,
    machine,
    queue_run,
    shares_svg,
    stacks_svg,
    touching,
)
from cbasync.foreign_trace import load_timeline
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.simulate import PUBLISHED, PUBLISHED_STEPS

Bars = Sequence[tuple[float, float]]
PhaseBars = Sequence[tuple[str, float, float]]
Idle = dict[str, float]
IdleByCause = Callable[[Bars, PhaseBars], Idle]
Op = tuple[str, float, Sequence[int]]
Starts = Callable[[Sequence[Op]], list[float]]

DATA = Path(__file__).parents[1] / "data"

# -- 05: idle time by cause ------------------------------------------------------------


def idle_by_cause(gpu: Bars, others: PhaseBars) -> Idle:
    idle: Idle = {"host": 0}
    for (_, gap_start), (gap_end, _) in pairwise(gpu):
        rest = gap_end - gap_start
        for phase, start, end in others:
            part = min(end, gap_end) - max(start, gap_start)
            if part > 0:
                idle[phase] = idle.get(phase, 0) + part
                rest -= part
        idle["host"] += rest
    return idle


def finds_nothing(gpu: Bars, others: PhaseBars) -> Idle:
    return {}


def adds_up_all_bars(gpu: Bars, others: PhaseBars) -> Idle:
    idle: Idle = {}
    for phase, start, end in others:
        idle[phase] = idle.get(phase, 0) + end - start
    idle["host"] = sum(b - a for (_, a), (b, _) in pairwise(gpu)) - sum(idle.values())
    return {cause: max(time, 0) for cause, time in idle.items()}


def one_cause_a_gap(gpu: Bars, others: PhaseBars) -> Idle:
    idle: Idle = {}
    for (_, a), (b, _) in pairwise(gpu):
        inside = [phase for phase, start, end in others if a < end and start < b]
        idle[inside[-1]] = idle.get(inside[-1], 0) + b - a
    return idle


def forgets_the_rest(gpu: Bars, others: PhaseBars) -> Idle:
    return {k: v for k, v in idle_by_cause(gpu, others).items() if k != "host"}


def counts_a_bar_from_its_start(gpu: Bars, others: PhaseBars) -> Idle:
    idle = idle_by_cause(gpu, others)
    for (_, a), _ in pairwise(gpu):
        for phase, start, end in others:
            if start < a < end:
                idle[phase] += a - start
    return idle


def counts_a_bar_to_its_end(gpu: Bars, others: PhaseBars) -> Idle:
    idle = idle_by_cause(gpu, others)
    for _, (b, _) in pairwise(gpu):
        for phase, start, end in others:
            if start < b < end:
                idle[phase] += end - b
    return idle


def keeps_the_last_gap_only(gpu: Bars, others: PhaseBars) -> Idle:
    return idle_by_cause(gpu[-2:], others)


def sees_the_first_gap_only(gpu: Bars, others: PhaseBars) -> Idle:
    return idle_by_cause(gpu[:2], others)


def test_check_of_idle_by_cause_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.idle_by_cause(idle_by_cause)
    assert capsys.readouterr().out == "idle_by_cause: right, 8 cases\n"


@pytest.mark.parametrize(
    ("mistake", "question"),
    [
        (finds_nothing, "What goes on between the two bars of the GPU?"),
        (one_cause_a_gap, "How many phases share this gap?"),
        (forgets_the_rest, "Is there a bar under every moment of the gap?"),
        (adds_up_all_bars, "Does the GPU wait before its first batch?"),
        (counts_a_bar_from_its_start, "What does the GPU do when prepare begins?"),
        (counts_a_bar_to_its_end, "What does the GPU do when prepare ends?"),
        (keeps_the_last_gap_only, "How many gaps are there, and where is"),
        (sees_the_first_gap_only, "How many gaps are there, and where is"),
    ],
)
def test_check_of_idle_by_cause_finds_mistakes(
    mistake: IdleByCause, question: str
) -> None:
    with pytest.raises(AssertionError, match=r"^idle_by_cause\(") as caught:
        checks.idle_by_cause(mistake)
    assert question in str(caught.value)


@pytest.mark.parametrize("kind", ["eager", "compile"])
def test_solution_agrees_with_the_package_on_a_recorded_run(kind: str) -> None:
    trace = load_timeline(DATA / "traces" / f"published-{kind}-sync.json.gz")
    spans = [(s.phase, s.start_us, s.end_us) for s in trace.spans]
    gpu = sorted(bar[1:] for bar in spans if bar[0] == "compute")
    idle = idle_by_cause(gpu, [bar for bar in spans if bar[0] != "compute"])
    idle["sync"] = idle.pop("d2h", 0)
    assert idle == pytest.approx({k: v for k, v in trace.idle_by_cause().items() if v})


# -- 06: when each op starts -----------------------------------------------------------


def starts(ops: Sequence[Op]) -> list[float]:
    free: dict[str, float] = {}
    begins: list[float] = []
    ends: list[float] = []
    for stream, length, waits in ops:
        begins.append(max([free.get(stream, 0), *(ends[op] for op in waits)]))
        ends.append(begins[-1] + length)
        free[stream] = ends[-1]
    return begins


def starts_at_its_end(ops: Sequence[Op]) -> list[float]:
    return [s + op[1] for s, op in zip(starts(ops), ops, strict=True)]


def has_no_queues(ops: Sequence[Op]) -> list[float]:
    return starts([(str(n), op[1], op[2]) for n, op in enumerate(ops)])


def has_one_queue(ops: Sequence[Op]) -> list[float]:
    return starts([("default", length, waits) for _, length, waits in ops])


def forgets_waits(ops: Sequence[Op]) -> list[float]:
    return starts([(stream, length, []) for stream, length, _ in ops])


def waits_for_a_length(ops: Sequence[Op]) -> list[float]:
    free: dict[str, float] = {}
    begins = []
    for stream, length, waits in ops:
        begins.append(max([free.get(stream, 0), *(ops[op][1] for op in waits)]))
        free[stream] = begins[-1] + length
    return begins


def forgets_its_queue_when_it_waits(ops: Sequence[Op]) -> list[float]:
    free: dict[str, float] = {}
    begins: list[float] = []
    for stream, length, waits in ops:
        over = [begins[op] + ops[op][1] for op in waits]
        begins.append(max(over) if over else free.get(stream, 0))
        free[stream] = begins[-1] + length
    return begins


def heeds_the_first_wait_only(ops: Sequence[Op]) -> list[float]:
    return starts([(stream, length, waits[:1]) for stream, length, waits in ops])


def lets_ops_overtake(ops: Sequence[Op]) -> list[float]:
    busy: dict[str, float] = {}
    begins: list[float] = []
    for stream, length, waits in ops:
        over = [begins[op] + ops[op][1] for op in waits]
        begins.append(max([busy.get(stream, 0), *over]))
        busy[stream] = busy.get(stream, 0) + length
    return begins


def test_check_of_starts_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.starts(starts)
    assert capsys.readouterr().out == "starts: right, 8 cases\n"


@pytest.mark.parametrize(
    ("mistake", "question"),
    [
        (starts_at_its_end, "Who is in front of the only op?"),
        (has_no_queues, "Can two ops of one stream run at the same time?"),
        (has_one_queue, "What is there that could hold the second op back?"),
        (forgets_waits, "Which op does the second one wait for?"),
        (waits_for_a_length, "How long an op takes, and when it is over"),
        (forgets_its_queue_when_it_waits, "The wait is over: is the stream free, too?"),
        (heeds_the_first_wait_only, "Which of the two waits is over last?"),
        (lets_ops_overtake, "May an op overtake the one in front of it that waits?"),
    ],
)
def test_check_of_starts_finds_mistakes(mistake: Starts, question: str) -> None:
    with pytest.raises(AssertionError, match=r"^starts\(\[") as caught:
        checks.starts(mistake)
    assert question in str(caught.value)


def test_check_shows_what_came_when_it_is_no_dict() -> None:
    with pytest.raises(AssertionError, match="got      None"):
        checks.idle_by_cause(lambda gpu, others: None)  # type: ignore[arg-type, return-value]


# -- the figures -----------------------------------------------------------------------


def test_loop_of_the_figure_is_the_engine_s() -> None:
    device = SimDevice(costs=ROUND)
    with SyncEngine(ScriptedRunner(), EngineConfig(depth=0), device) as engine:
        engine.add_request([1], SamplingParams(max_tokens=4))
        engine.run()
    ours, theirs = in_turns(ROUND, batches=4), engine.timeline
    bars = [
        [(s.phase, s.batch, s.start_us, s.end_us) for s in run.spans]
        for run in (ours, theirs)
    ]
    assert bars[0] == bars[1]


def test_shares_of_the_published_run_are_drawn_as_published() -> None:
    run = in_turns(ARTICLE, batches=PUBLISHED_STEPS)
    published = PUBLISHED["sync"]
    words = f"run: {published['total_s']} s, GPU active {published['gpu_active']:.1%}"
    assert words.replace("%", " %") in shares_svg({"run": run})


def test_stacks_have_one_scale_and_parts_in_order() -> None:
    long = {"update": 1.0, "compute": 3.0}
    picture = stacks_svg({"long": long, "short": {"host": 2.0}})
    solid = re.findall(r'width="([\d.]+)" height="28.0" fill="#', picture)
    assert list(map(float, solid)) == [708, 236, 472]


def test_stacks_of_nothing_are_an_empty_picture() -> None:
    assert "<rect" in stacks_svg({"nothing": {}, "no time": {"host": 0.0}})


def test_queues_without_events_are_as_fast_and_wrong() -> None:
    one, none, two = (
        queue_run("run", num_queues=n, edges=edges)
        for n, edges in ((1, ()), (3, ()), (3, EDGES))
    )
    assert [bool(run.races) for run in (one, none, two)] == [False, True, False]
    assert [run.note.split(", ")[1] for run in (one, none, two)] == [
        "right tokens",
        "wrong tokens",
        "right tokens",
    ]
    assert none.timeline.gpu_active == two.timeline.gpu_active == 1
    copies = QUEUES.h2d.fixed_us + QUEUES.d2h.fixed_us
    assert one.timeline.idle_us == (BATCHES - 1) * copies


@pytest.mark.parametrize("edge", EDGES)
def test_race_of_the_figure_names_the_edge_that_is_missing(edge: str) -> None:
    kept = [name for name in EDGES if name != edge]
    run = queue_run("run", num_queues=3, edges=kept)
    assert {race.edge for race in run.races} == {edge}


# -- what the prose says ---------------------------------------------------------------


def four_batches(num_queues: int, edges: Sequence[str]) -> tuple[float, int]:
    """Notebook 06's machine: when the last token is back, and how many are right."""
    device = SimDevice(costs=machine(prepare=2, h2d=4, compute=10, d2h=4))
    device.ablate = frozenset(EDGES) - set(edges)
    queues = [device.stream(str(n)) for n in range(num_queues)] * (3 // num_queues)
    events = [device.event(name) for name in EDGES]
    memory = torch.zeros(4, 4, dtype=torch.int64)  # [side and buffer, batch]

    def copy(place: int, batch: int) -> None:
        memory[place + 1, batch] = memory[place, batch]

    for batch in range(4):
        with device.host_phase(Access("prepare", batch)):
            memory[0, batch] = batch + 1
        for place, phase in enumerate(("h2d", "compute", "d2h")):
            if place and num_queues > 1:
                queues[place].wait(events[place - 1])
            queues[place].launch(partial(copy, place, batch), touching(phase, batch))
            if place < 2:
                queues[place].record(events[place])
    device.synchronize()
    return device.now_us() / 1000, int((memory[3] == memory[0]).sum())


@pytest.mark.parametrize(
    ("num_queues", "edges", "expected"),
    [
        (1, (), (74, 4)),
        (3, (), (42, 0)),
        (3, ("compute_done",), (46, 3)),
        (3, EDGES, (50, 4)),
    ],
)
def test_order_decides_how_fast_and_how_right(
    num_queues: int, edges: Sequence[str], expected: tuple[float, int]
) -> None:
    assert four_batches(num_queues, edges) == expected


def test_streams_without_events_are_wrong_on_a_gpu_too() -> None:
    ladder = json.loads((DATA / "results" / "ladder.json").read_text())["steps"]
    wrong = {
        len(row["setting"]["ablate"]): row["wrong_tokens"]
        for row in ladder
        if "stream" in row["step"]
    }
    assert wrong[0] == 0
    assert wrong[2] > 0.9


def test_kernels_are_busy_for_less_time_than_batches() -> None:
    file = DATA / "results" / "published-eager.json"
    run = json.loads(file.read_text())["sync"]
    assert run["kernels"]["kernel_active"] < run["gpu_active"]
    assert run["kernels"]["kernels_per_step"] > 100


def test_the_host_is_the_main_cause_on_a_gpu() -> None:
    shares, waits_us = {}, {}
    for kind in ("eager", "compile"):
        run = load_timeline(DATA / "traces" / f"published-{kind}-sync.json.gz")
        causes = run.idle_by_cause()
        assert max(causes, key=lambda cause: causes[cause]) == "host"
        shares[kind] = round(1 - run.gpu_active, 2)
        waits_us[kind] = run.idle_us / (len(run.batches()) - 1)
    assert shares == {"eager": 0.06, "compile": 0.08}
    assert waits_us["compile"] == pytest.approx(waits_us["eager"], rel=0.1)
