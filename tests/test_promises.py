"""The scheduler's books: budgets, promises, leases, what a batch reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cbasync.carry_over import RowCarryOver, SlotCarryOver, carry, make_carry_over
from cbasync.config import EngineConfig
from cbasync.devices import SimDevice
from cbasync.io_slot import IOSlot, SlotLayout
from cbasync.request import Request, RequestStatus
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Occurrence, Scheduler, SchedulerOutput


def scheduler(**changes: object) -> Scheduler:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 64,
    }
    return Scheduler(EngineConfig(**(values | changes)))  # type: ignore[arg-type]


def request(
    name: str,
    prompt: int,
    max_tokens: int = 8,
    *,
    arrival: int = 0,
    stop: frozenset[int] = frozenset(),
    first: int = 1,
) -> Request:
    """A prompt `first, first + 1, ...` of the given length."""
    ids = list(range(first, first + prompt))
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, ids, params, stop, arrival=arrival)


def next_batch(s: Scheduler) -> SchedulerOutput:
    output = s.schedule()
    assert output is not None
    return output


def parts(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """What each request computes: start and length."""
    return {o.request.request_id: (o.start, o.length) for o in output.occurrences}


def turns(s: Scheduler) -> Iterator[SchedulerOutput]:
    """Batches, each collected before the next is scheduled."""
    while (output := s.schedule()) is not None:
        s.update(output, [0] * output.num_sampled)
        yield output


# ------------------------------------------------------------------ a batch


def test_a_new_scheduler_has_done_nothing() -> None:
    s = scheduler()
    assert s.num_launched == s.discarded_tokens == s.num_preemptions == 0
    assert s.num_prompt_tokens == s.num_cached_tokens == 0
    assert not s.has_work
    assert s.schedule() is None
    assert s.num_launched == 0


def test_an_output_says_how_much_it_holds() -> None:
    s = scheduler(max_num_batched_tokens=7)
    for name, prompt in (("a", 3), ("b", 6)):
        s.add(request(name, prompt))
    output = next_batch(s)
    assert (output.batch, output.num_tokens, output.num_sampled) == (0, 7, 1)
    assert [r.request_id for r in output.admitted] == ["a", "b"]
    output = next_batch(s)
    assert (output.batch, output.num_tokens, output.num_sampled) == (1, 3, 2)
    assert output.admitted == []
    assert s.num_launched == 2
    assert SchedulerOutput(batch=0).num_tokens == SchedulerOutput(batch=0).num_sampled


def test_blocks_are_named_by_row_and_place() -> None:
    s = scheduler()
    s.add(request("a", 6))
    s.add(request("b", 3))
    output = next_batch(s)
    assert output.new_blocks == [(0, 0, 0), (0, 1, 1), (1, 0, 2)]
    assert output.fresh_blocks == [0, 1, 2]
    assert next_batch(s).new_blocks == []
    assert next_batch(s).new_blocks == [(1, 1, 3)]  # b's fifth token
    assert next_batch(s).new_blocks == [(0, 2, 4)]  # a's ninth


def test_the_blocks_that_a_batch_reads_and_writes() -> None:
    s = scheduler(max_num_batched_tokens=6)
    s.add(request("a", 13))
    whole = [0, 1, 2, 3]  # for the whole prompt, at once
    written = [(0, 2), (1, 3), (3, 4)]  # positions 0-5, 6-11, 12
    for start, stop in written:
        output = next_batch(s)
        assert output.blocks_read() == whole
        assert output.blocks_written(4) == whole[start:stop]


def test_a_decode_writes_the_block_of_its_position() -> None:
    s = scheduler()
    s.add(request("a", 7))
    next_batch(s)
    assert next_batch(s).blocks_written(4) == [1]  # position 7
    assert next_batch(s).blocks_written(4) == [2]  # position 8


def test_a_budget_of_one_token_serves_one_request_after_the_other() -> None:
    s = scheduler(max_num_batched_tokens=1)
    s.add(request("a", 2, max_tokens=2))
    s.add(request("b", 1, max_tokens=1, arrival=1))
    assert [parts(output) for output in turns(s)] == [
        {"a": (0, 1)},
        {"a": (1, 1)},
        {"a": (2, 1)},
        {"b": (0, 1)},
    ]


def test_the_budget_is_shared_by_those_who_run_and_those_who_enter() -> None:
    s = scheduler(max_num_batched_tokens=5)
    s.add(request("a", 3))
    assert parts(next_batch(s)) == {"a": (0, 3)}
    s.add(request("b", 9, arrival=1))
    assert parts(next_batch(s)) == {"a": (3, 1), "b": (0, 4)}
    s.add(request("c", 2, arrival=2))
    assert parts(next_batch(s)) == {"a": (4, 1), "b": (4, 4)}
    assert parts(next_batch(s)) == {"a": (5, 1), "b": (8, 1), "c": (0, 2)}


def test_who_runs_has_no_part_in_a_batch_when_the_budget_is_used_up() -> None:
    """An urgent prompt goes first and takes it all; the other one sits out."""
    config = EngineConfig(max_num_batched_tokens=4, block_size=4, num_blocks=16)
    s = Scheduler(config, "priority")
    patient = request("patient", 1)
    urgent = request("urgent", 12, arrival=1)
    urgent.priority = -1
    s.add(patient)
    next_batch(s)
    s.add(urgent)
    assert parts(next_batch(s)) == {"patient": (1, 1), "urgent": (0, 3)}
    assert parts(next_batch(s)) == {"urgent": (3, 4)}
    assert (patient.last_batch, patient.num_computed_tokens) == (1, 2)


def test_rows_run_out_only_when_every_batch_in_flight_holds_some() -> None:
    s = scheduler(max_num_seqs=1, depth=1)
    outputs = []
    for arrival, name in enumerate("abc"):
        s.add(request(name, 1, max_tokens=3, arrival=arrival))
    outputs.append(next_batch(s))
    s.abort(s.running[0])
    outputs.append(next_batch(s))
    assert [r.row for r in outputs[1].admitted] == [1]  # row 0 is on a lease
    s.abort(s.running[0])
    assert s.schedule() is None  # both rows are: c has to wait
    s.update(outputs[0], [0])
    assert [r.row for r in next_batch(s).admitted] == [0]


# ------------------------------------------------------------------ promises


def test_what_a_request_has_been_promised() -> None:
    s = scheduler()
    one = request("a", 5, max_tokens=3)
    s.add(one)
    assert (one.num_tokens, one.num_pending_tokens, one.last_batch) == (5, 0, -1)
    first = next_batch(s)
    assert one.status is RequestStatus.RUNNING
    assert (one.num_computed_tokens, one.num_pending_tokens) == (5, 1)
    assert (one.last_batch, one.last_rank) == (0, 0)
    second = next_batch(s)
    assert (one.num_computed_tokens, one.num_pending_tokens) == (6, 2)
    assert [o.carry for o in second.occurrences] == [0]
    s.update(first, [9])
    assert (one.num_tokens, one.num_pending_tokens) == (6, 1)
    s.update(second, [8])
    third = next_batch(s)
    assert third.occurrences[0].carry == -1  # the host knows the token now
    assert s.schedule() is None  # the last one is promised: no further step
    assert [o.request for o in s.update(third, [7])] == [one]
    assert one.output_token_ids == [9, 8, 7]
    assert one.finish_reason == "length"
    assert s.take_finished() == [one]
    assert s.take_finished() == []
    assert not s.has_work


def test_a_chunk_in_flight_carries_nothing_and_promises_nothing() -> None:
    s = scheduler(max_num_batched_tokens=4)
    one = request("a", 10)
    s.add(one)
    for start in (0, 4):
        (part,) = next_batch(s).occurrences
        assert (part.start, part.rank, part.carry) == (start, -1, -1)
        assert one.num_pending_tokens == 0
    (part,) = next_batch(s).occurrences
    assert (part.start, part.length, part.rank, part.carry) == (8, 2, 0, -1)
    assert one.num_pending_tokens == 1


def test_ranks_and_carries_follow_the_batch_before() -> None:
    """The request that ends leaves a gap; ranks close it, carries point at the old."""
    s = scheduler()
    for arrival, (name, tokens) in enumerate([("a", 1), ("b", 4), ("c", 4)]):
        s.add(request(name, 2, tokens, arrival=arrival))
    assert [o.rank for o in next_batch(s).occurrences] == [0, 1, 2]
    second = next_batch(s)
    assert [(o.rank, o.carry) for o in second.occurrences] == [(0, 1), (1, 2)]
    third = next_batch(s)
    assert [(o.rank, o.carry) for o in third.occurrences] == [(0, 0), (1, 1)]


def test_slot_to_slot_rests_when_it_missed_the_batch_before() -> None:
    """Its token waits in a slot that the next batch cannot reach; a row can."""
    for family, rests in (("slot", True), ("row", False)):
        s = scheduler(carry_over=family, depth=3)
        one, other = request("a", 1), request("b", 1, arrival=1)
        s.add(one)
        s.add(other)
        first = next_batch(s)
        one.last_batch = -1  # as if it had sat the batch out
        second = next_batch(s)
        assert ("a" not in parts(second)) == rests
        s.update(first, [1, 1])
        assert "a" in parts(next_batch(s))


def test_only_who_carries_a_token_reads_where_it_waits() -> None:
    """Both families name what they read, and a batch of prompts reads nothing."""
    device = SimDevice()
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=4)
    previous = IOSlot(0, device, SlotLayout.of(config))
    slot, rows = SlotCarryOver(), RowCarryOver(device, 4)
    for family in (slot, rows):
        assert family.reads(previous, []) == []
    assert slot.reads(previous, [0]) == previous.sampled("device")
    assert rows.reads(previous, [3, 1]) == ["token row 3", "token row 1"]
    assert (slot.writes([2]), rows.writes([2])) == ([], ["token row 2"])


def test_an_index_that_a_race_left_behind_gives_a_token_and_no_crash() -> None:
    tokens = torch.tensor([11, 12, 13])
    for index in (2, 3, 4, 99):
        assert carry(torch.tensor([5]), torch.tensor([index]), tokens).tolist() == [13]


def test_tokens_wait_in_one_row_more_than_requests_can_have() -> None:
    """The last one is for the tokens of padding."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=4, carry_over="row")
    source = make_carry_over(config, SimDevice()).source(None)
    assert source is not None
    assert source.tolist() == [0] * (config.num_rows + 1)


