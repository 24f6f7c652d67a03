"""Blocks of the KV cache: who owns them, when they come back, where tokens live."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

# Large, but finite: what attention masks out gets weight 0, and 0 times NaN is NaN.
_POISON = 1e4


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold this many tokens.

    >>> [blocks_for(n, 4) for n in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)


def slot_mapping(
    block_table: Sequence[int], start: int, stop: int, block_size: int
) -> list[int]:
    """Where in the KV cache the tokens `start .. stop-1` of one request live.

    A request counts its tokens in one row, the cache keeps them in blocks that may
    lie anywhere. Blocks of 4 tokens, two of them held:

        token            0   1   2   3 |  4   5
        block_table[i]         7       |    2
        KV position     28  29  30  31 |  8   9

    >>> slot_mapping([7, 2], start=3, stop=6, block_size=4)
    [31, 8, 9]

    It never reads past the blocks the request holds:

    >>> slot_mapping([7, 2], start=6, stop=9, block_size=4)
    Traceback (most recent call last):
    ...
    ValueError: tokens 6..8 need 3 blocks of 4, block_table holds 2: allocate more
    """
    needed = blocks_for(stop, block_size)
    if needed > len(block_table):
        raise ValueError(
            f"tokens {start}..{stop - 1} need {needed} blocks of {block_size}, "
            f"block_table holds {len(block_table)}: allocate more"
        )
    return [
        block_table[token // block_size] * block_size + token % block_size
        for token in range(start, stop)
    ]


class LeasedPool:
    """Numbers `0 .. size-1` to take and give back, some of them on a lease.

    What a batch in flight still names cannot have a new owner. Giving back with
    `until_batch` puts an item on a lease that ends when that batch is collected:

    >>> pool = LeasedPool(4)
    >>> mine = pool.take(3)
    >>> pool.give_back(mine, until_batch=7)
    >>> pool
    LeasedPool(1 free, 3 leased, 0 held of 4)
    >>> pool.collected(7)
    >>> pool
    LeasedPool(4 free, 0 leased, 0 held of 4)

    Giving back twice is a mistake of the caller, and is named:

    >>> pool.give_back(mine)
    Traceback (most recent call last):
    ...
    RuntimeError: item 0 is given back twice
    """

    def __init__(self, size: int, *, leases: bool = True) -> None:
        self.size = size
        self._leases_kept = leases
        self._free = list(range(size - 1, -1, -1))  # a stack, 0 on top
        self._held = bytearray(size)
        self._leases: defaultdict[int, list[int]] = defaultdict(list)
        self._last_collected = -1
        self.num_leased = 0

    @property
    def num_free(self) -> int:
        """Items that can be taken now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Items that have an owner."""
        return self.size - self.num_free - self.num_leased

    def take(self, count: int) -> list[int]:
        """Take `count` free items; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} wanted, {len(self._free)} free"
        items = [self._free.pop() for _ in range(count)]
        for item in items:
            self._held[item] = 1
        return items

    def give_back(self, items: Sequence[int], until_batch: int = -1) -> None:
        """Return items, at once or when `until_batch` has been collected."""
        for item in items:
            if not self._held[item]:
                raise RuntimeError(f"item {item} is given back twice")
            self._held[item] = 0
        if self._leases_kept and until_batch > self._last_collected:
            self._leases[until_batch].extend(items)
            self.num_leased += len(items)
        else:
            self._free.extend(reversed(items))

    def collected(self, batch: int) -> None:
        """End the leases that waited for this batch."""
        self._last_collected = batch
        items = self._leases.pop(batch, [])
        self.num_leased -= len(items)
        self._free.extend(reversed(items))

    def owner_flags(self) -> list[str]:
        """One letter per item: `.` free, `o` owned, `~` leased."""
        leased = {item for items in self._leases.values() for item in items}
        return [
            "o" if self._held[i] else "~" if i in leased else "."
            for i in range(self.size)
        ]

    def __repr__(self) -> str:
        return (
            f"LeasedPool({self.num_free} free, {self.num_leased} leased, "
            f"{self.num_held} held of {self.size})"
        )


class BlockManager:
    """Hands out KV blocks and takes them back; knows counts, never tensors.

    >>> manager = BlockManager(num_blocks=4, block_size=4)
    >>> table = []
    >>> manager.grow(table, num_tokens=5)
    [0, 1]
    >>> manager.grow(table, num_tokens=8)  # the second block has room
    []
    >>> print(manager)
    oo..  2 of 4 blocks held
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, leases: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = LeasedPool(num_blocks, leases=leases)

    def missing(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """Blocks to add until `block_ids` hold `num_tokens`."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(block_ids))

    def grow(self, block_ids: list[int], num_tokens: int) -> list[int]:
        """Append blocks in place until they hold `num_tokens`; return the new ones."""
        new = self.pool.take(self.missing(block_ids, num_tokens))
        block_ids.extend(new)
        return new

    def release(self, block_ids: list[int], until_batch: int) -> None:
        """Take all of a request's blocks back, leased until its last batch."""
        self.pool.give_back(block_ids, until_batch)
        block_ids.clear()

    def __str__(self) -> str:
        flags = "".join(self.pool.owner_flags())
        return f"{flags}  {self.pool.num_held} of {self.pool.size} blocks held"


class KVCache:
    """The K and V of all tokens: per layer two tensors `[N + 1, P, H, D]`.

    Block `N`, the last one, belongs to nobody: rows that only pad a batch write
    there, so that no padding can reach a live request.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks + 1, block_size, num_kv_heads, head_size)
        self.keys = _zeros(num_layers, shape, dtype, device)
        self.values = _zeros(num_layers, shape, dtype, device)

    @property
    def padding_position(self) -> int:
        """KV position that padding rows write to."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Memory of the whole cache."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def write(
        self,
        layer: int,
        key: Tensor,  # [T, H, D]
        value: Tensor,  # [T, H, D]
        positions: Tensor,  # [T] int64   KV positions, see slot_mapping
    ) -> None:
        """Store the K,V of a batch's tokens."""
        self.keys[layer].flatten(0, 1).index_copy_(0, positions, key)
        self.values[layer].flatten(0, 1).index_copy_(0, positions, value)

    def gather(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole requests: block_table `[R, M]` -> two `[R, M * P, H, D]`."""
        return (
            _gather(self.keys[layer], block_table),
            _gather(self.values[layer], block_table),
        )

    def poison(self, blocks: Sequence[int]) -> None:
        """Spoil blocks: a read before the first write turns tokens at once."""
        for tensor in (*self.keys, *self.values):
            tensor[list(blocks)] = _POISON


def _zeros(
    count: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    # A tensor made in the caller's inference mode could not be written later.
    with torch.inference_mode(False):
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]


def _gather(pool: Tensor, block_table: Tensor) -> Tensor:
    num_blocks, block_size, heads, size = pool.shape
    requests, width = block_table.shape
    # Whole blocks as rows of one matrix: several times faster than token by token.
    rows = pool.view(num_blocks, -1).index_select(0, block_table.flatten())
    return rows.view(requests, width * block_size, heads, size)
