"""What the explorer shows, as pure functions: settings in, both runs out.

The real engines run on the virtual device with a null model, so what a slider shows
is the schedule that really ships. Knows neither plotly nor widgets.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from cbasync.config import EngineConfig
from cbasync.devices.base import StreamError
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.races import Race, RaceDetector
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.event_log import Arrow, EventLog
from cbasync.kv_cache import blocks_for
from cbasync.paper import Drawing
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.timeline import Timeline

PROMPT = 4  # tokens of each prompt
MAX_TOKENS = 8  # tokens that each request produces, where the batches are few
MIN_TOKENS = 3
MAX_BATCHES = 200  # of one run, so that a slider answers at once
REFERENCE_BATCH = 32  # the batch size at which the times on the sliders hold
EVENTS = ("h2d_done", "compute_done", "d2h_done")

Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Settings:
    """Where the sliders stand. Times in ms, for a batch of 32 requests.

    A host phase costs half of its time whatever the batch, and half in proportion to
    the requests in it; computing four fifths and one fifth, since the weights are
    read once for all of them. Copies take the same time for every batch.
    """

    batch_size: int = 32
    num_requests: int = 32
    schedule_ms: float = 2.0
    prepare_ms: float = 6.0
    update_ms: float = 2.0
    compute_ms: float = 28.0
    transfer_ms: float = 2.0
    depth: int = 1
    num_slots: int = 2
    events_off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_requests", "num_slots"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, at least 1 is needed: raise it"
                )
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_ms") and not 0 <= value < float("inf"):
                raise ValueError(
                    f"{item.name} is {value}, a time is finite and not negative: "
                    "give milliseconds"
                )
        object.__setattr__(self, "events_off", frozenset(self.events_off))

    @property
    def max_tokens(self) -> int:
        """Tokens of each request: fewer where there are many batches of them."""
        waves = -(-self.num_requests // self.batch_size)
        return max(MIN_TOKENS, min(MAX_TOKENS, MAX_BATCHES // waves))

    @property
    def costs(self) -> CostModel:
        """The machine that the sliders describe."""
        copy = PhaseCost(fixed_us=1000 * self.transfer_ms)
        return CostModel(
            "sliders",
            schedule=_split(self.schedule_ms, 0.5),
            prepare=_split(self.prepare_ms, 0.5),
            h2d=copy,
            compute=_split(self.compute_ms, 0.8),
            d2h=copy,
            update=_split(self.update_ms, 0.5),
        )

    def config(self, depth: int, num_slots: int = 0) -> EngineConfig:
        """Room for all requests, and the edges that are left."""
        ablate = set(self.events_off) if num_slots else set()
        if 0 < num_slots <= depth:
            ablate |= {"slot_refill", "slot_reuse"}
        length = PROMPT + self.max_tokens
        return EngineConfig(
            max_num_seqs=self.batch_size,
            max_num_batched_tokens=self.batch_size * PROMPT,
            num_blocks=2 * self.batch_size * blocks_for(length, 16),
            max_model_len=length,
            depth=depth,
            num_slots=num_slots,
            ablate=frozenset(ablate),
        )


def _split(time_ms: float, fixed_share: float) -> PhaseCost:
    time_us = 1000 * time_ms
    return PhaseCost(
        fixed_us=time_us * fixed_share,
        per_request_us=time_us * (1 - fixed_share) / REFERENCE_BATCH,
    )


PRESETS: dict[str, Settings] = {
    "round figures": Settings(),
    "published run, 8B model": Settings(
        schedule_ms=1.0,
        prepare_ms=6.81,
        update_ms=1.0,
        compute_ms=27.89,
        transfer_ms=0.0,
    ),
    "slow host": Settings(schedule_ms=5.0, prepare_ms=25.0, update_ms=5.0),
    "fast host": Settings(
        schedule_ms=0.1, prepare_ms=0.3, update_ms=0.1, transfer_ms=0.1
    ),
    "slow copies": Settings(transfer_ms=10.0),
    "one slot: a race": Settings(num_slots=1, transfer_ms=4.0),
    "no h2d_done: a race": Settings(
        events_off=frozenset({"h2d_done"}), transfer_ms=4.0
    ),
}


@dataclass(frozen=True)
class Run:
    """One engine's run, and what was watched meanwhile."""

    timeline: Timeline
    tokens: Tokens
    arrows: tuple[Arrow, ...]
    races: tuple[Race, ...] = ()
    broke_off: bool = False  # it read rubbish that no engine can go on with


