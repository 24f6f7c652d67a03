"""Checks of a block manager that shares: a cache is kept beside it, and read back.

The manager under test has five methods; `Manager` says what they take and give. Each
check here writes what the manager allows into a cache of its own, token by token, and
looks whether every request finds its own tokens there, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

from cbasync.checks.block_cache import Cache, blocks_told
from cbasync.checks.workload import Mistake, generator, judge
from cbasync.kv_cache import blocks_for

Op = tuple[Any, ...]
"""`("admit", name, tokens)`, `("append", name, token)`, `("fork", name, child)` or
`("release", name)`; an op on a name that is not there is skipped."""

BLOCK_SIZE = 4
MANY_BLOCKS, SOME_BLOCKS, FEW_BLOCKS, HIT_BLOCKS = 64, 16, 8, 24
NUM_CONVERSATIONS = 8
"""One alone is too short to tell a good choice of blocks from a fair one."""
HIT_BARS = (0.533, 0.596)
"""Of the visible conversations, seed 0: as `hit_bars` measures the reference."""


class Manager(Protocol):
    """What is tested: names and numbers in, names and numbers out."""

    def admit(self, name: str, tokens: list[int]) -> Any:
        """A new request: `{"table": blocks, "known": tokens}`, or None: no room."""

    def append(self, name: str, token: int) -> Any:
        """One token more: `{"table": blocks, "copy": [from, to] or []}`, or None."""

    def fork(self, name: str, child: str) -> Any:
        """The block table of a new request with the same tokens."""

    def release(self, name: str) -> Any:
        """The request is over."""

    def num_free(self) -> Any:
        """Blocks that no request has."""


Make = Callable[[int, int], Manager]
"""Number of blocks, tokens of a block: a new manager."""


# ------------------------------------------------------------------ a run


def play(
    make: Make,
    ops: Sequence[Op],
    num_blocks: int,
    *,
    shares: bool = False,
    counts: bool = False,
) -> Cache:
    """Let a new manager go through some ops, checking every answer.

    `shares`: a beginning that somebody has must be found. `counts`: `num_free` must be
    right after every op, and all blocks free when all requests are over.
    """
    manager, cache = make(num_blocks, BLOCK_SIZE), Cache(num_blocks, BLOCK_SIZE)
    for op in ops:
        _play_op(manager, cache, op, shares)
        if counts:
            _check_free(manager, cache)
    if counts:
        for name in list(cache.tables):
            _play_op(manager, cache, ("release", name), shares)
        _check_free(manager, cache)
    return cache


def _play_op(manager: Manager, cache: Cache, op: Op, shares: bool) -> None:
    kind, name = op[:2]
    if (name in cache.tables) == (kind == "admit"):
        return  # a name that is taken, or one that is not there
    if kind == "admit":
        _admit(manager, cache, name, list(op[2]), shares)
    elif kind == "append":
        answer = manager.append(name, op[2])
        if answer is not None:
            cache.appended(name, op[2], answer)
        elif not _append_needs_block(cache, name) or cache.num_free:
            _refused(op, 1, cache.num_free)
    elif kind == "fork" and op[2] not in cache.tables:
        cache.forked(name, op[2], manager.fork(name, op[2]))
    elif kind == "release":
        manager.release(name)
        cache.released(name)


def _admit(
    manager: Manager, cache: Cache, name: str, tokens: list[int], shares: bool
) -> None:
    owned = cache.owned_beginning(tokens) if shares else 0
    needed = blocks_for(len(tokens), cache.block_size) - owned
    answer = manager.admit(name, list(tokens))
    if answer is None:
        if needed <= cache.num_free:
            _refused(("admit", name, tokens), needed, cache.num_free)
        return
    cache.admitted(name, tokens, answer)
    if answer["known"] < owned * cache.block_size:
        raise Mistake(
            f"{owned * cache.block_size} known tokens: other requests have them",
            answer,
            "Which full blocks begin with the same tokens, and who has them now?",
        )


def _append_needs_block(cache: Cache, name: str) -> bool:
    is_full = len(cache.tokens[name]) % cache.block_size == 0
    return is_full or cache.owners(cache.tables[name][-1]) != [name]


def _refused(op: Op, needed: int, free: int) -> None:
    raise Mistake(
        f"room for {_call(op)}: it needs {blocks_told(needed)} at most, "
        f"{free} {'is' if free == 1 else 'are'} free",
        None,
        "Which blocks does it not have to take, and which ones has nobody?",
    )


def _check_free(manager: Manager, cache: Cache) -> None:
    free = manager.num_free()
    if type(free) is not int or free != cache.num_free:
        raise Mistake(
            f"num_free() is {cache.num_free} of {cache.num_blocks}"
            + ("" if cache.tables else ": all requests are over"),
            free,
            "When a block has several owners, after which of them is it free?",
        )


def _call(op: Op) -> str:
    return f"{op[0]}({', '.join(map(repr, op[1:]))})"


def _show(num_blocks: int) -> Callable[[Sequence[Op]], str]:
    head = f"{num_blocks} blocks of {BLOCK_SIZE} tokens"
    return lambda ops: "\n".join([head, *map(_call, ops)])


# ------------------------------------------------------------------ workloads


def _workloads(seed: int, what: str, kinds: str, count: int = 40) -> Iterator[list[Op]]:
    """Ops at random, few and then many; `kinds` holds a letter for each sort.

    `d` admits prompts that differ, `s` prompts that begin alike, `b` one that begins
    with all that another request has by then; `a` appends, `f` forks, `r` releases.
    Appended tokens are all different.
    """
    for number in range(count):
        random = generator("block manager", what, seed, number)
        tokens: dict[str, list[int]] = {}
        ops: list[Op] = []
        for step in range(2 + number):
            kind = random.choice(kinds) if step else kinds[0]
            old, new = random.choice([*tokens] or ["r0"]), f"r{len(tokens)}"
            fresh = 1000 + 40 * step
            if kind in "dsb":
                tokens[new] = _prompt(random, kind, fresh, tokens.get(old, []))
                ops.append(("admit", new, list(tokens[new])))
            elif kind == "a":
                more = [fresh + i for i in range(random.randint(1, 5))]
                tokens[old] += more
                ops += [("append", old, token) for token in more]
            elif kind == "f":
                tokens[new] = list(tokens[old])
                ops.append(("fork", old, new))
            else:
                ops.append(("release", old))
        yield ops


def _prompt(random: Random, kind: str, fresh: int, old: list[int]) -> list[int]:
    """A prompt; never full blocks only, so that no block is computed twice."""
    own = [fresh + 20 + i for i in range(random.randint(1, 9))]
    if kind == "d":
        return own
    stem, branch = random.randint(0, 1), random.randint(0, 2)
    shared = [10 * stem + i for i in range(BLOCK_SIZE)]
    shared += [100 + 10 * branch + i for i in range(BLOCK_SIZE)]
    shared = shared[: random.randint(0, len(shared))] if kind == "s" else old
    prompt = shared + own
    return prompt[:-1] if len(prompt) % BLOCK_SIZE == 0 else prompt


REFUSED = "refused"
"""The request of `_returns` that finds no room."""


def _returns(seed: int, count: int = 20) -> Iterator[list[Op]]:
    """Requests are released, one is refused, and then a released one comes back.

    No block is taken in between, so whatever a manager gives away first, all of it
    is still there. Prompts are never full blocks only, as in `_prompt`.
    """
    for number in range(count):
        random = generator("block manager", "returns", seed, number)
        prompts = {
            f"r{i}": [1000 * i + n for n in range(random.randint(5, 7))]
            for i in range(random.randint(1, 2 + number // 10))
        }
        ops: list[Op] = [("admit", name, tokens) for name, tokens in prompts.items()]
        gone = random.sample([*prompts], random.randint(1, len(prompts)))
        ops += [("release", name) for name in gone]
        # With nothing in common, or with all of a request: one block more than is free.
        free = FEW_BLOCKS - 2 * (len(prompts) - len(gone))
        fresh = [9000 + n for n in range(BLOCK_SIZE * free + 1)]
        begins = random.choice([[], prompts[gone[0]]])
        ops += [("admit", REFUSED, begins + fresh)]
        ops += [("admit", "back", list(prompts[gone[-1]]))]
        yield ops


# ------------------------------------------------------------------ the checks


def tables(make: Make, seed: int = 0) -> None:
    """Prompts that share nothing: every table has the blocks that it needs."""
    loads = [[("admit", "r0", list(range(n)))] for n in range(1, 14)]
    loads += _workloads(seed, "tables", "ddr")
    _judge("tables", make, loads, MANY_BLOCKS)


def contents(make: Make, seed: int = 0) -> None:
    """Prompts that begin alike, and few blocks: everybody finds his own tokens."""
    loads = _workloads(seed, "contents", "ssar", count=60)
    _judge("contents", make, loads, SOME_BLOCKS)


def beginnings(make: Make, seed: int = 0) -> None:
    """What a running request has in full blocks is found by the next one."""
    loads = _workloads(seed, "beginnings", "ssbaar")
    _judge("beginnings", make, loads, MANY_BLOCKS, shares=True)


def copies(make: Make, seed: int = 0) -> None:
    """Forks share all they have, and copy a block before they write to it."""
    loads = _workloads(seed, "copies", "dfaabar")
    _judge("copies", make, loads, MANY_BLOCKS)


def refusals(make: Make, seed: int = 0) -> None:
    """Few blocks: who fits is let in, who does not changes nothing."""
    loads = [*_workloads(seed, "refusals", "ssfaar"), *_returns(seed)]

    def run(ops: Sequence[Op]) -> None:
        cache = play(make, ops, FEW_BLOCKS, shares=True)
        others = [op for op in ops if op[1] != REFUSED]
        if len(others) < len(ops) and REFUSED not in cache.tables:
            alone = play(make, others, FEW_BLOCKS, shares=True)
            if cache.num_hits < alone.num_hits:
                raise Mistake(
                    f"{alone.num_hits} known tokens, as without {REFUSED!r}",
                    f"{cache.num_hits} known tokens",
                    "What did a request change before it was refused?",
                )

    judge("refusals", loads, run, _show(FEW_BLOCKS))


def all_free(make: Make, seed: int = 0) -> None:
    """Free blocks are counted, and at the end all of them are free."""
    loads = _workloads(seed, "all free", "sdfaarr")
    _judge("all free", make, loads, MANY_BLOCKS, counts=True)


def _judge(
    name: str,
    make: Make,
    loads: Any,
    num_blocks: int,
    *,
    shares: bool = False,
    counts: bool = False,
) -> None:
    def run(ops: Sequence[Op]) -> None:
        play(make, ops, num_blocks, shares=shares, counts=counts)

    judge(name, loads, run, _show(num_blocks))


# ------------------------------------------------------------------ hits


class Hits(NamedTuple):
    """Tokens of prompts: all, those that were known, those that had an owner."""

    num_tokens: int
    num_hits: int
    num_owned: int

    @property
    def rate(self) -> float:
        """The share of the prompts' tokens that did not have to be computed."""
        return self.num_hits / self.num_tokens


