"""Text in, text out: what `LLM` promises to somebody who types prompts."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cbasync.config import EngineConfig
from cbasync.devices.base import Event
from cbasync.llm import LLM
from cbasync.models import LoadedModel, load_model
from cbasync.request import RequestOutput
from cbasync.sampling import SamplingParams
from cbasync.text import Detokenizer
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


# ------------------------------------------------------------------ samples


def test_samples_are_the_seeds_one_after_the_other(llm: LLM) -> None:
    """Sample i is what a request of its own with seed + i gives."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=40, n=4)
    (output,) = llm.generate("hello", params)
    alone = [
        llm.generate("hello", replace(params, n=1, seed=40 + i))[0] for i in range(4)
    ]
    assert [s.token_ids for s in output.samples] == [one.token_ids for one in alone]
    assert [s.text for s in output.samples] == [one.text for one in alone]
    assert len({s.token_ids for s in output.samples}) > 1
    assert len({s.request_id for s in output.samples}) == 4
    assert (output.token_ids, output.text) == (alone[0].token_ids, alone[0].text)


def test_one_sample_has_no_list_of_samples(llm: LLM) -> None:
    assert llm.generate("hello", EIGHT)[0].samples == ()


def test_each_prompt_has_its_own_number_of_samples(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=4, temperature=1.0, n=n) for n in (1, 3, 2)]
    outputs = llm.generate(PROMPTS[:3], params)
    assert [len(output.samples) for output in outputs] == [0, 3, 2]
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        for one in (output, *output.samples):
            assert bytes(one.prompt_token_ids).decode() == prompt
    nothing_is_left(llm)


def test_a_stream_has_one_sample(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n is 2, a stream has one sample"):
        llm.stream("hello", replace(EIGHT, n=2))
    nothing_is_left(llm)


# ------------------------------------------------------------------ how answers end


# Random, but only letters: a byte that is half a character is no stop text.
LETTERS = SamplingParams(
    max_tokens=60,
    temperature=1.0,
    seed=1,
    logit_bias=dict.fromkeys(range(ord("a"), ord("z") + 1), 50.0),
)


def free_text(llm: LLM) -> RequestOutput:
    """Sixty letters at random."""
    (output,) = llm.generate("hello", LETTERS)
    assert output.text.isalpha()
    return output


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [4, 17, 30])
def test_a_stop_text_is_cut_off_whole(llm: LLM, start: int, length: int) -> None:
    """It spans `length` tokens; the answer ends at the one that completes it."""
    free = free_text(llm)
    stop = free.text[start : start + length]
    params = replace(LETTERS, stop=stop)
    (output,) = llm.generate("hello", params)
    place = free.text.find(stop)
    assert output.text == free.text[:place]
    assert output.finish_reason == "stop"
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    decoded = tokenizer_of(llm.loaded).decode(list(output.token_ids))
    assert stop in decoded
    shorter = tokenizer_of(llm.loaded).decode(list(output.token_ids[:-1]))
    assert stop not in shorter
    assert "".join(llm.stream("hello", params)) == output.text
    nothing_is_left(llm)


def test_a_stop_text_that_never_comes_leaves_the_text_whole(llm: LLM) -> None:
    """Also its end, which looks like the beginning of the stop text."""
    free = free_text(llm)
    stop = free.text[-2:] + "never"
    params = replace(LETTERS, stop=(stop, "nor"))
    (output,) = llm.generate("hello", params)
    assert (output.text, output.finish_reason) == (free.text, "length")
    assert "".join(llm.stream("hello", params)) == free.text


def test_of_several_stop_texts_the_first_one_counts(llm: LLM) -> None:
    free = free_text(llm)
    stops = (free.text[30:33], free.text[10:13])
    (output,) = llm.generate("hello", replace(LETTERS, stop=stops))
    assert output.text == free.text[: min(free.text.find(stop) for stop in stops)]


def test_end_tokens_do_not_come_before_min_tokens(llm: LLM) -> None:
    """They are held back, not ignored: another token comes in their place."""
    free = llm.generate("hello", EIGHT)[0].token_ids
    end = free[0]
    ending = replace(EIGHT, stop_token_ids=(end,))
    assert llm.generate("hello", ending)[0].token_ids == (end,)
    for least in range(1, 9):
        (output,) = llm.generate("hello", replace(ending, min_tokens=least))
        assert len(output.token_ids) >= least
        assert end not in output.token_ids[: least - 1]
        is_stopped = output.finish_reason == "stop"
        assert is_stopped == (output.token_ids[-1] == end)


