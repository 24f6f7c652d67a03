"""What an engine asks of a machine: streams, events, buffers and a clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cbasync.devices.access import Access, Observer
from cbasync.timeline import Span, Timeline

Mark = Callable[[Access], AbstractContextManager[object]]
"""What encloses the work of a phase while a profiler looks on."""


class StreamError(RuntimeError):
    """An op failed on a stream; the cause is chained."""


class Event(ABC):
    """A marker in a stream, with CUDA's semantics on every device.

    Waiting for an event that was never recorded is a no-op. Recording again replaces
    the record; a wait keeps to the record that existed when the wait was issued.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name

    def synchronize(self, edge: str = "") -> None:
        """Make the *host* wait until the recorded point has been passed.

        `edge` names the ordering this call is for; the event's own name if empty.
        """
        edge = edge or self.name
        if edge in self.device.ablate:
            return
        self._synchronize()
        for observer in self.device.observers:
            observer.on_synchronize(self)

    @abstractmethod
    def query(self) -> bool:
        """Whether the recorded point has been passed; True if never recorded."""

    @abstractmethod
    def _synchronize(self) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class Stream(ABC):
    """A queue of ops that run one after the other, beside the host."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name

    def launch(self, op: Callable[[], None], access: Access) -> None:
        """Put an op in the queue and return at once."""
        for observer in self.device.observers:
            observer.on_launch(self.name, access)
        if (mark := self.device.mark) is not None:
            self._launch(_marked(op, mark, access), access)
        else:
            self._launch(op, access)

    def record(self, event: Event) -> None:
        """Mark this point of the queue with the event."""
        for observer in self.device.observers:
            observer.on_record(self.name, event)
        self._record(event)

    def wait(self, event: Event, edge: str = "") -> None:
        """Make this *stream* wait for the event; the host goes on."""
        edge = edge or event.name
        if edge in self.device.ablate:
            return
        for observer in self.device.observers:
            observer.on_wait(self.name, event)
        self._wait(event)

    @abstractmethod
    def _launch(self, op: Callable[[], None], access: Access) -> None: ...

    @abstractmethod
    def _record(self, event: Event) -> None: ...

    @abstractmethod
    def _wait(self, event: Event) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def _marked(op: Callable[[], None], mark: Mark, access: Access) -> Callable[[], None]:
    """The op inside its mark, on whichever thread it runs."""

    def run() -> None:
        with mark(access):
            op()

    return run


class HostPhase:
    """Host work under way: it times itself, and is logged if nothing failed in it.

    What the work finds out about its batch, `batch` and `work`, is filled in meanwhile.
    A class and not a generator, because there are three of them in every step.
    """

    __slots__ = ("_access", "_device", "_mark", "_start_us", "batch", "work")

    def __init__(self, device: Device, access: Access) -> None:
        self.batch = access.batch  # -1: there was no batch after all
        self.work = access.work
        self._access = access
        self._device = device
        self._mark = device.mark(access) if device.mark is not None else None
        self._start_us = 0.0

    def __enter__(self) -> HostPhase:
        self._start_us = self._device.now_us()
        if self._mark is not None:
            self._mark.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._mark is not None:
            self._mark.__exit__(*exc)
        if exc[0] is None:
            self._device.end_host(self._access, self, self._start_us)


class Device(ABC):
    """A machine with streams beside the host, and the log of what ran on it.

    `ablate` names edges to drop: a wait for one of them does nothing. It is there to
    show what goes wrong without them.
    """

    torch_device: torch.device

    def __init__(self) -> None:
        self.ablate: frozenset[str] = frozenset()
        self.observers: list[Observer] = []
        self.mark: Mark | None = None
        self._timeline = Timeline()

    @property
    def timeline(self) -> Timeline:
        """Spans of everything that has finished so far."""
        return self._timeline

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A new stream."""

    @abstractmethod
    def event(self, name: str) -> Event:
        """A new event, never recorded yet."""

    @abstractmethod
    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that copies can read while the host goes on."""

    @abstractmethod
    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed device memory: never the same storage as any host buffer."""

    @abstractmethod
    def now_us(self) -> float:
        """The host's clock, in microseconds since the device was made."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait until every stream is empty."""

    def setting_up(self) -> AbstractContextManager[None]:
        """Around what the host computes by itself before the first batch."""
        return nullcontext()

    def close(self) -> None:
        """Give threads and memory back. The device cannot be used afterwards."""

    def host_phase(self, access: Access) -> HostPhase:
        """Time one phase of host work and log it on the cpu lane."""
        for observer in self.observers:
            observer.on_host(access)
        self._begin_host(access)
        return HostPhase(self, access)

    def end_host(self, access: Access, phase: HostPhase, start_us: float) -> None:
        """Log a phase of host work that is over; `HostPhase` calls this."""
        self._end_host(access, phase)
        end_us = self.now_us()
        self._timeline.add(
            Span(
                "cpu",
                access.phase,
                phase.batch,
                access.slot,
                start_us,
                end_us,
                phase.work,
            )
        )

    def _begin_host(self, access: Access) -> None:
        """Called before the host works; a clock of its own settles there."""

    def _end_host(self, access: Access, phase: HostPhase) -> None:
        """Called after the host has worked; a clock of its own advances there."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.torch_device})"


def plain_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """CPU memory that any thread may change, whatever the caller's grad mode is."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype)
