"""Host time added to a run on a GPU, and the virtual device's prediction of it.

Host time of 0 to 12 ms is added to the steps of one run, in turns of a few steps each:
every delay meets the same minutes of a machine that others use, too, and the same
contexts. A cost model is fitted to the steps without added time and to nothing else;
then the virtual device replays the run, step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from cbasync.bench import Result
from cbasync.devices.costs import CostModel
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine, SyncEngine
from cbasync.gpu_bench import (
    MODES,
    DelayedScheduler,
    HostTimer,
    Measured,
    Mode,
    Setting,
    Step,
    play,
)
from cbasync.runner import ScriptedRunner
from cbasync.timeline import HOST_PHASES, Timeline

DELAYS_MS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0)


def replayed(
    model: CostModel, setting: Setting, delays_ms: Iterable[float]
) -> Measured:
    """A setting played on the virtual device, without its model.

    `delays_ms` is the host time to be added, a step each.
    """
    kind = SyncEngine if setting.mode == "sync" else AsyncEngine
    config = setting.config()
    device = SimDevice(costs=model, order="issue")

    def keep_busy(seconds: float) -> float:
        device.machine.advance(1e6 * seconds)
        return seconds

    scheduler = DelayedScheduler(config, iter(delays_ms), keep_busy)
    host = HostTimer(device)
    device.observers.append(host)
    with kind(ScriptedRunner(), config, device, scheduler) as engine:
        requests, numbers, steps = play(engine, setting)
        timeline = Timeline(setting.mode, list(engine.timeline.spans))
    tokens = [request.output_token_ids for request in requests]
    return Measured(numbers, tokens, timeline, steps, host.launches_us, host.waits_us)


def host_delay_points(
    runs: Mapping[Mode, Measured], base: Setting
) -> tuple[CostModel, list[Result]]:
    """The model of both runs, and what they were and were predicted to be by delay.

    It is told how long the host really was busy in each step: a wait of 12 ms takes a
    little longer on a machine that others use, too.
    """
    model = fitted(runs, base)
    sides: dict[Mode, dict[float, Result]] = {}
    for mode, run in runs.items():
        delays_ms = [step.delay_ms for step in run.steps]
        predicted = replayed(model, replace(base, mode=mode), delays_ms)
        sides[mode] = _by_delay(run, predicted.steps)
    points = []
    for delay_ms in sorted(set(base.host_delays_ms)):
        point: Result = {mode: sides[mode][delay_ms] for mode in MODES}
        for kind in ("measured", "predicted"):
            steps_ms = [point[mode][f"{kind}_step_ms"] for mode in MODES]
            point[f"gain_{kind}"] = 1 - steps_ms[1] / steps_ms[0]
        points.append({"delay_ms": delay_ms} | point)
    return model, points


def _by_delay(run: Measured, predicted: Sequence[Step]) -> dict[float, Result]:
    """Sums and means over the steps that had the same host time added to them."""
    found: dict[float, list[int]] = {}
    for batch, step in enumerate(run.steps):
        if step.is_steady:
            found.setdefault(step.planned_ms, []).append(batch)
    lengths_us: dict[str, dict[int, float]] = {}  # by phase and batch
    for span in run.timeline.spans:
        lengths_us.setdefault(span.phase, {})[span.batch] = span.duration_us

    def mean_ms(lengths_us: Mapping[int, float], batches: Sequence[int]) -> float:
        return fmean(lengths_us[b] for b in batches if b in lengths_us) / 1e3

    launches_us = dict(enumerate(run.launches_us))
    result: dict[float, Result] = {}
    for delay_ms, batches in found.items():
        measured_s = sum(run.steps[batch].seconds for batch in batches)
        predicted_s = sum(predicted[batch].seconds for batch in batches)
        result[delay_ms] = {
            "steps": len(batches),
            "actual_delay_ms": fmean(run.steps[batch].delay_ms for batch in batches),
            "measured_s": measured_s,
            "predicted_s": predicted_s,
            "error": predicted_s / measured_s - 1,
            "measured_step_ms": 1e3 * measured_s / len(batches),
            "predicted_step_ms": 1e3 * predicted_s / len(batches),
            "host_ms_per_step": {
                phase: mean_ms(lengths_us[phase], batches) for phase in HOST_PHASES
            },
            "launch_ms_per_step": mean_ms(launches_us, batches),
            "compute_ms_per_step": mean_ms(lengths_us["compute"], batches),
        }
    return result


# ------------------------------------------------------------------ the cost model


def fitted(runs: Mapping[Mode, Measured], base: Setting) -> CostModel:
    """The machine of two runs of the same work, from their steps without added time.

    What the GPU needs is read off the overlapped run: there a batch's kernels are
    queued before it starts, and its span holds no time of launching. What the host
    needs is read off the synchronous run, as is the time it takes to wake up after a
    wait: a late host never sleeps. Launching is in no phase. What the virtual device
    lacks to take as long as the synchronous run did is added to `prepare`, which comes
    just before; what its host then lacks to be as busy as the real one was goes on
    while the GPU works, and only a late host feels it.
    """
    sync, overlapped = (runs[mode] for mode in MODES)
    batches = _still(sync.steps)
    kept = [s for s in sync.timeline.lane("cpu") if s.batch in batches]
    behind = _still(overlapped.steps)
    for lane in ("h2d", "compute", "d2h"):
        kept += [s for s in overlapped.timeline.lane(lane) if s.batch in behind]
    model = CostModel.fit(Timeline("the steps without added time", kept))
    model = replace(model, wake_us=_wake_us(sync.timeline, batches))

    base = replace(base, mode="sync")
    delays_ms = [step.delay_ms for step in sync.steps]
    step_us, busy_us = _step_us(sync, batches)
    for _ in range(3):  # the time is linear in what is added, up to rounding
        virtual_us, _busy = _step_us(replayed(model, base, delays_ms), batches)
        fixed_us = max(0.0, model.prepare.fixed_us + step_us - virtual_us)
        model = replace(model, prepare=replace(model.prepare, fixed_us=fixed_us))
    _, virtual_busy_us = _step_us(replayed(model, base, delays_ms), batches)
    return replace(model, return_us=max(0.0, busy_us - virtual_busy_us))


def _step_us(sync: Measured, batches: Collection[int]) -> tuple[float, float]:
    """Mean length of these steps, and the time in it in which the host did not wait."""
    step_us = fmean(1e6 * sync.steps[batch].seconds for batch in batches)
    return step_us, step_us - fmean(sync.waits_us[batch] for batch in batches)


_SETTLED = 3  # steps after which nothing is left of another delay's turn


def _still(steps: Sequence[Step]) -> set[int]:
    """Batches without added time, and none in the steps just before them either."""
    return {
        batch
        for batch in range(_SETTLED, len(steps))
        if all(
            step.is_steady and step.planned_ms == 0
            for step in steps[batch - _SETTLED : batch + 1]
        )
    }


def _wake_us(sync: Timeline, batches: Collection[int]) -> float:
    """From the end of a batch's last copy to the host's update: it slept meanwhile."""
    copied = {span.batch: span.end_us for span in sync.lane("d2h")}
    return median(
        max(0.0, span.start_us - copied[span.batch])
        for span in sync.lane("cpu")
        if span.phase == "update" and span.batch in batches
    )