# ------------------------------------------------------------------ update


def test_update_reads_tokens_by_rank_and_not_by_row() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.arrange = lambda occurrences: occurrences[::-1]  # type: ignore[method-assign]
    done, chunk = request("a", 3), request("b", 9, arrival=1)
    s.add(done)
    s.add(chunk)
    output = next_batch(s)
    assert [o.rank for o in output.occurrences] == [-1, 0]
    kept = s.update(output, [5])
    assert [o.request for o in kept] == [done]
    assert done.output_token_ids == [5]
    assert chunk.output_token_ids == []


def test_a_stop_discards_every_later_token_and_counts_each() -> None:
    s = scheduler(depth=2)
    one = request("a", 2, stop=frozenset({7}))
    s.add(one)
    batches = [next_batch(s) for _ in range(3)]
    assert len(s.update(batches[0], [7])) == 1
    assert (one.status, one.finish_reason) == (RequestStatus.FINISHED, "stop")
    assert s.running == []
    assert s.blocks.pool.num_leased == 2 - 1  # one block, until batch 2
    assert s.update(batches[1], [7]) == []
    assert s.blocks.pool.num_leased == 1
    assert s.update(batches[2], [7]) == []
    assert s.blocks.pool.num_leased == 0
    assert one.output_token_ids == [7]
    assert one.discarded_tokens == s.discarded_tokens == 2
    assert one.num_pending_tokens == 0


