"""The expected figures of the notebooks, made by code: `make figures`.

Standard library and the engines only, no plotly, so that they come out the same
everywhere; a test holds the stored files to this.
"""

from collections.abc import Callable
from pathlib import Path

from cbasync.figures import beginnings
from cbasync.figures.beginnings import batch_map_svg

__all__ = ["FIGURES", "batch_map_svg", "write_figures"]

FIGURES: dict[str, Callable[[], str]] = {**beginnings.FIGURES}


def write_figures(folder: str | Path) -> None:
    """Write all of them into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (Path(folder) / name).write_text(draw())
