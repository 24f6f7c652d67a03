"""Synchronous and asynchronous continuous batching, step beside step.

One step has six phases: schedule, prepare, h2d, compute, d2h, update. The synchronous
engine takes them in turn, so the GPU waits while the CPU works. The asynchronous engine
schedules and prepares batch n+1 while the GPU computes batch n.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

from cbasync.batch import BatchBuilder, BatchColumns, BatchShape, RequestTable
from cbasync.carry_over import make_carry_over
from cbasync.config import EngineConfig
from cbasync.devices import Access, Device, Resource, make_device
from cbasync.graphs import buckets
from cbasync.intake import Intake
from cbasync.io_slot import IOSlot, SlotLayout
from cbasync.logprobs import book_logprobs
from cbasync.metrics import RunCounters, RunMetrics
from cbasync.policy import Policy
from cbasync.request import Request, RequestStatus
from cbasync.runner import Runner
from cbasync.scheduler import Scheduler, SchedulerOutput
from cbasync.timeline import Timeline
from cbasync.trace import Work


class InFlight(NamedTuple):
    """A batch that has been launched and not yet collected."""

    output: SchedulerOutput
    columns: BatchColumns
    shape: BatchShape
    io_slot: IOSlot


def block_names(blocks: Iterable[int]) -> list[Resource]:
    """KV blocks as resources."""
    return [f"block {block}" for block in blocks]


def _check_same(scheduled: EngineConfig, config: EngineConfig) -> None:
    for name, value in vars(config).items():
        if (other := getattr(scheduled, name)) != value:
            raise ValueError(
                f"{name} is {other!r} in the scheduler's config, {value!r} in the "
                "engine's: make both with the same one"
            )


class Engine:
    """What both engines share: requests in, launch and collect, requests out.

    `step()` is all they differ in.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig | None = None,
        device: Device | None = None,
        scheduler: Scheduler | None = None,
        policy: str | Policy = "first-come",
    ) -> None:
        self.device = device or make_device()
        self.config = config = runner.sized(config or EngineConfig(), self.device)
        if config.max_model_len > runner.max_positions:
            raise ValueError(
                f"max_model_len is {config.max_model_len}, the model has "
                f"{runner.max_positions} positions: lower max_model_len"
            )
        self.runner = runner
        self.scheduler = scheduler or Scheduler(config, policy)
        _check_same(self.scheduler.config, config)
        self.requests: dict[str, Request] = {}
        self.error: BaseException | None = None
        self.is_closed = False
        self._is_waiting = False
        self.in_flight: deque[InFlight] = deque()
        self.intake = Intake(config, runner.vocab_size, self.requests)
        self.counters = RunCounters(config, self.device.now_us())
        self._arrivals = count()
        try:  # the most likely to fail, so before any stream is made
            with self.device.setting_up():
                runner.prepare(config, self.device)
        except BaseException:
            runner.close()
            raise

        layout = SlotLayout.of(config)
        self.io_slots = [
            IOSlot(index, self.device, layout) for index in range(config.num_slots)
        ]
        self.h2d_stream = self.device.stream("h2d")
        self.compute_streams = [self.device.stream("compute")]
        self.d2h_stream = self.device.stream("d2h")
        self.poison_stream = self.h2d_stream
        self.carry_over = make_carry_over(config, self.device)
        self.table = RequestTable(config)
        self.builder = BatchBuilder(config, self.table)
        self._previous: IOSlot | None = None
        if config.warm_up:
            self._warm_up()
        if not config.is_safe:
            self._drop_edges()

    def _warm_up(self) -> None:
        """Run batches of padding before the first real one, and do not log them."""
        named = self.config.warm_up
        sizes = buckets(self.config.max_batch_requests) if named == "all" else named
        for io_slot in self.io_slots:
            self.builder.pad(io_slot, 0, 0)
            io_slot.copy_inputs(0)
        self.device.synchronize()
        self.compute_streams[0].launch(
            lambda: self.runner.warm_up(self.io_slots, self.carry_over, sizes),
            Access("compute"),
        )
        self.device.synchronize()
        self.timeline.clear()

    def _drop_edges(self) -> None:
        """Take edges away, loudly: for teaching and for tests of the detector."""
        self.device.ablate = self.config.ablate
        if "compute_order" in self.config.ablate:
            self.compute_streams.append(self.device.stream("compute 2"))
        config = self.config
        edges = ", ".join(sorted(config.ablate))
        warnings.warn(
            f"this engine runs with {config.num_slots} of {config.default_num_slots} "
            f"slots{f' and without {edges}' if edges else ''}: expect wrong tokens",
            stacklevel=3,
        )

    # ------------------------------------------------------------------ requests

    def new_request(
        self, prompt_token_ids: Sequence[int], *args: Any, **options: Any
    ) -> Request:
        """A checked request that is not queued yet; see `Intake.new_request`."""
        return self.intake.new_request(prompt_token_ids, *args, **options)

    def submit(self, request: Request) -> None:
        """Queue a request for the next batches, once; from any thread."""
        self._check_usable()
        if request.arrival >= 0:
            raise ValueError(f"{request!r} was submitted before: make a new one")
        if request.params.stop and request.on_token is None:
            raise ValueError(
                f"stop is {request.params.stop!r}, an engine sees tokens and no texts: "
                "use LLM, or give the request an on_token"
            )
        name = request.request_id
        # One step, so that of two threads with one name only one gets through.
        if (other := self.requests.setdefault(name, request)) is not request:
            raise ValueError(
                f"request_id {name!r} is in use by {other!r}: "
                "choose another one, or none"
            )
        request.arrival = next(self._arrivals)
        request.times.submitted_us = self.device.now_us()
        self.scheduler.add(request)
        if self.error is not None:  # failed meanwhile: nobody else would end it
            self._end(request, self.error)

    def _check_usable(self) -> None:
        if self.is_closed or self.error is not None:
            state = "is closed" if self.is_closed else f"has failed ({self.error!r})"
            raise RuntimeError(f"this engine {state}: make a new one") from self.error

    def add_request(
        self, prompt_token_ids: Sequence[int], *args: Any, **options: Any
    ) -> Request:
        """Check a prompt and queue it: `new_request`, then `submit`."""
        request = self.new_request(prompt_token_ids, *args, **options)
        self.submit(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Ask for a request's end, at any moment and from any thread.

        False if it is not there any more.
        """
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            return False
        self.scheduler.abort(request)
        return True

    def is_over(self, request: Request) -> bool:
        """Whether a submitted request has ended and everything about it is booked."""
        return self.requests.get(request.request_id) is not request

    @property
    def has_work(self) -> bool:
        """Whether another step has something to do."""
        return bool(self.in_flight) or self.scheduler.has_work

    def step(self) -> list[Request]:
        """One turn of the engine; the requests that got a token."""
        raise NotImplementedError

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.has_work:
            self.step()

    def guarded_step(self) -> list[Request]:
        """A step whose failure ends every request, so that nobody waits for ever.

        An interrupt while the host waits for tokens leaves everything in order.
        Anywhere else a batch may be half booked: then every request ends, and the
        engine starts over, as good as new.
        """
        self._is_waiting = False
        try:
            return self.step()
        except KeyboardInterrupt as cause:
            if not self._is_waiting:
                self._start_over(cause)
            raise
        except BaseException as cause:
            self.fail(cause)
            raise

    def _start_over(self, cause: BaseException) -> None:
        self.device.synchronize()
        self.in_flight.clear()
        # In this order: what another thread submits in between is ended, never lost.
        self.scheduler.start_over()
        self._end_all(cause)

    def fail(self, cause: BaseException) -> None:
        """End every request; the engine cannot be used any more."""
        self.error = cause
        self._end_all(cause)

    def _end_all(self, cause: BaseException) -> None:
        for request in list(self.requests.values()):
            self._end(request, cause)

    def _end(self, request: Request, cause: BaseException) -> None:
        request.status, request.finish_reason = RequestStatus.FINISHED, "error"
        request.error = cause
        self.requests.pop(request.request_id, None)

    @property
    def timeline(self) -> Timeline:
        """What ran when, on every lane."""
        return self.device.timeline

    @property
    def metrics(self) -> RunMetrics:
        """What this engine has done so far."""
        return self.counters.metrics(
            self.scheduler, self.timeline, self.device.now_us()
        )

    # ------------------------------------------------------------------ the phases

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next batch."""
        self._check_usable()
        access = Access("schedule", self.scheduler.num_launched)
        with self.device.host_phase(access) as phase:
            output = self.scheduler.schedule()
            self._forget_finished()
            if output is None:
                phase.batch = -1
            else:
                self.counters.scheduled(output, self.device.now_us())
                phase.work = Work(len(output.occurrences), output.num_tokens)
        return output

    def launch(self, output: SchedulerOutput) -> None:
        """Prepare a batch and put h2d, compute and d2h in their queues."""
        batch, previous = output.batch, self._previous
        h2d, d2h = self.h2d_stream, self.d2h_stream
        compute = self.compute_streams[batch % len(self.compute_streams)]
        io_slot = self.io_slots[batch % len(self.io_slots)]
        if io_slot.was_used:  # nothing of its last batch may be overwritten too early
            io_slot.h2d_done.synchronize(edge="slot_refill")
            h2d.wait(io_slot.compute_done, edge="slot_reuse")
            compute.wait(io_slot.d2h_done, edge="slot_reuse")
        io_slot.was_used = True
        columns, shape = self._prepare(io_slot, output)

        logprobs = max(shape.needs.num_logprobs, shape.needs.prompt_logprobs) >= 0
        if logprobs:
            io_slot.need_logprobs()
        if self.config.debug and output.fresh_blocks:
            self._poison(output)
        h2d.launch(
            lambda: io_slot.copy_inputs(shape.num_requests),
            io_slot.access("h2d", batch, shape.h2d_work(io_slot)),
        )
        h2d.record(io_slot.h2d_done)

        compute.wait(io_slot.h2d_done)
        compute.launch(
            lambda: self.runner.compute(shape, io_slot, previous, self.carry_over),
            self._compute_access(output, shape, io_slot, previous),
        )
        compute.record(io_slot.compute_done)

        d2h.wait(io_slot.compute_done)
        d2h.launch(
            lambda: io_slot.copy_sampled(shape.num_sampled, logprobs=logprobs),
            io_slot.access("d2h", batch, shape.d2h_work(io_slot)),
        )
        d2h.record(io_slot.d2h_done)

        self.in_flight.append(InFlight(output, columns, shape, io_slot))
        self._previous = io_slot

    def collect(self) -> list[Request]:
        """Wait for the oldest batch in flight and book its tokens."""
        output, columns, shape, io_slot = self.in_flight[0]
        self._is_waiting = True
        io_slot.d2h_done.synchronize()
        self._is_waiting = False
        # Only now: who interrupts the wait finds the batch where it was.
        self.in_flight.popleft()
        access = io_slot.access("update", output.batch, shape.work)
        with self.device.host_phase(access):
            tokens = io_slot.sampled_tokens[: shape.num_sampled]
            self.table.book(columns, tokens)
            kept = self.scheduler.update(output, tokens.tolist())
            self.counters.kept(kept, self.device.now_us())
            if max(shape.needs.num_logprobs, shape.needs.prompt_logprobs) >= 0:
                book_logprobs(io_slot.need_logprobs(), output, kept)
            self._forget_finished()
        return [occurrence.request for occurrence in kept]

    def _prepare(
        self, io_slot: IOSlot, output: SchedulerOutput
    ) -> tuple[BatchColumns, BatchShape]:
        access = io_slot.access("prepare", output.batch)
        with self.device.host_phase(access) as phase:
            columns = self.table.apply(output)
            shape = self.builder.fill(io_slot, output, columns)
            phase.work = shape.work
        return columns, shape

    def _poison(self, output: SchedulerOutput) -> None:
        """Debug mode: spoil the blocks that have a new owner, before it has them."""
        blocks = output.fresh_blocks
        self.poison_stream.launch(
            lambda: self.runner.poison(blocks),
            Access("h2d", output.batch, -1, tuple, lambda: block_names(blocks)),
        )

    def _forget_finished(self) -> None:
        for request in self.scheduler.take_finished():
            self.counters.finished(request, self.device.now_us())
            del self.requests[request.request_id]

    def _compute_access(
        self,
        output: SchedulerOutput,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
    ) -> Access:
        """Names of all that a batch's forward pass reads and writes."""

        def reads() -> list[Resource]:
            carries = [o.carry for o in output.occurrences if o.carry >= 0]
            return [
                *io_slot.resources("device"),
                *self.carry_over.reads(previous, carries),
                *block_names(output.blocks_read()),
            ]

        def writes() -> list[Resource]:
            rows = [o.row for o in output.occurrences if o.rank >= 0]
            return [
                *io_slot.sampled("device"),
                *self.carry_over.writes(rows),
                *block_names(output.blocks_written(self.config.block_size)),
            ]

        return Access("compute", output.batch, io_slot.index, reads, writes, shape.work)

    # ------------------------------------------------------------------ life cycle

    def close(self) -> None:
        """Wait for what is in flight, then give streams and model back.

        A request that has not ended by now ends with an error. The device is closed,
        too.
        """
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self.error is None:
                self.device.synchronize()
        finally:
            self._end_all(RuntimeError("closed before this request had ended"))
            self.in_flight.clear()
            self.device.close()
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(depth={self.config.depth}, {self.device!r}, "
            f"{len(self.in_flight)} in flight, {self.scheduler!r})"
        )


class SyncEngine(Engine):
    """CPU and GPU take turns: the GPU idles during update, schedule, prepare."""

    def step(self) -> list[Request]:
        """Schedule a batch, launch it, and wait for it."""
        if not self.in_flight:  # else an earlier wait was interrupted: wait again
            output = self.schedule()
            if output is None:
                return []
            self.launch(output)
        return self.collect()


class AsyncEngine(Engine):
    """The CPU runs `depth` batches ahead of the GPU."""

    def step(self) -> list[Request]:
        """Schedule a batch and launch it; wait only for one that is `depth` older.

        Cold start (nothing to collect yet) and drain (nothing left to launch) are not
        special cases: they are what this loop does at its ends.
        """
        has_slot = len(self.in_flight) <= self.config.depth
        output = self.schedule() if has_slot else None
        if output is not None:
            self.launch(output)
        if self.in_flight and (
            output is None or len(self.in_flight) > self.config.depth
        ):
            return self.collect()
        return []
