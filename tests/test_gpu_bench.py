"""The GPU benches on a CPU's threads: what they compute, not how fast it is."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from cbasync import experiments, gpu_bench, series_tables
from cbasync.devices import ThreadsDevice
from cbasync.devices.costs import LAPTOP, CostModel
from cbasync.gpu_bench import TURN, Measured, Mode, Setting, in_turns, measure
from cbasync.host_delay import fitted, host_delay_points, replayed
from cbasync.models import LoadedModel, load_model
from cbasync.published import cut, explain

SMALL = Setting(batch=3, prompt_tokens=5, new_tokens=9, depth=1)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("random-tiny", dtype=torch.float64)


@pytest.fixture(autouse=True)
def threads_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "CudaDevice", lambda **options: ThreadsDevice())
    monkeypatch.setattr(gpu_bench, "_memory_used", lambda: 1000)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 500)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")


def test_a_run_says_what_it_did(loaded: LoadedModel) -> None:
    runs = [measure(loaded, replace(SMALL, mode=mode)) for mode in gpu_bench.MODES]
    assert runs[0].tokens == runs[1].tokens
    assert [run.result["slots"] for run in runs] == [1, 2]
    for run in runs:
        assert run.result["output_tokens"] == 3 * 9
        assert run.result["steps"] == 9
        assert run.result["discarded_rows"] == 0
        assert run.result["total_s"] > 0
        assert 0 < run.result["gpu_active"] <= 1
        json.dumps(run.result)


def test_the_gap_is_explained_to_the_last_part(loaded: LoadedModel) -> None:
    sync, overlapped = (
        measure(loaded, replace(SMALL, mode=mode)).result for mode in gpu_bench.MODES
    )
    gap = explain(sync, overlapped)
    parts = sum(gap["parts_s"].values())
    window = sync["gpu_window_s"] - overlapped["gpu_window_s"]
    assert parts == pytest.approx(window, abs=1e-9)
    assert gap["gap_s"] == pytest.approx(parts + gap["unexplained_s"], abs=1e-12)


def test_stops_by_token_are_discarded_in_flight(loaded: LoadedModel) -> None:
    setting = replace(SMALL, new_tokens=200, requests=6, stop_every=16, depth=2)
    run = measure(loaded, setting)
    ends = [tokens[-1] % 16 for tokens in run.tokens if len(tokens) < 200]
    assert ends
    assert set(ends) == {0}
    assert run.result["discarded_rows"] >= len(ends)


def test_what_is_taken_away_makes_wrong_tokens(loaded: LoadedModel) -> None:
    right = measure(loaded, SMALL).tokens
    wrong = measure(loaded, replace(SMALL, carry=False)).tokens
    assert experiments.wrong_fraction(wrong, right) > 0.3
    assert experiments.wrong_fraction(right, right) == 0


def test_random_keys_and_values_for_prompts(loaded: LoadedModel) -> None:
    run = measure(loaded, replace(SMALL, skip_prefill=True, prompt_tokens=40))
    assert all(len(tokens) == 9 for tokens in run.tokens)
    assert {tokens[0] for tokens in run.tokens} == {1}


DELAYS_MS = (0.0, 3.0, 9.0, 30.0)
MACHINE = replace(LAPTOP, return_us=700.0, wake_us=150.0)


def virtual(mode: Mode, costs: CostModel, setting: Setting) -> Measured:
    """A run on the virtual device, in the form of a measured one."""
    delays_ms = in_turns(setting.host_delays_ms)
    run = replayed(costs, replace(setting, mode=mode), delays_ms)
    steps = [
        replace(step, planned_ms=planned_ms)
        for step, planned_ms in zip(
            run.steps, in_turns(setting.host_delays_ms), strict=False
        )
    ]
    return replace(run, steps=steps)


def test_a_fitted_machine_predicts_other_delays() -> None:
    """A launch that returns late is felt by a late host alone, sleep by any other."""
    base = replace(SMALL, new_tokens=8 * TURN, host_delays_ms=DELAYS_MS)
    runs = {mode: virtual(mode, MACHINE, base) for mode in gpu_bench.MODES}
    model, points = host_delay_points(runs, base)
    assert model.return_us == pytest.approx(700, rel=0.05)
    assert [point["delay_ms"] for point in points] == list(DELAYS_MS)
    for point in points:
        for mode in gpu_bench.MODES:
            assert abs(point[mode]["error"]) < 0.005
            assert point[mode]["actual_delay_ms"] == point["delay_ms"]
        assert point["gain_predicted"] == pytest.approx(
            point["gain_measured"], abs=0.005
        )
    late = points[-1]["async"]
    assert late["measured_step_ms"] == pytest.approx(30.9, abs=0.2)


@pytest.mark.parametrize("without", [{"return_us": 0.0}, {"wake_us": 0.0}])
def test_without_a_part_of_the_model_the_prediction_misses(
    without: dict[str, Any],
) -> None:
    base = replace(SMALL, new_tokens=8 * TURN, host_delays_ms=DELAYS_MS)
    runs = {mode: virtual(mode, MACHINE, base) for mode in gpu_bench.MODES}
    model = replace(fitted(runs, base), **without)
    errors = []
    for mode, run in runs.items():
        delays_ms = [step.delay_ms for step in run.steps]
        again = replayed(model, replace(base, mode=mode), delays_ms)
        errors.append(again.result["total_s"] / run.result["total_s"] - 1)
    assert min(errors) < -0.005


def test_too_few_steps_for_a_round_of_delays(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"new_tokens is 9, 7 delays .* at least 160"):
        experiments.host_delay(loaded, SMALL)


def test_delays_take_turns_and_every_round_has_them_all() -> None:
    steps = list(islice(in_turns(DELAYS_MS), 6 * len(DELAYS_MS) * TURN))
    turns = [steps[at : at + TURN] for at in range(0, len(steps), TURN)]
    assert all(len(set(turn)) == 1 for turn in turns)
    order = [turn[0] for turn in turns]
    rounds = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert all(sorted(one) == list(DELAYS_MS) for one in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_a_cut_is_from_the_middle() -> None:
    timeline = virtual("async", LAPTOP, replace(SMALL, new_tokens=100)).timeline
    batches = cut(timeline, steps=10).batches()
    assert batches == list(range(45, 55))


@pytest.mark.parametrize("name", ["ladder", "sweep", "depth", "host-delay"])
def test_every_series_runs_and_prints(
    loaded: LoadedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick: dict[str, Any] = {
        "SIZES": ((1, 20), (3, 40)),
        "DELAYS_MS": (0.0, 1.0),
        "LADDER": {k: v for k, v in experiments.LADDER.items() if "compile" not in v},
    }
    for key, value in quick.items():
        monkeypatch.setattr(experiments, key, value)
    new_tokens = 3 * TURN if name == "host-delay" else SMALL.new_tokens
    result = experiments.SERIES[name](loaded, replace(SMALL, new_tokens=new_tokens))
    json.dumps(result)
    points = result["steps"] if name == "ladder" else result["points"]
    rows, *_ = series_tables.series_table(result).split("\n\n")
    assert len(rows.splitlines()) == len(points) + 1
    if name == "ladder":
        wrong = {step["step"]: step["wrong_tokens"] for step in points}
        assert wrong["async, two slots, carry-over"] == 0
        assert wrong["async, two slots, no carry-over"] > 0
