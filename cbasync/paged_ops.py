"""Decode attention over a paged cache, as one operator that `torch.compile` keeps.

The operator writes the batch's K and V and attends to all that each row's request has
in the cache. On a GPU it runs the Triton kernels; elsewhere, and for dtypes they do not
take, it gathers the keys first. Either way it needs no number that only the host has,
so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_rows(
    query: Tensor,  # [R, Hq, D]
    key: Tensor,  # [R, H, D]
    value: Tensor,  # [R, H, D]
    key_pool: Tensor,  # [N, P, H, D]
    value_pool: Tensor,  # [N, P, H, D]
    slot_mapping: Tensor,  # [R] int64   where each row's K,V is written
    seq_lens: Tensor,  # [R] int32   tokens each row sees; 0 for a row of no use
    block_table: Tensor,  # [R, M] int32
    scale: float,
    rows_are_requests: bool,  # no two rows belong to the same request
) -> Tensor:  # [R, Hq, D]
    """Write K and V, then attend: the one function behind the operator."""
    if query.is_cuda and _has_triton() and query.dtype in _triton_dtypes():
        from cbasync import paged_triton

        newest = (key, value) if rows_are_requests else None
        if newest is None:  # a row may read what another one writes
            paged_triton.write(key, value, key_pool, value_pool, slot_mapping)
        return paged_triton.attend(
            query, key_pool, value_pool, seq_lens, block_table, scale, newest
        )
    size = key_pool.shape[1]
    cells = (slot_mapping // size, slot_mapping % size)  # also of a pool that is a view
    key_pool.index_put_(cells, key)
    value_pool.index_put_(cells, value)
    return _attend_gathered(query, key_pool, value_pool, seq_lens, block_table, scale)


def _attend_gathered(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """The same without Triton: every block that the table has room for is gathered."""
    found = (p[block_table.long()].flatten(1, 2) for p in (key_pool, value_pool))
    keys, values = (each.transpose(1, 2) for each in found)
    place = torch.arange(keys.shape[2], device=query.device)
    # A row of no use looks at one token, so that its output is at least a number.
    mask = place < seq_lens.clamp(min=1).unsqueeze(1)
    return grouped_attention(query, keys, values, mask[:, None, None, :], scale)


def grouped_attention(
    query: Tensor,  # [B, Hq, D]
    keys: Tensor,  # [B, H, K, D]
    values: Tensor,  # [B, H, K, D]
    mask: Tensor,  # [B, 1, 1, K] bool
    scaling: float | None,
) -> Tensor:  # [B, Hq, D]
    """One query token per request.

    The query heads that share a KV head become the rows of one small matrix, so K and
    V are read once and never repeated.
    """
    requests, heads, size = query.shape
    kv_heads = keys.shape[1]
    folded = query.reshape(requests, kv_heads, heads // kv_heads, size)
    result = scaled_dot_product_attention(folded, keys, values, mask, scale=scaling)
    return result.reshape(requests, heads, size)


def multiplied_attention(
    query: Tensor,  # [B, Hq, D]
    keys: Tensor,  # [B, H, K, D]
    values: Tensor,  # [B, H, K, D]
    bias: Tensor,  # [B * H, 1, K]   0, or minus infinity where a row sees nothing
    scaling: float | None,
) -> Tensor:  # [B, Hq, D]
    """The same as two products of many small matrices: faster on a CPU.

    Only for a dtype in which scores may be rounded: float32 and float64.
    """
    requests, kv_heads, _, size = keys.shape
    scale = size**-0.5 if scaling is None else scaling
    rows = query.reshape(requests * kv_heads, -1, size) * scale
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    scores = torch.baddbmm(bias, rows, k.transpose(1, 2))
    return torch.bmm(scores.softmax(dim=-1), v).view(query.shape)


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _triton_dtypes() -> tuple[torch.dtype, ...]:
    from cbasync.paged_triton import DTYPES

    return DTYPES


attend_rows_op = torch.library.custom_op(
    "cbasync::attend_rows", attend_rows, mutates_args=("key_pool", "value_pool")
)


@attend_rows_op.register_fake
def _(query: Tensor, *others: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
