"""The edge that a race names, for every kind of resource and pair of phases."""

from __future__ import annotations

import pytest

from cbasync.devices.access import Access
from cbasync.devices.races import RaceDetector, Touch, missing_edge


def op(phase: str, batch: int) -> Access:
    return Access(phase, batch)


@pytest.mark.parametrize(
    ("resource", "first", "second", "edge"),
    [
        ("block 3", ("compute", 1), ("compute", 2), "compute_order"),
        ("block 3", ("compute", 1), ("h2d", 2), "block_lease"),
        ("block 3", ("h2d", 2), ("compute", 2), "block_lease"),
        ("token row 3", ("compute", 1), ("compute", 2), "compute_order"),
        ("token row 3", ("compute", 1), ("h2d", 2), "compute_order"),
        ("slot A device_sampled", ("compute", 1), ("compute", 2), "compute_order"),
        ("slot A device_input_ids", ("h2d", 2), ("compute", 2), "h2d_done"),
        ("slot A device_input_ids", ("compute", 2), ("h2d", 2), "h2d_done"),
        ("slot A device_sampled", ("compute", 2), ("d2h", 2), "compute_done"),
        ("slot A host_sampled", ("d2h", 2), ("update", 2), "d2h_done"),
        ("slot A host_input_ids", ("prepare", 2), ("h2d", 2), "slot_refill"),
        ("slot A host_input_ids", ("h2d", 0), ("prepare", 2), "slot_refill"),
        ("slot A host_sampled", ("update", 0), ("d2h", 2), "slot_refill"),
        ("slot A device_input_ids", ("compute", 0), ("h2d", 2), "slot_reuse"),
        ("slot A device_sampled", ("d2h", 0), ("compute", 2), "slot_reuse"),
    ],
)
def test_the_missing_edge(
    resource: str, first: tuple[str, int], second: tuple[str, int], edge: str
) -> None:
    assert missing_edge(resource, op(*first), op(*second)) == edge


def touching(phase: str, batch: int, *, reads: str = "", writes: str = "") -> Access:
    return Access(phase, batch, -1, reads.split, writes.split)


def test_every_access_is_counted() -> None:
    detector = RaceDetector()
    assert detector.num_accesses == 0
    detector.on_host(touching("prepare", 0, reads="a b", writes="c"))
    detector.on_launch("h2d", touching("h2d", 0, reads="c", writes="d"))
    assert detector.num_accesses == 5
    assert str(detector) == "no race in 5 accesses"


def test_a_reader_on_one_thread_counts_with_its_newest_read() -> None:
    """The older reads of a stream are over once the newer one is."""
    detector = RaceDetector()
    event = object()
    detector.on_launch("a", touching("compute", 0, reads="x"))
    detector.on_record("a", event)
    detector.on_launch("a", touching("compute", 1, reads="x"))
    detector.on_wait("b", event)
    detector.on_launch("b", touching("compute", 2, writes="x"))
    (race,) = detector.races
    assert race.first.access.batch == 1


def test_a_write_forgets_the_reads_before_it() -> None:
    detector = RaceDetector()
    event = object()
    detector.on_launch("a", touching("compute", 0, reads="x"))
    detector.on_launch("a", touching("compute", 1, writes="x"))
    detector.on_record("a", event)
    detector.on_wait("b", event)
    detector.on_launch("b", touching("compute", 2, writes="x"))
    assert detector.races == []


def test_a_stream_learns_from_the_host_only_at_a_launch() -> None:
    """The host knows of the copy's end; a stream it launches on afterwards does too."""
    detector = RaceDetector()
    event = object()
    detector.on_launch("a", touching("compute", 0, writes="x"))
    detector.on_record("a", event)
    detector.on_synchronize(event)
    detector.on_launch("b", touching("compute", 1, reads="x"))
    assert detector.races == []
    detector.on_launch("a", touching("compute", 2, writes="y"))
    detector.on_launch("b", touching("compute", 3, reads="y"))
    assert [race.resource for race in detector.races] == ["y"]


def test_what_a_stream_knows_is_never_unlearned() -> None:
    """An older record of the same stream tells nothing that a newer one has not."""
    detector = RaceDetector()
    old, new = object(), object()
    detector.on_launch("a", touching("compute", 0, writes="x"))
    detector.on_record("a", old)
    detector.on_launch("a", touching("compute", 1, writes="x"))
    detector.on_record("a", new)
    detector.on_wait("b", new)
    detector.on_wait("b", old)
    detector.on_launch("b", touching("compute", 2, reads="x"))
    assert detector.races == []


def test_an_event_that_was_never_recorded_orders_nothing() -> None:
    detector = RaceDetector()
    detector.on_launch("a", touching("compute", 0, writes="x"))
    detector.on_wait("b", object())
    detector.on_synchronize(object())
    detector.on_launch("b", touching("compute", 1, reads="x"))
    assert len(detector.races) == 1


def test_a_touch_is_before_who_knows_its_tick() -> None:
    touch = Touch("a", 3, op("compute", 0), is_write=True)
    assert touch.is_before({"a": 3})
    assert touch.is_before({"a": 4})
    assert not touch.is_before({"a": 2})
    assert not touch.is_before({"b": 9})


def test_one_read_before_and_two_threads_after() -> None:
    """Each reader on a thread of its own is remembered beside the others."""
    detector = RaceDetector()
    for stream in "abc":
        detector.on_launch(stream, touching("compute", 0, reads="x"))
    detector.on_launch("d", touching("compute", 1, writes="x"))
    assert {race.first.thread for race in detector.races} == {"a", "b", "c"}


def test_races_are_listed_by_edge_with_the_first_of_each() -> None:
    detector = RaceDetector()
    detector.on_launch("h2d", touching("h2d", 0, writes="x y"))
    detector.on_launch("compute", touching("compute", 0, reads="x y", writes="z"))
    detector.on_launch("d2h", touching("d2h", 0, reads="z"))
    lines = str(detector).splitlines()
    assert lines[0] == "3 races in 6 accesses"
    assert lines[1].startswith("  h2d_done: 2, the first: x: ")
    assert lines[2].startswith("  compute_done: 1, the first: z: ")
