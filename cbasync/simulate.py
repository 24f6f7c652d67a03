"""What-if: both engines on the virtual device, for any machine and any length.

The real engines run, with a null model in place of a real one; only times are made
up, by a cost model. So a question such as "what if my CPU were twice as slow?" gets the
answer of the schedule that really ships.
"""

from __future__ import annotations

import sys
import textwrap
import time
from dataclasses import dataclass
from typing import Any

from cbasync.bench import table
from cbasync.config import EngineConfig
from cbasync.devices.costs import ARTICLE, CostModel
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.kv_cache import blocks_for
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.timeline import CAUSES, HOST_PHASES, Timeline, side_by_side

Numbers = dict[str, float]

# An 8B model, 8K tokens, batch 32: total time, and the GPU's active share of it.
PUBLISHED_STEPS, PUBLISHED_BATCH = 8192, 32
PUBLISHED: dict[str, Numbers] = {
    "sync": {"total_s": 300.6, "gpu_active": 0.760},
    "async": {"total_s": 234.5, "gpu_active": 0.994},
}

PROMPT = 16  # tokens of each prompt
DRAWN_BATCHES = 4
WIDTH = 88


@dataclass(frozen=True)
class SimulatedRun:
    """One engine's run on the virtual clock."""

    timeline: Timeline
    tokens: list[list[int]]
    wall_s: float  # real time that simulating took

    @property
    def step_s(self) -> float:
        """Mean time from one compute start to the next; 0 for a single batch."""
        starts = [span.start_us for span in self.timeline.lane("compute")]
        return (starts[-1] - starts[0]) / max(1, len(starts) - 1) / 1e6

    def total_s(self, steps: int) -> float:
        """Length of the run if it had so many steps and went on as it did."""
        missing = steps - len(self.timeline.batches())
        return self.timeline.total_us / 1e6 + missing * self.step_s

    @property
    def numbers(self) -> dict[str, Any]:
        """The run in numbers.

        `total_s` is the whole generation: from the first schedule, before anything
        computes, to the last token booked. `gpu_active` is the share of the time from
        the first compute start to the last compute end, as everywhere.
        """
        idle = self.timeline.idle_by_cause()
        return {
            "total_s": self.timeline.total_us / 1e6,
            "step_s": self.step_s,
            "gpu_active": self.timeline.gpu_active,
            "gpu_busy_s": self.timeline.gpu_busy_us / 1e6,
            "idle_by_cause_s": {cause: us / 1e6 for cause, us in idle.items()},
            "wall_s": self.wall_s,
        }


