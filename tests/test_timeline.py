"""Timeline: hand-computed numbers, drawings to the character, files that come back."""

from __future__ import annotations

import gzip
import json
import math
import random
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbasync import timeline as timeline_module
from cbasync.timeline import (
    CAUSES,
    LANES,
    PHASES,
    IdleGap,
    Span,
    Timeline,
    side_by_side,
)

# Of each batch in ms: prepare 3, h2d 1, compute 8, d2h 1, update 2.
BARS = (
    ("cpu", "prepare", 3),
    ("h2d", "h2d", 1),
    ("compute", "compute", 8),
    ("d2h", "d2h", 1),
    ("cpu", "update", 2),
)
SYNC_STARTS = ((0, 3, 4, 12, 13), (15, 18, 19, 27, 28), (30, 33, 34, 42, 43))
ASYNC_STARTS = ((0, 3, 4, 12, 13), (3, 6, 12, 20, 21), (15, 18, 20, 28, 29))

SYNC_TEXT = """\
sync   cpu  P0P..........U0P1P..........U1P2P..........U2
       h2d  ...0..............1..............2...........
       gpu  ....C0CCCCCC.......C1CCCCCC.......C2CCCCCC...
       d2h  ............0..............1..............2..
       gpu busy 24 of 38 ms = 63 %"""
ASYNC_TEXT = """\
async  cpu  P0PP1P.......U0P2P...U1......U2
       h2d  ...0..1...........2............
       gpu  ....C0CCCCCCC1CCCCCCC2CCCCCC...
       d2h  ............0.......1.......2..
       gpu busy 24 of 24 ms = 100 %"""


def run_of(name: str, starts_ms: tuple[tuple[int, ...], ...]) -> Timeline:
    timeline = Timeline(name)
    for batch, starts in enumerate(starts_ms):
        for (lane, phase, length), start in zip(BARS, starts, strict=True):
            end_us = 1000 * (start + length)
            timeline.add(Span(lane, phase, batch, batch % 2, 1000 * start, end_us))
    return timeline


def sync_run(batches: int = 3) -> Timeline:
    starts = tuple(tuple(15 * n + t for t in SYNC_STARTS[0]) for n in range(batches))
    return run_of("sync", starts)


def async_run() -> Timeline:
    return run_of("async", ASYNC_STARTS)


def spans_of(*rows: tuple[str, str, int, float, float]) -> Timeline:
    return Timeline("t", [Span(lane, p, b, -1, s, e) for lane, p, b, s, e in rows])


def pieces(timeline: Timeline) -> list[tuple[Any, ...]]:
    return [tuple(gap) for gap in timeline.idle_gaps()]


def moved(timeline: Timeline, by_us: float) -> Timeline:
    spans = [
        replace(s, start_us=s.start_us + by_us, end_us=s.end_us + by_us)
        for s in timeline.spans
    ]
    return Timeline(timeline.name, spans)


# -- Span ------------------------------------------------------------------------------


def test_span_knows_duration_and_slot_letter() -> None:
    spans = [Span("d2h", "d2h", 4, slot, 2.5, 4.0) for slot in (-1, 0, 1, 2)]
    assert [span.slot_letter for span in spans] == ["", "A", "B", "C"]
    assert spans[0].duration_us == 1.5
    assert Span("cpu", "update", 0, 0, 7, 7).duration_us == 0


