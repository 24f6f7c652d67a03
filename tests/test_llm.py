"""Text in, text out: what `LLM` promises to somebody who types prompts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cbasync.config import EngineConfig
from cbasync.devices.base import Event
from cbasync.llm import LLM
from cbasync.text import Detokenizer
from cbasync.models import LoadedModel, load_model
from cbasync.sampling import SamplingParams
from tests.oracle import check_invariants

PROMPTS = ["hello", "b", "how are you?", "naïve 🙂"]
EIGHT = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("random-tiny")


@pytest.fixture
def llm(loaded: LoadedModel) -> Iterator[LLM]:
    with LLM(loaded, device="threads", config=EngineConfig(num_blocks=64)) as one:
        yield one


def tokenizer_of(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    assert loaded.tokenizer is not None
    return loaded.tokenizer


def without_template(loaded: LoadedModel) -> LoadedModel:
    other = load_model("random-tiny")
    tokenizer_of(other).chat_template = None
    return replace(loaded, tokenizer=other.tokenizer)


def nothing_is_left(llm: LLM) -> None:
    """Nobody waits or runs, and every block and row has come back."""
    llm.engine.run()
    llm.engine.scheduler.discarded_tokens = 0  # of requests that nobody kept
    check_invariants(llm.engine, [])


# ------------------------------------------------------------------ generate


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """The first answer is the longest, so it is the last to end."""
    params = [SamplingParams(max_tokens=n) for n in (12, 3, 7, 1)]
    outputs = llm.generate(PROMPTS, params)
    assert [bytes(o.prompt_token_ids).decode() for o in outputs] == PROMPTS
    assert [len(o.token_ids) for o in outputs] == [12, 3, 7, 1]
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        (alone,) = llm.generate([prompt], one)
        assert alone.token_ids == output.token_ids


def test_one_params_for_all_and_the_default(llm: LLM) -> None:
    assert [len(o.token_ids) for o in llm.generate(PROMPTS, EIGHT)] == [8] * 4
    assert [len(o.token_ids) for o in llm.generate("hi")] == [64]


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    text, ids = llm.generate(["hello", list(b"hello")], EIGHT)
    assert text.prompt_token_ids == ids.prompt_token_ids
    assert (text.token_ids, text.text) == (ids.token_ids, ids.text)
    (single,) = llm.generate("hello", EIGHT)
    assert single.token_ids == text.token_ids


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], EIGHT) == []
    assert llm.generate([], []) == []


def test_the_models_own_end_token_stops_it(loaded: LoadedModel, llm: LLM) -> None:
    free = llm.generate("hello", EIGHT)[0].token_ids
    end = max(set(free), key=free.index)
    llm.loaded = replace(loaded, stop_token_ids=frozenset({end}))
    (stopped,) = llm.generate("hello", EIGHT)
    assert stopped.token_ids == free[: free.index(end) + 1]
    assert stopped.finish_reason == "stop"
    (ignoring,) = llm.generate("hello", replace(EIGHT, ignore_eos=True))
    assert ignoring.token_ids == free


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["good", ""], EIGHT, "prompt is empty"),
        (["good", [1, 256]], EIGHT, r"prompt\[1\] is 256, token ids go from 0 to 255"),
        (["good", "x" * 2041], EIGHT, "max_model_len is 2048"),
        (["good", "x" * 1020], EIGHT, "the cache has 64"),
        (["good", 7], EIGHT, "prompt is int"),
        (["good", "bad"], [EIGHT], "params holds 1 entries for 2 prompts"),
        (["good"], [EIGHT, EIGHT], "params holds 2 entries for 1 prompts"),
    ],
)
def test_one_bad_prompt_refuses_the_call_before_any_work(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert llm.engine.scheduler.num_launched == 0
    check_invariants(llm.engine, [])


@pytest.mark.parametrize("wait", range(1, 9))
def test_an_interrupted_call_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, wait: int
) -> None:
    """Ctrl-C comes while the host waits: that is where it spends its time."""
    expected = [o.token_ids for o in llm.generate(PROMPTS, EIGHT)]
    synchronize, calls = Event.synchronize, iter(range(1, 1000))

    def interrupted(event: Event, edge: str = "") -> None:
        if next(calls) == wait:
            signal.raise_signal(signal.SIGINT)
        synchronize(event, edge)

    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, EIGHT)
    assert [o.token_ids for o in llm.generate(PROMPTS, EIGHT)] == expected
    nothing_is_left(llm)


@pytest.mark.parametrize("progress", [True, False, None])
def test_progress_bar(
    llm: LLM, capsys: pytest.CaptureFixture[str], progress: bool | None
) -> None:
    """Shown on stderr when asked for; by itself only on a terminal."""
    llm.generate(PROMPTS, EIGHT, progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("/32 [" in err) == bool(progress)


# ------------------------------------------------------------------ stream


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_joined_are_the_text(llm: LLM, prompt: str, seed: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed)
    pieces = list(llm.stream(prompt, params))
    assert "".join(pieces) == llm.generate(prompt, params)[0].text
    assert len(pieces) > 1
    assert all(pieces)


def test_a_piece_comes_before_the_answer_has_ended(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=40))
    next(stream)
    assert llm.engine.requests
    assert llm.engine.scheduler.num_launched < 40
    stream.close()  # type: ignore[attr-defined]


def test_streams_read_by_turns_share_the_batches(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30)
    texts = [o.text for o in llm.generate(["hello", "you"], params)]
    before = llm.engine.scheduler.num_launched
    streams = [llm.stream("hello", params), llm.stream("you", params)]
    parts = ["", ""]
    while streams_left := [i for i, stream in enumerate(streams) if stream is not None]:
        for index in streams_left:
            piece = next(streams[index], None)
            if piece is None:
                streams[index] = None  # type: ignore[call-overload]
            else:
                parts[index] += piece
    assert parts == texts
    assert llm.engine.scheduler.num_launched - before == 30
    nothing_is_left(llm)


def test_leaving_a_stream_early_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=100))
    next(stream)
    (request,) = llm.engine.requests.values()
    stream.close()  # type: ignore[attr-defined]  # as leaving a for loop does
    llm.engine.run()
    assert request.finish_reason == "abort"
    assert len(request.output_token_ids) < 100
    check_invariants(llm.engine, [request])


def test_a_stream_refuses_a_bad_prompt_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream("")


# ------------------------------------------------------------------ chat


def test_chat_goes_through_the_models_template(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
    ]
    output = llm.chat(messages, EIGHT)
    assert bytes(output.prompt_token_ids) == b"hello\nhi\n"
    assert output.token_ids == llm.generate("hello\nhi\n", EIGHT)[0].token_ids


def test_chat_without_a_template_is_refused(loaded: LoadedModel) -> None:
    with LLM(without_template(loaded), device="threads") as llm:
        with pytest.raises(ValueError, match="random-tiny has no chat template: use"):
            llm.chat([{"role": "user", "content": "hello"}])
        assert llm.generate("hello", EIGHT)


def test_without_a_tokenizer_only_token_ids_go(loaded: LoadedModel, llm: LLM) -> None:
    expected = llm.generate("hello", EIGHT)[0].token_ids
    with LLM(replace(loaded, tokenizer=None), device="threads") as other:
        (output,) = other.generate([list(b"hello")], EIGHT)
        assert (output.token_ids, output.text) == (expected, "")
        with pytest.raises(ValueError, match="no tokenizer, text prompts need one"):
            other.generate("hello", EIGHT)
        with pytest.raises(ValueError, match="no tokenizer, chat need one"):
            other.chat([{"role": "user", "content": "hello"}])
        with pytest.raises(ValueError, match="no tokenizer, streams need one"):
            next(other.stream(list(b"hello"), EIGHT))
        check_invariants(other.engine, [])


# ------------------------------------------------------------------ set-up


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            EngineConfig(ablate=frozenset({"h2d_done"})),
            r"drops the edges \['h2d_done'\].*only runs the complete schedule",
        ),
        (EngineConfig(depth=1, num_slots=1), "config has 1 slots for depth 1"),
        (EngineConfig(max_model_len=4096), "the model has 2048 positions"),
    ],
)
def test_what_would_break_is_refused(
    loaded: LoadedModel, config: EngineConfig, message: str
) -> None:
    before = loaded.model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        LLM(loaded, device="threads", config=config)
    assert loaded.model.config._attn_implementation == before


def test_an_unknown_mode_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="mode is 'both', the engines are sync, async"):
        LLM(loaded, mode="both")  # type: ignore[arg-type]


def test_both_modes_give_the_same_text(loaded: LoadedModel, llm: LLM) -> None:
    expected = [output.text for output in llm.generate(PROMPTS, EIGHT)]
    with LLM(loaded, mode="sync", device="threads") as sync:
        assert [output.text for output in sync.generate(PROMPTS, EIGHT)] == expected


def test_two_may_share_a_model_and_end_in_any_order(
    loaded: LoadedModel, llm: LLM
) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, EIGHT)]
    with LLM(loaded, device="threads") as other:
        assert [o.token_ids for o in other.generate(PROMPTS, EIGHT)] == expected
        llm.close()
        assert [o.token_ids for o in other.generate(PROMPTS, EIGHT)] == expected
    assert loaded.model.config._attn_implementation != "cbasync"


@pytest.mark.timeout(20)
def test_a_closed_one_says_so(loaded: LoadedModel) -> None:
    llm = LLM(loaded, device="threads")
    llm.close()
    llm.close()  # twice is no mistake
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello", EIGHT)


def test_repr_fits_a_log_line(llm: LLM) -> None:
    assert "random-tiny" in repr(llm)
    assert "\n" not in repr(llm)


# ------------------------------------------------------------------ detokenizer


def push_all(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The pieces as they come, what was held back last."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.just("a🙂é東京\n"))
def test_a_piece_never_ends_inside_a_character(loaded: LoadedModel, text: str) -> None:
    tokenizer = tokenizer_of(loaded)
    pieces = push_all(tokenizer, tokenizer.encode(text))
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert text.startswith(so_far)
    assert so_far == text


@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_pieces_of_any_tokens_are_the_text_decoded_at_once(
    loaded: LoadedModel, ids: list[int]
) -> None:
    tokenizer = tokenizer_of(loaded)
    assert "".join(push_all(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_complete_character_is_not_held_back(loaded: LoadedModel) -> None:
    emoji = list("🙂".encode())
    assert push_all(tokenizer_of(loaded), emoji) == ["", "", "", "🙂", ""]
    assert push_all(tokenizer_of(loaded), [97, *emoji[:2]]) == ["a", "", "", "\ufffd"]
