"""Checks of notebooks 09 and 10."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from cbasync.checks.case import Case, CheckError, check
from cbasync.config import CarryOverFamily, EngineConfig
from cbasync.devices.sim import SimDevice
from cbasync.engine import SyncEngine
from cbasync.mutants import EVEN_COSTS
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams

Rows = Sequence[tuple[str, bool]]
Lengths = Sequence[tuple[str, int]]

# ------------------------------------------------------------------ 09: carry-over


def carry_over(function: Callable[[Rows, Lengths], list[int]]) -> None:
    """09: the array `carry_over` of a batch, from its rows and the ones before it."""
    cases = [
        Case(([], [("A", 1)]), [-1], "Nothing came before: who knows this token?"),
        Case(([("A", True)], [("A", 1)]), [0], "At which place was A's token sampled?"),
        Case(([], [("A", 3)]), [-1, -1, -1], "How many inputs are in this batch?"),
        Case(
            ([("A", False)], [("A", 2)]),
            [-1, -1],
            "Did the batch before sample a token for A?",
        ),
        Case(
            ([("A", True), ("B", True)], [("B", 1)]),
            [1],
            "Did B's token move, now that A has left?",
        ),
        Case(
            ([("A", False), ("B", True)], [("A", 2), ("B", 1)]),
            [-1, -1, 0],
            "How many tokens came out of the batch before, and which one is B's?",
        ),
        Case(
            ([("C", False), ("A", True), ("B", True)], [("C", 3), ("B", 1), ("A", 1)]),
            [-1, -1, -1, 1, 0],
            "Must the rows come in the same order as before?",
        ),
    ]
    check("carry_over", function, cases)


# ------------------------------------------------------------------ 10: the loop


def calls(function: Callable[[int, int], list[str]]) -> None:
    """10: what the host calls, in order, for so many batches at this depth."""
    cases = [
        Case((1, 0), _words("L0 C0"), "What has to be launched, and what collected?"),
        Case((1, 1), _words("L0 C0"), "Nothing is left to launch: who is in flight?"),
        Case((2, 0), _words("L0 C0 L1 C1"), "How many may be in flight at depth 0?"),
        Case((2, 1), _words("L0 L1 C0 C1"), "May the host wait for batch 0 already?"),
        Case(
            (3, 1),
            _words("L0 L1 C0 L2 C1 C2"),
            "How many batches does one turn launch, and how many does it collect?",
        ),
        Case(
            (4, 2),
            _words("L0 L1 L2 C0 L3 C1 C2 C3"),
            "How many are in flight when the host first waits?",
        ),
        Case((2, 3), _words("L0 L1 C0 C1"), "Which batch has been waiting longest?"),
    ]
    check("calls", function, cases)


def _words(short: str) -> list[str]:
    """Calls written short.

    >>> _words("L0 C0")
    ['launch 0', 'collect 0']
    """
    names = {"L": "launch", "C": "collect"}
    return [f"{names[call[0]]} {call[1:]}" for call in short.split()]


# ------------------------------------------------------------------ 10: the engine

FAMILIES: tuple[CarryOverFamily, ...] = ("slot", "row")
MOST_STEPS = 5_000  # of one workload; each of them is over after some hundred


@dataclass(frozen=True)
class Workload:
    """Requests, when they come, and the engine they meet."""

    config: EngineConfig
    jobs: tuple[tuple[int, tuple[int, ...], SamplingParams], ...]  # step of arrival

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"depth {config.depth}, carry-over by {config.carry_over}, at most "
            f"{config.max_num_seqs} rows and {config.max_num_batched_tokens} tokens, "
            f"{config.num_blocks} blocks of {config.block_size}"
        ]
        lines += [
            f"step {arrival}: {list(prompt)}, {params.max_tokens} tokens, ends at "
            f"{list(params.stop_token_ids)}"
            for arrival, prompt, params in self.jobs
        ]
        return "\n  ".join(lines)


def random_workload(number: int) -> Workload:
    """The workload of this number, always the same; higher numbers are larger.

    >>> [len(random_workload(number).jobs) for number in (0, 50, 99)]
    [1, 4, 6]
    """
    random = Random(number)
    block_size = random.choice([1, 2, 4, 8])
    longest = -(-24 // block_size)  # blocks of the longest request
    config = EngineConfig(
        max_num_seqs=random.randint(1, 5),
        max_num_batched_tokens=random.randint(2, 16),
        block_size=block_size,
        num_blocks=longest + random.randint(0, longest),
        max_model_len=32,
        depth=random.randint(1, 3),
        carry_over=random.choice(FAMILIES),
    )
    jobs = [
        (
            random.randint(0, 8),
            tuple(random.randrange(17) for _ in range(random.randint(1, 12))),
            SamplingParams(
                max_tokens=random.randint(1, 12),
                stop_token_ids=random.sample(range(17), random.randint(0, 2)),
            ),
        )
        for _ in range(1 + 6 * number // 100)
    ]
    return Workload(config, tuple(sorted(jobs, key=lambda job: job[0])))


def async_engine(kind: Callable[..., Any], workloads: int = 100) -> None:
    """10: an engine gives the tokens of the one that takes turns, on random workloads.

    `kind(runner, config, device)` makes it; it has `add_request`, `step` and `has_work`
    as the package's engines have. It runs on a virtual device that lets everything
    happen in the most harmful order that the events allow.
    """
    discarded = 0
    for number in range(workloads):
        workload = random_workload(number)
        right, _ = _play(SyncEngine, workload)
        try:
            got, late = _play(kind, workload)
        except NotImplementedError:
            raise CheckError("async_engine: nothing written yet") from None
        except Exception as error:
            error.add_note(f"async_engine, workload {number}\n  {workload}")
            raise
        discarded += late
        for row, (expected, tokens) in enumerate(zip(right, got, strict=True)):
            if tokens != expected:
                raise CheckError(
                    f"async_engine, workload {number}\n  {workload}\n"
                    f"  request {row}: expected {expected}\n"
                    f"  {' ' * len(str(row))}            got {tokens}\n"
                    "  What was read before it had been written, or written while it "
                    "was still being read?"
                )
    print(f"async_engine: right, {workloads} workloads, {discarded} rows discarded")


def _play(kind: Callable[..., Any], workload: Workload) -> tuple[list[list[int]], int]:
    """Tokens of every request, and how many were discarded."""
    device = SimDevice(costs=EVEN_COSTS, order="worst")
    engine = kind(ScriptedRunner(vocab_size=17), workload.config, device)
    coming, requests = deque(workload.jobs), []
    for step in range(MOST_STEPS):
        while coming and coming[0][0] <= step:
            _, prompt, params = coming.popleft()
            requests.append(engine.add_request(list(prompt), params))
        if not (coming or engine.has_work):
            tokens = [list(request.output_token_ids) for request in requests]
            return tokens, int(engine.scheduler.discarded_tokens)
        if engine.has_work:
            engine.step()
    raise CheckError(
        f"async_engine: not over after {MOST_STEPS} steps\n  {workload}\n"
        "  Who collects a batch when nothing is left to launch?"
    )
