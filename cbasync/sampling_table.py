"""Sampling parameters of running requests as columns, and a batch's share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cbasync.config import EngineConfig
from cbasync.request import Request
from cbasync.sampler import NUM_SAMPLING_COLUMNS, SamplerNeeds
from cbasync.scheduler import Occurrence, SchedulerOutput

Ints = npt.NDArray[np.int64]
Host = Mapping[str, npt.NDArray[np.int32]]

# What a request asks of the sampler beyond the largest logit, as bits of one column.
RANDOM, FILTERS, HISTORY, BIAS, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8, 16, 32

_MAX_INT32 = 2**31 - 1
_GREEDY = SamplerNeeds()
# Temperature, top-p, min-p and penalties that change nothing.
_NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)


class SamplingTable:
    """One row per running request, written when it starts to run.

    Most batches are greedy: then a step reads one column of flags and is done.
    """

    def __init__(self, config: EngineConfig) -> None:
        rows = config.num_rows
        self.num_rows = rows
        self.flags = np.zeros(rows, np.uint8)
        self.sampling = np.zeros((rows, NUM_SAMPLING_COLUMNS), np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.seeds = np.zeros(rows, np.int32)
        self.num_logprobs = np.full(rows, -1, np.int32)
        self.prompt_logprobs = np.full(rows, -1, np.int32)
        self.num_prompt_tokens = np.zeros(rows, np.int32)

    def enter(self, request: Request) -> None:
        """Write a request's row."""
        row, params = request.row, request.params
        self.flags[row] = (
            RANDOM * params.is_random
            | FILTERS * params.has_filters
            | HISTORY * params.reads_history
            | BIAS * bool(params.logit_bias)
            | MIN_TOKENS * (params.min_tokens > 0)
            | LOGPROBS * params.has_logprobs
        )
        self.sampling[row] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.top_k[row] = min(params.top_k, _MAX_INT32)  # far more than any vocabulary
        self.seeds[row] = params.seed
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        wanted = params.prompt_logprobs
        self.prompt_logprobs[row] = -1 if wanted is None else wanted
        self.num_prompt_tokens[row] = len(request.prompt_token_ids)

    def fill(
        self,
        host: Host,
        output: SchedulerOutput,
        rows: Ints,  # [R]
        starts: Ints,  # [R]   first position computed of each
        sampled: Ints | slice,  # [S]   which of them get a token, by rank
    ) -> SamplerNeeds:
        """Write the arrays of the sampled rows; say what the batch needs."""
        sampled_rows, count = rows[sampled], output.num_sampled
        host["token_rows"][:count] = sampled_rows
        flags = int(np.bitwise_or.reduce(self.flags[rows]))
        if not flags:
            return _GREEDY
        if flags & (RANDOM | HISTORY):
            host["sampling"][:count] = self.sampling[sampled_rows]
            host["top_k"][:count] = self.top_k[sampled_rows]
            host["seeds"][:count] = self.seeds[sampled_rows]
        bias = False
        if flags & (BIAS | MIN_TOKENS):
            bias = self._fill_bias(host, [o for o in output.occurrences if o.rank >= 0])
        return SamplerNeeds(
            is_random=bool(flags & RANDOM),
            filters=bool(flags & FILTERS),
            history=bool(flags & HISTORY),
            bias=bias,
            num_logprobs=int(self.num_logprobs[sampled_rows].max(initial=-1)),
            prompt_logprobs=self._prompt_logprobs(rows, starts),
        )

    def _prompt_logprobs(self, rows: Ints, starts: Ints) -> int:
        """Most alternatives asked for by a request whose prompt is being read."""
        reads = starts < self.num_prompt_tokens[rows]
        return int(self.prompt_logprobs[rows[reads]].max(initial=-1))

    def pad(self, host: Host, tokens: slice, sampled: slice) -> None:
        """Make rows of padding greedy ones that change nobody's history."""
        host["history_rows"][tokens] = 2 * self.num_rows
        host["sampling"][sampled] = _NEUTRAL
        host["top_k"][sampled] = 0
        host["seeds"][sampled] = 0
        host["bias_ids"][sampled] = 0
        host["bias_values"][sampled] = 0

    def fill_history(
        self,
        host: Host,
        row_of_token: Ints,  # [T]
        positions: Ints,  # [T]
    ) -> None:
        """Say, for each token of the batch, where the device counts it."""
        is_output = positions >= self.num_prompt_tokens[row_of_token]
        rows = row_of_token + self.num_rows * is_output
        keeps = self.flags[row_of_token] & HISTORY
        nobody = 2 * self.num_rows
        host["history_rows"][: len(rows)] = np.where(keeps > 0, rows, nobody)

    def _fill_bias(self, host: Host, sampled: Sequence[Occurrence]) -> bool:
        ids, values = host["bias_ids"], host["bias_values"]
        ids[: len(sampled)] = 0
        values[: len(sampled)] = 0
        any_bias = False
        for rank, occurrence in enumerate(sampled):
            if not self.flags[occurrence.row] & (BIAS | MIN_TOKENS):
                continue
            for column, (token, value) in enumerate(_biased(occurrence)):
                ids[rank, column], values[rank, column] = token, value
                any_bias = True
        return any_bias


def _biased(occurrence: Occurrence) -> list[tuple[int, float]]:
    """A request's bias, and its end tokens ruled out while it is too short."""
    request = occurrence.request
    params = request.params
    place = occurrence.start + occurrence.length - len(request.prompt_token_ids)
    held_back = request.stop_token_ids if place < params.min_tokens else ()
    # A dict: a token that is biased and held back counts as held back.
    bias = dict(params.bias_pairs) | dict.fromkeys(held_back, float("-inf"))
    return list(bias.items())
