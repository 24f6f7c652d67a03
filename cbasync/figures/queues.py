"""The expected figures of notebooks 05 and 06, and how shares of time are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cbasync.devices.access import Access
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.races import RaceDetector
from cbasync.devices.sim import SimDevice
from cbasync.event_log import EventLog
from cbasync.figures.parts import WIDTH, picture_svg, rect_svg, words_svg
from cbasync.palette import IDLE_GROUND, INK, cause_colour, text_colour
from cbasync.paper import Drawing, percent
from cbasync.svg import timeline_svg
from cbasync.timeline import CAUSES, Timeline

DEVICE_PHASES = ("h2d", "compute", "d2h")


def machine(name: str = "round figures", **ms: float) -> CostModel:
    """A machine whose phases take these milliseconds, whatever the batch.

    >>> machine(compute=28).compute.fixed_us
    28000.0
    """
    costs: dict[str, Any] = {
        phase: PhaseCost(fixed_us=1000.0 * time) for phase, time in ms.items()
    }
    return CostModel(name, **costs)


# ------------------------------------------------------------------ 05: in turns

ROUND = machine(schedule=2, prepare=6, h2d=2, compute=28, d2h=2, update=2)


def in_turns(costs: CostModel, batches: int) -> Timeline:
    """The six phases one after the other, with nothing in them but time.

    >>> round(in_turns(ROUND, batches=3).idle_us / 1000)
    28
    """
    device = SimDevice(costs=costs)
    queue = device.stream("gpu")
    for batch in range(batches):
        _host(device, batch, "schedule", "prepare")
        for phase in DEVICE_PHASES:
            queue.launch(_nothing, Access(phase, batch))
        device.synchronize()
        _host(device, batch, "update")
    device.timeline.name = "in turns"
    return device.timeline


def _host(device: SimDevice, batch: int, *phases: str) -> None:
    for phase in phases:
        with device.host_phase(Access(phase, batch)):
            _nothing()


def _nothing() -> None:
    """An op that is only there for its time."""


def shares_svg(runs: Mapping[str, Timeline]) -> str:
    """Runs above one another, each as long as the page: computing, and waiting.

    >>> picture = shares_svg({"round": in_turns(ROUND, batches=3)})
    >>> "round: 0.1 s, GPU active 75.0 %" in picture, ">compute 75.0 %<" in picture
    (True, True)
    """
    stacks = {}
    for name, run in runs.items():
        title = f"{name}: {run.total_us / 1e6:.1f} s"
        times = {"compute": run.gpu_busy_us, **run.idle_by_cause()}
        stacks[f"{title}, GPU active {percent(run.gpu_active)}"] = {
            part: us / run.gpu_window_us for part, us in times.items()
        }
    return stacks_svg(stacks)


def stacks_svg(stacks: Mapping[str, Mapping[str, float]]) -> str:
    """One bar for each stack, cut into `compute` and the causes of idle time.

    All have one scale, and the longest is as long as the page:

    >>> picture = stacks_svg({"yours": {"prepare": 4.0, "host": 4.0}})
    >>> ">yours<" in picture, ">prepare 50.0 %<" in picture, "schedule" in picture
    (True, True, False)
    """
    found = [part for stack in stacks.values() for part, size in stack.items() if size]
    known = [part for part in ("compute", *CAUSES) if part in found]
    parts, top = [_HATCH], 60.0
    for number, name in enumerate(known):
        parts.append(_piece(8 + 105 * number, 14, 18, 13, name))
        parts.append(words_svg(32 + 105 * number, 21, name))
    longest = max((sum(stack.values()) for stack in stacks.values()), default=0.0)
    for title, stack in stacks.items():
        parts += [words_svg(8, top, title), *_stack(stack, longest, top + 14)]
        top += 74
    return picture_svg(round(top) - 20, parts)


def _stack(stack: Mapping[str, float], longest: float, top: float) -> list[str]:
    """One bar, with a label on each part that has room for it."""
    parts, x, total = [], 8.0, sum(stack.values())
    order = [name for name in ("compute", *CAUSES) if name in stack]
    for name in order + [name for name in stack if name not in order]:
        if not stack[name]:
            continue
        width = stack[name] / longest * (WIDTH - 16)
        parts.append(_piece(x, top, width, 28, name))
        words = f"{name} {100 * stack[name] / total:.1f} %"
        room = 8.4 * len(words)
        if width > room:
            ink = text_colour(cause_colour(name))
            if name != "compute":  # letters on hatching need a ground of their own
                place, ink = x + (width - room) / 2, INK
                parts.append(rect_svg(place, top + 5, room, 18, "#ffffff"))
            parts.append(words_svg(x + width / 2, top + 14, words, "middle", ink))
        x += width
    return parts


# Hatching over the colour of the phase that is waited for: an idle GPU.
_HATCH = (
    '<defs><pattern id="wait" width="7" height="7" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="5" height="7" fill="{IDLE_GROUND}"/>'
    "</pattern></defs>"
)


def _piece(x: float, y: float, width: float, height: float, name: str) -> str:
    """Computing as it is drawn everywhere, a cause of idle time hatched."""
    ground = rect_svg(x, y, width, height, cause_colour(name))
    hatch = rect_svg(x, y, width, height, "url(#wait)")
    return ground if name == "compute" else ground + hatch


# ------------------------------------------------------------------ 06: three queues

QUEUES = machine(schedule=1, prepare=3, h2d=6, compute=12, d2h=6, update=1)
EDGES = ("h2d_done", "compute_done")
BATCHES = 4

# What the three phases of the device hand to one another.
_TOUCHES = {
    "h2d": ("host ids", "device ids"),
    "compute": ("device ids", "device token"),
    "d2h": ("device token", "host token"),
}


def touching(phase: str, batch: int) -> Access:
    """The access of a phase that has a buffer of its own for every batch.

    >>> access = touching("compute", 3)
    >>> list(access.reads()), list(access.writes())
    (['device ids 3'], ['device token 3'])
    """
    reads, writes = ([f"{name} {batch}"] for name in _TOUCHES[phase])
    return Access(phase, batch, reads=lambda: reads, writes=lambda: writes)


def queue_run(
    name: str, *, num_queues: int, edges: Iterable[str] = (), batches: int = BATCHES
) -> Drawing:
    """Batches that need nothing of one another, in one queue or in three.

    >>> for edges in ((), EDGES):
    ...     print(queue_run("run", num_queues=3, edges=edges).note)
    52 ms, wrong tokens
    64 ms, right tokens
    """
    device, log, detector = SimDevice(costs=QUEUES), EventLog(), RaceDetector()
    device.observers += [log, detector]
    device.ablate = frozenset(EDGES) - set(edges)
    queues = [device.stream(f"queue {number}") for number in range(num_queues)]
    streams = dict(zip(DEVICE_PHASES, queues * (3 // num_queues), strict=True))
    events = dict(zip(DEVICE_PHASES, map(device.event, EDGES), strict=False))
    for batch in range(batches):
        _host(device, batch, "schedule", "prepare")
        before = ""
        for phase, stream in streams.items():
            if before and num_queues > 1:
                stream.wait(events[before])
            stream.launch(_nothing, touching(phase, batch))
            if phase in events:
                stream.record(events[phase])
            before = phase
    device.synchronize()
    spent_ms = device.now_us() / 1000
    for batch in range(batches):
        _host(device, batch, "update")
    device.timeline.name = name
    verdict = "wrong tokens" if device.machine.stale_reads else "right tokens"
    note = f"{spent_ms:.0f} ms, {verdict}"
    return Drawing(device.timeline, log.arrows, detector.races, note)


def queues_svg() -> str:
    """One queue, three queues without order, three queues with two events."""
    return timeline_svg(
        queue_run("one queue", num_queues=1),
        queue_run("three queues, no event", num_queues=3),
        queue_run("three queues, two events", num_queues=3, edges=EDGES),
    )


FIGURES: dict[str, Callable[[], str]] = {
    "idle_gpu.svg": lambda: timeline_svg(in_turns(ROUND, batches=4)),
    "queues.svg": queues_svg,
}