@pytest.mark.parametrize(
    ("lane", "phase", "start", "end", "message"),
    [
        ("gpu", "compute", 0, 1, r"lane is 'gpu', .*cpu, h2d, compute, d2h"),
        ("cpu", "sample", 0, 1, r"phase is 'sample', .*schedule, prepare, h2d"),
        ("cpu", "update", 5, 4.5, r"update of batch 3 runs from 5 to 4\.5 us"),
        ("cpu", "update", 0, math.nan, r"runs from 0 to nan us"),
        ("cpu", "update", -math.inf, 0, r"runs from -inf to 0 us"),
        ("cpu", "update", math.inf, math.inf, r"runs from inf to inf us"),
    ],
)
def test_span_refuses_what_cannot_be(
    lane: str, phase: str, start: float, end: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Span(lane, phase, 3, 0, start, end)


# -- the GPU's time --------------------------------------------------------------------


def test_gpu_time_of_the_synchronous_run() -> None:
    sync = sync_run()
    assert (sync.gpu_window_us, sync.gpu_busy_us, sync.idle_us) == (38000, 24000, 14000)
    assert sync.gpu_active == 24 / 38
    assert (sync.start_us, sync.end_us, sync.total_us) == (0, 45000, 45000)


def test_gpu_time_of_the_asynchronous_run() -> None:
    run = async_run()
    assert (run.gpu_window_us, run.idle_us, run.gpu_active) == (24000, 0, 1)
    assert run.total_us == 31000


def test_overlapping_compute_counts_once() -> None:
    run = spans_of(
        ("compute", "compute", 0, 0, 10),
        ("compute", "compute", 1, 2, 4),  # inside the first
        ("compute", "compute", 2, 8, 13),
        ("compute", "compute", 3, 17, 20),
    )
    assert (run.gpu_window_us, run.gpu_busy_us, run.gpu_active) == (20, 16, 0.8)
    assert pieces(run) == [(13, 17, "host", 3)]


def test_nothing_computed_is_not_active() -> None:
    for run in (Timeline(), spans_of(("cpu", "update", 0, 0, 9))):
        assert (run.gpu_active, run.gpu_window_us, run.idle_us) == (0, 0, 0)
        assert run.idle_gaps() == []
    assert spans_of(("compute", "compute", 0, 5, 5)).gpu_active == 0


def test_zero_long_compute_at_the_edge_keeps_the_sum() -> None:
    run = spans_of(("compute", "compute", 0, 0, 0), ("compute", "compute", 1, 5, 10))
    assert (run.gpu_window_us, run.idle_us, run.gpu_active) == (10, 5, 0.5)


def test_host_time_by_phase() -> None:
    assert sync_run().host_us() == {"schedule": 0, "prepare": 9000, "update": 6000}
    waiting = spans_of(("cpu", "d2h", 0, 0, 3), ("cpu", "schedule", 1, 3, 4))
    assert waiting.host_us() == {"schedule": 1, "prepare": 0, "update": 0, "d2h": 3}


# -- why it was idle -------------------------------------------------------------------


def test_each_gap_of_the_synchronous_run_has_four_causes() -> None:
    assert pieces(sync_run(2)) == [
        (12000, 13000, "sync", 1),
        (13000, 15000, "update", 1),
        (15000, 18000, "prepare", 1),
        (18000, 19000, "h2d", 1),
    ]
    expected = {"sync": 2000, "update": 4000, "prepare": 6000, "h2d": 2000}
    assert sync_run().idle_by_cause() == dict.fromkeys(CAUSES, 0) | expected
    assert async_run().idle_by_cause() == dict.fromkeys(CAUSES, 0)


def gap_with(*rows: tuple[str, str, int, float, float]) -> list[tuple[Any, ...]]:
    """Pieces of a gap from 10 to 20, batch 1 computes next."""
    edges = (("compute", "compute", 0, 0, 10), ("compute", "compute", 1, 20, 30))
    return [piece[:3] for piece in pieces(spans_of(*edges, *rows))]


def test_its_own_transfer_comes_before_a_busy_host() -> None:
    got = gap_with(("h2d", "h2d", 1, 12, 15), ("cpu", "prepare", 2, 8, 17))
    assert got[:2] == [(10, 12, "prepare"), (12, 15, "h2d")]
    assert got[2:] == [(15, 17, "prepare"), (17, 20, "host")]


def test_the_transfer_of_another_batch_is_no_cause() -> None:
    assert gap_with(("h2d", "h2d", 2, 12, 15)) == [(10, 20, "host")]


def test_a_busy_host_comes_before_a_copy_back() -> None:
    got = gap_with(("d2h", "d2h", 0, 10, 14), ("cpu", "schedule", 1, 12, 16))
    assert got == [(10, 12, "sync"), (12, 16, "schedule"), (16, 20, "host")]


def test_a_recorded_wait_for_the_copy_is_sync() -> None:
    assert gap_with(("cpu", "d2h", 0, 5, 20)) == [(10, 20, "sync")]


def test_launching_is_the_host_and_does_not_hide_a_copy() -> None:
    assert gap_with(("cpu", "compute", 1, 10, 20)) == [(10, 20, "host")]
    got = gap_with(("cpu", "h2d", 1, 10, 20), ("d2h", "d2h", 0, 9, 13))
    assert got == [(10, 13, "sync"), (13, 20, "host")]


def test_scheduling_for_no_batch_is_drain_unless_a_copy_runs() -> None:
    got = gap_with(("cpu", "schedule", -1, 11, 18), ("d2h", "d2h", 0, 10, 13))
    assert got == [(10, 13, "sync"), (13, 18, "drain"), (18, 20, "host")]
    assert gap_with(("cpu", "update", -1, 10, 20)) == [(10, 20, "update")]


def test_the_inner_of_nested_host_phases_is_the_cause() -> None:
    got = gap_with(("cpu", "update", 0, 10, 20), ("cpu", "schedule", 1, 10, 12))
    assert got == [(10, 12, "schedule"), (12, 20, "update")]
    got = gap_with(("cpu", "update", 0, 8, 20), ("cpu", "schedule", 1, 13, 15))
    assert got == [(10, 13, "update"), (13, 15, "schedule"), (15, 20, "update")]


def test_pieces_of_one_cause_are_joined() -> None:
    got = gap_with(("cpu", "prepare", 1, 10, 13), ("cpu", "prepare", 1, 13, 20))
    assert got == [(10, 20, "prepare")]


TIMES = st.one_of(
    st.integers(0, 60).map(float),
    st.floats(0, 1e6, allow_nan=False, allow_subnormal=False),
)


@st.composite
def any_span(draw: st.DrawFn) -> Span:
    start, end = sorted((draw(TIMES), draw(TIMES)))
    lane, phase = draw(st.sampled_from(LANES)), draw(st.sampled_from(PHASES))
    return Span(
        lane, phase, draw(st.integers(-1, 5)), draw(st.integers(-1, 2)), start, end
    )


any_run = st.builds(Timeline, st.text(max_size=6), st.lists(any_span(), max_size=24))


def busy_by_counting(run: Timeline) -> float:
    """Another way to the union: per smallest piece, does any compute span hold it?"""
    spans = run.lane("compute")
    cuts = sorted({t for span in spans for t in (span.start_us, span.end_us)})
    return math.fsum(
        end - start
        for start, end in pairwise(cuts)
        if any(span.start_us <= start and end <= span.end_us for span in spans)
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_run)
def test_causes_add_up_to_the_idle_time(run: Timeline) -> None:
    gaps = run.idle_gaps()
    assert abs(math.fsum(run.idle_by_cause().values()) - run.idle_us) <= 1e-6
    assert abs(run.gpu_busy_us - busy_by_counting(run)) <= 1e-6
    assert abs(run.gpu_busy_us + run.idle_us - run.gpu_window_us) <= 1e-6
    assert 0 <= run.gpu_active <= 1
    assert all(gap.cause in CAUSES and gap.duration_us > 0 for gap in gaps)
    assert all(a.end_us <= b.start_us for a, b in pairwise(gaps))
    for gap in gaps:
        middle = (gap.start_us + gap.end_us) / 2
        running = {s for s in run.spans if s.start_us <= middle < s.end_us}
        assert not any(span.lane == "compute" for span in running)
        own = any(s.lane == "h2d" and s.batch == gap.batch for s in running)
        # No boundary of its own transfer lies inside a piece: the middle tells.
        assert own == (gap.cause == "h2d")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_run, st.randoms(use_true_random=False))
