"""Attention over a paged cache, registered with transformers under one name."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from cbasync.batch import BatchShape
from cbasync.kv_cache import KVCache, blocks_for
from cbasync.packed import PackedLinears
from cbasync.paged_ops import (
    attend_rows,
    attend_rows_op,
    grouped_attention,
    multiplied_attention,
)
from cbasync.varlen import MIN_CHUNK, LongChunks, has_varlen

NAME = "cbasync"


@dataclass
class PagedBatch:
    """What every attention layer of one forward pass reads, on a CPU.

    Rows with one query token (decodes) are computed together, longer ones one by one.
    How the batch is cut into rows is known to the host, as a launch parameter would
    be; what the rows hold is only read from the device.
    """

    cache: KVCache
    shape: BatchShape
    slot_mapping: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int32
    block_table: Tensor  # [R, M] int32
    cells: Tensor = field(init=False)  # where the cache writes the batch's tokens
    decodes: DecodeGroup | None = field(init=False)
    chunks: list[Chunk] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.cells = self.cache.cells(self.slot_mapping)
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
                table = self.block_table[row : row + 1]
                chunk = Chunk.of(self.cache, table, starts[row], length, stops[row])
                self.chunks.append(chunk)

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
        mask = (place < seq_lens.unsqueeze(1))[:, None, None, :]
        return DecodeGroup(
            tokens=None if tokens is None else torch.tensor(tokens, device=device),
            pieces=self.cache.pieces(block_table[:, :width]),
            mask=mask,
            bias=_as_bias(mask, self.cache),
        )


@dataclass
class DecodeGroup:
    """All rows of a batch with one query token."""

    tokens: Tensor | None  # [B] places in the flat batch, None: all of them in order
    pieces: Tensor  # what the cache gathers for them
    mask: Tensor  # [B, 1, 1, W * P] bool
    bias: Tensor | None  # [B * H, 1, W * P] the same to be added; None: as `mask` only


def _as_bias(mask: Tensor, cache: KVCache) -> Tensor | None:
    """A mask as numbers to add to scores, where the dtype is exact enough for that."""
    dtype = cache.keys[0].dtype
    if dtype not in (torch.float32, torch.float64):
        return None
    bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return bias.expand(-1, cache.num_kv_heads, -1, -1).flatten(0, 1)


@dataclass
class Chunk:
    """One row of a batch with several query tokens: a prompt or a part of one."""

    start: int  # first place in the flat batch
    length: int
    stop: int  # tokens in the cache, this chunk included
    pieces: Tensor  # what the cache gathers for it
    mask: Tensor | None  # [length, stop] bool, None: causal from 0

    @classmethod
    def of(
        cls, cache: KVCache, block_table: Tensor, start: int, length: int, stop: int
    ) -> Chunk:
        """A chunk with the part of its request's block table, `[1, M]`, it needs."""
        mask = None
        if stop > length:  # a later chunk of a prompt: all that came before is visible
            device = block_table.device
            ones = torch.ones(length, stop, dtype=torch.bool, device=device)
            mask = ones.tril(stop - length)
        width = blocks_for(stop, cache.block_size)
        return cls(start, length, stop, cache.pieces(block_table[:, :width]), mask)


