"""Timeline: what ran in which lane and when, and what the GPU waited for.

Times are microseconds of one clock, real or virtual. Knows spans, nothing about the
engine or the device that made them. Imports only the standard library, so that it
also runs in a browser.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cbasync import timeline_text, trace
from cbasync.trace import LANES, PHASES, Span, Work

__all__ = [
    "CAUSES",
    "LANES",
    "PHASES",
    "IdleGap",
    "Span",
    "Timeline",
    "Work",
    "side_by_side",
]

CAUSES = ("schedule", "prepare", "update", "h2d", "sync", "host", "drain")
HOST_PHASES = ("schedule", "prepare", "update")


class IdleGap(NamedTuple):
    """A piece of time in which the GPU computed nothing, and the one cause of it.

    | cause | meanwhile |
    |---|---|
    | h2d | the inputs of the batch that computes next were on their way |
    | schedule, prepare, update | else the host was busy in this phase |
    | sync | else tokens were copied back, and the host waited for them |
    | drain | else the host scheduled for no batch (-1): it found no work |
    | host | else: in none of its phases, so loop overhead or launching |
    """

    start_us: float
    end_us: float
    cause: str
    batch: int  # the batch that computes next

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(eq=False, repr=False)
class Timeline:
    """The spans of one run, in any order; answers what the GPU did and waited for.

    A synchronous run of three batches, times in ms:

    >>> step = [("cpu", "prepare", 0, 3), ("h2d", "h2d", 3, 4),
    ...         ("compute", "compute", 4, 12), ("d2h", "d2h", 12, 13),
    ...         ("cpu", "update", 13, 15)]
    >>> sync = Timeline("sync")
    >>> for batch in range(3):
    ...     for lane, phase, start, end in step:
    ...         start_us, end_us = (1000 * (15 * batch + t) for t in (start, end))
    ...         sync.add(Span(lane, phase, batch, 0, start_us, end_us))
    >>> print(sync)
    sync   cpu  P0P..........U0P1P..........U1P2P..........U2
           h2d  ...0..............1..............2...........
           gpu  ....C0CCCCCC.......C1CCCCCC.......C2CCCCCC...
           d2h  ............0..............1..............2..
           gpu busy 24 of 38 ms = 63 %

    Between two batches the GPU waits 7 ms, and each of them has a cause:

    >>> for gap in sync.idle_gaps()[:4]:
    ...     print(gap.start_us, gap.end_us, gap.cause, gap.batch)
    12000 13000 sync 1
    13000 15000 update 1
    15000 18000 prepare 1
    18000 19000 h2d 1
    """

    name: str = ""
    spans: list[Span] = field(default_factory=list)
    max_spans: int = 400_000  # about 60,000 batches; beyond that the newest are kept

    def add(self, span: Span) -> None:
        """Keep a span; several threads may call it.

        >>> timeline = Timeline(max_spans=4)
        >>> for batch in range(6):
        ...     timeline.add(Span("compute", "compute", batch, 0, batch, batch + 1))
        >>> timeline.batches()
        [2, 3, 4, 5]
        """
        self.spans.append(span)
        if len(self.spans) > self.max_spans:
            del self.spans[: self.max_spans // 2]  # rarely, and half of it at once

    def clear(self) -> None:
        self.spans.clear()

    def lane(self, name: str) -> list[Span]:
        """Spans of one lane, sorted by start."""
        if name not in LANES:
            raise ValueError(
                f"lane is {name!r}, a timeline has {', '.join(LANES)}: "
                "ask for one of these"
            )
        return sorted((span for span in self.spans if span.lane == name), key=_order)

    def batches(self) -> list[int]:
        """Numbers of the batches, sorted; spans that belong to none do not count."""
        return sorted({span.batch for span in self.spans if span.batch >= 0})

    @property
    def start_us(self) -> float:
        return min((span.start_us for span in self.spans), default=0.0)

    @property
    def end_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def total_us(self) -> float:
        return self.end_us - self.start_us

    def shifted(self) -> Timeline:
        """The same timeline with its first span starting at 0."""
        origin = self.start_us
        spans = [
            replace(s, start_us=s.start_us - origin, end_us=s.end_us - origin)
            for s in self.spans
        ]
        return Timeline(self.name, spans)

    def __eq__(self, other: object) -> bool:
        """Same name and same spans, whichever thread was first to add them."""
        if not isinstance(other, Timeline):
            return NotImplemented
        ours, theirs = (sorted(t.spans, key=_content) for t in (self, other))
        return self.name == other.name and ours == theirs

    # -- how busy the GPU was ----------------------------------------------------------

    @property
    def gpu_window_us(self) -> float:
        """Time from the first compute start to the last compute end."""
        compute = self.lane("compute")
        if not compute:
            return 0.0
        return max(span.end_us for span in compute) - compute[0].start_us

    @property
    def idle_us(self) -> float:
        """Time inside the window in which no compute span runs."""
        return math.fsum(end - start for start, end, _ in self._idle_stretches())

    @property
    def gpu_busy_us(self) -> float:
        """Union of the compute spans: time in which at least one of them runs."""
        return max(self.gpu_window_us - self.idle_us, 0.0)  # no rounding below 0

    @property
    def gpu_active(self) -> float:
        """Union of the compute spans over the time from first start to last end.

        Between 0 and 1. Work before the first batch computes and after the last one
        has, is outside; gaps inside a span (between its kernels) count as active.
        """
        window_us = self.gpu_window_us
        return self.gpu_busy_us / window_us if window_us > 0 else 0.0

    def host_us(self) -> dict[str, float]:
        """Time by phase in the cpu lane; phases beside the three only if recorded."""
        durations: dict[str, list[float]] = {phase: [] for phase in HOST_PHASES}
        for span in self.lane("cpu"):
            durations.setdefault(span.phase, []).append(span.duration_us)
        return {phase: math.fsum(parts) for phase, parts in durations.items()}

    # -- what it waited for ------------------------------------------------------------

    def idle_gaps(self) -> list[IdleGap]:
        """Every piece of idle time in the window with its cause, sorted by start."""
        cpu, d2h = _cover(self.lane("cpu")), _cover(self.lane("d2h"))
        transfers: dict[int, list[Span]] = {}
        for span in self.lane("h2d"):
            transfers.setdefault(span.batch, []).append(span)
        gaps: list[IdleGap] = []
        for start, end, batch in self._idle_stretches():
            covers = (_cover(transfers.get(batch, [])), cpu, d2h)
            cuts = sorted({start, end}.union(*(_cuts(c, start, end) for c in covers)))
            for piece_start, piece_end in pairwise(cuts):
                cause = _cause(*(_at(cover, piece_start) for cover in covers))
                last = gaps[-1] if gaps else None
                if last and (last.end_us, last[2:]) == (piece_start, (cause, batch)):
                    gaps[-1] = last._replace(end_us=piece_end)
                else:
                    gaps.append(IdleGap(piece_start, piece_end, cause, batch))
        return gaps

    def idle_by_cause(self) -> dict[str, float]:
        """Idle time of each cause, 0 where there is none; adds up to `idle_us`."""
        parts: dict[str, list[float]] = {cause: [] for cause in CAUSES}
        for gap in self.idle_gaps():
            parts[gap.cause].append(gap.duration_us)
        return {cause: math.fsum(durations) for cause, durations in parts.items()}

    def _idle_stretches(self) -> Iterator[tuple[float, float, int]]:
        """Start, end and next batch of every time without compute in the window."""
        compute = self.lane("compute")
        busy_until = compute[0].end_us if compute else 0.0
        for span in compute[1:]:
            if span.start_us > busy_until:
                yield busy_until, span.start_us, span.batch
            busy_until = max(busy_until, span.end_us)

    # -- how it is shown and kept ------------------------------------------------------

    def text(
        self,
        width: int = 88,
        tick_us: float | None = None,
        max_batches: int | None = None,
    ) -> str:
        """The lanes as text, one character a tick; of a long run its first batches."""
        return side_by_side(self, width=width, tick_us=tick_us, max_batches=max_batches)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        total_ms = self.total_us / 1000
        return f"Timeline({self.name!r}, {len(self.spans)} spans, {total_ms:g} ms)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"

    def records(self) -> list[dict[str, Any]]:
        """Spans as plain dicts, sorted by start: rows for a table."""
        return [
            {
                "lane": s.lane,
                "phase": s.phase,
                "batch": s.batch,
                "slot": s.slot,
                "slot_letter": s.slot_letter,
                "start_us": s.start_us,
                "end_us": s.end_us,
                "duration_us": s.duration_us,
                **s.work._asdict(),
            }
            for s in sorted(self.spans, key=_order)
        ]

    def summary(self) -> dict[str, Any]:
        """The numbers of a run in one dict."""
        return {
            "name": self.name,
            "total_us": self.total_us,
            "gpu_active": self.gpu_active,
            "idle_by_cause": self.idle_by_cause(),
            "host_us": self.host_us(),
        }

    def to_chrome_trace(self) -> dict[str, Any]:
        """Events that Perfetto and other readers of profiler traces open."""
        return trace.to_chrome_trace(self.name, sorted(self.spans, key=_order))

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace; packed when the name ends in .gz."""
        trace.write_trace(self.to_chrome_trace(), path)

    @classmethod
    def from_chrome_trace(cls, source: dict[str, Any] | str | Path) -> Timeline:
        """The timeline that a trace or trace file was made from."""
        if isinstance(source, (str, Path)):
            source = trace.read_trace(source)
        return cls(*trace.from_chrome_trace(source))


