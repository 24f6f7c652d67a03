"""The product in twenty one-line facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import pytest
from transformers import LlamaForCausalLM

from cbasync import (
    LLM,
    AsyncEngine,
    EngineConfig,
    ModelRunner,
    SamplingParams,
    SyncEngine,
    make_device,
)
from cbasync.engine import Engine
from cbasync.random_models import tiny_model
from cbasync.timeline import PHASES, side_by_side
from tests.oracle import Job, expected

PROMPTS = ((1, 2, 3), (4, 5, 6, 7, 8, 9, 10), (11,), (12, 13, 14, 15))
SIX = SamplingParams(max_tokens=6)
DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
LONG_TEXT = "x" * 2048
TYPO = frozenset({"h2d_dnoe"})


@cache
def model() -> LlamaForCausalLM:
    return tiny_model()


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams = SIX) -> list[int]:
    """Without engine, cache or company."""
    return expected(model(), Job(prompt, params))


def engine(kind: type[Engine] = AsyncEngine, **config: object) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 32, "max_model_len": 32} | config
    runner, device = ModelRunner(model()), make_device("threads")
    return kind(runner, EngineConfig(**sizes), device)  # type: ignore[arg-type]


def ran(
    kind: type[Engine] = AsyncEngine, params: SamplingParams = SIX, **config: object
) -> Engine:
    """An engine that has answered all prompts; the answers are in `answers`."""
    with engine(kind, **config) as one:
        requests = [one.add_request(prompt, params) for prompt in PROMPTS]
        one.run()
    one.answers = [r.output_token_ids for r in requests]  # type: ignore[attr-defined]
    return one


def answers(
    kind: type[Engine] = AsyncEngine, params: SamplingParams = SIX, **config: object
) -> list[list[int]]:
    return ran(kind, params, **config).answers  # type: ignore[attr-defined,no-any-return]


def first_seen(tokens: list[int]) -> int:
    """A token that the answer says only late: a good end token."""
    return max(set(tokens), key=tokens.index)


def order(kind: type[Engine]) -> list[str]:
    """What the host did for batches 0 and 1, in its order."""
    spans = ran(kind).timeline.lane("cpu")
    return [f"{s.phase} {s.batch}" for s in spans if s.batch in (0, 1)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("random-tiny", device="threads") as one:
        yield one


def test_async_equals_sync() -> None:
    assert answers(AsyncEngine) == answers(SyncEngine)


def test_an_answer_in_company_is_the_answer_alone() -> None:
    assert answers() == [alone(prompt) for prompt in PROMPTS]


def test_so_is_a_drawn_one() -> None:
    assert answers(params=DRAWN) == [alone(prompt, DRAWN) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_every_depth_gives_the_same_tokens(depth: int) -> None:
    assert answers(depth=depth) == answers(SyncEngine)


def test_both_carry_over_families_give_the_same_tokens() -> None:
    assert answers(carry_over="row") == answers(carry_over="slot")


def test_reading_a_prompt_in_pieces_changes_nothing() -> None:
    assert answers(max_num_batched_tokens=3) == answers()


def test_too_few_blocks_change_nothing() -> None:
    assert answers(num_blocks=4) == answers()


def test_a_stop_by_length_costs_no_step() -> None:
    assert ran().scheduler.num_launched == SIX.max_tokens


def test_a_stop_by_end_token_costs_a_discarded_row_for_each_batch_ahead() -> None:
    assert [discarded(depth) for depth in (0, 1, 2, 3)] == [0, 1, 2, 3]


def test_all_blocks_come_back() -> None:
    assert ran().scheduler.blocks.pool.num_free == 32


def test_what_is_aborted_ends_and_gives_its_blocks_back() -> None:
    assert aborted() == ("abort", 32)


def test_sync_books_a_batch_before_it_schedules_the_next() -> None:
    assert order(SyncEngine).index("update 0") < order(SyncEngine).index("schedule 1")


def test_async_prepares_a_batch_before_it_has_seen_the_last_tokens() -> None:
    assert order(AsyncEngine).index("prepare 1") < order(AsyncEngine).index("update 0")


def test_slot_a_and_slot_b_share_no_memory_and_neither_do_host_and_device() -> None:
    assert all(end <= start for (_, end), (start, _) in pairwise(sorted(memory())))


def test_a_timeline_has_the_six_phases() -> None:
    assert {span.phase for span in ran().timeline.spans} == set(PHASES)


def test_two_runs_are_ten_lines_of_text() -> None:
    assert len(drawn().replace("\n\n", "\n").splitlines()) == 10


def test_an_unknown_edge_is_refused() -> None:
    assert "ablate names 'h2d_dnoe'" in refusal(lambda: EngineConfig(ablate=TYPO))


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(llm: LLM) -> None:
    assert "max_model_len is 2048" in refusal(lambda: llm.generate(["hi", LONG_TEXT]))


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    assert [bytes(o.prompt_token_ids) for o in llm.generate(["b", "a"])] == [b"b", b"a"]


def test_the_pieces_of_a_stream_are_the_text(llm: LLM) -> None:
    assert "".join(llm.stream("hi", SIX)) == llm.generate("hi", SIX)[0].text


def discarded(depth: int) -> int:
    """Rows thrown away when one answer ends early by its end token."""
    free = alone(PROMPTS[0])
    stop = SamplingParams(max_tokens=6, stop_token_ids=(first_seen(free[:2]),))
    with engine(depth=depth) as one:
        request = one.add_request(PROMPTS[0], stop)
        one.run()
    assert request.finish_reason == "stop"
    return one.scheduler.discarded_tokens


def aborted() -> tuple[str | None, int]:
    """How an aborted request ends, and how many blocks are free afterwards."""
    with engine() as one:
        request = one.add_request(PROMPTS[0], SamplingParams(max_tokens=20))
        for _ in range(3):
            one.step()
        one.abort(request.request_id)
        one.run()
    return request.finish_reason, one.scheduler.blocks.pool.num_free


def refusal(call: Callable[[], object]) -> str:
    """What the error says."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    return str(caught.value)


def memory() -> list[tuple[int, int]]:
    """First and last address of every buffer of both slots, on both sides."""
    with engine() as one:
        buffers = [
            buffer
            for slot in one.io_slots
            for buffer in (
                slot.host_inputs,
                slot.device_inputs,
                slot.host_sampled,
                slot.device_sampled,
            )
        ]
        return [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers]


def drawn() -> str:
    return side_by_side(ran(SyncEngine).timeline, ran(AsyncEngine).timeline)
