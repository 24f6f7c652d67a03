"""The expected figures of notebooks 07 and 08: one set of buffers, and two."""

from __future__ import annotations

import html
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cbasync.config import EngineConfig
from cbasync.devices.access import Access
from cbasync.devices.costs import LAPTOP, CostModel
from cbasync.devices.races import Race, RaceDetector
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine
from cbasync.explore import PRESETS, explore
from cbasync.figures.parts import WIDTH, picture_svg, rect_svg, words_svg
from cbasync.figures.paying import result
from cbasync.palette import (
    IDLE_GROUND,
    INK,
    PHASE_COLOURS,
    RACE_COLOUR,
    SOFT_INK,
    shade,
    text_colour,
)
from cbasync.runner import Runner, ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.svg import timeline_svg
from cbasync.timeline import Timeline

# ------------------------------------------------------------------ a watched run


class Watched(NamedTuple):
    """A run under the race detector, on the virtual device."""

    tokens: list[list[int]]  # by prompt
    detector: RaceDetector
    timeline: Timeline


def watched_run(
    runner: Runner,
    config: EngineConfig,
    costs: CostModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> Watched:
    """Answer prompts one batch ahead, or as the config says, and look for races.

    >>> from cbasync import ScriptedRunner
    >>> from cbasync.devices.costs import LAPTOP
    >>> run = watched_run(ScriptedRunner(), EngineConfig(), LAPTOP, [[1, 2]], 3)
    >>> run.tokens, len(run.detector.races)
    ([[16, 115, 809]], 0)
    """
    device, detector = SimDevice(costs=costs), RaceDetector()
    device.observers.append(detector)
    params = SamplingParams(max_tokens=max_tokens)
    with AsyncEngine(runner, config, device) as engine:
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        engine.run()
    tokens = [request.output_token_ids for request in requests]
    return Watched(tokens, detector, engine.timeline)


# ------------------------------------------------------------------ 07: right and wrong

# One batch ahead with a single slot, and only the events of notebook 06.
ONE_SLOT = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_blocks=64,
    max_model_len=64,
    num_slots=1,
    ablate=frozenset({"slot_refill", "slot_reuse"}),
)

# What SmolLM2 says in turns, and what as above. A figure should not have to load it.
ANSWERS = {
    "The capital of France is": (
        " Paris.\n\nThe answer is: 2",
        "wise, the probability of a given event occurring occurring",
    ),
    "One, two, three,": (
        " four, five, six, seven, eight,",
        "four, five, six, seven, eight eight",
    ),
    "Water boils at": (" 100°C, which is a", "least 100°C, which which"),
    "Once upon a time": (
        ", the city of Nova Haven was a thriving metropolis",
        "the-world-I-was-aa",
    ),
}


def answers_svg(
    answers: Mapping[str, tuple[str, str]], reports: Sequence[str] = ()
) -> str:
    """Right and wrong text side by side, and what the detector says about it.

    >>> picture = answers_svg({"One, two,": (" three", " one")}, ["a race"])
    >>> picture.count(f'fill="{RACE_COLOUR}"'), "a race" in picture
    (2, True)
    """
    columns = (20, 190, 550)
    heads = ("prompt", "in turns: right", "ahead with one slot: wrong")
    parts = [
        _words(x, 22, head, SOFT_INK) for x, head in zip(columns, heads, strict=True)
    ]
    top = 50
    for prompt, (right, got) in answers.items():
        # A prompt goes on where the answer begins: a space between is part of it.
        colour = INK if right == got else RACE_COLOUR
        for x, text, ink in zip(
            columns, (prompt, right, got), (INK, INK, colour), strict=True
        ):
            parts.append(_words(x, top, re.sub(r"\s*\n\s*", " ⏎ ", text), ink))
        top += 26
    for report in reports:
        lines = textwrap.wrap(report, 118)
        parts.append(rect_svg(8, top - 4, 4, 20 * len(lines) + 4, RACE_COLOUR))
        parts += [
            _words(20, top + 8 + 20 * n, line, INK) for n, line in enumerate(lines)
        ]
        top += 20 * len(lines) + 14
    return picture_svg(top, parts)


def _words(x: float, y: float, words: str, colour: str) -> str:
    escaped = html.escape(words)
    return f'<g fill="{colour}">{words_svg(x, y, escaped)}</g>'


def first_reports(detector: RaceDetector) -> list[str]:
    """The first race of each edge."""
    by_edge = {race.edge: str(race) for race in reversed(detector.races)}
    return [by_edge[edge] for edge in sorted(by_edge)]


