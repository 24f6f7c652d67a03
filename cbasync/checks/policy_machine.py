"""A small machine that runs what a scheduler policy plans, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, TypedDict

from cbasync.checks.workload import Mistake, is_whole

STEP_MS, TOKEN_MS = 10.0, 0.05  # of a batch, and of each token in it


class View(TypedDict):
    """What a policy sees of a request."""

    name: str
    waited_ms: float  # since it came
    prompt_left: int  # tokens of its prompt that are not computed yet
    output_left: int  # tokens that it still wants


Plan = Callable[[int, int, list[View]], Any]
"""Token budget, most requests in a batch, requests: `[[name, tokens], ...]`."""


@dataclass(frozen=True)
class Job:
    """A request to be: when it comes and what it wants."""

    name: str
    arrival_ms: float
    prompt: int
    output: int

    def __str__(self) -> str:
        return (
            f"{self.name} comes at {self.arrival_ms:g} ms: "
            f"prompt {self.prompt}, output {self.output}"
        )


@dataclass
class Run:
    """What became of the jobs."""

    latency_ms: dict[str, float] = field(default_factory=dict)  # from coming to the end
    batches: list[dict[str, int]] = field(default_factory=list)  # tokens by name
    starts_ms: list[float] = field(default_factory=list)

    @property
    def mean_ms(self) -> float:
        """Mean latency."""
        return mean(self.latency_ms.values())

    @property
    def worst_ms(self) -> float:
        """Latency of the unluckiest request."""
        return max(self.latency_ms.values(), default=0.0)


def first_come(budget: int, seats: int, requests: list[View]) -> list[list[Any]]:
    """Serve in the order of arrival: what every policy is compared with.

    >>> new = {"waited_ms": 0.0, "prompt_left": 9, "output_left": 1}
    >>> first_come(10, 4, [{"name": "a", **new}, {"name": "b", **new}])
    [['a', 9], ['b', 1]]
    """
    batch: list[list[Any]] = []
    for request in requests[:seats]:
        tokens = min(request["prompt_left"] or 1, budget)
        if tokens:
            batch.append([request["name"], tokens])
            budget -= tokens
    return batch


# ------------------------------------------------------------------ a machine


class Machine:
    """Runs planned batches on a clock; a request may rest, what it has is kept.

    The batch with the last token of a prompt gives the first output token, and each
    later one gives one more:

    >>> run = Machine(first_come, budget=8, seats=2).run([Job("a", 0.0, 10, 3)])
    >>> run.batches
    [{'a': 8}, {'a': 2}, {'a': 1}, {'a': 1}]
    >>> run.latency_ms  # four batches of 10 ms, and 12 tokens of 0.05 ms
    {'a': 40.6}
    """

    def __init__(
        self, plan: Plan, budget: int, seats: int, *, limits: bool = True
    ) -> None:
        self.plan, self.budget, self.seats = plan, budget, seats
        self.limits = limits  # whether more than that is a mistake
        self.saves = False  # whether less than possible is one

    def run(self, jobs: Sequence[Job]) -> Run:
        """Serve the jobs until the last one has all it wants."""
        run, now_ms = Run(), 0.0
        waiting = sorted(jobs, key=lambda job: job.arrival_ms)
        here: dict[str, tuple[Job, View]] = {}
        while waiting or here:
            if not here:
                now_ms = max(now_ms, waiting[0].arrival_ms)
            while waiting and waiting[0].arrival_ms <= now_ms:
                job = waiting.pop(0)
                here[job.name] = (job, _view(job))
            for job, view in here.values():
                view["waited_ms"] = round(now_ms - job.arrival_ms, 3)
            views = [view for _, view in here.values()]
            batch = self._next_batch(views)
            run.batches.append(batch)
            run.starts_ms.append(now_ms)
            now_ms += STEP_MS + TOKEN_MS * sum(batch.values())
            for name, tokens in batch.items():
                job, view = here[name]
                if _compute(view, tokens):
                    run.latency_ms[name] = round(now_ms - job.arrival_ms, 3)
                    del here[name]
        return run

    def _next_batch(self, views: list[View]) -> dict[str, int]:
        answer = self.plan(self.budget, self.seats, [view.copy() for view in views])
        batch = _batch(answer, views)
        state = f"budget {self.budget}, seats {self.seats}, {_told(views)}"
        if not batch:
            raise Mistake(
                f"somebody in the batch: {state}", answer, "Who could go on now?"
            )
        if self.limits:
            self._check_limits(batch, state)
        if self.saves:
            self._check_waste(batch, views, state)
        return batch

    def _check_limits(self, batch: dict[str, int], state: str) -> None:
        if sum(batch.values()) > self.budget:
            raise Mistake(
                f"at most {self.budget} tokens: {state}",
                f"{sum(batch.values())} tokens: {batch}",
                "What is left of the budget when the last one is added?",
            )
        if len(batch) > self.seats:
            raise Mistake(
                f"at most {self.seats} requests: {state}",
                f"{len(batch)} requests: {batch}",
                "Is there a seat for everybody?",
            )

    def _check_waste(
        self, batch: dict[str, int], views: list[View], state: str
    ) -> None:
        if sum(batch.values()) >= self.budget:
            return
        for view in views:
            most, given = view["prompt_left"] or 1, batch.get(view["name"], 0)
            if given < most and (given or len(batch) < self.seats):
                raise Mistake(
                    f"no token left over that {view['name']!r} could have: {state}",
                    batch,
                    "When is a batch full?",
                )


def _view(job: Job) -> View:
    return {
        "name": job.name,
        "waited_ms": 0.0,
        "prompt_left": job.prompt,
        "output_left": job.output,
    }


def _compute(view: View, tokens: int) -> bool:
    """Book a request's part of a batch; whether it has all it wants now."""
    view["prompt_left"] = max(0, view["prompt_left"] - tokens)
    if view["prompt_left"] == 0:
        view["output_left"] -= 1
    return view["output_left"] == 0


def _batch(answer: Any, views: Sequence[View]) -> dict[str, int]:
    """The plan as a dict, if it is one at all."""
    most = {view["name"]: view["prompt_left"] or 1 for view in views}
    is_pairs = isinstance(answer, list) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in answer
    )
    if not is_pairs or not all(isinstance(name, str) for name, _ in answer):
        raise Mistake(
            "a list of [name, tokens]", answer, "What should plan(...) return?"
        )
    names = [name for name, _ in answer]
    for name, tokens in answer:
        if name not in most or names.count(name) > 1:
            raise Mistake(
                f"names among {list(most)}, each one once",
                answer,
                "Who is here, and how often can a request be in one batch?",
            )
        if not is_whole(tokens, 1, most[name] + 1):
            raise Mistake(
                f"1 to {most[name]} tokens for {name!r}: {_told(views)}",
                answer,
                "How many tokens does a request take that has read its prompt?",
            )
    return dict(answer)


def _told(views: Sequence[View]) -> str:
    parts = [
        f"{v['name']} has {v['prompt_left']} + {v['output_left']} left" for v in views
    ]
    return ", ".join(parts[:6]) + (" ..." if len(parts) > 6 else "")