def test_order_of_adding_does_not_matter(run: Timeline, rng: random.Random) -> None:
    mixed = Timeline(run.name, rng.sample(run.spans, len(run.spans)))
    assert mixed == run
    assert mixed.summary() == run.summary()


# -- collecting ------------------------------------------------------------------------


def test_lanes_and_batches_come_sorted() -> None:
    run = spans_of(
        ("cpu", "update", 7, 30, 40),
        ("h2d", "h2d", 2, 5, 6),
        ("cpu", "schedule", -1, 0, 1),
    )
    assert [span.start_us for span in run.lane("cpu")] == [0, 30]
    assert run.batches() == [2, 7]
    with pytest.raises(ValueError, match="lane is 'gpu', a timeline has cpu"):
        run.lane("gpu")
    run.clear()
    assert run == Timeline("t")


def test_equal_by_content() -> None:
    assert sync_run() == sync_run()
    assert sync_run() != async_run()
    assert sync_run() != Timeline("other", sync_run().spans)
    assert sync_run() != Timeline("sync", sync_run().spans[1:])
    assert sync_run() != "sync"


def test_threads_add_without_loss() -> None:
    run = Timeline()

    def work(batch: int) -> None:
        for start in range(500):
            run.add(Span("cpu", "prepare", batch, 0, start, start + 1))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run.spans) == 2000


