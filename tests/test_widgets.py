"""The explorer and the stepper, driven without a browser."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cbasync import checks, widgets
from cbasync.explore import EVENTS, PRESETS, Settings, explore
from cbasync.step_table import step_html
from cbasync.steps import record_steps
from cbasync.timeline_diff import diff

pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget")


def bars(explorer: widgets.Explorer) -> list[tuple[float, ...]]:
    return [tuple(trace.x) for trace in explorer.figure.data if trace.type == "bar"]


# -- pure functions --------------------------------------------------------------------


def test_idle_time_of_the_round_figures() -> None:
    result = explore(PRESETS["round figures"])
    sync, overlapped = result.sync.timeline, result.overlapped.timeline
    assert sync.gpu_window_us == pytest.approx(8 * 28_000 + 7 * 14_000)
    causes = {cause: us / 7 for cause, us in sync.idle_by_cause().items() if us}
    assert causes == pytest.approx(
        {"schedule": 2000, "prepare": 6000, "update": 2000, "h2d": 2000, "sync": 2000}
    )
    assert overlapped.idle_us == 0
    assert result.num_wrong == 0
    assert result.overlapped.races == ()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_idle_causes_add_up_wherever_the_sliders_stand(
    name: str, batch_size: int
) -> None:
    result = explore(replace(PRESETS[name], batch_size=batch_size, num_requests=9))
    for run in (result.sync, result.overlapped):
        causes = run.timeline.idle_by_cause()
        assert sum(causes.values()) == pytest.approx(run.timeline.idle_us, abs=1e-3)


def test_batch_size_changes_time_and_number_of_batches() -> None:
    small, large = (
        explore(Settings(batch_size=b, num_requests=32)).sync.timeline for b in (8, 32)
    )
    assert len(small.batches()) == 4 * len(large.batches())
    assert small.lane("compute")[0].duration_us < large.lane("compute")[0].duration_us


def test_host_time_is_hidden_up_to_compute_time() -> None:
    # Copy back, update, schedule, prepare, copy in: together at most 28 ms.
    for prepare_ms in (0.0, 10.0, 20.0):
        run = explore(Settings(prepare_ms=prepare_ms)).overlapped.timeline
        assert run.idle_us == pytest.approx(0, abs=1e-6)
    late = explore(Settings(prepare_ms=20.5)).overlapped.timeline
    assert late.idle_us > 0


@pytest.mark.parametrize("event", EVENTS)
def test_event_off_is_a_race_with_its_name(event: str) -> None:
    result = explore(Settings(events_off=frozenset({event}), transfer_ms=5.0))
    assert {race.edge for race in result.overlapped.races} == {event}
    assert f"Race, nothing orders {event}" in result.verdict()
    assert result.num_wrong > 0


def test_one_slot_is_a_race_and_two_are_none() -> None:
    assert explore(Settings(num_slots=1)).overlapped.races
    assert not explore(Settings(num_slots=2)).overlapped.races
    assert not explore(Settings(depth=2, num_slots=3)).overlapped.races
    assert explore(Settings(depth=2, num_slots=2)).overlapped.races


def test_verdict_says_what_is_seen() -> None:
    words = explore(PRESETS["round figures"]).verdict()
    assert "idle 30 % of the time" in words
    assert "waits 14.0 ms (6.0 for prepare" in words
    assert "straight to the next: 29 % less" in words
    assert "takes turns too" in explore(Settings(depth=0, num_slots=1)).verdict()
    assert "Async still waits" in explore(PRESETS["slow host"]).verdict()
    free = Settings(schedule_ms=0, prepare_ms=0, update_ms=0, transfer_ms=0)
    assert "the GPU never waits" in explore(free).verdict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, at least 1"),
        ({"num_slots": 0}, "num_slots is 0, at least 1"),
        ({"prepare_ms": -1.0}, "prepare_ms is -1.0, a time is finite"),
        ({"compute_ms": float("inf")}, "compute_ms is inf, a time is finite"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_number_of_batches_stays_within_bounds() -> None:
    for batch_size in (1, 2, 3, 64):
        settings = Settings(batch_size=batch_size, num_requests=64)
        assert len(explore(settings).sync.timeline.batches()) <= 200


def test_diff_of_both_runs_adds_up() -> None:
    result = explore(PRESETS["round figures"])
    sync, overlapped = result.sync.timeline, result.overlapped.timeline
    change = diff(sync, overlapped)
    assert change.change_us == pytest.approx(overlapped.total_us - sync.total_us)
    parts = {part.name: part.change_us for part in change.parts}
    assert parts["GPU busy"] == 0
    assert parts["idle: prepare"] == pytest.approx(-42_000)
    assert [row["change_us"] for row in change.records()] == list(parts.values())
    total = str(change).splitlines()[-1].split()
    assert total == ["total", "336.000", "238.000", "-98.000"]


# -- the explorer ----------------------------------------------------------------------


def test_slider_updates_the_figure_in_place() -> None:
    explorer = widgets.Explorer()
    figure, before = explorer.figure, bars(explorer)
    explorer.sliders["batch_size"].value = 16
    assert explorer.figure is figure
    assert bars(explorer) != before
    spec, verdict = widgets.draw(replace(explorer.default, batch_size=16))
    assert bars(explorer) == [tuple(t["x"]) for t in spec["data"] if t["type"] == "bar"]
    assert verdict in explorer.verdict.value
    assert figure.layout.xaxis.range == tuple(spec["layout"]["xaxis"]["range"])
    assert [note.text for note in figure.layout.annotations] == [
        note["text"] for note in spec["layout"]["annotations"]
    ]


def test_last_value_wins_and_there_is_one_figure() -> None:
    explorer = widgets.Explorer()
    for value in (1, 8, 1):
        explorer.sliders["batch_size"].value = value
    spec, _ = widgets.draw(replace(explorer.default, batch_size=1))
    assert len(explorer.figure.data) == len(spec["data"]) == 10
    assert bars(explorer) == [tuple(t["x"]) for t in spec["data"] if t["type"] == "bar"]
    assert explorer.num_redraws == 3


def test_preset_moves_all_sliders_and_redraws_once() -> None:
    explorer = widgets.Explorer()
    explorer.preset.value = "no h2d_done: a race"
    assert explorer.num_redraws == 1
    assert explorer.settings == PRESETS["no h2d_done: a race"]
    assert "Race" in explorer.verdict.value
    assert len(explorer.figure.data[-1].x) > 0
    explorer.preset.value = "round figures"
    assert len(explorer.figure.data[-1].x) == 0


def test_deeper_ring_gets_its_slots() -> None:
    explorer = widgets.Explorer()
    explorer.sliders["depth"].value = 3
    assert explorer.sliders["num_slots"].value == 4
    assert "Race" not in explorer.verdict.value
    explorer.sliders["num_slots"].value = 2
    assert "Race" in explorer.verdict.value


def test_every_end_of_every_slider_is_drawn() -> None:
    explorer = widgets.Explorer(PRESETS["published run, 8B model"])
    for slider in explorer.sliders.values():
        before = slider.value
        for value in (slider.min, slider.max, before):
            slider.value = value
    explorer.move_to(explorer.default)
    assert explorer.settings == explorer.default


def test_every_slider_has_a_marked_default_within_its_range() -> None:
    explorer = widgets.Explorer()
    for name, slider in explorer.sliders.items():
        default = getattr(explorer.default, name)
        assert f"({default:g})" in slider.description
        for settings in PRESETS.values():
            assert slider.min <= getattr(settings, name) <= slider.max


def test_axis_stays_while_a_slider_moves_a_little() -> None:
    ranges = {
        tuple(widgets.draw(Settings(compute_ms=ms))[0]["layout"]["xaxis"]["range"])
        for ms in (28.0, 28.5, 29.0)
    }
    assert len(ranges) == 1


def test_redraw_of_200_batches_takes_little_time() -> None:
    explorer = widgets.Explorer(Settings(batch_size=1, num_requests=64))
    times = []
    for compute_ms in (20.0, 21.0, 22.0, 23.0, 24.0):
        start = time.process_time()  # of this process: a busy machine is no failure
        explorer.sliders["compute_ms"].value = compute_ms
        times.append(time.process_time() - start)
    assert len(explore(explorer.settings).sync.timeline.batches()) == 192
    assert min(times) < 0.2


def test_without_widgets_there_is_a_picture_and_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for shown in (widgets.explorer(), widgets.stepper()):
        assert isinstance(shown, widgets.Static)
        page = shown._repr_html_()
        assert "pip install &#x27;cbasync[notebook]&#x27;" in page
        assert "<svg" in page or "<table" in page
        assert len(repr(shown).splitlines()) == 1


# -- the stepper -----------------------------------------------------------------------


def test_steps_hold_what_the_slots_held() -> None:
    steps = record_steps([(3, 3), (2, 3)])
    first, second = steps[:2]
    assert (first.slot, second.slot) == (0, 1)
    assert first.requests == ("r0", "r1")
    assert first.query_lens == (3, 2)
    assert first.arrays["input_ids"] == first.read_ids == (10, 11, 12, 20, 21)
    assert first.arrays["carry_over"] == (-1,) * 5
    assert second.arrays["input_ids"] == (0, 0)  # placeholders
    assert second.arrays["carry_over"] == (0, 1)
    assert second.read_ids == second.former_sampled == first.sampled
    assert second.arrays["positions"] == (3, 2)
    assert second.block_tables == {"r0": (0,), "r1": (1,)}
    assert second.owners[:3] == ("r0", "r1", "")


def test_stepper_shows_one_step_after_the_other() -> None:
    steps = record_steps()
    stepper = widgets.Stepper(steps)
    assert stepper.table.value == step_html(steps, 0)
    stepper.slider.value = 3
    assert stepper.table.value == step_html(steps, 3)
    assert "placeholders" in stepper.table.value
    assert stepper.slider.max == len(steps) - 1


def test_step_table_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="step is 99, the run has steps 0 to"):
        step_html(record_steps(), 99)
    with pytest.raises(ValueError, match="no step given"):
        widgets.stepper([])


def test_step_table_has_slot_a_before_slot_b() -> None:
    steps = record_steps()
    for index in (1, 2):
        page = step_html(steps, index)
        assert page.index("<b>slot A</b>") < page.index("<b>slot B</b>")
    assert "slot B" not in step_html(steps, 0)


# -- checks of exercises ---------------------------------------------------------------


def gaps_in_order(bars: list[tuple[float, float]]) -> float:
    """Forgets to sort."""
    idle = sum(max(0, b[0] - a[1]) for a, b in pairwise(bars))
    return idle / (bars[-1][1] - bars[0][0])


def gaps_from_zero(bars: list[tuple[float, float]]) -> float:
    """Counts the time before the first bar."""
    bars = sorted(bars)
    idle = sum(max(0, b[0] - a[1]) for a, b in pairwise(bars))
    return idle / max(end for _, end in bars)


def gaps_of_neighbours(bars: list[tuple[float, float]]) -> float:
    """Takes the end of the last bar for the last end."""
    bars = sorted(bars)
    idle = sum(max(0, b[0] - a[1]) for a, b in pairwise(bars))
    return idle / (max(end for _, end in bars) - bars[0][0])


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (lambda bars: 0.5, r"\[\(0, 4\)\]"),
        (gaps_from_zero, r"\[\(2, 4\), \(5, 6\)\]"),
        (gaps_in_order, r"\[\(5, 6\), \(0, 4\)\]"),
        (gaps_of_neighbours, r"\[\(0, 8\), \(1, 2\), \(9, 10\)\]"),
    ],
)
def test_check_shows_the_smallest_failing_case(mistake: Any, case: str) -> None:
    with pytest.raises(AssertionError, match=rf"idle_share\({case}\)\n  expected"):
        checks.idle_share(mistake)


def test_check_of_total_finds_mistakes() -> None:
    for mistake in (
        lambda bars: bars[-1][1] - bars[0][0],
        lambda bars: max(end for _, end in bars),
        lambda bars: sum(end - start for start, end in bars),
    ):
        with pytest.raises(AssertionError, match="expected"):
            checks.total_ms(mistake)
