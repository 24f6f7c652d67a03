"""The expected figures of notebooks 00, 01, 02 and 11."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cbasync.config import EngineConfig
from cbasync.devices.sim import SimDevice
from cbasync.engine import SyncEngine
from cbasync.explore import PRESETS, explore
from cbasync.figures.parts import WIDTH, key_svg, picture_svg, rect_svg, words_svg
from cbasync.palette import IDLE_GROUND, PHASE_COLOURS, request_tint
from cbasync.paper import Drawing
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.svg import timeline_svg
from cbasync.timeline import Timeline
from cbasync.trace import NO_WORK

BATCHES = 5
EMPTY = "·"  # a row of a batch without a request

# Requests of notebook 02 and the tokens that each one wants.
LENGTHS = {"A": 2, "B": 9, "C": 3, "D": 7, "E": 2, "F": 3, "G": 2, "H": 2}
ROWS = 3


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


# ------------------------------------------------------------------ 01: why a cache


def tokens_read_svg(prompt: int = 4, new: int = 32) -> str:
    """What a model reads for each new token: what is new, and the rest once more.

    >>> tokens_read_svg(prompt=4, new=3).count("<rect")  # ground, legend, columns
    9
    """
    height, left, bottom = 300, 60, 250
    column = (WIDTH - left - 20) / new
    unit = (bottom - 50) / (prompt + new)
    needed, again = PHASE_COLOURS["compute"], IDLE_GROUND
    parts = [
        *key_svg(left, needed, "must read"),
        *key_svg(left + 130, again, "reads again if it keeps nothing"),
    ]
    for step in range(new):
        fresh, known = (1, prompt + step - 1) if step else (prompt, 0)
        x = left + step * column
        for count, under, colour in ((fresh, 0, needed), (known, fresh, again)):
            y = bottom - (under + count) * unit
            parts.append(rect_svg(x, y, column - 3, count * unit, colour))
        if step % 4 == 0:
            parts.append(
                words_svg(x + column / 2, bottom + 14, str(step + 1), "middle")
            )
    parts += [
        words_svg(left - 8, bottom - tick * unit, str(tick), "end")
        for tick in range(0, prompt + new, 10)
    ]
    parts.append(words_svg(left, bottom + 36, "new token · tokens read to make it"))
    return picture_svg(height, parts)


# ------------------------------------------------------------------ 02: rows of a batch


def engine_batches(
    lengths: Mapping[str, int], rows: int, *, is_static: bool = False
) -> list[str]:
    """Who is in which row, batch by batch, as the engine runs these requests.

    A static batch lets nobody in before all of it are done:

    >>> engine_batches({"A": 1, "B": 3, "C": 1}, rows=2)
    ['AB', 'CB', '·B']
    >>> engine_batches({"A": 1, "B": 3, "C": 1}, rows=2, is_static=True)
    ['AB', '·B', '·B', 'C·']
    """
    names = list(lengths)
    size = rows if is_static else len(names)
    batches = []
    for start in range(0, len(names), size):
        config = EngineConfig(max_num_seqs=rows, depth=0)
        with SyncEngine(ScriptedRunner(), config, SimDevice()) as engine:
            for name in names[start : start + size]:
                params = SamplingParams(max_tokens=lengths[name])
                engine.add_request([1], params, request_id=name)
            while (output := engine.schedule()) is not None:
                batch = dict.fromkeys(range(rows), EMPTY)
                batch |= {o.row: o.request.request_id for o in output.occurrences}
                batches.append("".join(batch.values()))
                engine.launch(output)
                engine.collect()
    return batches


def batch_map_svg(runs: Mapping[str, Sequence[str]]) -> str:
    """Runs above one another: a column a batch, a line a row, a letter a request.

    >>> picture = batch_map_svg({"static": ["AB", "·B"]})
    >>> picture.count(">B</text>"), picture.count("static: 2 steps")
    (2, 1)
    """
    names = sorted({name for run in runs.values() for batch in run for name in batch})
    names = [name for name in names if name != EMPTY]
    colours = {name: request_tint(n) for n, name in enumerate(names)}
    cell = min(44.0, (WIDTH - 80) / max(map(len, runs.values())))
    parts, top = [], 20
    for title, batches in runs.items():
        used = sum(name != EMPTY for batch in batches for name in batch)
        share = used / sum(map(len, batches))
        words = f"{title}: {len(batches)} steps, {share:.0%} of the places used"
        parts.append(words_svg(60, top, words))
        for step, batch in enumerate(batches):
            for row, name in enumerate(batch):
                x, y = 60 + step * cell, top + 16 + 30 * row
                colour = colours.get(name, IDLE_GROUND)
                parts.append(rect_svg(x, y, cell - 2, 28, colour))
                parts.append(words_svg(x + cell / 2 - 1, y + 14, name, "middle"))
        rows = len(batches[0])
        parts += [
            words_svg(8, top + 30 + 30 * row, f"row {row}") for row in range(rows)
        ]
        top += 50 + 30 * rows
    return picture_svg(top, parts)


def _static_and_continuous() -> str:
    return batch_map_svg(
        {
            "static": engine_batches(LENGTHS, ROWS, is_static=True),
            "continuous": engine_batches(LENGTHS, ROWS),
        }
    )


FIGURES: dict[str, Callable[[], str]] = {
    "sync_async.svg": _preset("round figures"),
    "slow_host.svg": _preset("slow host"),
    "race.svg": _preset("no h2d_done: a race"),
    "cache.svg": tokens_read_svg,
    "static_continuous.svg": _static_and_continuous,
}
