"""Figures: exact data of small timelines, colours, long runs, files."""

from __future__ import annotations

import importlib.util
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from cbasync.charts import (
    activity_spec,
    block_map_spec,
    composition_spec,
    gain_spec,
    ladder_spec,
)
from cbasync.devices.access import Access
from cbasync.devices.costs import ARTICLE
from cbasync.devices.races import RaceDetector
from cbasync.event_log import Arrow, EventLog, Named, Point
from cbasync.explore import PRESETS, explore
from cbasync.palette import CAUSE_WORDS, PHASE_COLOURS, cause_colour, shade
from cbasync.paper import MAX_BATCHES, RUN_ROWS, Drawing, lay_out
from cbasync.plot import figure, save, timeline_spec
from cbasync.simulate import simulate
from cbasync.steps import record_steps
from cbasync.svg import timeline_svg
from cbasync.timeline import CAUSES, PHASES, Span, Timeline
from cbasync.trace import Work

TRACES = [*PHASES, "GPU idle", "how long, and mostly for what", "event", "race"]
needs_plotly = pytest.mark.skipif(
    importlib.util.find_spec("plotly") is None, reason="needs the notebook extra"
)


def turn(batch: int, start_ms: float, slot: int = 0) -> list[Span]:
    """One step in turns: prepare 3, h2d 1, compute 8, d2h 1, update 2 ms."""
    parts = (
        ("cpu", "prepare", 0, 3),
        ("h2d", "h2d", 3, 4),
        ("compute", "compute", 4, 12),
        ("d2h", "d2h", 12, 13),
        ("cpu", "update", 13, 15),
    )
    return [
        Span(
            lane,
            phase,
            batch,
            slot,
            1000 * (start_ms + start),
            1000 * (start_ms + end),
            Work(2, 5) if phase == "prepare" else Work(),
        )
        for lane, phase, start, end in parts
    ]


def in_turns(batches: int = 2) -> Timeline:
    spans = [s for b in range(batches) for s in turn(b, 15 * b + 100, slot=b % 2)]
    return Timeline("sync", spans)


def traces(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in spec["data"]}


# -- the timeline figure ---------------------------------------------------------------


def test_figure_has_exactly_these_bars() -> None:
    found = traces(timeline_spec(in_turns()))
    assert list(found) == TRACES
    compute = found["compute"]
    assert (compute["base"], compute["x"]) == ([4, 19], [8, 8])
    assert compute["y"] == [3, 3]
    assert compute["text"] == ["0A", "1B"]
    blue = PHASE_COLOURS["compute"]
    assert compute["marker"]["color"] == [shade(blue, 0), shade(blue, 1)]
    assert (found["update"]["base"], found["update"]["y"]) == ([13, 28], [1, 1])
    assert found["schedule"]["x"] == []


def test_idle_time_is_hatched_in_the_colour_of_its_cause() -> None:
    idle = traces(timeline_spec(in_turns()))["GPU idle"]
    assert (idle["base"], idle["x"]) == ([12, 13, 15, 18], [1, 2, 3, 1])
    assert idle["marker"]["pattern"]["fgcolor"] == [
        cause_colour(cause) for cause in ("sync", "update", "prepare", "h2d")
    ]
    assert idle["marker"]["pattern"]["shape"] == "/"
    assert "waits for prepare" in idle["customdata"][2]
    # Hatching is kept for one thing.
    bars = [t for t in timeline_spec(in_turns())["data"] if t["type"] == "bar"]
    assert [t["name"] for t in bars if "pattern" in t["marker"]] == ["GPU idle"]


def test_each_gap_says_how_long_and_mostly_for_what() -> None:
    labels = traces(timeline_spec(in_turns(3)))["how long, and mostly for what"]
    assert labels["text"] == ["7 ms<br>prepare …", "7 ms<br>prepare …"]
    assert labels["x"] == [15.5, 30.5]


