"""Batches with prompts as a GPU computes them, against dense attention in float64."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from cbasync import varlen
from cbasync.attention import PagedRows, paged_attention
from cbasync.batch import BatchShape
from cbasync.kv_cache import KVCache, blocks_for
from cbasync.sampler import SamplerNeeds
from cbasync.varlen import MIN_CHUNK
from tests.oracle import dense_attention

LAYER = 1
GARBAGE = 1e4
TOLERANCE = {torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 2e-2}

Rows = list[tuple[int, int]]  # tokens in the cache before the batch, and in the batch


class Mixed:
    """A batch of decodes, short and long chunks; its cache holds what came before."""

    def __init__(
        self,
        rows: Rows,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        self.rows = rows
        self.heads, self.size, self.device = heads, size, device
        draw = torch.Generator().manual_seed(len(rows))
        stops = [before + new for before, new in rows]
        needs = [blocks_for(stop, block_size) for stop in stops]
        self.cache = KVCache(
            num_layers=2,
            num_blocks=sum(needs) + 3,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_size=size,
            dtype=dtype,
            device=device,
            heads_apart=False,
        )
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(GARBAGE)

        def random(tokens: int, num_heads: int) -> Tensor:
            values = torch.randn(tokens, num_heads, size, generator=draw)
            return values.to(device, dtype)

        self.queries = [random(new, heads) for _, new in rows]
        self.keys = [random(stop, kv_heads) for stop in stops]
        self.values = [random(stop, kv_heads) for stop in stops]
        order = torch.randperm(sum(needs), generator=draw).int().split(needs)
        self.table = torch.full((len(rows), max(needs) + 1), sum(needs) + 1).int()
        cells = []
        for row, (blocks, stop) in enumerate(zip(order, stops, strict=True)):
            self.table[row, : len(blocks)] = blocks
            token = torch.arange(stop)
            cells.append(blocks[token // block_size] * block_size + token % block_size)
        for (before, _), keys, values, places in zip(
            rows, self.keys, self.values, cells, strict=True
        ):
            at = places[:before].long().to(device)
            for pool, new in ((self.cache.keys, keys), (self.cache.values, values)):
                pool[LAYER].flatten(0, 1)[at] = new[:before]
        self.slot_mapping = self._new(cells).long().to(device)
        self.positions = torch.cat([torch.arange(a, a + n) for a, n in rows]).int()
        starts = torch.tensor([0, *(n for _, n in rows)]).cumsum(0).int()
        self.query_start_loc = starts.to(device)

    def _new(self, tensors: list[Tensor]) -> Tensor:
        """The newest tokens of all rows, one after the other."""
        return torch.cat(
            [tensor[len(tensor) - new :] for tensor, (_, new) in zip(
                tensors, self.rows, strict=True
            )]
        )  # fmt: skip

    def paged(self) -> PagedRows:
        stops = tuple(before + new for before, new in self.rows)
        lengths = tuple(new for _, new in self.rows)
        shape = BatchShape(
            batch=0,
            num_requests=len(self.rows),
            num_tokens=sum(lengths),
            num_sampled=len(self.rows),
            max_seq_len=max(stops),
            needs=SamplerNeeds(),
            query_lens=lengths,
            seq_lens=stops,
            num_context=sum(stops),
        )
        return PagedRows.of_mixed(
            self.cache,
            shape,
            self.slot_mapping,
            self.positions.to(self.device),
            self.query_start_loc,
            self.table.to(self.device),
        )

    def attend(self, paged: PagedRows) -> Tensor:
        module = nn.Module()
        module.layer_idx = LAYER  # type: ignore[assignment]
        flat = [torch.cat(self.queries), self._new(self.keys), self._new(self.values)]
        query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in flat)
        out, _ = paged_attention(module, query, key, value, None, paged=paged)
        return out[0]

    def check(self, paged: PagedRows) -> None:
        tolerance = TOLERANCE[self.cache.keys[0].dtype]
        rows = zip(self.queries, self.keys, self.values, strict=True)
        want = torch.cat([dense_attention(*row, None) for row in rows])
        torch.testing.assert_close(
            self.attend(paged).double(), want, rtol=tolerance, atol=tolerance
        )


def reference_varlen(*arguments: Any, **options: Any) -> Tensor:
    """What PyTorch's kernel computes, chunk by chunk, for devices it does not have."""
    call = inspect.signature(varlen_attn).bind(*arguments, **options).arguments
    assert call["window_size"] == (-1, 0)
    starts, key_starts = (call[name].tolist() for name in ("cu_seq_q", "cu_seq_k"))
    assert call["max_q"] == max(b - a for a, b in pairwise(starts))
    out = torch.empty_like(call["query"])
    for chunk in range(len(starts) - 1):
        mine = slice(*starts[chunk : chunk + 2])
        theirs = slice(*key_starts[chunk : chunk + 2])
        q, k, v = (
            call[name][part].transpose(0, 1)
            for name, part in (("query", mine), ("key", theirs), ("value", theirs))
        )
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        out[mine] = nn.functional.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            mask.tril(k.shape[1] - q.shape[1]),
            scale=call["scale"],
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", reference_varlen)
    monkeypatch.setattr("cbasync.attention.has_varlen", lambda cache: True)


