"""Figures in plotly.

A figure is first a plain dict in plotly's format, made by a pure function that tests
can read; `figure` turns it into a plotly figure. So the package imports without plotly,
and a figure in a widget is updated by the same dicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbasync.palette import (
    FONT,
    GRID,
    IDLE_GROUND,
    IDLE_LINE,
    INK,
    PHASE_COLOURS,
    RACE_COLOUR,
    SOFT_INK,
    text_colour,
)
from cbasync.paper import MAX_BATCHES, Bar, Drawing, Paper, lay_out
from cbasync.timeline import PHASES, Timeline

Spec = dict[str, Any]
"""A figure in plotly's format: `data` and `layout`."""

LETTERS = 105  # that fit beside one another into the width of a figure
EDGE = 0.03  # of the width: half of a label

MARGIN = {"l": 48, "r": 12, "t": 56, "b": 44}  # pixels
TITLE_PX = 30

# Invisible ticks keep the names of rows off the bars that start there.
LABEL_GAP = {"ticks": "outside", "ticklen": 6, "tickcolor": "#ffffff"}


def timeline_spec(
    *runs: Timeline | Drawing,
    max_batches: int = MAX_BATCHES,
    first_batch: int = 0,
    end_ms: float | None = None,
    title: str = "",
) -> Spec:
    """Runs above one another on one time axis, as a plotly dict.

    The traces are always the same ten in the same order: the six phases, idle time,
    its labels, events, races. `end_ms` is how far the axis shows at first; the rest
    is a drag away.
    """
    drawings = [r if isinstance(r, Drawing) else Drawing(r) for r in runs]
    paper = lay_out(drawings, max_batches=max_batches, first_batch=first_batch)
    shown_ms = end_ms or paper.end_ms * 1.01 or 1.0
    traces = [_bar_trace(phase, paper, shown_ms) for phase in PHASES]
    traces += [_idle_trace(paper, shown_ms), _label_trace(paper, shown_ms)]
    traces += [_line_trace(paper), _mark_trace(paper)]
    return {"data": traces, "layout": _layout(paper, shown_ms, title)}


def _bar_trace(phase: str, paper: Paper, shown_ms: float) -> Spec:
    bars = [bar for bar in paper.bars if bar.kind == phase]
    return {
        **_bars(bars, shown_ms),
        "name": phase,
        "marker": {
            "color": [bar.colour for bar in bars] or PHASE_COLOURS[phase],
            "line": {"width": 0.5, "color": "#ffffff"},
        },
        "textfont": {"color": [text_colour(bar.colour) for bar in bars] or INK},
    }


