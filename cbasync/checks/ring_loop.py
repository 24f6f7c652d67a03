"""Checks of a host's loop around a ring of three slots, on the virtual device.

The loop is a list of actions. They are carried out with three streams and three events
a slot, as the engine does it, while the race detector looks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cbasync.checks.ring import LETTERS, NUM_SLOTS
from cbasync.checks.workload import Mistake, generator, is_whole
from cbasync.devices.access import Access
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.races import RaceDetector
from cbasync.devices.sim import SimDevice
from cbasync.palette import CAUSE_WORDS
from cbasync.timeline import Timeline

Loop = Callable[[int], Any]
"""Number of batches: `[["prepare", 0], ["launch", 0], ...]`."""

ACTIONS = ("prepare", "launch", "collect")

# The copy back takes so long that one batch in flight is not enough.
SLOW_COPY = CostModel(
    name="slow copy back",
    prepare=PhaseCost(300.0),
    h2d=PhaseCost(200.0),
    compute=PhaseCost(1000.0),
    d2h=PhaseCost(800.0),
    update=PhaseCost(300.0),
    note="round figures, for drawings",
)


class RingMachine:
    """Three slots, three streams and a host that does what it is told.

    >>> machine = RingMachine()
    >>> for action in ACTIONS:
    ...     machine.do(action, 0)
    >>> machine.detector.races, machine.device.now_us()
    ([], 2600.0)
    """

    def __init__(self) -> None:
        self.device = SimDevice(costs=SLOW_COPY, order="issue")
        self.detector = RaceDetector()
        self.device.observers.append(self.detector)
        self._streams = {name: self.device.stream(name) for name in _PATH}
        self._events = [
            {name: self.device.event(f"{name}_done") for name in _PATH}
            for _ in range(NUM_SLOTS)
        ]

    def do(self, action: str, batch: int) -> None:
        """One action of the host."""
        if action == "prepare":
            with self.device.host_phase(_access("prepare", batch)):
                pass
        elif action == "launch":
            self._launch(batch)
        else:
            self._events[batch % NUM_SLOTS]["d2h"].synchronize()
            with self.device.host_phase(_access("update", batch)):
                pass

    def _launch(self, batch: int) -> None:
        events, before = self._events[batch % NUM_SLOTS], None
        for name, stream in self._streams.items():
            if before is not None:
                stream.wait(before)
            stream.launch(_nothing, _access(name, batch))
            stream.record(events[name])
            before = events[name]


_PATH = ("h2d", "compute", "d2h")


def _nothing() -> None:
    """Only times and accesses count here."""


def _access(phase: str, batch: int) -> Access:
    """What a phase of a batch touches, by the names that the engine uses."""
    slot = f"slot {LETTERS[batch % NUM_SLOTS]}"
    carried = [
        f"slot {LETTERS[b % NUM_SLOTS]} device_sampled"
        for b in range(max(0, batch - NUM_SLOTS + 1), batch)
    ]
    reads: dict[str, list[str]] = {
        "h2d": [f"{slot} host_inputs"],
        "compute": [f"{slot} device_inputs", *carried],
        "d2h": [f"{slot} device_sampled"],
        "update": [f"{slot} host_sampled"],
    }
    writes: dict[str, list[str]] = {
        "prepare": [f"{slot} host_inputs"],
        "h2d": [f"{slot} device_inputs"],
        "compute": [f"{slot} device_sampled"],
        "d2h": [f"{slot} host_sampled"],
    }
    return Access(
        phase,
        batch,
        batch % NUM_SLOTS,
        lambda: reads.get(phase, []),
        lambda: writes.get(phase, []),
    )


def play_loop(actions: Any, num_batches: int) -> Timeline:
    """Carry the actions out; raises `Mistake` at a wrong order or a race."""
    machine, done = RingMachine(), dict.fromkeys(ACTIONS, 0)
    if not isinstance(actions, list):
        raise _wrong("a list of actions", actions, num_batches)
    for place, action in enumerate(actions):
        _check_action(action, place, done, num_batches)
        name, batch = action
        machine.do(name, batch)
        done[name] += 1
        if machine.detector.races:
            raise _wrong(
                "no race",
                f"after action {place}, {list(action)}: {machine.detector.races[0]}",
                num_batches,
                "Who still has this slot, and when does the host know better?",
            )
    missing = [name for name, count in done.items() if count < num_batches]
    if missing:
        raise _wrong(
            f"{missing[-1]} for each of {num_batches} batches",
            f"{done[missing[-1]]} times",
            num_batches,
            "What is still in flight when nothing is left to launch?",
        )
    return machine.device.timeline


def _check_action(
    action: Any, place: int, done: dict[str, int], num_batches: int
) -> None:
    is_pair = isinstance(action, (list, tuple)) and len(action) == 2
    if not is_pair or action[0] not in ACTIONS:
        raise _wrong(
            f"[action, batch] with one of {', '.join(ACTIONS)}",
            f"action {place}: {action!r}",
            num_batches,
        )
    name, batch = action
    before = {"prepare": num_batches, "launch": done["prepare"]}
    limit = before.get(name, done["launch"])
    if not is_whole(batch, 0, num_batches) or batch != done[name] or batch >= limit:
        raise _wrong(
            "each batch prepared, then launched, then collected, in the order of "
            "their numbers",
            f"action {place}: {list(action)}",
            num_batches,
            "Which step has this batch not been through yet?",
        )


def _wrong(
    expected: str,
    got: Any,
    num_batches: int,
    question: str = "What does the table say that loop returns?",
) -> Mistake:
    return Mistake(f"loop({num_batches}): {expected}", got, question)


# ------------------------------------------------------------------ the checks


def _sizes(seed: int) -> Iterable[int]:
    random = generator("loop", seed)
    return [*range(1, 8), *sorted(random.randint(8, 40) for _ in range(4))]


def _each(
    name: str, loop: Loop, seed: int, check: Callable[[Timeline, int], None]
) -> None:
    sizes = _sizes(seed)
    for size in sizes:
        try:
            check(play_loop(loop(size), size), size)
        except NotImplementedError:
            raise AssertionError(f"{name}: nothing written yet") from None
        except Mistake as mistake:
            raise mistake.told(name, f"{size} batches, {NUM_SLOTS} slots") from None
    print(f"{name}: right, {len(list(sizes))} workloads")


def no_race(loop: Loop, seed: int = 0) -> None:
    """Every batch goes through, in order, and no slot is filled too early."""
    _each("no race", loop, seed, lambda timeline, size: None)


def never_idle(loop: Loop, seed: int = 0) -> None:
    """From the first batch to the last one the GPU has something to do."""
    _each("never idle", loop, seed, _check_busy)


def _check_busy(timeline: Timeline, size: int) -> None:
    for gap in timeline.idle_gaps():
        raise _wrong(
            "no time without work between two batches",
            f"{gap.end_us - gap.start_us:.0f} us before batch {gap.batch}: the GPU "
            f"{CAUSE_WORDS[gap.cause]}",
            size,
            "How many batches are in flight while the host waits?",
        )
