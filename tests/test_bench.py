"""Benchmarks measure what they say; the clock is an argument where it can be."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from cbasync import bench
from cbasync.bench import (
    ROOT,
    bench_host,
    bench_peer,
    fitting_config,
    host_table,
    machine_facts,
    measure_host,
    peer_table,
)
from cbasync.llm import LLM
from cbasync.models import load_model
from cbasync.prompts import DEMO_PROMPTS, read_prompts, token_ids
from tests.test_llm import without_template

# ------------------------------------------------------------------ host work


def test_host_work_is_the_median_of_whole_steps() -> None:
    """A clock that takes 1, 2, 3, ... ms a step."""
    ticks = (total * 1_000_000 for n in count(1) for total in (0, n))
    run = measure_host(4, 20, 5, clock=lambda: next(ticks))
    assert run["samples_ms"] == [1, 2, 3, 4, 5]
    assert run["host_ms"] == 3
    assert set(run["phases_ms"]) == {"schedule", "prepare", "update"}
    assert all(ms > 0 for ms in run["phases_ms"].values())


@pytest.mark.parametrize(("requests", "context"), [(3, 40), (40, 6000)])
def test_only_decodes_are_timed(requests: int, context: int) -> None:
    """Also where all prompts together do not fit the token budget."""
    steps = 20
    with bench._decoding_engine(requests, context, steps) as engine:
        before = engine.scheduler.num_launched
        for _ in range(steps):
            output = engine.schedule()
            assert output is not None
            assert output.num_tokens == output.num_sampled == requests
            starts = [occurrence.start for occurrence in output.occurrences]
            assert context <= min(starts)
            assert max(starts) < context + bench._ROOM
            engine.launch(output)
            engine.collect()
        assert engine.scheduler.num_launched == before + steps
        assert engine.scheduler.num_preemptions == 0


def test_the_collector_rests_and_comes_back() -> None:
    with bench.collector_frozen():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_quietest_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 9.0, 3.0, 8.0, 4.0, 7.0])

    def measured(requests: int, context: int, steps: int) -> bench.Result:
        ms = next(times)
        phases = dict.fromkeys(("schedule", "prepare", "update"), ms / 4)
        return {"host_ms": ms, "phases_ms": phases, "samples_ms": [ms] * steps}

    monkeypatch.setattr(bench, "measure_host", measured)
    monkeypatch.setattr(bench, "HOST_CASES", ((32, 100), (256, 2000)))
    result = bench_host(steps=2)
    assert result["host_ms"] == {"32@100": 3.0, "256@2000": 7.0}
    assert result["samples_ms"] == {"32@100": [3.0, 3.0], "256@2000": [7.0, 7.0]}
    assert result["steps"] == 2
    assert json.loads(json.dumps(result)) == result
    rows = [line.split() for line in host_table(result).splitlines()]
    assert ["32@100", "3.000", "0.750", "0.750", "0.750"] in rows


# ------------------------------------------------------------------ peer


def test_the_peer_makes_the_same_tokens() -> None:
    result = bench_peer("random-tiny", requests=3, max_tokens=6)
    assert result["tokens_equal"] is True
    assert result["requests_equal"] == 3
    assert result["ours_tok_s"] > 0
    assert result["peer_tok_s"] > 0
    assert len(result["seconds"]["ours"]) == len(result["seconds"]["peer"]) == 2
    assert json.loads(json.dumps(result)) == result
    assert "same tokens: 3 of 3 requests, 6 tokens each, random-tiny" in peer_table(
        result
    )


def test_nobody_stops_at_an_end_token() -> None:
    """Both make exactly as many tokens as asked for."""
    loaded = load_model("random-tiny")
    free = bench._ours(loaded, [[5, 6, 7]], 6)
    ends = replace(loaded, stop_token_ids=frozenset(free[0]))
    ends.model.config.eos_token_id = free[0][1]
    for generate in (bench._ours, bench._peers):
        assert generate(ends, [[5, 6, 7]], 6) == free
    assert loaded.model.config._attn_implementation == "sdpa"


# ------------------------------------------------------------------ what it is made of


def test_machine_facts_say_where_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "bench", "--model", "my model"])
    facts = machine_facts()
    assert facts["command"] == "python -m cbasync bench --model 'my model'"
    for name in ("cpu", "cores", "threads", "python", "torch", "transformers", "date"):
        assert facts[name]
    assert (facts["gpu"] is None) == (facts["driver"] is None)
    assert bench._output_of(["no-such-program"]) is None
    assert bench._output_of(["false"]) is None


def test_a_fitting_config_just_fits() -> None:
    config = fitting_config([17, 16, 1])
    assert (config.num_blocks, config.max_model_len, config.max_num_seqs) == (4, 17, 3)
    assert fitting_config([17], block_size=4, depth=2).num_blocks == 5


def test_the_demo_has_sixteen_prompts() -> None:
    prompts = read_prompts()
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 16
    assert all(1 <= prompt.max_tokens <= 64 for prompt in prompts)
    assert DEMO_PROMPTS.is_relative_to(ROOT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('\n{"prompt": 3}', "line 2 has no text under 'prompt'"),
        ("[]", "line 1 has no text under 'prompt'"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_a_bad_prompts_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_without_the_data_folder_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run from a clone .* or give --prompts"):
        read_prompts(tmp_path / "demo.jsonl")


def test_token_ids_in_every_form() -> None:
    loaded = load_model("random-tiny")
    with LLM(loaded, device="threads") as llm:
        assert bytes(token_ids(llm, "to be")) == b"to be\n"  # as a chat
    with LLM(without_template(loaded), device="threads") as llm:
        assert bytes(token_ids(llm, "to be")) == b"to be"
    with LLM(replace(loaded, tokenizer=None), device="threads") as llm:
        ids = token_ids(llm, "to be", seed=1)
        assert len(ids) == 2
        assert ids == token_ids(llm, "to be", seed=1) != token_ids(llm, "to be", seed=2)
        assert len(token_ids(llm, "")) == 1
