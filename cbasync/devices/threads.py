"""Streams as worker threads: true overlap on a machine without a GPU."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from cbasync.devices.access import Access
from cbasync.devices.base import Device, Event, Stream, StreamError, plain_zeros
from cbasync.timeline import Span

Delay = Callable[[str], float]
"""phase -> seconds an op is held up before it runs; for tests."""


@contextmanager
def alone() -> Iterator[None]:
    """Let torch compute on the calling thread alone for a while, without helpers.

    OpenMP gives each thread that computes in parallel helpers of its own, and keeps
    them. With more of them than cores it no longer lets them spin between two kernels,
    and a forward pass takes longer. So whoever loads a model or makes a
    cache leaves the helpers to the compute stream.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Ticket:
    """A flag that is set once: a `threading.Event` that costs less."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let everybody through who waits, now or later."""
        self.is_set = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until it is set."""
        if not self.is_set:
            with self._lock:  # handed on from one who waits to the next
                pass


class ThreadsEvent(Event):
    """An event whose record is a ticket: a flag that the stream sets on its way.

    A new record makes a new ticket, so a wait that was issued before keeps the old.
    """

    device: ThreadsDevice
    ticket: Ticket | None = None

    def query(self) -> bool:
        return self.ticket is None or self.ticket.is_set

    def _synchronize(self) -> None:
        if self.ticket is not None:
            self.ticket.wait()
        self.device.raise_error()


_LONGEST_OP_S = 60.0  # a forgotten stream is not waited for longer than this

_Queue = queue.SimpleQueue[Callable[[], None] | None]


def _work(items: _Queue) -> None:
    """What a stream's thread does: one op after the other, without gradients.

    The grad mode belongs to a thread and not to a tensor, whatever the caller's is.
    """
    with torch.no_grad():
        while (item := items.get()) is not None:
            item()
            del item  # an op holds on to its engine


def _end(items: _Queue, thread: threading.Thread) -> None:
    """Let a stream's thread finish its queue; also when Python itself ends.

    A thread that is still inside a kernel then would bring the process down.
    """
    items.put(None)
    if thread is not threading.current_thread():  # the last reference may be in an op
        thread.join(_LONGEST_OP_S)


class ThreadsStream(Stream):
    """A first-in-first-out worker thread; PyTorch's kernels leave the host free."""

    device: ThreadsDevice

    def __init__(self, device: ThreadsDevice, name: str) -> None:
        super().__init__(device, name)
        self._queue: _Queue = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._queue,), name=f"cbasync-{name}", daemon=True
        )
        self._thread.start()
        # The thread knows its queue and nothing else, so that a stream which is simply
        # forgotten, as when a notebook cell is run again, takes its thread along.
        self._end = weakref.finalize(self, _end, self._queue, self._thread)

    def _launch(self, op: Callable[[], None], access: Access) -> None:
        self._check_open()
        self._queue.put(lambda: self._run(op, access))

    def _record(self, event: Event) -> None:
        self._check_open()
        assert isinstance(event, ThreadsEvent)
        event.ticket = ticket = Ticket()
        self._queue.put(ticket.set)

    def _wait(self, event: Event) -> None:
        assert isinstance(event, ThreadsEvent)
        if event.ticket is not None and not event.ticket.is_set:
            self._queue.put(event.ticket.wait)

    def _check_open(self) -> None:
        # Nobody would work on it, and whoever waits for its event would wait for ever.
        if not self._end.alive:
            raise StreamError(
                f"the {self.name} stream is closed: make a new device and engine"
            )

    def close(self) -> None:
        """Let the thread finish its queue and end."""
        self._end()

    def _run(self, op: Callable[[], None], access: Access) -> None:
        device = self.device
        if device.error is not None:
            return  # what follows a failed op would compute on rubbish
        try:
            if device.delay is not None:
                time.sleep(device.delay(access.phase))
            start_us = device.now_us()
            op()
        except BaseException as cause:
            device.error = StreamError(
                f"{access.phase} of batch {access.batch} failed on the {self.name} "
                f"stream: {type(cause).__name__}: {cause}"
            )
            device.error.__cause__ = cause
            return
        device.timeline.add(
            Span(
                access.phase,
                access.phase,
                access.batch,
                access.slot,
                start_us,
                device.now_us(),
                access.work,
            )
        )


class ThreadsDevice(Device):
    """The CPU as host *and* device: one worker thread a stream.

    Host and device buffers are separate memory, so a copy between them is a real
    copy and a missing one shows (`tensor.to("cpu")` would only alias).

    >>> with ThreadsDevice() as device:
    ...     stream, done = device.stream("compute"), device.event("done")
    ...     stream.launch(lambda: None, Access("compute", batch=0))
    ...     stream.record(done)
    ...     done.synchronize()
    >>> [span.phase for span in device.timeline.spans]
    ['compute']
    """

    torch_device = torch.device("cpu")

    def __init__(self, *, delay: Delay | None = None) -> None:
        super().__init__()
        self.delay = delay
        self.error: StreamError | None = None
        self._streams: list[ThreadsStream] = []
        self._epoch = time.perf_counter()

    def stream(self, name: str) -> ThreadsStream:
        stream = ThreadsStream(self, name)
        self._streams.append(stream)
        return stream

    def event(self, name: str) -> ThreadsEvent:
        return ThreadsEvent(self, name)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return plain_zeros(shape, dtype)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return plain_zeros(shape, dtype)

    def now_us(self) -> float:
        return (time.perf_counter() - self._epoch) * 1e6

    def setting_up(self) -> AbstractContextManager[None]:
        return alone()

    def raise_error(self) -> None:
        """Tell the host about an op that failed on any stream."""
        if self.error is not None:
            raise self.error

    def synchronize(self) -> None:
        for stream in self._streams:
            event = self.event("synchronize")
            stream._record(event)
            event._synchronize()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
