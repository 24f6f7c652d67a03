"""Which event held back what: the arrows of a timeline.

Watches the device interface, so it works on every device. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cbasync.devices.access import Access

HOST = "host"


class Point(NamedTuple):
    """One bar of a timeline by its name: a phase of a batch."""

    phase: str
    batch: int


class Arrow(NamedTuple):
    """An event from where it was recorded to what waited for it."""

    edge: str  # the ordering it keeps, by its name in the code
    source: Point
    target: Point


@dataclass
class EventLog:
    """Logs every wait of a stream and every synchronize of the host, as arrows.

    A copy to the device, and the forward pass that waits for it:

    >>> log, h2d_done = EventLog(), Named("h2d_done")
    >>> log.on_launch("h2d", Access("h2d", batch=3))
    >>> log.on_record("h2d", h2d_done)
    >>> log.on_wait("compute", h2d_done)
    >>> log.on_launch("compute", Access("compute", batch=3))
    >>> print(*log.arrows[0])
    h2d_done Point(phase='h2d', batch=3) Point(phase='compute', batch=3)
    """

    arrows: list[Arrow] = field(default_factory=list)
    _last: dict[str, Point] = field(default_factory=dict)  # newest op of each stream
    # The event is kept beside its point: an id is only unique while it lives.
    _recorded: dict[int, tuple[object, Point]] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[str, Point]]] = field(default_factory=dict)

    def on_launch(self, stream: str, access: Access) -> None:
        """An op comes after all that its stream has been told to wait for."""
        self._arrive(stream, access)
        self._last[stream] = Point(access.phase, access.batch)

    def on_record(self, stream: str, event: object) -> None:
        """An event stands for the newest op of its stream."""
        if stream in self._last:
            self._recorded[id(event)] = (event, self._last[stream])

    def on_wait(self, stream: str, event: object) -> None:
        """Whatever the stream runs next comes after the event."""
        if id(event) in self._recorded:
            name = getattr(event, "name", "event")
            source = self._recorded[id(event)][1]
            self._waiting.setdefault(stream, []).append((name, source))

    def on_synchronize(self, event: object) -> None:
        """Whatever the host does next comes after the event."""
        self.on_wait(HOST, event)

    def on_host(self, access: Access) -> None:
        """The host goes on with a phase."""
        self._arrive(HOST, access)

    def _arrive(self, thread: str, access: Access) -> None:
        target = Point(access.phase, access.batch)
        for name, source in self._waiting.pop(thread, []):
            # Between batches it is not the copy or the tokens, but the slot.
            if source.batch != target.batch:
                name = "slot_refill" if thread == HOST else "slot_reuse"
            self.arrows.append(Arrow(name, source, target))


@dataclass
class Named:
    """Anything with a name can stand for an event."""

    name: str
