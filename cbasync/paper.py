"""Timelines laid out on paper: where each bar, arrow and mark goes.

Knows rows, milliseconds and colours; neither plotly nor SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from cbasync.devices.races import HOST, Race
from cbasync.event_log import Arrow, Point
from cbasync.palette import CAUSE_WORDS, PHASE_COLOURS, cause_colour, shade
from cbasync.timeline import LANES, IdleGap, Span, Timeline
from cbasync.timeline_text import LABELS

MAX_BARS = 5000  # of one run: a trace may have more kernels in a batch than pixels
MAX_BATCHES = 200  # drawn bar by bar; more would only be slow
RUN_ROWS = len(LANES) + 2.5  # its headline, its lanes, the labels of idle time


@dataclass(frozen=True)
class Drawing:
    """A run as it is drawn: its timeline, and what was watched meanwhile."""

    timeline: Timeline
    arrows: Sequence[Arrow] = ()
    races: Sequence[Race] = ()
    note: str = ""  # behind the name and the active share


class Bar(NamedTuple):
    """One bar on paper; times in ms from the start of its run."""

    row: float  # from the top; rows of all runs are numbered through
    start_ms: float
    end_ms: float
    kind: str  # a phase, or "idle"
    colour: str
    text: str
    hover: str
    cause: str = ""  # of idle time

    @property
    def length_ms(self) -> float:
        return self.end_ms - self.start_ms


class Line(NamedTuple):
    """An arrow on paper, from an end of a bar to the start of another."""

    start_ms: float
    start_row: float
    end_ms: float
    end_row: float
    hover: str


class Label(NamedTuple):
    """How long the GPU waited between two batches, and mostly for what."""

    at_ms: float  # its middle
    row: float
    amount: str
    cause: str  # the one that took longest, "…" if there are others
    room_ms: float  # to the next label


class Mark(NamedTuple):
    """A race on paper."""

    at_ms: float
    row: float
    hover: str


@dataclass(frozen=True)
class Paper:
    """All runs laid out on one time axis, before anybody draws them."""

    names: list[tuple[float, str]]  # row and headline of each run
    lanes: list[tuple[float, str]]  # row and label of each lane
    bars: list[Bar]
    lines: list[Line]
    marks: list[Mark]
    labels: list[Label]
    end_ms: float
    cut: str = ""  # what is not drawn, in words
    rows: float = field(default=0.0)


def lay_out(
    drawings: Sequence[Drawing],
    *,
    max_batches: int = MAX_BATCHES,
    first_batch: int = 0,
) -> Paper:
    """Bars, arrows and marks of runs above one another, each from its own start.

    Of a long run `max_batches` are drawn, from `first_batch` on, and `cut` says so.
    """
    if not drawings:
        raise ValueError("no timeline given, at least 1 is needed: pass one or more")
    if max_batches < 1:
        raise ValueError(
            f"max_batches is {max_batches}, at least 1 is needed: "
            f"leave it out to draw up to {MAX_BATCHES}"
        )
    paper = Paper([], [], [], [], [], [], 0.0)
    end_ms, cut, row = 0.0, "", 0.0
    for drawing in drawings:
        page = _Page(drawing, row + 1, first_batch, max_batches)
        paper.names.append((row, _headline(drawing)))
        paper.lanes.extend((page.row(lane), LABELS[lane]) for lane in LANES)
        if page.gaps:
            paper.lanes.append((page.row("d2h") + 1, "idle"))
        paper.bars.extend(page.bars())
        paper.lines.extend(page.lines())
        paper.marks.extend(page.marks())
        paper.labels.extend(page.labels())
        end_ms = max(end_ms, page.end_ms)
        cut = cut or page.cut
        row += RUN_ROWS
    return replace(paper, end_ms=end_ms, cut=cut, rows=row)


def _headline(drawing: Drawing) -> str:
    timeline = drawing.timeline
    text = f"{timeline.name or 'run'}: GPU active {percent(timeline.gpu_active)}"
    return f"{text} · {drawing.note}" if drawing.note else text


def percent(share: float) -> str:
    """A share in words that never call full what is not.

    >>> percent(0.76), percent(0.99996), percent(1.0)
    ('76.0 %', '99.9 %', '100 %')
    """
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.1f} %"


class _Page:
    """Where the parts of one run go."""

    def __init__(
        self, drawing: Drawing, top_row: float, first_batch: int, max_batches: int
    ) -> None:
        self.drawing = drawing
        self.top_row = top_row
        timeline = drawing.timeline
        batches = timeline.batches()
        kept = batches[first_batch : first_batch + max_batches]
        self.cut = ""
        spans: Iterable[Span] = timeline.spans
        gaps: Iterable[IdleGap] = timeline.idle_gaps()
        if len(kept) < len(batches):
            first, last = (kept[0], kept[-1]) if kept else (0, 0)
            self.cut = (
                f"drawn: batches {first} to {last} of {len(batches)}; "
                "the numbers are those of the whole run"
            )
            keep = set(kept)
            spans = [span for span in spans if span.batch in keep]
            # The GPU waits for a batch: the one after the last drawn is not there.
            gaps = [gap for gap in gaps if gap.batch in keep]
        spans = sorted(spans, key=lambda span: (span.start_us, span.end_us))
        if len(spans) > MAX_BARS:
            self.cut = (
                f"drawn: the first {MAX_BARS} of {len(spans)} bars; "
                "the numbers are those of the whole run"
            )
        self.spans = spans[:MAX_BARS]
        self.origin_us = min((s.start_us for s in self.spans), default=0.0)
        self.end_us = max((s.end_us for s in self.spans), default=0.0)
        self.end_ms = (self.end_us - self.origin_us) / 1000
        self.gaps = [
            gap
            for gap in gaps
            if gap.end_us > self.origin_us and gap.start_us < self.end_us
        ]
        self.where: dict[Point, Span] = {
            Point(span.phase, span.batch): span for span in self.spans
        }

    def row(self, lane: str) -> float:
        return self.top_row + LANES.index(lane)

    def ms(self, time_us: float) -> float:
        return (time_us - self.origin_us) / 1000

    def bars(self) -> list[Bar]:
        return [*map(self._idle, self.gaps), *map(self._bar, self.spans)]

    def _bar(self, span: Span) -> Bar:
        batch = str(span.batch) if span.batch >= 0 else ""
        return Bar(
            self.row(span.lane),
            self.ms(span.start_us),
            self.ms(span.end_us),
            span.phase,
            shade(PHASE_COLOURS[span.phase], span.slot),
            batch + span.slot_letter,
            _hover(span, self.origin_us),
        )

    def _idle(self, gap: IdleGap) -> Bar:
        words = CAUSE_WORDS[gap.cause]
        return Bar(
            self.row("compute"),
            self.ms(gap.start_us),
            self.ms(gap.end_us),
            "idle",
            cause_colour(gap.cause),
            words,
            f"<b>GPU idle: {words}</b><br>before batch {gap.batch}: "
            f"{gap.duration_us / 1000:.3f} ms",
            gap.cause,
        )

    def labels(self) -> list[Label]:
        """One label for all the idle time before a batch."""
        before: dict[int, list[Bar]] = {}
        for gap, bar in zip(self.gaps, map(self._idle, self.gaps), strict=True):
            before.setdefault(gap.batch, []).append(bar)
        places = [(b[0].start_ms + b[-1].end_ms) / 2 for b in before.values()]
        rooms = [b - a for a, b in pairwise([*places, float("inf")])]
        labels = []
        for bars, at_ms, room in zip(before.values(), places, rooms, strict=True):
            main = max(bars, key=lambda bar: bar.length_ms)
            total_ms = sum(bar.length_ms for bar in bars)
            cause = main.cause + (" …" if len(bars) > 1 else "")
            if total_ms > 0.002 * self.end_ms:
                amount = f"{total_ms:.3g} ms"
                labels.append(Label(at_ms, self.row("d2h") + 1, amount, cause, room))
        return labels

    def lines(self) -> list[Line]:
        found = []
        for arrow in self.drawing.arrows:
            source, target = self.where.get(arrow.source), self.where.get(arrow.target)
            if source and target:
                found.append(
                    Line(
                        self.ms(source.end_us),
                        self.row(source.lane),
                        self.ms(target.start_us),
                        self.row(target.lane),
                        f"<b>{arrow.edge}</b><br>{source.phase} of batch "
                        f"{source.batch} → {target.phase} of batch {target.batch}",
                    )
                )
        return found

    def marks(self) -> list[Mark]:
        """One mark a pair of bars, however many arrays they race for."""
        pairs: dict[tuple[Point, Point], list[Race]] = {}
        for race in self.drawing.races:
            first, second = (
                Point(t.access.phase, t.access.batch) for t in (race.first, race.second)
            )
            pairs.setdefault((first, second), []).append(race)
        found = []
        for (first, second), races in pairs.items():
            span = self.where.get(second)
            if span and first in self.where:
                more = f"<br>and {len(races) - 1} more arrays" if races[1:] else ""
                hover = f"<b>race: no {races[0].edge}</b><br>{_wrapped(races[0])}{more}"
                row = self.row("cpu" if races[0].second.thread == HOST else span.lane)
                found.append(Mark(self.ms(span.start_us), row, hover))
        return found


def _wrapped(race: Race) -> str:
    return f"{race.resource}<br>{race.first}<br>{race.second}"


def _hover(span: Span, origin_us: float) -> str:
    title = " ".join(
        word
        for word in (
            span.phase,
            f"of batch {span.batch}" if span.batch >= 0 else "",
            f"(slot {span.slot_letter})" if span.slot >= 0 else "",
        )
        if word
    )
    start, end = ((time - origin_us) / 1000 for time in (span.start_us, span.end_us))
    text = (
        f"<b>{title}</b><br>{span.duration_us / 1000:.3f} ms, "
        f"from {start:.3f} to {end:.3f}"
    )
    work = span.work
    if work.num_tokens:
        text += f"<br>{work.num_requests} requests, {work.num_tokens} tokens"
    if work.num_bytes:
        text += f"<br>{work.num_bytes} bytes"
    return text
