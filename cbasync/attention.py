"""Attention over a paged cache, registered with transformers under one name."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cbasync.batch import BatchShape
from cbasync.kv_cache import KVCache, blocks_for

NAME = "cbasync"


@dataclass
class PagedBatch:
    """What every attention layer of one forward pass reads.

    Rows with one query token (decodes) are computed together, longer ones one by one.
    How the batch is cut into rows is known to the host, as a launch parameter would
    be; what the rows hold is only read from the device.
    """

    cache: KVCache
    shape: BatchShape
    slot_mapping: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int32
    block_table: Tensor  # [R, M] int32
    decodes: DecodeGroup | None = field(init=False)
    chunks: list[Chunk] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        lengths, stops = self.shape.query_lens, self.shape.seq_lens
        if lengths is None or stops is None:
            self.decodes = self._decode_group(None, None, self.shape.max_seq_len)
            return
        starts = [0, *accumulate(lengths)]
        single = [row for row, length in enumerate(lengths) if length == 1]
        self.decodes = None
        if single:
            longest = max(stops[row] for row in single)
            tokens = [starts[row] for row in single]
            self.decodes = self._decode_group(single, tokens, longest)
        for row, length in enumerate(lengths):
            if length > 1:
                self.chunks.append(self._chunk(row, starts[row], length, stops[row]))

    def _decode_group(
        self, rows: list[int] | None, tokens: list[int] | None, longest: int
    ) -> DecodeGroup:
        device, block_size = self.seq_lens.device, self.cache.block_size
        seq_lens, block_table = self.seq_lens, self.block_table
        if rows is not None:
            index = torch.tensor(rows, device=device)
            seq_lens, block_table = seq_lens[index], block_table[index]
        width = blocks_for(longest, block_size)
        place = torch.arange(width * block_size, device=device)
        return DecodeGroup(
            tokens=None if tokens is None else torch.tensor(tokens, device=device),
            block_table=block_table[:, :width],
            mask=(place < seq_lens.unsqueeze(1))[:, None, None, :],
        )

    def _chunk(self, row: int, start: int, length: int, stop: int) -> Chunk:
        device = self.seq_lens.device
        mask = None
        if stop > length:  # a later chunk of a prompt: all that came before is visible
            ones = torch.ones(length, stop, dtype=torch.bool, device=device)
            mask = ones.tril(stop - length)
        width = blocks_for(stop, self.cache.block_size)
        return Chunk(start, length, stop, self.block_table[row : row + 1, :width], mask)


@dataclass
class DecodeGroup:
    """All rows of a batch with one query token."""

    tokens: Tensor | None  # [B] places in the flat batch, None: all of them in order
    block_table: Tensor  # [B, W]
    mask: Tensor  # [B, 1, 1, W * P] bool


@dataclass
class Chunk:
    """One row of a batch with several query tokens: a prompt or a part of one."""

    start: int  # first place in the flat batch
    length: int
    stop: int  # tokens in the cache, this chunk included
    block_table: Tensor  # [1, W]
    mask: Tensor | None  # [length, stop] bool, None: causal from 0


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, H, T, D]
    value: Tensor,  # [1, H, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    paged: PagedBatch,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, T, Hq, D]
    """Write the batch's K,V into the cache, then attend through the block table."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache = paged.cache
    cache.write(
        layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.slot_mapping
    )
    flat = query[0].transpose(0, 1)  # [T, Hq, D]
    out = torch.empty_like(flat)
    if (group := paged.decodes) is not None:
        keys, values = cache.gather(layer, group.block_table)
        rows = flat if group.tokens is None else flat[group.tokens]
        result = _decode(rows, keys, values, group.mask, scaling)
        if group.tokens is None:
            out = result
        else:
            out[group.tokens] = result
    for chunk in paged.chunks:
        keys, values = cache.gather(layer, chunk.block_table)
        stop = chunk.start + chunk.length
        out[chunk.start : stop] = _prefill(
            flat[chunk.start : stop],
            keys[0, : chunk.stop],
            values[0, : chunk.stop],
            chunk.mask,
            scaling,
        )
    return out.unsqueeze(0), None


def _decode(
    query: Tensor,  # [B, Hq, D]
    keys: Tensor,  # [B, K, H, D]
    values: Tensor,  # [B, K, H, D]
    mask: Tensor,  # [B, 1, 1, K]
    scaling: float | None,
) -> Tensor:  # [B, Hq, D]
    """One query token per request.

    The query heads that share a KV head become the rows of one small matrix, so K and
    V are read once and never repeated.
    """
    requests, heads, size = query.shape
    kv_heads = keys.shape[2]
    folded = query.view(requests, kv_heads, heads // kv_heads, size)
    result = scaled_dot_product_attention(
        folded, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=scaling
    )
    return result.reshape(requests, heads, size)


def _prefill(
    query: Tensor,  # [Q, Hq, D]
    keys: Tensor,  # [K, H, D]
    values: Tensor,  # [K, H, D]
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:  # [Q, Hq, D]
    """Several query tokens of one request."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, keys, values))
    result = scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return result[0].transpose(0, 1)


def register() -> None:
    """Make `attn_implementation="cbasync"` known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
