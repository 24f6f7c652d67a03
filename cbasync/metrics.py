"""What a run did, in numbers: counts, occupancy, host time per phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cbasync.config import EngineConfig
from cbasync.request import Request, RequestMetrics
from cbasync.scheduler import Occurrence, Scheduler, SchedulerOutput
from cbasync.timeline import Timeline


@dataclass(frozen=True)
class RunMetrics:
    """Figures of one engine since it was made.

    `repr` is one line for a log; `record()` is a row for a table.
    """

    num_batches: int
    num_finished: int
    num_prompt_tokens: int  # of admitted requests
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens found in the cache
    discarded_tokens: int  # computed for requests that had ended
    num_preemptions: int
    batch_occupancy: float  # rows used, as a share of max_num_seqs, mean over batches
    elapsed_s: float  # on the device's clock
    schedule_ms: float  # host time per batch, mean
    prepare_ms: float
    update_ms: float

    @property
    def output_tokens_per_s(self) -> float:
        """Throughput over the whole time."""
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that did not have to be computed."""
        prompts = self.num_prompt_tokens
        return self.num_cached_tokens / prompts if prompts else 0.0

    def record(self) -> dict[str, Any]:
        """All figures, the derived ones too, as one flat dict."""
        derived = {
            "output_tokens_per_s": self.output_tokens_per_s,
            "cache_hit_rate": self.cache_hit_rate,
        }
        return asdict(self) | derived

    def __repr__(self) -> str:
        return (
            f"RunMetrics({self.num_finished} requests, {self.num_output_tokens} tokens "
            f"in {self.num_batches} batches, {self.output_tokens_per_s:.1f} tok/s, "
            f"{self.batch_occupancy:.0%} occupied, {self.discarded_tokens} discarded, "
            f"{self.num_preemptions} preemptions, {self.cache_hit_rate:.0%} cached)"
        )


class RunCounters:
    """Counts while an engine runs; `metrics()` makes figures of them."""

    def __init__(self, config: EngineConfig, now_us: float) -> None:
        self.config = config
        self.start_us = now_us
        self.num_finished = 0
        self.num_output_tokens = 0
        self.num_rows = 0
        self._silent: set[Request] = set()  # scheduled, and no token yet

    def scheduled(self, output: SchedulerOutput, now_us: float) -> None:
        """A batch was decided."""
        self.num_rows += len(output.occurrences)
        for request in output.admitted:
            if request.times.scheduled_us < 0:  # not after a preemption
                request.times.scheduled_us = now_us
                self._silent.add(request)

    def kept(self, kept: Sequence[Occurrence], now_us: float) -> None:
        """Tokens were booked."""
        self.num_output_tokens += len(kept)
        if self._silent:  # in most steps everybody has one
            for occurrence in kept:
                if occurrence.request in self._silent:
                    occurrence.request.times.first_token_us = now_us
                    self._silent.remove(occurrence.request)

    def finished(self, request: Request, now_us: float) -> None:
        """A request has ended."""
        request.times.finished_us = now_us
        self._silent.discard(request)
        self.num_finished += 1

    def metrics(
        self, scheduler: Scheduler, timeline: Timeline, now_us: float
    ) -> RunMetrics:
        """All figures as they are now."""
        batches = max(1, scheduler.num_launched)
        host_us = timeline.host_us()
        return RunMetrics(
            num_batches=scheduler.num_launched,
            num_finished=self.num_finished,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            discarded_tokens=scheduler.discarded_tokens,
            num_preemptions=scheduler.num_preemptions,
            batch_occupancy=self.num_rows / (batches * self.config.max_num_seqs),
            elapsed_s=(now_us - self.start_us) / 1e6,
            schedule_ms=host_us.get("schedule", 0.0) / 1e3 / batches,
            prepare_ms=host_us.get("prepare", 0.0) / 1e3 / batches,
            update_ms=host_us.get("update", 0.0) / 1e3 / batches,
        )


def request_records(requests: Iterable[Request]) -> list[dict[str, Any]]:
    """One flat dict per finished request: rows for a table."""
    return [
        {"request_id": request.request_id, "finish_reason": request.finish_reason}
        | asdict(RequestMetrics.of(request))
        for request in requests
        if request.is_finished
    ]
