"""Paged decode attention as two Triton kernels, and one that only writes K and V.

One program reads one piece of one request's keys and values for one KV head, and keeps
a running softmax; a second kernel merges the pieces:

    tokens of request r       0 .. 63    64 .. 127    128 .. 191    192 .. 199
                            |          split 0      |          split 1         |
    grid (r, KV head, split)   program (r, h, 0)        program (r, h, 1)

Nothing here depends on how long the requests are: the grid is fixed by the number of
rows, and each program finds the end of its piece on the device. A CUDA graph of these
kernels therefore fits every context length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # tokens that a program loads at once; measured best with 2 warps, 3 stages
_WARPS, _STAGES = 2, 3
_MIN_ROWS = 16  # least rows of one `tl.dot`
_PROGRAMS = 512  # about four for each multiprocessor of a large GPU hide the latency
_MAX_SPLITS = 64
_LOG2_E = 1.4426950408889634

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Pieces that each request is cut into, so that all multiprocessors are busy."""
    wanted = _PROGRAMS // (num_rows * num_kv_heads)
    return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


@triton.jit
def _write_kernel(
    key,  # [T, H, D]
    value,
    key_pool,  # [N * P, H, D]
    value_pool,
    slot_mapping,  # [T]
    key_token,  # strides
    key_head,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    token = tl.program_id(0)
    place = tl.load(slot_mapping + token).to(tl.int64) * (HEADS * SIZE)
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, SIZE_PAD)[None, :]
    inside = (heads < HEADS) & (dims < SIZE)
    target = place + heads * SIZE + dims
    source = key + token * key_token + heads * key_head + dims
    tl.store(key_pool + target, tl.load(source, mask=inside), mask=inside)
    source = value + token * value_token + heads * value_head + dims
    tl.store(value_pool + target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def _copy_row(source, target, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    dims = tl.arange(0, SIZE_PAD)
    tl.store(target + dims, tl.load(source + dims, mask=dims < SIZE), mask=dims < SIZE)


@triton.jit
def _attend_kernel(
    query,  # [R, Hq, D]
    key,  # [R, H, D]: of each request's newest token, if WRITES
    value,
    key_pool,  # [N * P, H, D]
    value_pool,
    block_table,  # [R, M]
    seq_lens,  # [R]
    pieces,  # [R, Hq, SPLITS, D] float32: output of each piece
    weights,  # [R, Hq, SPLITS] float32: log2 of the sum of its exponentials
    scale,  # of the scores, in base 2
    query_row,  # strides
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    table_row,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens per block of the cache, P
    HEADS: tl.constexpr,  # KV heads
    GROUP: tl.constexpr,  # query heads that share one
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP and SIZE as `tl.dot` needs them
    SIZE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    length = tl.cdiv(tl.cdiv(seq_len, SPLITS), TOKENS) * TOKENS
    first = split * length
    stop = tl.minimum(first + length, seq_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, SIZE_PAD)
    is_head, is_dim = rows < GROUP, dims < SIZE
    last = seq_len - 1
    if WRITES and first <= last and last < stop:
        # Only this program reads the newest token's K and V: it stores them first.
        block = tl.load(block_table + request * table_row + last // BLOCK)
        place = (block.to(tl.int64) * BLOCK + last % BLOCK) * HEADS + head
        source = request * key_row + head * key_head
        _copy_row(key + source, key_pool + place * SIZE, SIZE, SIZE_PAD)
        source = request * value_row + head * value_head
        _copy_row(value + source, value_pool + place * SIZE, SIZE, SIZE_PAD)
        tl.debug_barrier()  # all threads of the program see what some have stored
    heads = head * GROUP + rows
    q = tl.load(
        query + request * query_row + heads[:, None] * query_head + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, SIZE_PAD], tl.float32)
    for start in range(first, stop, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        inside = tokens < stop
        blocks = tl.load(
            block_table + request * table_row + tokens // BLOCK, mask=inside, other=0
        )
        places = (blocks.to(tl.int64) * BLOCK + tokens % BLOCK) * HEADS + head
        offsets = places[:, None] * SIZE + dims[None, :]
        mask = inside[:, None] & is_dim[None, :]
        k = tl.load(key_pool + offsets, mask=mask, other=0.0)
        v = tl.load(value_pool + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        # Softmax in one pass: what was summed so far shrinks when a larger score comes.
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        probs = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(probs, 1)
        out = out * shrink[:, None]
        out += tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        top = new_top
    # An empty piece has weight 0: its log is -inf, and its output is not a number / 0.
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    at = (request * HEADS * GROUP + heads) * SPLITS + split
    tl.store(weights + at, top + tl.log2(total), mask=is_head)
    tl.store(
        pieces + at[:, None] * SIZE + dims[None, :],
        out,
        mask=is_head[:, None] & is_dim[None, :],
    )


@triton.jit
def _merge_kernel(
    pieces,  # [R * Hq, SPLITS, D] float32
    weights,  # [R * Hq, SPLITS] float32, log2
    out,  # [R * Hq, D]
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, SIZE_PAD)
    logs = tl.load(weights + row * SPLITS + splits)
    top = tl.max(logs, 0)
    # A request without tokens has only empty pieces; its output is 0.
    share = tl.where(logs > float("-inf"), tl.exp2(logs - top), 0.0)
    total = tl.sum(share, 0)
    share = share / tl.where(total > 0, total, 1.0)
    at = (row * SPLITS + splits)[:, None] * SIZE + dims[None, :]
    values = tl.load(pieces + at, mask=(dims < SIZE)[None, :], other=0.0)
    merged = tl.sum(values * share[:, None], 0)
    tl.store(out + row * SIZE + dims, merged.to(out.dtype.element_ty), mask=dims < SIZE)


def write(
    key: Tensor,  # [T, H, D]
    value: Tensor,  # [T, H, D]
    key_pool: Tensor,  # [N, P, H, D]
    value_pool: Tensor,  # [N, P, H, D]
    slot_mapping: Tensor,  # [T]
) -> None:
    """Store the K,V of a batch's tokens: one launch for both."""
    key, value = _dense_rows(key), _dense_rows(value)
    tokens, heads, size = key.shape
    kernel: Any = _write_kernel
    kernel[(tokens,)](
        key,
        value,
        key_pool,
        value_pool,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        SIZE=size,
        HEADS_PAD=triton.next_power_of_2(heads),
        SIZE_PAD=triton.next_power_of_2(size),
    )


def attend(
    query: Tensor,  # [R, Hq, D]
    key_pool: Tensor,  # [N, P, H, D]
    value_pool: Tensor,  # [N, P, H, D]
    seq_lens: Tensor,  # [R] int32, 0: the row's output is 0
    block_table: Tensor,  # [R, M] int32
    scale: float,
    newest: tuple[Tensor, Tensor] | None = None,  # K, V [R, H, D]
) -> Tensor:  # [R, Hq, D]
    """One query token per row against all that its request has in the cache.

    With `newest` the K and V of each row's own token, the last that it sees, are
    written on the way: right only if no two rows belong to the same request.
    """
    query = _dense_rows(query)
    key, value = (query, query) if newest is None else map(_dense_rows, newest)
    requests, num_heads, size = query.shape
    block_size, kv_heads = key_pool.shape[1:3]
    group, splits = num_heads // kv_heads, num_splits(requests, kv_heads)
    size_pad = max(_MIN_ROWS, triton.next_power_of_2(size))
    # `query` may have any strides; what the kernels write lies in one piece.
    pieces = query.new_empty((requests, num_heads, splits, size), dtype=torch.float32)
    weights = query.new_empty((requests, num_heads, splits), dtype=torch.float32)
    out = query.new_empty((requests, num_heads, size))
    attend_kernel: Any = _attend_kernel
    attend_kernel[(requests, kv_heads, splits)](
        query,
        key,
        value,
        key_pool,
        value_pool,
        block_table,
        seq_lens,
        pieces,
        weights,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        block_table.stride(0),
        WRITES=newest is not None,
        BLOCK=block_size,
        HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        SIZE_PAD=size_pad,
        SPLITS=splits,
        TOKENS=TILE,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    merge_kernel: Any = _merge_kernel
    merge_kernel[(requests * num_heads,)](
        pieces,
        weights,
        out,
        SIZE=size,
        SIZE_PAD=size_pad,
        SPLITS=splits,
        num_warps=1,
    )
    return out


def _dense_rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension in one piece; other strides are free."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
