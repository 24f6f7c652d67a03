"""How the next token is chosen: per-request parameters, and logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler; checks itself.

    Greedy by default. With a temperature, tokens are drawn by a generator that
    holds no state: the draw depends on (seed, position) alone, so a request gives
    the same tokens alone, in company, sync, async and after a preemption.

    >>> SamplingParams(max_tokens=0)
    Traceback (most recent call last):
    ...
    ValueError: max_tokens is 0, at least 1 is needed: ask for a token or for nothing
    """

    max_tokens: int = 64  # most tokens to generate
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False  # do not stop at the model's own end tokens

    def __post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {self.max_tokens!r}, at least 1 is needed: "
                "ask for a token or for nothing"
            )
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(
                f"temperature is {self.temperature!r}, the range is 0 to 100: "
                "use 0 for greedy, about 0.7 for variety"
            )
        if not _is_int(self.seed) or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"seed is {self.seed!r}, the range is 0 to {MAX_SEED}: "
                "give a whole number in it"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise ValueError(
                    f"stop_token_ids holds {token!r}, token ids are whole and not "
                    "negative: remove it"
                )


def sample(
    logits: Tensor,  # [S, V] float
    temperature: Tensor,  # [S] float32, 0 is greedy
    seeds: Tensor,  # [S] int32
    positions: Tensor,  # [S] int32   place of the new token in its request
) -> Tensor:  # [S] int64
    """Draw one token per row on the device, without state and without a host read.

    A row with temperature 0 takes the largest logit. Any other row takes the token
    at which the running sum of probabilities passes `uniform(seed, position)`.
    """
    greedy = logits.argmax(dim=-1)
    scale = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
    # float64 sums: with 128 K tokens a float32 sum would lose the small ones.
    sums = torch.softmax(logits.double() / scale, dim=-1).cumsum(dim=-1)
    threshold = uniform(seeds, positions).unsqueeze(-1) * sums[:, -1:]
    drawn = torch.searchsorted(sums, threshold, right=True).squeeze(-1)
    # Rounding can put the threshold at the very end; the last token is then meant.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(temperature > 0, drawn, greedy)


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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
