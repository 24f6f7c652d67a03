"""How far to run ahead, step by step: a small exact simulator, and what bounds it.

The host launches batches and collects them; the GPU computes them one after the other.
Before each launch a planner says how many batches may still be in flight. Times are
whole microseconds, so a run is the same everywhere. Knows neither engines nor models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cbasync.timeline import Span, Timeline

Seen = dict[str, Any]
Limits = dict[str, int]


class Planner(Protocol):
    """What a learner writes."""

    def ahead(self, seen: Seen) -> int:
        """How many batches may be in flight when the next one is prepared."""


MakePlanner = Callable[[Limits], Planner]


@dataclass(frozen=True)
class Workload:
    """What a run meets: how long the host takes, and when requests end."""

    host_us: Sequence[int]  # to prepare and launch each batch
    ends: Sequence[int]  # rows of each batch that produce their end token
    budget: int  # most discarded rows
    kind: str = "given"
    compute_us: int = 10_000
    update_us: int = 500
    max_ahead: int = 3
    rows: int = 8

    @property
    def limits(self) -> Limits:
        """What a planner is told before the run."""
        return {
            "batches": len(self.host_us),
            "ends": sum(self.ends),
            "budget": self.budget,
            "max_ahead": self.max_ahead,
            "compute_us": self.compute_us,
            "update_us": self.update_us,
            "rows": self.rows,
        }


@dataclass
class Run:
    """What came of a workload with a planner."""

    idle_us: int = 0  # of the GPU, from its first start to its last end
    discarded: int = 0
    answers: list[int] = field(default_factory=list)
    bars: list[tuple[str, int, int, int]] = field(default_factory=list)

    def timeline(self, name: str = "run") -> Timeline:
        """The run as bars: prepare and update on the host, compute on the GPU."""
        spans = [
            Span(
                "compute" if phase == "compute" else "cpu", phase, batch, -1, start, end
            )
            for phase, batch, start, end in self.bars
        ]
        return Timeline(name, spans)


def play(workload: Workload, planner: Planner) -> Run:
    """Run a workload.

    In turns the GPU waits for the host before every batch but the first. One batch
    ahead it does not, as long as the host is faster:

    >>> workload = Workload([4000] * 3, [0, 1, 0], budget=9)
    >>> play(workload, Constant(0)).idle_us, play(workload, Constant(1)).idle_us
    (9000, 0)
    >>> play(workload, Constant(1)).discarded
    1
    """
    return _Simulation(workload).run(planner)


class Constant:
    """Always the same depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def ahead(self, seen: Seen) -> int:
        return self.depth


