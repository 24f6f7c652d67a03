"""Long chunks of prompts on a GPU: all of a batch in one call of varlen attention.

Queries and keys of several requests lie one after the other, without padding; two
arrays say where each request begins. PyTorch's variable-length attention reads exactly
that, and lines the last query of a request up with its last key. So a later chunk of
a prompt needs no mask either.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from cbasync.kv_cache import KVCache

MIN_CHUNK = 64  # a shorter chunk is computed row by row
MAX_KEYS = 1 << 15  # that are copied together, unless a single chunk sees more

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256
_CAUSAL = (-1, 0)  # all keys before a query, none after it
# Some versions want to be told that several query heads share a KV head.
_GQA: dict[str, Any] = (
    {"enable_gqa": True}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters
    else {}
)


def has_varlen(cache: KVCache) -> bool:
    """Whether PyTorch's kernel takes heads of this kind on this GPU."""
    keys = cache.keys[0]
    return (
        keys.is_cuda
        and keys.dtype in _DTYPES
        and keys.shape[-1] <= _MAX_HEAD_SIZE
        and keys.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(keys.device) >= (8, 0)
    )


Lengths = Sequence[tuple[int, int]]
"""Of each long chunk: its own length, and all of its request up to its end."""


@dataclass
class LongChunks:
    """The long chunks of a batch, for every layer of one forward pass."""

    tokens: Tensor  # [Q] int64   their places in the flat batch
    cells: Tensor  # [K] int64   where the cache holds all that they see
    query_start_loc: Tensor  # [C + 1] int32
    key_start_loc: Tensor  # [C + 1] int32
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(
        cls,
        rows: Tensor,  # [T] int64   each token's request
        query_start_loc: Tensor,  # [R + 1] int32
        positions: Tensor,  # [T] int32
        block_table: Tensor,  # [R, M] int32
        block_size: int,
        lengths: Lengths,
    ) -> tuple[LongChunks, ...]:
        """The long chunks, as many at once as memory for their keys allows.

        Arrays are made on the device and only their sizes are known to the host: a copy
        from there would hold it up until the GPU has finished the batch before.
        """
        query_lens = query_start_loc.diff()
        is_long = query_lens >= MIN_CHUNK
        tokens = _first_true(is_long[rows], sum(length for length, _ in lengths))
        requests = _first_true(is_long, len(lengths))
        seq_lens = positions[query_start_loc[1:][requests] - 1] + 1
        found, token = [], 0
        for group in _groups(lengths):
            num_queries, num_keys = map(sum, zip(*lengths[group], strict=True))
            key_start_loc = _starts(seq_lens[group])
            ordinal = torch.arange(group.stop - group.start, device=rows.device)
            chunk = ordinal.repeat_interleave(seq_lens[group], output_size=num_keys)
            place = torch.arange(num_keys, device=rows.device) - key_start_loc[chunk]
            blocks = block_table[requests[group][chunk], place // block_size]
            found.append(
                cls(
                    tokens=tokens[token : token + num_queries],
                    cells=blocks.long() * block_size + place % block_size,
                    query_start_loc=_starts(query_lens[requests[group]]),
                    key_start_loc=key_start_loc,
                    max_query_len=max(length for length, _ in lengths[group]),
                    max_seq_len=max(stop for _, stop in lengths[group]),
                )
            )
            token += num_queries
        return tuple(found)

    def attend(
        self,
        query: Tensor,  # [T, Hq, D]
        keys: Tensor,  # [N, P, H, D]
        values: Tensor,  # [N, P, H, D]
        scale: float,
        out: Tensor,  # [T, Hq, D]
    ) -> None:
        """Attention of these tokens, to all that the cache holds of their requests."""
        found: Any = varlen_attn(
            query.index_select(0, self.tokens),
            keys.flatten(0, 1).index_select(0, self.cells),
            values.flatten(0, 1).index_select(0, self.cells),
            self.query_start_loc,
            self.key_start_loc,
            self.max_query_len,
            self.max_seq_len,
            scale=scale,
            window_size=_CAUSAL,
            **_GQA,
        )
        out.index_copy_(0, self.tokens, found)


def _groups(lengths: Lengths) -> Iterator[slice]:
    """Neighbours that have at most `MAX_KEYS` keys together, or are one chunk.

    >>> list(_groups([(64, 20_000), (64, 12_000), (64, 1_000), (64, 50_000)]))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start, num_keys = 0, 0
    for index, (_, stop) in enumerate(lengths):
        if num_keys and num_keys + stop > MAX_KEYS:
            yield slice(start, index)
            start, num_keys = index, 0
        num_keys += stop
    yield slice(start, len(lengths))


def _starts(lengths: Tensor) -> Tensor:
    """Where each of several chunks begins, and where the last one ends.

    >>> _starts(torch.tensor([3, 1]))
    tensor([0, 3, 4], dtype=torch.int32)
    """
    return pad(lengths.cumsum(0), (1, 0)).int()


def _first_true(mask: Tensor, count: int) -> Tensor:
    """Places that are true, in order, when the host knows how many there are.

    >>> _first_true(torch.tensor([False, True, False, True]), 2)
    tensor([1, 3])
    """
    return mask.logical_not().argsort(stable=True)[:count]
