"""The GPU benches on a CPU's threads: what they compute, not how fast it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from cbasync import experiments, gpu_bench, series_tables
from cbasync.devices import SimDevice, ThreadsDevice
from cbasync.devices.costs import LAPTOP, CostModel
from cbasync.engine import AsyncEngine, SyncEngine
from cbasync.gpu_bench import Measured, Setting, measure
from cbasync.models import LoadedModel, load_model
from cbasync.published import cut, explain
from cbasync.runner import ScriptedRunner
from cbasync.timeline import Timeline

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


def simulated(mode: str, costs: CostModel, setting: Setting) -> Measured:
    """A run on the virtual device, in the form of a measured one."""
    kind = SyncEngine if mode == "sync" else AsyncEngine
    device = SimDevice(costs=costs, order="issue")
    setting = replace(setting, mode=mode)  # type: ignore[arg-type]
    with kind(ScriptedRunner(), setting.config(), device) as engine:
        for prompt in setting.prompts(1000):
            engine.add_request(prompt, setting.params(0))
        engine.run()
        steps = engine.scheduler.num_launched
        timeline = Timeline(mode, list(device.timeline.spans))
    total_s = experiments.predicted_s(costs, setting)
    return Measured({"total_s": total_s, "steps": steps}, [], timeline)


@pytest.mark.parametrize("delay_ms", [0.0, 3.0, 9.0, 30.0])
def test_a_fitted_machine_predicts_other_delays(delay_ms: float) -> None:
    base = replace(SMALL, new_tokens=60)
    machine = replace(LAPTOP, launch_us=0.0, wake_us=150.0)
    model = experiments.fitted(
        simulated("sync", machine, base), simulated("async", machine, base), base
    )
    for mode in gpu_bench.MODES:
        setting = replace(base, mode=mode, host_delay_ms=delay_ms)
        truth = experiments.predicted_s(machine, setting)
        assert experiments.predicted_s(model, setting) == pytest.approx(truth, rel=0.01)


def test_a_cut_is_from_the_middle() -> None:
    timeline = simulated("async", LAPTOP, replace(SMALL, new_tokens=100)).timeline
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
    result = experiments.SERIES[name](loaded, SMALL)
    json.dumps(result)
    points = result["steps"] if name == "ladder" else result["points"]
    rows, *_ = series_tables.series_table(result).split("\n\n")
    assert len(rows.splitlines()) == len(points) + 1
    if name == "ladder":
        wrong = {step["step"]: step["wrong_tokens"] for step in points}
        assert wrong["async, two slots, carry-over"] == 0
        assert wrong["async, two slots, no carry-over"] > 0