def _bars(bars: Sequence[Bar], shown_ms: float) -> Spec:
    letter_ms = shown_ms / LETTERS
    return {
        "type": "bar",
        "orientation": "h",
        "base": [bar.start_ms for bar in bars],
        "x": [bar.length_ms for bar in bars],
        "y": [bar.row for bar in bars],
        "width": 0.82,
        # What does not fit is left out: shrunken letters help nobody.
        "text": [
            bar.text if bar.length_ms > (len(bar.text) + 0.8) * letter_ms else ""
            for bar in bars
        ],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "customdata": [bar.hover for bar in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _idle_trace(paper: Paper, shown_ms: float) -> Spec:
    bars = [bar for bar in paper.bars if bar.kind == "idle"]
    return {
        **_bars(bars, shown_ms),
        "name": "GPU idle",
        "textfont": {"color": INK},
        "marker": {
            "color": IDLE_GROUND,
            "line": {"width": 1, "color": IDLE_LINE},
            "pattern": {
                "shape": "/",
                "size": 7,
                "solidity": 0.25,
                "fillmode": "replace",
                "bgcolor": IDLE_GROUND,
                "fgcolor": [bar.colour for bar in bars] or IDLE_LINE,
            },
        },
    }


def _label_trace(paper: Paper, shown_ms: float) -> Spec:
    labels = [
        label
        for label in paper.labels
        if label.room_ms > len(label.cause) * shown_ms / LETTERS
        and _is_whole(label.at_ms / shown_ms)
    ]
    return {
        "type": "scatter",
        "mode": "text",
        "name": "how long, and mostly for what",
        "showlegend": False,
        "x": [label.at_ms for label in labels],
        "y": [label.row for label in labels],
        "text": [f"{label.amount}<br>{label.cause}" for label in labels],
        "textfont": {"color": SOFT_INK, "size": 11},
        "hoverinfo": "skip",
    }


def _is_whole(place: float) -> bool:
    """Whether a label at this share of the width is not cut by the figure's edge.

    >>> [_is_whole(place) for place in (0.01, 0.5, 0.99, 1.5)]  # 1.5: a drag away
    [False, True, False, True]
    """
    return min(abs(place), abs(place - 1)) > EDGE


def _line_trace(paper: Paper) -> Spec:
    x, y, hover = [], [], []
    for line in paper.lines:
        x += [line.start_ms, line.end_ms, None]
        y += [line.start_row, line.end_row, None]
        hover += [line.hover, line.hover, ""]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "event",
        "x": x,
        "y": y,
        "line": {"color": INK, "width": 1.2},
        "marker": {
            "symbol": ["circle", "arrow", "circle"] * len(paper.lines) or "arrow",
            "size": [3, 9, 0] * len(paper.lines) or 9,
            "angleref": "previous",
            "color": INK,
            # Plotly makes markers of many sizes pale, and edges them in white.
            "line": {"width": 0},
            "opacity": 1,
        },
        "customdata": hover,
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _mark_trace(paper: Paper) -> Spec:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "race",
        "x": [mark.at_ms for mark in paper.marks],
        "y": [mark.row for mark in paper.marks],
        "marker": {
            "symbol": "x",
            "size": 12,
            "color": RACE_COLOUR,
            "line": {"width": 1.5, "color": "#ffffff"},
        },
        "customdata": [mark.hover for mark in paper.marks],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _layout(paper: Paper, shown_ms: float, title: str) -> Spec:
    names = [
        {
            "text": f"<b>{words}</b>",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": row,
            "yref": "y",
            "showarrow": False,
            "font": {"size": 15},
        }
        for row, words in paper.names
    ]
    above = TITLE_PX if title else 0  # so that the legend stays below the title
    heading = {"text": title, "x": 0, "xref": "paper", "y": 1, "yref": "container"}
    return base_layout(
        title=heading | {"yanchor": "top", "pad": {"t": 10}} if title else {"text": ""},
        barmode="overlay",
        margin=MARGIN | {"t": MARGIN["t"] + above},
        height=int(90 + 36 * paper.rows) + above,
        annotations=names,
        xaxis={
            # Letters of this size still fit a narrow page.
            "title": {
                "text": f"ms{' · ' + paper.cut if paper.cut else ''}",
                "font": {"size": 12},
            },
            "range": [0, shown_ms],
            "gridcolor": GRID,
            "zeroline": False,
        },
        yaxis={
            "range": [paper.rows - 0.4, -0.6],
            "tickvals": [row for row, _ in paper.lanes],
            "ticktext": [label for _, label in paper.lanes],
            "fixedrange": True,
            **LABEL_GAP,
            "showgrid": False,
            "zeroline": False,
        },
        # On a narrow page letters that would have to shrink are left out instead.
        uniformtext={"mode": "hide", "minsize": 10},
        dragmode="pan",
    )


def base_layout(**more: Any) -> Spec:
    """What all figures have in common."""
    return {
        "autosize": True,
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "margin": MARGIN,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hoverlabel": {"align": "left"},
        **more,
    }


def round_up(value: float) -> float:
    """The next of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10: an axis that seldom jumps.

    >>> [round_up(value) for value in (0.9, 10.0, 61.0, 140.0)]
    [1.0, 10.0, 80.0, 150.0]
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
    return next(step * power for step in steps if step * power >= value * (1 - 1e-9))


def figure(spec: Spec) -> Any:
    """A plotly figure of a dict."""
    return _plotly().Figure(spec)


def timeline_figure(*runs: Timeline | Drawing, **options: Any) -> Any:
    """A plotly figure of runs above one another; options as for `timeline_spec`."""
    return figure(timeline_spec(*runs, **options))


def _plotly() -> Any:
    try:
        import plotly.graph_objects as graph_objects
    except ImportError as error:
        raise RuntimeError(
            "figures need plotly, which is not installed: pip install "
            "'cbasync[notebook]', or draw with cbasync.svg, which needs nothing"
        ) from error
    return graph_objects


def save(spec: Spec, path: str | Path) -> None:
    """Write a figure: .html needs no network to open, .svg and .png need kaleido."""
    kind = Path(path).suffix
    if kind == ".html":
        figure(spec).write_html(path, include_plotlyjs=True)
    elif kind in (".svg", ".png"):
        figure(spec).write_image(path, width=1100)
    else:
        raise ValueError(
            f"{path} ends in {kind!r}, figures are written as .html, .svg or .png: "
            "choose one of them"
        )
