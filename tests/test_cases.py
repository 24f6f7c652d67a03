"""Kinds of fault that engines like this one have had, each tried in every mode.

Every trial runs in turn, and one or two batches ahead with both carry-over families; on
threads and on the virtual device in its worst order. Every batch is watched: what is
carried is the request's own token, nobody gets a block that a batch in flight names,
budgets are kept, no race is reported, and the answers are the oracle's.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from cbasync.config import EngineConfig
from cbasync.devices import Access, Device, SimDevice, ThreadsDevice
from cbasync.devices.races import RaceDetector
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.kv_cache import slot_mapping
from cbasync.model_runner import ModelRunner
from cbasync.mutants import EVEN_COSTS
from cbasync.request import Request
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Occurrence, Scheduler, SchedulerOutput
from cbasync.serving import EngineLoop
from tests.conftest import HAS_GPU, Machine
from tests.oracle import (
    Job,
    Result,
    check_invariants,
    check_logprobs,
    check_tokens,
    expected,
    run,
)

MakeScheduler = Callable[[EngineConfig], Scheduler]


@dataclass(frozen=True)
class Mode:
    """In turn, or so many batches ahead with one of the carry-over families."""

    depth: int
    family: str = "slot"

    def __str__(self) -> str:
        return f"ahead {self.depth} {self.family}" if self.depth else "in turn"


MODES = [Mode(0), *(Mode(d, f) for d in (1, 2) for f in ("slot", "row"))]


def config_for(mode: Mode, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 32,
        "max_model_len": 64,
        "depth": mode.depth,
        "carry_over": mode.family,
        "debug": True,
        "max_logprobs": 3,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


@dataclass
class Batch:
    """What a batch was when it was launched; requests change afterwards."""

    output: SchedulerOutput
    blocks: dict[str, list[int]]  # of each request, at that time
    rows: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> Batch:
        blocks = {
            o.request.request_id: list(o.request.blocks.block_ids)
            for o in output.occurrences
        }
        return cls(output, blocks, len(output.occurrences))

    @property
    def names(self) -> list[str]:
        return [o.request.request_id for o in self.output.occurrences]

    @property
    def held(self) -> set[int]:
        return {block for blocks in self.blocks.values() for block in blocks}


class Watch:
    """Looks at every batch as it is launched, and at every token as it comes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batches: list[Batch] = []
        self.delivered: Counter[str] = Counter()
        self._launch, self._step = engine.launch, engine.step
        engine.launch = self.launch  # type: ignore[method-assign]
        engine.step = self.step  # type: ignore[method-assign]

    def launch(self, output: SchedulerOutput) -> None:
        batch = Batch.of(output)
        self._check_limits(batch)
        self._check_carried(output)
        in_flight = {entry.output.batch for entry in self.engine.in_flight}
        named = [b.held for b in self.batches if b.output.batch in in_flight]
        for blocks in named:
            assert not blocks & set(output.fresh_blocks), "handed on too early"
        self.batches.append(batch)
        self._launch(output)

    def step(self) -> list[Request]:
        kept = self._step()
        self.delivered.update(request.request_id for request in kept)
        return kept

    def _check_limits(self, batch: Batch) -> None:
        config = self.engine.config
        assert batch.rows <= config.max_num_seqs
        assert batch.output.num_tokens <= config.max_num_batched_tokens
        assert len(set(batch.names)) == batch.rows, "a request twice in one batch"
        assert len(self.engine.in_flight) <= config.depth

    def _check_carried(self, output: SchedulerOutput) -> None:
        """Read the index itself: it must point at the request's own token."""
        for o in output.occurrences:
            if o.carry < 0:
                known = len(o.request.prompt_token_ids) + len(
                    o.request.output_token_ids
                )
                assert o.start + o.length <= known, "an input that nobody knows"
            elif self.engine.config.carry_over == "row":
                assert o.carry == o.row
            else:
                (source,) = [
                    s for s in self.batches[-1].output.occurrences if s.rank == o.carry
                ]
                assert source.request is o.request, "another request's token"
                assert source.generation == o.generation

    def rests_of(self, name: str) -> set[int]:
        """How many batches a request sat out between two of its own."""
        own = [b.output.batch for b in self.batches if name in b.names]
        return {later - former - 1 for former, later in pairwise(own)}