def test_an_end_by_the_readers_word() -> None:
    s = scheduler()
    one = request("a", 1)
    heard: list[int] = []

    def is_last(token: int) -> bool:
        heard.append(token)
        return token == 4

    one.on_token = is_last
    s.add(one)
    tokens = iter([3, 4])
    while (output := s.schedule()) is not None:
        s.update(output, [next(tokens)])
    assert heard == one.output_token_ids == [3, 4]
    assert one.finish_reason == "stop"


@pytest.mark.parametrize("when", ["arrived", "waiting", "running", "finished"])
def test_an_abort_wherever_the_request_is(when: str) -> None:
    s = scheduler(max_num_seqs=1)
    first, one = request("first", 1, 2), request("a", 1, 2, arrival=1)
    if when in ("running", "finished"):
        s.add(one)
        output = next_batch(s)
        if when == "finished":
            s.update(output, [0])
            s.update(next_batch(s), [0])
    else:
        s.add(first)
        next_batch(s)
        s.add(one)
        if when == "waiting":
            s.schedule()
            assert s.waiting == [one]
    s.abort(one)
    s.abort(one)
    assert s.has_work
    s.schedule()
    assert one.is_finished
    assert one.finish_reason == ("length" if when == "finished" else "abort")
    assert s.take_finished().count(one) == 1
    assert one not in s.running
    assert one not in s.waiting


