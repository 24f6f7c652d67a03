"""What comes into an engine, checked before any work starts."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from itertools import count
from numbers import Integral

from cbasync.config import EngineConfig
from cbasync.kv_cache import blocks_for
from cbasync.request import Request, check_prompt
from cbasync.sampling import SamplingParams, check_params


class Intake:
    """Makes requests out of prompts; refuses what could never run.

    Knows limits, never other requests: a bad request cannot disturb a neighbour.

    >>> intake = Intake(EngineConfig(max_model_len=8), vocab_size=17)
    >>> intake.new_request([1, 2, 3], SamplingParams(max_tokens=6))
    Traceback (most recent call last):
    ...
    ValueError: request-0: 3 prompt + 6 new tokens is 9, max_model_len is 8: shorten \
one of them or raise max_model_len
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, in_use: Container[str] = ()
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self._in_use = in_use
        self._numbers = count()

    def _new_name(self) -> str:
        """One that no request has now, whatever names users have chosen."""
        names = (f"request-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._in_use)

    def new_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        eos_token_ids: Collection[int] = (),
        priority: int = 0,
    ) -> Request:
        """A checked request that is not queued yet.

        An engine knows no texts: `params.stop` is up to `on_token` of the request.
        """
        params = check_params(params)
        prompt = check_prompt(prompt_token_ids, self.vocab_size)
        name = self._new_name() if request_id is None else request_id
        stop = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop.update(eos_token_ids)
        request = Request(name, prompt, params, frozenset(stop), priority)
        self._check_alone(params, priority)
        self._check_logprobs(params)
        self._check_bias(request)
        self._check_fits(request)
        return request

    @staticmethod
    def _check_alone(params: SamplingParams, priority: object) -> None:
        if not isinstance(priority, Integral):
            raise ValueError(
                f"priority is {priority!r}, a whole number is needed: smaller goes "
                "first, 0 is usual"
            )
        if params.n > 1:
            raise ValueError(
                f"n is {params.n}, an engine draws one sample of a request: use "
                "LLM.generate(), or a request with a seed of its own for each"
            )

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name) or 0
            if asked > most:
                raise ValueError(
                    f"{name} is {asked}, max_logprobs is {most}: "
                    "ask for fewer or raise max_logprobs"
                )
            if asked > self.vocab_size:
                raise ValueError(
                    f"{name} is {asked}, the vocabulary has {self.vocab_size} tokens: "
                    "ask for fewer"
                )

    def _check_bias(self, request: Request) -> None:
        params, most = request.params, self.config.max_logit_bias
        biased = {token for token, _ in params.bias_pairs}
        for token in sorted(biased | request.stop_token_ids):
            if token >= self.vocab_size:
                raise ValueError(
                    f"token {token} is biased or ends the request, token ids go from 0 "
                    f"to {self.vocab_size - 1}: check the tokenizer"
                )
        if params.min_tokens:
            biased |= request.stop_token_ids
        if len(biased) > most:
            raise ValueError(
                f"{len(biased)} tokens are biased or held back, max_logit_bias is "
                f"{most}: bias fewer or raise max_logit_bias"
            )

    def _check_fits(self, request: Request) -> None:
        config, prompt = self.config, len(request.prompt_token_ids)
        most = request.params.max_tokens
        if prompt + most > config.max_model_len:
            raise ValueError(
                f"{request.request_id}: {prompt} prompt + {most} new tokens is "
                f"{prompt + most}, max_model_len is {config.max_model_len}: "
                "shorten one of them or raise max_model_len"
            )
        # The last token is never an input, so it needs no place in the cache.
        needed = blocks_for(prompt + most - 1, config.block_size)
        if needed > config.num_blocks:
            raise ValueError(
                f"{request.request_id}: {prompt} prompt + {most} new tokens need "
                f"{needed} blocks of {config.block_size}, the cache has "
                f"{config.num_blocks}: shorten one of them or raise num_blocks"
            )
