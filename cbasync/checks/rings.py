"""Checks of a carry-over for a ring of three slots, two batches in flight.

The class under test says, for every input of a batch, in which slot and at which rank
the device finds its token; `Carry` says what its methods take and give. The checks keep
the tokens of every request as if each had been served alone, and look whether the
inputs that come of it are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cbasync.checks.ring import ALL, NUM_SLOTS, Make, Resolve, Ring, Step, show
from cbasync.checks.workload import Mistake, generator, judge

# ------------------------------------------------------------------ workloads


def _workloads(
    seed: int,
    what: str,
    *,
    rests: tuple[int, ...] = (0,),
    chunks: bool = False,
    again: float = 0.0,
    catches_up: float = 0.0,
) -> Iterator[list[Step]]:
    """Batches at random, few and then many.

    `rests`: how many batches a request may sit out. `chunks`: prompts come in pieces.
    `again`, `catches_up`: how often a request begins anew, and the host collects all.
    """
    for number in range(30):
        random = generator("ring", what, seed, number)
        names = [chr(97 + n) for n in range(1 + number // 6)]
        prompts = {name: random.randint(1, 6) for name in names}
        rest = dict.fromkeys(names, 0)
        steps: list[Step] = []
        for batch in range(2 + number // 2):
            if random.random() < catches_up:
                steps.append(Step(batch))
            random.shuffle(names)
            for name in names:
                rest[name] -= 1
                if rest[name] < 0:
                    rest[name] = random.choice(rests)
                    most = random.randint(1, 3) if chunks else ALL
                    anew = random.random() < again
                    steps.append(Step(batch, name, prompts[name], most, anew))
        yield steps


# ------------------------------------------------------------------ the checks


def known(make: Make, seed: int = 0) -> None:
    """Prompts: the host knows every token, and every input has an entry."""
    loads = [
        [
            Step(0, name, prompt, ALL)
            for name, prompt in zip("abc", lengths, strict=False)
        ]
        for lengths in ((1,), (4,), (2, 3), (3, 1, 2))
    ]
    _judge("known", make, loads)


def one_back(make: Make, seed: int = 0) -> None:
    """Everybody is in every batch: all tokens come from the batch before."""
    _judge("one back", make, _workloads(seed, "one"))


def two_back(make: Make, seed: int = 0) -> None:
    """Requests sit a batch out, now and then."""
    _judge("two back", make, _workloads(seed, "two", rests=(0, 1, 1)))


def collected(make: Make, seed: int = 0) -> None:
    """Requests sit out for long, or the host catches up: it knows their tokens."""
    loads = _workloads(seed, "collected", rests=(0, 2, 3, 4), catches_up=0.2)
    _judge("collected", make, loads)


def ranks(make: Make, seed: int = 0) -> None:
    """Pieces of prompts are in the batch, and nothing is sampled of them."""
    _judge("ranks", make, _workloads(seed, "ranks", chunks=True))


def again(make: Make, seed: int = 0) -> None:
    """A request begins anew while its last tokens are in flight."""
    _judge("again", make, _workloads(seed, "again", again=0.3))


def whole(make: Make, resolve: Resolve, seed: int = 0) -> None:
    """Everything at once: the model reads what it would read of each one alone."""
    loads = _workloads(
        seed, "whole", rests=(0, 0, 1, 3), chunks=True, again=0.1, catches_up=0.1
    )
    _judge("whole", make, loads, resolve)


def resolved(resolve: Resolve, seed: int = 0) -> None:
    """The device's part alone: placeholders are replaced, and nothing else is."""

    def run(entries: Sequence[tuple[int, int, int]]) -> None:
        ids, slots, ranks = ([entry[n] for entry in entries] for n in range(3))
        sampled = [[5, 0, 7, 1], [4, 6], [9, 8, 3]]
        want = [i if s < 0 else sampled[s][r] for i, s, r in entries]
        got = resolve(list(ids), list(slots), list(ranks), sampled)
        if got != want:
            raise Mistake(
                f"{want}, with sampled = {sampled}",
                got,
                "Is 0 a placeholder, a token, or both? What does slot -1 say?",
            )

    lengths, loads = (4, 2, 3), []
    for number in range(30):
        random = generator("resolve", seed, number)
        entries = []
        for _ in range(number // 2):
            slot = random.randint(-1, NUM_SLOTS - 1)
            rank = random.randrange(lengths[slot]) if slot >= 0 else -1
            entries.append((random.choice((0, 0, 2, 5)), slot, rank))
        loads.append(entries)

    def told(entries: Sequence[tuple[int, int, int]]) -> str:
        names = ("input_ids", "slot", "rank")
        lists = {name: [e[n] for e in entries] for n, name in enumerate(names)}
        return "\n".join(f"{name} = {values}" for name, values in lists.items())

    judge("resolve", loads, run, told)


def _judge(name: str, make: Make, loads: Any, resolve: Resolve | None = None) -> None:
    def run(steps: Sequence[Step]) -> None:
        Ring(make(NUM_SLOTS), resolve).run(steps)

    judge(name, loads, run, show)
