"""A decided batch becomes arrays: the host's table of requests and the slot's fill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbasync.config import EngineConfig
from cbasync.io_slot import IOSlot
from cbasync.request import Request
from cbasync.sampler import SamplerNeeds
from cbasync.sampling_table import SamplingTable
from cbasync.scheduler import SchedulerOutput
from cbasync.trace import Work

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the host knows of a batch when it launches it: sizes, never contents.

    On a GPU these are launch parameters; the arrays themselves are only read from
    the device, so that a missing copy shows.
    """

    batch: int
    num_requests: int  # R
    num_tokens: int  # T
    num_sampled: int  # S
    max_seq_len: int
    needs: SamplerNeeds
    query_lens: tuple[int, ...] | None  # [R], None: one token each, decodes only
    seq_lens: tuple[int, ...] | None  # [R], None as above
    num_context: int  # tokens in the cache after this batch, over all rows

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token, so that the batch may be padded."""
        return self.query_lens is None

    @property
    def variant(self) -> tuple[object, ...]:
        """What else besides its size decides which kernels the batch needs."""
        return self.needs.words

    def padded(self, num_requests: int) -> BatchShape:
        """The shape of this decode batch with rows of padding, each of them sampled."""
        return replace(
            self,
            num_requests=num_requests,
            num_tokens=num_requests,
            num_sampled=num_requests,
        )

    @classmethod
    def of_padding(cls, num_requests: int) -> BatchShape:
        """The shape of a greedy decode batch in which every row is padding."""
        sizes = (num_requests, num_requests, num_requests)
        return cls(-1, *sizes, 1, SamplerNeeds(), None, None, num_requests)

    @property
    def work(self) -> Work:
        """How much there is to do for this batch."""
        return Work(self.num_requests, self.num_tokens, self.num_context)

    def h2d_work(self, io_slot: IOSlot) -> Work:
        """What the copy of the inputs moves."""
        num_bytes = 4 * io_slot.layout.used(self.num_requests)
        return self.work._replace(num_bytes=num_bytes)

    def d2h_work(self, io_slot: IOSlot) -> Work:
        """What the copy of the sampled tokens moves."""
        num_bytes = io_slot.host_sampled.element_size() * self.num_sampled
        return self.work._replace(num_bytes=num_bytes)


class BatchColumns(NamedTuple):
    """A decided batch as columns, one entry a request, in the order of the batch."""

    rows: Ints  # [R]   place in the host table
    starts: Ints  # [R]   first position computed
    stops: Ints  # [R]   position behind the last one computed
    carries: Ints  # [R]   where the last input comes from, -1: the host
    sampled: Ints | slice  # [S]   which of them get a token

    @classmethod
    def of(cls, output: SchedulerOutput) -> BatchColumns:
        """The columns of a scheduler's decision; most batches are all decodes."""
        occurrences = output.occurrences
        rows = np.array([o.row for o in occurrences])
        starts = np.array([o.start for o in occurrences])
        carries = np.array([o.carry for o in occurrences])
        if output.num_tokens == len(occurrences):
            stops = starts + 1
        else:
            stops = starts + [o.length for o in occurrences]
        sampled: Ints | slice = slice(None)
        if output.num_sampled < len(occurrences):
            sampled = np.flatnonzero([o.rank >= 0 for o in occurrences])
        return cls(rows, starts, stops, carries, sampled)


class RequestTable:
    """What the host knows of each running request, one row each, updated in place.

    A step touches what has changed: a new token, now and then a new block. Nothing is
    built again from lists, so a step costs the same at any context length.
    """

    def __init__(self, config: EngineConfig) -> None:
        rows = config.num_rows
        # One more column: the very last token is stored although it is never an input.
        self.token_ids = np.zeros((rows, config.max_model_len + 1), np.int32)
        self.block_table = np.zeros((rows, config.max_blocks_per_request), np.int32)
        self.sampling = SamplingTable(config)

    def enter(self, request: Request) -> None:
        """Write a request's row once, when it starts to run."""
        row = request.row
        self.token_ids[row, : request.num_tokens] = request.token_ids
        self.sampling.enter(request)

    def apply(self, output: SchedulerOutput) -> BatchColumns:
        """Bring the table up to date with a scheduler's decision."""
        for request in output.admitted:
            self.enter(request)
        for row, index, block in output.new_blocks:
            self.block_table[row, index] = block
        return BatchColumns.of(output)

    def book(self, columns: BatchColumns, tokens: Ints) -> None:
        """Write the sampled tokens of a collected batch, for later batches to read."""
        rows, places = columns.rows[columns.sampled], columns.stops[columns.sampled]
        self.token_ids[rows, places] = tokens


