"""The detector: what it must report, what it must not, and the mutation table."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from cbasync import mutants
from cbasync.config import EDGES, EngineConfig
from cbasync.devices import SimDevice, ThreadsDevice
from cbasync.devices.access import Access
from cbasync.devices.races import RaceDetector
from cbasync.io_slot import SlotLayout
from tests.oracle import Job, configs, jobs_strategy, make_engine, play


class Script:
    """Calls of the device interface, as a detector sees them."""

    def __init__(self) -> None:
        self.detector = RaceDetector()
        self.events = {name: object() for name in "efg"}

    def op(
        self, stream: str, reads: str = "", writes: str = "", batch: int = 0
    ) -> None:
        phase = stream if stream in ("h2d", "compute", "d2h") else "compute"
        self.detector.on_launch(
            stream, Access(phase, batch, -1, reads.split, writes.split)
        )

    def host(self, reads: str = "", writes: str = "", batch: int = 0) -> None:
        phase = "prepare" if writes else "update"
        self.detector.on_host(Access(phase, batch, -1, reads.split, writes.split))

    def record(self, stream: str, event: str = "e") -> None:
        self.detector.on_record(stream, self.events[event])

    def wait(self, stream: str, event: str = "e") -> None:
        self.detector.on_wait(stream, self.events[event])

    def synchronize(self, event: str = "e") -> None:
        self.detector.on_synchronize(self.events[event])

    @property
    def races(self) -> list[str]:
        return [race.resource for race in self.detector.races]


def test_one_stream_needs_no_events() -> None:
    s = Script()
    s.op("a", writes="x")
    s.op("a", reads="x", writes="x")
    assert s.races == []


def test_two_streams_without_an_event() -> None:
    s = Script()
    s.op("a", writes="x")
    s.op("b", reads="x")
    assert s.races == ["x"]


def test_an_event_orders_them() -> None:
    s = Script()
    s.op("a", writes="x")
    s.record("a")
    s.wait("b")
    s.op("b", reads="x")
    assert s.races == []


def test_a_wait_before_the_record_orders_nothing() -> None:
    s = Script()
    s.wait("b")
    s.op("a", writes="x")
    s.record("a")
    s.op("b", reads="x")
    assert s.races == ["x"]


def test_a_record_does_not_cover_what_comes_after_it() -> None:
    s = Script()
    s.record("a")
    s.op("a", writes="x")
    s.wait("b")
    s.op("b", reads="x")
    assert s.races == ["x"]


def test_a_new_record_replaces() -> None:
    s = Script()
    s.op("a", writes="x")
    s.record("a")
    s.record("c")  # the same event, on a stream that knows nothing of x
    s.wait("b")
    s.op("b", reads="x")
    assert s.races == ["x"]


def test_order_is_transitive_over_streams_and_host() -> None:
    s = Script()
    s.op("a", writes="x")
    s.record("a", "e")
    s.wait("b", "e")
    s.record("b", "f")
    s.synchronize("f")
    s.host(reads="x")
    s.op("c", reads="x")  # launched by a host that knows
    assert s.races == []


def test_reads_do_not_race_with_reads() -> None:
    s = Script()
    s.op("a", reads="x")
    s.op("b", reads="x")
    s.host(reads="x")
    assert s.races == []


def test_a_write_races_with_every_reader_since() -> None:
    s = Script()
    s.op("a", reads="x")
    s.op("b", reads="x")
    s.op("c", writes="x")
    assert s.races == ["x", "x"]


def test_a_host_write_under_a_copy() -> None:
    s = Script()
    s.host(writes="x")
    s.op("h2d", reads="x")
    s.host(writes="x", batch=2)
    (race,) = s.detector.races
    assert race.edge == "slot_refill"
    assert "read by h2d of batch 0 on the h2d stream" in str(race)
    assert "write by prepare of batch 2 on the host" in str(race)


def test_two_independent_ops_may_be_swapped() -> None:
    for first, second in (("x", "y"), ("y", "x")):
        s = Script()
        s.op("a", writes=first)
        s.op("b", writes=second)
        assert s.races == []


def test_history_survives_free_and_reuse() -> None:
    """A block that was given back and has a new owner is still the same memory."""
    s = Script()
    s.op("compute", writes="block:7", batch=3)  # the dead row's last write
    s.op("h2d", writes="block:7", batch=5)  # the new owner's
    (race,) = s.detector.races
    assert race.edge == "block_lease"


def test_an_op_does_not_race_with_itself() -> None:
    s = Script()
    s.op("a", reads="x", writes="x")
    assert s.races == []


def test_the_report_counts_by_edge() -> None:
    s = Script()
    assert str(s.detector) == "no race in 0 accesses"
    s.op("h2d", writes="x")
    s.op("compute", reads="x")
    assert "1 races in 2 accesses" in str(s.detector)
    assert "h2d_done: 1" in str(s.detector)


# ------------------------------------------------------------------ the mutation table

TABLE = mutants.mutants()
# The CPU's attention is told at its launch how a batch is cut, and the targets only
# decide which log-probabilities of a prompt are looked up.
SHOWS_NOTHING = {"shared query_start_loc", "shared target_ids"}


def test_every_edge_every_array_and_the_single_slot_are_in_the_table() -> None:
    names = {mutant.name for mutant in TABLE}
    assert {f"without {edge}" for edge in EDGES} <= names
    assert {"single slot", "kv write from d2h", "shared carry_over"} <= names
    arrays = SlotLayout.of(mutants.BASE).sections
    assert {f"shared {name}" for name in arrays} <= names


@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: m.name)
def test_mutants_on_the_virtual_device(mutant: mutants.Mutant) -> None:
    verdict = mutants.run_mutant(mutant, "sim")
    assert verdict.detected
    assert verdict.named, f"wrong edge: {verdict.races[0]}"
    assert verdict.wrong_token == (mutant.name not in SHOWS_NOTHING)


@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: m.name)
def test_mutants_on_threads(mutant: mutants.Mutant) -> None:
    """Whether a token goes wrong is chance there; the report is not."""
    verdict = mutants.run_mutant(mutant, "threads")
    assert verdict.detected
    assert verdict.named, f"wrong edge: {verdict.races[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: m.name)
def test_mutants_on_cuda(mutant: mutants.Mutant) -> None:
    verdict = mutants.run_mutant(mutant, "cuda")
    assert verdict.detected
    assert verdict.named, f"wrong edge: {verdict.races[0]}"


def test_a_single_edge_is_the_only_one_reported() -> None:
    """Nothing is reported but what was dropped."""
    for edge in EDGES:
        (mutant,) = [m for m in TABLE if m.name == f"without {edge}"]
        verdict = mutants.run_mutant(mutant, "sim")
        assert {race.edge for race in verdict.races} == {edge}


def test_these_durations_and_the_worst_order_can_differ() -> None:
    """Without an edge some durations still give the right tokens: that is the trap."""
    (mutant,) = [m for m in TABLE if m.name == "without compute_order"]
    lucky = mutants.run_mutant(mutant, "sim", order="durations")
    assert lucky.detected
    assert not lucky.wrong_token
    assert mutants.run_mutant(mutant, "sim", order="worst").wrong_token


# ------------------------------------------------------------------ no false alarm

WORKLOADS = 1000 if os.environ.get("CBASYNC_PROFILE") == "long" else 60


@settings(max_examples=WORKLOADS)
@given(
    config=configs(),
    jobs=jobs_strategy,
    shuffle=st.none() | st.integers(0, 99),
    order=st.sampled_from(["durations", "worst"]),
)
def test_the_shipped_schedule_has_no_race(
    model: LlamaForCausalLM,
    config: EngineConfig,
    jobs: list[Job],
    shuffle: int | None,
    order: str,
) -> None:
    device = SimDevice(costs=mutants.EVEN_COSTS, order=order)  # type: ignore[arg-type]
    detector = RaceDetector()
    device.observers.append(detector)
    play(model, make_engine(model, config, device=device, shuffle=shuffle), jobs)
    assert detector.races == []
    assert device.machine.stale_reads == 0


@given(config=configs(), jobs=jobs_strategy)
def test_the_shipped_schedule_has_no_race_on_threads(
    model: LlamaForCausalLM, config: EngineConfig, jobs: list[Job]
) -> None:
    device, detector = ThreadsDevice(), RaceDetector()
    device.observers.append(detector)
    play(model, make_engine(model, config, device=device), jobs)
    assert detector.races == []
