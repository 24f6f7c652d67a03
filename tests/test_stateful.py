"""Everything at once: requests of every kind come, go and get in each other's way."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cbasync.config import EngineConfig
from cbasync.devices import SimDevice
from cbasync.devices.races import RaceDetector
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.kv_cache import blocks_for
from cbasync.model_runner import ModelRunner
from cbasync.mutants import EVEN_COSTS
from cbasync.policy import POLICIES
from cbasync.random_models import tiny_model
from cbasync.request import Request
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler
from tests.oracle import (
    Job,
    check_invariants,
    check_logprobs,
    check_tokens,
    configs,
    params_strategy,
    prompts_strategy,
)

IS_LONG = os.environ.get("CBASYNC_PROFILE") == "long"
MODEL = tiny_model()


def cramped(config: EngineConfig) -> EngineConfig:
    """Hardly more blocks than the longest request needs, and others beside it."""
    longest = blocks_for(18 + 10, config.block_size)
    return replace(
        config,
        num_blocks=longest + config.num_blocks % 2,
        max_num_seqs=config.max_num_seqs + 2,
        max_num_batched_tokens=config.max_num_batched_tokens + 3,
    )


class EverythingAtOnce(RuleBasedStateMachine):
    """One engine on the virtual device, whose order is the worst that events allow.

    Between any two steps requests arrive and are aborted. At the end every answer must
    be that of the request run alone, whatever happened around it.
    """

    @initialize(
        config=configs().map(cramped),
        policy=st.sampled_from(sorted(POLICIES)),
        kind=st.sampled_from([AsyncEngine, AsyncEngine, SyncEngine]),
    )
    def start(self, config: EngineConfig, policy: str, kind: type[Engine]) -> None:
        device = SimDevice(costs=EVEN_COSTS, order="worst")
        self.detector = RaceDetector()
        device.observers.append(self.detector)
        self.engine = kind(
            ModelRunner(MODEL), config, device, Scheduler(config, policy)
        )
        self.jobs: list[Job] = []
        self.requests: list[Request] = []
        self.delivered: Counter[str] = Counter()

    def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, rank: int
    ) -> None:
        request = self.engine.add_request(prompt, params, priority=rank)
        self.jobs.append(Job(prompt, params))
        self.requests.append(request)

    # -------------------------------------------------------------- what may happen

    @rule(
        crowd=st.lists(
            st.tuples(prompts_strategy, params_strategy(), st.integers(0, 2)),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, crowd: list[tuple[tuple[int, ...], SamplingParams, int]]) -> None:
        for prompt, params, rank in crowd:
            self.submit(prompt, params, rank)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), rank=st.integers(0, 2), length=st.integers(1, 18))
    def come_back(self, data: st.DataObject, rank: int, length: int) -> None:
        """A prompt that begins like an earlier one, or like it and its answer."""
        job, request = data.draw(
            st.sampled_from(list(zip(self.jobs, self.requests, strict=True)))
        )
        prompt = (*job.prompt, *request.output_token_ids)[:length]
        plain = replace(job.params, prompt_logprobs=None, repetition_penalty=1.0)
        self.submit(prompt, plain, rank)

    @rule(steps=st.sampled_from([1, 1, 2, 3, 5, 8, 50]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for request in self.engine.step():
                self.delivered[request.request_id] += 1
            self.look()
        if not self.engine.has_work:
            pool = self.engine.scheduler.blocks.pool
            assert pool.num_free == pool.size, "idle, and not all blocks are free"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        was_there = not request.is_finished
        assert self.engine.abort(request.request_id) == was_there

    # -------------------------------------------------------------- what must hold

    @invariant()
    def look(self) -> None:
        if hasattr(self, "engine"):
            self.look_at_blocks()
            self.look_at_batches()
            self.look_at_requests()

    def look_at_blocks(self) -> None:
        """Each block has the owners that name it, and only full ones are shared."""
        scheduler = self.engine.scheduler
        owners: Counter[int] = Counter()
        for request in scheduler.running:
            table = request.blocks
            assert len(set(table.block_ids)) == len(table)
            owners.update(table.block_ids)
            settled = request.num_tokens // scheduler.config.block_size
            assert len(table.chain) <= settled, "published before it is settled"
        for request in scheduler.running:
            unshared = request.blocks.block_ids[len(request.blocks.chain) :]
            assert all(owners[b] == 1 for b in unshared), "written by two"
        pool = scheduler.blocks.pool
        assert pool.num_held == len(owners)
        assert pool.num_free + pool.num_leased + pool.num_held == pool.size
        assert not any(pool.is_free(block) for block in owners)
        rows = [request.row for request in scheduler.running]
        assert len(set(rows)) == len(rows) == scheduler.rows.num_held

    def look_at_batches(self) -> None:
        config, in_flight = self.engine.config, self.engine.in_flight
        assert len(in_flight) <= config.depth
        for entry in in_flight:
            assert 1 <= entry.output.num_tokens <= config.max_num_batched_tokens
            names = [o.request.request_id for o in entry.output.occurrences]
            assert len(names) == len(set(names)) <= config.max_num_seqs
        assert len(self.engine.scheduler.running) <= config.max_num_seqs

    def look_at_requests(self) -> None:
        pending = Counter(
            o.request.request_id
            for entry in self.engine.in_flight
            for o in entry.output.occurrences
            if o.rank >= 0
        )
        for request in self.requests:
            name, tokens = request.request_id, request.output_token_ids
            assert request.num_pending_tokens == pending[name]
            assert self.delivered[name] == len(tokens) <= request.params.max_tokens
            assert (request.finish_reason is not None) == request.is_finished
            if request.is_finished:
                assert request.row == -1
                assert not request.blocks.block_ids

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with self.engine:
            while self.engine.has_work:
                self.step(1)
        check_invariants(self.engine, self.requests)
        check_tokens(MODEL, self.jobs, self.requests)
        check_logprobs(MODEL, self.requests)
        assert self.detector.races == []
        metrics = self.engine.metrics
        assert metrics.num_finished == len(self.requests)
        assert metrics.num_output_tokens == self.delivered.total()


TestEverythingAtOnce = EverythingAtOnce.TestCase
TestEverythingAtOnce.settings = settings(
    max_examples=2000 if IS_LONG else 100,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
)