def test_stop_texts_do_not_count_before_min_tokens(llm: LLM) -> None:
    free = free_text(llm)
    stop, seen = free.text[4], 0
    params = replace(LETTERS, stop=stop)
    lengths = []
    for least in (0, 10, 25, 60):
        (output,) = llm.generate("hello", replace(params, min_tokens=least))
        assert len(output.token_ids) >= least
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        lengths.append(len(output.token_ids))
        seen += stop in output.text
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 60
    assert seen, "before min_tokens the text is text like any other"


# ------------------------------------------------------------------ log-probabilities


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    (output,) = llm.generate("hello", replace(EIGHT, logprobs=3))
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.top[entry.token_id] == entry.logprob  # greedy: the likeliest
        assert list(entry.top.values()) == sorted(entry.top.values(), reverse=True)
        assert entry.logprob < 0
    assert output.prompt_logprobs is None


def test_logprobs_are_there_when_asked_for_only(llm: LLM) -> None:
    params = [EIGHT, replace(EIGHT, logprobs=0), replace(EIGHT, logprobs=2), EIGHT]
    outputs = llm.generate(["hello"] * 4, params)
    assert [o.logprobs is None for o in outputs] == [True, False, False, True]
    assert len({o.token_ids for o in outputs}) == 1
    assert outputs[1].logprobs is not None
    assert outputs[2].logprobs is not None
    assert [e.top for e in outputs[1].logprobs] == [{}] * 8
    assert [e.logprob for e in outputs[1].logprobs] == pytest.approx(
        [e.logprob for e in outputs[2].logprobs]
    )


def test_prompt_logprobs_have_a_place_for_every_prompt_token(llm: LLM) -> None:
    """Nothing comes before the first one, so it has none."""
    params = replace(EIGHT, prompt_logprobs=2)
    (output,) = llm.generate("how are you?", params)
    entries = output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len("how are you?")
    assert entries[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], entries[1:], strict=True):
        assert entry is not None
        assert entry.token_id == token
        assert len(entry.top) == 2
    assert output.logprobs is None
    # Twice: what the cache has of the prompt is computed again for them.
    again = llm.generate("how are you?", params)[0].prompt_logprobs
    assert again is not None
    assert [e and e.token_id for e in again] == [e and e.token_id for e in entries]


def test_more_logprobs_than_the_engine_has_room_for(llm: LLM) -> None:
    with pytest.raises(ValueError, match="logprobs is 21, max_logprobs is 20"):
        llm.generate("hello", replace(EIGHT, logprobs=21))


# ------------------------------------------------------------------ priorities, metrics


def test_priorities_matter_to_the_priority_policy_only(loaded: LoadedModel) -> None:
    waits = {}
    for policy in ("first-come", "priority"):
        config = EngineConfig(num_blocks=64, max_num_seqs=1)
        with LLM(loaded, device="sim", config=config, policy=policy) as one:
            outputs = one.generate(["a", "b", "c"], EIGHT, priorities=[2, 1, 0])
        waits[policy] = [output.metrics.queue_ms for output in outputs]
    assert waits["first-come"] == sorted(waits["first-come"])
    assert waits["priority"] == sorted(waits["priority"], reverse=True)
    assert waits["priority"] != waits["first-come"]


def test_metrics_of_answers_and_of_the_run(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, EIGHT)
    for output in outputs:
        assert output.metrics.num_prompt_tokens == len(output.prompt_token_ids)
        assert output.metrics.num_output_tokens == 8
        assert 0 <= output.metrics.queue_ms <= output.metrics.time_to_first_token_ms
    assert llm.metrics.num_finished == 4
    assert llm.metrics.num_output_tokens == 32
    assert llm.metrics.num_batches == 8
    assert llm.metrics.batch_occupancy == 4 / 32


# ------------------------------------------------------------------ several threads


