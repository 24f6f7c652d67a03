"""Event scripts to try a race finder on: right ones, ones with a fault, random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from cbasync.checks.race_scripts import (
    STREAMS,
    Line,
    Script,
    host,
    launch,
    ops,
    record,
    synchronize,
    unordered,
    wait,
)

SHARED = ("ids", "device_ids", "tokens")
FAULTS = ("removed", "early record", "early wait", "wrong stream", "wrong event")

# No race: a record stands for the waits above it, too, without a launch between them.
# Random scripts seldom need that, so a check that draws them has to add this one.
WAIT_RECORDED: Script = [
    launch("h2d", "h2d 0", ["ids"], ["x"]),
    record("h2d", "in"),
    wait("d2h", "in"),
    record("d2h", "out"),
    synchronize("out"),
    host("update 0", ["x"]),
]


@dataclass(frozen=True)
class Pipeline:
    """A schedule that runs ahead, and the events that keep it right.

    There are `depth + 1` sets of arrays, A, B, ...; an array that is named in `shared`
    exists only once, which takes further events.
    """

    batches: int
    depth: int = 1
    shared: frozenset[str] = frozenset()

    def script(self) -> Script:
        """All lines, without a race.

        >>> unordered(Pipeline(4, shared=frozenset(SHARED)).script())
        []
        """
        lines: Script = []
        for batch in range(self.batches):
            lines += self._batch(batch)
            if batch >= self.depth:
                lines += self._collect(batch - self.depth)
        for batch in range(max(0, self.batches - self.depth), self.batches):
            lines += self._collect(batch)
        return lines

    def _slot(self, batch: int) -> str:
        return "ABCD"[batch % (self.depth + 1)]

    def _array(self, name: str, batch: int) -> str:
        return name if name in self.shared else f"{name} {self._slot(batch)}"

    def _reuse(self, array: str, batch: int, line: Line) -> Script:
        """The line that lets an array be written anew, if there is only one of it."""
        return [line] if array in self.shared and batch > 0 else []

    def _batch(self, batch: int) -> Script:
        slot, before = self._slot(batch), self._slot(batch - 1)
        ids, device_ids = self._array("ids", batch), self._array("device_ids", batch)
        tokens = self._array("tokens", batch)
        carried = [self._array("tokens", batch - 1)] if batch else []
        return [
            *self._reuse("ids", batch, synchronize(f"h2d_done {before}")),
            host(f"prepare {batch}", writes=[ids]),
            *self._reuse("device_ids", batch, wait("h2d", f"compute_done {before}")),
            launch("h2d", f"h2d {batch}", [ids], [device_ids]),
            record("h2d", f"h2d_done {slot}"),
            wait("compute", f"h2d_done {slot}"),
            *self._reuse("tokens", batch, wait("compute", f"d2h_done {before}")),
            launch("compute", f"compute {batch}", [device_ids, *carried], [tokens]),
            record("compute", f"compute_done {slot}"),
            wait("d2h", f"compute_done {slot}"),
            launch("d2h", f"d2h {batch}", [tokens], [f"host_tokens {slot}"]),
            record("d2h", f"d2h_done {slot}"),
        ]

    def _collect(self, batch: int) -> Script:
        slot = self._slot(batch)
        return [
            synchronize(f"d2h_done {slot}"),
            host(f"update {batch}", reads=[f"host_tokens {slot}"]),
        ]


def a_pipeline(rng: random.Random, batches: int) -> Pipeline:
    """Any depth, any arrays shared."""
    shared = frozenset(name for name in SHARED if rng.random() < 0.4)
    return Pipeline(batches, rng.choice((1, 1, 2)), shared)


# ------------------------------------------------------------------ faults


def planted(rng: random.Random, script: Script, kinds: tuple[str, ...]) -> Script:
    """A script with one fault more, chosen so that a race comes of it."""
    places = [place for place, line in enumerate(script) if "event" in line]
    choices = [(kind, place) for kind in kinds for place in places]
    rng.shuffle(choices)
    before = unordered(script)
    for kind, place in choices:
        faulty = _spoilt(rng, script, kind, place)
        if faulty != script and unordered(faulty) not in ([], before):
            return faulty
    raise ValueError(
        f"no fault of {', '.join(kinds)} makes a race in {len(ops(script))} ops: "
        "give more batches or further kinds"
    )


def _spoilt(rng: random.Random, script: Script, kind: str, place: int) -> Script:
    """The script with one line spoilt; unchanged where that makes no sense."""
    line = script[place]
    rest = script[:place] + script[place + 1 :]
    if kind == "removed":
        return rest
    if kind == "early record" and line["do"] == "record":
        return _moved_before(rest, place, line, "launch")
    if kind == "early wait" and line["do"] != "record":
        return _moved_before(rest, place, line, "record")
    if kind == "wrong stream" and line["do"] == "wait":
        other = rng.choice([name for name in STREAMS if name != line["on"]])
        return [*script[:place], line | {"on": other}, *script[place + 1 :]]
    if kind == "wrong event" and line["do"] != "record":
        events = sorted({other["event"] for other in rest if "event" in other})
        changed = line | {"event": rng.choice(events)}
        return [*script[:place], changed, *script[place + 1 :]]
    return script


def _moved_before(rest: Script, place: int, line: Line, what: str) -> Script:
    """The line put back just before what it has to come after."""
    key = "on" if what == "launch" else "event"
    for target in range(place - 1, -1, -1):
        other = rest[target]
        if other["do"] == what and other[key] == line[key]:
            return [*rest[:target], line, *rest[target:]]
    return [*rest[:place], line, *rest[place:]]


# ------------------------------------------------------------------ many scripts


def faulty_scripts(
    rng: random.Random, count: int, kinds: tuple[str, ...] = FAULTS, faults: int = 1
) -> Iterator[Script]:
    """Scripts from small to large, with so many faults each."""
    for number in range(count):
        script = a_pipeline(rng, 2 + 3 * number // count + faults).script()
        for _ in range(faults):
            script = planted(rng, script, kinds)
        yield script


def random_script(rng: random.Random, size: int, *, events: bool = True) -> Script:
    """Lines of every kind without any plan; most of them race."""
    script: Script = []
    names, arrays = ("in", "out"), ("a", "b", "c")
    for number in range(size):
        for _ in range(rng.choice((0, 1, 2, 3)) if events else 0):
            stream, event = rng.choice(STREAMS), rng.choice(names)
            kinds = (record(stream, event), wait(stream, event), synchronize(event))
            script.append(rng.choice(kinds))
        reads, writes = (rng.sample(arrays, rng.choice((0, 1, 1))) for _ in range(2))
        stream = rng.choice((*STREAMS, "host"))
        if stream == "host":
            phase = rng.choice(("prepare", "update"))
            script.append(host(f"{phase} {number}", reads, writes))
        else:
            script.append(launch(stream, f"{stream} {number}", reads, writes))
    return script


def random_scripts(
    rng: random.Random, count: int, *, events: bool = True
) -> Iterator[Script]:
    """From two ops up."""
    for number in range(count):
        yield random_script(rng, 2 + 8 * number // count, events=events)