@dataclass
class PagedRows:
    """A batch as a GPU reads it: rows of one query token, and long chunks of prompts.

    Which cache cells a row sees is only said by arrays on the device. A batch without
    prompts therefore runs the same kernels with the same arguments whatever its
    lengths, and fits into a CUDA graph.
    """

    cache: KVCache
    slot_mapping: Tensor  # [T] int64
    seq_lens: Tensor  # [T] int32, 0: this token is of a long chunk, or padding
    block_table: Tensor  # [T, M] int32
    rows_are_requests: bool = True  # False: several rows may be of one prompt
    long_chunks: tuple[LongChunks, ...] = ()  # computed together
    chunks: tuple[Chunk, ...] = ()  # one by one, where there is no kernel for that

    @classmethod
    def of_mixed(
        cls,
        cache: KVCache,
        shape: BatchShape,
        slot_mapping: Tensor,  # [T] int64
        positions: Tensor,  # [T] int32
        query_start_loc: Tensor,  # [R + 1] int32
        block_table: Tensor,  # [R, M] int32
    ) -> PagedRows:
        """A batch with prompts: short chunks of them become rows, too.

        No array is made from numbers of the host: such a copy would hold the host up
        until the GPU has finished the batch before.
        """
        assert shape.query_lens is not None
        assert shape.seq_lens is not None
        tokens = torch.arange(shape.num_tokens, device=positions.device)
        rows = torch.searchsorted(query_start_loc[1:], tokens, right=True)
        is_long = query_start_loc.diff()[rows] >= MIN_CHUNK
        paged = cls(
            cache,
            slot_mapping,
            torch.where(is_long, 0, positions + 1),
            block_table.index_select(0, rows),
            rows_are_requests=False,
        )
        starts = accumulate(shape.query_lens, initial=0)
        long = [
            (row, start, length, stop)
            for row, (start, length, stop) in enumerate(
                zip(starts, shape.query_lens, shape.seq_lens, strict=False)
            )
            if length >= MIN_CHUNK
        ]
        if long and has_varlen(cache):
            lengths = [(length, stop) for *_, length, stop in long]
            paged.long_chunks = LongChunks.of(
                rows, query_start_loc, positions, block_table, cache.block_size, lengths
            )
        else:
            paged.chunks = tuple(
                Chunk.of(cache, block_table[row : row + 1], start, length, stop)
                for row, start, length, stop in long
            )
        return paged

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Write K and V of all tokens; compute those that are rows, and long chunks."""
        run = attend_rows_op if torch.compiler.is_compiling() else attend_rows
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out: Tensor = run(
            query,
            key,
            value,
            keys,
            values,
            self.slot_mapping,
            self.seq_lens,
            self.block_table,
            scale,
            self.rows_are_requests,
        )
        for chunks in self.long_chunks:
            chunks.attend(query, keys, values, scale, out)
        return out


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, H, T, D]
    value: Tensor,  # [1, H, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    paged: PagedBatch | PagedRows,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, T, Hq, D]
    """Write the batch's K,V into the cache, then attend through the block table."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    flat, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
    if isinstance(paged, PagedRows):
        scale = flat.shape[-1] ** -0.5 if scaling is None else scaling
        out = paged.attend(layer, flat, keys, values, scale)
    else:
        paged.cache.write(layer, keys, values, paged.cells)
        out = _attend_decodes(layer, flat, paged, scaling)
    for chunk in paged.chunks:
        keys, values = paged.cache.gather(layer, chunk.pieces)
        stop = chunk.start + chunk.length
        out[chunk.start : stop] = _prefill(
            flat[chunk.start : stop],
            keys[:, :, : chunk.stop],
            values[:, :, : chunk.stop],
            chunk.mask,
            scaling,
        )
    return out.unsqueeze(0), None


def _attend_decodes(
    layer: int, flat: Tensor, paged: PagedBatch, scaling: float | None
) -> Tensor:
    """The rows with one query token; room for the others."""
    group = paged.decodes
    if group is None:
        return torch.empty_like(flat)
    keys, values = paged.cache.gather(layer, group.pieces)
    rows = flat if group.tokens is None else flat[group.tokens]
    if group.bias is None:
        found = grouped_attention(rows, keys, values, group.mask, scaling)
    else:
        found = multiplied_attention(rows, keys, values, group.bias, scaling)
    if group.tokens is None:
        return found
    out = torch.empty_like(flat)
    out[group.tokens] = found
    return out


def _prefill(
    query: Tensor,  # [Q, Hq, D]
    keys: Tensor,  # [1, H, K, D]
    values: Tensor,  # [1, H, K, D]
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:  # [Q, Hq, D]
    """Several query tokens of one request."""
    rows = query.transpose(0, 1).unsqueeze(0)
    result = scaled_dot_product_attention(
        rows,
        keys,
        values,
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=rows.shape[1] != keys.shape[1],
    )
    return result[0].transpose(0, 1)


class _Borrowed:
    """What a model was like before the first engine took it, and how many have it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.attention = model.config._attn_implementation
        self.was_training = model.training
        self.packed: PackedLinears | None = None
        self.count = 0


_borrowed: WeakKeyDictionary[PreTrainedModel, _Borrowed] = WeakKeyDictionary()


def borrow(model: PreTrainedModel, *, pack: bool = True) -> None:
    """Let an engine have the model: our attention, eval mode, weights as they are fast.

    Several engines may have one; what the first one asks for holds for all of them.
    """
    register()
    former = _borrowed.setdefault(model, _Borrowed(model))
    former.count += 1
    if former.count == 1:
        model.eval()
        model.set_attn_implementation(NAME)
        former.packed = PackedLinears(model) if pack else None


def give_back(model: PreTrainedModel) -> None:
    """The last engine that gives a model back leaves it as the first one found it."""
    former = _borrowed[model]
    former.count -= 1
    if former.count == 0:
        del _borrowed[model]
        if former.packed is not None:
            former.packed.undo()
        model.set_attn_implementation(former.attention)
        model.train(former.was_training)


def register() -> None:
    """Make `attn_implementation="cbasync"` known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
