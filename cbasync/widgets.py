"""Sliders: a thin layer over pure functions that tests call without a browser.

Where the widgets or plotly are missing, a static picture and one line of advice take
their place.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cbasync.explore import EVENTS, PRESETS, Exploration, Settings, explore
from cbasync.palette import PHASE_COLOURS
from cbasync.plot import Spec, round_up, timeline_spec
from cbasync.step_table import step_html
from cbasync.steps import Step, record_steps
from cbasync.svg import timeline_svg

SHOWN_BATCHES = 4  # that the axis shows at first; the rest is a drag away
DRAWN_BATCHES = 40  # more would only be slow; the numbers are those of all
ADVICE = (
    "Sliders need ipywidgets, anywidget and plotly: pip install 'cbasync[notebook]', "
    "then restart the kernel."
)

# name -> words, least, most, step; a whole number where the step is one
SLIDERS: dict[str, tuple[str, float, float, float]] = {
    "batch_size": ("batch size", 1, 64, 1),
    "num_requests": ("requests", 1, 64, 1),
    "depth": ("depth", 0, 3, 1),
    "num_slots": ("slots", 1, 4, 1),
    "schedule_ms": ("schedule, ms", 0.0, 20.0, 0.1),
    "prepare_ms": ("prepare, ms", 0.0, 40.0, 0.1),
    "update_ms": ("update, ms", 0.0, 20.0, 0.1),
    "compute_ms": ("compute, ms", 0.5, 60.0, 0.5),
    "transfer_ms": ("each copy, ms", 0.0, 20.0, 0.1),
}

FIRST = ("batch_size", "prepare_ms", "compute_ms", "depth")  # above the figure


def draw(settings: Settings) -> tuple[Spec, str]:
    """The explorer's figure and its sentence for one place of the sliders.

    >>> spec, verdict = draw(Settings())
    >>> len(spec["data"]), verdict[:33]
    (10, 'Sync: the GPU is idle 30 % of the')
    """
    result = explore(settings)
    spec = timeline_spec(
        *result.drawings, max_batches=DRAWN_BATCHES, end_ms=shown_ms(result)
    )
    return spec, result.verdict()


def shown_ms(result: Exploration) -> float:
    """How far the time axis goes: the first batches of the slower run.

    Rounded up, so that it stays where it is while a slider moves a little.
    """
    ends = []
    for run in (result.sync, result.overlapped):
        compute = run.timeline.lane("compute")[:SHOWN_BATCHES]
        if compute:
            ends.append(compute[-1].end_us - run.timeline.start_us)
    return round_up(1.06 * max(ends, default=1000.0) / 1000)


class Static:
    """What stands in for a widget: a picture, and how to get the real thing."""

    def __init__(self, picture: str, advice: str = ADVICE) -> None:
        self.picture, self.advice = picture, advice

    def _repr_html_(self) -> str:
        return f"{self.picture}<p>{html.escape(self.advice)}</p>"

    def __repr__(self) -> str:
        return self.advice


def explorer(settings: Settings = PRESETS["round figures"]) -> Any:
    """The timeline explorer, to be the last line of a cell."""
    try:
        made = Explorer(settings)
        _soon(made.settle)
        return made.widget
    except (ImportError, RuntimeError):
        pictures = explore(settings).drawings
        return Static(timeline_svg(*pictures, max_batches=SHOWN_BATCHES))


def _soon(action: Callable[[], None]) -> None:
    """Call when the widget is on the page; nothing to do where there is no kernel.

    Plotly measures its place before the widget has one, and nobody tells it later.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    for delay_s in (0.5, 2.0):
        loop.call_later(delay_s, action)