@pytest.mark.timeout(60)
def test_several_threads_share_one_llm(llm: LLM) -> None:
    """Each gets its own answers, whoever steps the engine."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    expected = {prompt: llm.generate(prompt, params)[0].text for prompt in PROMPTS}
    got: dict[int, list[str]] = {}
    start = threading.Barrier(4)

    def ask(number: int) -> None:
        prompt = PROMPTS[number]
        start.wait()
        answers = [llm.generate(prompt, params)[0].text for _ in range(3)]
        got[number] = [*answers, "".join(llm.stream(prompt, params))]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: [expected[prompt]] * 4 for i, prompt in enumerate(PROMPTS)}
    nothing_is_left(llm)


@pytest.mark.timeout(60)
def test_a_failure_reaches_every_thread_with_its_cause(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("planted")

    causes: list[BaseException | None] = []
    both_wait = threading.Barrier(2)

    def ask() -> None:
        both_wait.wait()
        try:
            llm.generate("hello", EIGHT)
        except (RuntimeError, OSError) as error:
            causes.append(error.__cause__ or error)

    monkeypatch.setattr(llm.engine, "collect", fail)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(cause) for cause in causes] == [OSError, OSError]


def test_a_failure_in_another_threads_turn_reaches_who_waits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of them was stepping the engine when it failed."""
    stream = llm.stream("hello", EIGHT)

    def fail(waiting_for: object) -> int:
        llm.engine.fail(OSError("planted"))
        return 0

    monkeypatch.setattr(llm, "_step", fail)
    with pytest.raises(RuntimeError, match="the engine failed") as caught:
        llm.generate("hello", EIGHT)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RuntimeError, match="the engine failed") as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, OSError)


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
        with pytest.raises(ValueError, match="no tokenizer, stop texts need one"):
            other.generate([list(b"hello")], replace(EIGHT, stop="x"))
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


def test_spaces_between_words_survive() -> None:
    """Some tokenizers drop the space of a text's first token, and only of that."""
    vocab = {word: index for index, word in enumerate(["▁to", "▁be", "▁or", "▁not"])}
    backend = Tokenizer(WordLevel(vocab, unk_token="▁to"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "be"
    pieces = push_all(tokenizer, [0, 1, 2, 3, 0, 1])
    assert pieces == ["to", " be", " or", " not", " to", " be", ""]


def test_a_chat_gets_no_second_start_token() -> None:
    """The template has written what a tokenizer would put before plain text."""
    loaded = load_model("random-tiny")
    start = TemplateProcessing(single="! $A", special_tokens=[("!", ord("!"))])
    tokenizer_of(loaded).backend_tokenizer.post_processor = start
    with LLM(loaded, device="threads") as llm:
        plain = llm.generate("hello", EIGHT)[0]
        chat = llm.chat([{"role": "user", "content": "!hello"}], EIGHT)
    assert bytes(plain.prompt_token_ids) == b"!hello"
    assert bytes(chat.prompt_token_ids) == b"!hello\n"


# ------------------------------------------------------------------ closed, forgotten


@pytest.mark.timeout(20)
def test_a_stream_read_after_the_end_says_so(loaded: LoadedModel) -> None:
    with LLM(loaded, device="threads") as llm:
        stream = llm.stream("hello", EIGHT)
    with pytest.raises(RuntimeError) as caught:
        list(stream)
    assert "closed" in str(caught.value.__cause__)


@pytest.mark.timeout(60)
def test_closed_while_another_thread_waits_for_an_answer(loaded: LoadedModel) -> None:
    llm, errors = LLM(loaded, device="threads"), []
    has_begun = threading.Event()

    def ask() -> None:
        try:
            for _ in llm.stream("hello", SamplingParams(max_tokens=2000)):
                has_begun.set()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    has_begun.wait()
    llm.close()
    thread.join()
    assert ["closed" in str(error.__cause__) for error in errors] == [True]


def test_a_stream_that_nobody_reads_ends_with_its_last_reference(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=1000))
    assert llm.engine.has_work
    del stream
    gc.collect()
    nothing_is_left(llm)
    assert llm.metrics.num_output_tokens == 0


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], [None, 3]])
def test_params_of_another_kind_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match=r"write SamplingParams\(max_tokens=...\)"):
        llm.generate(["hello"] * (1 + (None in params)), params)
    check_invariants(llm.engine, [])


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}])
def test_a_chat_is_a_list_of_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"messages is .*, a list of .* is needed: "):
        llm.chat(messages, EIGHT)
