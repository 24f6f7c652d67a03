"""Event scripts: what a host tells its streams, line by line, and what that orders.

A script is plain data (lists and dicts), so it can be sent to another process. The race
detector of the package judges it, the virtual machine runs it. Knows neither engines
nor models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cbasync.devices.access import Access, Observer
from cbasync.devices.races import HOST, RaceDetector
from cbasync.devices.virtual import Node, Queue, VirtualMachine
from cbasync.event_log import EventLog, Named
from cbasync.paper import Drawing
from cbasync.timeline import Span, Timeline

Line = dict[str, Any]
Script = list[Line]
Pair = tuple[str, str]

STREAMS = ("h2d", "compute", "d2h")
DURATION_US = {
    "schedule": 1000, "prepare": 3000, "h2d": 2000, "compute": 8000, "d2h": 2000,
    "update": 1000,
}  # fmt: skip
LAUNCH_US = 100

# ------------------------------------------------------------------ lines


def host(op: str, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> Line:
    """The host itself works: `prepare 3`, `update 2`."""
    return {"do": "host", "op": op, "reads": [*reads], "writes": [*writes]}


def launch(
    on: str, op: str, reads: Sequence[str] = (), writes: Sequence[str] = ()
) -> Line:
    """The host puts an op into the queue of a stream and goes on at once."""
    line = host(op, reads, writes)
    return line | {"do": "launch", "on": on}


def record(on: str, event: str) -> Line:
    """The event stands for all in the stream's queue so far, waits included."""
    return {"do": "record", "on": on, "event": event}


def wait(on: str, event: str) -> Line:
    """What is launched on the stream later comes after the event."""
    return {"do": "wait", "on": on, "event": event}


def synchronize(event: str) -> Line:
    """The host stops until the event has happened."""
    return {"do": "synchronize", "event": event}


def ops(script: Script) -> list[Line]:
    """The lines that touch arrays, in the order of the script."""
    return [line for line in script if "op" in line]


def show(script: Script) -> str:
    """A script as text.

    >>> print(show([launch("h2d", "h2d 0", ["ids"], ["device_ids"]), wait("d2h", "e")]))
     0  launch on h2d      h2d 0: reads ids, writes device_ids
     1  wait on d2h        e
    """
    lines = [f"{n:2}  {_words(line)}" for n, line in enumerate(script)]
    return "\n".join(lines) or " (no lines)"


def _words(line: Line) -> str:
    head = f"{line['do']} on {line['on']}" if "on" in line else line["do"]
    if "event" in line:
        return f"{head:<17}  {line['event']}"
    touched = [f"{k} {', '.join(line[k])}" for k in ("reads", "writes") if line[k]]
    return f"{head:<17}  {line['op']}: {', '.join(touched) or 'touches nothing'}"


# ------------------------------------------------------------------ what it orders


class Ordering:
    """Which op of a script comes before which, whatever the durations are.

    Two streams know nothing of each other, but a launch comes after all that the host
    has seen:

    >>> script = [host("prepare 0"), launch("h2d", "h2d 0"), launch("d2h", "d2h 0")]
    >>> ordering = Ordering(script)
    >>> ordering.before("prepare 0", "d2h 0"), ordering.before("h2d 0", "d2h 0")
    (True, False)
    """

    def __init__(self, script: Script) -> None:
        self.names = [line["op"] for line in ops(script)]
        self.bit = {name: 1 << place for place, name in enumerate(self.names)}
        self.earlier: dict[str, int] = {}  # of each op: the set of ops before it
        known = dict.fromkeys((HOST, *STREAMS), 0)
        events: dict[str, int] = {}
        for line in script:
            thread = line.get("on", HOST)
            if line["do"] == "record":
                events[line["event"]] = known[thread]
            elif "event" in line:
                known[thread] |= events.get(line["event"], 0)
            else:
                self.earlier[line["op"]] = known[thread] | known[HOST]
                known[thread] |= known[HOST] | self.bit[line["op"]]

    def before(self, first: str, second: str) -> bool:
        return bool(self.earlier[second] & self.bit[first])

    def with_pairs(self, pairs: Iterable[Pair]) -> dict[str, int]:
        """The sets of earlier ops if each first op came before its second op too."""
        direct = dict(self.earlier)
        for first, second in pairs:
            direct[second] |= self.bit[first]
        for second in self.names:  # what is before an op stands above it
            for first in self.names:
                if direct[second] & self.bit[first]:
                    direct[second] |= direct[first]
        return direct


def conflict(first: Line, second: Line) -> bool:
    """Whether two ops touch one array and at least one of them writes it."""
    reads, writes = set(second["reads"]), set(second["writes"])
    touches_written = set(first["writes"]) & (reads | writes)
    return bool(touches_written or set(first["reads"]) & writes)