MIXED: Rows = [(5, 1), (0, 64), (100, 1), (64, 63), (200, 65), (0, 2), (16, 300)]
LENGTHS = st.sampled_from([1, 2, MIN_CHUNK - 1, MIN_CHUNK, MIN_CHUNK + 1, 130])
ROWS = st.lists(st.tuples(st.integers(0, 90), LENGTHS), min_size=1, max_size=5)


@pytest.mark.usefixtures("on_a_cpu")
def test_long_chunks_are_computed_together() -> None:
    batch = Mixed(MIXED)
    paged = batch.paged()
    (chunks,) = paged.long_chunks
    assert not paged.chunks
    assert chunks.query_start_loc.tolist() == [0, 64, 129, 429]
    assert chunks.key_start_loc.tolist() == [0, 64, 329, 645]
    assert (chunks.max_query_len, chunks.max_seq_len) == (300, 316)
    batch.check(paged)


@pytest.mark.usefixtures("on_a_cpu")
def test_no_more_keys_are_copied_at_once_than_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "MAX_KEYS", 330)
    batch = Mixed(MIXED)
    paged = batch.paged()
    assert [len(chunks.cells) for chunks in paged.long_chunks] == [329, 316]
    batch.check(paged)


def test_without_the_kernel_they_are_computed_one_by_one() -> None:
    batch = Mixed(MIXED)
    paged = batch.paged()
    assert not paged.long_chunks
    assert [chunk.length for chunk in paged.chunks] == [64, 65, 300]
    batch.check(paged)


@pytest.mark.parametrize("together", [True, False])
@given(rows=ROWS, block_size=st.integers(1, 20), kv_heads=st.integers(1, 2))
def test_any_mix_equals_dense_attention(
    together: bool, rows: Rows, block_size: int, kv_heads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", reference_varlen)
        patch.setattr("cbasync.attention.has_varlen", lambda cache: together)
        batch = Mixed(rows, kv_heads=kv_heads, size=4, block_size=block_size)
        batch.check(batch.paged())


def test_a_cpu_has_no_kernel_for_it() -> None:
    assert not varlen.has_varlen(Mixed([(0, 64)], dtype=torch.bfloat16).cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 16), (32, 8, 128), (8, 8, 80), (6, 1, 256)]
)
def test_the_kernel_equals_dense_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size}
    batch = Mixed(MIXED, dtype=dtype, device="cuda", **shape)
    paged = batch.paged()
    assert len(paged.long_chunks) == 1
    batch.check(paged)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 16), (torch.bfloat16, 20)])
def test_heads_the_kernel_does_not_take(dtype: torch.dtype, size: int) -> None:
    batch = Mixed(MIXED, dtype=dtype, size=size, device="cuda")
    paged = batch.paged()
    assert len(paged.chunks) == 3
    batch.check(paged)


@pytest.mark.gpu
def test_a_batch_with_prompts_is_made_without_waiting_for_the_gpu() -> None:
    batch = Mixed(MIXED, dtype=torch.bfloat16, device="cuda")
    arguments = batch.positions.to("cuda"), batch.table.to("cuda")
    batch.positions, batch.table = arguments
    batch.paged()  # whatever is loaded on first use is there now
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.paged()
    finally:
        torch.cuda.set_sync_debug_mode("default")
