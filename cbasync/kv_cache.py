"""Blocks of the KV cache: who owns them, when they come back, where tokens live."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

# Large, but finite: what attention masks out gets weight 0, and 0 times NaN is NaN.
_POISON = 1e4
_ROOT = -1  # name of "nothing before"


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
        self._free = OrderedDict.fromkeys(range(size))  # taken from the front
        self._held = bytearray(size)
        self._lease_of: dict[int, int] = {}  # item -> the batch it waits for
        self._ending: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
        self._last_collected = -1

    @property
    def num_free(self) -> int:
        """Items that can be taken now."""
        return len(self._free)

    @property
    def num_leased(self) -> int:
        """Items that wait for a batch in flight."""
        return len(self._lease_of)

    @property
    def num_held(self) -> int:
        """Items that have an owner."""
        return self.size - self.num_free - self.num_leased

    def is_free(self, item: int) -> bool:
        """Whether nobody owns the item and no batch in flight names it."""
        return item in self._free

    def take(self, count: int) -> list[int]:
        """Take `count` free items; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} wanted, {len(self._free)} free"
        items = [self._free.popitem(last=False)[0] for _ in range(count)]
        for item in items:
            self._held[item] = 1
        return items

    def revive(self, item: int) -> None:
        """Take one particular item that has no owner, free or leased."""
        if self._held[item]:
            raise RuntimeError(f"item {item} has an owner already")
        self._lease_of.pop(item, None)
        self._free.pop(item, None)
        self._held[item] = 1

    def give_back(
        self, items: Sequence[int], until_batch: int = -1, *, first: bool = False
    ) -> None:
        """Return items, at once or when `until_batch` has been collected.

        `first` makes them the next to be taken; otherwise they are the last.
        """
        for item in items:
            if not self._held[item]:
                raise RuntimeError(f"item {item} is given back twice")
            self._held[item] = 0
            if self._leases_kept and until_batch > self._last_collected:
                self._lease_of[item] = until_batch
                self._ending[until_batch].append((item, first))
            else:
                self._set_free(item, first)

    def collected(self, batch: int) -> None:
        """End the leases that waited for this batch."""
        self._last_collected = batch
        for item, first in self._ending.pop(batch, ()):
            if self._lease_of.get(item) == batch:  # not revived meanwhile
                del self._lease_of[item]
                self._set_free(item, first)

    def _set_free(self, item: int, first: bool) -> None:
        self._free[item] = None
        if first:
            self._free.move_to_end(item, last=False)

    def owner_flags(self) -> str:
        """One letter per item: `.` free, `o` owned, `~` leased."""
        return "".join(
            "." if i in self._free else "~" if i in self._lease_of else "o"
            for i in range(self.size)
        )

    def __repr__(self) -> str:
        return (
            f"LeasedPool({self.num_free} free, {self.num_leased} leased, "
            f"{self.num_held} held of {self.size})"
        )


@dataclass(slots=True)
class BlockTable:
    """The blocks that one request holds, in the order of its tokens."""

    block_ids: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # names of its published blocks
    capacity: int = 0  # tokens that they hold

    def __len__(self) -> int:
        return len(self.block_ids)