def test_an_abort_among_others_takes_only_its_own() -> None:
    s = scheduler()
    requests = [request(name, 2, arrival=i) for i, name in enumerate("abc")]
    for one in requests:
        s.add(one)
    next_batch(s)
    s.abort(requests[1])
    assert list(parts(next_batch(s))) == ["a", "c"]
    assert s.running == [requests[0], requests[2]]


def test_starting_over_forgets_everything() -> None:
    s = scheduler(num_blocks=8)
    for arrival in range(6):
        s.add(request(str(arrival), 5, arrival=arrival))
    next_batch(s)
    s.add(request("late", 1, arrival=9))
    s.abort(s.running[0])
    s.start_over()
    assert not s.has_work
    assert s.running == s.waiting == s.take_finished() == []
    assert s.blocks.pool.num_free == 8
    assert s.rows.num_free == s.config.num_rows
    assert s.num_launched == 1  # batch numbers go on: slots are told apart by them


# ------------------------------------------------------------------ memory


def test_preemption_gives_everything_up_and_starts_over() -> None:
    s = scheduler(num_blocks=4, depth=0)
    old, new = request("old", 7), request("new", 7, arrival=1, first=20)
    s.add(old)
    s.add(new)
    s.update(next_batch(s), [1, 2])
    s.update(next_batch(s), [1, 2])
    assert s.blocks.pool.num_free == 0
    output = next_batch(s)  # position 8 of `old` needs a third block
    assert parts(output) == {"old": (8, 1)}
    assert s.waiting == [new]
    assert (new.row, new.num_computed_tokens, new.num_preemptions) == (-1, 0, 1)
    assert (new.blocks.block_ids, new.blocks.chain) == ([], [])
    assert s.num_preemptions == 1
    assert s.rows.num_held == 1
    s.update(output, [1])
    s.abort(old)
    output = next_batch(s)
    # Its first block is still in the cache; `old` has taken the second one.
    assert parts(output) == {"new": (4, 5)}
    assert output.occurrences[0].generation == 1
    assert new.output_token_ids == [2, 2]


def test_a_victim_that_is_the_one_in_need_waits() -> None:
    """Two hold two blocks each; the newer one needs a third, and nobody is newer."""
    s = scheduler(num_blocks=4, depth=0, prefix_caching=False)
    old, new = request("old", 5), request("new", 8, arrival=1)
    s.add(old)
    s.add(new)
    s.update(next_batch(s), [0, 0])
    output = next_batch(s)  # old computes position 5; new would need position 8
    assert parts(output) == {"old": (5, 1)}
    assert s.waiting == [new]
    assert s.num_preemptions == 1


def test_admission_takes_blocks_for_the_whole_context() -> None:
    s = scheduler(max_num_batched_tokens=4, num_blocks=4)
    s.add(request("a", 9))
    output = next_batch(s)
    assert len(output.fresh_blocks) == 3
    assert s.blocks.pool.num_free == 1


def test_nobody_overtakes_who_does_not_fit_yet() -> None:
    s = scheduler(num_blocks=4)
    s.add(request("a", 8))
    next_batch(s)
    s.add(request("big", 12, arrival=1))
    s.add(request("small", 1, arrival=2))
    assert list(parts(next_batch(s))) == ["a"]
    assert [r.request_id for r in s.waiting] == ["big", "small"]


def test_a_request_that_fits_exactly_is_admitted() -> None:
    s = scheduler(num_blocks=4)
    s.add(request("a", 8))
    s.add(request("b", 8, arrival=1))
    assert list(parts(next_batch(s))) == ["a", "b"]
    assert s.blocks.pool.num_free == 0


def test_leases_about_to_return_are_waited_for() -> None:
    """As many as are missing are on a lease: enough. One more needed: preempt."""
    for num_leased, is_preempted in ((1, False), (0, True)):
        s = scheduler(num_blocks=3, prefix_caching=False)
        one = request("a", 8, max_tokens=5)
        s.add(one)
        next_batch(s)
        assert s.blocks.pool.num_free == 1
        s.blocks.pool.take(1)
        if num_leased:
            s.blocks.pool.give_back([2], until_batch=99)
        assert s.schedule() is None
        assert (s.num_preemptions == 1) == is_preempted


# ------------------------------------------------------------------ shared blocks


def settle(s: Scheduler, *requests: Request) -> None:
    """Run requests to their ends, one batch after the other."""
    for one in requests:
        s.add(one)
    for _ in turns(s):
        pass