class Trial:
    """Workloads in one mode on one machine, everything about them checked."""

    def __init__(self, machine: Machine, mode: Mode) -> None:
        self.machine, self.model, self.mode = machine, machine.model, mode

    def engine(
        self,
        make_scheduler: MakeScheduler = Scheduler,
        device: Device | None = None,
        **changes: object,
    ) -> Engine:
        config = config_for(self.mode, **changes)
        kind = AsyncEngine if self.mode.depth else SyncEngine
        device = device or self.machine.new_device()
        self.detector = RaceDetector()
        device.observers.append(self.detector)
        engine = kind(ModelRunner(self.model), config, device, make_scheduler(config))
        self.watch = Watch(engine)
        return engine

    def play(self, jobs: list[Job], **options: Any) -> Result:
        with self.engine(**options) as engine:
            result = run(engine, jobs)
        self.check(engine, jobs, result.requests)
        return result

    def check(self, engine: Engine, jobs: list[Job], requests: list[Request]) -> None:
        check_invariants(engine, requests)
        check_tokens(self.model, jobs, requests)
        check_logprobs(self.model, requests)
        assert self.detector.races == []
        for request in requests:
            delivered = self.watch.delivered[request.request_id]
            assert delivered == len(request.output_token_ids), "each token comes once"

    def at_least(self, rest: int) -> int:
        """How long a rest is: from slot to slot until the host knows the token."""
        return max(rest, self.mode.depth) if self.mode.family == "slot" else rest

    @property
    def batches(self) -> list[Batch]:
        return self.watch.batches

    def alone(self, prompt: tuple[int, ...], **params: Any) -> list[int]:
        return expected(self.model, Job(prompt, SamplingParams(**params)))


@pytest.fixture(params=MODES, ids=str)
def trial(machine: Machine, request: pytest.FixtureRequest) -> Trial:
    return Trial(machine, request.param)


def job(prompt: tuple[int, ...], max_tokens: int, **changes: Any) -> Job:
    where = {key: changes.pop(key) for key in ("arrival", "abort") if key in changes}
    return Job(prompt, SamplingParams(max_tokens=max_tokens, **changes), **where)


def first_seen_at(tokens: list[int], at: int) -> int:
    """The token of a step, as an end token: it must not have come before."""
    assert tokens.index(tokens[at]) == at, f"{tokens[at]} comes before step {at}"
    return tokens[at]


def up(length: int) -> tuple[int, ...]:
    return tuple(i % 17 for i in range(1, length + 1))


def down(length: int) -> tuple[int, ...]:
    return up(length)[::-1]


# ------------------------------------------------------------------ carry-over


def test_evicted_twice_and_each_late_token_delivered_once(trial: Trial) -> None:
    jobs = [job(up(7), 14), job(down(7), 14), job((3, 1, 4, 1, 5, 9, 2), 14)]
    result = trial.play(jobs, num_blocks=7, prefix_caching=False)
    assert max(request.num_preemptions for request in result.requests) >= 2
    if trial.mode.depth:
        assert late_tokens(trial) > 0, "nobody was evicted with a token in flight"


def test_evicted_and_there_is_room_again_before_its_late_token(trial: Trial) -> None:
    """Another one ends at once; the evicted one still has to wait for its token."""
    jobs = [job(up(5), 8), job(up(12), 3), job(down(6), 8)]
    result = trial.play(
        jobs, num_blocks=9, max_num_batched_tokens=32, prefix_caching=False
    )
    if trial.mode.depth == 2:
        assert result.requests[2].num_preemptions > 0


def late_tokens(trial: Trial) -> int:
    """Sampled rows whose request has been evicted since; only the last ones count."""
    newest: dict[str, int] = {}
    late = 0
    for batch in trial.batches:
        for o in batch.output.occurrences:
            former = newest.get(o.request.request_id, -1)
            if former >= 0 and o.generation > former:
                late += 1
            newest[o.request.request_id] = o.generation
    return late


class RoundRobin(Scheduler):
    """Lets so many requests decode in a batch; who was served last comes last."""

    def __init__(self, config: EngineConfig, at_a_time: int) -> None:
        super().__init__(config)
        self.at_a_time = at_a_time

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        return super()._schedule_running(output, min(budget, self.at_a_time))

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        if not self.running:
            budget = self.config.max_num_batched_tokens
        super()._admit_waiting(output, budget)

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        for occurrence in output.occurrences if output else []:
            self.running.remove(occurrence.request)
            self.running.append(occurrence.request)
        return output


