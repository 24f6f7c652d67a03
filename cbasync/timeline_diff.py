"""Where did the time between two runs go? Standard library only."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from cbasync.timeline import CAUSES, Timeline


class Part(NamedTuple):
    """One share of two runs' time."""

    name: str
    before_us: float
    after_us: float

    @property
    def change_us(self) -> float:
        return self.after_us - self.before_us


@dataclass(frozen=True)
class TimelineDiff:
    """Two runs cut into the same parts; the parts add up to the total times."""

    before: str
    after: str
    parts: tuple[Part, ...]

    @property
    def change_us(self) -> float:
        """How much longer the second run took; negative if it was faster."""
        return math.fsum(part.change_us for part in self.parts)

    def records(self) -> list[dict[str, Any]]:
        """Rows for a table."""
        return [part._asdict() | {"change_us": part.change_us} for part in self.parts]

    def __str__(self) -> str:
        names = (self.before or "before", self.after or "after", "change")
        width = max(10, *(len(name) + 2 for name in names))
        lines = [f"{'ms':24}" + "".join(f"{name:>{width}}" for name in names)]
        total = Part(
            "total",
            math.fsum(part.before_us for part in self.parts),
            math.fsum(part.after_us for part in self.parts),
        )
        for part in (*self.parts, total):
            times = (part.before_us, part.after_us)
            row = "".join(f"{us / 1000:{width}.3f}" for us in times)
            lines.append(f"{part.name:24}{row}{part.change_us / 1000:+{width}.3f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def diff(before: Timeline, after: Timeline) -> TimelineDiff:
    """Where the time between two runs went, part by part.

    >>> from cbasync.timeline import Span
    >>> def run(name, gap_us):
    ...     start_us = 100.0 + gap_us
    ...     return Timeline(name, [
    ...         Span("compute", "compute", 0, 0, 0.0, 100.0),
    ...         Span("cpu", "prepare", 1, 0, 100.0, start_us),
    ...         Span("compute", "compute", 1, 0, start_us, start_us + 100.0)])
    >>> print(diff(run("slow", 50.0), run("fast", 20.0)))
    ms                            slow      fast    change
    GPU busy                     0.200     0.200    +0.000
    idle: prepare                0.050     0.020    -0.030
    total                        0.250     0.220    -0.030
    """
    ours, theirs = _shares(before), _shares(after)
    parts = (Part(name, ours[name], theirs[name]) for name in ours)
    kept = tuple(p for p in parts if p.before_us or p.after_us)
    return TimelineDiff(before.name, after.name, kept)


def _shares(timeline: Timeline) -> dict[str, float]:
    compute = timeline.lane("compute")
    first = compute[0].start_us if compute else timeline.end_us
    last = max((span.end_us for span in compute), default=timeline.end_us)
    causes = timeline.idle_by_cause()
    return {
        "before the first compute": first - timeline.start_us,
        "GPU busy": timeline.gpu_busy_us,
        **{f"idle: {cause}": causes[cause] for cause in CAUSES},
        "after the last compute": timeline.end_us - last,
    }
