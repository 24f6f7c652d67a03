"""The expected figures of the notebooks, made by code: `make figures`.

Standard library and the engines only, no plotly, so that they come out the same
everywhere; a test holds the stored files to this.
"""

from collections.abc import Callable
from pathlib import Path

from cbasync.figures import beginnings, carrying, flat, memory, paying, queues, slots
from cbasync.figures.beginnings import batch_map_svg
from cbasync.figures.flat import (
    FlatBatch,
    Part,
    engine_arrays,
    flat_batch_svg,
    flat_steps_svg,
)
from cbasync.figures.memory import cache_svg, memory_map_svg, places_of
from cbasync.figures.queues import shares_svg, stacks_svg

__all__ = [
    "FIGURES",
    "FlatBatch",
    "Part",
    "batch_map_svg",
    "cache_svg",
    "engine_arrays",
    "flat_batch_svg",
    "flat_steps_svg",
    "memory_map_svg",
    "places_of",
    "shares_svg",
    "stacks_svg",
    "write_figures",
]

FIGURES: dict[str, Callable[[], str]] = {
    **beginnings.FIGURES,
    **carrying.FIGURES,
    **flat.FIGURES,
    **memory.FIGURES,
    **paying.FIGURES,
    **queues.FIGURES,
    **slots.FIGURES,
}


def write_figures(folder: str | Path) -> None:
    """Write all of them into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (Path(folder) / name).write_text(draw())