one_at_a_time = partial(RoundRobin, at_a_time=1)
two_at_a_time = partial(RoundRobin, at_a_time=2)


@pytest.mark.parametrize("rest", [1, 2, 3])
def test_resting_for_exactly_so_many_batches(trial: Trial, rest: int) -> None:
    """All of them decode, one in each batch: each sits out while the others are served.

    Token 0 is also the placeholder, and here it comes all the time.
    """
    prompts = [(1, 2, 3, 4), (0, 0, 0, 0), (4, 3, 2, 1), (9, 8, 7, 6)][: rest + 1]
    jobs = [job(prompt, 9, logit_bias=((0, 0.3),)) for prompt in prompts]
    result = trial.play(jobs, make_scheduler=one_at_a_time, debug=False)
    assert any(tokens.count(0) > 2 for tokens in result.tokens)
    assert trial.at_least(rest) in trial.watch.rests_of("request-0")


@pytest.mark.parametrize("rest", [1, 2, 3])
def test_who_has_rested_carries_nothing_from_slot_to_slot(
    trial: Trial, rest: int
) -> None:
    """It returns with the token that the host knows by then."""
    if trial.mode.family == "row":
        pytest.skip("a token row reaches any number of batches back")
    jobs = [job((i, 2, 3), 6) for i in range(rest + 1)]
    trial.play(jobs, make_scheduler=one_at_a_time)
    last: dict[str, int] = {}
    returned = 0
    for batch in trial.batches:
        for o in batch.output.occurrences:
            if last.get(o.request.request_id, -9) != batch.output.batch - 1:
                assert o.carry == -1
                returned += o.start > 0
            last[o.request.request_id] = batch.output.batch
    assert returned > 3


def test_three_decoders_of_which_two_run_in_each_batch(trial: Trial) -> None:
    jobs = [job((i, 2), 4 + i) for i in range(3)]
    trial.play(jobs, make_scheduler=two_at_a_time)
    assert {0, trial.at_least(1)} <= trial.watch.rests_of("request-2")


def test_a_prefill_that_eats_the_whole_budget(trial: Trial) -> None:
    class NewestFirst(Scheduler):
        def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
            self.running.reverse()
            try:
                return super()._schedule_running(output, budget)
            finally:
                self.running.reverse()

    jobs = [job((1, 2, 3), 9), job(up(15), 3, arrival=3)]
    trial.play(jobs, make_scheduler=NewestFirst, max_num_batched_tokens=4)
    assert max(trial.watch.rests_of("request-0")) >= 2


class PrefillFirst(Scheduler):
    """Rows that still read their prompt go before the decoding ones."""

    def arrange(self, occurrences: list[Occurrence]) -> list[Occurrence]:
        return sorted(occurrences, key=lambda o: o.length == 1)


class Turning(Scheduler):
    """Every second batch the other way round."""

    def arrange(self, occurrences: list[Occurrence]) -> list[Occurrence]:
        return occurrences[:: -1 if self.num_launched % 2 else 1]


@pytest.mark.parametrize("order", [Scheduler, PrefillFirst, Turning])
def test_rows_change_places_between_two_batches(
    trial: Trial, order: MakeScheduler
) -> None:
    """One ends, the rows close up, and a newcomer's prompt goes in before them."""
    jobs = [job((1, 2), 2), job((3, 4), 6), job((5, 6), 6), job((7, 8, 9), 6)]
    trial.play(jobs, make_scheduler=order, max_num_seqs=3)
    decoding = [o.rank for b in trial.batches for o in b.output.occurrences if o.start]
    assert len(set(decoding)) > 1
    if order is PrefillFirst:
        (entry,) = [b for b in trial.batches if "request-3" in b.names][:1]
        assert entry.names[0] == "request-3"
        assert len(entry.names) == 3


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_prompts_in_chunks_beside_a_decoder(trial: Trial, max_tokens: int) -> None:
    """A last chunk of one token is no decode; an unfinished chunk gives no token."""
    jobs = [job((1, 2), 14)]
    for i, length in enumerate((8, 9, 16, 17, 1)):
        prompt = tuple((i + 3 * j) % 17 for j in range(length))
        jobs.append(job(prompt, max_tokens, arrival=2))
    trial.play(jobs, max_num_batched_tokens=8, max_num_seqs=6)
    occurrences = [o for b in trial.batches for o in b.output.occurrences]
    chunks = [
        o for o in occurrences if o.start + o.length < len(o.request.prompt_token_ids)
    ]
    assert chunks
    assert all(o.rank == -1 and o.carry == -1 for o in chunks)
    assert any(
        o.start > 0 and o.start + o.length == len(o.request.prompt_token_ids)
        for o in occurrences
    )


