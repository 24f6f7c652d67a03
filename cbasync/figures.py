"""The expected figures of the notebooks, made by code: `make figures`.

Standard library and the engines only, no plotly, so that they come out the same
everywhere; a test holds the stored files to this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cbasync.explore import PRESETS, explore
from cbasync.paper import Drawing
from cbasync.svg import timeline_svg
from cbasync.timeline import Timeline
from cbasync.trace import NO_WORK

BATCHES = 5


def _bare(drawing: Drawing) -> Drawing:
    """Without counts of bytes and tokens: a picture is of when, not of how much."""
    timeline = drawing.timeline
    spans = [replace(span, work=NO_WORK) for span in timeline.spans]
    return replace(drawing, timeline=Timeline(timeline.name, spans))


def _preset(name: str) -> Callable[[], str]:
    def draw() -> str:
        drawings = map(_bare, explore(PRESETS[name]).drawings)
        return timeline_svg(*drawings, max_batches=BATCHES)

    return draw


FIGURES: dict[str, Callable[[], str]] = {
    "sync_async.svg": _preset("round figures"),
    "slow_host.svg": _preset("slow host"),
    "race.svg": _preset("no h2d_done: a race"),
}


def write_figures(folder: str | Path) -> None:
    """Write all of them into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (Path(folder) / name).write_text(draw())


if __name__ == "__main__":
    write_figures(sys.argv[1])
