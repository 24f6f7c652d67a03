"""One run on a GPU, as a setting describes it, and all that is measured of it.

Every run is described by a `Setting` and gives a plain dict; nothing here asserts.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

import torch
from torch import Tensor

from cbasync.bench import Result, collector_frozen
from cbasync.carry_over import SlotCarryOver
from cbasync.config import EngineConfig
from cbasync.devices import CudaDevice
from cbasync.devices.access import Access
from cbasync.devices.base import Device, Event
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
    host_delays_ms: tuple[float, ...] = (0.0,)  # added host time, taking turns
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


TURN = 20  # steps in a row with the same added host time


def in_turns(delays_ms: Sequence[float]) -> Iterator[float]:
    """Added host time of one step after another, without end.

    Each delay has its turn of 20 steps in every round, in an order drawn anew: whatever
    changes on the machine meanwhile, changes for all of them.

    >>> from itertools import islice
    >>> list(islice(in_turns([1.0, 8.0]), 0, 100, TURN))
    [8.0, 1.0, 1.0, 8.0, 8.0]
    """
    draw = random.Random(0)
    while True:
        for delay_ms in draw.sample(delays_ms, len(delays_ms)):
            yield from [delay_ms] * TURN


def spin(seconds: float) -> float:
    """Keep the host busy; how long it really was."""
    start = now = time.perf_counter()
    while now < start + seconds:
        now = time.perf_counter()
    return now - start


class DelayedScheduler(Scheduler):
    """A scheduler that keeps the host busy for a while in every step.

    `keep_busy` takes the seconds asked for and returns the seconds they became.
    """

    def __init__(
        self,
        config: EngineConfig,
        delays_ms: Iterator[float],
        keep_busy: Callable[[float], float] = spin,
    ) -> None:
        super().__init__(config)
        self.planned_ms = delays_ms
        self.keep_busy = keep_busy
        self.delays_ms: list[tuple[float, float]] = []  # as planned, and as they were

    def schedule(self) -> SchedulerOutput | None:
        planned_ms = next(self.planned_ms)
        actual_s = self.keep_busy(planned_ms / 1e3)
        self.delays_ms.append((planned_ms, 1e3 * actual_s))
        return super().schedule()


class HostTimer:
    """An observer of the host's time in no phase: launching a batch, waiting for it.

    A launch counts from the end of `prepare` until all is in its queues; a wait from
    there until the tokens have come and the host has noticed.
    """

    def __init__(self, device: Device) -> None:
        self.now_us = device.now_us
        self.mark_us = 0.0
        self.launches_us: list[float] = []  # a batch each
        self.waits_us: list[float] = []

    def on_launch(self, stream: str, access: Access) -> None:
        if access.phase == "h2d":
            self.mark_us = self.now_us()

    def on_record(self, stream: str, event: object) -> None:
        self._note(event, self.launches_us)

    def on_synchronize(self, event: object) -> None:
        self._note(event, self.waits_us)

    def _note(self, event: object, lengths_us: list[float]) -> None:
        assert isinstance(event, Event)
        if event.name == "d2h_done":
            now_us = self.now_us()
            lengths_us.append(now_us - self.mark_us)
            self.mark_us = now_us

    def on_wait(self, stream: str, event: object) -> None: ...

    def on_host(self, access: Access) -> None: ...


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


@dataclass(frozen=True)
class Step:
    """One step of a run: the host time added to it, and how long it took."""

    planned_ms: float
    delay_ms: float  # as it really was
    seconds: float  # from the end of the step before
    is_steady: bool  # every request decodes, before it and after it


@dataclass
class Measured:
    """One run: its numbers, its tokens, its timeline and its steps."""

    result: Result
    tokens: list[list[int]]
    timeline: Timeline
    steps: list[Step]
    launches_us: list[float]  # of the host, a batch each
    waits_us: list[float]


def measure(loaded: LoadedModel, setting: Setting) -> Measured:
    """Run a setting once, after its graphs have been captured."""
    torch.cuda.empty_cache()
    start = time.perf_counter()
    engine = new_engine(loaded, setting)
    with engine:
        set_up_s = time.perf_counter() - start
        host = HostTimer(engine.device)
        engine.device.observers.append(host)
        torch.cuda.reset_peak_memory_stats()
        requests, seconds, steps = play(engine, setting)
        used = _memory_used()
        peak = torch.cuda.max_memory_allocated()
        engine.device.synchronize()
        timeline = Timeline(setting.mode, list(engine.timeline.spans))
    result = {
        "setting": asdict(setting),
        "set_up_s": set_up_s,
        **seconds,
        **_activity(timeline),
        "launch_ms_per_step": median(host.launches_us) / 1e3,
        "discarded_rows": engine.scheduler.discarded_tokens,
        "slots": len(engine.io_slots),
        "io_bytes_of_a_slot": engine.io_slots[0].io_bytes,
        "memory_used_bytes": used,
        "memory_peak_bytes": peak,
    }
    tokens = [r.output_token_ids for r in requests]
    return Measured(result, tokens, timeline, steps, host.launches_us, host.waits_us)


def new_engine(loaded: LoadedModel, setting: Setting) -> Engine:
    """An engine on a CUDA device, made as the setting says."""
    config = setting.config()
    device = CudaDevice(one_stream=setting.one_stream, pinned=setting.pinned)
    kind = SyncEngine if setting.mode == "sync" else AsyncEngine
    runner = (SkippingRunner if setting.skip_prefill else ModelRunner)(loaded.model)
    scheduler = DelayedScheduler(config, in_turns(setting.host_delays_ms))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is taken away here is taken on purpose
        engine = kind(runner, config, device, scheduler)
    if not setting.carry:
        engine.carry_over = NoCarryOver()
    return engine


def play(engine: Engine, setting: Setting) -> tuple[list[Request], Result, list[Step]]:
    """Play the workload of a setting, by the clock of the engine's device.

    The engine's scheduler is a `DelayedScheduler`; total time counts from the first
    token to the last.
    """
    scheduler, now_us = engine.scheduler, engine.device.now_us
    assert isinstance(scheduler, DelayedScheduler)
    params = setting.params(engine.runner.vocab_size)
    requests = [
        engine.add_request(prompt, params)
        for prompt in setting.prompts(engine.runner.vocab_size)
    ]
    first: dict[str, float] = {}  # time of each request's first token
    ends, are_steady = [0.0], [False]
    with collector_frozen():
        start_us = now_us()
        while engine.has_work:
            changed = engine.step()
            ends.append((now_us() - start_us) / 1e6)
            for request in changed:
                first.setdefault(request.request_id, ends[-1])
            are_steady.append(len(engine.requests) == len(first) == len(requests))
    times = sorted(first.values())
    steady = [end for end, is_steady in zip(ends, are_steady, strict=True) if is_steady]
    numbers = {
        "total_s": ends[-1] - times[0],  # from the first token to the last
        "steady_step_ms": _mean_step_ms(steady),
        "steps": scheduler.num_launched,
        "output_tokens": sum(len(r.output_token_ids) for r in requests),
        "first_token_s": times[0],
        "mean_time_to_first_token_s": fmean(times),
    }
    pairs = zip(scheduler.delays_ms, pairwise(ends), pairwise(are_steady), strict=True)
    steps = [Step(*ms, end - start, all(steady)) for ms, (start, end), steady in pairs]
    return requests, numbers, steps


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