def test_hover_has_the_numbers() -> None:
    prepare = traces(timeline_spec(in_turns()))["prepare"]["customdata"][1]
    assert prepare == (
        "<b>prepare of batch 1 (slot B)</b><br>3.000 ms, from 15.000 to 18.000"
        "<br>2 requests, 5 tokens"
    )


def test_runs_stand_above_one_another_on_one_axis() -> None:
    late = Timeline("late", turn(0, 900))
    spec = timeline_spec(in_turns(), late)
    compute = traces(spec)["compute"]
    assert compute["base"] == [4, 19, 4]  # each from its own start
    assert compute["y"] == [3, 3, RUN_ROWS + 3]
    assert spec["layout"]["xaxis"]["range"] == [0, 30 * 1.01]
    names = [note["text"] for note in spec["layout"]["annotations"]]
    assert names == [
        "<b>sync: GPU active 69.6 %</b>",
        "<b>late: GPU active 100 %</b>",
    ]
    lanes = spec["layout"]["yaxis"]["ticktext"]
    assert lanes == ["cpu", "h2d", "gpu", "d2h", "idle", "cpu", "h2d", "gpu", "d2h"]


def test_nothing_is_never_called_full() -> None:
    spans = [
        Span("compute", "compute", 0, 0, 0, 99_999),
        Span("compute", "compute", 1, 0, 100_000, 200_000),
    ]
    spec = timeline_spec(Timeline("run", spans))
    assert "99.9 %" in spec["layout"]["annotations"][0]["text"]


def test_empty_timeline_is_an_empty_figure() -> None:
    spec = timeline_spec(Timeline("nothing"))
    assert all(trace["x"] == [] for trace in spec["data"])
    with pytest.raises(ValueError, match="no timeline given"):
        timeline_spec()
    with pytest.raises(ValueError, match="max_batches is 0"):
        timeline_spec(in_turns(), max_batches=0)


# -- arrows and races ------------------------------------------------------------------


def test_arrow_goes_from_record_to_wait() -> None:
    arrow = Arrow("h2d_done", Point("h2d", 1), Point("compute", 1))
    gone = Arrow("h2d_done", Point("h2d", 7), Point("compute", 7))
    lines = traces(timeline_spec(Drawing(in_turns(), [arrow, gone])))["event"]
    assert lines["x"] == [19, 19, None]
    assert lines["y"] == [2, 3, None]
    assert lines["customdata"][0].startswith("<b>h2d_done</b><br>h2d of batch 1")


def test_event_log_keeps_cuda_s_rules() -> None:
    log, event = EventLog(), Named("compute_done")
    log.on_wait("d2h", event)  # never recorded: orders nothing
    log.on_launch("compute", Access("compute", 0))
    log.on_record("compute", event)
    log.on_wait("h2d", event)  # keeps to this record ...
    log.on_launch("compute", Access("compute", 1))
    log.on_record("compute", event)  # ... although this one replaces it
    log.on_launch("h2d", Access("h2d", 2))
    log.on_synchronize(event)
    log.on_host(Access("update", 1))
    log.on_host(Access("schedule", 2))
    assert log.arrows == [
        Arrow("slot_reuse", Point("compute", 0), Point("h2d", 2)),
        Arrow("compute_done", Point("compute", 1), Point("update", 1)),
    ]


def test_every_batch_of_the_engine_has_its_chain_of_events() -> None:
    run = explore(PRESETS["round figures"]).overlapped
    for batch in run.timeline.batches():
        chain = [("h2d", "compute"), ("compute", "d2h"), ("d2h", "update")]
        for edge, (source, target) in zip(
            ("h2d_done", "compute_done", "d2h_done"), chain, strict=True
        ):
            arrow = Arrow(edge, Point(source, batch), Point(target, batch))
            assert arrow in run.arrows


