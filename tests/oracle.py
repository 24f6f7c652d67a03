"""The oracle and the workloads: what every engine is held against.

The oracle runs one request at a time, without cache and without batching.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbasync.config import EngineConfig
from cbasync.devices import Device, make_device
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.model_runner import ModelRunner
from cbasync.request import Request, TokenLogprobs
from cbasync.sampler import uniform
from cbasync.sampling import SamplingParams
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
            ids.append(_next_token(model, ids, len(prompt), params))
            if ids[-1] in params.stop_token_ids:
                break
    model.set_attn_implementation(former)
    return tuple(ids[len(prompt) :])


def _next_token(
    model: PreTrainedModel, ids: list[int], num_prompt: int, params: SamplingParams
) -> int:
    inputs: Any = torch.tensor([ids], device=model.device)
    logits: Any = model(inputs, use_cache=False).logits[:, -1].double()
    scores = _penalized(inputs, logits, num_prompt, params)
    if params.temperature == 0:
        return int(scores.argmax())
    scores = TemperatureLogitsWarper(params.temperature)(inputs, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(inputs, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(inputs, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(inputs, scores)
    draw = uniform(torch.tensor([params.seed]), torch.tensor([len(ids)])).item()
    sums = scores.softmax(dim=-1).cumsum(dim=-1)[0]
    return int((sums <= draw * sums[-1]).sum().clamp(max=len(sums) - 1))


def _penalized(
    inputs: Any, logits: Any, num_prompt: int, params: SamplingParams
) -> Any:
    """Penalties as transformers computes them, and the rest by plain counting."""
    if params.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = penalty(inputs, logits)
    output = inputs[0, num_prompt:].tolist()
    for token in set(output):
        logits[0, token] -= params.frequency_penalty * output.count(token)
        logits[0, token] -= params.presence_penalty
    for token, value in params.bias_pairs:
        logits[0, token] += value
    if len(output) < params.min_tokens:
        logits[0, list(params.stop_token_ids)] = -torch.inf
    return logits


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


def check_logprobs(model: PreTrainedModel, requests: list[Request]) -> None:
    """Each asked-for log-probability equals that of one uncached forward pass."""
    for request in requests:
        params = request.params
        if params.logprobs is None and params.prompt_logprobs is None:
            continue
        former = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            inputs = torch.tensor([request.token_ids], device=model.device)
            rows = model(inputs, use_cache=False).logits[0].log_softmax(-1).cpu()
        model.set_attn_implementation(former)
        prompt = len(request.prompt_token_ids)
        if params.logprobs is not None:
            assert len(request.logprobs) == len(request.output_token_ids)
            for place, entry in enumerate(request.logprobs, start=prompt):
                _check_entry(entry, request.token_ids[place], rows[place - 1])
                assert len(entry.top) == params.logprobs
        if params.prompt_logprobs is not None and request.output_token_ids:
            assert sorted(request.prompt_logprobs) == list(range(1, prompt))
            for place, entry in request.prompt_logprobs.items():
                _check_entry(entry, request.token_ids[place], rows[place - 1])


def _check_entry(entry: TokenLogprobs, token: int, row: Tensor) -> None:
    assert entry.token_id == token
    assert abs(entry.logprob - row[token].item()) < 1e-4
    best = row.sort(descending=True).values[: len(entry.top)].tolist()
    assert list(entry.top.values()) == pytest.approx(best, abs=1e-4)


def play(model: PreTrainedModel, engine: Engine, jobs: list[Job]) -> Result:
    """Run a workload and check everything about it."""
    with engine:
        result = run(engine, jobs)
    check_invariants(engine, result.requests)
    check_tokens(model, jobs, result.requests)
    check_logprobs(model, result.requests)
    return result


# ------------------------------------------------------------------ random workloads

_tokens = st.integers(0, VOCAB - 1)


@st.composite
def params_strategy(draw: st.DrawFn) -> SamplingParams:
    """Mostly plain requests, and some that ask for everything at once."""
    max_tokens = draw(st.integers(1, 10))
    plain = {
        "max_tokens": max_tokens,
        "temperature": draw(st.sampled_from([0.0, 0.0, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "stop_token_ids": tuple(draw(st.lists(_tokens, max_size=2, unique=True))),
    }
    if draw(st.booleans()):
        return SamplingParams(**plain)  # type: ignore[arg-type]
    return SamplingParams(
        **plain,  # type: ignore[arg-type]
        min_tokens=draw(st.integers(0, max_tokens)),
        top_k=draw(st.sampled_from([0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=tuple((t, 1.5) for t in draw(st.sets(_tokens, max_size=2))),
        logprobs=draw(st.none() | st.integers(0, 3)),
        prompt_logprobs=draw(st.none() | st.integers(0, 2)),
    )


# Some begin alike, so that blocks are shared.
prompts_strategy = st.one_of(
    st.lists(_tokens, min_size=1, max_size=18),
    st.integers(1, 18).map(lambda length: [i * 5 % VOCAB for i in range(length)]),
).map(tuple)
jobs_strategy = st.lists(
    st.builds(
        Job,
        prompt=prompts_strategy,
        params=params_strategy(),
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
        prefix_caching=draw(st.booleans()),
        max_logprobs=3,
    )


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Causal attention of one request, every step of it in float64."""
    q, k, v = (t.double().transpose(0, 1) for t in (query, keys, values))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * (scaling or 1 / math.sqrt(q.shape[-1]))
    length, stop = scores.shape[1:]
    place = torch.arange(stop, device=query.device)
    hidden = place > place[stop - length :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)
