"""Charts beside the timeline: activity, batches, blocks, and measured series.

Plain dicts in plotly's format, as in `plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbasync.palette import IDLE_GROUND, PHASE_COLOURS, cause_colour, request_tint
from cbasync.plot import LABEL_GAP, MARGIN, Spec, base_layout
from cbasync.steps import Step
from cbasync.timeline import CAUSES, Timeline

BINS = 200


def activity_spec(timeline: Timeline, bins: int = BINS) -> Spec:
    """How busy the GPU was over a run of any length, in equal pieces of time.

    Nothing is left out: busy and idle times of the pieces add up to those of the run.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}, at least 1 is needed: raise it")
    start_us = min((s.start_us for s in timeline.lane("compute")), default=0.0)
    width_us = timeline.gpu_window_us / bins or 1.0
    idle = {cause: [0.0] * bins for cause in CAUSES}
    for gap in timeline.idle_gaps():
        _spread(
            idle[gap.cause], gap.start_us - start_us, gap.end_us - start_us, width_us
        )
    busy = [width_us - sum(idle[c][n] for c in CAUSES) for n in range(bins)]
    middles = [(n + 0.5) * width_us / 1000 for n in range(bins)]
    rows = {"busy": (busy, PHASE_COLOURS["compute"])}
    rows |= {
        f"idle: {cause}": (idle[cause], cause_colour(cause))
        for cause in CAUSES
        if any(idle[cause])
    }
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": middles,
            "y": [100 * us / width_us for us in values],
            "width": width_us / 1000,
            "marker": {"color": colour, "line": {"width": 0}}
            | ({"pattern": _HATCH | {"fgcolor": colour}} if name != "busy" else {}),
        }
        for name, (values, colour) in rows.items()
    ]
    words = f"ms, in {bins} pieces of {width_us / 1000:.3g} ms"
    return {
        "data": traces,
        "layout": _axes(words, "% of the time", barmode="stack", bargap=0),
    }


_HATCH = {"shape": "/", "size": 6, "fillmode": "replace", "bgcolor": IDLE_GROUND}


def _spread(bins: list[float], start: float, end: float, width: float) -> None:
    """Add a stretch of time to the pieces that it touches."""
    first = min(int(start / width), len(bins) - 1)
    last = min(int(end / width), len(bins) - 1)
    for number in range(first, last + 1):
        right = end if number == last else (number + 1) * width
        bins[number] += right - max(start, number * width)


def composition_spec(timeline: Timeline) -> Spec:
    """Of what each batch consists: a token for each request, and more of prompts."""
    works = {
        span.batch: span.work
        for span in timeline.lane("cpu")
        if span.phase == "prepare" and span.batch >= 0
    }
    batches = sorted(works)
    rows = {
        "one token for each request": [works[b].num_requests for b in batches],
        "more tokens of prompts": [
            works[b].num_tokens - works[b].num_requests for b in batches
        ],
    }
    colours = (PHASE_COLOURS["compute"], PHASE_COLOURS["schedule"])
    traces = [
        {"type": "bar", "name": name, "x": batches, "y": y, "marker": {"color": colour}}
        for (name, y), colour in zip(rows.items(), colours, strict=True)
    ]
    return {"data": traces, "layout": _axes("batch", "tokens", barmode="stack")}


def block_map_spec(steps: Sequence[Step]) -> Spec:
    """Who owns which block of the KV cache, batch by batch."""
    names = sorted({owner for step in steps for owner in step.owners if owner})
    numbers = {name: number + 1 for number, name in enumerate(names)}
    blocks = range(len(steps[0].owners)) if steps else range(0)
    owners = [[step.owners[block] for step in steps] for block in blocks]
    rows = {"title": {"text": "block"}, "autorange": "reversed", "dtick": 1}
    return {
        "data": [
            {
                "type": "heatmap",
                "x": [step.batch for step in steps],
                "y": list(blocks),
                "z": [[numbers.get(name, 0) for name in row] for row in owners],
                "text": owners,
                "texttemplate": "%{text}",
                "hovertemplate": "block %{y}, batch %{x}: %{text}<extra></extra>",
                "colorscale": _steps_of_colour(len(names)),
                "zmin": -0.5,
                "zmax": len(names) + 0.5,
                "showscale": False,
                "xgap": 1,
                "ygap": 1,
            }
        ],
        "layout": _axes("batch", "") | {"yaxis": rows | LABEL_GAP},
    }


def _steps_of_colour(count: int) -> list[list[Any]]:
    """A scale of plain steps: nobody, then one colour an owner."""
    colours = [IDLE_GROUND]
    colours += [request_tint(n) for n in range(count)]
    return [
        [(n + edge) / len(colours), colour]
        for n, colour in enumerate(colours)
        for edge in (0, 1)
    ]


# ------------------------------------------------------------------ measured series


def gain_spec(result: dict[str, Any]) -> Spec:
    """Gain against added host time, measured and predicted: a `host-delay` file."""
    _check(result, "host-delay")
    points = result["points"]
    looks = {"measured": "solid", "predicted": "dot"}
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{kind} ({where})",
            "x": [point["delay_ms"] for point in points],
            "y": [100 * point[f"gain_{kind}"] for point in points],
            "line": {"color": colour, "dash": dash},
        }
        for (kind, dash), where, colour in zip(
            looks.items(),
            (str(result["gpu"]), "virtual device"),
            (PHASE_COLOURS["compute"], PHASE_COLOURS["d2h"]),
            strict=True,
        )
    ]
    words = "host time added to each step, ms"
    return {"data": traces, "layout": _axes(words, "time saved by async, %")}


def ladder_spec(result: dict[str, Any]) -> Spec:
    """Each step from the simplest loop to the fastest, from a `ladder` file."""
    _check(result, "ladder")
    steps = list(reversed(result["steps"]))
    wrong = [step["wrong_tokens"] > 0 for step in steps]
    texts = [
        f"{step['total_s']:.2f} s, active {100 * step['gpu_active']:.1f} %"
        + (f", {100 * step['wrong_tokens']:.0f} % wrong" if bad else "")
        for step, bad in zip(steps, wrong, strict=True)
    ]
    colours = [IDLE_GROUND if bad else PHASE_COLOURS["compute"] for bad in wrong]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [step["total_s"] for step in steps],
        "y": [step["step"] for step in steps],
        "text": texts,
        "textposition": "auto",
        "textfont": {"size": 11},  # the longest one still fits a narrow page
        "marker": {"color": colours, "line": {"color": "#8a8a86", "width": 1}},
    }
    layout = _axes(f"seconds ({result['gpu']}, {result['model']})", "")
    layout["yaxis"] = {"automargin": True, **LABEL_GAP}
    longest = max(step["total_s"] for step in steps)
    layout["xaxis"] |= {"range": [0, 1.25 * longest]}  # room for words behind a bar
    layout["margin"] = MARGIN | {"t": 12}  # no legend
    layout["height"] = 60 + 34 * len(steps)
    return {"data": [bars], "layout": layout}


def _check(result: dict[str, Any], experiment: str) -> None:
    found = result.get("experiment")
    if found != experiment:
        raise ValueError(
            f"the result is of experiment {found!r}, this chart shows {experiment!r}: "
            "give a file of data/results with that experiment"
        )


def _axes(x: str, y: str, **more: Any) -> Spec:
    return base_layout(
        height=360,
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}, **LABEL_GAP},
        **more,
    )
