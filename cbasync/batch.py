"""A decided batch becomes arrays: the host's table of requests and the slot's fill."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def apply(self, output: SchedulerOutput) -> None:
        """Bring the table up to date with a scheduler's decision."""
        for request in output.admitted:
            self.enter(request)
        for row, index, block in output.new_blocks:
            self.block_table[row, index] = block

    def book(self, output: SchedulerOutput, tokens: npt.NDArray[np.int64]) -> None:
        """Write the sampled tokens of a collected batch, for later batches to read."""
        sampled = [o for o in output.occurrences if o.rank >= 0]
        rows = [o.row for o in sampled]
        places = [o.start + o.length for o in sampled]
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

    def fill(self, io_slot: IOSlot, output: SchedulerOutput) -> BatchShape:
        """Write every array of the batch into the slot's host buffer."""
        host, table = io_slot.host, self.table
        columns = np.array(
            [(o.row, o.start, o.length, o.rank, o.carry) for o in output.occurrences]
        )
        rows, starts, lengths, _, carries = columns.T
        num_requests, num_tokens = len(rows), output.num_tokens
        stops = starts + lengths
        ends = lengths.cumsum()  # query_start_loc without its leading 0

        row_of_token, positions = rows, starts
        is_mixed = num_tokens > num_requests
        if is_mixed:
            row_of_token = rows.repeat(lengths)
            positions = np.arange(num_tokens) - (ends - stops).repeat(lengths)
        carried = carries >= 0
        host["input_ids"][:num_tokens] = table.token_ids[row_of_token, positions]
        host["carry_over"][:num_tokens] = -1
        if carried.any():
            host["input_ids"][ends[carried] - 1] = self.placeholder
            host["carry_over"][ends[carried] - 1] = carries[carried]
        host["positions"][:num_tokens] = positions
        blocks = table.block_table[row_of_token, positions // self.block_size]
        host["slot_mapping"][:num_tokens] = (
            blocks * self.block_size + positions % self.block_size
        )
        host["query_start_loc"][0] = 0
        host["query_start_loc"][1 : num_requests + 1] = ends
        host["seq_lens"][:num_requests] = stops
        max_seq_len = int(stops.max())
        self._fill_block_table(io_slot, rows)
        needs = self._fill_sampling(
            io_slot, output, columns, ends, row_of_token, positions
        )
        if not is_mixed:
            self.pad(io_slot, num_requests, output.num_sampled)
        return BatchShape(
            batch=output.batch,
            num_requests=num_requests,
            num_tokens=num_tokens,
            num_sampled=output.num_sampled,
            max_seq_len=max_seq_len,
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
        columns: Ints,
        ends: Ints,
        row_of_token: Ints,
        positions: Ints,
    ) -> SamplerNeeds:
        """Arrays of the sampled rows, in the order of their ranks."""
        host, table = io_slot.host, self.table
        rows, starts, _, ranks, _ = columns.T
        host["logits_indices"][: output.num_sampled] = ends[ranks >= 0] - 1
        sampled = [o for o in output.occurrences if o.rank >= 0]
        needs = table.sampling.fill(host, rows, starts, sampled)
        if needs.history:
            table.sampling.fill_history(host, row_of_token, positions)
        if needs.prompt_logprobs >= 0:
            targets = table.token_ids[row_of_token, positions + 1]
            host["target_ids"][: output.num_tokens] = targets
        return needs
