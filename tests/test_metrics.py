"""Figures of requests and runs: exact, on a machine whose times are known."""

from __future__ import annotations

import pytest
import torch

from cbasync.config import EngineConfig
from cbasync.devices import SimDevice, ThreadsDevice
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.metrics import RunMetrics, request_records
from cbasync.request import Request, RequestMetrics
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams

COSTS = CostModel(
    name="round figures",
    schedule=PhaseCost(100.0),
    prepare=PhaseCost(200.0),
    h2d=PhaseCost(400.0),
    compute=PhaseCost(1000.0),
    d2h=PhaseCost(400.0),
    update=PhaseCost(300.0),
    launch_us=0.0,
    note="one sync step: 100 + 200 + 400 + 1000 + 400 + 300 = 2400",
)
THREE = SamplingParams(max_tokens=3)


def engine(kind: type[Engine] = SyncEngine, **changes: int) -> Engine:
    values = {"max_num_seqs": 2, "block_size": 4, "num_blocks": 8, "max_model_len": 32}
    config = EngineConfig(**(values | changes))  # type: ignore[arg-type]
    return kind(ScriptedRunner(), config, SimDevice(costs=COSTS))


def three_requests(one: Engine) -> list[Request]:
    """Two have a seat at once, the third waits for both to end."""
    with one:
        requests = [one.add_request([i, 2, 3], THREE) for i in range(3)]
        one.run()
    return requests


def times(request: Request) -> tuple[float, float, float]:
    metrics = RequestMetrics.of(request)
    return (
        metrics.queue_ms,
        metrics.time_to_first_token_ms,
        metrics.time_per_token_ms,
    )


def test_times_of_requests_in_turns() -> None:
    """Steps start every 2.4 ms; the host knows a token 2.1 ms into its step."""
    first, second, third = three_requests(engine())
    assert times(first) == times(second) == (0.0, 2.1, 2.4)
    # Three steps of the others come first: 3 * 2.4 = 7.2.
    assert times(third) == (7.2, 7.2 + 2.1, 2.4)


def test_times_of_requests_one_batch_ahead() -> None:
    """Tokens come in pairs: batch 1 computes while the host books batch 0.

    The first at 2.1 ms, as in turns, the second right after the GPU is through with it,
    the third a whole schedule later; the figure is the mean over the last two.
    """
    first, _, third = three_requests(engine(AsyncEngine))
    assert times(first) == (0.0, 2.1, 1.2)
    assert times(third) == (4.8, 4.8 + 2.1, 1.2)


def test_figures_of_a_run() -> None:
    one = engine()
    three_requests(one)
    metrics = one.metrics
    assert metrics.num_batches == 6
    assert metrics.num_finished == 3
    assert metrics.num_prompt_tokens == metrics.num_output_tokens == 9
    assert metrics.batch_occupancy == (3 * 2 + 3 * 1) / (6 * 2)
    assert metrics.elapsed_s == pytest.approx(6 * 2.4e-3)
    assert metrics.output_tokens_per_s == pytest.approx(9 / (6 * 2.4e-3))
    assert metrics.schedule_ms == pytest.approx(0.1)
    assert metrics.prepare_ms == pytest.approx(0.2)
    assert metrics.update_ms == pytest.approx(0.3)
    assert metrics.discarded_tokens == metrics.num_preemptions == 0


def test_turns_that_schedule_nothing_are_host_time_too() -> None:
    """One batch ahead asks twice more a pair of requests than there are batches."""
    one = engine(AsyncEngine)
    three_requests(one)
    assert one.metrics.num_batches == 6
    assert one.metrics.schedule_ms == pytest.approx(8 * 0.1 / 6)


def test_discarded_tokens_are_counted_where_they_belong() -> None:
    one = engine(AsyncEngine)
    with one:
        free = one.add_request([1, 2, 3], SamplingParams(max_tokens=8))
        one.run()
        end = free.output_token_ids[1]
        stopped = one.add_request(
            [1, 2, 3], SamplingParams(max_tokens=8, stop_token_ids=(end,))
        )
        one.run()
    assert RequestMetrics.of(free).discarded_tokens == 0
    assert RequestMetrics.of(stopped).discarded_tokens == 1
    assert one.metrics.discarded_tokens == 1
    assert one.metrics.num_output_tokens == 8 + 2  # without the discarded one