def test_a_second_prompt_begins_where_the_cache_ends() -> None:
    s = scheduler()
    settle(s, request("a", 10, max_tokens=1))
    assert (s.num_prompt_tokens, s.num_cached_tokens) == (10, 0)
    again = request("b", 10, max_tokens=1, arrival=1)
    s.add(again)
    output = next_batch(s)
    assert parts(output) == {"b": (8, 2)}
    assert again.num_cached_tokens == 8
    assert (s.num_prompt_tokens, s.num_cached_tokens) == (20, 8)
    assert [index for _, index, _ in output.new_blocks] == [0, 1, 2]
    assert output.fresh_blocks == [output.new_blocks[2][2]]


def test_only_settled_blocks_are_found() -> None:
    """While the batch that fills a block is in flight, its content is a promise."""
    s = scheduler()
    s.add(request("a", 9))
    first = next_batch(s)
    s.add(request("b", 9, arrival=1))
    second = next_batch(s)
    assert parts(second)["b"] == (0, 9)
    s.update(first, [0])
    s.add(request("c", 9, arrival=2))
    assert parts(next_batch(s))["c"] == (8, 1)


def test_the_chunk_that_fills_a_block_publishes_it() -> None:
    s = scheduler(max_num_batched_tokens=3)
    one = request("a", 9, max_tokens=2)
    s.add(one)
    published = []
    for _ in range(3):
        s.update(next_batch(s), [0])
        published.append(len(one.blocks.chain))
    assert published == [0, 1, 2]  # 3, 6 and 9 tokens: 0, 1 and 2 full blocks


def test_generated_tokens_are_published_with_their_block() -> None:
    s = scheduler()
    one = request("a", 3, max_tokens=9)
    s.add(one)
    chain = []
    for token in range(50, 56):
        s.update(next_batch(s), [token])
        chain.append(len(one.blocks.chain))
    assert chain == [0, 1, 1, 1, 1, 2]  # the fourth token of a block fills it
    assert s.blocks.find([1, 2, 3, 50, 51, 52, 53, 54, 55]) == one.blocks.block_ids[:2]


def test_without_prefix_caching_nothing_is_published() -> None:
    s = scheduler(prefix_caching=False)
    one = request("a", 8)
    s.add(one)
    s.update(next_batch(s), [0])
    assert one.blocks.chain == []


def test_who_needs_every_position_finds_nothing() -> None:
    s = scheduler()
    settle(s, request("a", 10, max_tokens=1))
    again = request("b", 10, max_tokens=1, arrival=1)
    again.params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    s.add(again)
    assert parts(next_batch(s)) == {"b": (0, 10)}


def test_a_chunk_of_an_aborted_prompt_publishes_nothing() -> None:
    s = scheduler(max_num_batched_tokens=4)
    one = request("a", 8)
    s.add(one)
    output = next_batch(s)
    s.abort(one)
    s.schedule()
    assert s.update(output, []) == []
    assert s.blocks.find([*range(1, 9)]) == one.blocks.chain == []


@pytest.mark.parametrize("ending", ["abort", "preempt"])
def test_who_has_lost_its_blocks_publishes_nothing(ending: str) -> None:
    s = scheduler()
    one = request("a", 8)
    s.add(one)
    output = next_batch(s)
    if ending == "abort":
        s.abort(one)
        s.schedule()
    else:
        s._preempt(one)
    s.update(output, [0])
    assert one.blocks.chain == []
    assert s.blocks.find([*range(1, 9), 0]) == []


def test_found_blocks_count_once_even_if_the_request_is_preempted() -> None:
    s = scheduler(depth=0)
    settle(s, request("a", 8, max_tokens=1))
    again = request("b", 8, max_tokens=9, arrival=1)
    s.add(again)
    s.update(next_batch(s), [0])
    before = (s.num_prompt_tokens, s.num_cached_tokens, again.num_cached_tokens)
    s._preempt(again)
    s.update(next_batch(s), [0])
    after = (s.num_prompt_tokens, s.num_cached_tokens, again.num_cached_tokens)
    assert before == after == (16, 4, 4)


def test_occurrences_are_told_apart_by_generation() -> None:
    s = scheduler()
    one = request("a", 2)
    s.add(one)
    first = next_batch(s).occurrences[0]
    assert isinstance(first, Occurrence)
    assert first.generation == 0
    s._preempt(one)
    assert s.schedule() is None  # its token is on the way, and it waits for that
    assert one.status is RequestStatus.WAITING
