"""Timelines as plain text: one character is one tick of time.

Knows spans and characters; what is busy or idle is worked out in `timeline`. Imports
only the standard library, so that it also runs in a browser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from cbasync.trace import LANES, Span

LABELS = {"cpu": "cpu", "h2d": "h2d", "compute": "gpu", "d2h": "d2h"}
NAME_CELLS = 5  # at least; "sync" and "async" line up when printed apart
READABLE_CELLS = 18  # per batch, so that short host phases still show
LEAST_CELLS = 10  # a lane shorter than this shows nothing


class Run(NamedTuple):
    """What is drawn of one timeline."""

    name: str
    spans: Sequence[Span]
    busy_us: float  # of the GPU ...
    window_us: float  # ... within this time


def draw(
    runs: Sequence[Run],
    width: int = 88,
    tick_us: float | None = None,
    max_batches: int | None = None,
) -> str:
    """Runs one below the other, five lines each, with one tick for all."""
    if tick_us is not None and not 0 < tick_us < math.inf:
        raise ValueError(f"tick_us is {tick_us}, above 0 is needed: give microseconds")
    if max_batches is not None and max_batches < 1:
        raise ValueError(
            f"max_batches is {max_batches}, at least 1 is needed: "
            "leave it out to draw as many as fit"
        )
    name_cells = max(NAME_CELLS, *(len(run.name) for run in runs))
    columns = width - name_cells - 2 - 5
    if columns < LEAST_CELLS:
        raise ValueError(
            f"width {width} leaves {columns} cells beside the names, at least "
            f"{LEAST_CELLS} are needed: raise width or shorten the names"
        )
    ends = [_batch_ends(run.spans) for run in runs]
    tick, batches = _fit(ends, columns, tick_us, max_batches)
    return "\n\n".join(_draw_run(run, name_cells, tick, batches) for run in runs)


def _batch_ends(spans: Sequence[Span]) -> list[float]:
    """Time from the start until the first, the first two, ... batches are over."""
    if not spans:
        return [0.0]
    origin = min(span.start_us for span in spans)
    last: dict[int, float] = {}
    for span in spans:
        if span.batch >= 0:
            last[span.batch] = max(span.end_us - origin, last.get(span.batch, 0.0))
    ends = list(accumulate((last[batch] for batch in sorted(last)), max)) or [0.0]
    ends[-1] = max(span.end_us for span in spans) - origin
    return ends


def _fit(
    ends: Sequence[list[float]],
    columns: int,
    tick_us: float | None,
    max_batches: int | None,
) -> tuple[float, int]:
    """Tick and number of batches with which every run fits the columns."""

    def reach(batches: int) -> float:
        return max(end[min(batches, len(end)) - 1] for end in ends)

    if tick_us is None:
        batches = max_batches or max(1, columns // READABLE_CELLS)
        return _round_tick(reach(batches) / columns), batches
    limit = columns * tick_us
    most = max(len(end) for end in ends)
    fitting = (count for count in range(most, 1, -1) if reach(count) <= limit)
    batches = max_batches or next(fitting, 1)
    if reach(batches) > limit:
        raise ValueError(
            f"tick_us {tick_us:g} reaches {limit:g} us in {columns} cells, the batches "
            f"to draw take {reach(batches):g} us: raise tick_us or width"
        )
    return tick_us, batches


def _round_tick(least_us: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least_us`.

    >>> _round_tick(592.1), _round_tick(1000.0), _round_tick(0.03)
    (1000.0, 1000.0, 0.05)
    """
    if least_us <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least_us))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least_us * (1 - 1e-9))


