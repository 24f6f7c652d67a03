"""Decode batches as CUDA graphs: one call instead of a thousand launches.

A graph is a recording of kernels with all their arguments: it reads and writes the
addresses it was recorded with, whatever is in them by then. So each slot has graphs of
its own, one for every size in use, and a batch of 3 runs the graph for 4:

    batch of   1   2   3   4   5 .. 8   9 .. 12      (max_num_seqs 12)
    bucket     1   2   4   4      8        12

What a graph computes is carry-over, forward pass and sampling. Rows that only pad a
bucket write their K,V to the padding block, carry nothing, and are nobody's tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from cbasync.batch import BatchShape
from cbasync.carry_over import CarryOver
from cbasync.io_slot import SLOT_LETTERS, IOSlot

# A driver can refuse memory in the middle of a capture and grant it to the next one.
_TRIES = 2

Compute = Callable[[BatchShape, IOSlot, IOSlot | None, CarryOver], None]


def bucket_for(num_requests: int, max_num_seqs: int) -> int:
    """The size of graph that a batch runs in: the next power of two, or the largest.

    >>> [bucket_for(n, max_num_seqs=12) for n in (1, 3, 8, 9, 12)]
    [1, 4, 8, 12, 12]
    """
    return min(1 << (num_requests - 1).bit_length(), max_num_seqs)


def buckets(max_num_seqs: int) -> list[int]:
    """Every size of graph, the largest first: smaller ones then fit into its memory.

    >>> buckets(12)
    [12, 8, 4, 2, 1]
    """
    sizes = {bucket_for(n, max_num_seqs) for n in range(1, max_num_seqs + 1)}
    return sorted(sizes, reverse=True)


class GraphKey(NamedTuple):
    """Everything that is baked into a graph besides the model.

    >>> print(GraphKey(slot=1, previous=0, bucket=32, variant=("greedy",)))
    slot B after A, 32 rows, greedy
    """

    slot: int
    previous: int  # slot whose tokens are carried over, -1: none
    bucket: int
    variant: tuple[object, ...]  # which way of sampling

    def __str__(self) -> str:
        after = f" after {SLOT_LETTERS[self.previous]}" if self.previous >= 0 else ""
        ways = " ".join(map(str, self.variant)) or "plain"
        return f"slot {SLOT_LETTERS[self.slot]}{after}, {self.bucket} rows, {ways}"


class Captured(NamedTuple):
    """A graph, and the buffers it was recorded with."""

    graph: torch.cuda.CUDAGraph
    addresses: tuple[int, ...]


class DecodeGraphs:
    """Captures decode batches and replays them; all graphs share one memory pool.

    Sharing is right because graphs run one after the other, on one stream, and leave
    nothing in the pool that a later one needs: tokens go to the slot's own buffers.
    """

    def __init__(self, compute: Compute, max_num_seqs: int) -> None:
        self.compute = compute
        self.max_num_seqs = max_num_seqs
        self.graphs: dict[GraphKey, Captured] = {}
        self.num_replays = 0
        self.num_failed = 0
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def is_broken(self) -> bool:
        """Whether capturing has been given up."""
        return self.num_failed == _TRIES

    def run(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        """Compute a decode batch: replay its graph, or run it and capture one."""
        bucket = bucket_for(shape.num_requests, self.max_num_seqs)
        shape = shape.padded(bucket)
        key = self._key(shape, io_slot, previous)
        captured = self.graphs.get(key)
        if captured is not None:
            assert captured.addresses == _addresses(io_slot, previous), (
                f"the graph for {key} was recorded with other buffers"
            )
            captured.graph.replay()
            self.num_replays += 1
            return
        # The first batch of its kind runs without a graph. That is also the warm-up a
        # capture needs: kernels are compiled and library handles made by then.
        self.compute(shape, io_slot, previous, carry_over)
        if not self.is_broken:
            self._capture(key, shape, io_slot, previous, carry_over)

    def _key(
        self, shape: BatchShape, io_slot: IOSlot, previous: IOSlot | None
    ) -> GraphKey:
        before = -1 if previous is None else previous.index
        return GraphKey(io_slot.index, before, shape.num_requests, shape.variant)

    def _capture(
        self,
        key: GraphKey,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        """Record the batch's kernels; nothing is computed here."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        seed, offset = generator.initial_seed(), generator.get_offset()
        recording = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            # What other threads do meanwhile, as allocating pinned memory, is theirs.
            capture_error_mode="thread_local",
        )
        try:
            with recording:
                self.compute(shape, io_slot, previous, carry_over)
        except RuntimeError as error:
            self.num_failed += 1
            self._pool = torch.cuda.graph_pool_handle()  # the other one stays open
            _restart(generator, seed, offset)
            if self.is_broken:
                warnings.warn(
                    f"the graph for {key} could not be captured, decode batches "
                    f"without one go on kernel by kernel, more slowly: {error}",
                    stacklevel=2,
                )
            return
        self.graphs[key] = Captured(graph, _addresses(io_slot, previous))

    def __repr__(self) -> str:
        return f"DecodeGraphs({len(self.graphs)} captured, {self.num_replays} replays)"


def _restart(generator: torch.Generator, seed: int, offset: int) -> None:
    """Take a random generator out of a capture that has failed.

    PyTorch does so at the end of a capture and not after a failed one: whoever draws
    random numbers on this GPU later, for whatever purpose, would get an error.
    """
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(seed)
    fresh.set_offset(offset)
    generator.graphsafe_set_state(fresh)


def _addresses(io_slot: IOSlot, previous: IOSlot | None) -> tuple[int, ...]:
    """Where a graph of these slots reads its inputs and writes its tokens."""
    tensors = [io_slot.device_inputs, io_slot.device_sampled]
    if previous is not None:
        tensors.append(previous.device_sampled)
    return tuple(tensor.data_ptr() for tensor in tensors)
