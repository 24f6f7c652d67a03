"""Workloads for planners: how long the host takes, and when requests end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

from cbasync.checks.planners import Workload
from cbasync.checks.workload import generator


def workloads(seed: int, each: int = 2, batches: int = 240) -> list[Workload]:
    """So many of each kind; the budget is enough for one batch ahead, and some more."""
    return [
        _workload(generator("planner", seed, kind, number), kind, batches)
        for kind in HOSTS
        for number in range(each)
    ]


def _workload(rng: Random, kind: str, batches: int) -> Workload:
    ends = tuple(_ends(rng, batches))
    host_us = tuple(round(time_us) for time_us in HOSTS[kind](rng, batches))
    budget = math.ceil(sum(ends) * rng.uniform(1.2, 1.6))
    return Workload(host_us, ends, budget, kind)


def _ends(rng: Random, batches: int, rows: int = 8) -> Iterator[int]:
    """Long answers, and from time to time many short ones."""
    calm, hot = rng.uniform(0.02, 0.06), rng.uniform(0.9, 1.8)
    begin, stop = rng.uniform(0.02, 0.05), rng.uniform(0.07, 0.15)
    is_hot = False
    for _ in range(batches):
        is_hot = rng.random() >= stop if is_hot else rng.random() < begin
        rate = (hot if is_hot else calm) / rows
        yield sum(rng.random() < rate for _ in range(rows))


def _quick(rng: Random) -> Callable[[], float]:
    """A host that is faster than the GPU."""
    usual_us = rng.uniform(3500, 6000)
    return lambda: usual_us * rng.uniform(0.8, 1.25)


def _bursts(rng: Random, batches: int) -> Iterator[float]:
    """Now and then something keeps the host for a batch or two."""
    quick, slow_us = _quick(rng), rng.uniform(13_000, 24_000)
    begin, stop = rng.uniform(0.04, 0.1), rng.uniform(0.4, 0.7)
    is_slow = False
    for _ in range(batches):
        is_slow = rng.random() >= stop if is_slow else rng.random() < begin
        yield slow_us * rng.uniform(0.8, 1.2) if is_slow else quick()


def _rhythm(rng: Random, batches: int) -> Iterator[float]:
    """Every so many batches something is due that takes long."""
    quick, slow_us = _quick(rng), rng.uniform(16_000, 28_000)
    period = rng.randrange(7, 16)
    phase = rng.randrange(period)
    for batch in range(batches):
        yield slow_us * rng.uniform(0.9, 1.1) if batch % period == phase else quick()


def _heavy(rng: Random, batches: int) -> Iterator[float]:
    """Mostly quick, seldom very slow, and no warning."""
    usual_us = rng.uniform(2600, 4500)
    for _ in range(batches):
        yield usual_us * min(6.0, rng.paretovariate(1.6))


def _ramps(rng: Random, batches: int) -> Iterator[float]:
    """Slower and slower, then cleaned up, and again."""
    length = 4 * rng.randrange(7, 16)
    for batch in range(batches):
        share = (batch % length) / length
        yield (4000 + 10_000 * share) * rng.uniform(0.8, 1.25)


HOSTS: dict[str, Callable[[Random, int], Iterator[float]]] = {
    "bursts": _bursts,
    "rhythm": _rhythm,
    "heavy": _heavy,
    "ramps": _ramps,
}