class _Simulation:
    """The clocks of one run."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.result = Run()
        self.now_us = 0
        self.free_us = 0  # when the GPU has computed all that was launched
        self.in_flight: deque[tuple[int, int]] = deque()  # batch, end of its compute
        self.launched = 0
        self.ended: list[int] = []  # of batches collected since the last answer

    def run(self, planner: Planner) -> Run:
        for batch in range(len(self.workload.host_us)):
            ahead = _checked(planner.ahead(self.seen(batch)), self.workload, batch)
            self.result.answers.append(ahead)
            self.ended = []
            while len(self.in_flight) > ahead:
                self.collect()
            self.launch(batch)
        while self.in_flight:
            self.collect()
        return self.result

    def seen(self, batch: int) -> Seen:
        """What a planner is shown before it answers."""
        last = self.workload.host_us[batch - 1] if batch else None
        return {
            "batch": batch,
            "host_us": last,
            "in_flight": len(self.in_flight),
            "finished": sum(end_us <= self.now_us for _, end_us in self.in_flight),
            "busy_us": max(0, self.free_us - self.now_us),
            "ended": self.ended,
            "discarded": self.result.discarded,
        }

    def launch(self, batch: int) -> None:
        """The host prepares a batch, then the GPU has it in its queue."""
        start_us = self.now_us
        self.now_us += self.workload.host_us[batch]
        self.result.bars.append(("prepare", batch, start_us, self.now_us))
        begin_us = max(self.now_us, self.free_us)
        if batch:
            self.result.idle_us += begin_us - self.free_us
        self.free_us = begin_us + self.workload.compute_us
        self.result.bars.append(("compute", batch, begin_us, self.free_us))
        self.in_flight.append((batch, self.free_us))
        self.launched = batch + 1

    def collect(self) -> None:
        """The host waits for the oldest batch and books its tokens.

        Each row that ended in it was computed once more in every batch launched since.
        """
        batch, end_us = self.in_flight.popleft()
        start_us = max(self.now_us, end_us)
        self.now_us = start_us + self.workload.update_us
        self.result.bars.append(("update", batch, start_us, self.now_us))
        later = self.launched - 1 - batch
        self.result.discarded += self.workload.ends[batch] * later
        self.ended.append(self.workload.ends[batch])


def _checked(answer: Any, workload: Workload, batch: int) -> int:
    """An answer that may be used."""
    if type(answer) is not int or not 0 <= answer <= workload.max_ahead:
        raise AssertionError(
            f"ahead() gives {answer!r} before batch {batch} of {workload.kind}\n"
            f"  expected  a whole number from 0 to {workload.max_ahead}\n"
            "  Which entry of the limits says how many batches may be in flight?"
        )
    return answer


# ------------------------------------------------------------------ what bounds it


def least_idle_us(workload: Workload) -> int:
    """No planner has less idle time than this, whatever it discards.

    Always as far ahead as allowed: then every launch comes as early as it can.
    """
    return play(workload, Constant(workload.max_ahead)).idle_us


def best_constant(workload: Workload) -> Run:
    """The constant depth with the least idle time among those that keep the budget."""
    runs = [play(workload, Constant(n)) for n in range(workload.max_ahead + 1)]
    kept = [run for run in runs if run.discarded <= workload.budget]
    return min(kept, key=lambda run: run.idle_us)


def hindsight_us(workload: Workload) -> int:
    """The least idle time within the budget, for a planner that knows the future.

    All runs at once, batch by batch. A run is known by how many batches are in flight
    and by three numbers: the host's clock, when the GPU is free, the discarded rows.
    One that is not better than another in any of the three is dropped.
    """
    runs: dict[int, list[tuple[int, int, int]]] = {0: [(0, 0, 0)]}
    for batch in range(len(workload.host_us)):
        following: dict[int, list[tuple[int, int, int]]] = {}
        for in_flight, states in runs.items():
            for state in states:
                for left, after in _collected(workload, batch, in_flight, state):
                    launched = _launched(workload, batch, after)
                    following.setdefault(left + 1, []).append(launched)
        runs = {count: _undominated(states) for count, states in following.items()}
    number = len(workload.host_us)
    free_us = [
        after[1]
        for in_flight, states in runs.items()
        for state in states
        for left, after in _collected(workload, number, in_flight, state)
        if left == 0
    ]
    return min(free_us) - workload.host_us[0] - number * workload.compute_us


def _collected(
    workload: Workload, batch: int, in_flight: int, state: tuple[int, int, int]
) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """The state after each number of collects that the budget allows."""
    now_us, free_us, discarded = state
    for left in range(in_flight, -1, -1):
        if left < in_flight:
            # Batches end one compute time apart; where the GPU was idle between two
            # of them, the older one is over anyway.
            end_us = free_us - left * workload.compute_us
            now_us = max(now_us, end_us) + workload.update_us
            discarded += workload.ends[batch - left - 1] * left
        if discarded > workload.budget:
            return
        if left <= workload.max_ahead:
            yield left, (now_us, free_us, discarded)


def _launched(
    workload: Workload, batch: int, state: tuple[int, int, int]
) -> tuple[int, int, int]:
    now_us, free_us, discarded = state
    now_us += workload.host_us[batch]
    return now_us, max(now_us, free_us) + workload.compute_us, discarded


def _undominated(states: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    kept: list[tuple[int, int, int]] = []
    for state in sorted(set(states)):
        if not any(k[1] <= state[1] and k[2] <= state[2] for k in kept):
            kept.append(state)
    return kept