def unordered(script: Script) -> list[Pair]:
    """Every pair that races, by the place of its second op, then of its first."""
    ordering, lines = Ordering(script), ops(script)
    return [
        (first["op"], second["op"])
        for place, second in enumerate(lines)
        for first in lines[:place]
        if conflict(first, second) and not ordering.before(first["op"], second["op"])
    ]


# ------------------------------------------------------------------ who watches it


def replay(script: Script, *watchers: Observer) -> None:
    """Tell watchers of the device interface what the host does, line by line."""
    events: dict[str, Named] = {}
    for line in script:
        for watcher in watchers:
            _tell(watcher, line, events)


def _tell(watcher: Observer, line: Line, events: dict[str, Named]) -> None:
    name = line.get("event", "")
    event = events.setdefault(name, Named(name))
    if line["do"] == "host":
        watcher.on_host(access(line))
    elif line["do"] == "launch":
        watcher.on_launch(line["on"], access(line))
    elif line["do"] == "record":
        watcher.on_record(line["on"], event)
    elif line["do"] == "wait":
        watcher.on_wait(line["on"], event)
    else:
        watcher.on_synchronize(event)


def access(line: Line) -> Access:
    """An op as the race detector knows it: `h2d 3` is the phase h2d of batch 3."""
    phase, number = line["op"].split()
    return Access(phase, int(number), -1, lambda: line["reads"], lambda: line["writes"])


def name_of(access: Access) -> str:
    """The name that an op has in a script."""
    return f"{access.phase} {access.batch}"


def first_race(script: Script) -> list[str] | None:
    """The missing edge: the race whose second op stands first, its last first op."""
    detector = RaceDetector()
    replay(script, detector)
    places = {line["op"]: place for place, line in enumerate(script) if "op" in line}
    pairs = [
        (name_of(r.first.access), name_of(r.second.access)) for r in detector.races
    ]
    pairs.sort(key=lambda pair: (places[pair[1]], -places[pair[0]]))
    return [*pairs[0]] if pairs else None


# ------------------------------------------------------------------ running it


class Machine:
    """Runs a script on the virtual clock; every array holds the number of a batch.

    `prepare 3` writes 3, any other op hands on what it reads first. So `update 3` has
    to see 3; what it sees is in `seen`.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.seen: dict[str, int | None] = {}
        self._machine = VirtualMachine()
        self._queues = {name: Queue(name) for name in STREAMS}
        self._events: dict[int, Node | None] = {}
        self._arrays: dict[str, int | None] = {}

    def on_launch(self, stream: str, access: Access) -> None:
        machine = self._machine
        machine.advance(LAUNCH_US)
        node = machine.launch(
            self._queues[stream],
            lambda: self._run(access),
            stream,
            DURATION_US[access.phase],
            access.reads(),
            access.writes(),
        )
        self._add(stream, access, node.start_us, node.end_us)

    def on_record(self, stream: str, event: object) -> None:
        self._events[id(event)] = self._queues[stream].tail

    def on_wait(self, stream: str, event: object) -> None:
        node = self._events.get(id(event))
        if node is not None:
            self._machine.wait(self._queues[stream], node)

    def on_synchronize(self, event: object) -> None:
        node = self._events.get(id(event))
        if node is not None:
            self._machine.synchronize(node)

    def on_host(self, access: Access) -> None:
        machine = self._machine
        machine.host_access(access.writes())
        self._run(access)
        start_us = machine.now_us
        machine.advance(DURATION_US[access.phase])
        self._add("cpu", access, start_us, machine.now_us)

    def drain(self) -> None:
        """Let everything that was launched take effect."""
        self._machine.drain()

    def _run(self, access: Access) -> None:
        value: int | None = access.batch
        for name in list(access.reads())[:1]:
            value = self._arrays.get(name)
        self.seen[name_of(access)] = value
        self._arrays.update(dict.fromkeys(access.writes(), value))

    def _add(self, lane: str, access: Access, start_us: float, end_us: float) -> None:
        self.timeline.add(Span(lane, access.phase, access.batch, -1, start_us, end_us))


def run(script: Script) -> Machine:
    """A script on the virtual machine, from its first line to its last.

    >>> run([host("prepare 3", writes=["a"]), host("update 3", ["a"])]).seen
    {'prepare 3': 3, 'update 3': 3}
    """
    machine = Machine()
    replay(script, machine)
    machine.drain()
    return machine


def drawing(script: Script, name: str = "script") -> Drawing:
    """A script's timeline with its events as arrows and its races as crosses."""
    detector, log, machine = RaceDetector(), EventLog(), Machine()
    replay(script, detector, log, machine)
    machine.timeline.name = name
    return Drawing(machine.timeline, log.arrows, detector.races)


def bars(script: Script) -> list[Line]:
    """The timeline as plain data: each op with its start and its end, as issued."""
    spans = run(script).timeline.spans
    return [
        line | {"start_us": span.start_us, "end_us": span.end_us}
        for line, span in zip(ops(script), spans, strict=True)
    ]
