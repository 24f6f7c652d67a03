"""Checks of assignment 5: answers that may be used, the budget, and the idle share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cbasync.checks.planner_workloads import workloads
from cbasync.checks.planners import (
    Constant,
    MakePlanner,
    Run,
    Workload,
    best_constant,
    least_idle_us,
    play,
)
from cbasync.checks.workload import generator

Runs = Sequence[tuple[Workload, Run]]


def run_all(make: MakePlanner, given: Sequence[Workload]) -> Runs:
    """Each workload with a new planner."""
    return [(workload, play(workload, make(workload.limits))) for workload in given]


def idle_share(runs: Runs) -> float:
    """The metric: 1 is the best constant depth of each workload, 0 the bound.

    Idle time over all workloads, counted from the bound that no planner can pass. A run
    that breaks its budget counts as if it had taken turns.

    >>> given = [Workload([4000, 4000, 14_000, 4000], [1, 0, 0, 0], budget=1)]
    >>> for depth in (0, 1):
    ...     print(f"{idle_share(run_all(lambda limits: Constant(depth), given)):.2f}")
    5.22
    1.00
    """
    ours = bound = best = 0
    for workload, run in runs:
        kept = run.discarded <= workload.budget
        ours += run.idle_us if kept else play(workload, Constant(0)).idle_us
        bound += least_idle_us(workload)
        best += best_constant(workload).idle_us
    return (ours - bound) / (best - bound) if best > bound else float(ours > bound)


# ------------------------------------------------------------------ checks


def usable_answers(make: MakePlanner, seed: int) -> None:
    """Whole numbers within the limits, on workloads of every size and strangeness."""
    given = [
        Workload([5000], [0], 0, "one batch"),
        Workload([5000] * 12, [0] * 12, 0, "no ends"),
        Workload([5000] * 12, [8] * 12, 300, "only ends"),
        Workload([1] * 12, [1] * 12, 20, "a host without work"),
        Workload([90_000] * 12, [1] * 12, 20, "a very slow host"),
        Workload([5000] * 12, [1] * 12, 20, "in turns only", max_ahead=0),
        Workload([5000] * 12, [1] * 12, 20, "one ahead at most", max_ahead=1),
        *(replace(w, max_ahead=2) for w in workloads(seed, each=1, batches=60)),
    ]
    run_all(make, given)
    print(f"usable answers: right, {len(given)} workloads")


def own_memory(make: MakePlanner, seed: int) -> None:
    """A planner remembers its own run and no other."""
    # With much to spend, what is remembered shows in the answers.
    first = workloads(seed, each=1, batches=120)[0]
    first = replace(first, budget=3 * sum(first.ends))
    rush = Workload([1000] * 40, [8] * 40, 1000, "a rush of ends")
    slow = Workload([30_000] * 40, [0] * 40, 0, "a slow host")
    alone = play(first, make(first.limits)).answers
    for other in (rush, slow):
        play(other, make(other.limits))
        again = play(first, make(first.limits)).answers
        if again != alone:
            same = [a == b for a, b in zip(alone, again, strict=True)]
            place = same.index(False)
            raise AssertionError(
                "one workload twice, with a planner of its own each time\n"
                f"  expected  {alone[place]} before batch {place}, as the first time\n"
                f"  got       {again[place]}\n"
                "  What does one planner leave behind that the next one finds?"
            )
    print("own memory: right, 3 workloads")


def budget_kept(make: MakePlanner, seed: int) -> Runs:
    """At most k discarded rows, also where k is small, and still not in turns."""
    rng = generator("tight", seed)
    tight = [
        replace(w, budget=int(sum(w.ends) * share), kind=f"{w.kind}, small k")
        for w in workloads(seed, each=1, batches=120)
        for share in (0, rng.uniform(0.3, 0.9))
    ]
    runs = run_all(make, workloads(seed))
    for workload, run in [*run_all(make, tight), *runs]:
        if run.discarded > workload.budget:
            raise AssertionError(
                f"{workload.kind}: {len(workload.ends)} batches, {sum(workload.ends)} "
                f"ends\n  expected  at most {workload.budget} discarded rows\n"
                f"  got       {run.discarded}\n"
                "  How many rows can still be discarded by what is in flight already?"
            )
    for workload, run in runs:
        turns_us = play(workload, Constant(0)).idle_us
        if 2 * run.idle_us > turns_us:
            raise AssertionError(
                f"{workload.kind}: {len(workload.ends)} batches, k {workload.budget}\n"
                f"  expected  at most {turns_us // 2} us of idle time, half of what "
                f"taking turns has\n  got       {run.idle_us} us\n"
                "  Is k enough for one batch ahead all the time?"
            )
    print(f"budget kept: right, {len(tight) + len(runs)} workloads")
    return runs


def share_below(make: MakePlanner, seed: int, bar: float, words: str) -> float:
    """The idle share of the hidden workloads, if it is not above a bar."""
    runs = run_all(make, workloads(seed))
    share = idle_share(runs)
    if share > bar:
        worst = max(runs, key=lambda pair: idle_share([pair]))
        raise AssertionError(
            f"idle share {share:.3f} over {len(runs)} workloads\n"
            f"  expected  at most {bar:.3f}: {words}\n"
            f"  got       {share:.3f}; the worst is a workload of the kind "
            f"{worst[0].kind}: {worst[1].idle_us} us idle, the best constant depth "
            f"{best_constant(worst[0]).idle_us} us, the bound "
            f"{least_idle_us(worst[0])} us\n"
            f"  {_question(runs)}"
        )
    print(f"idle share: {share:.3f}, at most {bar:.3f} is asked for")
    return share


def _question(runs: Runs) -> str:
    broken = [
        workload.kind for workload, run in runs if run.discarded > workload.budget
    ]
    if broken:
        return (
            f"{len(broken)} workloads broke their budget and count as taking turns: "
            "what is the most that one more batch ahead can cost?"
        )
    return "When does a batch further ahead cost nothing, and when does it help most?"


Check = Callable[[MakePlanner, int], object]

ALL: tuple[Check, ...] = (usable_answers, own_memory, budget_kept)