def test_cached_tokens_and_the_hit_rate() -> None:
    one = engine()
    with one:
        requests = []
        for _ in range(2):
            requests.append(one.add_request(range(1, 11), THREE))
            one.run()
    assert [r.num_cached_tokens for r in requests] == [0, 8]
    assert one.metrics.num_cached_tokens == 8
    assert one.metrics.cache_hit_rate == 8 / 20
    assert RequestMetrics.of(requests[1]).num_cached_tokens == 8


def test_preemptions_are_counted_where_they_belong() -> None:
    one = engine(num_blocks=4)
    with one:
        requests = [
            one.add_request([i] * 7, SamplingParams(max_tokens=6)) for i in range(2)
        ]
        one.run()
    counts = [RequestMetrics.of(r).num_preemptions for r in requests]
    assert counts[0] == 0
    assert counts[1] == one.metrics.num_preemptions > 0
    # What it computes again is not a new prompt, and found blocks are no hits.
    assert one.metrics.num_prompt_tokens == 14
    assert one.metrics.num_cached_tokens == 0


def test_what_never_happened_is_minus_one() -> None:
    one = engine(max_num_seqs=1)
    with one:
        one.add_request([1], THREE)
        waiting = one.add_request([2], THREE)
        one.step()
        one.abort(waiting.request_id)
        one.run()
    assert times(waiting) == (-1.0, -1.0, 0.0)


def test_a_request_that_was_cut_short_has_no_time_per_token() -> None:
    one = engine()
    with one:
        request = one.add_request([1], SamplingParams(max_tokens=9))
        for _ in range(3):
            one.step()
    assert len(request.output_token_ids) == 3
    assert times(request) == (0.0, 2.1, -1.0)


def test_one_token_has_no_time_per_token() -> None:
    one = engine()
    with one:
        request = one.add_request([1], SamplingParams(max_tokens=1))
        one.run()
    assert times(request) == (0.0, 2.1, 0.0)


def test_nothing_done_is_no_division_by_zero() -> None:
    metrics = RunMetrics(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert metrics.output_tokens_per_s == metrics.cache_hit_rate == 0.0
    with engine() as one:
        assert one.metrics.batch_occupancy == one.metrics.schedule_ms == 0.0


def test_records_are_flat_and_complete() -> None:
    one = engine()
    requests = three_requests(one)
    record = one.metrics.record()
    assert record["num_batches"] == 6
    assert record["output_tokens_per_s"] == one.metrics.output_tokens_per_s
    assert record["cache_hit_rate"] == 0.0
    rows = request_records(requests)
    assert [row["request_id"] for row in rows] == [r.request_id for r in requests]
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert rows[2]["queue_ms"] == 7.2
    for flat in (record, *rows):
        assert all(isinstance(value, int | float | str) for value in flat.values())


def test_only_finished_requests_have_a_row() -> None:
    one = engine()
    with one:
        running = one.add_request([1], THREE)
        one.step()
        assert request_records([running]) == []
        one.run()
    assert len(request_records([running])) == 1


def test_repr_is_one_line_for_a_log() -> None:
    one = engine()
    three_requests(one)
    assert repr(one.metrics) == (
        "RunMetrics(3 requests, 9 tokens in 6 batches, 625.0 tok/s, 75% occupied, "
        "0 discarded, 0 preemptions, 0% cached)"
    )


def test_times_are_in_order_on_a_real_clock() -> None:
    with SyncEngine(ScriptedRunner(), EngineConfig(), ThreadsDevice()) as one:
        request = one.add_request(torch.tensor([1, 2]), THREE)  # type: ignore[arg-type]
        one.run()
    moments = request.times
    assert 0 < moments.submitted_us <= moments.scheduled_us
    assert moments.scheduled_us <= moments.first_token_us <= moments.finished_us
