"""Logits to tokens on the device: no state on the host, no host read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Columns of the `sampling` array, one row per sampled request.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
NUM_SAMPLING_COLUMNS = 6


class SamplerNeeds(NamedTuple):
    """Which parts of the sampler a batch needs; a launch parameter, known to the host.

    >>> SamplerNeeds().is_greedy
    True
    """

    is_random: bool = False
    filters: bool = False
    history: bool = False
    bias: bool = False
    num_logprobs: int = -1  # -1: none, 0: of the chosen token, k: and of the top k
    prompt_logprobs: int = -1  # the same for the tokens of prompts

    @property
    def words(self) -> tuple[str, ...]:
        """The same in words, for a log.

        >>> SamplerNeeds(is_random=True, num_logprobs=3).words
        ('random', 'logprobs 3')
        """
        named = {
            "random": self.is_random,
            "filters": self.filters,
            "history": self.history,
            "bias": self.bias,
            f"logprobs {self.num_logprobs}": self.num_logprobs >= 0,
            f"prompt logprobs {self.prompt_logprobs}": self.prompt_logprobs >= 0,
        }
        return tuple(word for word, is_so in named.items() if is_so) or ("greedy",)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is all that is asked for."""
        return self == SamplerNeeds()


class SamplerInputs(NamedTuple):
    """The arrays of one batch's sampled rows, on the device."""

    sampling: Tensor  # [S, 6] float32, see the column names
    top_k: Tensor  # [S] int32, 0: all
    seeds: Tensor  # [S] int32
    positions: Tensor  # [S]   place of the new token in its request
    rows: Tensor  # [S]   history row of each request
    bias_ids: Tensor  # [S, K] int32, padded with token 0
    bias_values: Tensor  # [S, K] float32, padded with 0


class TokenHistory:
    """How often each request has seen each token: one row a request, on the device.

    The host does not know a request's last token when it schedules the next batch, so
    penalties cannot be computed there. Each forward pass adds the tokens it reads:
    after that the row holds the prompt and all output so far, the newest included.

    Two tables in one, `[2 * rows + 1, V]`: prompt tokens, output tokens, and one row
    for the tokens of requests that do not ask.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        with torch.inference_mode(False):
            self.counts = torch.zeros(
                (2 * num_rows + 1, vocab_size), dtype=torch.int32, device=device
            )

    @property
    def nobody(self) -> int:
        """Where the tokens of requests without penalties go."""
        return 2 * self.num_rows

    def add(
        self,
        rows: Tensor,  # [T]   row, or num_rows + row for an output token
        input_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
    ) -> None:
        """Count a batch's input tokens; a request that starts over starts from 0."""
        rows, vocab = rows.long(), self.counts.shape[1]
        starts = torch.where(positions == 0, rows, self.nobody)
        # Most entries of `starts` are the row for nobody: clearing it is harmless.
        self.counts.index_fill_(0, starts, 0)
        outputs = torch.where(starts < self.num_rows, starts + self.num_rows, starts)
        self.counts.index_fill_(0, outputs, 0)
        flat = rows * vocab + input_ids.long()
        ones = torch.ones_like(flat, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, flat, ones)

    def penalize(self, logits: Tensor, inputs: SamplerInputs) -> Tensor:
        """Repetition, presence and frequency penalties: `[S, V]` to `[S, V]`."""
        rows = inputs.rows.long()
        prompt, output = self.counts[rows], self.counts[rows + self.num_rows]
        columns = inputs.sampling.to(logits.dtype).unsqueeze(-1)
        repetition = columns[:, REPETITION]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where((prompt + output) > 0, repeated, logits)
        logits = logits - columns[:, FREQUENCY] * output
        return logits - columns[:, PRESENCE] * (output > 0)