def test_race_is_marked_where_the_second_access_is() -> None:
    detector, slot = RaceDetector(), ("slot A x", "slot A y")
    detector.on_launch("h2d", Access("h2d", 1, 0, tuple, lambda: slot))
    detector.on_launch("compute", Access("compute", 1, 0, lambda: slot, tuple))
    marks = traces(timeline_spec(Drawing(in_turns(), races=detector.races)))["race"]
    assert (marks["x"], marks["y"]) == ([19], [3])  # one mark for both arrays
    assert "race: no h2d_done" in marks["customdata"][0]
    assert "and 1 more" in marks["customdata"][0]


# -- colours ---------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def as_seen(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return tuple(sum(m * c for m, c in zip(row, rgb, strict=True)) for row in matrix)


# Machado, Oliveira and Fernandes (2009), severity 1.
BLINDNESS = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


@pytest.mark.parametrize("kind", BLINDNESS)
def test_phases_are_told_apart_by_colour_blind_readers(kind: str) -> None:
    seen = [as_seen(PHASE_COLOURS[phase], BLINDNESS[kind]) for phase in PHASES]
    for number, one in enumerate(seen):
        for other in seen[:number]:
            distance = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
            assert distance > 30


def test_every_phase_and_cause_has_one_colour() -> None:
    assert list(PHASE_COLOURS) == list(PHASES)
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)
    assert set(CAUSE_WORDS) == set(CAUSES)
    for phase in PHASES:
        shades = [luminance(shade(PHASE_COLOURS[phase], slot)) for slot in range(4)]
        assert len(set(shades)) == 4


# -- long runs -------------------------------------------------------------------------


def test_long_run_is_drawn_in_part_and_says_so() -> None:
    spec = timeline_spec(in_turns(1000))
    assert len(traces(spec)["compute"]["x"]) == MAX_BATCHES
    words = spec["layout"]["xaxis"]["title"]["text"]
    assert "drawn: batches 0 to 199 of 1000" in words
    assert "69" not in words
    short = timeline_spec(in_turns(MAX_BATCHES))
    assert short["layout"]["xaxis"]["title"]["text"] == "ms"


def test_window_of_a_long_run_starts_where_it_is_asked_to() -> None:
    spec = timeline_spec(in_turns(1000), first_batch=500, max_batches=2)
    compute = traces(spec)["compute"]
    assert compute["text"][0] == "500A"
    assert compute["base"] == [4, 19]
    # All that is waited for before 501, and what is in sight of it before 500.
    assert traces(spec)["GPU idle"]["x"] == [3, 1, 1, 2, 3, 1]


def test_no_idle_time_is_drawn_behind_the_last_batch_of_a_cut_run() -> None:
    spec = traces(timeline_spec(in_turns(1000), max_batches=3))
    idle, compute = spec["GPU idle"], spec["compute"]
    assert len(idle["base"]) == 2 * 4
    assert max(idle["base"]) < max(compute["base"])


def test_trace_without_batches_is_cut_by_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbasync.paper.MAX_BARS", 10)
    spans = [Span("compute", "compute", -1, -1, 2 * n, 2 * n + 1) for n in range(50)]
    paper = lay_out([Drawing(Timeline("kernels", spans))])
    assert len([bar for bar in paper.bars if bar.kind == "compute"]) == 10
    assert paper.cut.startswith("drawn: the first 10 of 50 bars")


def test_activity_of_a_long_run_leaves_nothing_out() -> None:
    run = simulate(ARTICLE, steps=300, batch=2).sync.timeline
    bins = 37
    spec = activity_spec(run, bins=bins)
    width_us = run.gpu_window_us / bins
    totals = {t["name"]: sum(t["y"]) / 100 * width_us for t in spec["data"]}
    assert totals.pop("busy") == pytest.approx(run.gpu_busy_us)
    causes = {f"idle: {c}": us for c, us in run.idle_by_cause().items() if us}
    assert totals == pytest.approx(causes)
    with pytest.raises(ValueError, match="bins is 0"):
        activity_spec(run, bins=0)


# -- other charts ----------------------------------------------------------------------


def test_composition_counts_tokens_of_each_batch() -> None:
    spec = composition_spec(in_turns(3))
    assert [trace["x"] for trace in spec["data"]] == [[0, 1, 2]] * 2
    assert [trace["y"] for trace in spec["data"]] == [[2, 2, 2], [3, 3, 3]]