def conversations(seed: int = 0, number: int = 0, count: int = 200) -> list[Op]:
    """A busy chat: a few openings, liked unequally, and answers that are sent back.

    Four requests run at a time. Now and then one comes back: its prompt is all that it
    was, and a few tokens more. Another `number` is another chat of the same seed.
    """
    random = generator("conversations", seed, number)
    openings = [[1000 * n + i for i in range(4 * (2 + n % 3))] for n in range(8)]
    ops: list[Op] = []
    past: list[list[int]] = []
    for request in range(count):
        fresh = 100_000 + 100 * request
        if past and random.random() < 0.35:
            prompt = list(past[-random.randint(1, min(6, len(past)))])
        else:
            liked = min(int(random.expovariate(0.45)), len(openings) - 1)
            prompt = list(openings[liked])
        prompt = prompt[:32] + [fresh + i for i in range(random.randint(1, 6))]
        answer = [fresh + 50 + i for i in range(random.randint(1, 6))]
        ops.append(("admit", f"r{request}", prompt))
        ops += [("append", f"r{request}", token) for token in answer]
        past.append(prompt + answer)
        ops.append(("release", f"r{request - 3}"))
    return ops


def count_hits(make: Make, seed: int = 0) -> Hits:
    """How much is found in the conversations of a seed, taken together."""
    hits = Hits(0, 0, 0)
    for number in range(NUM_CONVERSATIONS):
        try:
            cache = play(make, conversations(seed, number), HIT_BLOCKS)
        except Mistake as mistake:
            given = f"conversations({seed}, {number}) on {HIT_BLOCKS} blocks"
            raise mistake.told("hit rate", given) from None
        hits = Hits(
            hits.num_tokens + cache.num_tokens,
            hits.num_hits + cache.num_hits,
            hits.num_owned + cache.num_owned,
        )
    return hits


def hit_bars(make: Make, seed: int = 0) -> tuple[float, float]:
    """What to ask for, if this manager is the model: half and 0.9 of its way.

    The way begins at the hit rate of a manager that finds what running requests have,
    and nothing else.
    """
    hits = count_hits(make, seed)
    least, most = (n / hits.num_tokens for n in (hits.num_owned, hits.num_hits))
    half, nearly = (least + part * (most - least) for part in (0.5, 0.9))
    return round(half, 3), round(nearly, 3)


def hit_rate(make: Make, at_least: float, seed: int = 0) -> None:
    """Few blocks and many conversations: enough of what was written is found again."""
    try:
        hits = count_hits(make, seed)
    except NotImplementedError:
        raise AssertionError("hit rate: nothing written yet") from None
    rate = hits.rate
    if rate < at_least:
        given = f"{NUM_CONVERSATIONS} chats of seed {seed}, {HIT_BLOCKS} blocks"
        raise Mistake(
            f"a hit rate of at least {at_least:.3f}",
            f"{rate:.3f}",
            "Which block do you give away first: what will nobody ask for again?",
        ).told("hit rate", given)
    print(f"hit rate: {rate:.3f}, at least {at_least:.3f} is asked for")
