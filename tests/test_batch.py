"""The arrays of a batch, worked by hand, and the slot that carries them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cbasync.batch import BatchBuilder, RequestTable
from cbasync.carry_over import RowCarryOver, SlotCarryOver, carry
from cbasync.config import EngineConfig
from cbasync.devices import ThreadsDevice
from cbasync.io_slot import IOSlot, SlotLayout
from cbasync.kv_cache import slot_mapping
from cbasync.request import Request
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    block_size=4,
    num_blocks=16,
    max_model_len=20,
)


class Bench:
    """A scheduler, a table and two slots, without any engine."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.device = ThreadsDevice()
        layout = SlotLayout.of(config)
        self.slots = [IOSlot(i, self.device, layout) for i in range(2)]
        self.scheduler = Scheduler(config)
        self.scheduler.arrange = lambda occurrences: occurrences[::-1]  # type: ignore[method-assign]
        self.table = RequestTable(config)
        self.builder = BatchBuilder(config, self.table)

    def add(self, name: str, prompt: list[int], **params: object) -> Request:
        request = Request(name, prompt, SamplingParams(**params))  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def next(self) -> tuple[SchedulerOutput, IOSlot]:
        output = self.scheduler.schedule()
        assert output is not None
        io_slot = self.slots[output.batch % 2]
        self.columns = self.table.apply(output)
        self.shape = self.builder.fill(io_slot, output, self.columns)
        return output, io_slot


@pytest.fixture
def bench() -> Bench:
    return Bench()


def host(io_slot: IOSlot, name: str, count: int) -> list[int]:
    return list(io_slot.host[name][:count].tolist())


def test_a_chunk_before_a_decode_by_hand(bench: Bench) -> None:
    bench.add("a", [5, 6, 7])
    bench.add("b", [*range(20, 31)])
    bench.next()
    output, slot = bench.next()
    # Rows: b computes positions 5..10 and ends its prompt, a decodes position 3.
    assert host(slot, "input_ids", 7) == [25, 26, 27, 28, 29, 30, 0]
    assert host(slot, "positions", 7) == [5, 6, 7, 8, 9, 10, 3]
    assert host(slot, "carry_over", 7) == [-1] * 6 + [0]
    assert host(slot, "query_start_loc", 3) == [0, 6, 7]
    assert host(slot, "seq_lens", 2) == [11, 4]
    assert host(slot, "logits_indices", 2) == [5, 6]
    a, b = bench.scheduler.running
    want = slot_mapping(b.blocks.block_ids, 5, 11, 4) + slot_mapping(
        a.blocks.block_ids, 3, 4, 4
    )
    assert host(slot, "slot_mapping", 7) == want
    assert host(slot, "token_rows", 2) == [b.row, a.row]
    assert slot.host["block_table"][0, :3].tolist() == b.blocks.block_ids
    assert slot.host["block_table"][1, :1].tolist() == a.blocks.block_ids
    assert (bench.shape.query_lens, bench.shape.seq_lens) == ((6, 1), (11, 4))
    assert bench.shape.num_sampled == output.num_sampled == 2


def test_decodes_only_in_the_steady_state(bench: Bench) -> None:
    bench.add("a", [5, 6, 7])
    bench.add("b", [*range(20, 25)])
    bench.next()
    _, slot = bench.next()
    assert host(slot, "input_ids", 2) == [0, 0]
    assert host(slot, "carry_over", 2) == [0, 1]
    assert bench.shape.query_lens is None
    assert bench.shape.max_seq_len == 6


def test_a_collected_token_comes_from_the_host(bench: Bench) -> None:
    request = bench.add("a", [5, 6, 7])
    output, _ = bench.next()
    bench.table.book(bench.columns, np.array([13]))
    bench.scheduler.update(output, [13])
    _, slot = bench.next()
    assert host(slot, "input_ids", 1) == [13]
    assert host(slot, "carry_over", 1) == [-1]
    assert request.token_ids == [5, 6, 7, 13]


def test_token_zero_is_an_ordinary_token(bench: Bench) -> None:
    """The mask is explicit: a 0 that the host knows is not a placeholder."""
    bench.add("a", [0, 0, 0])
    _, slot = bench.next()
    assert host(slot, "carry_over", 3) == [-1, -1, -1]


def test_debug_mode_uses_a_placeholder_that_no_token_has() -> None:
    bench = Bench(EngineConfig(**{**CONFIG.__dict__, "debug": True, "num_slots": 2}))
    bench.add("a", [5])
    bench.next()
    _, slot = bench.next()
    assert host(slot, "input_ids", 1) == [-1]


def test_sampling_values_travel_with_the_sampled_rows(bench: Bench) -> None:
    bench.add("a", [5, 6, 7], temperature=0.5, seed=3)
    bench.add("b", [*range(20, 31)], temperature=0.9, seed=4)
    _, slot = bench.next()
    assert bench.shape.needs.is_random
    assert slot.host["sampling"][0, 0].tolist() == 0.5
    assert host(slot, "seeds", 1) == [3]
    _, slot = bench.next()
    assert slot.host["sampling"][:2, 0].tolist() == pytest.approx([0.9, 0.5])
    assert host(slot, "seeds", 2) == [4, 3]


def test_one_copy_brings_all_that_a_batch_uses(bench: Bench) -> None:
    bench.add("a", [5, 6, 7], temperature=0.5)
    _, slot = bench.next()
    slot.device_inputs.fill_(-77)
    slot.copy_inputs(bench.shape.num_requests)
    for name in slot.host:
        count = 1 if name == "block_table" else len(slot.host[name])
        assert slot.device[name][:count].tolist() == slot.host[name][:count].tolist()
    assert slot.device["block_table"][1:].eq(-77).all(), "more was copied than is used"


def test_host_and_device_buffers_are_apart(bench: Bench) -> None:
    slot = bench.slots[0]
    slot.host_inputs.fill_(1)
    slot.host_sampled.fill_(1)
    assert not slot.device_inputs.any()
    assert not slot.device_sampled.any()


def test_slots_share_nothing(bench: Bench) -> None:
    a, b = bench.slots
    pointers = {
        t.data_ptr()
        for s in (a, b)
        for t in (s.host_inputs, s.device_inputs, s.host_sampled, s.device_sampled)
    }
    assert len(pointers) == 8
    assert (a.letter, b.letter) == ("A", "B")
    assert set(a.resources("host")).isdisjoint(b.resources("host"))


def test_both_families_read_the_same_array(bench: Bench) -> None:
    ids = torch.tensor([4, 0, 0])
    previous = bench.slots[0]
    previous.device_sampled[:2] = torch.tensor([11, 12])
    source = SlotCarryOver().source(previous)
    assert source is not None
    assert carry(ids, torch.tensor([-1, 1, 0]), source).tolist() == [4, 12, 11]
    rows = RowCarryOver(bench.device, 6)
    rows.publish(torch.tensor([11, 12]), torch.tensor([5, 2]))
    source = rows.source(None)
    assert source is not None
    assert carry(ids, torch.tensor([-1, 2, 5]), source).tolist() == [4, 12, 11]


def test_a_first_batch_has_nothing_to_carry_from() -> None:
    assert SlotCarryOver().source(None) is None
    assert SlotCarryOver().reads(None, []) == []