def test_a_batch_of_nothing_but_unfinished_chunks(trial: Trial) -> None:
    trial.play([job(up(17), 3), job((5,), 1)], max_num_batched_tokens=8)
    sampled = [b.output.num_sampled for b in trial.batches]
    assert sampled[:2] == [0, 0]
    assert trial.batches[0].output.num_tokens == 8


def test_a_last_chunk_of_one_token_is_no_decode(trial: Trial) -> None:
    trial.play([job(up(9), 3)], max_num_batched_tokens=8)
    (last,) = trial.batches[1].output.occurrences
    assert (last.start, last.length, last.rank, last.carry) == (8, 1, 0, -1)


RULES: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "repetition encouraged": {"repetition_penalty": 0.6},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 0.7},
    "banned tokens": {"logit_bias": ((0, -100.0), (12, -100.0), (13, -100.0))},
    "all at once, drawn": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": ((3, 1.0),),
        "temperature": 0.8,
        "seed": 7,
        "logprobs": 2,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_read_the_history(trial: Trial, rule: str) -> None:
    """The host does not know the last token yet, the device does."""
    prompts = [(1, 2, 3, 4), (0, 0, 0, 0), (7, 6, 5, 4, 3)]
    jobs = [job(prompt, 10, **RULES[rule]) for prompt in prompts]
    jobs.append(job((1, 2, 3, 4), 10))  # beside one that has no rule
    result = trial.play(jobs)
    assert result.tokens[0] != result.tokens[3], "the rule changes nothing here"


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_read_the_history_survive_eviction(trial: Trial, rule: str) -> None:
    jobs = [job(prompt, 8, **RULES[rule]) for prompt in (up(7), down(7))]
    result = trial.play(jobs, num_blocks=4)
    assert result.requests[1].num_preemptions > 0


def test_a_token_forced_once_and_then_the_end(trial: Trial) -> None:
    """One batch late the rule would not have seen its token, and force it twice."""
    forced, eos = 5, 9
    rule = {
        "logit_bias": ((forced, 80.0), (eos, 40.0)),
        "presence_penalty": 60.0,
        "stop_token_ids": (eos,),
    }
    result = trial.play([job(up(4), 8, **rule), job(down(3), 6)])
    assert result.tokens[0] == [forced, eos]
    assert result.requests[0].finish_reason == "stop"


# ------------------------------------------------------------------ end of life


def test_one_token_in_one_block(trial: Trial) -> None:
    result = trial.play([job(up(4), 1)], num_blocks=1)
    assert [batch.rows for batch in trial.batches] == [1]
    assert result.requests[0].finish_reason == "length"
    assert result.requests[0].discarded_tokens == 0


def test_an_end_token_straight_from_the_prompt(trial: Trial) -> None:
    eos = trial.alone(up(4), max_tokens=1)[0]
    result = trial.play([job(up(4), 4, stop_token_ids=(eos,)), job((5, 6), 4)])
    (request, _) = result.requests
    assert request.output_token_ids == [eos]
    assert request.finish_reason == "stop"
    assert request.discarded_tokens == trial.mode.depth


def test_the_end_token_is_the_only_token_allowed(trial: Trial) -> None:
    eos = trial.alone(up(4), max_tokens=1)[0]
    result = trial.play([job(up(4), 1, stop_token_ids=(eos,))], num_blocks=1)
    assert result.requests[0].finish_reason == "stop"
    assert len(trial.batches) == 1


@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_blocks_of_an_ended_request_go_to_the_one_that_waits(
    trial: Trial, max_num_seqs: int
) -> None:
    """The batch in flight still writes to them: they are fenced until it is over."""
    eos = first_seen_at(trial.alone((9, 8, 7, 6), max_tokens=2), 1)
    jobs = [job((9, 8, 7, 6), 6, stop_token_ids=(eos,)), job(up(4), 4)]
    jobs.append(job(down(4), 4))
    trial.play(jobs, num_blocks=4, max_num_seqs=max_num_seqs)
    assert inherits(trial, "request-2", {"request-0"})


