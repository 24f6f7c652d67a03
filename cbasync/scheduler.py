"""Who runs in the next batch, how many tokens each, and what happens afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbasync.config import EngineConfig
from cbasync.kv_cache import BlockManager, LeasedPool, blocks_for
from cbasync.request import FinishReason, Request, RequestStatus


@dataclass(slots=True)
class Occurrence:
    """One request's part in one batch: the identity of work in flight.

    `rank` is the place among the rows that are *sampled*, which is not the place in
    the batch: a prompt chunk that does not reach the prompt's end has none.
    """

    request: Request
    row: int
    start: int  # first position computed
    length: int  # tokens computed, num_scheduled_tokens
    rank: int  # place among the sampled rows, -1: no token comes of it
    carry: int  # where its last input token comes from on the device, -1: the host


@dataclass(slots=True)
class SchedulerOutput:
    """The next batch, decided: who, how many tokens, which blocks are new."""

    batch: int
    occurrences: list[Occurrence] = field(default_factory=list)
    num_tokens: int = 0
    num_sampled: int = 0
    admitted: list[Request] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, index in the block table, block) for each block handed out."""

    def blocks_read(self) -> list[int]:
        """Every block that the batch's requests hold."""
        return [block for o in self.occurrences for block in o.request.block_ids]

    def blocks_written(self, block_size: int) -> list[int]:
        """The blocks that the batch's own tokens go to."""
        return [
            block
            for o in self.occurrences
            for block in o.request.block_ids[
                o.start // block_size : blocks_for(o.start + o.length, block_size)
            ]
        ]


