"""The expected figures of the notebooks, made by code: `make figures`.

Standard library and the engines only, no plotly, so that they come out the same
everywhere; a test holds the stored files to this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from cbasync.explore import PRESETS, explore
from cbasync.svg import timeline_svg

BATCHES = 5


def _preset(name: str) -> Callable[[], str]:
    def draw() -> str:
        return timeline_svg(*explore(PRESETS[name]).drawings, max_batches=BATCHES)

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
