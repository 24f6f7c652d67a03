"""What is refused, by whom, and in which words: value, limit, what to change."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from cbasync.config import EngineConfig
from cbasync.devices import ThreadsDevice
from cbasync.engine import SyncEngine
from cbasync.request import Request, check_prompt
from cbasync.runner import ScriptedRunner
from cbasync.sampling import MAX_SEED, SamplingParams

NAN, INF = math.nan, math.inf
WHOLE = "the range is {}: give a whole number in it"
NUMBER = "the range is {}: give a number in it"

BAD: list[tuple[str, Any, str]] = [
    *[("max_tokens", v, WHOLE.format("1 and up")) for v in (0, -1, 1.5, True, "8")],
    *[("min_tokens", v, WHOLE.format("0 and up")) for v in (-1, 1.0, False)],
    *[("n", v, WHOLE.format("1 and up")) for v in (0, -2, 2.0)],
    *[("top_k", v, WHOLE.format("0 and up")) for v in (-1, 0.5, None)],
    *[("seed", v, WHOLE.format(f"0 to {MAX_SEED}")) for v in (-1, 2**31, None)],
    *[("logprobs", v, WHOLE.format("0 and up")) for v in (-1, 1.5, True)],
    *[("prompt_logprobs", v, WHOLE.format("0 and up")) for v in (-1, 0.0)],
    *[("temperature", v, NUMBER.format("0 to 100")) for v in (-0.1, 101, NAN, INF)],
    *[("top_p", v, NUMBER.format("above 0 to 1")) for v in (0, -0.5, 1.01, NAN)],
    *[("min_p", v, NUMBER.format("0 to 1")) for v in (-0.1, 1.5, NAN)],
    *[
        ("repetition_penalty", v, NUMBER.format("above 0 to 100"))
        for v in (0, -1.0, 100.5, NAN)
    ],
    *[
        (name, v, NUMBER.format("-100 to 100"))
        for name in ("presence_penalty", "frequency_penalty")
        for v in (-101, 100.1, NAN, -INF)
    ],
    *[("temperature", v, NUMBER.format("0 to 100")) for v in ("1", None, True)],
    *[("top_p", v, NUMBER.format("above 0 to 1")) for v in ("1", None, True)],
]
"""Setting, value, and what the message says after `name is value, `."""


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_refused_with_limit_and_remedy(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}, {message}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": ("a", "")}, "stop holds '', texts are needed: remove it"),
        ({"stop": ""}, "stop holds ''"),
        ({"stop": [b"x"]}, "stop holds b'x'"),
        ({"stop": 5}, "stop is 5, a text or a list of them is needed: "),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids is -1, the range is 0 to"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids is 1.5, the range is 0 to"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, a list of token ids is needed: "),
        ({"logit_bias": {-1: 2.0}}, "logit_bias token is -1, the range is 0 and up"),
        ({"logit_bias": {"a": 2.0}}, "logit_bias token is 'a'"),
        ({"logit_bias": {3: NAN}}, "logit_bias of token 3 is nan"),
        ({"logit_bias": {3: INF}}, "logit_bias of token 3 is inf"),
        ({"logit_bias": {3: "2"}}, "logit_bias of token 3 is '2'"),
        ({"logit_bias": {3: 1e39}}, "logit_bias of token 3 is 1e[+]39"),
        ({"logit_bias": 3}, "logit_bias is 3, .* is needed: "),
        ({"logit_bias": [1, 2]}, r"logit_bias is \[1, 2\], .* is needed: "),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias names token 3 twice"),
    ],
)
def test_bad_lists_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(**values)
    assert ": " in str(caught.value), "it says what to change"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_tokens": 4, "min_tokens": 5},
            "min_tokens is 5, max_tokens is 4: lower the first or raise the second",
        ),
        # The last sample is drawn with seed + n - 1.
        ({"n": 3, "seed": MAX_SEED - 1}, f"the range is 0 to {MAX_SEED - 2}"),
    ],
)
def test_settings_that_contradict_each_other(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_the_limits_themselves_are_allowed() -> None:
    for values in (
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 100},
        {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0},
        {"top_p": 1e-6, "min_p": 1.0},
        {"repetition_penalty": 100, "presence_penalty": -100},
        {"frequency_penalty": 100, "logit_bias": {0: -INF, 1: 1e9}},
        {"seed": MAX_SEED},
        {"n": 3, "seed": MAX_SEED - 2},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"stop": "one", "stop_token_ids": [0, MAX_SEED]},
        {"temperature": np.float32(0.5)},
    ):
        SamplingParams(**values)


def test_lists_are_kept_as_tuples_so_that_params_can_be_compared() -> None:
    one = SamplingParams(stop="x", stop_token_ids=[1], logit_bias={4: 1.0})
    other = SamplingParams(stop=["x"], stop_token_ids=(1,), logit_bias=((4, 1.0),))
    assert one == other
    assert hash(one) == hash(other)
    assert one.bias_pairs == ((4, 1.0),)


def test_no_setting_is_left_unchecked() -> None:
    checked = {name for name, _, _ in BAD} | {"stop", "stop_token_ids", "logit_bias"}
    assert checked | {"ignore_eos"} == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("values", "is_random", "has_filters", "reads_history", "every_position"),
    [
        ({}, False, False, False, False),
        ({"temperature": 0.1}, True, False, False, False),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, False, False, False, False),
        ({"temperature": 1, "top_k": 1}, True, True, False, False),
        ({"temperature": 1, "top_p": 0.9}, True, True, False, False),
        ({"temperature": 1, "min_p": 0.1}, True, True, False, False),
        ({"repetition_penalty": 1.1}, False, False, True, True),
        ({"presence_penalty": -1}, False, False, True, True),
        ({"frequency_penalty": 0.5}, False, False, True, True),
        ({"prompt_logprobs": 0}, False, False, False, True),
        ({"logprobs": 3}, False, False, False, False),
    ],
)
def test_what_a_request_needs_of_the_sampler(
    values: dict[str, Any],
    is_random: bool,
    has_filters: bool,
    reads_history: bool,
    every_position: bool,
) -> None:
    params = SamplingParams(**values)
    assert params.is_random == is_random
    assert params.has_filters == has_filters
    assert params.reads_history == reads_history
    assert params.needs_every_position == every_position


def test_a_request_shows_how_far_it_is() -> None:
    request = Request("a", [1, 2], SamplingParams(max_tokens=5))
    request.output_token_ids.append(3)
    assert repr(request) == "Request(a, waiting, 2 prompt + 1 of 5 tokens)"
    assert request._repr_html_().endswith('<progress max="5" value="1"></progress>')


# ------------------------------------------------------------------ the engine's limits


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *[
            ({name: 0}, f"{name} is 0, at least 1 is needed: give a positive number")
            for name in (
                "max_num_seqs",
                "max_num_batched_tokens",
                "block_size",
                "max_model_len",
                "max_logit_bias",
            )
        ],
        ({"max_logprobs": -1}, "max_logprobs is -1, at least 0 is needed"),
        ({"num_blocks": 1.5}, "num_blocks is 1.5, a whole number is needed: give an"),
        ({"depth": True}, "depth is True, a whole number is needed"),
        ({"depth": 4}, "depth is 4, at most 3 is supported: .* use 1 or 2"),
        ({"carry_over": "ring"}, "carry_over is 'ring', the families are 'slot' and"),
        ({"ablate": {"luck"}}, "ablate names 'luck', the edges are h2d_done"),
        (
            {"max_num_seqs": 4, "warm_up": (2, 8)},
            "warm_up holds 8, a decode batch has 1 to 4 rows: ",
        ),
        ({"warm_up": (0,)}, "warm_up holds 0, a decode batch has 1 to 32 rows: "),
        ({"warm_up": "each"}, "warm_up is 'each', .* or 'all' is needed"),
        ({"warm_up": 4}, "warm_up is 4, .* or 'all' is needed"),
    ],
)
def test_a_bad_config_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


@pytest.fixture
def engine() -> Any:
    config = EngineConfig(
        max_num_seqs=2, block_size=4, num_blocks=8, max_logprobs=2, max_logit_bias=3
    )
    with SyncEngine(ScriptedRunner(vocab_size=10), config, ThreadsDevice()) as one:
        yield one


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logprobs": 3}, "logprobs is 3, max_logprobs is 2: ask for fewer"),
        ({"prompt_logprobs": 9}, "prompt_logprobs is 9, max_logprobs is 2"),
        ({"n": 3}, "n is 3, an engine draws one sample of a request: "),
        ({"stop_token_ids": (10,)}, "token 10 is biased or ends the request.* 0 to 9"),
        ({"logit_bias": {10: 1.0}}, "token 10 is biased or ends the request"),
        (
            {"logit_bias": dict.fromkeys(range(4), 1.0)},
            "4 tokens are biased or held back, max_logit_bias is 3: bias fewer",
        ),
        (
            # Held back tokens take places beside the biased ones.
            {
                "logit_bias": {0: 1.0, 1: 1.0},
                "stop_token_ids": (2, 3),
                "min_tokens": 1,
            },
            "4 tokens are biased or held back",
        ),
        ({"max_tokens": 31}, "3 prompt .* 31 new .* need 9 blocks of 4, .* has 8"),
    ],
)
def test_the_engine_refuses_what_is_too_much_for_it(
    engine: SyncEngine, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request([1, 2, 3], SamplingParams(**({"max_tokens": 8} | values)))
    assert not engine.requests
    assert not engine.has_work


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": 2, "prompt_logprobs": 2},
        {"stop_token_ids": (9,), "logit_bias": {9: 1.0}},
        {"logit_bias": dict.fromkeys(range(3), 1.0)},
        # The same token biased and held back takes one place.
        {
            "logit_bias": {0: 1.0, 1: 1.0, 2: 1.0},
            "stop_token_ids": (2,),
            "min_tokens": 1,
        },
        # End tokens that are not held back take none.
        {"logit_bias": dict.fromkeys(range(3), 1.0), "stop_token_ids": (5, 6)},
        {"max_tokens": 30},  # the last token needs no place in the cache
    ],
)
def test_the_engines_limits_themselves_are_allowed(
    engine: SyncEngine, values: dict[str, Any]
) -> None:
    engine.new_request([1, 2, 3], SamplingParams(**({"max_tokens": 8} | values)))


def test_the_models_end_tokens_are_checked_like_the_requests_own(
    engine: SyncEngine,
) -> None:
    with pytest.raises(ValueError, match="token 12 is biased or ends the request"):
        engine.new_request([1], SamplingParams(max_tokens=2), eos_token_ids=[12])
    ignoring = SamplingParams(max_tokens=2, ignore_eos=True)
    assert not engine.new_request([1], ignoring, eos_token_ids=[2]).stop_token_ids


def test_ids_are_given_and_unique(engine: SyncEngine) -> None:
    few = SamplingParams(max_tokens=2)
    names = {engine.new_request([1], few).request_id for _ in range(3)}
    assert len(names) == 3
    named = engine.new_request([1], few, request_id="")
    assert named.request_id == ""


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    "prompt",
    [
        [0, 16],
        (0, 16),
        np.array([0, 16]),
        np.array([0, 16], dtype=np.uint8),
        torch.tensor([0, 16]),
        torch.tensor([0, 16], dtype=torch.int32),
        [np.int32(0), np.int64(16)],
        range(0, 17, 16),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_may_be_any_flat_list_of_ints(prompt: Any) -> None:
    checked = check_prompt(prompt, vocab_size=17)
    assert checked == [0, 16]
    assert {type(token) for token in checked} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty, at least 1 token is needed: add a token"),
        (np.array([], dtype=np.int64), "prompt is empty"),
        ("text", "prompt is str, a flat list of token ids is needed: tokenize it"),
        (None, "prompt is NoneType, a flat list"),
        (5, "prompt is int, a flat list"),
        (torch.tensor(5), "prompt is int, a flat list"),
        ({1, 2}, "prompt is set, a flat list"),
        (iter([1]), "prompt is list_iterator, a flat list"),
        ([True], r"prompt\[0\] is True, a whole token id is needed"),
        (torch.tensor([True]), r"prompt\[0\] is True"),
        ([1, 2.0], r"prompt\[1\] is 2.0, a whole token id is needed"),
        (np.array([1.5]), r"prompt\[0\] is 1.5"),
        ([1, None], r"prompt\[1\] is None"),
        ([1, "2"], r"prompt\[1\] is '2'"),
        (torch.tensor([[1, 2]]), r"prompt\[0\] is \[1, 2\].*one flat list of ints"),
        ([0, 17], r"prompt\[1\] is 17, token ids go from 0 to 16: check the tokenizer"),
        ([-1], r"prompt\[0\] is -1, token ids go from 0 to 16"),
        ([2**70], r"prompt\[0\] is \d+, token ids go from 0 to 16"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_prompt(prompt, vocab_size=17)


def test_not_more_logprobs_than_there_are_tokens() -> None:
    with SyncEngine(ScriptedRunner(vocab_size=10), device=ThreadsDevice()) as engine:
        with pytest.raises(ValueError, match=r"logprobs is 11, .* has 10 tokens: ask"):
            engine.new_request([1], SamplingParams(logprobs=11))
        engine.new_request([1], SamplingParams(logprobs=10))


def test_a_priority_is_a_whole_number(engine: SyncEngine) -> None:
    with pytest.raises(ValueError, match="priority is 'high', a whole number is need"):
        engine.new_request([1], SamplingParams(max_tokens=2), priority="high")


def test_top_k_may_be_larger_than_any_vocabulary(engine: SyncEngine) -> None:
    params = SamplingParams(max_tokens=2, temperature=1.0, top_k=2**40)
    request = engine.add_request([1], params)
    engine.run()
    assert len(request.output_token_ids) == 2


def test_numpys_whole_numbers_are_whole_numbers() -> None:
    three: Any = np.int64(3)
    params = SamplingParams(max_tokens=three, stop_token_ids=[three])
    assert (params.max_tokens, params.stop_token_ids) == (3, (3,))
    assert EngineConfig(depth=three).num_slots == 4
