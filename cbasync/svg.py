"""Timelines as SVG, for prose and for notebooks without widgets; needs no plotly."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import NamedTuple

from cbasync.palette import (
    CAUSE_WORDS,
    FONT,
    GRID,
    IDLE_GROUND,
    IDLE_LINE,
    INK,
    PHASE_COLOURS,
    RACE_COLOUR,
    SOFT_INK,
    cause_colour,
    shade,
    text_colour,
)
from cbasync.paper import Bar, Drawing, Line, Paper, lay_out
from cbasync.timeline import PHASES, Timeline

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 40, 40  # margins
ROW = 28
BAR = 22
LETTER = 6.4  # width of a letter of a label, about


class _Scale(NamedTuple):
    """From milliseconds and rows to places in the picture."""

    per_ms: float

    def x(self, time_ms: float) -> float:
        return LEFT + time_ms * self.per_ms

    def y(self, row: float) -> float:
        return TOP + (row + 0.5) * ROW


def timeline_svg(
    *runs: Timeline | Drawing, max_batches: int = 8, width: int = WIDTH
) -> str:
    """Runs above one another on one time axis, as one SVG picture.

    >>> from cbasync.timeline import Span
    >>> run = Timeline("run", [Span("compute", "compute", 0, 0, 0.0, 5000.0)])
    >>> timeline_svg(run).count("<title>")
    1
    """
    drawings = [r if isinstance(r, Drawing) else Drawing(r) for r in runs]
    paper = lay_out(drawings, max_batches=max_batches)
    scale = _Scale((width - LEFT - RIGHT) / (paper.end_ms or 1.0))
    height = round(scale.y(paper.rows) + BOTTOM)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" style="max-width:100%;height:auto" '
        f'font-family="{FONT}" font-size="12" '
        f'fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _patterns(),
        *_legend(),
        *_axis(paper, scale, height - BOTTOM + 4),
        *(_text(LEFT, scale.y(r), words, bold=True) for r, words in paper.names),
        *(_text(8, scale.y(r), label, colour=SOFT_INK) for r, label in paper.lanes),
        *_labels(paper, scale),
        *(_bar(bar, scale) for bar in paper.bars),
        *(_arrow(line, scale) for line in paper.lines),
        *(_cross(scale.x(m.at_ms), scale.y(m.row), m.hover) for m in paper.marks),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def save_svg(path: str | Path, *runs: Timeline | Drawing, max_batches: int = 8) -> None:
    """Write the picture of some runs to a file."""
    Path(path).write_text(timeline_svg(*runs, max_batches=max_batches))


def _patterns() -> str:
    """One hatching a cause, in the colour of the phase that is waited for."""
    tiles = [
        f'<pattern id="idle-{cause}" width="7" height="7" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="7" height="7" fill="{IDLE_GROUND}"/>'
        f'<rect width="2" height="7" fill="{cause_colour(cause)}"/></pattern>'
        for cause in CAUSE_WORDS
    ]
    marker = (
        '<marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
        'markerHeight="6" orient="auto">'
        f'<path d="M0 0 6 3 0 6z" fill="{INK}"/></marker>'
    )
    return f"<defs>{''.join(tiles)}{marker}</defs>"


def _legend() -> list[str]:
    parts, x = [], float(LEFT)
    for phase in PHASES:
        for step, slot in enumerate((0, 1)):
            fill = shade(PHASE_COLOURS[phase], slot)
            parts.append(
                f'<rect x="{x + 9 * step:.0f}" y="10" width="9" height="13" '
                f'fill="{fill}"/>'
            )
        parts.append(_text(x + 23, 17, phase))
        x += 40 + len(phase) * LETTER
    parts.append(
        f'<rect x="{x:.0f}" y="10" width="18" height="13" fill="url(#idle-prepare)" '
        f'stroke="{IDLE_LINE}"/>'
    )
    parts.append(_text(x + 23, 17, "GPU idle, in the colour of what it waits for"))
    return parts


def _axis(paper: Paper, scale: _Scale, bottom: float) -> list[str]:
    parts = []
    step = tick_step(paper.end_ms)
    for number in range(math.floor(paper.end_ms / step + 1e-9) + 1):
        x = scale.x(number * step)
        parts.append(
            f'<path d="M{x:.1f} {TOP}V{bottom - 12:.0f}" stroke="{GRID}" fill="none"/>'
        )
        parts.append(_text(x, bottom, f"{number * step:g}", anchor="middle"))
    words = "ms" + (f" · {paper.cut}" if paper.cut else "")
    parts.append(_text(LEFT, bottom + 18, words, colour=SOFT_INK))
    return parts


def tick_step(end_ms: float) -> float:
    """Distance of the lines of an axis: about eight of them, at round times.

    >>> tick_step(45.0), tick_step(300.0), tick_step(0.0)
    (10.0, 50.0, 1.0)
    """
    if end_ms <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(end_ms / 8))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= end_ms / 8)


def _bar(bar: Bar, scale: _Scale) -> str:
    x, y = scale.x(bar.start_ms), scale.y(bar.row) - BAR / 2
    width = bar.length_ms * scale.per_ms
    is_idle = bar.kind == "idle"
    fill = f"url(#idle-{bar.cause})" if is_idle else bar.colour
    edge = f' stroke="{IDLE_LINE}"' if is_idle else ' stroke="#ffffff"'
    parts = [
        f'<g><title>{_plain(bar.hover)}</title><rect x="{x:.2f}" y="{y:.1f}" '
        f'width="{max(width, 0.6):.2f}" height="{BAR}" fill="{fill}"{edge} '
        'stroke-width=".7"/>'
    ]
    room = len(bar.text) * LETTER + 6
    if bar.text and width >= room:
        middle = x + width / 2
        if is_idle:  # letters on hatching need ground of their own
            parts.append(
                f'<rect x="{middle - room / 2:.1f}" y="{y + 3:.1f}" width="{room:.1f}" '
                f'height="{BAR - 6}" fill="{IDLE_GROUND}" opacity=".9"/>'
            )
        colour = INK if is_idle else text_colour(bar.colour)
        parts.append(
            _text(middle, y + BAR / 2, bar.text, anchor="middle", colour=colour)
        )
    return "".join([*parts, "</g>"])


def _labels(paper: Paper, scale: _Scale) -> list[str]:
    parts = []
    for label in paper.labels:
        room = len(label.cause) * LETTER + 8
        if label.room_ms * scale.per_ms > room and label.at_ms < paper.end_ms * 0.97:
            x, y = max(scale.x(label.at_ms), LEFT + room / 2), scale.y(label.row)
            for words, up in ((label.amount, 7), (label.cause, -7)):
                parts.append(_text(x, y - up, words, anchor="middle", colour=SOFT_INK))
    return parts


def _arrow(line: Line, scale: _Scale) -> str:
    return (
        f'<path d="M{scale.x(line.start_ms):.1f} {scale.y(line.start_row):.1f}'
        f'L{scale.x(line.end_ms):.1f} {scale.y(line.end_row):.1f}" stroke="{INK}" '
        'fill="none" stroke-width="1.2" marker-end="url(#tip)">'
        f"<title>{_plain(line.hover)}</title></path>"
    )


def _cross(x: float, y: float, hover: str) -> str:
    return (
        f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" stroke="{RACE_COLOUR}" '
        f'stroke-width="4"><title>{_plain(hover)}</title></path>'
    )


def _plain(hover: str) -> str:
    text = hover.replace("<br>", "\n").replace("<b>", "").replace("</b>", "")
    return html.escape(text)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    bold: bool = False,
    anchor: str = "start",
    colour: str = INK,
) -> str:
    weight = ' font-weight="650" font-size="14"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" dy=".35em" text-anchor="{anchor}" '
        f'fill="{colour}"{weight}>{html.escape(words)}</text>'
    )
