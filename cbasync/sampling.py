"""What one request asks of the sampler; checks itself before any work starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_SEED = 2**31 - 1
_MAX_BIAS = 1e30  # beside any logit still a finite float32


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen, and when they end.

    Greedy by default. With a temperature, tokens are drawn by a generator that
    holds no state: the draw depends on (seed, position) alone, so a request gives
    the same tokens alone, in company, sync, async and after a preemption.

    >>> SamplingParams(max_tokens=0)
    Traceback (most recent call last):
    ...
    ValueError: max_tokens is 0, the range is 1 and up: give a whole number in it

    The logits pass, in this order: repetition, presence and frequency penalty; logit
    bias; end tokens held back until `min_tokens`; temperature; top-k; top-p; min-p.
    """

    max_tokens: int = 64  # most tokens to generate
    min_tokens: int = 0  # no end token and no stop text before this many
    n: int = 1  # samples of one prompt; the i-th one is drawn with seed + i

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # draw among the k likeliest, 0: all
    top_p: float = 1.0  # draw among the likeliest that sum up to p
    min_p: float = 0.0  # draw among those at least p times as likely as the likeliest
    seed: int = 0

    repetition_penalty: float = 1.0  # over prompt and output; above 1 discourages
    presence_penalty: float = 0.0  # off the logit of any token put out before
    frequency_penalty: float = 0.0  # off the logit, times how often it was put out
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    logprobs: int | None = None  # log-probabilities of the token and the top few
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens

    stop: str | Sequence[str] = ()  # texts that end the request, cut off the output
    stop_token_ids: Sequence[int] = ()  # besides the model's own end tokens
    ignore_eos: bool = False  # do not stop at the model's own end tokens

    def __post_init__(self) -> None:
        self._check_counts()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True
        )
        _in_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, MAX_SEED)

    def _check_counts(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: "
                "lower the first or raise the second"
            )
        _whole("n", self.n, 1, None)
        _whole("top_k", self.top_k, 0, None)
        _whole("seed", self.seed, 0, MAX_SEED - self.n + 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, 0, None)

    # ------------------------------------------------------------------ what it needs

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, whichever way it was given."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    @property
    def has_filters(self) -> bool:
        """Whether the draw is narrowed; greedy rows have no use for it."""
        narrowed = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.is_random and narrowed

    @property
    def reads_history(self) -> bool:
        """Whether logits depend on the tokens before: kept on the device."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are to come back with the tokens."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def needs_every_position(self) -> bool:
        """Whether each prompt token has to pass the model, cached prefix or not."""
        return self.reads_history or self.prompt_logprobs is not None


def check_params(params: object) -> SamplingParams:
    """Sampling parameters as they are, the default ones for None.

    >>> check_params({"max_tokens": 3})
    Traceback (most recent call last):
    ...
    ValueError: params is {'max_tokens': 3}, sampling parameters are needed: write \
SamplingParams(max_tokens=...)
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"params is {params!r}, sampling parameters are needed: write "
            "SamplingParams(max_tokens=...)"
        )
    return params


def _bias_pairs(
    bias: Mapping[int, float] | Sequence[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    given: Any = bias.items() if isinstance(bias, Mapping) else bias
    if not _is_list(given) or not all(_is_list(p) and len(p) == 2 for p in given):
        raise ValueError(
            f"logit_bias is {bias!r}, a number for each token is needed: "
            "write {token: number}"
        )
    pairs = tuple(given)
    seen: set[int] = set()
    for token, value in pairs:
        _whole("logit_bias token", token, 0, None)
        # Minus infinity rules a token out; plus infinity, and what becomes it on the
        # device, has no softmax.
        if not _is_number(value) or math.isnan(value) or value > _MAX_BIAS:
            raise ValueError(
                f"logit_bias of token {token} is {value!r}, numbers up to "
                f"{_MAX_BIAS:g} and minus infinity have a meaning: give one of them"
            )
        if token in seen:
            raise ValueError(
                f"logit_bias names token {token} twice, one value is used: remove one"
            )
        seen.add(token)
    return pairs


def _stop_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, str) and not _is_list(stop):
        raise ValueError(
            f"stop is {stop!r}, a text or a list of them is needed: give one"
        )
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop holds {text!r}, texts are needed: remove it")
    return texts


def _token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    if not _is_list(tokens):
        raise ValueError(
            f"stop_token_ids is {tokens!r}, a list of token ids is needed: "
            "put it in brackets"
        )
    return tuple(tokens)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _whole(name: str, value: object, least: int, most: int | None) -> None:
    # numpy's integers are whole numbers too.
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):  # type: ignore[operator]
        reach = f"{least} and up" if most is None else f"{least} to {most}"
        raise ValueError(
            f"{name} is {value!r}, the range is {reach}: give a whole number in it"
        )


def _is_number(value: object) -> bool:
    # numpy's floats are real numbers too.
    return isinstance(value, Real) and not isinstance(value, bool)


def _in_range(
    name: str, value: float, least: float, most: float, *, open_below: bool = False
) -> None:
    # Written so that nan fails.
    inside = _is_number(value) and least <= value <= most
    if not inside or (open_below and value == least):
        above = "above " if open_below else ""
        raise ValueError(
            f"{name} is {value!r}, the range is {above}{least:g} to {most:g}: "
            "give a number in it"
        )
