"""Both engines against the oracle, and what each of their promises costs."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from cbasync.config import EngineConfig
from cbasync.devices import StreamError, ThreadsDevice
from cbasync.engine import AsyncEngine, Engine
from cbasync.model_runner import ModelRunner
from cbasync.random_models import tiny_model
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput
from tests.conftest import Machine
from tests.oracle import (
    Job,
    check_invariants,
    check_tokens,
    configs,
    expected,
    jobs_strategy,
    make_engine,
    play,
)

FAMILIES = ["slot", "row"]
DEPTHS = [0, 1, 2, 3]


def small(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 32,
        "max_model_len": 64,
        "debug": True,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


def on(machine: Machine, config: EngineConfig, **options: Any) -> Engine:
    """An engine on a fresh device of this machine."""
    return make_engine(machine.model, config, device=machine.new_device(), **options)


# ------------------------------------------------------------------ same tokens


@given(
    config=configs(),
    jobs=jobs_strategy,
    sync=st.booleans(),
    shuffle=st.none() | st.integers(0, 99),
)
def test_random_workloads_equal_the_oracle(
    machine: Machine,
    config: EngineConfig,
    jobs: list[Job],
    sync: bool,
    shuffle: int | None,
) -> None:
    engine = on(machine, config, sync=sync, shuffle=shuffle)
    play(machine.model, engine, jobs)


@given(config=configs(), jobs=jobs_strategy, seed=st.integers(0, 999))
def test_delays_change_nothing(
    model: LlamaForCausalLM, config: EngineConfig, jobs: list[Job], seed: int
) -> None:
    delays = random.Random(seed)
    device = ThreadsDevice(delay=lambda phase: delays.random() * 0.002)
    play(model, make_engine(model, config, device=device), jobs)


@pytest.mark.parametrize("budget", range(1, 14))
def test_every_chunk_size(machine: Machine, budget: int) -> None:
    jobs = [Job(tuple(range(13)), SamplingParams(max_tokens=6)), Job((3, 1, 4))]
    config = small(max_num_batched_tokens=budget)
    play(machine.model, on(machine, config), jobs)


class NewestFirst(Scheduler):
    """Lets the newest request eat the budget, so that older ones sit batches out."""

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        self.running.reverse()
        try:
            return super()._schedule_running(output, budget)
        finally:
            self.running.reverse()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rest", [1, 2, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_sits_batches_out(
    machine: Machine, family: str, rest: int, depth: int
) -> None:
    config = small(max_num_batched_tokens=4, carry_over=family, depth=depth)
    jobs = [
        Job((1, 2, 3), SamplingParams(max_tokens=9)),
        Job(tuple(range(3 + 4 * rest)), SamplingParams(max_tokens=3), arrival=3),
    ]
    scheduler = NewestFirst(config)
    engine = AsyncEngine(
        ModelRunner(machine.model), config, machine.new_device(), scheduler
    )
    batches = watch(engine)
    play(machine.model, engine, jobs)
    first = [[o.request.request_id for o in b.occurrences] for b in batches]
    absent = [ids for ids in first[3:] if "request-0" not in ids]
    assert len(absent) >= rest, f"it never sat out: {first}"


def test_seeded_sampling_is_the_same_alone_in_company_and_after_preemption(
    machine: Machine,
) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    jobs = [Job((i, 2, 3, 4, 5, 6, 7), params) for i in range(4)]
    result = play(machine.model, on(machine, small(num_blocks=6)), jobs)
    assert sum(r.num_preemptions for r in result.requests) > 0
    different = SamplingParams(max_tokens=10, temperature=1.0, seed=6)
    assert expected(machine.model, Job((0, 2, 3), params)) != expected(
        machine.model, Job((0, 2, 3), different)
    )


@given(config=configs(), jobs=jobs_strategy)
def test_the_form_that_a_gpu_computes_decodes_in(
    model: LlamaForCausalLM, config: EngineConfig, jobs: list[Job]
) -> None:
    """Tensors in, a tensor out, as graphs and the compiler need it; here on the CPU."""
    engine = make_engine(model, config)
    runner: Any = engine.runner
    runner._compiled = runner._decode_logits
    play(model, engine, jobs)


def test_a_prompt_of_one_token_that_asks_for_logprobs(model: LlamaForCausalLM) -> None:
    """It looks like a decode, and every place of it has to be looked at."""
    engine = make_engine(model, small())
    runner: Any = engine.runner
    runner._compiled = runner._decode_logits
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)
    play(model, engine, [Job((0,), params), Job((5,), params, arrival=1)])


# ------------------------------------------------------------------ what a stop costs


def watch(engine: Engine) -> list[SchedulerOutput]:
    """Every batch that the engine launches from now on."""
    batches: list[SchedulerOutput] = []
    launch = engine.launch

    def watched(output: SchedulerOutput) -> None:
        batches.append(output)
        launch(output)

    engine.launch = watched  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_stop_by_length_costs_no_step(
    machine: Machine, depth: int, max_tokens: int, family: str
) -> None:
    config = small(depth=depth, carry_over=family)
    engine = on(machine, config)
    batches = watch(engine)
    result = play(
        machine.model, engine, [Job((1, 2, 3), SamplingParams(max_tokens=max_tokens))]
    )
    assert len(batches) == max_tokens
    assert engine.scheduler.discarded_tokens == 0
    assert result.requests[0].finish_reason == "length"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_stop_by_end_token_costs_depth_rows(
    machine: Machine, depth: int, at: int, family: str
) -> None:
    prompt = (1, 2, 3)
    free = expected(machine.model, Job(prompt, SamplingParams(max_tokens=20)))
    eos = free[at]
    assert free.index(eos) == at, "choose a step at which a token is seen first"
    params = SamplingParams(max_tokens=20, stop_token_ids=(eos,))
    engine = on(machine, small(depth=depth, carry_over=family))
    result = play(machine.model, engine, [Job(prompt, params)])
    (request,) = result.requests
    assert request.finish_reason == "stop"
    assert request.output_token_ids == free[: at + 1]
    assert request.discarded_tokens == engine.scheduler.discarded_tokens == depth


def test_length_wins_over_nothing_and_stop_over_length(machine: Machine) -> None:
    """An end token that is also the last one allowed: the reason is `stop`."""
    (eos,) = expected(machine.model, Job((1, 2, 3), SamplingParams(max_tokens=1)))
    params = SamplingParams(max_tokens=1, stop_token_ids=(eos,))
    engine = on(machine, small(num_blocks=1))
    result = play(machine.model, engine, [Job((1, 2, 3), params)])
    assert result.requests[0].finish_reason == "stop"
    assert engine.scheduler.discarded_tokens == 0


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_with_a_token_in_flight(
    machine: Machine, sync: bool, depth: int, family: str
) -> None:
    """Two requests fill the pool at position 7; position 8 evicts the newer one."""
    config = small(num_blocks=4, depth=depth, carry_over=family)
    jobs = [
        Job((1, 2, 3, 4, 5, 6, 7), SamplingParams(max_tokens=6)),
        Job((7, 6, 5, 4, 3, 2, 1), SamplingParams(max_tokens=6)),
    ]
    result = play(machine.model, on(machine, config, sync=sync), jobs)
    assert result.requests[0].num_preemptions == 0
    assert 1 <= result.requests[1].num_preemptions <= 3
    assert [len(tokens) for tokens in result.tokens] == [6, 6]


def test_two_long_prompts_do_not_evict_each_other_for_ever(
    machine: Machine,
) -> None:
    long = SamplingParams(max_tokens=12)
    jobs = [Job(tuple(range(14)), long), Job(tuple(range(13, 0, -1)), long)]
    jobs += [Job((i,), SamplingParams(max_tokens=3), arrival=2) for i in range(5)]
    config = small(num_blocks=10, max_num_batched_tokens=4)
    result = play(machine.model, on(machine, config), jobs)
    assert max(request.num_preemptions for request in result.requests) <= 3


def test_an_aborted_request_gives_back_once_even_if_it_also_stops(
    machine: Machine,
) -> None:
    eos = expected(machine.model, Job((1, 2, 3), SamplingParams(max_tokens=3)))[2]
    params = SamplingParams(max_tokens=20, stop_token_ids=(eos,))
    for step in range(8):
        jobs = [Job((1, 2, 3), params, abort=step), Job((5, 6)), Job((7,), arrival=4)]
        play(machine.model, on(machine, small(num_blocks=20, max_num_seqs=2)), jobs)


def test_abort_of_what_is_not_there(machine: Machine) -> None:
    with on(machine, small()) as engine:
        request = engine.add_request([1], SamplingParams(max_tokens=9), request_id="r")
        assert not engine.abort("nobody")
        assert engine.abort("r")
        assert engine.abort("r")  # twice before the next step: asked for, done once
        engine.run()
        assert not engine.abort("r")
    assert request.finish_reason == "abort"
    check_invariants(engine, [request])


def test_a_waiting_request_can_be_aborted(machine: Machine) -> None:
    jobs = [Job((1, 2)), Job((3, 4), abort=1), Job((5, 6))]
    play(machine.model, on(machine, small(max_num_seqs=1)), jobs)


# ------------------------------------------------------------------ engine shell


def test_start_empty_go_idle_and_start_again(machine: Machine) -> None:
    with on(machine, small()) as engine:
        assert engine.step() == []
        for _ in range(2):
            request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
            engine.run()
            check_tokens(machine.model, [Job((1, 2, 3), request.params)], [request])
    check_invariants(engine, [])


@pytest.mark.parametrize("phase", ["h2d", "compute", "d2h"])
def test_an_error_on_any_stream_reaches_the_caller_with_its_cause(phase: str) -> None:
    def fail(at: str) -> float:
        if at == phase:
            raise OSError("planted")
        return 0.0

    engine = AsyncEngine(ScriptedRunner(), small(), ThreadsDevice(delay=fail))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=8))
    with pytest.raises(StreamError, match=f"{phase} of batch 0 failed") as caught:
        engine.run()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(StreamError):
        engine.close()


def test_the_model_is_given_back_as_it_was() -> None:
    mine = tiny_model()
    mine.train()
    before = mine.config._attn_implementation
    with make_engine(mine, small()) as engine:
        assert mine.config._attn_implementation == "cbasync"
        engine.add_request([1, 2], SamplingParams(max_tokens=8))
        engine.run()
    assert mine.training
    assert mine.config._attn_implementation == before


@pytest.mark.parametrize("outer", [True, False])
def test_grad_modes_of_the_caller(machine: Machine, outer: bool) -> None:
    with torch.inference_mode(outer):
        engine = on(machine, small())
    with torch.inference_mode(not outer), engine:
        request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
        engine.run()
    check_tokens(machine.model, [Job((1, 2, 3), request.params)], [request])


def test_no_thread_is_left_behind(machine: Machine) -> None:
    before = threading.active_count()
    for _ in range(3):
        play(machine.model, on(machine, small()), [Job((1, 2))])
    assert threading.active_count() == before


def test_an_engine_that_is_forgotten_takes_its_threads_along(
    model: LlamaForCausalLM,
) -> None:
    """As when a notebook cell is run again without closing anything."""
    before = threading.active_count()
    engine = make_engine(model, small())
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    engine.run()
    threads = [t for t in threading.enumerate() if t.name.startswith("cbasync-")]
    del engine
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
    assert threading.active_count() <= before


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty, at least 1 token"),
        ([1, 17], {}, r"prompt\[1\] is 17, token ids go from 0 to 16"),
        ([1, -1], {}, r"prompt\[1\] is -1"),
        ([1.5], {}, r"prompt\[0\] is 1.5, a whole token id"),
        ([[1, 2]], {}, r"prompt\[0\] is \[1, 2\]"),
        (torch.tensor([[1, 2]]), {}, r"prompt\[0\] is \[1, 2\]"),
        ("text", {}, "prompt is str, a flat list"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"max_tokens": -3}, "max_tokens is -3"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"max_tokens": 64}, "max_model_len is 64"),
        ([1] * 30, {"max_tokens": 20}, "need 13 blocks of 4, the cache has 12"),
    ],
)
def test_bad_input_is_refused_and_neighbours_go_on(
    machine: Machine, prompt: object, params: dict[str, object], message: str
) -> None:
    with on(machine, small(num_blocks=12)) as engine:
        good = engine.add_request([1, 2, 3], SamplingParams(max_tokens=6))
        engine.step()
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt, SamplingParams(**params))  # type: ignore[arg-type]
        engine.run()
    check_invariants(engine, [good])
    check_tokens(machine.model, [Job((1, 2, 3), good.params)], [good])


@pytest.mark.parametrize(("block_size", "num_blocks"), [(4, 4), (1, 16), (16, 1)])
def test_what_just_fits_runs_and_one_more_is_refused(
    machine: Machine, block_size: int, num_blocks: int
) -> None:
    config = small(block_size=block_size, num_blocks=num_blocks)
    prompt = tuple(range(10))
    with on(machine, config) as engine:
        with pytest.raises(ValueError, match="10 prompt \\+ 8 new tokens need"):
            engine.add_request(prompt, SamplingParams(max_tokens=8))
        with pytest.raises(ValueError, match="20 prompt \\+ 1 new tokens need"):
            engine.add_request([1] * 20, SamplingParams(max_tokens=1))
        fits = engine.add_request(prompt, SamplingParams(max_tokens=7))
        last = engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
        engine.run()
    check_invariants(engine, [fits, last])
    assert fits.finish_reason == last.finish_reason == "length"


def test_a_duplicate_id_is_refused_while_alive(machine: Machine) -> None:
    with on(machine, small()) as engine:
        engine.add_request([1], SamplingParams(max_tokens=2), request_id="a")
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            engine.add_request([2], SamplingParams(max_tokens=2), request_id="a")
        engine.run()
        again = engine.add_request([2], SamplingParams(max_tokens=2), request_id="a")
        engine.run()
    assert again.is_finished


def test_a_name_taken_by_a_user_is_skipped(machine: Machine) -> None:
    with on(machine, small()) as engine:
        params = SamplingParams(max_tokens=2)
        mine = engine.add_request([1], params, request_id="request-0")
        other = engine.add_request([2], params)
        engine.run()
    assert mine.is_finished
    assert other.is_finished


def test_config_longer_than_the_model(machine: Machine) -> None:
    with pytest.raises(ValueError, match="the model has 2048 positions"):
        on(machine, small(max_model_len=4096))


# ------------------------------------------------------------------ out of order


def test_a_request_is_submitted_once(machine: Machine) -> None:
    with on(machine, small()) as engine:
        request = engine.add_request([1, 2], SamplingParams(max_tokens=3))
        with pytest.raises(ValueError, match="submitted before: make a new one"):
            engine.submit(request)
        engine.run()
        with pytest.raises(ValueError, match="submitted before: make a new one"):
            engine.submit(request)
        assert not engine.has_work
    assert len(request.output_token_ids) == 3


def test_an_abort_that_comes_in_the_middle_of_a_submit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(machine, small()) as engine:
        add = engine.scheduler.add

        def late(request: Any) -> None:  # as if another thread ran meanwhile
            engine.abort("a")
            engine.step()
            add(request)

        monkeypatch.setattr(engine.scheduler, "add", late)
        request = engine.add_request(
            [1, 2], SamplingParams(max_tokens=3), request_id="a"
        )
        engine.run()
    check_invariants(engine, [request])
    assert request.finish_reason == "abort"


@pytest.mark.timeout(20)
def test_a_closed_engine_ends_its_requests_and_steps_no_more(machine: Machine) -> None:
    with on(machine, small()) as engine:
        request = engine.add_request([1, 2], SamplingParams(max_tokens=3))
        engine.step()
    assert request.finish_reason == "error"
    assert "closed" in str(request.error)
    with pytest.raises(RuntimeError, match="this engine is closed: make a new one"):
        engine.run()


def test_a_scheduler_with_another_config_is_refused(machine: Machine) -> None:
    config, other = small(), small(num_blocks=7)
    with pytest.raises(ValueError, match=r"num_blocks is 7 in the scheduler.* 32 in"):
        AsyncEngine(
            ModelRunner(machine.model), config, machine.new_device(), Scheduler(other)
        )


def test_stop_texts_need_somebody_who_reads_texts(machine: Machine) -> None:
    params = SamplingParams(max_tokens=3, stop="end")
    with on(machine, small()) as engine:
        with pytest.raises(ValueError, match="sees tokens and no texts: use LLM"):
            engine.add_request([1], params)
        request = engine.new_request([1], params)
        request.on_token = lambda token: True
        engine.submit(request)
        engine.run()
    assert len(request.output_token_ids) == 1
    assert request.finish_reason == "stop"


@pytest.mark.timeout(20)
def test_a_request_submitted_while_the_engine_starts_over_is_not_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with on(machine, small()) as engine:
        start_over, met = engine.scheduler.start_over, []

        def meanwhile() -> None:  # as if another thread ran just now
            met.append(engine.add_request([1, 2], SamplingParams(max_tokens=3)))
            start_over()

        monkeypatch.setattr(engine.scheduler, "start_over", meanwhile)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.guarded_step()
        engine.run()
        assert [engine.is_over(request) for request in met] == [True]
    check_invariants(engine, met)