class BlockManager:
    """Hands out KV blocks, shares full ones, takes them back; knows counts, no tensors.

    >>> manager = BlockManager(num_blocks=4, block_size=4)
    >>> table = BlockTable()
    >>> manager.grow(table, num_tokens=5)
    [0, 1]
    >>> manager.grow(table, num_tokens=8)  # the second block has room
    []
    >>> print(manager)
    oo..  2 of 4 blocks held

    A block whose tokens are all computed and known can be *published*. Its name stands
    for its tokens and for all before them, so a request that starts with the same
    tokens finds it, while it is held and for as long as nobody else has taken it:

    >>> manager.publish(table, index=0, tokens=(5, 6, 7, 8))
    >>> manager.release(table, until_batch=-1)
    >>> manager.find([5, 6, 7, 8, 9])
    [0]

    The last token of a prompt has to be computed, so it is never found:

    >>> manager.find([5, 6, 7, 8])
    []
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, leases: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = LeasedPool(num_blocks, leases=leases)
        self._num_owners = [0] * num_blocks
        self._names = count()
        self._published: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """(name of the block before, tokens) -> (name, block)."""
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # by block

    # ------------------------------------------------------------------ owning

    def missing(self, num_held: int, num_tokens: int) -> int:
        """Blocks to add to `num_held` until they hold `num_tokens`."""
        return max(0, blocks_for(num_tokens, self.block_size) - num_held)

    def grow(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Append blocks until the table holds `num_tokens`; return the new ones."""
        new = self.pool.take(self.missing(len(table), num_tokens))
        for block in new:
            self._num_owners[block] = 1
            self._forget(block)
        table.block_ids.extend(new)
        table.capacity = len(table) * self.block_size
        return new

    def release(self, table: BlockTable, until_batch: int) -> None:
        """Take all blocks of a table back, leased until its last batch."""
        # From the end: the beginning of a prompt is what others are likely to share.
        for block in reversed(table.block_ids):
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                first = block not in self._key_of
                self.pool.give_back([block], until_batch, first=first)
        table.block_ids.clear()
        table.chain.clear()
        table.capacity = 0

    # ------------------------------------------------------------------ sharing

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Published blocks that hold the beginning of these tokens, never all of it."""
        size, found, name = self.block_size, [], _ROOT
        for start in range(0, len(token_ids) - size, size):
            entry = self._published.get((name, tuple(token_ids[start : start + size])))
            if entry is None:
                break
            name, block = entry
            found.append(block)
        return found

    def adopt(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Let an empty table begin with published blocks."""
        for block in blocks:
            if self._num_owners[block] == 0:
                self.pool.revive(block)
            self._num_owners[block] += 1
            table.block_ids.append(block)
            table.chain.append(self._published[self._key_of[block]][0])
        table.capacity = len(table) * self.block_size

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Free blocks that are left once these have been adopted."""
        return self.pool.num_free - sum(self.pool.is_free(block) for block in blocks)

    def publish(self, table: BlockTable, index: int, tokens: tuple[int, ...]) -> None:
        """Let others find a full block; its tokens are computed and known."""
        assert index == len(table.chain), "blocks are published in order"
        key = (table.chain[-1] if table.chain else _ROOT, tokens)
        if key not in self._published:
            block = table.block_ids[index]
            self._published[key] = (next(self._names), block)
            self._key_of[block] = key
        table.chain.append(self._published[key][0])

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._published[key]

    def __str__(self) -> str:
        held = f"{self.pool.num_held} of {self.pool.size} blocks held"
        return f"{self.pool.owner_flags()}  {held}"


class KVCache:
    """The K and V of all tokens: per layer two tensors `[N + 1, P, H, D]`.

    Block `N`, the last one, belongs to nobody: rows that only pad a batch write
    there, so that no padding can reach a live request.

    With `heads_apart`, as on a CPU, the heads of a block lie one after the other, so
    that the keys of a head are one matrix once they have been gathered; `keys` and
    `values` are views then.
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
        heads_apart: bool | None = None,
    ) -> None:
        if heads_apart is None:
            heads_apart = torch.device(device).type == "cpu"
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads = num_kv_heads
        self.heads_apart = heads_apart
        inner = (block_size, num_kv_heads)
        if heads_apart:
            inner = (num_kv_heads, block_size)
        shape = (num_blocks + 1, *inner, head_size)
        self._pools = [_zeros(num_layers, shape, dtype, device) for _ in "kv"]
        self.keys, self.values = (
            [p.transpose(1, 2) if heads_apart else p for p in pools]
            for pools in self._pools
        )
        self._scratch = _zeros(2, (0, 0), dtype, device)

    @property
    def padding_position(self) -> int:
        """KV position that padding rows write to."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Memory of the whole cache."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def cells(self, positions: Tensor) -> Tensor:
        """Where `write` puts tokens, from their KV positions `[T]`; once a batch."""
        if not self.heads_apart:
            return positions
        size, heads = self.block_size, torch.arange(self.num_kv_heads)
        first = positions + (positions // size) * size * (self.num_kv_heads - 1)
        return (first.unsqueeze(1) + heads * size).flatten()  # [T * H]

    def write(
        self,
        layer: int,
        key: Tensor,  # [T, H, D]
        value: Tensor,  # [T, H, D]
        cells: Tensor,  # of the tokens' KV positions
    ) -> None:
        """Store the K,V of a batch's tokens."""
        last = 2 if self.heads_apart else 1
        for pools, new in zip(self._pools, (key, value), strict=True):
            rows = pools[layer].flatten(0, last)
            rows.index_copy_(0, cells, new.reshape(-1, *rows.shape[1:]))

    def pieces(self, block_table: Tensor) -> Tensor:
        """What `gather` reads, from block tables `[R, M]`; once a batch."""
        if not self.heads_apart:
            return block_table
        heads = torch.arange(self.num_kv_heads).unsqueeze(1)
        return block_table.unsqueeze(1) * self.num_kv_heads + heads  # [R, H, M]

    def gather(self, layer: int, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole requests, `[R, H, M * P, D]` each, from their pieces."""
        if not self.heads_apart:
            keys, values = (_gather(pools[layer], pieces) for pools in self._pools)
            return keys.transpose(1, 2), values.transpose(1, 2)
        # New memory costs a page fault every 4 KiB. The next layer may write over
        # this one's copy: by then its attention is done.
        size = self._pools[0][0].shape[-1]
        shape = (*pieces.shape[:2], -1, size)
        found = []
        for pools, scratch in zip(self._pools, self._scratch, strict=True):
            rows = pools[layer].view(-1, self.block_size * size)
            if len(scratch) < pieces.numel():
                scratch.resize_(2 * pieces.numel(), rows.shape[1])
            out = scratch[: pieces.numel()]
            torch.index_select(rows, 0, pieces.flatten(), out=out)
            found.append(out.view(shape))
        return found[0], found[1]

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
    found = pool.view(num_blocks, -1).index_select(0, block_table.flatten())
    return found.view(requests, width * block_size, heads, size)
