"""The expected figures of notebooks 09 and 10."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest

from cbasync.config import CarryOverFamily
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.event_log import EventLog
from cbasync.explore import EVENTS, Settings
from cbasync.figures.parts import WIDTH, key_svg, picture_svg, rect_svg, words_svg
from cbasync.palette import (
    INK,
    PHASE_COLOURS,
    RACE_COLOUR,
    SOFT_INK,
    request_tint,
    text_colour,
)
from cbasync.paper import Drawing, lay_out
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Occurrence, Scheduler
from cbasync.steps import DEMO_CONFIG, RecordingEngine, Step
from cbasync.svg import LEFT, RIGHT, ROW, TOP, timeline_svg
from cbasync.timeline import Timeline
from cbasync.trace import NO_WORK

Lengths = Mapping[str, tuple[int, int]]
"""Tokens of the prompt and new tokens of each request, by its name."""

LENGTHS: Lengths = {"A": (3, 6), "B": (2, 3), "C": (14, 3), "D": (3, 4)}

# ------------------------------------------------------------------ 09: carried tokens


class PromptsFirst(Scheduler):
    """The package's scheduler with another order of the rows: long ones first.

    Attention kernels often like prompts in front. Any order gives the same tokens.
    """

    def arrange(self, occurrences: list[Occurrence]) -> list[Occurrence]:
        return sorted(occurrences, key=lambda occurrence: -occurrence.length)


def record(
    lengths: Lengths = LENGTHS,
    scheduler: type[Scheduler] = Scheduler,
    family: CarryOverFamily = "slot",
) -> list[Step]:
    """The batches of a run of these requests, with all that their slots held.

    A prompt's chunk in front of two decodes, and their token one batch later:

    >>> before, now = record(LENGTHS, PromptsFirst)[1:3]
    >>> before.requests, before.query_lens, before.sampled
    (('C', 'A', 'B'), (6, 1, 1), (13, 46))
    >>> now.arrays["carry_over"], now.read_ids
    ((-1, -1, -1, -1, -1, 0, 1), (39, 40, 41, 42, 43, 13, 46))
    """
    config = replace(DEMO_CONFIG, carry_over=family)
    engine = RecordingEngine(ScriptedRunner(vocab_size=100), config)
    engine.scheduler = scheduler(config)
    for number, (name, (prompt, new)) in enumerate(lengths.items()):
        ids = [(10 * (number + 1) + place) % 100 for place in range(prompt)]
        engine.add_request(ids, SamplingParams(max_tokens=new), request_id=name)
    with engine:
        engine.run()
    return engine.steps


def sampled_rows(step: Step, lengths: Lengths = LENGTHS) -> list[tuple[str, bool]]:
    """The rows of a batch from the first on, and whether each one is sampled.

    One that ends in the middle of its prompt is not:

    >>> sampled_rows(record(LENGTHS, PromptsFirst)[1])
    [('C', False), ('A', True), ('B', True)]
    """
    positions, ends = step.arrays["positions"], accumulate(step.query_lens)
    return [
        (name, positions[end - 1] >= lengths[name][0] - 1)
        for name, end in zip(step.requests, ends, strict=True)
    ]


_CELL, _TALL, _TEXT = 98, 30, 150  # a cell's width and height, where cells begin
_FORMER, _NOW = 20, 172  # where the batch before and this one begin


def carry_svg(
    before: Step,
    now: Step,
    lengths: Lengths = LENGTHS,
    yours: Sequence[int] | None = None,
) -> str:
    """What one batch sampled, and how the next one reads it: arrays above one another.

    `yours` is drawn as another answer for `carry_over`; what differs is red.

    >>> steps = record(LENGTHS, PromptsFirst)
    >>> carry_svg(steps[1], steps[2]).count("stroke-dasharray")  # placeholders
    2
    >>> carry_svg(*steps[2:4], yours=[0, 1]).count(RACE_COLOUR)
    2
    """
    tints = {name: request_tint(n) for n, name in enumerate(lengths)}
    owners = [
        name
        for name, length in zip(now.requests, now.query_lens, strict=True)
        for _ in range(length)
    ]
    grounds = [tints[name] for name in owners]
    carries = now.arrays["carry_over"]
    parts = [*_ARROW_HEAD, *_former(before, lengths, tints), _title(now, _NOW)]
    parts.append(words_svg(WIDTH - 20, _FORMER, "dashed: a placeholder", "end"))
    y = _NOW + 22
    parts += _line("input_ids", now.arrays["input_ids"], y, grounds)
    for place, source in enumerate(carries):
        if source >= 0:
            parts += [_dashed(_x(place), y), _arrow(_x(source), _x(place), y)]
    parts += _line("carry_over", carries, y := y + 36, grounds)
    if yours is not None:
        parts += _compared(carries, yours, y := y + 36)
    parts += _line("the GPU reads", now.read_ids, y := y + 36, grounds)
    parts += _line("request", owners, y := y + 36, grounds)
    return picture_svg(y + 40, parts)


def _x(place: int) -> float:
    return _TEXT + place * _CELL


def _title(step: Step, top: float) -> str:
    return words_svg(8, top, f"batch {step.batch}, slot {'ABCD'[step.slot]}")


def _former(step: Step, lengths: Lengths, tints: Mapping[str, str]) -> list[str]:
    """The rows of the batch before and, in the order of their ranks, its tokens."""
    rows = sampled_rows(step, lengths)
    y = _FORMER + 20
    parts = [_title(step, _FORMER), words_svg(8, y + _TALL / 2, "rows")]
    for row, (name, is_sampled) in enumerate(rows):
        parts.append(rect_svg(_x(2 * row), y, 2 * _CELL - 2, _TALL, tints[name]))
        words = f"{name} {'is sampled' if is_sampled else 'still reads its prompt'}"
        parts.append(words_svg(_x(2 * row + 1), y + _TALL / 2, words, "middle"))
    names = [name for name, is_sampled in rows if is_sampled]
    grounds = [tints[name] for name in names]
    parts += [
        words_svg(_x(rank) + _CELL / 2, y + 44, f"rank {rank}", "middle")
        for rank in range(len(names))
    ]
    return parts + _line("sampled_token_ids", step.sampled, y + 56, grounds)


def _line(
    name: str, values: Sequence[object], y: float, grounds: Sequence[str]
) -> list[str]:
    """One array: its name, and a cell for each value."""
    parts = [words_svg(8, y + _TALL / 2, name)]
    for place, (value, ground) in enumerate(zip(values, grounds, strict=True)):
        parts.append(rect_svg(_x(place), y, _CELL - 2, _TALL, ground))
        text = str(value).replace("-", "−")
        words = words_svg(_x(place) + _CELL / 2, y + _TALL / 2, text, "middle")
        parts.append(f'<g fill="{text_colour(ground)}">{words}</g>')
    return parts


def _dashed(x: float, y: float) -> str:
    """The frame of a placeholder: what is in there is not the token."""
    return (
        f'<rect x="{x + 1.5:.1f}" y="{y + 1.5:.1f}" width="{_CELL - 5}" '
        f'height="{_TALL - 3}" fill="none" stroke="{INK}" stroke-width="1.5" '
        'stroke-dasharray="4 3"/>'
    )


_ARROW_HEAD = [
    '<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" '
    f'markerHeight="7" orient="auto"><path d="M0 0 6 3 0 6z" fill="{INK}"/></marker>'
    "</defs>"
]


def _arrow(x: float, to_x: float, to_y: float) -> str:
    """From a sampled token down to the place where it is read."""
    start = f"M{x + _CELL / 2:.1f} {_FORMER + 76 + _TALL + 2:.1f}"
    return (
        f'<path d="{start}L{to_x + _CELL / 2:.1f} {to_y - 2:.1f}" stroke="{INK}" '
        'stroke-width="1.2" fill="none" marker-end="url(#head)"/>'
    )


def _compared(right: Sequence[int], yours: Sequence[int], y: float) -> list[str]:
    """Another answer, red where it is not the right one; missing places are red too."""
    pairs = list(zip_longest(right, yours, fillvalue=""))
    grounds = ["#ffffff" if a == b else RACE_COLOUR for a, b in pairs]
    return _line("yours", [b for _, b in pairs], y, grounds)


# ------------------------------------------------------------------ 10: the whole loop

STEPS, SEATS = 5, 32  # new tokens of each request, and how many requests there are


def both_engines(steps: int = STEPS, depth: int = 1) -> tuple[Drawing, Drawing]:
    """The same requests in turns and ahead, from the first batch to the last.

    >>> [drawing.timeline.batches() for drawing in both_engines(steps=3)]
    [[0, 1, 2], [0, 1, 2]]
    """
    return _drawn(SyncEngine, "sync", steps, 0), _drawn(
        AsyncEngine, "async", steps, depth
    )


def _drawn(kind: type[Engine], name: str, steps: int, depth: int) -> Drawing:
    config = replace(Settings().config(depth), max_model_len=4 + steps)
    device, log = SimDevice(costs=Settings().costs, order="issue"), EventLog()
    device.observers.append(log)
    with kind(ScriptedRunner(), config, device) as engine:
        for row in range(SEATS):
            engine.add_request([row, 1, 2, 3], SamplingParams(max_tokens=steps))
        engine.run()
    spans = [replace(span, work=NO_WORK) for span in engine.timeline.spans]
    arrows = [arrow for arrow in log.arrows if arrow.edge in EVENTS]
    # Without a note: how long the second one takes is for the reader to predict.
    return Drawing(Timeline(name, spans), arrows)


def stages_ms(timeline: Timeline, depth: int = 1) -> dict[str, tuple[float, float]]:
    """From when to when a run starts cold, is steady, and drains.

    Cold until `depth + 1` batches are on their way; it drains from the last one on.

    >>> stages_ms(both_engines()[1].timeline)
    {'cold start': (0.0, 16.0), 'steady': (16.0, 106.0), 'drain': (106.0, 154.0)}
    """
    prepared = [s.end_us for s in timeline.lane("cpu") if s.phase == "prepare"]
    cuts_us = [timeline.start_us, prepared[depth], prepared[-1], timeline.end_us]
    cuts = [(cut - timeline.start_us) / 1000 for cut in cuts_us]
    names = ("cold start", "steady", "drain")
    return dict(zip(names, pairwise(cuts), strict=True))


def calls_of(timeline: Timeline) -> list[str]:
    """What the host called in a run: it launches what it has prepared.

    >>> calls_of(both_engines(steps=3)[1].timeline)
    ['launch 0', 'launch 1', 'collect 0', 'launch 2', 'collect 1', 'collect 2']
    """
    words = {"prepare": "launch", "update": "collect"}
    spans = [span for span in timeline.lane("cpu") if span.phase in words]
    return [f"{words[span.phase]} {span.batch}" for span in spans]


def calls_svg(runs: Mapping[str, Sequence[str]]) -> str:
    """What the host called, one line a run: `launch 3` is a box with a 3.

    >>> picture = calls_svg({"yours": ["launch 0", "collect 0"]})
    >>> [picture.count(PHASE_COLOURS[phase]) for phase in ("prepare", "update")]
    [2, 2]
    """
    colours = {"launch": PHASE_COLOURS["prepare"], "collect": PHASE_COLOURS["update"]}
    left = 125  # room for the names of the lines
    cell = min(60.0, (WIDTH - left - 10) / max(map(len, runs.values())))
    parts = [
        *key_svg(left, colours["launch"], "launch"),
        *key_svg(left + 110, colours["collect"], "collect"),
    ]
    for line, (name, calls) in enumerate(runs.items()):
        y = 44 + 36 * line
        parts.append(words_svg(8, y + 14, name))
        for place, call in enumerate(calls):
            word, _, batch = call.partition(" ")
            x = left + place * cell
            parts.append(rect_svg(x, y, cell - 3, 28, colours.get(word, RACE_COLOUR)))
            parts.append(words_svg(x + cell / 2, y + 14, batch, "middle"))
    return picture_svg(54 + 36 * len(runs), parts)


def _async_engine() -> str:
    """Both timelines on one axis; below the second one, its three stages."""
    drawings = both_engines()
    paper = lay_out(drawings)
    per_ms = (WIDTH - LEFT - RIGHT) / paper.end_ms
    y = TOP + (paper.rows - 1) * ROW
    parts = []
    for name, (start, end) in stages_ms(drawings[1].timeline).items():
        x, to_x = LEFT + start * per_ms + 1, LEFT + end * per_ms - 1
        path = f"M{x:.1f} {y - 8:.1f}v8H{to_x:.1f}v-8"
        parts.append(f'<path d="{path}" stroke="{SOFT_INK}" fill="none"/>')
        parts.append(words_svg((x + to_x) / 2, y + 12, name, "middle"))
    picture = timeline_svg(*drawings)
    return picture.replace("</svg>", "\n".join([*parts, "</svg>"]))


def _carry_over() -> str:
    before, now = record(LENGTHS, PromptsFirst)[1:3]
    return carry_svg(before, now)


FIGURES: dict[str, Callable[[], str]] = {
    "carry_over.svg": _carry_over,
    "async_engine.svg": _async_engine,
}