@dataclass(frozen=True)
class Simulation:
    """The same requests in turns and ahead, on the machine that `costs` describes."""

    costs: CostModel
    steps: int
    batch: int
    depth: int
    sync: SimulatedRun
    overlapped: SimulatedRun

    @property
    def tokens_equal(self) -> bool:
        """Whether both engines gave every request the same tokens."""
        return self.sync.tokens == self.overlapped.tokens

    @property
    def ideal_s(self) -> float:
        """Compute only: no schedule can take less time."""
        return self.sync.timeline.gpu_busy_us / 1e6

    def summary(self) -> dict[str, Any]:
        """All numbers in one dict; `published` only beside the article's cost model."""
        result: dict[str, Any] = {
            "cost_model": self.costs.name,
            "steps": self.steps,
            "batch": self.batch,
            "depth": self.depth,
            "tokens_equal": self.tokens_equal,
            "ideal_s": self.ideal_s,
            "sync": self.sync.numbers,
            "async": self.overlapped.numbers,
            "wall_s": self.sync.wall_s + self.overlapped.wall_s,
        }
        if self.costs == ARTICLE:
            result["published"] = PUBLISHED
            total_s = self.overlapped.total_s(PUBLISHED_STEPS)
            result["not_in_model"] = published_difference(total_s)
        return result

    def timelines(self, max_batches: int = DRAWN_BATCHES) -> str:
        """Both timelines as text, of a long run its first batches."""
        runs = (self.sync.timeline, self.overlapped.timeline)
        bars = map(_without_free_host_phases, runs)
        return side_by_side(*bars, width=WIDTH, max_batches=max_batches)

    def __str__(self) -> str:
        summary = self.summary()
        head = (
            f"Cost model {self.costs.name}: {self.steps} steps of {self.batch} "
            f"requests, depth {self.depth}, on a virtual clock.\n"
            f"{textwrap.fill(self.costs.note, WIDTH)}".rstrip()
        )
        parts = [head, self._table(summary), _verdict(summary)]
        if self.costs == ARTICLE:
            parts.append(_difference_text(summary["not_in_model"]))
        return "\n\n".join([*parts, self.timelines()])

    def _table(self, summary: dict[str, Any]) -> str:
        """One column a run, the published ones only where they belong."""
        ours = [summary["sync"], summary["async"]]
        published = list(summary.get("published", {}).values())
        names = ["sync", "async", *(f"published {n}" for n in ("sync", "async"))]
        rows = [["", *names[: len(ours + published)]]]
        if self.steps != PUBLISHED_STEPS or not published:
            rows.append(["total", *_seconds([run["total_s"] for run in ours])])
        if published:
            runs = (self.sync, self.overlapped)
            totals = [run.total_s(PUBLISHED_STEPS) for run in runs]
            totals += [run["total_s"] for run in published]
            rows.append([f"total of {PUBLISHED_STEPS} steps", *_seconds(totals)])
        shares = [f"{100 * run['gpu_active']:.1f} %" for run in ours + published]
        rows.append(["GPU active", *shares])
        for cause in CAUSES:
            # From one batch to the next: one gap less than there are batches.
            gaps = max(1, self.steps - 1)
            idle_ms = [1e3 * run["idle_by_cause_s"][cause] / gaps for run in ours]
            if any(idle_ms):
                label = f"GPU idle a step: {cause}"
                rows.append([label, *(f"{ms:.2f} ms" for ms in idle_ms)])
        return table([row + [""] * (len(rows[0]) - len(row)) for row in rows])


def simulate(
    costs: CostModel,
    *,
    steps: int = PUBLISHED_STEPS,
    batch: int = PUBLISHED_BATCH,
    depth: int = 1,
    prompt: int = PROMPT,
) -> Simulation:
    """Run both engines on the virtual device: `batch` requests, `steps` tokens each.

    >>> result = simulate(ARTICLE, steps=64)
    >>> result.tokens_equal, f"{result.sync.timeline.gpu_active:.0%}"
    (True, '76%')
    """
    for name, value in {"steps": steps, "batch": batch, "prompt": prompt}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, at least 1 is needed: raise it")
    ahead = _config(steps, batch, depth, prompt)
    in_turns = _config(steps, batch, 0, prompt)
    return Simulation(
        costs=costs,
        steps=steps,
        batch=batch,
        depth=depth,
        sync=_run(SyncEngine, "sync", in_turns, costs, prompt),
        overlapped=_run(AsyncEngine, "async", ahead, costs, prompt),
    )


def _config(steps: int, batch: int, depth: int, prompt: int) -> EngineConfig:
    """Room for all requests from the first batch to the last."""
    block_size = EngineConfig.block_size
    return EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=batch * prompt,
        num_blocks=batch * blocks_for(prompt + steps, block_size),
        max_model_len=prompt + steps,
        depth=depth,
    )


def _run(
    kind: type[Engine], name: str, config: EngineConfig, costs: CostModel, prompt: int
) -> SimulatedRun:
    # Effects at issue: without a race every order gives the same tokens, and times do
    # not depend on it.
    device = SimDevice(costs=costs, order="issue")
    device.timeline.max_spans = sys.maxsize  # the figures are those of the whole run
    engine = kind(ScriptedRunner(), config, device)
    params = SamplingParams(max_tokens=config.max_model_len - prompt)
    vocab_size = engine.runner.vocab_size
    requests = [
        engine.add_request([(17 * row + i) % vocab_size for i in range(prompt)], params)
        for row in range(config.max_num_seqs)
    ]
    start = time.perf_counter()
    with engine:
        engine.run()
    wall_s = time.perf_counter() - start
    engine.timeline.name = name
    return SimulatedRun(engine.timeline, [r.output_token_ids for r in requests], wall_s)


