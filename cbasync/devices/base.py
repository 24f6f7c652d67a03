"""What an engine asks of a machine: streams, events, buffers and a clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cbasync.timeline import Span, Timeline

Resource = Hashable
"""A thing that is read or written: a slot's array, a KV block, a token row."""


class Access(NamedTuple):
    """What one op or one host phase touches, and on whose behalf.

    `reads` and `writes` are only called when somebody watches: naming every KV block
    of a batch costs more than scheduling it.
    """

    phase: str
    batch: int = -1
    slot: int = -1
    reads: Callable[[], Iterable[Resource]] = tuple
    writes: Callable[[], Iterable[Resource]] = tuple


class Observer(Protocol):
    """Sees every call of the interface, in the order the host makes them."""

    def on_launch(self, stream: Stream, access: Access) -> None: ...

    def on_record(self, stream: Stream, event: Event) -> None: ...

    def on_wait(self, stream: Stream, event: Event, edge: str) -> None: ...

    def on_synchronize(self, event: Event, edge: str) -> None: ...

    def on_host(self, access: Access) -> None: ...


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
            observer.on_synchronize(self, edge)

    @abstractmethod
    def query(self) -> bool:
        """Whether the recorded point has been passed; True if never recorded."""

    @abstractmethod
    def _synchronize(self) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class Stream(ABC):
    """A queue of ops that run one after the other, beside the host."""

    def __init__(self, device: Device, lane: str) -> None:
        self.device = device
        self.lane = lane

    def launch(self, op: Callable[[], None], access: Access) -> None:
        """Put an op in the queue and return at once."""
        for observer in self.device.observers:
            observer.on_launch(self, access)
        self._launch(op, access)

    def record(self, event: Event) -> None:
        """Mark this point of the queue with the event."""
        for observer in self.device.observers:
            observer.on_record(self, event)
        self._record(event)

    def wait(self, event: Event, edge: str = "") -> None:
        """Make this *stream* wait for the event; the host goes on."""
        edge = edge or event.name
        if edge in self.device.ablate:
            return
        for observer in self.device.observers:
            observer.on_wait(self, event, edge)
        self._wait(event)

    @abstractmethod
    def _launch(self, op: Callable[[], None], access: Access) -> None: ...

    @abstractmethod
    def _record(self, event: Event) -> None: ...

    @abstractmethod
    def _wait(self, event: Event) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lane})"


@dataclass(slots=True)
class HostPhase:
    """Host work under way. Its batch may turn out not to exist: then it is -1."""

    batch: int


class Device(ABC):
    """A machine with streams beside the host, and the log of what ran on it.

    `ablate` names edges to drop: a wait for one of them does nothing. It is there to
    show what goes wrong without them.
    """

    torch_device: torch.device

    def __init__(self) -> None:
        self.ablate: frozenset[str] = frozenset()
        self.observers: list[Observer] = []
        self._timeline = Timeline()

    @property
    def timeline(self) -> Timeline:
        """Spans of everything that has finished so far."""
        return self._timeline

    @abstractmethod
    def stream(self, lane: str) -> Stream:
        """A new stream, drawn on `lane` of the timeline."""

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

    def close(self) -> None:
        """Give threads and memory back. The device cannot be used afterwards."""

    @contextmanager
    def host_phase(self, access: Access) -> Iterator[HostPhase]:
        """Time one phase of host work and log it on the cpu lane."""
        for observer in self.observers:
            observer.on_host(access)
        host_phase = HostPhase(access.batch)
        start_us = self.now_us()
        yield host_phase
        self._timeline.add(
            Span(
                "cpu",
                access.phase,
                host_phase.batch,
                access.slot,
                start_us,
                self.now_us(),
            )
        )

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.torch_device})"
