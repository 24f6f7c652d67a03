"""Series of runs on a GPU: what each step brings, where it pays, what was predicted.

A series is a function from a model and a base setting to a plain dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from cbasync.bench import Result, machine_facts
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine, SyncEngine
from cbasync.gpu_bench import MODES, PREFILL_TOKENS, Measured, Mode, Setting, measure
from cbasync.models import LoadedModel
from cbasync.runner import ScriptedRunner
from cbasync.timeline import Timeline

Series = Callable[[LoadedModel, Setting], Result]


def _with_facts(name: str, loaded: LoadedModel, **parts: object) -> Result:
    gpu = torch.cuda.get_device_name()
    head = {"experiment": name, "gpu": gpu, "model": loaded.name}
    return head | parts | {"machine": machine_facts()}


# ------------------------------------------------------------------ step by step

_NO_EVENTS = ("h2d_done", "compute_done")

LADDER: dict[str, dict[str, object]] = {
    "one default stream, sync": {"mode": "sync", "one_stream": True},
    "three streams without events, sync": {"mode": "sync", "ablate": _NO_EVENTS},
    "three streams with events, sync": {"mode": "sync"},
    "async, one slot": {"num_slots": 1},
    "async, two slots, no carry-over": {"carry": False},
    "async, two slots, carry-over": {},
    "graphs, sync": {"mode": "sync", "cuda_graphs": True},
    "graphs, one slot": {"cuda_graphs": True, "num_slots": 1},
    "graphs, async": {"cuda_graphs": True},
    "graphs, async, pageable memory": {"cuda_graphs": True, "pinned": False},
    "merged, sync": {"mode": "sync", "cuda_graphs": True, "merge": True},
    "merged, async": {"cuda_graphs": True, "merge": True},
    "compiled and merged, sync": {
        "mode": "sync",
        "cuda_graphs": True,
        "merge": True,
        "compile": True,
    },
    "compiled and merged, async": {"cuda_graphs": True, "merge": True, "compile": True},
}
"""Steps from the simplest loop to the fastest, as changes to a setting."""


def ladder(loaded: LoadedModel, base: Setting) -> Result:
    """Each step's time and activity, and how many tokens are wrong where some are.

    Tokens are held against the step of the same kernels that is known to be right:
    other kernels round otherwise, and may choose another token.
    """
    steps: list[Result] = []
    right: dict[tuple[bool, bool, bool], list[list[int]]] = {}
    runs: dict[str, Measured] = {}
    for name, changes in LADDER.items():
        setting = replace(base, **({"cuda_graphs": False} | changes))  # type: ignore[arg-type]
        runs[name] = run = measure(loaded, setting)
        kernels = (setting.cuda_graphs, setting.merge, setting.compile)
        is_right = not setting.ablate and not setting.num_slots and setting.carry
        if is_right:
            right.setdefault(kernels, run.tokens)
    for name, run in runs.items():
        setting = Setting(**run.result["setting"])
        kernels = (setting.cuda_graphs, setting.merge, setting.compile)
        wrong = wrong_fraction(run.tokens, right[kernels])
        steps.append({"step": name, "wrong_tokens": wrong, **run.result})
    return _with_facts("ladder", loaded, steps=steps)


def wrong_fraction(tokens: list[list[int]], right: list[list[int]]) -> float:
    """Share of tokens that differ at their place.

    >>> wrong_fraction([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    0.25
    """
    pairs = [
        (ours, theirs)
        for row, other in zip(tokens, right, strict=True)
        for ours, theirs in zip(row, other, strict=True)
    ]
    return sum(ours != theirs for ours, theirs in pairs) / len(pairs)


# ------------------------------------------------------------------ slower hosts

_ROUNDS = 2
DELAYS_MS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0)


def host_delay(loaded: LoadedModel, base: Setting) -> Result:
    """Host time added to every step, measured and predicted by the virtual device.

    The cost model is fitted to the two runs without added time, and to nothing else.
    It is told how long the host really was busy: a wait of 12 ms takes a little longer
    on a machine that others use, too.
    """
    runs: dict[tuple[float, Mode], Result] = {}
    still: dict[Mode, Measured] = {}
    for delay in DELAYS_MS:
        for mode in MODES:
            run = _quietest(loaded, replace(base, mode=mode, host_delay_ms=delay))
            runs[delay, mode] = run.result
            if delay == 0:
                still[mode] = run
    model = fitted(still["sync"], still["async"], base)
    points = [
        _delay_point(model, base, d, runs[d, "sync"], runs[d, "async"])
        for d in DELAYS_MS
    ]
    return _with_facts(
        "host-delay",
        loaded,
        setting=vars(base),
        points=points,
        largest_error=max(abs(p[mode]["error"]) for p in points for mode in MODES),
        cost_model=vars_of(model),
    )


def _quietest(loaded: LoadedModel, setting: Setting) -> Measured:
    """The shortest of a few runs: a busy neighbour only ever adds."""
    runs = (measure(loaded, setting) for _ in range(_ROUNDS))
    return min(runs, key=lambda run: run.result["total_s"])


def _delay_point(
    model: CostModel, base: Setting, delay_ms: float, sync: Result, overlapped: Result
) -> Result:
    """Measured and predicted figures with one delay."""
    point: Result = {"delay_ms": delay_ms}
    for mode, run in zip(MODES, (sync, overlapped), strict=True):
        actual = run["delay_ms"] if delay_ms else 0.0
        predicted = predicted_s(model, replace(base, mode=mode, host_delay_ms=actual))
        point[mode] = {
            "actual_delay_ms": run["delay_ms"],
            "measured_s": run["total_s"],
            "predicted_s": predicted,
            "error": predicted / run["total_s"] - 1,
            **{
                key: run[key]
                for key in ("gpu_active", "gpu_busy_s", "host_ms_per_step")
            },
        }
    for key in ("measured_s", "predicted_s"):
        point[f"gain_{key[:-2]}"] = 1 - point["async"][key] / point["sync"][key]
    return point


def vars_of(model: CostModel) -> Result:
    """A cost model as a plain dict."""
    return {
        name: vars(value) if isinstance(value, PhaseCost) else value
        for name, value in vars(model).items()
    }


def fitted(sync: Measured, overlapped: Measured, base: Setting) -> CostModel:
    """The machine of two runs of the same work.

    What the GPU needs is read off the overlapped run: there a batch's kernels are
    queued before it starts, and its span holds no time of launching. What the host
    needs is read off the synchronous run, as is the time it takes to wake up after a
    wait: a host that is late never sleeps. Launching is in no phase, and nearly all of
    it is that of the forward pass: what the virtual device lacks to take as long as
    the synchronous run did is added to `prepare`, which comes just before.
    """
    parts = [
        span
        for run, lanes in ((sync, ("cpu",)), (overlapped, ("h2d", "compute", "d2h")))
        for lane in lanes
        for span in run.timeline.lane(lane)
        if span.batch > 0  # the first one reads the prompts
    ]
    model = CostModel.fit(Timeline("the runs without added time", parts))
    model = replace(model, wake_us=_wake_us(sync.timeline))
    base = replace(base, mode="sync")
    for _ in range(3):  # the time is linear in what is added, up to rounding
        missing_s = sync.result["total_s"] - predicted_s(model, base)
        steps = sync.result["steps"] - 1
        fixed_us = max(0.0, model.prepare.fixed_us + 1e6 * missing_s / steps)
        model = replace(model, prepare=replace(model.prepare, fixed_us=fixed_us))
    return model


def _wake_us(sync: Timeline) -> float:
    """From the end of a batch's last copy to the host's update: it slept meanwhile."""
    copied = {span.batch: span.end_us for span in sync.lane("d2h")}
    return median(
        max(0.0, span.start_us - copied[span.batch])
        for span in sync.lane("cpu")
        if span.phase == "update" and span.batch in copied
    )


def predicted_s(model: CostModel, setting: Setting) -> float:
    """First to last token of a setting on the virtual device, without its model."""
    schedule = model.schedule
    slower = replace(schedule, fixed_us=schedule.fixed_us + 1e3 * setting.host_delay_ms)
    costs = replace(model, schedule=slower)
    kind = SyncEngine if setting.mode == "sync" else AsyncEngine
    device = SimDevice(costs=costs, order="issue")
    with kind(ScriptedRunner(), setting.config(), device) as engine:
        for prompt in setting.prompts(engine.runner.vocab_size):
            engine.add_request(prompt, setting.params(0))
        first_us = None
        while engine.has_work:
            changed = engine.step()
            if changed and first_us is None:
                first_us = device.now_us()
        return (device.now_us() - (first_us or 0.0)) / 1e6


# ------------------------------------------------------------------ where it pays

SIZES = (
    (1, 128), (1, 2048), (1, 16384), (8, 128), (8, 16384), (32, 128), (32, 2048),
    (32, 16384), (128, 128), (128, 2048), (256, 128), (256, 2048),
)  # fmt: skip


def sweep(loaded: LoadedModel, base: Setting) -> Result:
    """Batch and context from small to large: what async saves, and the host's work.

    Steps count in which every request decodes.
    """
    points = []
    for batch, context in SIZES:
        setting = replace(
            base,
            batch=batch,
            prompt_tokens=context,
            # Prompts are read one after the other, and the first has to last so long.
            new_tokens=base.new_tokens + batch * context // PREFILL_TOKENS + 2,
            skip_prefill=True,
        )
        point: Result = {"batch": batch, "context": context}
        for mode in MODES:
            run = measure(loaded, replace(setting, mode=mode)).result
            keys = ("steady_step_ms", "gpu_active", "host_ms_per_step")
            point[mode] = {key: run[key] for key in keys}
        steps = [point[mode]["steady_step_ms"] for mode in MODES]
        points.append(point | {"saved": 1 - steps[1] / steps[0]})
    return _with_facts("sweep", loaded, new_tokens=base.new_tokens, points=points)


# ------------------------------------------------------------------ deeper rings


def depth(loaded: LoadedModel, base: Setting) -> Result:
    """Depth 0 to 3 with requests that end at tokens nobody can foresee.

    Twice as many requests as fit: the others wait for the first ones to end.
    """
    points = []
    for ahead in range(4):
        setting = replace(
            base,
            mode="async",
            depth=ahead,
            requests=2 * base.batch,
            stop_every=150,
            warm_all=True,
        )
        run = measure(loaded, setting)
        keep = (
            "total_s", "steps", "output_tokens", "discarded_rows", "gpu_active",
            "first_token_s", "mean_time_to_first_token_s", "memory_used_bytes",
            "io_bytes_of_a_slot", "host_ms_per_step", "slots",
        )  # fmt: skip
        point = {"depth": ahead, **{key: run.result[key] for key in keep}}
        points.append(point | {"tokens": run.tokens})
    first = points[0].pop("tokens")
    equal = [point.pop("tokens") == first for point in points[1:]]
    return _with_facts(
        "depth", loaded, setting=vars(base), points=points, tokens_equal=all(equal)
    )


SERIES: dict[str, Series] = {
    "ladder": ladder,
    "host-delay": host_delay,
    "sweep": sweep,
    "depth": depth,
}