def side_by_side(
    *timelines: Timeline,
    width: int = 88,
    tick_us: float | None = None,
    max_batches: int | None = None,
) -> str:
    """Text of several runs, each from its own start, one tick for all: lengths compare.

    >>> starts = [("cpu", "prepare", 3, (0, 3, 15)), ("h2d", "h2d", 1, (3, 6, 18)),
    ...           ("compute", "compute", 8, (4, 12, 20)),
    ...           ("d2h", "d2h", 1, (12, 20, 28)), ("cpu", "update", 2, (13, 21, 29))]
    >>> overlapped = Timeline("async")
    >>> for lane, phase, ms, times in starts:
    ...     for batch, start in enumerate(times):
    ...         start_us, end_us = 1000 * start, 1000 * (start + ms)
    ...         overlapped.add(Span(lane, phase, batch, batch % 2, start_us, end_us))
    >>> print(side_by_side(overlapped, tick_us=1000))
    async  cpu  P0PP1P.......U0P2P...U1......U2
           h2d  ...0..1...........2............
           gpu  ....C0CCCCCCC1CCCCCCC2CCCCCC...
           d2h  ............0.......1.......2..
           gpu busy 24 of 24 ms = 100 %
    """
    if not timelines:
        raise ValueError("no timeline given, at least 1 is needed: pass one or more")
    runs = [
        timeline_text.Run(t.name, list(t.spans), t.gpu_busy_us, t.gpu_window_us)
        for t in timelines
    ]
    return timeline_text.draw(runs, width, tick_us, max_batches)


