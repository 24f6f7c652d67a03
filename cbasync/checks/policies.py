"""Checks of a scheduler policy that hands out a token budget, step by step.

The policy under test is one function, `plan(budget, seats, requests)`. It gets a list
of `View`s in the order of arrival and returns `[name, tokens]` pairs, the next batch. A
small machine with a clock runs what it plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from cbasync.checks.policy_machine import Job, Machine, Plan, first_come
from cbasync.checks.workload import Mistake, generator, judge

BUDGET, SEATS = 32, 4  # of the workloads whose latency counts
PATIENCE = 4  # nobody may take so many times as long as the unluckiest of first-come
LATENCY_BARS_MS = (395.7, 296.5)
"""Of the visible rush hour, seed 0: half and 0.9 of what the reference gains."""


# ------------------------------------------------------------------ workloads


def jobs_at_random(seed: int, what: str, number: int) -> list[Job]:
    """A few jobs of all kinds, more of them with a higher number."""
    random = generator("policy", what, seed, number)
    jobs, now = [], 0
    for n in range(1 + number):
        prompt, output = random.randint(1, 20), random.randint(1, 8)
        if random.random() < 0.2:
            prompt, output = random.randint(30, 90), random.randint(10, 30)
        jobs.append(Job(f"r{n}", float(now), prompt, output))
        now += random.choice((0, 0, 5, 20, 60))
    return jobs


def stream(seed: int, number: int) -> list[Job]:
    """A long request, and short ones that come faster than they can be served."""
    random = generator("stream", seed, number)
    jobs = [Job("long", 0.0, random.randint(20, 60), random.randint(12, 24))]
    now = 0.0
    for n in range(20 + 20 * number):
        prompt, output = random.randint(1, 6), random.randint(1, 3)
        jobs.append(Job(f"s{n}", round(now), prompt, output))
        now += random.randint(8, 12)
    return jobs


def rush_hour(seed: int = 0) -> list[Job]:
    """A hundred requests: most want little, some want a lot, all come at once.

    The waiting line grows for a while and then melts away: who is served first
    matters.
    """
    random = generator("rush hour", seed)
    jobs, now = [], 0.0
    for n in range(100):
        prompt, output = random.randint(4, 24), random.randint(1, 8)
        if random.random() < 0.18:
            prompt, output = random.randint(60, 200), random.randint(20, 50)
        jobs.append(Job(f"r{n}", round(now, 1), prompt, output))
        now += random.expovariate(1 / 24)
    return jobs


def _small(seed: int, what: str, count: int = 24) -> Iterator[list[Job]]:
    return (jobs_at_random(seed, what, number) for number in range(count))


# ------------------------------------------------------------------ the checks


def well_formed(plan: Plan, seed: int = 0) -> None:
    """Every plan is a list of names and numbers that make sense."""
    machine = Machine(plan, budget=10_000, seats=100)
    _judge("well formed", _small(seed, "form"), machine.run, machine)


def limits(plan: Plan, seed: int = 0) -> None:
    """Budget and seats are kept, whatever they are."""
    for budget, seats in ((1, 1), (3, 8), (8, 2), (16, 3)):
        machine = Machine(plan, budget, seats)
        jobs = _small(seed, f"limits {budget}", count=12)
        _judge(f"limits: {budget} tokens, {seats} seats", jobs, machine.run, machine)


def no_waste(plan: Plan, seed: int = 0) -> None:
    """Nobody waits for tokens and seats that are left over."""
    for budget, seats in ((8, 2), (16, 8)):
        machine = Machine(plan, budget, seats, limits=False)
        machine.saves = True
        jobs = _small(seed, f"waste {budget}")
        _judge(f"no waste: {budget} tokens, {seats} seats", jobs, machine.run, machine)


def nobody_starves(plan: Plan, seed: int = 0) -> None:
    """Nobody takes four times as long as the unluckiest in the order of arrival."""
    machine = Machine(plan, budget=8, seats=2, limits=False)
    fair = Machine(first_come, budget=8, seats=2)

    def run(jobs: Sequence[Job]) -> None:
        most, got = PATIENCE * fair.run(jobs).worst_ms, machine.run(jobs).latency_ms
        late = {name: ms for name, ms in got.items() if ms > most}
        if late:
            name = max(late, key=lambda name: late[name])
            raise Mistake(
                f"all done within {most:.1f} ms, {PATIENCE} times first-come's worst",
                f"{name!r} took {late[name]:.1f} ms",
                "Does waiting ever help a request that wants a lot?",
            )

    loads = [stream(seed, number) for number in range(7)]
    _judge("nobody starves", loads, run, machine)


def _judge(
    name: str,
    loads: Any,
    run: Callable[[Sequence[Job]], Any],
    machine: Machine,
) -> None:
    head = f"budget {machine.budget}, seats {machine.seats}"
    judge(name, loads, run, lambda jobs: "\n".join([head, *_lines(jobs)]))


def _lines(jobs: Sequence[Job], most: int = 6) -> list[str]:
    """A line for each job, without the middle of a long list."""
    lines = [str(job) for job in jobs]
    if len(lines) <= most:
        return lines
    return [*lines[: most - 2], f"... {len(lines) - most + 1} more ...", lines[-1]]


def mean_latency_ms(plan: Plan, seeds: Sequence[int]) -> float:
    """Mean over the requests of these rush hours, in virtual milliseconds."""
    return mean(
        Machine(plan, BUDGET, SEATS).run(rush_hour(seed)).mean_ms for seed in seeds
    )


def latency_bar(plan: Plan, part: float, seeds: Sequence[int]) -> float:
    """The latency to ask for, if this policy is the model: a part of its gain."""
    first, best = mean_latency_ms(first_come, seeds), mean_latency_ms(plan, seeds)
    return round(first - part * (first - best), 1)


def latency(plan: Plan, at_most_ms: float, seeds: Sequence[int] = (0,)) -> None:
    """The mean latency of rush hours is low enough."""
    given = f"rush_hour(seed) with seed {', '.join(map(str, seeds))}"
    given += f", budget {BUDGET}, seats {SEATS}"
    try:
        got_ms = mean_latency_ms(plan, seeds)
    except Mistake as mistake:
        raise mistake.told("latency", given) from None
    except NotImplementedError:
        raise AssertionError("latency: nothing written yet") from None
    if got_ms > at_most_ms:
        raise Mistake(
            f"a mean latency of at most {at_most_ms:.1f} ms",
            f"{got_ms:.1f} ms; first-come takes "
            f"{mean_latency_ms(first_come, seeds):.1f} ms",
            "Whose leaving makes the waiting line shorter soonest?",
        ).told("latency", given)
    print(f"latency: {got_ms:.1f} ms, at most {at_most_ms:.1f} ms is asked for")