def test_block_map_shows_owners_over_time() -> None:
    steps = record_steps([(2, 2), (5, 2)])
    (chart,) = block_map_spec(steps)["data"]
    assert chart["x"] == [step.batch for step in steps]
    assert [row[0] for row in chart["text"]][:4] == ["r0", "r1", "r1", ""]
    assert chart["z"][0][0] == 1
    assert block_map_spec([])["data"][0]["z"] == []


def test_gain_chart_reads_a_host_delay_result() -> None:
    points = [
        {"delay_ms": 0, "gain_measured": 0.1, "gain_predicted": 0.11},
        {"delay_ms": 4, "gain_measured": 0.3, "gain_predicted": 0.29},
    ]
    spec = gain_spec({"experiment": "host-delay", "gpu": "X", "points": points})
    assert [trace["x"] for trace in spec["data"]] == [[0, 4], [0, 4]]
    assert spec["data"][0]["y"] == [10, 30]
    assert spec["data"][1]["name"] == "predicted (virtual device)"
    with pytest.raises(ValueError, match="experiment 'ladder'"):
        gain_spec({"experiment": "ladder"})


def test_ladder_chart_marks_wrong_tokens() -> None:
    steps = [
        {"step": "sync", "total_s": 4.0, "gpu_active": 0.7, "wrong_tokens": 0.0},
        {"step": "one slot", "total_s": 3.0, "gpu_active": 0.9, "wrong_tokens": 0.5},
    ]
    result = {"experiment": "ladder", "gpu": "X", "model": "m", "steps": steps}
    (bars,) = ladder_spec(result)["data"]
    assert bars["y"] == ["one slot", "sync"]  # plotly counts from below
    assert bars["text"][0] == "3.00 s, active 90.0 %, 50 % wrong"
    assert bars["marker"]["color"][0] != bars["marker"]["color"][1]


# -- files -----------------------------------------------------------------------------


def test_svg_is_well_formed_and_shows_the_same() -> None:
    result = explore(PRESETS["no h2d_done: a race"])
    text = timeline_svg(*result.drawings, max_batches=3)
    root = ElementTree.fromstring(text)
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("compute of batch 1 (slot B)") for title in titles)
    assert any(title.startswith("GPU idle: waits for prepare") for title in titles)
    assert any(title.startswith("race: no h2d_done") for title in titles)
    assert "drawn: batches 0 to 2 of 8" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_svg_escapes_names() -> None:
    run = Timeline("<a & b>", turn(0, 0))
    assert "&lt;a &amp; b&gt;" in timeline_svg(run)
    ElementTree.fromstring(timeline_svg(run))


@needs_plotly
def test_every_figure_is_one_that_plotly_takes() -> None:
    result = explore(PRESETS["one slot: a race"])
    steps = record_steps()
    for spec in (
        timeline_spec(*result.drawings),
        timeline_spec(Timeline("nothing")),
        activity_spec(result.sync.timeline),
        composition_spec(result.sync.timeline),
        block_map_spec(steps),
    ):
        assert len(figure(spec).data) == len(spec["data"])


@needs_plotly
def test_html_needs_no_network(tmp_path: Path) -> None:
    save(timeline_spec(in_turns()), tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=.https?:", text)
    assert len(text) > 1_000_000  # plotly itself is inside
    with pytest.raises(ValueError, match=r"\.html, \.svg or \.png"):
        save(timeline_spec(in_turns()), tmp_path / "run.bmp")


@needs_plotly
@pytest.mark.browser
@pytest.mark.skipif(
    importlib.util.find_spec("kaleido") is None
    or not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    reason="needs kaleido and a Chromium",
)
def test_svg_and_png_are_written(tmp_path: Path) -> None:
    for name, start in (("run.svg", b"<svg"), ("run.png", b"\x89PNG")):
        save(timeline_spec(in_turns()), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
