"""The published experiment on your own GPU: both ways, and the gap explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from cbasync.bench import Result, machine_facts, table
from cbasync.gpu_bench import MODES, Measured, Mode, Setting, measure, new_engine
from cbasync.models import LoadedModel
from cbasync.timeline import Timeline

_PROFILED_STEPS = 24
_TRACED_STEPS = 150  # of 6 spans each: below 1 MB as a trace


# ------------------------------------------------------------------ kernels


def kernel_active(loaded: LoadedModel, setting: Setting) -> Result:
    """Share of a short window in which a kernel or copy runs, by the profiler.

    Stricter than `gpu_active`: the pauses between the kernels of a step count as idle.
    """
    setting = replace(setting, new_tokens=128 + _PROFILED_STEPS, requests=0)
    with new_engine(loaded, setting) as engine:
        params = setting.params(engine.runner.vocab_size)
        for prompt in setting.prompts(engine.runner.vocab_size):
            engine.add_request(prompt, params)
        for _ in range(100):
            engine.step()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(_PROFILED_STEPS):
                engine.step()
            engine.device.synchronize()
        events = _device_events(profile)
    busy, window = _union([(start, end) for start, end, _ in events])
    return {
        "kernel_active": busy / window if window else 0.0,
        "steps": _PROFILED_STEPS,
        "kernels_per_step": len(events) / _PROFILED_STEPS,
        "kernel_ms_per_step": busy / 1e6 / _PROFILED_STEPS,
        "us_per_step": _by_name(events),
    }


def _device_events(profile: Any) -> list[tuple[int, int, str]]:
    """Start and end, in ns, and name of all that ran on the GPU."""
    cuda = torch._C._autograd.DeviceType.CUDA
    events = profile.profiler.kineto_results.events()
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.device_type() == cuda and not event.is_user_annotation()
    )


def _by_name(events: Sequence[tuple[int, int, str]], most: int = 12) -> Result:
    """Time a step of the kernels that take most of it, in us, by their name.

    >>> _by_name([(0, 24_000, "a"), (30_000, 54_000, "b"), (60_000, 84_000, "b")])
    {'b': 2.0, 'a': 1.0}
    """
    total: dict[str, float] = {}
    for start, end, name in events:
        total[name[:80]] = total.get(name[:80], 0.0) + (end - start) / 1e3
    ranked = sorted(total.items(), key=itemgetter(1), reverse=True)
    return {name: round(us / _PROFILED_STEPS, 2) for name, us in ranked[:most]}


def _union(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Time covered by sorted spans, and time from the first start to the last end.

    >>> _union([(0, 4), (2, 6), (8, 10)])
    (8, 10)
    """
    busy, until = 0, spans[0][0] if spans else 0
    for start, end in spans:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy, until - spans[0][0] if spans else 0


# ------------------------------------------------------------------ the experiment


def bench_gpu(
    loaded: LoadedModel,
    setting: Setting,
    modes: Sequence[Mode] = MODES,
    trace: Path | None = None,
) -> Result:
    """The same work in each mode: times, activity, tokens and the gap explained."""
    runs: dict[str, Measured] = {}
    kernels: dict[str, Result] = {}
    for mode in modes:
        kernels[mode] = kernel_active(loaded, replace(setting, mode=mode))
        runs[mode] = measure(loaded, replace(setting, mode=mode))
    tokens = [run.tokens for run in runs.values()]
    result: Result = {
        "gpu": torch.cuda.get_device_name(),
        "model": loaded.name,
        "compile": setting.compile,
        "merge": setting.merge,
        "tokens_equal": all(each == tokens[0] for each in tokens),
        **{mode: run.result | {"kernels": kernels[mode]} for mode, run in runs.items()},
    }
    if len(runs) > 1:
        result["gap"] = explain(runs["sync"].result, runs["async"].result)
        result["second_slot"] = _second_slot(runs)
    result["machine"] = machine_facts()
    if trace is not None:
        stem, _, suffixes = trace.name.partition(".")
        for name, run in runs.items():
            cut(run.timeline).save(trace.with_name(f"{stem}-{name}.{suffixes}"))
    return result


def explain(sync: Result, overlapped: Result) -> Result:
    """Where the difference between two runs of the same work comes from, in seconds.

    Idle time by cause, and GPU time: a step may run longer beside a busy host.
    """
    gap = sync["total_s"] - overlapped["total_s"]
    causes = {
        f"idle_{cause}": seconds - overlapped["idle_by_cause_s"][cause]
        for cause, seconds in sync["idle_by_cause_s"].items()
    }
    parts = causes | {"gpu_time": sync["gpu_busy_s"] - overlapped["gpu_busy_s"]}
    rest = gap - sum(parts.values())
    return {
        "gap_s": gap,
        "share_of_sync": gap / sync["total_s"],
        "parts_s": parts,
        "unexplained_s": rest,
        "unexplained_share_of_run": abs(rest) / sync["total_s"],
    }


def _second_slot(runs: dict[str, Measured]) -> Result:
    """What one slot more costs in memory of the GPU."""
    one, two = (runs[mode].result["memory_used_bytes"] for mode in ("sync", "async"))
    return {"bytes": two - one, "share": (two - one) / one}


def cut(timeline: Timeline, steps: int = _TRACED_STEPS) -> Timeline:
    """Some steps from the middle of a run."""
    batches = timeline.batches()
    first = batches[max(0, len(batches) // 2 - steps // 2)]
    wanted = range(first, first + steps)
    spans = [span for span in timeline.spans if span.batch in wanted]
    return Timeline(timeline.name, spans).shifted()


def gpu_table(result: Result) -> str:
    """The result as a table, with what it was measured on."""
    modes = [mode for mode in MODES if mode in result]
    rows: list[Sequence[object]] = [("", *modes)]
    lines: dict[str, Callable[[Result], str]] = {
        "first to last token": lambda run: f"{run['total_s']:.2f} s",
        "a step": lambda run: f"{run['steady_step_ms']:.3f} ms",
        "GPU active, by events": lambda run: f"{100 * run['gpu_active']:.2f} %",
        "kernels active": lambda r: f"{100 * r['kernels']['kernel_active']:.1f} %",
        "host work a step": lambda r: f"{sum(r['host_ms_per_step'].values()):.3f} ms",
        "discarded rows": lambda run: f"{run['discarded_rows']}",
        "set-up": lambda run: f"{run['set_up_s']:.1f} s",
        "GPU memory": lambda run: f"{run['memory_used_bytes'] / 1e9:.2f} GB",
    }
    rows += [(name, *(show(result[m]) for m in modes)) for name, show in lines.items()]
    machine = result["machine"]
    notes = [f"same tokens: {'yes' if result['tokens_equal'] else 'NO'}"]
    if "gap" in result:
        gap = result["gap"]
        notes.append(f"async saves {100 * gap['share_of_sync']:.1f} %:")
        notes += [
            f"  {k} {v:+.3f} s" for k, v in gap["parts_s"].items() if abs(v) > 5e-4
        ]
        notes.append(f"  unexplained {gap['unexplained_s']:+.3f} s")
    where = f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}"
    return "\n".join([table(rows), "", *notes, where])