class Explorer:
    """Sliders around one figure. It is updated in place, and the last value wins.

    While a redraw runs the browser keeps only the newest place of a slider, so a
    fast drag never leaves a queue behind.
    """

    def __init__(self, settings: Settings = PRESETS["round figures"]) -> None:
        import ipywidgets
        from plotly.graph_objects import FigureWidget

        self.default = settings
        self.num_redraws = 0
        self._quiet = False
        spec, verdict = draw(settings)
        self.figure = FigureWidget(spec)  # with its data: a later one may come up empty
        self.figure._config = {"responsive": True, "displaylogo": False}
        self.verdict = ipywidgets.HTML(_sentence(verdict))
        self.sliders = {name: _slider(name, settings) for name in SLIDERS}
        self.events = {
            name: ipywidgets.Checkbox(
                value=name not in settings.events_off,
                description=name,
                indent=False,
                layout={"width": "auto", "margin": "0 14px 0 0"},
            )
            for name in EVENTS
        }
        self.preset = ipywidgets.Dropdown(
            options=list(PRESETS), description="start from", layout={"width": "300px"}
        )
        for control in (*self.sliders.values(), *self.events.values()):
            control.observe(self._changed, names="value")
        self.preset.observe(self._start_from_preset, names="value")
        first, second = self._controls(ipywidgets)
        parts = [first, self.verdict, self.figure, second]
        self.widget = ipywidgets.VBox(parts)

    def _controls(self, ipywidgets: Any) -> tuple[Any, Any]:
        """What to move first, above the figure, and what else there is, below it."""
        wrap = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}
        hint = ipywidgets.HTML("<i>in brackets: where each slider starts</i>")
        events = ipywidgets.HTML("events of the async run:&nbsp;")
        above = [self.sliders[name] for name in FIRST]
        below = [s for name, s in self.sliders.items() if name not in FIRST]
        first = [
            ipywidgets.HBox([self.preset, hint], layout=wrap),
            ipywidgets.HBox(above, layout=wrap),
        ]
        second = [
            ipywidgets.HBox(below, layout=wrap),
            ipywidgets.HBox([events, *self.events.values()], layout=wrap),
        ]
        return ipywidgets.VBox(first), ipywidgets.VBox(second)

    @property
    def settings(self) -> Settings:
        """Where the sliders stand."""
        values = {name: slider.value for name, slider in self.sliders.items()}
        off = frozenset(name for name, box in self.events.items() if not box.value)
        return replace(self.default, **values, events_off=off)

    def move_to(self, settings: Settings) -> None:
        """Put all sliders somewhere else, and redraw once."""
        self._quiet = True
        try:
            for name, slider in self.sliders.items():
                slider.value = getattr(settings, name)
            for name, box in self.events.items():
                box.value = name not in settings.events_off
        finally:
            self._quiet = False
        self.redraw()

    def redraw(self) -> None:
        """Bring the figure in line with the sliders, in one message."""
        spec, verdict = draw(self.settings)
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, spec["data"], strict=True):
                _update(trace, new)
            _update_layout(self.figure.layout, spec["layout"])
        self.verdict.value = _sentence(verdict)
        self.num_redraws += 1

    def settle(self) -> None:
        """Let the figure take the width that its place on the page has by now."""
        self.figure.layout.margin.r = 13 if self.figure.layout.margin.r == 12 else 12

    def _changed(self, change: Any) -> None:
        if self._quiet:
            return
        if change.owner is self.sliders["depth"]:
            # A ring of the right size; who wants the race takes a slot away afterwards.
            self._quiet = True
            self.sliders["num_slots"].value = change.new + 1
            self._quiet = False
        self.redraw()

    def _start_from_preset(self, change: Any) -> None:
        self.move_to(PRESETS[change.new])


# Of a trace only these change with the sliders.
_CHANGING = ("base", "x", "y", "text", "customdata")


def _update(trace: Any, new: Spec) -> None:
    for name in _CHANGING:
        if name in new:
            trace[name] = new[name]
    if trace.type == "bar":
        trace.textfont.color = new["textfont"]["color"]
        if "pattern" in new["marker"]:
            trace.marker.pattern.fgcolor = new["marker"]["pattern"]["fgcolor"]
        else:
            trace.marker.color = new["marker"]["color"]
    elif "symbol" in new.get("marker", {}):
        trace.marker.symbol = new["marker"]["symbol"]
        trace.marker.size = new["marker"]["size"]


def _update_layout(layout: Any, new: Spec) -> None:
    layout.annotations = new["annotations"]
    layout.height = new["height"]
    layout.xaxis.range = new["xaxis"]["range"]
    layout.xaxis.title.text = new["xaxis"]["title"]["text"]
    for name in ("range", "tickvals", "ticktext"):
        layout.yaxis[name] = new["yaxis"][name]


def _slider(name: str, settings: Settings) -> Any:
    import ipywidgets

    words, least, most, step = SLIDERS[name]
    value = getattr(settings, name)
    kind = ipywidgets.IntSlider if step == 1 else ipywidgets.FloatSlider
    phase = name.removesuffix("_ms")
    colour = PHASE_COLOURS.get("h2d" if phase == "transfer" else phase)
    return kind(
        value=value,
        min=least,
        max=most,
        step=step,
        description=f"{words} ({value:g})",
        style={"description_width": "128px", "handle_color": colour},
        layout={"width": "380px"},
    )


def _sentence(verdict: str) -> str:
    return (
        '<div style="font-size:15px;line-height:1.45;max-width:1000px;'
        f'padding:6px 0">{html.escape(verdict)}</div>'
    )


# ------------------------------------------------------------------ batch by batch


def stepper(steps: Sequence[Step] | None = None) -> Any:
    """A slider over the batches of a run: both slots, carry-over, block tables."""
    steps = record_steps() if steps is None else steps
    if not steps:
        raise ValueError("no step given, at least 1 is needed: record a run first")
    try:
        return Stepper(steps).widget
    except ImportError:
        return Static(step_html(steps, min(2, len(steps) - 1)))


class Stepper:
    """One slider, one table; the table is a pure function of the slider."""

    def __init__(self, steps: Sequence[Step]) -> None:
        import ipywidgets

        self.steps = steps
        self.slider = ipywidgets.IntSlider(
            value=0, min=0, max=len(steps) - 1, description="batch"
        )
        self.table = ipywidgets.HTML(step_html(steps, 0))
        self.slider.observe(self._changed, names="value")
        self.widget = ipywidgets.VBox([self.slider, self.table])

    def _changed(self, change: Any) -> None:
        self.table.value = step_html(self.steps, change.new)