class Scheduler:
    """First come, first served, with a token budget; knows counts, never tensors.

    Running requests go first, oldest first; then waiting ones enter while budget,
    rows and blocks last. A prompt longer than the budget is computed in chunks,
    beside the decodes. When blocks run out the newest request is preempted: it gives
    its blocks up and computes its tokens again later.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        leases = "block_lease" not in config.ablate
        self.blocks = BlockManager(config.num_blocks, config.block_size, leases=leases)
        # A leased row is as bad as none, so there are enough for every batch in flight.
        self.rows = LeasedPool(config.max_num_seqs * (config.depth + 1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_launched = 0  # batches; the next one gets this number
        self.discarded_tokens = 0
        self.num_preemptions = 0
        self._to_abort: list[Request] = []
        self._finished: list[Request] = []

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request; `check_fits` has been asked before."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ask for a request's end. It is retired when the next batch is scheduled."""
        self._to_abort.append(request)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running or self._to_abort)

    def check_fits(self, request: Request) -> None:
        """Refuse a request that could never run, however empty the engine is."""
        config, prompt = self.config, len(request.prompt_token_ids)
        most = request.params.max_tokens
        if prompt + most > config.max_model_len:
            raise ValueError(
                f"{request.request_id}: {prompt} prompt + {most} new tokens is "
                f"{prompt + most}, max_model_len is {config.max_model_len}: "
                "shorten one of them or raise max_model_len"
            )
        # The last token is never an input, so it needs no place in the cache.
        needed = self.blocks.missing((), prompt + most - 1)
        if needed > config.num_blocks:
            raise ValueError(
                f"{request.request_id}: {prompt} prompt + {most} new tokens need "
                f"{needed} blocks of {config.block_size}, the cache has "
                f"{config.num_blocks}: shorten one of them or raise num_blocks"
            )

    # ------------------------------------------------------------------ schedule

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next batch, or None when nothing can run now."""
        self._retire_aborted()
        output = SchedulerOutput(batch=self.num_launched)
        budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        self._admit_waiting(output, budget)
        if not output.occurrences:
            return None
        self.num_launched += 1
        output.occurrences = self.arrange(output.occurrences)
        self._promise(output)
        return output

    def arrange(self, occurrences: list[Occurrence]) -> list[Occurrence]:
        """Order of the rows in the batch; any order gives the same tokens."""
        return occurrences

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Give running requests their tokens, oldest first; return what is left."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            length = self._num_to_compute(request, output.batch)
            if length == 0:
                continue
            length = min(length, budget)
            if self._make_room(request, request.num_computed_tokens + length, output):
                self._take(request, length, output)
                budget -= length
        return budget

    def _num_to_compute(self, request: Request, batch: int) -> int:
        """Tokens this request could compute in this batch; 0 when it has to rest."""
        pending = request.num_pending_tokens
        if pending:
            if request.num_promised_output_tokens >= request.params.max_tokens:
                return 0  # its last token is on the way: no extra step
            if self.config.carry_over == "slot" and request.last_batch != batch - 1:
                return 0  # slot to slot reaches one batch back; wait for the host
        return request.num_tokens + pending - request.num_computed_tokens

    def _make_room(
        self, request: Request, num_tokens: int, output: SchedulerOutput
    ) -> bool:
        """Get the blocks for `num_tokens`; preempt the newest if it must be."""
        blocks = self.blocks
        while (
            missing := blocks.missing(request.block_ids, num_tokens)
        ) > blocks.pool.num_free:
            if missing <= blocks.pool.num_free + blocks.pool.num_leased:
                return False  # leases are about to return: rest, do not preempt
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if missing:
            held = len(request.block_ids)
            for i, block in enumerate(blocks.grow(request.block_ids, num_tokens)):
                output.new_blocks.append((request.row, held + i, block))
        return True

    def _take(self, request: Request, length: int, output: SchedulerOutput) -> None:
        start = request.num_computed_tokens
        output.occurrences.append(
            Occurrence(request, request.row, start, length, -1, -1)
        )
        output.num_tokens += length

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and self._can_admit(self.waiting[0]):
            request = self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            (request.row,) = self.rows.take(1)
            self.running.append(request)
            output.admitted.append(request)
            # Blocks for its whole context now: entering with a part of it would let
            # two long prompts evict each other for ever.
            self._make_room(request, request.num_tokens, output)
            length = min(request.num_tokens, budget)
            self._take(request, length, output)
            budget -= length

    def _can_admit(self, request: Request) -> bool:
        if request.num_pending_tokens:
            return False  # preempted, and its token is still on the way
        missing = self.blocks.missing((), request.num_tokens)
        return (
            len(self.running) < self.config.max_num_seqs
            and self.rows.num_free > 0
            and missing <= self.blocks.pool.num_free
        )

    def _promise(self, output: SchedulerOutput) -> None:
        """Book what this batch will have done: the scheduled view of each request."""
        slot_to_slot = self.config.carry_over == "slot"
        batch, rank = output.batch, 0
        for occurrence in output.occurrences:
            request = occurrence.request
            stop = occurrence.start + occurrence.length
            if request.num_pending_tokens and stop > request.num_tokens:
                occurrence.carry = request.last_rank if slot_to_slot else request.row
            request.num_computed_tokens = stop
            request.last_batch = batch
            if stop == request.num_tokens + request.num_pending_tokens:
                occurrence.rank = request.last_rank = rank
                request.num_pending_tokens += 1
                rank += 1
        output.num_sampled = rank

    # ------------------------------------------------------------------ update

    def update(self, output: SchedulerOutput, tokens: Sequence[int]) -> list[Request]:
        """Book the sampled tokens; return the requests that changed.

        `tokens` are in the order of the ranks. A token of a request that has ended
        in the meantime is discarded and counted.
        """
        self.blocks.pool.collected(output.batch)
        self.rows.collected(output.batch)
        changed, any_finished = [], False
        for occurrence in output.occurrences:
            if occurrence.rank < 0:
                continue
            request = occurrence.request
            request.num_pending_tokens -= 1
            if request.is_finished:
                request.discarded_tokens += 1
                self.discarded_tokens += 1
                continue
            token = tokens[occurrence.rank]
            request.output_token_ids.append(token)
            request.num_tokens += 1
            changed.append(request)
            reason = self._end(request, token)
            if reason:
                self._finish(request, reason)
                any_finished = True
        if any_finished:
            self._forget_finished()
        return changed

    @staticmethod
    def _end(request: Request, token: int) -> FinishReason | None:
        if token in request.stop_token_ids:
            return "stop"
        if len(request.output_token_ids) >= request.params.max_tokens:
            return "length"
        return None

    def _retire_aborted(self) -> None:
        for request in self._to_abort:
            if not request.is_finished:
                self._finish(request, "abort")
        if self._to_abort:
            self._forget_finished()
            self._to_abort.clear()

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The one place where a request ends and gives up what it holds."""
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._release(request)
        self._finished.append(request)

    def take_finished(self) -> list[Request]:
        """The requests that ended since the last call, for whatever reason."""
        finished, self._finished = self._finished, []
        return finished

    def _forget_finished(self) -> None:
        self.running = [r for r in self.running if not r.is_finished]
        if any(r.is_finished for r in self.waiting):
            self.waiting = deque(r for r in self.waiting if not r.is_finished)

    def _preempt(self, request: Request) -> None:
        """Send the newest request back to the head of the queue, without its blocks.

        A token of it that is still in flight was sampled from a correct cache: it is
        delivered when its batch is collected, and the request waits for that.
        """
        assert self.running[-1] is request, "only the newest request is preempted"
        self.running.pop()
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.blocks.release(request.block_ids, request.last_batch)
        if request.row >= 0:
            self.rows.give_back([request.row], request.last_batch)
            request.row = -1

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.running)} running, {len(self.waiting)} waiting, "
            f"{self.blocks.pool.num_free} of {self.config.num_blocks} blocks free)"
        )