class BatchBuilder:
    """Fills a slot's host arrays from a scheduler's decision, without a loop.

    Three requests; the first still reads its prompt, the others decode, and the
    tokens they continue from are still in flight:

        request              r0       r1   r2
        query_start_loc   0        3    4    5
        input_ids         5  9  2  |  0 |  0        0: the placeholder
        carry_over       -1 -1 -1  |  0 |  1        rank among the sampled rows before
        logits_indices           2 |  3 |  4
    """

    def __init__(self, config: EngineConfig, table: RequestTable) -> None:
        self.block_size = config.block_size
        self.table = table
        self.placeholder = -1 if config.debug else 0
        self.max_num_seqs = config.max_num_seqs
        self.padding_position = config.num_blocks * config.block_size
        self.padding_row = config.num_rows
        self._places = np.arange(config.max_num_batched_tokens)

    def fill(
        self, io_slot: IOSlot, output: SchedulerOutput, columns: BatchColumns
    ) -> BatchShape:
        """Write every array of the batch into the slot's host buffer."""
        host, table = io_slot.host, self.table
        rows, starts, stops, carries, _ = columns
        num_requests, num_tokens = len(rows), output.num_tokens
        is_mixed = num_tokens > num_requests

        row_of_token, positions = rows, starts  # [T]
        last = self._places[:num_requests]  # [R]   where each one's last token is
        if is_mixed:
            lengths = stops - starts
            last = lengths.cumsum() - 1
            row_of_token = rows.repeat(lengths)
            positions = self._places[:num_tokens] - (last + 1 - stops).repeat(lengths)
        host["input_ids"][:num_tokens] = table.token_ids[row_of_token, positions]
        host["carry_over"][:num_tokens] = -1
        carried = carries >= 0
        host["input_ids"][last[carried]] = self.placeholder
        host["carry_over"][last[carried]] = carries[carried]
        host["positions"][:num_tokens] = positions
        index, offset = np.divmod(positions, self.block_size)
        blocks = table.block_table[row_of_token, index]
        host["slot_mapping"][:num_tokens] = blocks * self.block_size + offset
        host["query_start_loc"][1 : num_requests + 1] = last + 1  # behind a 0
        host["seq_lens"][:num_requests] = stops
        self._fill_block_table(io_slot, rows)
        host["logits_indices"][: output.num_sampled] = last[columns.sampled]
        needs = self._fill_sampling(io_slot, output, columns, row_of_token, positions)
        if not is_mixed:
            self.pad(io_slot, num_requests, output.num_sampled)
        return BatchShape(
            batch=output.batch,
            num_requests=num_requests,
            num_tokens=num_tokens,
            num_sampled=output.num_sampled,
            max_seq_len=int(stops.max()),
            needs=needs,
            query_lens=tuple(lengths.tolist()) if is_mixed else None,
            seq_lens=tuple(stops.tolist()) if is_mixed else None,
            num_context=int(stops.sum()),
        )

    def pad(self, io_slot: IOSlot, num_requests: int, num_sampled: int) -> None:
        """Make every row behind these a harmless one, for a batch that is padded.

        It writes to the padding block, sees nothing, carries nothing, and its token
        goes to a row that no request has.
        """
        if num_requests == num_sampled == self.max_num_seqs:
            return
        host = io_slot.host
        tokens = slice(num_requests, self.max_num_seqs)
        host["input_ids"][tokens] = 0
        host["carry_over"][tokens] = -1
        host["positions"][tokens] = 0
        host["slot_mapping"][tokens] = self.padding_position
        host["seq_lens"][tokens] = 0
        sampled = slice(num_sampled, self.max_num_seqs)
        host["logits_indices"][sampled] = 0
        host["token_rows"][sampled] = self.padding_row
        self.table.sampling.pad(host, tokens, sampled)

    def _fill_block_table(self, io_slot: IOSlot, rows: Ints) -> None:
        # Whole rows: as many bytes at any context length, and no copy in between.
        target = io_slot.host["block_table"][: len(rows)]
        np.take(self.table.block_table, rows, axis=0, out=target, mode="clip")

    def _fill_sampling(
        self,
        io_slot: IOSlot,
        output: SchedulerOutput,
        columns: BatchColumns,
        row_of_token: Ints,
        positions: Ints,
    ) -> SamplerNeeds:
        """What the sampler reads of its rows, in the order of their ranks."""
        host, table = io_slot.host, self.table
        rows, starts, _, _, sampled = columns
        needs = table.sampling.fill(host, output, rows, starts, sampled)
        if needs.history:
            table.sampling.fill_history(host, row_of_token, positions)
        if needs.prompt_logprobs >= 0:
            targets = table.token_ids[row_of_token, positions + 1]
            host["target_ids"][: output.num_tokens] = targets
        return needs
