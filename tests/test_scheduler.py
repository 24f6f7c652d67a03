"""The scheduler by itself: budgets, order, promises, leases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cbasync.config import EngineConfig
from cbasync.kv_cache import BlockManager, BlockTable, LeasedPool
from cbasync.request import Request, RequestStatus
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput


def scheduler(**changes: object) -> Scheduler:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 64,
    }
    return Scheduler(EngineConfig(**(values | changes)))  # type: ignore[arg-type]


def request(name: str, prompt: int, max_tokens: int = 8, **changes: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, list(range(1, prompt + 1)), params, **changes)  # type: ignore[arg-type]


def shape(output: SchedulerOutput | None) -> list[tuple[str, int, int, int, int]]:
    """(request, start, length, rank, carry) of each row."""
    assert output is not None
    return [
        (o.request.request_id, o.start, o.length, o.rank, o.carry)
        for o in output.occurrences
    ]


def test_running_requests_go_first_and_the_rest_of_the_budget_is_a_chunk() -> None:
    s = scheduler()
    s.add(request("a", 3))
    s.add(request("b", 11))
    assert shape(s.schedule()) == [("a", 0, 3, 0, -1), ("b", 0, 5, -1, -1)]
    assert shape(s.schedule()) == [("a", 3, 1, 0, 0), ("b", 5, 6, 1, -1)]
    assert shape(s.schedule()) == [("a", 4, 1, 0, 0), ("b", 11, 1, 1, 1)]


def test_rank_among_the_sampled_is_not_the_row() -> None:
    """A chunked prompt before a decode: row 1 of the batch, rank 0 of its tokens."""
    s = scheduler()
    s.arrange = lambda occurrences: occurrences[::-1]  # type: ignore[method-assign]
    s.add(request("a", 3))
    s.add(request("b", 11))
    assert shape(s.schedule()) == [("b", 0, 5, -1, -1), ("a", 0, 3, 0, -1)]
    assert shape(s.schedule()) == [("b", 5, 6, 0, -1), ("a", 3, 1, 1, 0)]
    assert shape(s.schedule()) == [("b", 11, 1, 0, 0), ("a", 4, 1, 1, 1)]


def test_row_family_carries_the_request_row() -> None:
    s = scheduler(carry_over="row")
    s.add(request("a", 3))
    s.add(request("b", 2))
    s.schedule()
    rows = [r.row for r in s.running]
    assert [o[4] for o in shape(s.schedule())] == rows


def test_a_known_last_token_is_not_scheduled_again() -> None:
    s = scheduler()
    s.add(request("a", 3, max_tokens=1))
    output = s.schedule()
    assert s.schedule() is None
    assert output is not None
    (kept,) = s.update(output, [9])
    changed = kept.request
    assert changed.finish_reason == "length"
    assert changed.output_token_ids == [9]


def test_leases_are_waited_for_before_anybody_is_preempted() -> None:
    s = scheduler(num_blocks=4)
    a, b = request("a", 4, max_tokens=9), request("b", 8, max_tokens=5)
    stop = request("stop", 4, max_tokens=9, stop_token_ids=frozenset({7}))
    s.add(stop)
    s.add(a)
    first = s.schedule()
    second = s.schedule()  # both now hold two blocks; all four are taken
    assert first is not None
    assert second is not None
    s.update(first, [7, 1])  # `stop` ends, but batch 1 still writes to its blocks
    s.add(b)
    assert s.blocks.pool.num_leased == 2
    third = s.schedule()
    assert shape(third) == [("a", 5, 1, 0, 1)]  # b is not admitted to leased blocks
    assert s.num_preemptions == 0
    s.update(second, [0, 2])
    assert s.blocks.pool.num_free == 2
    assert s.discarded_tokens == stop.discarded_tokens == 1
    assert "b" in [row[0] for row in shape(s.schedule())]


def test_preemption_takes_the_newest_and_its_late_token_is_delivered_once() -> None:
    s = scheduler(num_blocks=4, max_num_batched_tokens=16)
    a, b = request("a", 7, max_tokens=6), request("b", 7, max_tokens=6)
    s.add(a)
    s.add(b)
    first = s.schedule()
    second = s.schedule()
    assert first is not None
    assert second is not None
    s.update(first, [1, 1])
    third = s.schedule()  # position 8 needs a third block: b gives way
    assert b.status is RequestStatus.WAITING
    assert b.num_preemptions == 1
    assert b.num_pending_tokens == 1
    assert third is None or all(o.request is a for o in third.occurrences)
    s.update(second, [2, 2])
    assert b.output_token_ids == [1, 2]
    assert b.num_pending_tokens == 0


def test_a_pool_knows_every_item_it_gave() -> None:
    pool = LeasedPool(3)
    taken = pool.take(2)
    pool.give_back(taken[:1], until_batch=4)
    assert (pool.num_free, pool.num_leased, pool.num_held) == (1, 1, 1)
    with pytest.raises(RuntimeError, match="item 0 is given back twice"):
        pool.give_back(taken[:1])
    pool.collected(3)
    assert pool.num_leased == 1
    pool.collected(4)
    pool.give_back(taken[1:], until_batch=4)  # that batch is over: no lease
    assert pool.num_free == 3


def test_a_pool_without_leases_hands_on_at_once() -> None:
    pool = LeasedPool(1, leases=False)
    pool.give_back(pool.take(1), until_batch=9)
    assert pool.num_free == 1


def test_blocks_by_position() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    table = BlockTable()
    assert [len(manager.grow(table, n)) for n in (3, 4, 5, 12)] == [1, 0, 1, 1]
    assert manager.missing(len(table), 13) == 1
    manager.release(table, until_batch=-1)
    assert table.block_ids == []
    assert manager.pool.num_free == 8


def test_a_waiting_prompt_is_only_looked_up_when_there_is_a_seat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = scheduler(max_num_seqs=1)
    find, looked_up = s.blocks.find, []

    def counted(token_ids: Sequence[int]) -> list[int]:
        looked_up.append(token_ids)
        return find(token_ids)

    monkeypatch.setattr(s.blocks, "find", counted)
    for name in "ab":
        s.add(request(name, 3))
    for _ in range(3):
        s.schedule()
    assert len(looked_up) == 1
