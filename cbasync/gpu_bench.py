"""The published experiment on your own GPU: the same work, sync and async, explained.

Every run is described by a `Setting` and gives a plain dict; nothing here asserts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from cbasync.bench import Result, collector_frozen, machine_facts, table
from cbasync.carry_over import SlotCarryOver
from cbasync.config import EngineConfig
from cbasync.devices import CudaDevice
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.io_slot import IOSlot
from cbasync.kv_cache import blocks_for
from cbasync.model_runner import ModelRunner
from cbasync.models import LoadedModel
from cbasync.request import Request
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput
from cbasync.timeline import HOST_PHASES, Timeline

Mode = Literal["sync", "async"]
MODES: tuple[Mode, ...] = ("sync", "async")

PREFILL_TOKENS = 8192  # in one batch, where prompts cost nothing
_PROFILED_STEPS = 24
_TRACED_STEPS = 150  # of 6 spans each: below 1 MB as a trace


@dataclass(frozen=True)
class Setting:
    """One run: how many requests of which length, and by which means."""

    mode: Mode = "async"
    batch: int = 32
    prompt_tokens: int = 16
    new_tokens: int = 8192
    depth: int = 1
    block_size: int = 16
    cuda_graphs: bool = True
    compile: bool = False
    merge: bool = False
    pinned: bool = True
    one_stream: bool = False
    carry: bool = True
    num_slots: int = 0
    ablate: tuple[str, ...] = ()
    host_delay_ms: float = 0.0  # the scheduler is made to take this much longer
    requests: int = 0  # 0: as many as fit into one batch
    stop_every: int = 0  # every so many-th token id ends a request, 0: none does
    skip_prefill: bool = False  # random numbers for the K,V of the prompts
    warm_all: bool = False  # graphs of every size before the clock starts

    @property
    def num_requests(self) -> int:
        """Requests of the whole run."""
        return self.requests or self.batch

    def config(self) -> EngineConfig:
        """The engine's settings, with room for every request at its longest."""
        longest = self.prompt_tokens + self.new_tokens
        budget = max(PREFILL_TOKENS if self.skip_prefill else 2048, self.batch)
        return EngineConfig(
            max_num_seqs=self.batch,
            max_num_batched_tokens=budget,
            block_size=self.block_size,
            num_blocks=self.batch * blocks_for(longest, self.block_size) + 64,
            max_model_len=longest,
            depth=0 if self.mode == "sync" else self.depth,
            num_slots=self.num_slots,
            ablate=frozenset(self.ablate),
            cuda_graphs=self.cuda_graphs,
            compile=self.compile,
            merge_weights=self.merge,
            warm_up="all" if self.warm_all else (self.batch,),
        )

    def params(self, vocab_size: int) -> SamplingParams:
        """Greedy, to the full length unless `stop_every` says otherwise."""
        stops = range(0, vocab_size, self.stop_every) if self.stop_every else ()
        return SamplingParams(max_tokens=self.new_tokens, stop_token_ids=tuple(stops))

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Seeded random prompts, the same in every run."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.num_requests, self.prompt_tokens)
        drawn: list[list[int]] = torch.randint(
            vocab_size, shape, generator=draw
        ).tolist()
        return drawn


class DelayedScheduler(Scheduler):
    """A scheduler that keeps the host busy for a while in every step."""

    def __init__(self, config: EngineConfig, delay_ms: float) -> None:
        super().__init__(config)
        self.delay_s = delay_ms / 1e3
        self.delays_s: list[float] = []  # as they really were

    def schedule(self) -> SchedulerOutput | None:
        start = now = time.perf_counter()
        while now < start + self.delay_s:
            now = time.perf_counter()
        self.delays_s.append(now - start)
        return super().schedule()


class NoCarryOver(SlotCarryOver):
    """Nothing is carried: the model reads the placeholders. Wrong, to be seen."""

    def source(self, previous: IOSlot | None) -> Tensor | None:
        return None


class SkippingRunner(ModelRunner):
    """A runner whose prompts cost nothing: their K,V are random numbers.

    What a decode step costs depends on how much is in the cache, not on what it says.
    """

    def prepare(self, *arguments: Any) -> None:
        super().prepare(*arguments)
        assert self.cache is not None
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.normal_()

    def compute(self, shape: Any, io_slot: IOSlot, *others: Any) -> None:
        if shape.is_decode:
            super().compute(shape, io_slot, *others)
        else:
            io_slot.device_sampled.fill_(1)