@dataclass(frozen=True)
class Exploration:
    """Both runs for one place of the sliders."""

    settings: Settings
    sync: Run
    overlapped: Run

    @property
    def num_wrong(self) -> int:
        """Requests whose tokens the asynchronous run got wrong."""
        pairs = zip(self.sync.tokens, self.overlapped.tokens, strict=True)
        return sum(right != got for right, got in pairs)

    @property
    def drawings(self) -> tuple[Drawing, Drawing]:
        """Both runs as they are drawn, with the events that make up a batch's chain."""
        return _drawing(self.sync), _drawing(self.overlapped)

    def verdict(self) -> str:
        """What the figure shows, in two or three sentences."""
        parts = [_why_idle(self.sync.timeline), self._why_not()]
        if self.overlapped.races:
            parts.append(self._what_breaks())
        return " ".join(parts)

    def _why_not(self) -> str:
        run, sync_us = self.overlapped.timeline, self.sync.timeline.total_us
        saved = 1 - run.total_us / sync_us if sync_us else 0.0
        gain = f"{100 * saved:.0f} % less time in all"
        if self.overlapped.broke_off:
            return f"Async breaks off in batch {run.batches()[-1]}: it read rubbish."
        if self.settings.depth == 0:
            return "At depth 0 the async engine takes turns too."
        if run.idle_us < 0.01 * run.gpu_window_us:
            return (
                "Async: the CPU prepares the next batch while the GPU computes, so the "
                f"GPU goes from one batch straight to the next: {gain}."
            )
        return f"Async still waits {_per_batch(run)}: {gain}."

    def _what_breaks(self) -> str:
        edges = sorted({race.edge for race in self.overlapped.races})
        result = (
            f"{self.num_wrong} of {len(self.sync.tokens)} requests get wrong tokens"
            if self.num_wrong
            else "with these times the tokens happen to be right"
        )
        return f"Race, nothing orders {' and '.join(edges)}: {result}."


def _drawing(run: Run) -> Drawing:
    arrows = [arrow for arrow in run.arrows if arrow.edge in EVENTS]
    note = f"{run.timeline.total_us / 1000:.1f} ms"
    return Drawing(run.timeline, arrows, run.races, note)


def _why_idle(timeline: Timeline) -> str:
    if timeline.idle_us == 0:
        return "Sync: the host takes no time, so the GPU never waits."
    share = 100 * timeline.idle_us / timeline.gpu_window_us
    return (
        f"Sync: the GPU is idle {share:.0f} % of the time. Between two batches it "
        f"waits {_per_batch(timeline)}."
    )


_WORDS = {"h2d": "the copy in", "sync": "the copy back", "host": "the loop itself"}


def _per_batch(timeline: Timeline) -> str:
    """Idle time between two batches, and its causes from the largest down."""
    gaps = max(1, len(timeline.batches()) - 1)
    causes = timeline.idle_by_cause()
    named = sorted(causes.items(), key=lambda item: -item[1])
    parts = [
        f"{us / gaps / 1000:.1f} for {_WORDS.get(cause, cause)}"
        for cause, us in named
        if us > 0.02 * timeline.idle_us
    ]
    return f"{timeline.idle_us / gaps / 1000:.1f} ms ({', '.join(parts)})"


def explore(settings: Settings) -> Exploration:
    """Both engines on the machine that the settings describe.

    >>> result = explore(PRESETS["published run, 8B model"])
    >>> f"{result.sync.timeline.gpu_active:.0%}", result.num_wrong
    ('78%', 0)
    """
    ahead = _run(AsyncEngine, "async", settings)
    # The synchronous run heeds no slider of the asynchronous one: often it is known.
    common = replace(settings, depth=0, num_slots=1, events_off=frozenset())
    return Exploration(settings, _sync_run(common), ahead)


@lru_cache(maxsize=64)
def _sync_run(settings: Settings) -> Run:
    return _run(SyncEngine, "sync", settings)


def _run(kind: type[Engine], name: str, settings: Settings) -> Run:
    is_sync = kind is SyncEngine
    config = settings.config(
        depth=0 if is_sync else settings.depth,
        num_slots=0 if is_sync else settings.num_slots,
    )
    # Without a race every order gives the same tokens, and the quickest one will do.
    device = SimDevice(
        costs=settings.costs, order="issue" if config.is_safe else "durations"
    )
    log, detector = EventLog(), RaceDetector()
    device.observers.append(log)
    if not config.is_safe:
        device.observers.append(detector)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that edges are off is what is asked for
        engine = kind(ScriptedRunner(), config, device)
        tokens, broke_off = _tokens(engine, settings)
    device.timeline.name = name
    return Run(
        device.timeline, tokens, tuple(log.arrows), tuple(detector.races), broke_off
    )


def _tokens(engine: Engine, settings: Settings) -> tuple[Tokens, bool]:
    """The tokens of all requests, and whether the run could not go on to its end."""
    params = SamplingParams(max_tokens=settings.max_tokens)
    requests = [
        engine.add_request([(17 * row + i) % 1000 for i in range(PROMPT)], params)
        for row in range(settings.num_requests)
    ]
    broke_off = False
    try:
        with engine:
            engine.run()
    except (StreamError, RuntimeError, IndexError):
        if engine.config.is_safe:
            raise
        broke_off = True  # a GPU would call it an illegal access; show what there is
    return tuple(tuple(r.output_token_ids) for r in requests), broke_off