def test_two_end_in_one_batch_and_a_third_gets_their_blocks(trial: Trial) -> None:
    prompts = [(9, 8, 7, 6), (4, 3, 2, 1)]
    ends = [first_seen_at(trial.alone(p, max_tokens=2), 1) for p in prompts]
    jobs = [
        job(prompt, 9, stop_token_ids=(eos,))
        for prompt, eos in zip(prompts, ends, strict=True)
    ]
    jobs.append(job(up(13), 4))  # needs all four blocks, so theirs too
    trial.play(jobs, num_blocks=4, max_num_seqs=2)
    assert inherits(trial, "request-2", {"request-0", "request-1"})


def inherits(trial: Trial, heir: str, former: set[str]) -> bool:
    """Whether a request had blocks that each of the former ones had before it."""
    its = {b for batch in trial.batches for b in batch.blocks.get(heir, [])}
    return all(
        its & {b for batch in trial.batches for b in batch.blocks.get(name, [])}
        for name in former
    )


@pytest.mark.parametrize("abort", range(7))
def test_aborted_in_the_step_in_which_it_ends(trial: Trial, abort: int) -> None:
    """Before, in and after the batch of its end token, with another one waiting."""
    eos = first_seen_at(trial.alone((9, 8, 7, 6), max_tokens=4), 3)
    jobs = [
        job((9, 8, 7, 6), 9, stop_token_ids=(eos,), abort=abort),
        job((4, 3, 2, 1), 5),
        job(up(4), 5),
    ]
    result = trial.play(jobs, num_blocks=5, max_num_seqs=2)
    assert result.requests[0].finish_reason in ("abort", "stop")


@pytest.mark.parametrize("abort", range(6))
def test_all_aborted_at_once(trial: Trial, abort: int) -> None:
    jobs = [job((i, 8, 7, 6), 6, abort=abort) for i in range(4)]
    jobs.append(job(up(4), 4, arrival=abort))
    trial.play(jobs, num_blocks=6, max_num_seqs=3)


def test_aborts_of_unknown_waiting_ended_and_twice(trial: Trial) -> None:
    jobs = [job(up(4), 5), job(down(4), 5), job((5, 5), 5)]
    with trial.engine(max_num_seqs=1) as engine:
        requests = [engine.add_request(j.prompt, j.params) for j in jobs]
        assert not engine.abort("nobody")
        engine.step()
        assert engine.abort("request-1")
        assert engine.abort("request-1")
        engine.run()
        assert not engine.abort("request-0")
        assert not engine.abort("request-1")
    trial.check(engine, jobs, requests)
    assert [r.finish_reason for r in requests] == ["length", "abort", "length"]


# ------------------------------------------------------------------ capacity


@pytest.mark.parametrize(("block_size", "num_blocks"), [(4, 4), (1, 16), (16, 1)])
def test_what_can_never_fit_is_refused_and_the_queue_goes_on(
    trial: Trial, block_size: int, num_blocks: int
) -> None:
    """16 places: 17 is refused with its numbers, exactly 16 runs."""
    good = [job(up(10), 7), job(up(3), 3)]
    with trial.engine(block_size=block_size, num_blocks=num_blocks) as engine:
        for length, most in ((20, 1), (10, 8)):
            message = f"{length} prompt \\+ {most} new tokens need .* has {num_blocks}"
            with pytest.raises(ValueError, match=message):
                engine.add_request(up(length), SamplingParams(max_tokens=most))
        requests = [engine.add_request(j.prompt, j.params) for j in good]
        engine.run()
    trial.check(engine, good, requests)


def test_aborting_the_one_that_waits_for_room_lets_the_others_in(trial: Trial) -> None:
    jobs = [job(up(4), 12), job(up(13), 3, abort=3), job((5, 6), 3)]
    result = trial.play(jobs, num_blocks=4)
    assert result.requests[1].finish_reason == "abort"
    assert result.requests[1].output_token_ids == []


@pytest.mark.parametrize(
    ("length", "max_tokens", "budget", "evicted"),
    [(12, 13, 4, 1), (22, 3, 4, 0), (21, 4, 8, 0)],
)
def test_two_long_ones_and_five_short_ones(
    trial: Trial, length: int, max_tokens: int, budget: int, evicted: int
) -> None:
    """Each long one needs 60 % of the pool in the end, and the budget is small.

    A long prompt enters when there is room for all of it: it is not evicted while it
    is still being read.
    """
    jobs = [job(up(length), max_tokens), job(down(length), max_tokens)]
    jobs += [job((i,), 3, arrival=2) for i in range(5)]
    result = trial.play(
        jobs, num_blocks=10, max_num_batched_tokens=budget, max_num_seqs=5
    )
    evictions = [request.num_preemptions for request in result.requests]
    assert evicted <= max(evictions) <= 3 * evicted


