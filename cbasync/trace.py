"""One bar of a timeline, and how bars are kept in a Chrome trace file.

Knows lanes, phases and JSON; neither gaps nor drawings. Imports only the standard
library, so that it also runs in a browser.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PHASES = ("schedule", "prepare", "h2d", "compute", "d2h", "update")
LANES = ("cpu", "h2d", "compute", "d2h")

# A profiler's names for copies; tools tell them from kernels by these.
COPIES = {"h2d": "Memcpy HtoD", "d2h": "Memcpy DtoH"}

# What a profiler calls the work of a lane; tools that read its traces look for these.
CATEGORIES = {
    "cpu": "user_annotation",
    "h2d": "gpu_memcpy",
    "compute": "kernel",
    "d2h": "gpu_memcpy",
}


class Work(NamedTuple):
    """How much there is to do for a batch; what a cost model multiplies.

    >>> Work(num_requests=2, num_tokens=5, num_context=40)
    Work(num_requests=2, num_tokens=5, num_context=40, num_bytes=0)
    """

    num_requests: int = 0  # rows of the batch
    num_tokens: int = 0  # tokens computed
    num_context: int = 0  # tokens in the cache that they attend to, over all rows
    num_bytes: int = 0  # bytes copied


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a timeline: which phase ran in which lane, and from when to when.

    >>> span = Span("cpu", "prepare", batch=3, slot=1, start_us=100.0, end_us=350.0)
    >>> span.duration_us, span.slot_letter
    (250.0, 'B')
    >>> Span("cpu", "prepare", batch=3, slot=1, start_us=9.0, end_us=5.0)
    Traceback (most recent call last):
    ...
    ValueError: prepare of batch 3 runs from 9.0 to 5.0 us: give finite times, end not \
before start
    """

    lane: str
    phase: str
    batch: int  # -1: belongs to no batch
    slot: int  # index of the IOSlot, -1: none
    start_us: float
    end_us: float
    work: Work = NO_WORK

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise ValueError(
                f"lane is {self.lane!r}, a span has one of {', '.join(LANES)}: "
                "use one of these"
            )
        if self.phase not in PHASES:
            raise ValueError(
                f"phase is {self.phase!r}, a span has one of {', '.join(PHASES)}: "
                "use one of these"
            )
        # A time that is not a number fails both comparisons.
        if not 0 <= self.end_us - self.start_us < math.inf:
            raise ValueError(
                f"{self.phase} of batch {self.batch} runs from {self.start_us} to "
                f"{self.end_us} us: give finite times, end not before start"
            )

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def slot_letter(self) -> str:
        """A for slot 0, B for slot 1, ...; empty without a slot."""
        return "" if self.slot < 0 else chr(ord("A") + self.slot)


def to_chrome_trace(name: str, spans: Iterable[Span]) -> dict[str, Any]:
    """Spans as trace events, named and grouped as a profiler does.

    >>> trace = to_chrome_trace("run", [Span("compute", "compute", 3, 1, 4.0, 12.0)])
    >>> event = trace["traceEvents"][-1]
    >>> event["name"], event["cat"], event["ts"], event["dur"], event["args"]["stream"]
    ('compute 3 B', 'kernel', 4.0, 8.0, 2)
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    ]
    for tid, lane in enumerate(LANES):
        row = {"ph": "M", "pid": 0, "tid": tid}
        events.append(row | {"name": "thread_name", "args": {"name": lane}})
        events.append(row | {"name": "thread_sort_index", "args": {"sort_index": tid}})
    events.extend(_event(span, number) for number, span in enumerate(spans))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "cbasync": {"name": name},  # by this key we know our own traces again
        "traceEvents": events,
    }


def _event(span: Span, number: int) -> dict[str, Any]:
    tid = LANES.index(span.lane)
    # ts + dur may miss the end by a rounding; end_us lets a trace come back exactly.
    args: dict[str, Any] = {
        "phase": span.phase,
        "batch": span.batch,
        "slot": span.slot,
        "end_us": span.end_us,
        "work": list(span.work),
    }
    if span.lane != "cpu":
        args |= {"device": 0, "stream": tid, "correlation": number + 1}
    phase = COPIES.get(span.lane, span.phase)
    words = (phase, str(span.batch) if span.batch >= 0 else "", span.slot_letter)
    return {
        "ph": "X",
        "cat": CATEGORIES[span.lane],
        "name": " ".join(word for word in words if word),
        "pid": 0,
        "tid": tid,
        "ts": span.start_us,
        "dur": span.duration_us,
        "args": args,
    }


def from_chrome_trace(trace: dict[str, Any]) -> tuple[str, list[Span]]:
    """Name and spans of a trace that `to_chrome_trace` made.

    >>> from_chrome_trace({"traceEvents": []})
    Traceback (most recent call last):
    ...
    ValueError: the trace has no 'cbasync' key, only traces written by cbasync come \
back exactly: read any other with cbasync.foreign_trace.load_timeline
    """
    if not isinstance(trace, dict) or "cbasync" not in trace:
        raise ValueError(
            "the trace has no 'cbasync' key, only traces written by cbasync come back "
            "exactly: read any other with cbasync.foreign_trace.load_timeline"
        )
    try:
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        return trace["cbasync"]["name"], [_span(event) for event in events]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"the trace is damaged, {error!r} while reading its events: "
            "save it again with Timeline.save"
        ) from error


def _span(event: dict[str, Any]) -> Span:
    args = event["args"]
    return Span(
        LANES[event["tid"]],
        args["phase"],
        args["batch"],
        args["slot"],
        event["ts"],
        args["end_us"],
        Work(*args["work"]),
    )


def write_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Write a trace as JSON; packed when the name ends in .gz."""
    data = json.dumps(trace, separators=(",", ":")).encode()
    if str(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # no time of day: same run, same bytes
    Path(path).write_bytes(data)


def read_trace(path: str | Path) -> dict[str, Any]:
    """Read a trace that may be packed."""
    data = Path(path).read_bytes()
    try:
        text = gzip.decompress(data) if str(path).endswith(".gz") else data
        trace: dict[str, Any] = json.loads(text)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} does not hold a JSON trace ({error}): "
            "give a file written by Timeline.save"
        ) from error
    return trace
