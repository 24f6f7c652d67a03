"""What only a CUDA device has: memory to size, clocks to join, weights to merge."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cbasync.config import EngineConfig
from cbasync.devices import Access, CudaDevice, ThreadsDevice
from cbasync.devices.cuda import granted
from cbasync.fuse import (
    Merged,
    MergedAttention,
    MergedMLP,
    SplitLinear,
    TabledRotary,
)
from cbasync.kv_memory import num_blocks_that_fit
from cbasync.random_models import tiny_model
from cbasync.sampling import SamplingParams
from tests.oracle import Job, make_engine, play

gpu = pytest.mark.gpu
needs_compiler = pytest.mark.skipif(
    sys.platform == "win32", reason="torch.compile needs a C++ compiler there"
)
JOBS = [
    Job((1, 2, 3), SamplingParams(max_tokens=20)),
    Job((3, 1, 4, 1, 5, 9, 2, 6), SamplingParams(max_tokens=12)),
    Job(tuple(range(17)), SamplingParams(max_tokens=15), arrival=4),
]
CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, block_size=4, max_model_len=64
)


# ------------------------------------------------------------------ merged weights


def test_merged_weights_give_the_same_tokens_and_are_undone() -> None:
    model = tiny_model()
    modules = [type(module) for module in model.modules()]
    engine = make_engine(model, replace(CONFIG, merge_weights=True))
    kinds = {type(module) for module in model.modules()}
    assert {MergedAttention, MergedMLP} <= kinds
    with engine:
        requests = [engine.add_request(job.prompt, job.params) for job in JOBS]
        engine.run()
    assert [type(module) for module in model.modules()] == modules
    plain = play(model, make_engine(model, CONFIG), JOBS)
    assert [r.output_token_ids for r in requests] == plain.tokens


def test_tabled_angles_are_the_computed_ones() -> None:
    model = tiny_model()
    former = model.model.rotary_emb
    places = torch.tensor([[0, 7, 63], [5, 5, 1]])
    like = torch.empty(1, dtype=model.dtype)
    want = former(like, places)
    merged = Merged(model, compiled_for=64)
    table = model.model.rotary_emb
    assert isinstance(table, TabledRotary)
    for ours, theirs in zip(table(like, places), want, strict=True):
        assert torch.equal(ours, theirs)
    merged.undo()
    assert model.model.rotary_emb is former


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_a_product_in_two_halves_is_the_product(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.Linear(32, 48, bias=False, dtype=torch.float64)
    bmm = torch.bmm  # the CPU has no other output dtype
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: bmm(a, b))
    x = torch.randn(1, rows, 32, dtype=torch.float64)
    assert torch.allclose(SplitLinear(linear)(x), linear(x), rtol=1e-12, atol=1e-12)


def test_merging_stores_nothing_twice() -> None:
    model = tiny_model()
    merged = Merged(model)
    assert merged.num_merged == 4  # attention and feed-forward of two layers
    former: Any = merged._former[0][2]
    q, k = (part.weight.untyped_storage() for part in (former.q_proj, former.k_proj))
    assert q.data_ptr() == k.data_ptr()
    merged.undo()


def test_a_model_without_llamas_parts_is_refused() -> None:
    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no modules with the par"):
        Merged(GPT2LMHeadModel(config).eval())


def test_a_merge_that_is_not_exact_is_refused_and_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    modules = [type(module) for module in model.modules()]
    former = MergedMLP.forward
    monkeypatch.setattr(MergedMLP, "forward", lambda self, x: 1.01 * former(self, x))
    with pytest.raises(ValueError, match="gives other logits with merged weights"):
        Merged(model)
    assert [type(module) for module in model.modules()] == modules


# ------------------------------------------------------------------ compiled


@needs_compiler
def test_a_compiled_forward_traces_into_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_, traced = torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    def traced_only(function: Any, **options: Any) -> Any:
        return compile_(function, backend=backend, fullgraph=True, **options)

    monkeypatch.setattr(torch, "compile", traced_only)
    model = tiny_model()
    config = replace(CONFIG, compile=True, merge_weights=True)
    play(model, make_engine(model, config), JOBS)
    assert 1 <= len(traced) <= CONFIG.max_num_seqs  # one for each number of rows
    assert all("cbasync.attend_rows" in str(graph.code) for graph in traced)


def test_a_warm_up_changes_no_token() -> None:
    model = tiny_model()
    for depth, family in ((0, "slot"), (1, "slot"), (3, "row")):
        config = replace(CONFIG, depth=depth, num_slots=0, warm_up="all", debug=True)
        engine = make_engine(model, replace(config, carry_over=family))  # type: ignore[arg-type]
        assert engine.timeline.spans == []
        play(model, engine, JOBS)


# ------------------------------------------------------------------ memory


def test_without_a_gpu_there_is_room_for_every_request() -> None:
    config = replace(CONFIG, num_blocks=0)
    with ThreadsDevice() as device:
        assert num_blocks_that_fit(config, device, block_bytes=1) == 4 * 16
    model = tiny_model()
    engine = make_engine(model, config)
    assert engine.config.num_blocks == 64
    play(model, engine, JOBS)


@gpu
def test_blocks_that_fit_into_the_gpu() -> None:
    config, device = replace(CONFIG, num_blocks=0), CudaDevice()
    free, total = torch.cuda.mem_get_info()
    assert num_blocks_that_fit(config, device, block_bytes=1) == 64
    tight = (free - total // 10) // 20
    assert 16 <= num_blocks_that_fit(config, device, block_bytes=tight) <= 20
    with pytest.raises(ValueError, match=r"free and keeps a tenth .*: lower max_mode"):
        num_blocks_that_fit(config, device, block_bytes=free)
    device.close()


# ------------------------------------------------------------------ the clock


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@gpu
def test_spans_follow_each_other_over_a_long_run(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbasync.devices.cuda._ANCHOR_MS", 1.0)
    stream = device.stream("compute")
    for batch in range(300):
        stream.launch(lambda: torch.cuda._sleep(100_000), Access("compute", batch))
    device.synchronize()
    spans = device.timeline.lane("compute")
    assert [span.batch for span in spans] == list(range(300))
    # A moved anchor must neither make spans overlap nor tear them apart.
    for before, after in pairwise(spans):
        assert -2.0 < after.start_us - before.end_us < 1000.0


def refusing(times: int, why: str) -> Callable[[], torch.Tensor]:
    refusals = iter(range(times))

    def allocate() -> torch.Tensor:
        if next(refusals, None) is not None:
            raise RuntimeError(f"CUDA error: {why}")
        return torch.zeros(3)

    return allocate


def test_pinned_memory_refused_for_a_moment_is_asked_for_again() -> None:
    assert granted(refusing(2, "invalid argument")).equal(torch.zeros(3))
    with pytest.raises(RuntimeError, match="invalid argument"):
        granted(refusing(99, "invalid argument"))
    with pytest.raises(RuntimeError, match="out of memory"):
        granted(refusing(1, "out of memory"))


@gpu
def test_one_stream_and_pageable_memory_are_still_right() -> None:
    model = torch.nn.Module.to(tiny_model(), "cuda")
    for options in ({"one_stream": True}, {"pinned": False}):
        device = CudaDevice(**options)
        # A graph cannot be captured on the default stream.
        config = replace(CONFIG, cuda_graphs=False)
        engine = make_engine(model, config, device=device)
        assert engine.io_slots[0].host_inputs.is_pinned() == device.pinned
        handles = {s.raw.cuda_stream for s in (engine.h2d_stream, engine.d2h_stream)}  # type: ignore[attr-defined]
        assert len(handles) == (1 if device.one_stream else 2)
        play(model, engine, JOBS)


@gpu
@pytest.mark.slow
def test_compiled_and_merged_on_the_gpu() -> None:
    model = torch.nn.Module.to(tiny_model(dtype=torch.float32), "cuda")
    config = replace(CONFIG, compile=True, merge_weights=True, warm_up="all")
    play(model, make_engine(model, config, device="cuda"), JOBS)
