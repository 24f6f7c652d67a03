"""A race detector: vector clocks over the host and the streams.

It watches the device interface and sees every launch, record, wait and synchronize in
the order the host makes them. From that alone follows what is ordered before what, so
its verdict does not depend on how long anything took: it is the same on every device.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbasync.devices.access import Access, Resource

HOST = "host"

Clock = dict[str, int]
"""A vector clock: how much of each thread of execution is known to be over."""


@dataclass(frozen=True)
class Touch:
    """One access to one resource, by the host or by an op on a stream."""

    thread: str
    tick: int  # on its own thread's clock
    access: Access
    is_write: bool

    def is_before(self, clock: Clock) -> bool:
        """Whether whoever has this clock comes after the touch."""
        return self.tick <= clock.get(self.thread, 0)

    def __str__(self) -> str:
        verb = "write" if self.is_write else "read"
        where = HOST if self.thread == HOST else f"{self.thread} stream"
        return f"{verb} by {self.access} on the {where}"


@dataclass(frozen=True)
class Race:
    """Two accesses to one resource, one of them a write, and nothing between them."""

    resource: Resource
    first: Touch
    second: Touch
    edge: str  # the ordering that is missing, by its name in the code

    def __str__(self) -> str:
        return f"{self.resource}: {self.first}, {self.second}: missing edge {self.edge}"


@dataclass(slots=True)
class _History:
    """The last write of a resource and the reads since, one a thread at most."""

    write: Touch | None = None
    reads: dict[str, Touch] | None = None


class RaceDetector:
    """Reports every pair of accesses that no chain of edges orders.

    A host that refills a buffer while a copy still reads it:

    >>> detector = RaceDetector()
    >>> buffer = lambda: ["slot A host_input_ids"]
    >>> detector.on_host(Access("prepare", 0, 0, tuple, buffer))
    >>> detector.on_launch("h2d", Access("h2d", 0, 0, buffer))
    >>> detector.on_host(Access("prepare", 2, 0, tuple, buffer))
    >>> print(detector.races[0])
    slot A host_input_ids: read by h2d of batch 0 (slot A) on the h2d stream, \
write by prepare of batch 2 (slot A) on the host: missing edge slot_refill

    History is kept by the name of a resource, over free and reuse: a block that has a
    new owner remembers the batch that still writes to it.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.num_accesses = 0
        self._clocks: dict[str, Clock] = {HOST: {HOST: 0}}
        self._events: dict[int, tuple[object, Clock]] = {}
        self._history: dict[Resource, _History] = {}

    # ------------------------------------------------------------------ what happens

    def on_launch(self, stream: str, access: Access) -> None:
        """An op comes after all that its stream waits for, and after its launch."""
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._clocks[HOST])
        self._touch(stream, clock, access)

    def on_record(self, stream: str, event: object) -> None:
        """An event stands for the newest point of its stream; a new record replaces."""
        # The event is kept beside its clock: an id is only unique while it lives.
        self._events[id(event)] = (event, dict(self._clocks.setdefault(stream, {})))

    def on_wait(self, stream: str, event: object) -> None:
        """A stream learns what the event stands for now; nothing if never recorded."""
        if id(event) in self._events:
            _join(self._clocks.setdefault(stream, {}), self._events[id(event)][1])

    def on_synchronize(self, event: object) -> None:
        """The host learns what the event stands for."""
        self.on_wait(HOST, event)

    def on_host(self, access: Access) -> None:
        """The host touches its own buffers."""
        self._touch(HOST, self._clocks[HOST], access)

    # ------------------------------------------------------------------ what it means

    def _touch(self, thread: str, clock: Clock, access: Access) -> None:
        tick = clock[thread] = clock.get(thread, 0) + 1
        read, write = (Touch(thread, tick, access, flag) for flag in (False, True))
        for resource in access.reads():
            self._check(resource, read, clock)
        for resource in access.writes():
            self._check(resource, write, clock)

    def _check(self, resource: Resource, touch: Touch, clock: Clock) -> None:
        self.num_accesses += 1
        history = self._history.setdefault(resource, _History())
        others: Iterable[Touch] = [history.write] if history.write else []
        if touch.is_write and history.reads:
            others = [*others, *history.reads.values()]
        for other in others:
            # An op may read and write one resource: with itself it has no race.
            if not other.is_before(clock):
                edge = missing_edge(resource, other.access, touch.access)
                self.races.append(Race(resource, other, touch, edge))
        if touch.is_write:
            history.write, history.reads = touch, None
        else:
            history.reads = (history.reads or {}) | {touch.thread: touch}

    def __str__(self) -> str:
        if not self.races:
            return f"no race in {self.num_accesses} accesses"
        lines = [f"{len(self.races)} races in {self.num_accesses} accesses"]
        by_edge: dict[str, list[Race]] = {}
        for race in self.races:
            by_edge.setdefault(race.edge, []).append(race)
        for edge, races in by_edge.items():
            lines.append(f"  {edge}: {len(races)}, the first: {races[0]}")
        return "\n".join(lines)


def _join(clock: Clock, other: Clock) -> None:
    for thread, tick in other.items():
        if tick > clock.get(thread, 0):
            clock[thread] = tick


def missing_edge(resource: Resource, first: Access, second: Access) -> str:
    """The edge that should have ordered two accesses, from what they are.

    >>> missing_edge("slot A host_sampled", Access("d2h", 4), Access("update", 4))
    'd2h_done'
    >>> missing_edge("slot A host_sampled", Access("d2h", 6), Access("update", 4))
    'slot_refill'
    """
    phases = {first.phase, second.phase}
    if resource.startswith("block"):
        return "compute_order" if phases == {"compute"} else "block_lease"
    if resource.startswith("token row"):
        return "compute_order"
    if phases == {"compute"}:
        return "compute_order"
    same_batch = first.batch == second.batch
    if same_batch:
        by_phases = {
            frozenset({"h2d", "compute"}): "h2d_done",
            frozenset({"compute", "d2h"}): "compute_done",
            frozenset({"d2h", "update"}): "d2h_done",
        }
        return by_phases.get(frozenset(phases), "slot_refill")
    return "slot_refill" if phases & {"prepare", "update"} else "slot_reuse"
