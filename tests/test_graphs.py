"""CUDA graphs of decode batches: with them and without, the same tokens."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from cbasync.batch import BatchBuilder, BatchShape, RequestTable
from cbasync.config import EngineConfig
from cbasync.devices import CudaDevice, ThreadsDevice
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.graphs import DecodeGraphs, GraphKey, bucket_for, buckets
from cbasync.io_slot import IOSlot, SlotLayout
from cbasync.model_runner import ModelRunner
from cbasync.random_models import tiny_model
from cbasync.sampling import SamplingParams
from tests.oracle import Job, configs, jobs_strategy, make_engine, play, run

JOBS = [
    Job((1, 2, 3), SamplingParams(max_tokens=30)),
    Job((3, 1, 4, 1, 5, 9, 2, 6), SamplingParams(max_tokens=12)),
    Job((7, 7), SamplingParams(max_tokens=20, temperature=1.0, seed=4)),
    Job(tuple(range(17)), SamplingParams(max_tokens=25), arrival=4),
    Job((5,), SamplingParams(max_tokens=3), arrival=9),
]


def small(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 64,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


# ------------------------------------------------------------------ on any machine


@given(st.integers(1, 300))
def test_every_batch_has_the_smallest_bucket_that_holds_it(most: int) -> None:
    sizes = buckets(most)
    assert sizes[0] == most
    for count in range(1, most + 1):
        fitting = [size for size in sizes if size >= count]
        assert bucket_for(count, most) == min(fitting)


def test_keys_tell_slots_sizes_and_ways_of_sampling_apart() -> None:
    greedy = BatchShape.of_padding(4)
    keys = {
        GraphKey(slot, previous, shape.num_requests, shape.variant)
        for slot, previous in ((0, 1), (1, 0), (0, -1))
        for shape in (greedy, BatchShape.of_padding(8))
    }
    assert len(keys) == 6
    assert "slot A after B, 4 rows, greedy" in map(str, keys)


def test_padding_is_harmless_in_every_array() -> None:
    config = small(max_num_seqs=8, num_blocks=5)
    with ThreadsDevice() as device:
        io_slot = IOSlot(0, device, SlotLayout.of(config))
        io_slot.host_inputs.fill_(7)  # what an earlier, larger batch has left
        BatchBuilder(config, RequestTable(config)).pad(io_slot, 3, 2)
    host = io_slot.host
    assert host["slot_mapping"][:8].tolist() == [7, 7, 7, 20, 20, 20, 20, 20]
    assert host["carry_over"][2:8].tolist() == [7, -1, -1, -1, -1, -1]
    assert host["seq_lens"].tolist() == [7, 7, 7, 0, 0, 0, 0, 0]
    assert host["token_rows"].tolist() == [7, 7] + 6 * [8 * 2]
    assert host["logits_indices"].tolist() == [7, 7] + 6 * [0]


class PaddingGraphs:
    """Stands in for graphs on a CPU: pads as they do, and checks who is disturbed."""

    def __init__(self, runner: ModelRunner, max_num_seqs: int) -> None:
        self.runner = runner
        self.max_num_seqs = max_num_seqs
        self.num_padded = 0

    def run(self, shape: BatchShape, io_slot: IOSlot, *others: Any) -> None:
        bucket = bucket_for(shape.num_requests, self.max_num_seqs)
        self.num_padded += bucket > shape.num_requests
        if self.runner.debug:  # blocks with a new owner are being poisoned meanwhile
            self.runner._compute(shape.padded(bucket), io_slot, *others)
            return
        cache = self.runner.cache
        assert cache is not None
        before = [tensor[:-1].clone() for tensor in (*cache.keys, *cache.values)]
        self.runner._compute(shape.padded(bucket), io_slot, *others)
        live = io_slot.device["slot_mapping"][: shape.num_requests].long()
        for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
            changed = (old != new[:-1]).flatten(2).any(-1).flatten().nonzero()
            assert set(changed.flatten().tolist()) <= set(live.tolist())


class PaddingRunner(ModelRunner):
    """A runner on a CPU that treats decode batches as on a GPU."""

    def prepare(self, config: EngineConfig, device: Any) -> None:
        super().prepare(config, device)
        self._compiled = self._decode_logits
        self.graphs = PaddingGraphs(self, config.max_batch_requests)  # type: ignore[assignment]


@given(config=configs(), jobs=jobs_strategy, sync=st.booleans(), warm=st.booleans())
def test_padded_batches_equal_the_oracle(
    model: LlamaForCausalLM,
    config: EngineConfig,
    jobs: list[Job],
    sync: bool,
    warm: bool,
) -> None:
    config = replace(config, warm_up="all" if warm else ())
    runner, kind = PaddingRunner(model), SyncEngine if sync else AsyncEngine
    play(model, kind(runner, config, ThreadsDevice()), jobs)


# ------------------------------------------------------------------ on a GPU

gpu = pytest.mark.gpu


def engine_with(model: Any, config: EngineConfig, sync: bool = False) -> Engine:
    return make_engine(model, config, device="cuda", sync=sync)


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, DecodeGraphs)
    return graphs


@pytest.fixture(scope="module", params=["float64", "float32"])
def cuda_model(request: pytest.FixtureRequest) -> Any:
    model = tiny_model(dtype=getattr(torch, request.param))
    return torch.nn.Module.to(model, "cuda")


@gpu
@given(config=configs(), jobs=jobs_strategy, sync=st.booleans(), start=st.booleans())
def test_random_workloads_with_and_without_graphs(
    cuda_model: Any, config: EngineConfig, jobs: list[Job], sync: bool, start: bool
) -> None:
    tokens = []
    for graphs in (False, True):
        values = vars(config) | {
            "cuda_graphs": graphs,
            "warm_up": "all" if start else (),
        }
        engine = engine_with(cuda_model, EngineConfig(**values), sync)
        with engine:
            tokens.append(run(engine, jobs).tokens)
    finished = [i for i, job in enumerate(jobs) if job.abort is None]
    assert [tokens[0][i] for i in finished] == [tokens[1][i] for i in finished]


@gpu
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["slot", "row"])
def test_graphs_are_replayed_and_right(
    cuda_model: Any, depth: int, family: str
) -> None:
    config = small(depth=depth, carry_over=family)
    engine = engine_with(cuda_model, config)
    graphs = graphs_of(engine)
    play(cuda_model, engine, JOBS)
    assert graphs.num_replays > 10
    assert {key.slot for key in graphs.graphs} == set(range(depth + 1))
    assert {key.bucket for key in graphs.graphs} <= {1, 2, 4}


@gpu
def test_graphs_captured_at_start_hold_every_slot_and_size(cuda_model: Any) -> None:
    engine = engine_with(cuda_model, small(warm_up="all"))
    graphs = graphs_of(engine)
    found = {(key.slot, key.previous, key.bucket) for key in graphs.graphs}
    assert found == {(s, 1 - s, b) for s in (0, 1) for b in (1, 2, 4)}
    assert engine.timeline.spans == []
    play(cuda_model, engine, JOBS)


@gpu
def test_padding_rows_write_no_cell_of_anybody(cuda_model: Any) -> None:
    config = small(num_blocks=3 * 16, max_model_len=64, warm_up="all")
    with engine_with(cuda_model, config) as engine:
        cache = engine.runner.cache  # type: ignore[attr-defined]
        for tensor in (*cache.keys, *cache.values):
            tensor[: config.num_blocks] = 123.0
        for prompt in ((1, 2, 3), (4, 5), (6, 7, 8)):
            engine.add_request(prompt, SamplingParams(max_tokens=9))
        engine.run()
        assert any(key.bucket == 4 for key in graphs_of(engine).graphs)
        written = (cache.keys[0][: config.num_blocks] != 123.0).flatten(2).any(-1)
        # Prompts and all tokens but the last of each, and nothing else.
        assert int(written.sum()) == (3 + 2 + 3) + 3 * 8


@gpu
def test_a_graph_is_not_replayed_on_another_slots_buffers(cuda_model: Any) -> None:
    with engine_with(cuda_model, small(warm_up="all")) as engine:
        graphs = graphs_of(engine)
        a, b = engine.io_slots
        key = GraphKey(0, 1, 4, BatchShape.of_padding(4).variant)
        graphs.graphs[key] = graphs.graphs[key._replace(slot=1, previous=0)]
        with pytest.raises(AssertionError, match="slot A after B, 4 rows, greedy"):
            graphs.run(BatchShape.of_padding(4), a, b, engine.carry_over)


@gpu
def test_capture_beside_a_thread_that_pins_memory(cuda_model: Any) -> None:
    stop = threading.Event()

    def pin() -> None:
        sizes = random.Random(0)
        while not stop.is_set():
            torch.zeros(sizes.randrange(1, 1 << 20), pin_memory=True)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        engine = engine_with(cuda_model, small())
        graphs = graphs_of(engine)
        play(cuda_model, engine, JOBS)
    finally:
        stop.set()
        thread.join()
    assert not graphs.is_broken
    assert graphs.num_replays > 10


@gpu
def test_a_failed_capture_is_told_and_the_run_goes_on(cuda_model: Any) -> None:
    engine = engine_with(cuda_model, small())
    graphs = graphs_of(engine)
    compute = graphs.compute

    def unsafe(*arguments: Any) -> None:
        compute(*arguments)
        torch.cuda.current_stream().synchronize()  # no graph can hold a host's wait

    graphs.compute = unsafe
    with pytest.warns(UserWarning, match="could not be captured, decode batches"):
        play(cuda_model, engine, JOBS)
    assert graphs.is_broken
    assert not graphs.graphs
    # Other users of the GPU's random numbers notice nothing of it.
    assert torch.rand(2, device="cuda").isfinite().all()


@gpu
def test_one_failed_capture_is_tried_again(cuda_model: Any) -> None:
    engine = engine_with(cuda_model, small())
    graphs = graphs_of(engine)
    compute = graphs.compute
    was_refused: list[bool] = []

    def refused_once(*arguments: Any) -> None:
        compute(*arguments)
        if torch.cuda.is_current_stream_capturing() and not was_refused:
            was_refused.append(True)
            torch.cuda.current_stream().synchronize()

    graphs.compute = refused_once
    play(cuda_model, engine, JOBS)
    assert was_refused
    assert not graphs.is_broken
    assert graphs.num_replays > 10


@gpu
def test_the_host_never_waits_inside_a_launch(cuda_model: Any) -> None:
    config = small(warm_up="all", max_num_batched_tokens=128, block_size=16)
    config = EngineConfig(**(vars(config) | {"max_model_len": 256}))
    long = Job(tuple(range(17)) * 6, SamplingParams(max_tokens=4))
    engine = AsyncEngine(ModelRunner(cuda_model), config, CudaDevice())
    with engine:
        run(engine, [*JOBS, long])  # whatever is compiled on first use is there now
        launch = engine.launch

        def watched(output: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                launch(output)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine.launch = watched  # type: ignore[method-assign]
        run(engine, [*JOBS, long])