def _order(span: Span) -> tuple[float, float, int]:
    return span.start_us, span.end_us, span.batch


def _content(span: Span) -> tuple[Any, ...]:
    return span.start_us, span.end_us, span.batch, span.slot, span.lane, span.phase


class _Piece(NamedTuple):
    """A time in which one span has its lane."""

    start: float
    end: float
    span: Span


def _piece_start(piece: _Piece) -> float:
    return piece.start


def _cover(spans: Sequence[Span]) -> list[_Piece]:
    """A lane cut into pieces that do not overlap; the inner one of several spans wins.

    The inner one is the one that started last and has not ended:

    >>> outer, inner = (Span("cpu", p, 0, 0, *t) for p, t in
    ...                 [("update", (0, 9)), ("schedule", (2, 5))])
    >>> [(p.start, p.end, p.span.phase) for p in _cover([outer, inner])]
    [(0, 2, 'update'), (2, 5, 'schedule'), (5, 9, 'update')]
    """
    waiting = sorted(spans, key=lambda span: (-span.start_us, span.end_us))
    cuts = sorted({time for s in spans for time in (s.start_us, s.end_us)})
    running: list[Span] = []  # in order of their starts: the inner one is the last
    pieces = []
    for start, end in pairwise(cuts):
        while waiting and waiting[-1].start_us <= start:
            running.append(waiting.pop())
        while running and running[-1].end_us <= start:
            running.pop()
        if running:
            pieces.append(_Piece(start, end, running[-1]))
    return pieces


def _at(cover: list[_Piece], time: float) -> Span | None:
    index = bisect_right(cover, time, key=_piece_start) - 1
    return cover[index].span if index >= 0 and time < cover[index].end else None


def _cuts(cover: list[_Piece], start: float, end: float) -> Iterator[float]:
    """Boundaries of the pieces strictly between two times."""
    first = max(bisect_right(cover, start, key=_piece_start) - 1, 0)
    for index in range(first, len(cover)):
        if cover[index].start >= end:
            return
        yield from (t for t in cover[index][:2] if start < t < end)


def _cause(h2d: Span | None, cpu: Span | None, d2h: Span | None) -> str:
    """Why the next batch does not compute yet, from what runs meanwhile."""
    if h2d:
        return "h2d"
    looked_in_vain = cpu is not None and cpu.phase == "schedule" and cpu.batch < 0
    if cpu and cpu.phase in HOST_PHASES and not looked_in_vain:
        return cpu.phase
    if d2h or (cpu and cpu.phase == "d2h"):
        return "sync"
    return "drain" if looked_in_vain else "host"