# ------------------------------------------------------------------ the published run


def published_difference(async_total_s: float) -> Numbers:
    """What the published asynchronous run took beyond the model's, part by part.

    All of it follows from the four published figures:

    >>> for part, seconds in published_difference(228.48).items():
    ...     print(f"{part:15} {seconds:5.2f}")
    difference_s     6.02
    extra_active_s   4.64
    idle_s           1.41
    rounding_s      -0.02
    """
    sync, overlapped = PUBLISHED["sync"], PUBLISHED["async"]
    active_s = overlapped["total_s"] * overlapped["gpu_active"]
    extra_active_s = active_s - sync["total_s"] * sync["gpu_active"]
    idle_s = overlapped["total_s"] - active_s
    difference_s = overlapped["total_s"] - async_total_s
    return {
        "difference_s": difference_s,
        "extra_active_s": extra_active_s,
        "idle_s": idle_s,
        "rounding_s": difference_s - extra_active_s - idle_s,
    }


def _difference_text(parts: Numbers) -> str:
    sync, overlapped = (
        run["total_s"] * run["gpu_active"] for run in PUBLISHED.values()
    )
    items = (
        f"{parts['extra_active_s']:.1f} s of extra GPU time: {overlapped:.1f} s "
        f"active, {sync:.1f} s in the published sync run. A schedule decides when "
        "kernels run; that they also run longer beside a busy CPU is in no cost model "
        "here.",
        f"{parts['idle_s']:.1f} s of idle GPU, put down to the wait for each copy "
        "back. Its length was not published, so a copy takes no time here.",
    )
    lines = [
        f"The published async run took {parts['difference_s']:.1f} s more than this "
        "model. Not in the model:"
    ]
    for item in items:
        lines += textwrap.wrap("- " + item, WIDTH, subsequent_indent="  ")
    lines.append("The published shares have one digit: both are known within 0.3 s.")
    return "\n".join(lines)


def published_experiment() -> str:
    """The published experiment on the virtual device, as text for the demo.

    An eighth of its steps is enough, since all are alike.
    """
    result = simulate(ARTICLE, steps=PUBLISHED_STEPS // 8)
    return f"The published experiment, in virtual time\n\n{result}"


# ------------------------------------------------------------------ words and numbers


def _verdict(summary: dict[str, Any]) -> str:
    sync_s, async_s = (summary[name]["total_s"] for name in ("sync", "async"))
    tokens = "the same tokens" if summary["tokens_equal"] else "DIFFERENT tokens"
    saved = 100 * (1 - async_s / sync_s)
    return (
        f"Both engines gave {tokens}. Running ahead takes {saved:.1f} % less time.\n"
        f"The ideal is {_seconds([summary['ideal_s']])[0]}: compute and nothing else."
    )


def _seconds(values: list[float]) -> list[str]:
    """Times with one number of digits for all of them.

    >>> _seconds([300.646, 228.484]), _seconds([0.36, 0.0289])
    (['300.6 s', '228.5 s'], ['0.3600 s', '0.0289 s'])
    """
    largest = max(values)
    digits = next((n for n, least in enumerate((1000, 10, 1)) if largest >= least), 4)
    return [f"{value:.{digits}f} s" for value in values]


def _without_free_host_phases(timeline: Timeline) -> Timeline:
    """Without host phases that the cost model has for nothing.

    They have no length, so there is no bar to draw. A copy for nothing stays: that it
    happens, and when, is worth a mark.
    """
    bars = [s for s in timeline.spans if s.duration_us or s.phase not in HOST_PHASES]
    return Timeline(timeline.name, bars)
