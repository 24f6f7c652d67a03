"""The Triton kernels against attention over gathered keys, in any shape."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

paged_triton: Any = pytest.importorskip("cbasync.paged_triton")

# A GPU, or Triton's interpreter (TRITON_INTERPRET=1), which takes CPU tensors.
INTERPRETED = bool(getattr(paged_triton.triton.knobs.runtime, "interpret", False))
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
if INTERPRETED:  # it computes with numpy, which has no bfloat16
    del TOLERANCE[torch.bfloat16]


class Pool:
    """A cache with random content, and requests whose blocks lie anywhere in it."""

    def __init__(
        self,
        lengths: list[int],
        *,
        block_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths, self.size = lengths, size
        width = max(1, -(-max(lengths) // block_size)) + 2
        blocks = len(lengths) * width + 1
        shape = (blocks, block_size, kv_heads, size)
        self.keys, self.values = (
            torch.randn(shape, generator=draw).to(DEVICE, dtype) for _ in range(2)
        )
        order = list(range(len(lengths) * width))
        random.Random(seed).shuffle(order)
        self.table = torch.tensor(order, dtype=torch.int32).view(len(lengths), width)
        self.table = self.table.to(DEVICE)
        query = torch.randn(len(lengths), heads, size, generator=draw)
        self.query = query.to(DEVICE, dtype)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def attend(self) -> Tensor:
        out = paged_triton.attend(
            self.query,
            self.keys,
            self.values,
            self.seq_lens,
            self.table,
            self.size**-0.5,
        )
        assert isinstance(out, Tensor)
        return out

    def expected(self) -> Tensor:
        """The same in float64, from keys and values laid out in a row."""
        group = self.query.shape[1] // self.keys.shape[2]
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=DEVICE)
        for row, length in enumerate(self.lengths):
            blocks = self.table[row].long()
            keys, values = (
                pool[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
                for pool in (self.keys, self.values)
            )
            scores = torch.einsum("hd,khd->hk", self.query[row].double(), keys)
            probs = (scores * self.size**-0.5).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", probs, values)
        return out

    def error(self) -> float:
        out, want = self.attend().double(), self.expected()
        return float((out - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_any_block_size(block_size: int, dtype: torch.dtype) -> None:
    pool = Pool([1, 5, 64, 65, 200, 700], block_size=block_size, dtype=dtype)
    assert pool.error() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(4, 2, 8), (32, 8, 128), (9, 3, 64), (8, 8, 80), (40, 2, 16)],
)
def test_any_head_shape(heads: int, kv_heads: int, size: int) -> None:
    pool = Pool([3, 100, 257], heads=heads, kv_heads=kv_heads, size=size)
    assert pool.error() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_any_number_of_rows_and_splits(rows: int) -> None:
    lengths = [1 + 37 * row % 300 for row in range(rows)]
    assert Pool(lengths).error() < TOLERANCE[torch.float32]


def test_a_row_without_tokens_gives_zeros_and_disturbs_nobody() -> None:
    pool = Pool([100, 0, 7])
    alone = pool.attend()
    assert torch.equal(alone[1], torch.zeros_like(alone[1]))
    pool.table[1] = 2**30  # it must not even look where its blocks are
    assert torch.equal(pool.attend(), alone)


def test_few_rows_are_cut_into_more_pieces() -> None:
    splits = [paged_triton.num_splits(rows, num_kv_heads=8) for rows in (1, 8, 32, 256)]
    assert splits == [64, 8, 2, 1]


def test_what_lies_behind_the_end_does_not_count() -> None:
    pool = Pool([70, 33], block_size=16)
    before = pool.attend()
    for row, length in enumerate(pool.lengths):
        place = pool.table[row].long()
        keys, values = pool.keys[place], pool.values[place]
        for tensor in (keys, values):
            tensor.flatten(0, 1)[length:] = float("nan")
        pool.keys[place], pool.values[place] = keys, values
    assert torch.equal(pool.attend(), before)


@pytest.mark.parametrize("size", [8, 128])
def test_write_puts_each_token_in_its_place(size: int) -> None:
    pool = Pool([40, 40], size=size, block_size=4)
    want = [pool.keys.clone(), pool.values.clone()]
    # Heads before tokens in memory, as a transposed projection has them.
    key, value = (torch.randn(2, 3, size, device=DEVICE).transpose(0, 1) for _ in "kv")
    places = torch.tensor([5, 77, 0], device=DEVICE)
    for tensor, new in zip(want, (key, value), strict=True):
        tensor.flatten(0, 1)[places] = new
    paged_triton.write(key, value, pool.keys, pool.values, places)
    assert torch.equal(pool.keys, want[0])
    assert torch.equal(pool.values, want[1])


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_newest_token_is_written_on_the_way(
    block_size: int, dtype: torch.dtype
) -> None:
    lengths = [1, 64, 65, 0, 129, 300]
    pool = Pool(lengths, block_size=block_size, dtype=dtype)
    key, value = (torch.randn(2, 6, 16, device=DEVICE, dtype=dtype) for _ in "kv")
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    want = [pool.keys.clone(), pool.values.clone()]
    for row, length in enumerate(lengths):
        if length:
            block = int(pool.table[row, (length - 1) // block_size])
            place = (length - 1) % block_size
            want[0][block, place], want[1][block, place] = key[row], value[row]
    scale = pool.size**-0.5
    out = paged_triton.attend(
        pool.query,
        pool.keys,
        pool.values,
        pool.seq_lens,
        pool.table,
        scale,
        (key, value),
    )
    assert torch.equal(pool.keys, want[0])
    assert torch.equal(pool.values, want[1])
    live = [row for row, length in enumerate(lengths) if length]
    error = (out.double() - pool.expected())[live].norm() / pool.expected()[live].norm()
    assert error < TOLERANCE[dtype]
