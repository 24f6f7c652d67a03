"""Sharing blocks of equal beginnings: only what is settled, never the last position."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cbasync.devices import ThreadsDevice
from cbasync.kv_cache import BlockManager, BlockTable, LeasedPool, blocks_for
from cbasync.sampling import SamplingParams
from tests.conftest import Machine
from tests.oracle import Job, Result, expected
from tests.test_cases import MODES, Mode, Trial, first_seen_at, job, up

SIZE = 4


def filled(manager: BlockManager, tokens: list[int], until: int = -1) -> BlockTable:
    """A table that holds these tokens, its full blocks published."""
    table = BlockTable()
    manager.adopt(table, manager.find(tokens))
    manager.grow(table, len(tokens))
    for index in range(len(table.chain), len(tokens) // SIZE):
        part = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        manager.publish(table, index, part)
    return table


def manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, SIZE)


# ------------------------------------------------------------------ what is found


def test_nothing_is_found_before_it_is_published() -> None:
    m = manager()
    m.grow(BlockTable(), 9)
    assert m.find(list(range(9))) == []


def test_the_longest_beginning_is_found() -> None:
    m = manager()
    tokens = list(range(12))
    table = filled(m, tokens)
    assert m.find([*tokens, 99]) == table.block_ids
    assert m.find([*tokens[:8], 99, 99, 99, 99, 99]) == table.block_ids[:2]
    assert m.find([99, *tokens]) == []


@pytest.mark.parametrize("length", range(1, 13))
def test_the_last_token_is_never_found(length: int) -> None:
    m = manager()
    table = filled(m, list(range(12)))
    found = m.find(list(range(length)))
    assert found == table.block_ids[: (length - 1) // SIZE]


def test_equal_tokens_after_another_beginning_are_not_the_same() -> None:
    m = manager()
    filled(m, [1, 1, 1, 1, 5, 6, 7, 8])
    second = filled(m, [2, 2, 2, 2, 5, 6, 7, 8])
    assert m.find([2, 2, 2, 2, 5, 6, 7, 8, 0]) == second.block_ids
    assert m.find([5, 6, 7, 8, 0]) == []


def test_the_same_block_computed_twice_is_published_once() -> None:
    m = manager()
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        m.grow(table, 8)
    for index, part in enumerate([(1, 2, 3, 4), (5, 6, 7, 8)]):
        for table in tables:
            m.publish(table, index, part)
    first, second = tables
    assert first.chain == second.chain
    assert m.find([1, 2, 3, 4, 5, 6, 7, 8, 0]) == first.block_ids
    m.release(second, -1)
    assert m.find([1, 2, 3, 4, 5, 6, 7, 8, 0]) == first.block_ids


def test_blocks_are_published_in_order() -> None:
    m = manager()
    table = BlockTable()
    m.grow(table, 8)
    with pytest.raises(AssertionError, match="in order"):
        m.publish(table, 1, (5, 6, 7, 8))


# ------------------------------------------------------------------ who owns what


def test_a_shared_block_comes_back_with_its_last_owner() -> None:
    m = manager()
    first = filled(m, [1, 2, 3, 4, 5])
    second = filled(m, [1, 2, 3, 4, 6])
    shared = first.block_ids[0]
    assert second.block_ids[0] == shared
    assert m.pool.num_held == 3
    m.release(first, -1)
    assert not m.pool.is_free(shared)
    m.release(second, -1)
    assert m.pool.is_free(shared)
    assert m.pool.num_free == m.pool.size


def test_a_free_block_is_found_until_somebody_takes_it() -> None:
    m = manager(num_blocks=2)
    table = filled(m, [1, 2, 3, 4])
    m.release(table, -1)
    assert len(m.find([1, 2, 3, 4, 5])) == 1
    m.grow(BlockTable(), 8)
    assert m.find([1, 2, 3, 4, 5]) == []


def test_a_leased_block_can_be_found_and_has_an_owner_again() -> None:
    """What it holds is settled; the batch in flight writes elsewhere."""
    m = manager()
    table = filled(m, [1, 2, 3, 4, 5])
    m.release(table, until_batch=7)
    assert (m.pool.num_leased, m.pool.num_held) == (2, 0)
    again = filled(m, [1, 2, 3, 4, 6])
    assert (m.pool.num_leased, m.pool.num_held) == (1, 2)
    m.pool.collected(7)  # the end of the former lease takes nothing away
    assert (m.pool.num_leased, m.pool.num_held) == (0, 2)
    m.release(again, until_batch=9)
    m.pool.collected(8)
    assert m.pool.num_leased == 2
    m.pool.collected(9)
    assert m.pool.num_free == m.pool.size


def test_a_block_with_an_owner_cannot_be_taken_again() -> None:
    pool = LeasedPool(2)
    (item,) = pool.take(1)
    with pytest.raises(RuntimeError, match=f"item {item} has an owner already"):
        pool.revive(item)


def test_room_for_admission_does_not_count_what_it_would_adopt() -> None:
    m = manager(num_blocks=4)
    table = filled(m, [1, 2, 3, 4, 5, 6, 7, 8])
    m.release(table, -1)
    cached = m.find([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (m.pool.num_free, m.num_free_without(cached)) == (4, 2)
    holder = BlockTable()
    m.adopt(holder, cached)
    assert m.num_free_without(cached) == m.pool.num_free == 2


# ------------------------------------------------------------------ who goes first


def taken_in_order(m: BlockManager) -> list[int]:
    return [m.pool.take(1)[0] for _ in range(m.pool.num_free)]


@pytest.mark.parametrize("until", [-1, 3])
def test_what_nobody_can_find_goes_first_and_beginnings_go_last(until: int) -> None:
    """Whether they come back at once or when a batch has been collected."""
    m = manager(num_blocks=6)
    table = filled(m, list(range(13)))  # three published blocks and a part of one
    first, second, third, part = table.block_ids
    m.release(table, until_batch=until)
    m.pool.collected(3)
    order = taken_in_order(m)
    assert order[0] == part
    assert order[-3:] == [third, second, first]


def test_what_was_used_longest_ago_goes_first() -> None:
    m = manager(num_blocks=3)
    tables = [filled(m, [i] * 4) for i in range(3)]
    blocks = [table.block_ids[0] for table in tables]
    for table in tables:
        m.release(table, -1)
    again = filled(m, [0] * 4 + [9])  # used again: the youngest now, and one is taken
    assert again.block_ids == [blocks[0], blocks[1]]
    m.release(again, -1)
    assert m.find([0] * 5) == [blocks[0]]
    assert m.find([2] * 5) == [blocks[2]]
    assert taken_in_order(m) == [blocks[1], blocks[2], blocks[0]]


# ------------------------------------------------------------------ a naive model


class NaiveOwners(RuleBasedStateMachine):
    """Tables as lists, owners counted anew each time, contents written in full."""

    NUM_BLOCKS, BLOCK = 7, 2

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.NUM_BLOCKS, self.BLOCK)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # published: all tokens up to it
        self.lease: dict[int, int] = {}
        self.batch = 0
        self.any_evicted = False

    def owners(self, block: int) -> int:
        return sum(table.block_ids.count(block) for table, _ in self.tables)

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        free = {b for b in range(self.NUM_BLOCKS) if self.manager.pool.is_free(b)}
        for block in self.manager.grow(table, num_tokens):
            assert block in free
            assert block not in self.lease
            self.any_evicted |= self.content.pop(block, None) is not None
            free.discard(block)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def enter(self, tokens: list[int]) -> None:
        found = self.manager.find(tokens)
        assert len(found) * self.BLOCK < len(tokens)
        for count, block in enumerate(found, start=1):
            assert self.content[block] == tuple(tokens[: count * self.BLOCK])
        if not self.any_evicted:
            assert len(found) == self.naive_length(tokens)
        needed = blocks_for(len(tokens), self.BLOCK) - len(found)
        if needed > self.manager.num_free_without(found):
            return
        table = BlockTable()
        self.manager.adopt(table, found)
        for block in found:
            self.lease.pop(block, None)
        self.grow(table, len(tokens))
        self.tables.append((table, tokens))

    def naive_length(self, tokens: list[int]) -> int:
        """Full blocks of these tokens that anybody has published, from the first."""
        known, count = set(self.content.values()), 0
        while (count + 1) * self.BLOCK < len(tokens) and (
            tuple(tokens[: (count + 1) * self.BLOCK]) in known
        ):
            count += 1
        return count

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        index = len(table.chain)
        if (index + 1) * self.BLOCK > len(tokens):
            return
        end = (index + 1) * self.BLOCK
        is_new = self.manager.find([*tokens[:end], 9]) != table.block_ids[: index + 1]
        self.manager.publish(table, index, tuple(tokens[end - self.BLOCK : end]))
        if is_new and table.block_ids[index] in self.manager.find([*tokens[:end], 9]):
            self.content[table.block_ids[index]] = tuple(tokens[:end])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def leave(self, data: st.DataObject, ahead: int) -> None:
        place = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(place)
        blocks = set(table.block_ids)
        until = self.batch - 1 + ahead
        self.manager.release(table, until)
        assert len(table) == 0
        for block in blocks:
            if self.owners(block) == 0 and ahead > 0:
                self.lease[block] = until

    @rule()
    def collect(self) -> None:
        self.manager.pool.collected(self.batch)
        self.lease = {b: t for b, t in self.lease.items() if t != self.batch}
        self.batch += 1

    @invariant()
    def everybody_agrees(self) -> None:
        pool = self.manager.pool
        for block in range(self.NUM_BLOCKS):
            owners = self.owners(block)
            is_free = owners == 0 and block not in self.lease
            assert pool.is_free(block) == is_free
        assert pool.num_leased == len(self.lease)
        assert pool.num_free + pool.num_leased + pool.num_held == pool.size

    def teardown(self) -> None:
        while self.tables:
            table, _ = self.tables.pop()
            self.manager.release(table, -1)
        for _ in range(3):
            self.collect()
        assert self.manager.pool.num_free == self.NUM_BLOCKS


TestNaiveOwners = NaiveOwners.TestCase
TestNaiveOwners.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


# ------------------------------------------------------------------ in the engine


@pytest.fixture(params=MODES, ids=str)
def trial(machine: Machine, request: pytest.FixtureRequest) -> Trial:
    return Trial(machine, request.param)


def most_blocks(trial: Trial, name: str) -> int:
    return max(len(b.blocks.get(name, [])) for b in trial.batches)


def one_after_the_other(trial: Trial, *jobs: Job, **options: Any) -> Result:
    """Each one is submitted when the one before has ended."""
    with trial.engine(**options) as engine:
        requests = []
        for one in jobs:
            requests.append(engine.add_request(one.prompt, one.params))
            engine.run()
    trial.check(engine, list(jobs), requests)
    return Result(requests, engine)


@pytest.mark.parametrize("max_tokens", [1, 4, 5])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_one_prompt_twice_in_one_batch(
    trial: Trial, length: int, max_tokens: int
) -> None:
    """Nothing is settled yet, so nothing is shared; blocks are as many as needed."""
    result = trial.play([job(up(length), max_tokens)] * 2)
    assert trial.batches[0].names == ["request-0", "request-1"]
    assert [r.num_cached_tokens for r in result.requests] == [0, 0]
    for request in result.requests:
        needed = blocks_for(length + max_tokens - 1, SIZE)
        assert most_blocks(trial, request.request_id) == needed


@pytest.mark.parametrize("max_tokens", [1, 4, 5])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_one_prompt_twice_one_after_the_other(
    trial: Trial, length: int, max_tokens: int
) -> None:
    """The second one computes at least its last position, and finds all before."""
    one = job(up(length), max_tokens)
    result = one_after_the_other(trial, one, one)
    cached = (length - 1) // SIZE * SIZE
    assert [r.num_cached_tokens for r in result.requests] == [0, cached]
    (entry,) = [b for b in trial.batches if "request-1" in b.names][:1]
    (occurrence,) = entry.output.occurrences
    assert (occurrence.start, occurrence.length) == (cached, length - cached)
    assert occurrence.length >= 1
    assert entry.output.fresh_blocks == entry.blocks["request-1"][cached // SIZE :]
    needed = blocks_for(length + max_tokens - 1, SIZE)
    assert most_blocks(trial, "request-1") == needed


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16])
def test_block_sizes(trial: Trial, block_size: int) -> None:
    one = job(up(9), 5)
    result = one_after_the_other(trial, one, one, block_size=block_size)
    assert result.requests[1].num_cached_tokens == 8 // block_size * block_size


@pytest.mark.parametrize("arrival", range(6))
def test_the_second_arrives_while_chunks_of_the_first_are_in_flight(
    trial: Trial, arrival: int
) -> None:
    """It finds what is settled by then, and not what is only promised."""
    jobs = [job(up(13), 5), job(up(13), 5, arrival=arrival)]
    result = trial.play(jobs, max_num_batched_tokens=4)
    (entry,) = [b for b in trial.batches if "request-1" in b.names][:1]
    settled = sum(
        o.length
        for b in trial.batches
        for o in b.output.occurrences
        if o.request is result.requests[0]
        and b.output.batch < entry.output.batch - trial.mode.depth
    )
    assert result.requests[1].num_cached_tokens <= settled
    if arrival == 5:
        assert result.requests[1].num_cached_tokens > 0


def test_what_was_generated_is_found_too(trial: Trial) -> None:
    """A conversation: the next prompt begins with the last prompt and its answer."""
    first = job(up(5), 8)
    answer = expected(trial.model, first)
    second = job((*first.prompt, *answer, 3, 3), 4)
    result = one_after_the_other(trial, first, second)
    # 12 positions were computed: the last token was never an input.
    assert result.requests[1].num_cached_tokens == 12


def test_hits_are_counted(trial: Trial) -> None:
    one = job(up(9), 3)
    result = one_after_the_other(trial, one, one, job((9, 9), 2))
    metrics = result.engine.metrics
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (20, 8)
    assert metrics.cache_hit_rate == pytest.approx(0.4)


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_who_needs_every_position_finds_nothing(
    trial: Trial, wish: dict[str, float]
) -> None:
    result = one_after_the_other(trial, job(up(9), 4), job(up(9), 4, **wish))
    assert result.requests[1].num_cached_tokens == 0


def test_switched_off(trial: Trial) -> None:
    one = job(up(9), 3)
    result = one_after_the_other(trial, one, one, prefix_caching=False)
    assert result.requests[1].num_cached_tokens == 0
    assert result.engine.metrics.cache_hit_rate == 0


def test_a_preempted_request_finds_its_own_blocks(trial: Trial) -> None:
    """It does not count as a hit: those tokens were computed for itself."""
    jobs = [job(up(5), 12), job((9, 8, 7, 6, 5, 4, 3, 2, 1), 7)]
    result = trial.play(jobs, num_blocks=6)
    (_, request) = result.requests
    assert request.num_preemptions > 0
    starts = [
        o.start
        for b in trial.batches
        for o in b.output.occurrences
        if o.request is request
    ]
    resumed = [later for former, later in pairwise(starts) if later <= former]
    assert resumed
    assert max(resumed) > 0, "it started from its first token again"
    assert request.num_cached_tokens == 0
    assert result.engine.metrics.cache_hit_rate == 0


@pytest.mark.parametrize("arrival", range(2, 7))
def test_the_same_prompt_comes_while_its_blocks_are_leased(
    trial: Trial, arrival: int
) -> None:
    """The first one has ended, and its discarded rows may still be in flight."""
    prompt = (9, 8, 7, 6, 5)
    answer = expected(trial.model, job(prompt, 4))
    eos = first_seen_at(answer, 2)
    jobs = [job(prompt, 9, stop_token_ids=(eos,)), job(prompt, 6, arrival=arrival)]
    trial.play(jobs, num_blocks=5)


def test_blocks_on_a_lease_are_adopted_at_once() -> None:
    """A hit does not have to wait for the lease: nobody writes to a full block."""
    trial = Trial(Machine("threads"), Mode(1))
    prompt = (9, 8, 7, 6, 5)
    eos = first_seen_at(expected(trial.model, job(prompt, 4)), 2)
    with trial.engine(device=ThreadsDevice()) as engine:
        pool = engine.scheduler.blocks.pool
        params = SamplingParams(max_tokens=9, stop_token_ids=(eos,))
        first = engine.add_request(prompt, params)
        while not first.is_finished:
            engine.step()
        assert pool.num_leased == 2
        second = engine.add_request(prompt, SamplingParams(max_tokens=3))
        engine.step()
        assert second.num_cached_tokens == SIZE
        engine.run()
    jobs = [Job(prompt, params), job(prompt, 3)]
    trial.check(engine, jobs, [first, second])


def test_in_cramped_memory_what_is_evicted_is_computed_again(trial: Trial) -> None:
    shared = up(9)
    jobs = [job((*shared, i), 4, arrival=2 * i) for i in range(3)]
    jobs += [job((i, *up(11)), 4, arrival=2 * i) for i in range(3)]
    jobs += [job((*shared, i), 4, arrival=12 + i) for i in range(3)]
    result = trial.play(jobs, num_blocks=5)
    assert result.engine.metrics.num_cached_tokens > 0
