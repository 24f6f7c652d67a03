"""Who runs in the next batch, how many tokens each, and what happens afterwards."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbasync.config import EngineConfig
from cbasync.kv_cache import BlockManager, LeasedPool, blocks_for
from cbasync.policy import Policy, make_policy
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
    generation: int  # how often the request had been preempted by then


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
    fresh_blocks: list[int] = field(default_factory=list)
    """The ones among them that hold nothing yet: not those found in the cache."""

    def blocks_read(self) -> list[int]:
        """Every block that the batch's requests hold."""
        return [block for o in self.occurrences for block in o.request.blocks.block_ids]

    def blocks_written(self, block_size: int) -> list[int]:
        """The blocks that the batch's own tokens go to."""
        return [
            block
            for o in self.occurrences
            for block in o.request.blocks.block_ids[
                o.start // block_size : blocks_for(o.start + o.length, block_size)
            ]
        ]


class Scheduler:
    """Fills batches up to a token budget; knows counts, never tensors.

    Running requests go first, in the order of the policy (by default first come, first
    served); then waiting ones enter while budget, rows and blocks last. A prompt longer
    than the budget is computed in chunks, beside the decodes. When blocks run out the
    last of the running requests is preempted: it gives its blocks up and computes its
    tokens again later.
    """

    def __init__(
        self, config: EngineConfig, policy: str | Policy = "first-come"
    ) -> None:
        self.config = config
        self.policy = make_policy(policy)
        self.start_over()
        self.num_launched = 0  # batches; the next one gets this number
        self.discarded_tokens = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of admitted requests, and how many of them
        self.num_cached_tokens = 0  # were found in the cache

    def start_over(self) -> None:
        """Forget every request; all blocks and rows are free again."""
        config = self.config
        leases = "block_lease" not in config.ablate
        self.blocks = BlockManager(config.num_blocks, config.block_size, leases=leases)
        self.rows = LeasedPool(config.num_rows)
        self.waiting: list[Request] = []  # both in the order of the policy
        self.running: list[Request] = []
        # From any thread; a batch is only changed between two calls of schedule().
        self._arrived: deque[Request] = deque()
        self._to_abort: deque[Request] = deque()
        self._finished: list[Request] = []

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request that the intake has checked."""
        self._arrived.append(request)

    def abort(self, request: Request) -> None:
        """Ask for a request's end. It is retired when the next batch is scheduled."""
        self._to_abort.append(request)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running or self._arrived or self._to_abort)

    # ------------------------------------------------------------------ schedule

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next batch, or None when nothing can run now."""
        while self._arrived:
            request = self._arrived.popleft()
            if not request.is_finished:  # its abort may have overtaken it
                insort(self.waiting, request, key=self.policy.key)
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
        """Give running requests their tokens, in order; return what is left."""
        # Once per request and step, so without calls for what nearly always holds.
        reach_back = self.config.carry_over == "slot"
        before = output.batch - 1
        for request in self.running:  # only its end may go away meanwhile
            start, pending = request.num_computed_tokens, request.num_pending_tokens
            stop = request.num_tokens + pending
            if pending and (
                stop >= request.max_num_tokens  # its last token is on the way
                # Slot to slot reaches one batch back: rest, until the host knows it.
                or (reach_back and request.last_batch != before)
            ):
                continue
            if stop > start + budget:
                stop = start + budget
            # Most decodes have room in their last block.
            if stop <= request.blocks.capacity or self._make_room(
                request, stop, output
            ):
                self._take(request, stop - start, output)
                budget -= stop - start
                if budget == 0:
                    break
        return budget

    def _make_room(
        self, request: Request, num_tokens: int, output: SchedulerOutput
    ) -> bool:
        """Get the blocks for `num_tokens`; preempt the last ones if it must be."""
        blocks = self.blocks
        while (
            missing := blocks.missing(len(request.blocks), num_tokens)
        ) > blocks.pool.num_free:
            if missing <= blocks.pool.num_free + blocks.pool.num_leased:
                return False  # leases are about to return: rest, do not preempt
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if missing:
            held = len(request.blocks)
            fresh = blocks.grow(request.blocks, num_tokens)
            output.fresh_blocks.extend(fresh)
            for i, block in enumerate(fresh):
                output.new_blocks.append((request.row, held + i, block))
        return True

    @staticmethod
    def _take(request: Request, length: int, output: SchedulerOutput) -> None:
        output.occurrences.append(
            Occurrence(
                request,
                request.row,
                request.num_computed_tokens,
                length,
                -1,
                -1,
                request.num_preemptions,
            )
        )
        output.num_tokens += length

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and self._has_seat(self.waiting[0]):
            request = self.waiting[0]
            cached = self._find_cached(request)
            if not self._has_blocks(request, cached):
                return
            del self.waiting[0]
            self._enter(request, cached, output)
            # Blocks for its whole context now: entering with a part of it would let
            # two long prompts evict each other for ever.
            self._make_room(request, request.num_tokens, output)
            length = min(request.num_tokens - request.num_computed_tokens, budget)
            self._take(request, length, output)
            budget -= length

    def _has_seat(self, request: Request) -> bool:
        """Whether it could run but for blocks; asked first, for a prompt is long."""
        if request.num_pending_tokens:
            return False  # preempted, and its token is still on the way
        return len(self.running) < self.config.max_num_seqs and self.rows.num_free > 0

    def _find_cached(self, request: Request) -> list[int]:
        if not self.config.prefix_caching or request.params.needs_every_position:
            return []
        return self.blocks.find(request.token_ids)

    def _has_blocks(self, request: Request, cached: list[int]) -> bool:
        missing = self.blocks.missing(len(cached), request.num_tokens)
        return missing <= self.blocks.num_free_without(cached)

    def _enter(
        self, request: Request, cached: list[int], output: SchedulerOutput
    ) -> None:
        """Let a request run, beginning with the blocks that the cache has for it."""
        request.status = RequestStatus.RUNNING
        (request.row,) = self.rows.take(1)
        insort(self.running, request, key=self.policy.key)
        output.admitted.append(request)
        self.blocks.adopt(request.blocks, cached)
        for index, block in enumerate(cached):
            output.new_blocks.append((request.row, index, block))
        request.num_computed_tokens = len(cached) * self.config.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_cached_tokens += request.num_computed_tokens
            self.num_prompt_tokens += len(request.prompt_token_ids)

    def _promise(self, output: SchedulerOutput) -> None:
        """Book what this batch will have done: the scheduled view of each request."""
        slot_to_slot = self.config.carry_over == "slot"
        batch, rank = output.batch, 0
        for occurrence in output.occurrences:
            request = occurrence.request
            stop = occurrence.start + occurrence.length
            known, pending = request.num_tokens, request.num_pending_tokens
            if stop > known:  # its last input is a token that is still in flight
                occurrence.carry = request.last_rank if slot_to_slot else request.row
            request.num_computed_tokens = stop
            request.last_batch = batch
            if stop == known + pending:
                occurrence.rank = request.last_rank = rank
                request.num_pending_tokens = pending + 1
                rank += 1
        output.num_sampled = rank

    # ------------------------------------------------------------------ update

    def update(
        self, output: SchedulerOutput, tokens: Sequence[int]
    ) -> list[Occurrence]:
        """Book the sampled tokens; return the occurrences whose token was kept.

        `tokens` are in the order of the ranks. A token of a request that has ended
        in the meantime is discarded and counted.
        """
        self.blocks.pool.collected(output.batch)
        self.rows.collected(output.batch)
        size, finished = self.config.block_size, RequestStatus.FINISHED
        kept: list[Occurrence] = []
        may_end: list[tuple[Request, int]] = []
        for occurrence in output.occurrences:
            request, rank = occurrence.request, occurrence.rank
            if rank >= 0:
                request.num_pending_tokens -= 1
                if request.status is finished:
                    request.discarded_tokens += 1
                    self.discarded_tokens += 1
                    continue
                token = tokens[rank]
                request.output_token_ids.append(token)
                request.num_tokens += 1
                kept.append(occurrence)
                if (
                    token in request.stop_token_ids
                    or request.num_tokens >= request.max_num_tokens
                    or request.on_token is not None
                ):
                    may_end.append((request, token))
            stop = occurrence.start + occurrence.length
            if stop % size < occurrence.length:  # it went past the end of a block
                self._publish(occurrence, stop // size)
        self._end_some(may_end)
        return kept

    def _end_some(self, candidates: Sequence[tuple[Request, int]]) -> None:
        """End those whose new token ends them, for whichever reason comes first."""
        ended = [
            (request, reason)
            for request, token in candidates
            if (reason := self._reason(request, token)) is not None
        ]
        for request, reason in ended:
            self._finish(request, reason)
        if ended:
            self._forget_finished()

    def _publish(self, occurrence: Occurrence, num_full: int) -> None:
        """Let others find the blocks that this batch has filled.

        Only now: until its batch is collected a block's content is a promise.
        """
        request, size = occurrence.request, self.config.block_size
        if not self.config.prefix_caching or request.is_finished:
            return
        if occurrence.generation != request.num_preemptions:
            return  # its blocks are not its own any more
        for index in range(len(request.blocks.chain), num_full):
            tokens = request.tokens_at(index * size, (index + 1) * size)
            self.blocks.publish(request.blocks, index, tokens)

    @staticmethod
    def _reason(request: Request, token: int) -> FinishReason | None:
        if token in request.stop_token_ids:
            return "stop"
        if request.on_token is not None and request.on_token(token):
            return "stop"
        if request.num_tokens >= request.max_num_tokens:
            return "length"
        return None

    def _retire_aborted(self) -> None:
        any_aborted = False
        while self._to_abort:
            request = self._to_abort.popleft()
            if not request.is_finished:
                self._finish(request, "abort")
                any_aborted = True
        if any_aborted:
            self._forget_finished()

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
            self.waiting = [r for r in self.waiting if not r.is_finished]

    def _preempt(self, request: Request) -> None:
        """Send the last of the running requests back to wait, without its blocks.

        A token of it that is still in flight was sampled from a correct cache: it is
        delivered when its batch is collected, and the request waits for that.
        """
        assert self.running[-1] is request, "only the last request is preempted"
        self.running.pop()
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self.policy.key)

    def _release(self, request: Request) -> None:
        self.blocks.release(request.blocks, request.last_batch)
        if request.row >= 0:
            self.rows.give_back([request.row], request.last_batch)
            request.row = -1

    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.running)} running, {len(self.waiting)} waiting, "
            f"{self.blocks.pool.num_free} of {self.config.num_blocks} blocks free)"
        )