def _draw_run(run: Run, name_cells: int, tick_us: float, batches: int) -> str:
    name = f"{run.name:<{name_cells}}  "
    if not run.spans:
        return f"{name}no spans recorded"
    origin = min(span.start_us for span in run.spans)
    ends = _batch_ends(run.spans)
    # Cut by time and not by batch number: work of later batches that runs meanwhile
    # belongs into the picture, its lane would look idle without it.
    cut_us = origin + ends[min(batches, len(ends)) - 1]
    cells = max(1, _cell(cut_us - origin, tick_us))
    shown = [s for s in run.spans if s.start_us < cut_us or s.end_us <= cut_us]
    lines = []
    for lane in LANES:
        bars = [span for span in shown if span.lane == lane]
        lines.append(f"{LABELS[lane]}  {draw_lane(bars, origin, tick_us, cells)}")
    lines.append(_busy(run.busy_us, run.window_us))
    if batches < len(ends):
        numbers = sorted({span.batch for span in run.spans if span.batch >= 0})
        lines[-1] += (
            f"; drawn: batches {numbers[0]}-{numbers[batches - 1]} of {len(numbers)}"
        )
    return name + f"\n{' ' * len(name)}".join(lines)


def _busy(busy_us: float, window_us: float) -> str:
    """The last line: how long the GPU was busy.

    >>> _busy(24000, 38000), _busy(999_999, 1_000_000)
    ('gpu busy 24 of 38 ms = 63 %', 'gpu busy 1000 of 1000 ms = 99.9 %')
    """
    percent = 100 * busy_us / window_us if window_us > 0 else 0.0
    text = f"{percent:.0f}"
    if 98.5 < percent < 100:
        # Close to full one more digit tells; and what is not full is never called so.
        text = f"{min(percent, 99.9):.1f}"
    busy, window = (_milliseconds(time, window_us) for time in (busy_us, window_us))
    return f"gpu busy {busy} of {window} ms = {text} %"


def _milliseconds(time_us: float, scale_us: float) -> str:
    """Milliseconds with the digits that tell at the size of `scale_us`.

    >>> _milliseconds(24000, 38000), _milliseconds(1234.5, 38000)
    ('24', '1.23')
    """
    digits = next((n for n, us in enumerate((1e6, 1e5, 1e4)) if scale_us >= us), 3)
    text = f"{time_us / 1000:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _cell(time_us: float, tick_us: float) -> int:
    return math.floor(time_us / tick_us + 0.5)


def draw_lane(
    spans: Sequence[Span], origin_us: float, tick_us: float, cells: int
) -> str:
    """One lane: label first, then filled; the span that starts later wins a cell.

    >>> bars = [Span("cpu", "schedule", 7, 0, 0, 1), Span("cpu", "prepare", 7, 0, 1, 5)]
    >>> draw_lane(bars, origin_us=0, tick_us=1, cells=8)
    'SP7PP...'
    """
    spans = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
    places = _place(spans, origin_us, tick_us, cells)
    # The cell after the last one ends the room of the last label.
    begins = [begin for begin, _ in places] + [cells]
    row = ["."] * cells
    for span, (begin, end), (_, following) in zip(
        spans, places, pairwise(begins), strict=True
    ):
        label, fill = _label(span)
        row[begin:end] = fill * (end - begin)
        if len(label) <= min(end, following) - begin:
            row[begin : begin + len(label)] = label
    return "".join(row)


def _place(
    spans: Sequence[Span], origin_us: float, tick_us: float, cells: int
) -> list[tuple[int, int]]:
    """First cell and cell after the last, of each span; spans sorted by start."""
    places: list[tuple[int, int]] = []
    previous = -1
    for span in spans:
        begin = min(_cell(span.start_us - origin_us, tick_us), cells - 1)
        # Short neighbours share a cell: one step aside lets both be seen.
        if begin <= previous:
            begin = min(begin + 1, cells - 1)
        end = min(_cell(span.end_us - origin_us, tick_us), cells)
        places.append((begin, max(end, begin + 1)))
        previous = begin
    return places


def _label(span: Span) -> tuple[str, str]:
    """What a span is called in its lane, and what fills the rest of it."""
    number = str(span.batch) if span.batch >= 0 else ""
    if span.lane in ("h2d", "d2h"):
        return number or "-", "-"  # the lane already says which phase it is
    letter = span.phase[0].upper()
    return letter + number, letter