def sample(
    logits: Tensor,  # [S, V] float
    inputs: SamplerInputs,
    needs: SamplerNeeds,
    history: TokenHistory | None = None,
) -> Tensor:  # [S] int64
    """Choose one token per row.

    A row with temperature 0 takes the largest logit. Any other row takes the token
    at which the running sum of probabilities passes `uniform(seed, position)`.
    """
    if needs.history:
        assert history is not None, "penalties need a history"
        logits = history.penalize(logits, inputs)
    if needs.bias:
        # In half precision a large bias would be infinite.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        values = inputs.bias_values.to(dtype)
        logits = logits.to(dtype).scatter_add(1, inputs.bias_ids.long(), values)
    greedy = logits.argmax(dim=-1)
    if not needs.is_random:
        return greedy
    temperature = inputs.sampling[:, TEMPERATURE]
    is_random = temperature > 0
    scores = logits.double() / torch.where(is_random, temperature, 1.0).unsqueeze(-1)
    if needs.filters:
        scores = filtered(
            scores, inputs.top_k, inputs.sampling[:, TOP_P], inputs.sampling[:, MIN_P]
        )
    return torch.where(is_random, draw(scores, inputs), greedy)


def filtered(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scores with minus infinity where top-k, then top-p, then min-p say so.

    >>> scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    >>> ones, zeros = torch.ones(1), torch.zeros(1)
    >>> filtered(scores, torch.tensor([2]), ones, zeros).tolist()
    [[2.0, 1.0, -inf, -inf]]
    >>> filtered(scores, torch.tensor([0]), ones * 0.6, zeros).tolist()
    [[2.0, -inf, -inf, -inf]]
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    vocab = scores.shape[-1]
    rank = torch.arange(vocab, device=scores.device)
    limit = torch.where(top_k > 0, top_k, vocab).unsqueeze(-1)
    # Equal scores share a fate: all that equal the k-th stay.
    last = ordered.gather(-1, (limit - 1).clamp(0, vocab - 1).long())
    ordered = ordered.masked_fill((rank >= limit) & (ordered < last), -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    outside = (before >= top_p.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1)
    outside[:, 0] = False  # the likeliest always stays
    ordered = ordered.masked_fill(outside, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    unlikely = probabilities < min_p.unsqueeze(-1) * probabilities[:, :1]
    ordered = ordered.masked_fill(unlikely, -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)


def draw(scores: Tensor, inputs: SamplerInputs) -> Tensor:
    """One token per row, where the running sum of probabilities passes the draw."""
    # float64 sums: with 128 K tokens a float32 sum would lose the small ones.
    sums = scores.softmax(dim=-1).cumsum(dim=-1)
    threshold = uniform(inputs.seeds, inputs.positions).unsqueeze(-1) * sums[:, -1:]
    drawn = torch.searchsorted(sums, threshold, right=True).squeeze(-1)
    # Rounding can put the threshold at the very end; the last token is then meant.
    return drawn.clamp_(max=scores.shape[-1] - 1)


def top_logprobs(
    logits: Tensor,  # [S, V]
    tokens: Tensor,  # [S] int64
    count: int,
) -> tuple[Tensor, Tensor]:  # [S, 1 + count] int64, [S, 1 + count] float32
    """Log-probabilities of the given tokens and of the `count` likeliest ones.

    Of the model's own distribution: before penalties, bias and temperature.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0]])
    >>> ids, values = top_logprobs(logits, torch.tensor([0]), 2)
    >>> ids.tolist(), [round(v, 3) for v in values[0].tolist()]
    ([[0, 2, 1]], [-2.408, -0.408, -1.408])
    """
    values = logits.float().log_softmax(dim=-1)
    chosen = values.gather(-1, tokens.unsqueeze(-1))
    top, ids = values.topk(min(count, logits.shape[-1]), dim=-1)
    return (
        torch.cat([tokens.unsqueeze(-1), ids], dim=-1),
        torch.cat([chosen, top], dim=-1),
    )


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on (seed, position) alone.

    A 32-bit integer hash (xor-shift and multiply rounds) in int64, so that the CPU
    and the GPU agree to the last bit.

    >>> u = uniform(torch.tensor([7, 7, 8]), torch.tensor([0, 1, 0]))
    >>> [round(x, 3) for x in u.tolist()]
    [0.129, 0.377, 0.464]
    """
    x = _mix(seeds.long() + 0x9E3779B9) ^ positions.long()
    high, low = _mix(x + 0x85EBCA6B), _mix(x + 0xC2B2AE35)
    return ((high << 21) | (low >> 11)).double() / float(1 << 53)


def _mix(x: Tensor) -> Tensor:
    """One avalanche over the low 32 bits."""
    x = x & 0xFFFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