def test_shifted_starts_at_zero_and_changes_nothing_else() -> None:
    late = moved(sync_run(), 5e8)
    assert late.start_us == 5e8
    assert late.shifted() == sync_run()
    assert late.start_us == 5e8
    assert Timeline("t").shifted() == Timeline("t")


def test_records_are_rows_of_plain_values() -> None:
    rows = sync_run(1).records()
    assert rows[1] == {
        "lane": "h2d",
        "phase": "h2d",
        "batch": 0,
        "slot": 0,
        "start_us": 3000,
        "end_us": 4000,
        "slot_letter": "A",
        "duration_us": 1000,
        "num_requests": 0,
        "num_tokens": 0,
        "num_context": 0,
        "num_bytes": 0,
    }
    assert [row["phase"] for row in rows] == [bar[1] for bar in BARS]


def test_summary_holds_the_numbers_of_a_run() -> None:
    sync = sync_run()
    assert sync.summary() == {
        "name": "sync",
        "total_us": 45000,
        "gpu_active": 24 / 38,
        "idle_by_cause": sync.idle_by_cause(),
        "host_us": sync.host_us(),
    }


def test_twice_as_many_batches_take_twice_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No scan over the whole run for each gap: it would be four times the work."""
    looks = 0

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(index)

    cover = timeline_module._cover
    monkeypatch.setattr(timeline_module, "_cover", lambda spans: Counted(cover(spans)))
    work = []
    for batches in (300, 600):
        looks = 0
        assert sync_run(batches).idle_by_cause()["update"] == (batches - 1) * 2000
        work.append(looks)
    assert work[0] > 0
    assert work[1] < 2.5 * work[0]


def test_a_run_of_8192_batches_is_added_up_exactly() -> None:
    idle = sync_run(8192).summary()["idle_by_cause"]
    per_gap = {"sync": 1000, "update": 2000, "prepare": 3000, "h2d": 1000}
    assert idle == dict.fromkeys(CAUSES, 0) | {c: 8191 * t for c, t in per_gap.items()}


# -- drawing ---------------------------------------------------------------------------


def test_the_synchronous_run_is_drawn_to_the_character() -> None:
    assert str(sync_run()) == SYNC_TEXT


def test_the_asynchronous_run_is_drawn_to_the_character() -> None:
    assert async_run().text(tick_us=1000) == ASYNC_TEXT


def test_two_runs_side_by_side_have_one_tick() -> None:
    assert side_by_side(sync_run(), async_run()) == f"{SYNC_TEXT}\n\n{ASYNC_TEXT}"


def test_each_run_is_drawn_from_its_own_start() -> None:
    late = moved(sync_run(), 7e6)
    assert side_by_side(late, async_run()) == f"{SYNC_TEXT}\n\n{ASYNC_TEXT}"


def test_a_long_run_is_drawn_in_part_and_says_so() -> None:
    assert sync_run(210).text() == (
        "sync   cpu  P0P..........U0P1P..........U1P2P..........U2P3P..........U3\n"
        "       h2d  ...0..............1..............2..............3...........\n"
        "       gpu  ....C0CCCCCC.......C1CCCCCC.......C2CCCCCC.......C3CCCCCC...\n"
        "       d2h  ............0..............1..............2..............3..\n"
        "       gpu busy 1680 of 3143 ms = 53 %; drawn: batches 0-3 of 210"
    )


def test_as_many_batches_as_fit_the_given_tick() -> None:
    text = sync_run(9).text(width=12 + 47, tick_us=1000)
    assert text.splitlines()[0] == SYNC_TEXT.splitlines()[0]
    assert text.endswith("drawn: batches 0-2 of 9")
    assert "batches 0-1 of 9" in sync_run(9).text(max_batches=2)
    # Everything drawn: nothing to say.
    assert sync_run(9).text(width=12 + 135, tick_us=1000).endswith("ms = 56 %")


def test_later_batches_show_where_they_overlap_the_drawn_part() -> None:
    assert async_run().text(tick_us=1000, max_batches=1) == (
        "async  cpu  P0PP1P.......U0\n"
        "       h2d  ...0..1........\n"
        "       gpu  ....C0CCCCCCC1C\n"
        "       d2h  ............0..\n"
        "       gpu busy 24 of 24 ms = 100 %; drawn: batches 0-0 of 3"
    )


def lane_text(timeline: Timeline, lane: int, **how: Any) -> str:
    return timeline.text(**how).splitlines()[lane].split("  ")[-1]


def test_a_label_without_room_is_left_out_and_never_cut() -> None:
    run = spans_of(
        ("cpu", "schedule", 12, 0, 2),  # S12 needs three cells, here are two
        ("cpu", "prepare", 12, 2, 6),
        ("h2d", "h2d", 12, 6, 7),
        ("d2h", "d2h", 12, 6, 10),
    )
    assert lane_text(run, 0, tick_us=1) == "SSP12P...."
    assert lane_text(run, 1, tick_us=1) == "......-..."
    assert lane_text(run, 3, tick_us=1) == "......12--"


def test_short_neighbours_are_all_seen() -> None:
    run = spans_of(
        ("cpu", "update", 0, 0, 0.2),
        ("cpu", "schedule", 1, 0.2, 0.5),
        ("cpu", "prepare", 1, 0.5, 4),
        ("cpu", "update", 1, 9.9, 10),
    )
    assert lane_text(run, 0, tick_us=1) == "USP1.....U"


def test_of_many_in_one_cell_the_last_wins() -> None:
    phases = ("schedule", "prepare", "update")
    rows = [("cpu", p, 0, i / 10, (i + 1) / 10) for i, p in enumerate(phases)]
    run = spans_of(*rows, ("compute", "compute", 0, 0, 4))
    assert lane_text(run, 0, tick_us=1) == "SU.."


def test_a_nested_span_is_drawn_over_the_outer_one() -> None:
    run = spans_of(("cpu", "update", 3, 0, 9), ("cpu", "schedule", 4, 4, 6))
    assert lane_text(run, 0, tick_us=1) == "U3UUS4UUU"
    # U12 has two cells until the inner one begins: no number before half a number.
    run = spans_of(("cpu", "update", 12, 0, 9), ("cpu", "schedule", 13, 2, 6))
    assert lane_text(run, 0, tick_us=1) == "UUS13SUUU"


def test_a_rounding_error_does_not_halve_the_drawing() -> None:
    run = spans_of(("cpu", "update", 3, 0, 76 * (1 + 1e-12)))
    assert lane_text(run, 0) == "U3" + 74 * "U"


def test_a_span_of_no_batch_has_no_number() -> None:
    run = spans_of(("cpu", "schedule", -1, 0, 3), ("h2d", "h2d", -1, 3, 5))
    assert lane_text(run, 0, tick_us=1) == "SSS.."
    assert lane_text(run, 1, tick_us=1) == "...--"


def test_busy_close_to_full_is_never_called_full() -> None:
    def foot(idle: float) -> str:
        rows = [
            ("compute", "compute", 0, 0, 5000),
            ("compute", "compute", 1, 5000, 9999),
        ]
        run = spans_of(*rows, ("compute", "compute", 2, 9999 + idle, 10000))
        return str(run).splitlines()[-1].strip()

    assert foot(0) == "gpu busy 10 of 10 ms = 100 %"
    assert foot(0.5) == "gpu busy 10 of 10 ms = 99.9 %"
    rows = (("compute", "compute", 0, 0, 600), ("compute", "compute", 1, 606, 1000))
    assert str(spans_of(*rows)).endswith("gpu busy 0.994 of 1 ms = 99.4 %")


def test_nothing_to_draw() -> None:
    assert str(Timeline("idle")) == "idle   no spans recorded"
    both = side_by_side(Timeline("none"), async_run(), tick_us=1000)
    assert both == f"none   no spans recorded\n\n{ASYNC_TEXT}"
    moment = spans_of(("cpu", "update", 0, 3, 3))
    assert lane_text(moment, 0) == "U"
    assert "gpu busy 0 of 0 ms = 0 %" in str(moment)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_run, st.integers(40, 120), st.sampled_from([None, 1, 3]))
def test_a_drawing_fits(run: Timeline, width: int, batches: int | None) -> None:
    run.name = "any"
    lines = run.text(width=width, max_batches=batches).splitlines()
    assert len(lines) in (1, 5)
    assert all(len(line) <= width for line in lines[:-1])
    assert len({len(line) for line in lines[:-1]}) <= 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"width": 20}, "width 20 leaves 8 cells beside the names, at least 10"),
        ({"tick_us": 0}, "tick_us is 0, above 0 is needed"),
        ({"tick_us": math.inf}, "tick_us is inf"),
        ({"tick_us": 10}, "tick_us 10 reaches 760 us in 76 cells, .* 15000 us: raise"),
        ({"tick_us": 500, "max_batches": 3}, "reaches 38000 us in 76 cells, .* 45000"),
        ({"max_batches": 0}, "max_batches is 0, at least 1"),
    ],
)
def test_drawing_refuses_what_cannot_be_drawn(
    how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sync_run().text(**how)


def test_side_by_side_needs_a_timeline() -> None:
    with pytest.raises(ValueError, match="no timeline given, at least 1"):
        side_by_side()


def test_repr_is_one_line_and_html_is_escaped() -> None:
    assert repr(sync_run()) == "Timeline('sync', 15 spans, 45 ms)"
    shown = Timeline("a<b", sync_run().spans)._repr_html_()
    assert shown.startswith("<pre>a&lt;b  ")
    assert shown.endswith("= 63 %</pre>")


# -- files -----------------------------------------------------------------------------


def test_trace_events_look_like_a_profilers() -> None:
    trace = sync_run(1).to_chrome_trace()
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("prepare 0 A", "user_annotation", 0, 0, 3000),
        ("Memcpy HtoD 0 A", "gpu_memcpy", 1, 3000, 1000),
        ("compute 0 A", "kernel", 2, 4000, 8000),
        ("Memcpy DtoH 0 A", "gpu_memcpy", 3, 12000, 1000),
        ("update 0 A", "user_annotation", 0, 13000, 2000),
    ]
    assert events[2]["args"] == {
        "phase": "compute",
        "batch": 0,
        "slot": 0,
        "end_us": 12000,
        "work": [0, 0, 0, 0],
        "device": 0,
        "stream": 2,
        "correlation": 3,
    }
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == dict(enumerate(LANES))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(any_run)
def test_a_trace_comes_back_exactly(run: Timeline) -> None:
    trace = json.loads(json.dumps(run.to_chrome_trace()))
    assert Timeline.from_chrome_trace(trace) == run


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_comes_back_exactly(tmp_path: Path, name: str) -> None:
    run = Timeline(
        "zwei µs", [*async_run().spans, Span("cpu", "update", 3, 0, 0.1, 0.7)]
    )
    run.save(tmp_path / name)
    assert Timeline.from_chrome_trace(tmp_path / name) == run
    assert Timeline.from_chrome_trace(str(tmp_path / name)) == run
    data = (tmp_path / name).read_bytes()
    # Packed: the mark of gzip, and no time of day, so that the same run looks the same.
    assert (data[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert (data[4:8] == bytes(4)) == name.endswith(".gz")


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"traceEvents": []}, "no 'cbasync' key, only traces written by cbasync"),
        ([], "no 'cbasync' key"),
        ({"cbasync": {"name": "x"}}, "damaged, KeyError.*traceEvents"),
        ({"cbasync": {"name": "x"}, "traceEvents": [{"ph": "X"}]}, "KeyError.*args"),
        ({"cbasync": 3, "traceEvents": []}, "damaged, TypeError"),
    ],
)
def test_reading_refuses_other_traces(trace: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline.from_chrome_trace(trace)


def test_reading_refuses_what_is_no_trace_file(tmp_path: Path) -> None:
    files = {
        "text.json": b"not json",
        "plain.json.gz": b"{}",
        "cut.json.gz": gzip.compress(b"{}" * 99)[:-9],
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name} does not hold a JSON trace"):
            Timeline.from_chrome_trace(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Timeline.from_chrome_trace(tmp_path / "none.json")


# -- what it needs ---------------------------------------------------------------------


def test_only_the_standard_library_is_imported() -> None:
    """A browser's Python has nothing else; and `import cbasync` may bring torch."""
    here = Path(__file__).parent.parent / "cbasync"
    code = (
        "import sys, types\n"
        "package = types.ModuleType('cbasync')\n"
        f"package.__path__ = [{str(here)!r}]\n"
        "sys.modules['cbasync'] = package\n"
        "import cbasync.timeline\n"
        "tops = {name.split('.')[0] for name in sys.modules}\n"
        "own = {'cbasync', '__main__'}\n"
        "print(sorted(tops - own - set(sys.stdlib_module_names)))"
    )
    # -S leaves site-packages out: an import from there would fail.
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


def test_gap_is_a_record() -> None:
    gap = IdleGap(1.0, 4.0, "h2d", 2)
    assert gap.duration_us == 3.0
    assert set(CAUSES) >= {"h2d", "sync", "host", "drain"}