@dataclass
class Measured:
    """One run: its numbers, its tokens and its timeline."""

    result: Result
    tokens: list[list[int]]
    timeline: Timeline


def measure(loaded: LoadedModel, setting: Setting) -> Measured:
    """Run a setting once, after its graphs have been captured."""
    torch.cuda.empty_cache()
    start = time.perf_counter()
    engine = new_engine(loaded, setting)
    with engine:
        set_up_s = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        requests, seconds = _run(engine, setting)
        used = _memory_used()
        peak = torch.cuda.max_memory_allocated()
        engine.device.synchronize()
        timeline = Timeline(setting.mode, list(engine.timeline.spans))
    result = {
        "setting": asdict(setting),
        "set_up_s": set_up_s,
        **seconds,
        **_activity(timeline),
        "delay_ms": 1e3 * fmean(engine.scheduler.delays_s),  # type: ignore[attr-defined]
        "discarded_rows": engine.scheduler.discarded_tokens,
        "slots": len(engine.io_slots),
        "io_bytes_of_a_slot": engine.io_slots[0].io_bytes,
        "memory_used_bytes": used,
        "memory_peak_bytes": peak,
    }
    return Measured(result, [r.output_token_ids for r in requests], timeline)


def new_engine(loaded: LoadedModel, setting: Setting) -> Engine:
    """An engine on a CUDA device, made as the setting says."""
    config = setting.config()
    device = CudaDevice(one_stream=setting.one_stream, pinned=setting.pinned)
    kind = SyncEngine if setting.mode == "sync" else AsyncEngine
    runner = (SkippingRunner if setting.skip_prefill else ModelRunner)(loaded.model)
    scheduler = DelayedScheduler(config, setting.host_delay_ms)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is taken away here is taken on purpose
        engine = kind(runner, config, device, scheduler)
    if not setting.carry:
        engine.carry_over = NoCarryOver()
    return engine


def _run(engine: Engine, setting: Setting) -> tuple[list[Request], Result]:
    """Play the workload; times by the host's clock from the first token on."""
    params = setting.params(engine.runner.vocab_size)
    requests = [
        engine.add_request(prompt, params)
        for prompt in setting.prompts(engine.runner.vocab_size)
    ]
    first: dict[str, float] = {}  # time of each request's first token
    steady: list[float] = []  # ends of the steps in which all of them decode
    with collector_frozen():
        start = time.perf_counter()
        while engine.has_work:
            changed = engine.step()
            now = time.perf_counter() - start
            for request in changed:
                first.setdefault(request.request_id, now)
            if len(engine.requests) == len(first) == len(requests):
                steady.append(now)
    times = sorted(first.values())
    return requests, {
        "total_s": now - times[0],  # from the first token to the last
        "steady_step_ms": _mean_step_ms(steady),
        "steps": engine.scheduler.num_launched,
        "output_tokens": sum(len(r.output_token_ids) for r in requests),
        "first_token_s": times[0],
        "mean_time_to_first_token_s": fmean(times),
    }


def _mean_step_ms(ends: Sequence[float]) -> float | None:
    """Mean time from the end of a step to the next; None for too few of them.

    >>> _mean_step_ms([1.0, 1.5, 3.0])
    1000.0
    """
    if len(ends) < 2:
        return None
    return 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1)


def _activity(timeline: Timeline) -> Result:
    """What the GPU did by its events, and what it waited for; milliseconds a step."""
    steps = max(1, len(timeline.batches()))
    host_us = timeline.host_us()
    return {
        "gpu_active": timeline.gpu_active,
        "gpu_window_s": timeline.gpu_window_us / 1e6,
        "gpu_busy_s": timeline.gpu_busy_us / 1e6,
        "idle_by_cause_s": {k: v / 1e6 for k, v in timeline.idle_by_cause().items()},
        "host_ms_per_step": {k: host_us[k] / 1e3 / steps for k in HOST_PHASES},
    }


def _memory_used() -> int:
    """Bytes of the GPU in use, by whomever; measured on a GPU of one's own."""
    free, total = torch.cuda.mem_get_info()
    return total - free


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
