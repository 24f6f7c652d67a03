"""The expected figure of notebook 12: what running ahead saves, over two numbers."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cbasync.figures.parts import WIDTH, picture_svg, words_svg
from cbasync.palette import GRID, INK, PHASE_COLOURS, SOFT_INK
from cbasync.simulate import PUBLISHED, PUBLISHED_STEPS

RESULTS = Path(__file__).parents[2] / "data" / "results"

# ------------------------------------------------------------------ the rule


def step_ms(
    host_ms: float, gpu_ms: float, copies_ms: float = 0.0, depth: int = 1
) -> float:
    """How long a step takes, from the times of the host, the GPU and both copies.

    A batch goes round: host, copy in, GPU, copy back. So many batches as there are
    slots are on their way at once, but host and GPU see to one at a time:

    >>> [step_ms(10, 28, copies_ms=4, depth=depth) for depth in (0, 1)]
    [42.0, 28]
    >>> [step_ms(10, 10, copies_ms=4, depth=depth) for depth in (0, 1, 2)]
    [24.0, 12.0, 10]
    """
    round_ms = host_ms + copies_ms + gpu_ms
    return max(host_ms, gpu_ms, round_ms / (depth + 1))


def gain(host_ms: float, gpu_ms: float, copies_ms: float = 0.0) -> float:
    """Share of the time that one batch ahead saves; a step takes some time.

    >>> [round(gain(host, gpu), 3) for host, gpu in ((1, 9), (9, 1), (5, 5))]
    [0.1, 0.1, 0.5]
    """
    in_turns_ms = step_ms(host_ms, gpu_ms, copies_ms, depth=0)
    return 1 - step_ms(host_ms, gpu_ms, copies_ms) / in_turns_ms


# ------------------------------------------------------------------ measured machines


class Machine(NamedTuple):
    """Where a machine lies on the map, and the share of the time it really saved."""

    name: str
    host_ms: float
    gpu_ms: float
    saved: float | None = None  # None: nobody has measured it
    is_named_below: bool = False

    @classmethod
    def of_steps(cls, name: str, in_turns_ms: float, ahead_ms: float) -> Machine:
        """A machine whose GPU is the slower one, from its two times of a step.

        One batch ahead such a GPU goes from batch to batch, so a step is what it needs.

        >>> Machine.of_steps("M", 10.0, 8.0)
        Machine(name='M', host_ms=2.0, gpu_ms=8.0, saved=0.2, is_named_below=False)
        """
        saved = round(1 - ahead_ms / in_turns_ms, 6)
        return cls(name, in_turns_ms - ahead_ms, ahead_ms, saved)


def result(name: str, folder: str | Path = RESULTS) -> Any:
    """A recorded result by its name, `ladder` say."""
    return json.loads((Path(folder) / f"{name}.json").read_text())


def published_machine() -> Machine:
    """The machine of the published run: the GPU's share of the run in turns, the rest.

    >>> machine = published_machine()
    >>> f"{machine.host_ms:.2f} {machine.gpu_ms:.2f} {machine.saved:.1%}"
    '8.81 27.89 22.0%'
    """
    sync, ahead = PUBLISHED["sync"], PUBLISHED["async"]
    in_turns_ms = 1000 * sync["total_s"] / PUBLISHED_STEPS
    gpu_ms = in_turns_ms * sync["gpu_active"]
    saved = 1 - ahead["total_s"] / sync["total_s"]
    return Machine("published", in_turns_ms - gpu_ms, gpu_ms, saved)


def delayed_machines(delays: dict[str, Any]) -> list[Machine]:
    """An H200 with host time added to its steps, from a `host-delay` file.

    Where they lie follows from the steps without added time and from what was added.
    """
    first = delays["points"][0]
    still = Machine.of_steps(
        "+0", *(first[mode]["measured_step_ms"] for mode in ("sync", "async"))
    )
    return [
        Machine(
            f"+{point['delay_ms']:g}",
            still.host_ms + point["delay_ms"],
            still.gpu_ms,
            point["gain_measured"],
            is_named_below=True,
        )
        for point in delays["points"]
    ]


def swept_machines(sweep: dict[str, Any]) -> list[Machine]:
    """An H200 with batches and contexts of many sizes, from a `sweep` file."""
    return [
        Machine.of_steps(
            f"batch {point['batch']}, context {point['context']}",
            *(point[mode]["steady_step_ms"] for mode in ("sync", "async")),
        )
        for point in sweep["points"]
    ]


# ------------------------------------------------------------------ the map

HOST_MS, GPU_MS = (0.1, 100.0), (1.0, 300.0)  # from, to
BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4)  # between the bands of the map
OPACITIES = (0.0, 0.1, 0.22, 0.36, 0.52, 0.7, 0.9)
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 66, 48  # margins
CELL = 4  # pixels of one piece of the map
COLOUR = PHASE_COLOURS["compute"]

Rule = Callable[[float, float, float], float]
"""The share of the time saved, from the times of host, GPU and both copies."""


def gain_map_svg(
    machines: Iterable[Machine] = (),
    *,
    rule: Rule = gain,
    copies_ms: float = 0.0,
    caption: str = "",
    height: int = 480,
) -> str:
    """What a rule says for every machine, as a map; a point shows what was measured.

    Map and points have one scale of colours: a point that one cannot tell from the
    ground is one that the rule predicts. A cross is a machine without measurement.

    >>> machines = [Machine("H200", 1.0, 9.0, 0.1), Machine("yours", 2.0, 9.0)]
    >>> picture = gain_map_svg(machines, caption="two machines", height=200)
    >>> picture.count("<circle"), picture.count(">+<"), "two machines" in picture
    (2, 1, True)
    """
    scale = _Scale(height)
    bands = _bands(scale, lambda host_ms, gpu_ms: rule(host_ms, gpu_ms, copies_ms))
    parts = [*_legend(), *bands, *_axes(scale), *_hints(scale)]
    for machine in machines:
        parts += _point(machine, scale)
    if caption:
        parts.append(words_svg(LEFT, 48, html.escape(caption)))
    return picture_svg(height, parts)


class _Scale(NamedTuple):
    """From milliseconds to places in the picture and back, on logarithmic axes."""

    height: int

    @property
    def width_px(self) -> int:
        return WIDTH - LEFT - RIGHT

    @property
    def height_px(self) -> int:
        return self.height - TOP - BOTTOM

    def x(self, host_ms: float) -> float:
        return LEFT + self.width_px * _share(host_ms, HOST_MS)

    def y(self, gpu_ms: float) -> float:
        return TOP + self.height_px * (1 - _share(gpu_ms, GPU_MS))

    def host_ms(self, x: float) -> float:
        return _at((x - LEFT) / self.width_px, HOST_MS)

    def gpu_ms(self, y: float) -> float:
        return _at(1 - (y - TOP) / self.height_px, GPU_MS)


def _share(value: float, limits: tuple[float, float]) -> float:
    """How far along a logarithmic axis; what lies beyond its ends is put there."""
    least, most = limits
    inside = min(max(value, least), most)
    return math.log(inside / least) / math.log(most / least)


def _at(share: float, limits: tuple[float, float]) -> float:
    least, most = limits
    return float(least * (most / least) ** share)


def _band(saved: float) -> int:
    return sum(saved >= bound - 1e-9 for bound in BOUNDS)


def _bands(scale: _Scale, rule: Callable[[float, float], float]) -> list[str]:
    """The ground: one path a band, of pieces as wide as the band is in their row."""
    paths = [""] * len(OPACITIES)
    columns = range(LEFT, LEFT + scale.width_px, CELL)
    for y in range(TOP, TOP + scale.height_px, CELL):
        gpu_ms = scale.gpu_ms(y + CELL / 2)
        saved = [_band(rule(scale.host_ms(x + CELL / 2), gpu_ms)) for x in columns]
        x = LEFT
        for band, cells in groupby(saved):
            width = CELL * len(list(cells))
            paths[band] += f"M{x} {y}h{width}v{CELL}h-{width}z"
            x += width
    return [
        f'<path d="{path}" {_fill(band)} shape-rendering="crispEdges"/>'
        for band, path in enumerate(paths)
        if path and OPACITIES[band]
    ]


def _fill(band: int) -> str:
    return f'fill="{COLOUR}" fill-opacity="{OPACITIES[band]}"'


def _legend() -> list[str]:
    """One box a band, with the share of the time that is saved."""
    edges = [f"{100 * bound:.0f}" for bound in BOUNDS]
    names = [f"under {edges[0]} %"]
    names += [f"{a}–{b} %" for a, b in zip(edges, [*edges[1:], "50"], strict=True)]
    parts, x = [words_svg(LEFT, 21, "time saved:")], LEFT + 84
    for band, name in enumerate(names):
        box = f'x="{x}" y="14" width="18" height="13" stroke="{SOFT_INK}"'
        parts.append(f'<rect {box} stroke-width=".5" {_fill(band)}/>')
        parts.append(words_svg(x + 24, 21, name))
        x += 44 + 8 * len(name)
    return parts


def _axes(scale: _Scale) -> list[str]:
    """Ticks at 1, 2 and 5, their words, and the line where both take equally long."""
    parts = []
    bottom, right = TOP + scale.height_px, LEFT + scale.width_px
    for value in _ticks(*HOST_MS):
        x = scale.x(value)
        parts.append(_line(x, TOP, x, bottom, GRID))
        parts.append(words_svg(x, bottom + 14, f"{value:g}", "middle"))
    for value in _ticks(*GPU_MS):
        y = scale.y(value)
        parts.append(_line(LEFT, y, right, y, GRID))
        parts.append(words_svg(LEFT - 8, y, f"{value:g}", "end"))
    least, most = max(HOST_MS[0], GPU_MS[0]), min(HOST_MS[1], GPU_MS[1])
    ends = (scale.x(least), scale.y(least), scale.x(most), scale.y(most))
    parts.append(_line(*ends, INK, 'stroke-dasharray="6 4"'))
    middle = f'transform="rotate(-90 14 {TOP + scale.height_px / 2:.0f})"'
    words = words_svg(14, TOP + scale.height_px / 2, "GPU, ms a step", "middle")
    parts.append(f"<g {middle}>{words}</g>")
    words = "host, ms a step (both axes are logarithmic)"
    parts.append(words_svg((LEFT + right) / 2, bottom + 34, words, "middle"))
    return parts


def _ticks(least: float, most: float) -> list[float]:
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return [v for v in values if least * 0.999 <= v <= most * 1.001]


def _line(x: float, y: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" {more}/>'


def _hints(scale: _Scale) -> list[str]:
    bottom, right = TOP + scale.height_px, LEFT + scale.width_px
    above = "the GPU is slower: all of the host's work is hidden"
    below = "the host is slower: the GPU's work is hidden"
    return [
        words_svg(LEFT + 10, TOP + 16, above),
        words_svg(right - 10, bottom - 16, below, "end"),
    ]


def _point(machine: Machine, scale: _Scale) -> list[str]:
    x, y = scale.x(machine.host_ms), scale.y(machine.gpu_ms)
    name = html.escape(machine.name)
    label = _label(x, y + (18 if machine.is_named_below else -15), name)
    if machine.saved is None:
        cross = words_svg(x, y, "+", "middle")
        return [f'<g font-size="34" {_HALO}>{cross}</g>', label]
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="6"'
    colour = _fill(_band(machine.saved))
    title = f"<title>{name}: {100 * machine.saved:.1f} % saved</title>"
    return [
        f'<circle {place} fill="#ffffff"/>',
        f'<circle {place} {colour} stroke="{INK}">{title}</circle>',
        label,
    ]


_HALO = 'paint-order="stroke" stroke="#ffffff" stroke-width="3"'  # read on any ground


def _label(x: float, y: float, name: str) -> str:
    """A name in the middle of its place, or left of it where the page ends."""
    words = words_svg(x, y, name, "end" if x > WIDTH - 80 else "middle")
    return f"<g {_HALO}>{words}</g>"


def _map() -> str:
    runs = {name: result(f"published-{name}") for name in ("eager", "compile")}
    steps = {
        f"H200, {name}": [run[mode]["steady_step_ms"] for mode in ("sync", "async")]
        for name, run in runs.items()
    }
    machines: Sequence[Machine] = [
        published_machine(),
        *(Machine.of_steps(name, *times) for name, times in steps.items()),
        *delayed_machines(result("host-delay")),
    ]
    return gain_map_svg(machines)


FIGURES: dict[str, Callable[[], str]] = {"gain_map.svg": _map}