# ------------------------------------------------------------------ host and device


class EventsBeforeHost:
    """Looks, whenever the host touches a slot's buffers, whether their copies are over.

    The verdict is the event's own, not the detector's.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.looks: Counter[str] = Counter()

    def on_host(self, access: Access) -> None:
        if access.slot < 0:
            return
        io_slot = self.engine.io_slots[access.slot]
        if access.phase == "prepare":
            assert io_slot.h2d_done.query(), "refilled while it is being copied"
        if access.phase == "update":
            assert io_slot.d2h_done.query(), "read before the copy is over"
        self.looks[access.phase] += 1

    def on_launch(self, stream: str, access: Access) -> None: ...
    def on_record(self, stream: str, event: object) -> None: ...
    def on_wait(self, stream: str, event: object) -> None: ...
    def on_synchronize(self, event: object) -> None: ...


@pytest.mark.parametrize("phase", ["h2d", "d2h"])
def test_the_host_touches_a_slot_only_after_its_own_event(
    trial: Trial, phase: str
) -> None:
    device = trial.machine.new_device()
    if isinstance(device, ThreadsDevice):
        device.delay = lambda now: 0.005 if now == phase else 0.0
    engine = trial.engine(device=device)
    observer = EventsBeforeHost(engine)
    device.observers.append(observer)
    jobs = [job(up(4), 6), job(down(4), 6)]
    with engine:
        result = run(engine, jobs)
    trial.check(engine, jobs, result.requests)
    assert observer.looks == {"prepare": len(trial.batches), "update": 6}


def test_two_slots_that_share_one_output_buffer_are_reported(machine: Machine) -> None:
    """The next batch's copy may overwrite what the host is about to read."""
    device, detector = machine.new_device(), RaceDetector()
    device.observers.append(detector)
    config = config_for(Mode(1))
    engine = AsyncEngine(ModelRunner(machine.model), config, device)
    first, second = engine.io_slots
    second.host_sampled = first.host_sampled
    own = second.sampled
    second.sampled = (  # type: ignore[method-assign]
        lambda side: first.sampled(side) if side == "host" else own(side)
    )
    with engine:
        engine.add_request(up(4), SamplingParams(max_tokens=4))
        engine.run()
    assert {race.resource for race in detector.races} == {"slot A host_sampled"}
    assert {race.edge for race in detector.races} == {"slot_refill"}
    assert "d2h stream" in str(detector.races[0])


def test_one_event_for_both_slots_is_right_but_takes_turns() -> None:
    """It stands for the newest batch only, so the host waits for more than it needs."""
    elapsed = {}
    for is_shared in (False, True):
        device = SimDevice(costs=EVEN_COSTS)
        engine = AsyncEngine(ScriptedRunner(), config_for(Mode(1)), device)
        if is_shared:
            engine.io_slots[1].d2h_done = engine.io_slots[0].d2h_done
        with engine:
            request = engine.add_request(up(4), SamplingParams(max_tokens=8))
            engine.run()
        elapsed[is_shared] = (request.output_token_ids, device.now_us())
    assert elapsed[True][0] == elapsed[False][0]
    assert elapsed[True][1] > elapsed[False][1]


