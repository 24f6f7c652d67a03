"""Streams on a virtual clock: real ops, times from a cost model, visible races."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from cbasync.devices.access import Access
from cbasync.devices.base import Device, Event, HostPhase, Stream, plain_zeros
from cbasync.devices.costs import ARTICLE, CostModel
from cbasync.devices.virtual import Node, Order, Queue, VirtualMachine
from cbasync.timeline import Span


class SimEvent(Event):
    """An event whose record is a node of a queue."""

    device: SimDevice
    record: Node | None = None
    was_recorded = False

    def query(self) -> bool:
        return self.record is None or self.record.end_us <= self.device.machine.now_us

    def _synchronize(self) -> None:
        machine = self.device.machine
        if self.record is not None:
            must_wait = self.record.end_us > machine.now_us
            machine.synchronize(self.record)
            if must_wait:
                machine.advance(self.device.costs.wake_us)


class SimStream(Stream):
    """A first-in-first-out queue on the virtual clock."""

    device: SimDevice

    def __init__(self, device: SimDevice, name: str, *, blocking: bool = False) -> None:
        super().__init__(device, name)
        self.queue = Queue(name, blocking=blocking)

    def _launch(self, op: Callable[[], None], access: Access) -> None:
        device = self.device
        machine = device.machine
        machine.advance(device.costs.launch_us)
        tracks = machine.tracks
        node = machine.launch(
            self.queue,
            op,
            engine=access.phase,
            duration_us=device.costs.duration_us(access.phase, access.work),
            reads=access.reads() if tracks else (),
            writes=access.writes() if tracks else (),
            after=device.implicit_order(self.queue),
        )
        if access.phase == "compute":
            machine.advance(device.costs.return_us)
        device.log(access, node.start_us, node.end_us)

    def _record(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        event.record, event.was_recorded = self.queue.tail, True

    def _wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        if not event.was_recorded:
            warnings.warn(
                f"stream {self.name} waits for {event.name}, which has not been "
                "recorded yet: such a wait orders nothing, record it first",
                stacklevel=3,
            )
        elif event.record is not None:
            self.device.machine.wait(self.queue, event.record)


class SimDevice(Device):
    """Host and GPU on one virtual clock: the same run every time, to the microsecond.

    Ops really run, on buffers of the CPU, so tokens are real; times are those of the
    machine that `costs` describes. `order` says what a race shows: see
    `cbasync.devices.virtual`.

    >>> device = SimDevice()
    >>> stream, done = device.stream("compute"), device.event("compute_done")
    >>> stream.launch(lambda: None, Access("compute", batch=0))
    >>> stream.record(done)
    >>> done.query()
    False
    >>> done.synchronize()
    >>> print(f"{device.now_us():.0f} us")
    27890 us
    """

    torch_device = torch.device("cpu")

    def __init__(
        self, *, costs: CostModel = ARTICLE, order: Order = "durations"
    ) -> None:
        super().__init__()
        self.costs = costs
        self.machine = VirtualMachine(order)
        self._blocking_queues: list[Queue] = []
        self._default_queue: Queue | None = None

    # ------------------------------------------------------------------ interface

    def stream(self, name: str, *, blocking: bool = False) -> SimStream:
        """A stream as PyTorch makes it: it does not order itself with the default one.

        `blocking` makes one as plain `cudaStreamCreate` does, for comparison.
        """
        stream = SimStream(self, name, blocking=blocking)
        if blocking:
            self._blocking_queues.append(stream.queue)
        return stream

    def default_stream(self) -> SimStream:
        """The legacy default stream.

        Its ops come after all that was issued before on blocking streams, and before
        all that is issued later on them. Streams from PyTorch's pool are not blocking:
        between them and the default stream only events make an order. The host is not
        held up by it either: only reading a result holds the host up.
        """
        stream = SimStream(self, "default")
        self._default_queue = stream.queue
        return stream

    def implicit_order(self, queue: Queue) -> list[Node]:
        """What the default stream's rule puts before the next op of a queue."""
        if queue is self._default_queue:
            others = self._blocking_queues
        elif queue.blocking and self._default_queue is not None:
            others = [self._default_queue]
        else:
            return []
        return [other.tail for other in others if other.tail is not None]

    def event(self, name: str) -> SimEvent:
        return SimEvent(self, name)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return plain_zeros(shape, dtype)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return plain_zeros(shape, dtype)

    def now_us(self) -> float:
        return self.machine.now_us

    def synchronize(self) -> None:
        self.machine.drain()

    # ------------------------------------------------------------------ host phases

    def _begin_host(self, access: Access) -> None:
        writes = access.writes() if self.machine.tracks else ()
        self.machine.host_access(writes)

    def _end_host(self, access: Access, phase: HostPhase) -> None:
        self.machine.advance(self.costs.duration_us(access.phase, phase.work))

    def log(self, access: Access, start_us: float, end_us: float) -> None:
        """Add an op to the timeline; its times are known when it is issued."""
        self._timeline.add(
            Span(
                access.phase,
                access.phase,
                access.batch,
                access.slot,
                start_us,
                end_us,
                access.work,
            )
        )
