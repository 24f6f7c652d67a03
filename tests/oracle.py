"""The oracle and the workloads: what every engine is held against.

The oracle runs one request at a time, without cache and without batching.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cbasync.config import EngineConfig
from cbasync.devices import Device, make_device
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.model_runner import ModelRunner
from cbasync.request import Request
from cbasync.sampling import SamplingParams, sample
from cbasync.scheduler import Occurrence, Scheduler

VOCAB = 17


@dataclass(frozen=True)
class Job:
    """One request of a workload, and what happens to it."""

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams(max_tokens=8)
    arrival: int = 0  # engine step at which it is submitted
    abort: int | None = None  # engine step at which it is aborted


@dataclass
class Result:
    """What a run left behind."""

    requests: list[Request]
    engine: Engine
    steps: int = 0
    published: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        return [request.output_token_ids for request in self.requests]


class ShuffledScheduler(Scheduler):
    """Rows of every batch in a random order: any order must give the same tokens."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        super().__init__(config)
        self._random = random.Random(seed)

    def arrange(self, occurrences: list[Occurrence]) -> list[Occurrence]:
        self._random.shuffle(occurrences)
        return occurrences


def expected(model: PreTrainedModel, job: Job) -> list[int]:
    """The tokens of a request run alone to its end."""
    return list(_expected(model, job.prompt, job.params))


@lru_cache(maxsize=20_000)
def _expected(
    model: PreTrainedModel, prompt: tuple[int, ...], params: SamplingParams
) -> tuple[int, ...]:
    former = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) - len(prompt) < params.max_tokens:
            ids.append(_next_token(model, ids, params))
            if ids[-1] in params.stop_token_ids:
                break
    model.set_attn_implementation(former)
    return tuple(ids[len(prompt) :])


def _next_token(model: PreTrainedModel, ids: list[int], params: SamplingParams) -> int:
    inputs = torch.tensor([ids], device=model.device)
    logits = model(inputs, use_cache=False).logits[:, -1]
    if params.temperature == 0:
        return int(logits.argmax())
    device = model.device
    return int(
        sample(
            logits,
            torch.tensor([params.temperature], device=device),
            torch.tensor([params.seed], device=device),
            torch.tensor([len(ids)], device=device),
        )
    )


def make_engine(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    sync: bool = False,
    device: Device | str = "threads",
    shuffle: int | None = None,
) -> Engine:
    """An engine of either kind on a device of any kind."""
    kind = SyncEngine if sync else AsyncEngine
    scheduler = None if shuffle is None else ShuffledScheduler(config, shuffle)
    owned = make_device(device) if isinstance(device, str) else device
    return kind(ModelRunner(model), config, owned, scheduler)


def run(engine: Engine, jobs: list[Job]) -> Result:
    """Play a workload: submit, abort and step until everything has ended."""
    result = Result([], engine)
    by_job: dict[int, Request] = {}
    step = 0
    while len(by_job) < len(jobs) or engine.has_work:
        for number, job in enumerate(jobs):
            if job.arrival == step:
                by_job[number] = engine.add_request(job.prompt, job.params)
            if job.abort == step and number in by_job:
                engine.abort(by_job[number].request_id)
        engine.step()
        step += 1
        assert step < 5000, f"no end in sight: {engine!r}"
    result.requests = [by_job[number] for number in range(len(jobs))]
    result.steps = step
    return result


def check_invariants(engine: Engine, requests: list[Request]) -> None:
    """What must hold after every run, whatever happened in it."""
    scheduler = engine.scheduler
    for pool in (scheduler.blocks.pool, scheduler.rows):
        assert pool.num_free == pool.size, f"not all came back: {pool}"
        assert pool.num_leased == pool.num_held == 0
    assert not engine.in_flight
    assert not engine.requests
    assert not scheduler.running
    assert not scheduler.waiting
    for request in requests:
        assert request.is_finished
        assert request.finish_reason is not None
        assert request.num_pending_tokens == 0
        assert len(request.output_token_ids) <= request.params.max_tokens
    discarded = sum(request.discarded_tokens for request in requests)
    assert scheduler.discarded_tokens == discarded


def check_tokens(
    model: PreTrainedModel, jobs: list[Job], requests: list[Request]
) -> None:
    """Every request equals the oracle; an aborted one is the beginning of it."""
    for job, request in zip(jobs, requests, strict=True):
        want, got = expected(model, job), request.output_token_ids
        if request.finish_reason == "abort":
            want = want[: len(got)]
        assert got == want, f"{job} gave {got}, alone it gives {want}"


def play(model: PreTrainedModel, engine: Engine, jobs: list[Job]) -> Result:
    """Run a workload and check everything about it."""
    with engine:
        result = run(engine, jobs)
    check_invariants(engine, result.requests)
    check_tokens(model, jobs, result.requests)
    return result


# ------------------------------------------------------------------ random workloads

_tokens = st.integers(0, VOCAB - 1)
_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    stop_token_ids=st.lists(_tokens, max_size=2).map(tuple),
)
jobs_strategy = st.lists(
    st.builds(
        Job,
        prompt=st.lists(_tokens, min_size=1, max_size=18).map(tuple),
        params=_params,
        arrival=st.integers(0, 8),
        abort=st.none() | st.integers(0, 25),
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Engines from cramped to roomy; every request of a workload fits alone."""
    block_size = draw(st.integers(1, 16))
    longest = 18 + 10
    enough = -(-longest // block_size)
    return EngineConfig(
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        block_size=block_size,
        num_blocks=enough + draw(st.integers(0, enough)),
        max_model_len=32,
        depth=draw(st.integers(0, 3)),
        carry_over=draw(st.sampled_from(["slot", "row"])),
        debug=draw(st.booleans()),
    )