def _right_and_wrong() -> str:
    """The answers above, and what the detector reports: the same for every model."""
    prompts = [[prompt] for prompt in range(len(ANSWERS))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that edges are off is what is asked for
        run = watched_run(ScriptedRunner(), ONE_SLOT, LAPTOP, prompts, max_tokens=3)
    return answers_svg(ANSWERS, first_reports(run.detector))


# ------------------------------------------------------------------ 07: four buffers

PATH = ("prepare", "h2d", "compute", "d2h", "update")
BUFFERS = ("host_in", "device_in", "device_out", "host_out")


Touch = tuple[str, int]
"""A phase and the number of its batch."""


def touch(phase: str, batch: int) -> Access:
    """What a phase touches on the path: the buffer before it and the one behind it.

    >>> touch("h2d", 0).reads(), touch("h2d", 0).writes(), touch("update", 0).writes()
    (['host_in'], ['device_in'], [])
    """
    if phase not in PATH:
        return Access(phase, batch, 0)
    place = PATH.index(phase)
    reads, writes = list(BUFFERS[:place][-1:]), list(BUFFERS[place : place + 1])
    return Access(phase, batch, 0, lambda: reads, lambda: writes)


class Meeting(NamedTuple):
    """Two batches at one buffer: who was there first, who comes, what is missing."""

    buffer: str
    first: str
    second: str
    edge: str


def meetings(
    races: Iterable[Race], name_edge: Callable[[Touch, Touch], str] | None = None
) -> list[Meeting]:
    """Races as they are drawn; `name_edge` names the edges, or the detector does."""
    drawn = []
    for race in races:
        first, second = (
            (touch.access.phase, touch.access.batch)
            for touch in (race.first, race.second)
        )
        edge = name_edge(first, second) if name_edge else race.edge
        before, after = (f"{phase} {batch}" for phase, batch in (first, second))
        drawn.append(Meeting(race.resource, before, after, edge))
    return drawn


def buffers_svg(meetings: Sequence[Meeting] = (), title: str = "") -> str:
    """The path of a batch through one set of buffers, and who meets whom on it.

    >>> picture = buffers_svg([Meeting("host_in", "h2d 0", "prepare 1", "slot_refill")])
    >>> picture.count("<rect"), "slot_refill" in picture
    (10, True)
    """
    step = (WIDTH - 20) / (len(PATH) + len(BUFFERS))
    parts = [_words(20, 16, title, SOFT_INK)]
    for number, phase in enumerate(PATH):
        x, colour = 10 + 2 * number * step, PHASE_COLOURS[phase]
        parts.append(rect_svg(x, 34, step - 8, 30, colour))
        parts.append(_middle(x + step / 2 - 4, 49, phase, text_colour(colour)))
    for number, buffer in enumerate(BUFFERS):
        middle = 10 + (2 * number + 1.5) * step - 4
        parts.append(rect_svg(middle - step / 2 + 4, 40, step - 8, 18, IDLE_GROUND))
        parts.append(_middle(middle, 49, buffer, INK))
        here = [meeting for meeting in meetings if meeting.buffer == buffer]
        for row, meeting in enumerate(here):
            words = (meeting.first, f"then {meeting.second}", str(meeting.edge))
            for line, (text, ink) in enumerate(
                zip(words, (INK, INK, RACE_COLOUR), strict=True)
            ):
                parts.append(_middle(middle, 82 + 66 * row + 18 * line, text, ink))
    deepest = max((_at(meetings, buffer) for buffer in BUFFERS), default=0)
    return picture_svg(80 + 66 * deepest, parts)


def _at(meetings: Sequence[Meeting], buffer: str) -> int:
    return sum(meeting.buffer == buffer for meeting in meetings)


def _middle(x: float, y: float, words: str, colour: str) -> str:
    return f'<g fill="{colour}">{words_svg(x, y, html.escape(words), "middle")}</g>'


# ------------------------------------------------------------------ 08: one and two

BATCHES = 5


def _one_and_two() -> str:
    """The engine one batch ahead, with one slot and with two."""
    drawings = []
    for number, name in ((1, "one slot"), (2, "two slots")):
        settings = replace(PRESETS["one slot: a race"], num_slots=number)
        drawing = explore(settings).drawings[1]
        drawing.timeline.name = name
        drawings.append(drawing)
    return timeline_svg(*drawings, max_batches=BATCHES)


def memory_svg(used: Mapping[str, int], small: Mapping[str, int] | None = None) -> str:
    """Bars of GPU memory in use, all on one scale; below, parts too small to draw.

    >>> picture = memory_svg({"one": 50_000_000_000}, {"a slot": 124_804})
    >>> "50.00 GB" in picture, "a slot: 0.12 MB" in picture
    (True, True)
    """
    largest = max(used.values())
    parts, top = [], 14
    for number, (name, size) in enumerate(used.items()):
        colour = shade(PHASE_COLOURS["compute"], number)
        parts.append(words_svg(20, top + 13, name))
        parts.append(rect_svg(130, top, 640 * size / largest, 26, colour))
        parts.append(words_svg(784, top + 13, f"{size / 1e9:.2f} GB"))
        top += 38
    for name, size in (small or {}).items():
        parts.append(words_svg(130, top + 10, f"{name}: {size / 1e6:.2f} MB"))
        top += 24
    return picture_svg(top + 10, parts)


def _memory() -> str:
    measured = result("published-eager")
    modes = {"one slot": "sync", "two slots": "async"}
    return memory_svg(
        {name: measured[mode]["memory_used_bytes"] for name, mode in modes.items()}
    )


FIGURES: dict[str, Callable[[], str]] = {
    "one_slot.svg": _right_and_wrong,
    "two_slots.svg": _one_and_two,
    "slot_memory.svg": _memory,
}
