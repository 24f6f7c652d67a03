"""The expected figures of notebook 04: the requests of a batch in one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from cbasync.config import EngineConfig
from cbasync.devices.sim import SimDevice
from cbasync.engine import SyncEngine
from cbasync.figures.memory import tint_of
from cbasync.figures.parts import picture_svg, rect_svg, words_svg
from cbasync.palette import IDLE_GROUND, INK
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams

# Tokens of the prompt, new tokens. The last request has a long prompt, and enters
# while others run.
LENGTHS = {"r0": (3, 8), "r1": (2, 3), "r2": (2, 9), "r3": (20, 3)}
ROWS = 3
BUDGETS, SHOWN_STEP = (64, 8), 3
_CELL, _TALL = 27.0, 156.0  # pixels of a token, and of a row with its arrays


class Part(NamedTuple):
    """What one request has computed in one batch."""

    name: str
    start: int  # its first token
    length: int  # how many tokens
    known: int  # tokens that there are of it: a part that ends here is sampled


class FlatBatch(NamedTuple):
    """The arrays of one batch that say whose tokens are where."""

    names: Sequence[str]  # [R]
    query_start_loc: Sequence[int]  # [R + 1]
    positions: Sequence[int]  # [T]
    logits_indices: Sequence[int]  # [S]


def engine_parts(budget: int) -> list[list[Part]]:
    """Who computes what, batch by batch, as the engine runs requests of notebook 04.

    >>> engine_parts(budget=8)[3][-1]
    Part(name='r3', start=0, length=6, known=20)
    """
    return [parts for parts, _ in _run_flat(budget)]


def engine_arrays(budget: int) -> list[FlatBatch]:
    """The arrays of the same batches, from the engine's own buffers.

    >>> engine_arrays(budget=8)[3]  # doctest: +NORMALIZE_WHITESPACE
    FlatBatch(names=['r0', 'r2', 'r3'], query_start_loc=[0, 1, 2, 8],
              positions=[5, 4, 0, 1, 2, 3, 4, 5], logits_indices=[0, 1])
    """
    return [arrays for _, arrays in _run_flat(budget)]


def _run_flat(budget: int) -> list[tuple[list[Part], FlatBatch]]:
    config = EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=budget, depth=0)
    batches = []
    with SyncEngine(ScriptedRunner(), config, SimDevice()) as engine:
        for name, (prompt, new) in LENGTHS.items():
            params = SamplingParams(max_tokens=new)
            engine.add_request([1] * prompt, params, request_id=name)
        while (output := engine.schedule()) is not None:
            parts = [
                Part(
                    name=o.request.request_id,
                    start=o.start,
                    length=o.length,
                    known=o.request.num_tokens,
                )
                for o in output.occurrences
            ]
            engine.launch(output)
            host = engine.in_flight[-1].io_slot.host
            arrays = FlatBatch(
                [part.name for part in parts],
                host["query_start_loc"][: len(parts) + 1].tolist(),
                host["positions"][: output.num_tokens].tolist(),
                host["logits_indices"][: output.num_sampled].tolist(),
            )
            batches.append((parts, arrays))
            engine.collect()
    return batches


def flat_batch_svg(batches: Mapping[str, FlatBatch]) -> str:
    """Batches above one another, each as one row of tokens with its arrays.

    >>> batch = FlatBatch(["r0", "r1"], [0, 2, 3], [0, 1, 7], [1, 2])
    >>> picture = flat_batch_svg({"one": batch})
    >>> picture.count("<rect"), ">7</text>" in picture  # ground, tokens, marks
    (6, True)
    """
    parts, top = [], 20.0
    for title, batch in batches.items():
        parts += _flat_svg(title, batch, 8, top)
        top += _TALL
    return picture_svg(int(top), parts)


def _flat_svg(title: str, batch: FlatBatch, x: float, top: float) -> list[str]:
    """One row: names, tokens with their positions, borders, what is sampled."""
    wide, left, y = _CELL, x + 122, top + 44
    owners = dict.fromkeys(range(len(batch.positions)), "")
    parts = [words_svg(x, top, title)]
    spans = zip(batch.names, pairwise(batch.query_start_loc), strict=False)
    for name, (start, stop) in spans:
        owners |= dict.fromkeys(range(start, stop), name)
        middle = left + (start + stop) / 2 * wide
        parts.append(words_svg(middle, y - 14, name, "middle"))
    for index, position in enumerate(batch.positions):
        name = owners[index]
        parts.append(_cell_svg(left + index * wide, y, name))
        middle = left + (index + 0.5) * wide - 1
        parts.append(words_svg(middle, y + 13, str(position), "middle"))
    parts += [
        words_svg(left + place * wide - 1, y + 50, str(place), "middle")
        for place in batch.query_start_loc
    ]
    for place in batch.logits_indices:
        parts.append(_mark_svg(left + place * wide, y))
        middle = left + (place + 0.5) * wide - 1
        parts.append(words_svg(middle, y + 76, str(place), "middle"))
    for below, words in (
        (13, "positions"),
        (50, "query_start_loc"),
        (76, "logits_indices"),
    ):
        parts.append(words_svg(x, y + below, words))
    return parts


def _cell_svg(x: float, y: float, name: str) -> str:
    return rect_svg(x, y, _CELL - 2, 26, tint_of(name) if name else IDLE_GROUND)


def _mark_svg(x: float, y: float) -> str:
    """Under a token: its successor is sampled."""
    return rect_svg(x, y + 28, _CELL - 2, 4, INK)


def flat_steps_svg(runs: Mapping[str, Sequence[Sequence[Part]]]) -> str:
    """Runs side by side: a line a batch, a box a token, in the colour of its request.

    >>> steps = [[Part("r0", 0, 2, 2)], [Part("r0", 2, 1, 3)]]
    >>> picture = flat_steps_svg({"one": steps})
    >>> picture.count("<rect")  # ground, legend, three tokens, two marks
    7
    """
    parts = [rect_svg(40, 19, 18, 4, INK), words_svg(64, 21, "a token comes of it")]
    x, tall = 40.0, 38.0
    for title, batches in runs.items():
        longest = max(sum(part[2] for part in batch) for batch in batches)
        words = f"{title}: {len(batches)} steps, longest {longest} tokens"
        parts.append(words_svg(x, 46, words))
        for number, batch in enumerate(batches):
            parts += _step_svg(x, 62 + number * tall, batch)
            if x == 40:
                parts.append(words_svg(30, 75 + number * tall, str(number), "end"))
        x += max(longest * _CELL, 7.5 * len(words)) + 24
    most = max(map(len, runs.values()))
    return picture_svg(int(70 + most * tall), parts)


def _step_svg(x: float, y: float, batch: Sequence[Part]) -> list[str]:
    parts = []
    for name, start, length, known in batch:
        parts += [_cell_svg(x + token * _CELL, y, name) for token in range(length)]
        parts.append(words_svg(x + (_CELL - 2) / 2, y + 13, name, "middle"))
        x += length * _CELL
        if start + length == known:
            parts.append(_mark_svg(x - _CELL, y))
    return parts


def _rectangle_and_row() -> str:
    """The same batch twice: filled up to a rectangle, and as one row."""
    batch = engine_arrays(BUDGETS[1])[SHOWN_STEP]
    lengths = [stop - start for start, stop in pairwise(batch.query_start_loc)]
    longest, used = max(lengths), sum(lengths)
    places = longest * len(lengths)
    words = f"a rectangle: {places} places, {places - used} of them empty"
    parts = [words_svg(8, 20, words)]
    for row, (name, length) in enumerate(zip(batch.names, lengths, strict=True)):
        y = 38 + 32 * row
        parts.append(words_svg(8, y + 13, name))
        parts += [
            _cell_svg(36 + column * _CELL, y, name if column < length else "")
            for column in range(longest)
        ]
    parts += _flat_svg(f"one row: {used} places, none of them empty", batch, 400, 20)
    return picture_svg(int(_TALL + 4), parts)


def _chunked() -> str:
    return flat_steps_svg(
        {f"budget {budget}": engine_parts(budget) for budget in BUDGETS}
    )


FIGURES: dict[str, Callable[[], str]] = {
    "flat_batch.svg": _rectangle_and_row,
    "chunked_prefill.svg": _chunked,
}