def test_only_the_virtual_device_warns_of_a_wait_before_the_record() -> None:
    for device in (SimDevice(), ThreadsDevice()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            device.stream("a").wait(device.event("e"))
        assert len(caught) == isinstance(device, SimDevice)
        device.close()


def test_the_loop_in_a_thread_of_its_own(trial: Trial) -> None:
    """Streams and grad mode belong to threads: who starts the engine is not who runs
    it."""
    jobs = [job(up(4), 6), job(down(5), 6)]
    engine = trial.engine()
    with EngineLoop(engine) as loop:
        handles = [loop.submit(j.prompt, j.params) for j in jobs]
        requests = [handle.result(timeout=60) for handle in handles]
    trial.check(engine, jobs, requests)


# ------------------------------------------------------------------ padding, poison


def live_cells(engine: Engine, batch: Batch) -> set[int]:
    """KV positions of a batch's own tokens."""
    size = engine.config.block_size
    return {
        position
        for o in batch.output.occurrences
        for position in slot_mapping(
            batch.blocks[o.request.request_id], o.start, o.start + o.length, size
        )
    }


def test_a_batch_changes_the_cells_of_its_own_tokens_and_no_others(
    machine: Machine,
) -> None:
    """The last block is full and somebody's own: a wrong index of -1 would hit it."""
    trial = Trial(machine, Mode(0))
    engine = trial.engine(num_blocks=5, debug=False)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    with engine:
        for prompt, most in (up(8), 9), ((5, 6), 3), ((7,), 2):
            engine.add_request(prompt, SamplingParams(max_tokens=most))
        cache = runner.cache
        assert cache is not None
        while engine.has_work:
            before = [t.clone() for t in (*cache.keys, *cache.values)]
            engine.step()
            after = [*cache.keys, *cache.values]
            changed: set[int] = set()
            for old, new in zip(before, after, strict=True):
                cells = (old != new).flatten(2).any(dim=-1).flatten()
                changed |= set(cells.nonzero().flatten().tolist())
            changed.discard(cache.padding_position)  # rows that pad a CUDA graph
            assert changed == live_cells(engine, trial.batches[-1])
    assert any(4 in batch.held for batch in trial.batches), "the last block is in use"
    assert cache.padding_position == 5 * 4
    assert not cache.keys[0][5][1:].any(), "the block of nobody"


def test_no_block_of_the_manager_holds_the_padding_position(machine: Machine) -> None:
    trial = Trial(machine, Mode(0))
    with trial.engine(num_blocks=3) as engine:
        runner, pool = engine.runner, engine.scheduler.blocks.pool
        assert isinstance(runner, ModelRunner)
        assert runner.cache is not None
        padding_block = runner.cache.padding_position // engine.config.block_size
        assert padding_block not in pool.take(pool.num_free)
        assert padding_block < len(runner.cache.keys[0])


def test_what_padding_leaves_behind_reaches_nobody(trial: Trial) -> None:
    """Not even as a number that is no number, which no weight of 0 would hide."""
    jobs = [job(up(7), 6), job(down(3), 6), job((5,), 6)]
    engine = trial.engine(num_blocks=5)
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.cache is not None
    cache = engine.runner.cache
    for tensor in (*cache.keys, *cache.values):
        tensor.flatten(0, 1)[cache.padding_position :] = torch.nan
    with engine:
        result = run(engine, jobs)
    trial.check(engine, jobs, result.requests)


def test_a_block_with_a_new_owner_is_spoilt_first_in_debug_mode(
    machine: Machine,
) -> None:
    trial = Trial(machine, Mode(0))
    engine = trial.engine(num_blocks=1, prefix_caching=False)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    with engine:
        for prompt in (up(4), (5, 6)):
            engine.add_request(prompt, SamplingParams(max_tokens=1))
            engine.run()
            assert runner.cache is not None
            cells = runner.cache.keys[0][0].flatten(1)
            spoilt = (cells == cells[3]).all(dim=-1).tolist()
    assert spoilt == [False, False, True, True]
    assert cells[3].min() > 1000


# ------------------------------------------------------------------ engine shell


def test_start_empty_then_again_after_going_idle(trial: Trial) -> None:
    jobs = [job(up(4), 4), job(down(4), 4)]
    requests = []
    with trial.engine() as engine:
        assert engine.step() == []
        for one in jobs:
            requests.append(engine.add_request(one.prompt, one.params))
            engine.run()
            assert engine.step() == []
    trial.check(engine, jobs, requests)


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_without_a_gpu_nothing_of_cuda_is_touched(machine: Machine) -> None:
    Trial(machine, Mode(1)).play([job(up(4), 4)])
    assert not torch.cuda.is_initialized()


def test_an_id_may_come_again_once_it_has_ended(trial: Trial) -> None:
    jobs = [job(up(4), 4), job(down(4), 4)]
    with trial.engine() as engine:
        requests = []
        for one in jobs:
            requests.append(
                engine.add_request(one.prompt, one.params, request_id="mine")
            )
            with pytest.raises(ValueError, match="request_id 'mine' is in use"):
                engine.add_request([1], one.params, request_id="mine")
            engine.run()
    check_invariants(engine, requests)
    check_tokens(trial.model, jobs, requests)


BAD_PROMPTS: dict[str, object] = {
    "empty": [],
    "outside the vocabulary": [1, 17],
    "fractions": [1.5, 2.0],
    "two dimensions": torch.tensor([[1, 2]]),
    "longer than the cache": [1] * 48,
}


@pytest.mark.parametrize("bad", BAD_PROMPTS)
def test_a_bad_prompt_among_three_good_ones(trial: Trial, bad: str) -> None:
    jobs = [job(up(4), 5), job(down(4), 5), job((5, 6), 5)]
    requests = []
    with trial.engine(num_blocks=12) as engine:
        for one in jobs:
            with pytest.raises(ValueError, match="prompt"):
                engine.add_request(BAD_PROMPTS[bad])  # type: ignore[arg-type]
            requests.append(engine.add_request(one.prompt, one.params))
            engine.step()
        engine.run()
    trial.check(engine, jobs, requests)


def test_bad_limits_are_refused_when_they_are_written_down() -> None:
    for value in (-1, 0):
        with pytest.raises(ValueError, match=f"max_tokens is {value}"):
            SamplingParams(max_tokens=value)


@pytest.mark.parametrize("company", ["alone", "in company", "evicted"])
def test_a_seed_gives_the_same_tokens(trial: Trial, company: str) -> None:
    """The draw depends on seed and position: the oracle draws it by itself."""
    drawn = {"temperature": 1.0, "seed": 11}
    mine = job(up(7), 9, **drawn)
    jobs = [mine]
    if company != "alone":
        other = job(down(7), 9, temperature=1.0, seed=12)
        jobs = [other, mine, replace(other, arrival=2)]
    blocks = {"num_blocks": 5} if company == "evicted" else {}
    result = trial.play(jobs, **blocks)
    if company == "evicted":
        assert result.requests[1].num_preemptions > 0


@pytest.mark.parametrize("at", ["schedule", "launch"])
def test_an_interrupt_between_two_phases_ends_all_and_leaves_a_good_engine(
    trial: Trial, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a cell is stopped a batch may be half booked; running it again works."""
    threads = threading.active_count()
    jobs = [job(up(4), 6)]
    with trial.engine() as engine:
        lost = engine.add_request(down(4), SamplingParams(max_tokens=6))
        engine.guarded_step()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, at, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.guarded_step()
        assert lost.finish_reason == "error"
        again = engine.add_request(jobs[0].prompt, jobs[0].params)
        while engine.has_work:
            engine.guarded_step()
    check_invariants(engine, [again])
    check_tokens(trial.model, jobs, [again])
    assert threading.active_count() == threads


# ------------------------------------------------------------------ random delays

Workload = tuple[list[Job], dict[str, object]]
WORKLOADS: dict[str, Workload] = {
    "evictions": (
        [job(up(7), 14), job(down(7), 14), job((3, 1, 4, 1, 5, 9, 2), 14)],
        {"num_blocks": 7},
    ),
    "rests": (
        [job((i, 2, 3), 7) for i in range(3)],
        {"make_scheduler": two_at_a_time},
    ),
    "rows turn": (
        [job((1, 2), 2), job((3, 4), 6), job((5, 6), 6), job((7, 8, 9), 6)],
        {"max_num_seqs": 3, "make_scheduler": Turning},
    ),
    "chunks": (
        [job((1, 2), 9), job(up(16), 3, arrival=2), job(down(9), 1, arrival=2)],
        {"max_num_batched_tokens": 8},
    ),
    "rules": (
        [job(up(4), 8, **rule) for rule in RULES.values()],
        {"max_num_seqs": 3},
    ),
    "stops and aborts": (
        [
            job((9, 8, 7, 6), 9, stop_token_ids=(14, 9)),
            job((4, 3, 2, 1), 9, stop_token_ids=(11,)),
            job(up(4), 9, abort=4),
            job(down(4), 4, arrival=2),
        ],
        {"num_blocks": 6, "max_num_seqs": 3},
    ),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_any_delay_on_any_stream(mode: Mode, workload: str, seed: int) -> None:
    """Now and then an op is held up for long enough to change who is first."""
    delays = random.Random(seed)
    device = ThreadsDevice(delay=lambda _: delays.choice([0.0, 0.0, 0.0, 0.003]))
    jobs, options = WORKLOADS[workload]
    Trial(Machine("threads"), mode).play(jobs, device=device, **options)
