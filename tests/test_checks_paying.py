"""Exercises, figure and claims of notebook 12: what it says is what was recorded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from cbasync import AsyncEngine, EngineConfig, SamplingParams, ScriptedRunner, checks
from cbasync.devices import SimDevice
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.figures import paying
from cbasync.gpu_bench import Setting
from cbasync.host_delay import replayed
from cbasync.simulate import simulate
from cbasync.trace import Work

# -- the share saved -------------------------------------------------------------------

Gain = Callable[[float, float, float], float]


def gain(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    in_turns = host_ms + gpu_ms + copies_ms
    return 1 - max(host_ms, gpu_ms, in_turns / 2) / in_turns


def in_percent(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    return 100 * gain(host_ms, gpu_ms, copies_ms)


def of_the_run_ahead(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    saved = gain(host_ms, gpu_ms, copies_ms)
    return saved / (1 - saved)


def thinks_the_gpu_is_slower(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    in_turns = host_ms + gpu_ms + copies_ms
    return 1 - gpu_ms / in_turns


def takes_the_share_of_the_host(
    host_ms: float, gpu_ms: float, copies_ms: float
) -> float:
    return host_ms / (host_ms + gpu_ms + copies_ms)


def forgets_the_copies(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    return gain(host_ms, gpu_ms, 0)


def never_asks_for_half_a_round(
    host_ms: float, gpu_ms: float, copies_ms: float
) -> float:
    return 1 - max(host_ms, gpu_ms) / (host_ms + gpu_ms + copies_ms)


def gives_the_copies_to_the_host(
    host_ms: float, gpu_ms: float, copies_ms: float
) -> float:
    return gain(host_ms + copies_ms, gpu_ms, 0)


def always_half_a_round(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    return 0.5


def waits_for_the_copies(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    in_turns = host_ms + gpu_ms + copies_ms
    return 1 - max(host_ms, gpu_ms, copies_ms, in_turns / 2) / in_turns


def adds_the_copies_ahead(host_ms: float, gpu_ms: float, copies_ms: float) -> float:
    in_turns = host_ms + gpu_ms + copies_ms
    return 1 - (max(host_ms, gpu_ms) + copies_ms) / in_turns


def test_check_of_gain_passes_the_solution(capsys: pytest.CaptureFixture[str]) -> None:
    checks.gain(gain)
    assert capsys.readouterr().out == "gain: right, 9 cases\n"
    checks.gain(paying.gain)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (in_percent, "1, 9, 0"),
        (of_the_run_ahead, "1, 9, 0"),
        (always_half_a_round, "1, 9, 0"),
        (thinks_the_gpu_is_slower, "9, 1, 0"),
        (takes_the_share_of_the_host, "9, 1, 0"),
        (forgets_the_copies, "2, 6, 2"),
        (adds_the_copies_ahead, "2, 6, 2"),
        (never_asks_for_half_a_round, "4, 4, 4"),
        (gives_the_copies_to_the_host, "4, 4, 4"),
        (waits_for_the_copies, "1, 2, 17"),
    ],
)
def test_check_of_gain_finds_mistakes(mistake: Gain, case: str) -> None:
    with pytest.raises(AssertionError) as caught:
        checks.gain(mistake)
    assert str(caught.value).startswith(f"gain({case})\n  expected")


def machine(host_ms: float, gpu_ms: float, copies_ms: float = 0.0) -> CostModel:
    part, copy = PhaseCost(1000 * host_ms / 3), PhaseCost(500 * copies_ms)
    compute = PhaseCost(1000 * gpu_ms)
    return CostModel(
        "three numbers",
        schedule=part,
        prepare=part,
        h2d=copy,
        compute=compute,
        d2h=copy,
        update=part,
    )


@pytest.mark.parametrize("seed", range(6))
def test_rule_is_what_the_engines_do(seed: int) -> None:
    """A step on the virtual device, at any depth; only the very last steps differ."""
    draw = random.Random(seed).uniform
    host_ms, gpu_ms, copies_ms = draw(0.5, 20), draw(0.5, 20), draw(0, 12) * (seed % 2)
    for depth in (1, 2, 3):
        costs = machine(host_ms, gpu_ms, copies_ms)
        run = simulate(costs, steps=65, batch=2, depth=depth)
        for step_s, ahead in ((run.sync.step_s, 0), (run.overlapped.step_s, depth)):
            expected = paying.step_ms(host_ms, gpu_ms, copies_ms, ahead)
            assert 1000 * step_s == pytest.approx(expected, rel=0.02)


# -- late ends -------------------------------------------------------------------------

LateGain = Callable[[float, float, int, int], float]


def gain_with_stops(
    host_ms: float, gpu_ms: float, tokens: int, depth: int, rows: int | None = None
) -> float:
    step = max(host_ms, gpu_ms) if depth else host_ms + gpu_ms
    rows = tokens + depth if rows is None else rows
    return 1 - rows * step / (tokens * (host_ms + gpu_ms))


def forgets_the_discarded(h: float, g: float, tokens: int, depth: int) -> float:
    return gain_with_stops(h, g, tokens, depth, rows=tokens)


def knows_depth_1_only(h: float, g: float, tokens: int, depth: int) -> float:
    return gain_with_stops(h, g, tokens, min(depth, 1))


def is_ahead_at_depth_0(h: float, g: float, tokens: int, depth: int) -> float:
    return 1 - (tokens + depth) * max(h, g) / (tokens * (h + g))


def never_loses(h: float, g: float, tokens: int, depth: int) -> float:
    return max(0.0, gain_with_stops(h, g, tokens, depth))


def discards_in_turns_too(h: float, g: float, tokens: int, depth: int) -> float:
    return gain_with_stops(h, g, 1, depth, rows=1)


def stops_for_the_gpu_alone(h: float, g: float, tokens: int, depth: int) -> float:
    step = g if depth else h + g
    return 1 - (tokens + depth) * step / (tokens * (h + g))


def discards_a_share(h: float, g: float, tokens: int, depth: int) -> float:
    """A tenth more for each batch of the depth, however long the answer is."""
    return gain_with_stops(h, g, 10, depth)


def doubles_with_depth(h: float, g: float, tokens: int, depth: int) -> float:
    return gain_with_stops(h, g, tokens, depth, rows=tokens + (2**depth // 2))


def test_check_of_gain_with_stops_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.gain_with_stops(gain_with_stops)
    assert capsys.readouterr().out == "gain_with_stops: right, 8 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (is_ahead_at_depth_0, "1, 9, 10, 0"),
        (forgets_the_discarded, "5, 5, 1, 1"),
        (discards_in_turns_too, "5, 5, 1, 1"),
        (discards_a_share, "5, 5, 1, 1"),
        (stops_for_the_gpu_alone, "9, 1, 10, 1"),
        (never_loses, "1, 9, 3, 1"),
        (knows_depth_1_only, "1, 9, 10, 2"),
        (doubles_with_depth, "5, 5, 2, 3"),
    ],
)
def test_check_of_gain_with_stops_finds_mistakes(mistake: LateGain, case: str) -> None:
    with pytest.raises(AssertionError) as caught:
        checks.gain_with_stops(mistake)
    assert str(caught.value).startswith(f"gain_with_stops({case})\n  expected")


def ends_ms(costs: CostModel, tokens: int, depth: int) -> float:
    """Twenty answers in two rows, each with an end that nobody foresees."""
    runner = ScriptedRunner(script=lambda token, position: position)
    config = EngineConfig(max_num_seqs=2, depth=depth)
    params = SamplingParams(max_tokens=100, stop_token_ids=[tokens - 1])
    with AsyncEngine(runner, config, SimDevice(costs=costs)) as engine:
        requests = [engine.add_request([0], params) for _ in range(20)]
        engine.run()
        assert {request.discarded_tokens for request in requests} == {depth}
        return engine.device.now_us() / 1000


@pytest.mark.parametrize(("host_ms", "gpu_ms"), [(1, 9), (5, 5), (12, 4)])
def test_late_ends_cost_what_the_solution_says(host_ms: float, gpu_ms: float) -> None:
    costs = machine(host_ms, gpu_ms)
    for tokens, depth in ((3, 1), (12, 1), (12, 3)):
        saved = 1 - ends_ms(costs, tokens, depth) / ends_ms(costs, tokens, 0)
        expected = gain_with_stops(host_ms, gpu_ms, tokens, depth)
        assert saved == pytest.approx(expected, abs=0.03)  # the first and last batch


# -- the map ---------------------------------------------------------------------------


def test_map_has_one_scale_for_ground_and_points() -> None:
    rule = paying.Machine("as the rule says", 1.0, 9.0, 0.1)
    picture = paying.gain_map_svg([rule], rule=lambda host, gpu, copies: 0.1)
    opacities = [part.split('"')[0] for part in picture.split('fill-opacity="')[1:]]
    ground, point = opacities[len(paying.OPACITIES) :]
    assert ground == point
    missed = paying.gain_map_svg([rule], rule=lambda host, gpu, copies: 0.3)
    opacities = [part.split('"')[0] for part in missed.split('fill-opacity="')[1:]]
    assert opacities[-1] != opacities[-2]


def test_map_hands_the_copies_to_the_rule() -> None:
    without, with_copies = (paying.gain_map_svg(copies_ms=ms) for ms in (0, 4))
    assert without != with_copies
    assert with_copies == paying.gain_map_svg(copies_ms=4, rule=gain)


def test_a_machine_beyond_the_map_lies_at_its_edge() -> None:
    inside, beyond = (
        paying.gain_map_svg([paying.Machine("M", host, gpu)])
        for host, gpu in ((0.1, 300.0), (1e-9, 1e9))
    )
    assert inside == beyond


def test_names_are_escaped() -> None:
    picture = paying.gain_map_svg([paying.Machine("<a>", 1, 9)], caption="b & c")
    assert "&lt;a&gt;" in picture
    assert "b &amp; c" in picture


# -- what the prose says, held against the files ---------------------------------------

RESULTS = {name: paying.result(name) for name in ("ladder", "depth", "sweep")}
DELAYS = paying.result("host-delay")
POINTS = {point["delay_ms"]: point for point in DELAYS["points"]}
SOURCES = "\n".join(
    "".join(cell["source"])
    for cell in json.loads(
        (Path(__file__).parents[1] / "notebooks/12_when_does_it_pay.ipynb").read_text()
    )["cells"]
)


def says(words: str) -> bool:
    """Whether the notebook says so, wherever its lines are broken."""
    return words in " ".join(SOURCES.split())


def test_shares_saved() -> None:
    gains = [point["gain_measured"] for point in DELAYS["points"]]
    assert says(f"between {100 * min(gains):.0f} and {100 * max(gains):.0f} %")
    assert says(f"saved {100 * paying.published_machine().saved:.0f} % of its time")  # type: ignore[operator]


def rule_miss(at: paying.Machine, mode: str) -> float:
    """How far the rule is off one point: the sum in turns, the longer one ahead."""
    times_ms = at.host_ms, at.gpu_ms
    rule_ms = sum(times_ms) if mode == "sync" else max(times_ms)
    step_ms: float = POINTS[float(at.name)][mode]["measured_step_ms"]
    return rule_ms / step_ms - 1


def test_the_virtual_device_misses_little_and_the_rule_where_it_is_said() -> None:
    assert says(
        "the virtual device is right within 1 %; the rule, within 2 %, is worst"
    )
    assert DELAYS["largest_error"] < 0.01
    assert says("on the virtual device, which misses nothing there")
    assert abs(POINTS[8]["async"]["error"]) < 0.0005  # shown as 0.0 %
    assert says("Your rule misses most *ahead at 8 ms*")
    misses = {
        (mode, float(at.name)): rule_miss(at, mode)
        for at in paying.delayed_machines(DELAYS)
        for mode in ("sync", "async")
    }
    assert max(misses, key=lambda key: abs(misses[key])) == ("async", 8)
    assert abs(misses["async", 8]) < 0.02
    assert says("At 12 ms your rule is too long")
    assert misses["async", 12] > 0
    assert says("In turns the real host is slower than both predict")
    late = [delay for delay in POINTS if delay]
    assert all(misses["sync", delay] < 0 for delay in late)
    assert all(POINTS[delay]["sync"]["error"] < 0 for delay in late)


def steps_ms(mode: str, delay_ms: float, **parts: PhaseCost | float) -> list[float]:
    """Steps on the recorded machine, all of them with the same time added."""
    costs = CostModel.load(paying.RESULTS / "host-delay.json")
    setting = Setting(**DELAYS["setting"] | {"mode": mode})
    run = replayed(replace(costs, **parts), setting, repeat(delay_ms))  # type: ignore[arg-type]
    return [1000 * step.seconds for step in run.steps if step.is_steady]


def test_at_8_ms_the_rule_misses_because_the_gpu_gets_slower() -> None:
    """The longer of two means is less than the mean of the longer ones."""
    assert says("has one number for the GPU, whose step grows with the context")
    assert says("At first the host is the longer one, later the GPU.")
    played = steps_ms("async", 8)
    half = len(played) // 3
    assert max(played[1:half]) - min(played[1:half]) < 0.01
    assert min(played[2 * half :]) > max(played[1:half])
    mean_us = 1000 * POINTS[0]["async"]["compute_ms_per_step"]
    constant = fmean(steps_ms("async", 8, compute=PhaseCost(mean_us)))
    assert constant / fmean(played) - 1 == pytest.approx(
        rule_miss(paying.delayed_machines(DELAYS)[5], "async"), abs=0.003
    )


def test_at_12_ms_the_rule_counts_too_much_and_forgets_something() -> None:
    costs = CostModel.load(paying.RESULTS / "host-delay.json")
    assert says("counts copies and waking up, for which a late host does not wait")
    too_much_us = costs.wake_us + costs.h2d.fixed_us + costs.d2h.fixed_us
    assert says("launching goes on after the GPU has begun, which only a late host")
    still = paying.delayed_machines(DELAYS)[0]
    assert 1000 * still.host_ms - costs.host_us(Work()) == pytest.approx(
        too_much_us - costs.return_us, abs=50
    )


def test_recorded_prediction_can_be_made_again() -> None:
    point = POINTS[12]["sync"]
    again = fmean(steps_ms("sync", point["actual_delay_ms"]))
    assert again == pytest.approx(point["predicted_step_ms"], rel=1e-3)


@pytest.mark.parametrize("kind", ["eager", "compile"])
def test_bars_of_the_run_in_turns_promise_too_little(kind: str) -> None:
    assert says("Too little, both times.")
    runs = paying.result(f"published-{kind}")
    step_ms, ahead_ms = (runs[mode]["steady_step_ms"] for mode in ("sync", "async"))
    bar_ms = 1000 * runs["sync"]["gpu_busy_s"] / runs["sync"]["steps"]
    measured = 1 - ahead_ms / step_ms
    assert paying.gain(step_ms - bar_ms, bar_ms) < 0.85 * measured


def test_ladder() -> None:
    steps: dict[str, Any] = {run["step"]: run for run in RESULTS["ladder"]["steps"]}
    ms = {name: run["steady_step_ms"] for name, run in steps.items()}
    before = ms["async, two slots, carry-over"]
    assert says("Before it, launching took longer than the kernels")
    assert ms["graphs, async"] < before / 3  # the largest step
    assert says("the faster the GPU, the more is saved")
    names = ("graphs", "merged", "compiled and merged")
    saved = [1 - ms[f"{name}, async"] / ms[f"{name}, sync"] for name in names]
    assert saved == sorted(saved)
    assert says("A pale bar computes wrong tokens")
    assert {name for name, run in steps.items() if run["wrong_tokens"]} == {
        "three streams without events, sync",
        "async, one slot",
        "async, two slots, no carry-over",
        "graphs, one slot",
    }


def test_a_long_context_with_a_large_batch_saves_less() -> None:
    assert says("A long context does it with a large batch; neither does it alone.")
    points = {(p["batch"], p["context"]): p for p in RESULTS["sweep"]["points"]}
    saved = {size: point["saved"] for size, point in points.items()}
    both = saved[32, 16384], saved[256, 2048]
    alone = saved[1, 16384], saved[256, 128]
    assert max(both) < 0.7 * min(alone)


def test_deep_rings_discard_more_and_win_nothing() -> None:
    runs = RESULTS["depth"]["points"]
    assert says("64 requests in 32 rows")
    assert RESULTS["depth"]["setting"]["batch"] == 32
    discarded = [run["discarded_rows"] for run in runs]
    assert discarded == sorted(discarded)
    assert discarded[0] == 0
    assert all(run["discarded_rows"] <= 64 * run["depth"] for run in runs)
    assert says("at 1 the GPU was busy already")
    assert runs[1]["gpu_active"] > 0.99
    assert max(run["gpu_active"] for run in runs) < runs[1]["gpu_active"] + 0.001
    assert says("picks other tokens")
    assert not RESULTS["depth"]["tokens_equal"]
