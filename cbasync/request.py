"""One prompt, what it has produced, and what it has been promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from cbasync.kv_cache import BlockTable
from cbasync.sampling import SamplingParams

FinishReason = Literal["length", "stop", "abort", "error"]


class RequestStatus(Enum):
    """Where a request stands. Prefill and decode are derived, not statuses."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenLogprobs(NamedTuple):
    """Log-probability of a token, and of the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: dict[int, float]  # token id -> log-probability, likeliest first


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in microseconds of the device's clock."""

    submitted_us: float = 0.0
    scheduled_us: float = -1.0  # first time in a batch
    first_token_us: float = -1.0
    finished_us: float = -1.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One prompt on its way through the engine, in two views.

    *Settled* is what the host knows: `output_token_ids`, `num_tokens`. *Scheduled*
    is what it has promised to batches that may still be in flight:
    `num_computed_tokens`, `num_pending_tokens`. With a prompt of 3, two settled
    tokens and one in flight:

        position            0   1   2   3   4   5
        token               p   p   p   a   b   ?
        settled             ------ num_tokens 5
        scheduled           ---------- num_tokens + num_pending_tokens 6

    Users see the settled view; block allocation and stops by length read the other.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # smaller is more urgent, for the priority policy
    arrival: int = -1  # number in the order of submission, -1: not submitted yet
    on_token: Callable[[int], bool] | None = None  # True: this token ends the request

    # Settled: what the host has seen.
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_tokens: int = 0  # prompt and settled output
    max_num_tokens: int = 0  # prompt and all the output it may have
    num_preemptions: int = 0
    discarded_tokens: int = 0  # computed after its end, thrown away
    num_cached_tokens: int = 0  # prompt tokens found in the cache
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one an output token
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by place
    times: RequestTimes = field(default_factory=RequestTimes)
    error: BaseException | None = None  # why it ended, if something failed

    # Scheduled: what batches have been promised.
    num_computed_tokens: int = 0  # tokens whose K,V are written or will be
    num_pending_tokens: int = 0  # sampled by a launched batch, not collected yet
    last_batch: int = -1  # newest batch that names this request
    last_rank: int = -1  # its place among the sampled rows of that batch

    # What it holds while it runs.
    row: int = -1  # its place in the host table and the device token rows
    blocks: BlockTable = field(default_factory=BlockTable)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.max_num_tokens = len(self.prompt_token_ids) + self.params.max_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and settled output."""
        return self.prompt_token_ids + self.output_token_ids

    def tokens_at(self, start: int, stop: int) -> tuple[int, ...]:
        """Settled tokens at the places `start .. stop-1`."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return tuple(self.prompt_token_ids[start:stop])
        output = self.output_token_ids[max(0, start - prompt) : stop - prompt]
        return (*self.prompt_token_ids[start:prompt], *output)

    @property
    def is_finished(self) -> bool:
        """Whether the host has seen its end."""
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finish_reason else ""
        return (
            f"Request({self.request_id}, {self.status.value}{end}, "
            f"{len(self.prompt_token_ids)} prompt + {len(self.output_token_ids)} of "
            f"{self.params.max_tokens} tokens)"
        )

    def _repr_html_(self) -> str:
        done, most = len(self.output_token_ids), self.params.max_tokens
        return f'{self!r}<br><progress max="{most}" value="{done}"></progress>'


@dataclass(frozen=True)
class RequestMetrics:
    """How long one request waited and took."""

    queue_ms: float  # submitted until first scheduled
    time_to_first_token_ms: float  # submitted until the host knew its first token
    time_per_token_ms: float  # mean over the tokens after the first
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    discarded_tokens: int

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        """Figures of a finished request; -1 for what never happened."""
        times, outputs = request.times, len(request.output_token_ids)

        def since_ms(start_us: float, end_us: float) -> float:
            return (end_us - start_us) / 1e3 if min(start_us, end_us) >= 0 else -1.0

        rest_ms = since_ms(times.first_token_us, times.finished_us)
        if outputs < 2:
            rest_ms = 0.0
        elif rest_ms >= 0:
            rest_ms /= outputs - 1
        return cls(
            queue_ms=since_ms(times.submitted_us, times.scheduled_us),
            time_to_first_token_ms=since_ms(times.submitted_us, times.first_token_us),
            time_per_token_ms=rest_ms,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=outputs,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            discarded_tokens=request.discarded_tokens,
        )


@dataclass(frozen=True)
class RequestOutput:
    """What a user gets for one prompt, in the order of submission."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str  # without the stop text that ended it
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per output token
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per prompt token; None for the first, which follows nothing."""
    samples: tuple[RequestOutput, ...] = ()  # with n above 1: all of them, this first

    @classmethod
    def of(cls, request: Request, text: str) -> RequestOutput:
        """Snapshot of a finished request."""
        assert request.finish_reason is not None, f"{request} has not finished"
        params, places = request.params, range(len(request.prompt_token_ids))
        prompt_logprobs = tuple(request.prompt_logprobs.get(i) for i in places)
        return cls(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            token_ids=tuple(request.output_token_ids),
            text=text,
            finish_reason=request.finish_reason,
            metrics=RequestMetrics.of(request),
            logprobs=None if params.logprobs is None else tuple(request.logprobs),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else prompt_logprobs
            ),
        )


def check_prompt(prompt: object, vocab_size: int) -> list[int]:
    """The prompt as a list of ints, or an error that says what is wrong with it.

    >>> check_prompt([5, 99], vocab_size=17)
    Traceback (most recent call last):
    ...
    ValueError: prompt[1] is 99, token ids go from 0 to 16: check the tokenizer
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        raise ValueError(
            f"prompt is {type(prompt).__name__}, a flat list of token ids is needed: "
            "tokenize it first"
        )
    if not prompt:
        raise ValueError("prompt is empty, at least 1 token is needed: add a token")
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(
                f"prompt[{index}] is {token!r}, a whole token id is needed: "
                "give one flat list of ints per prompt"
            )
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt[{index}] is {token}, token ids go from 0 to "
                f"{vocab_size - 1}: check the tokenizer"
            )
    return [int(token) for token in prompt]
