"""The sampler: penalties and filters as transformers has them, draws without state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbasync.sampler import (
    NUM_SAMPLING_COLUMNS,
    SamplerInputs,
    SamplerNeeds,
    TokenHistory,
    draw,
    filtered,
    sample,
    top_logprobs,
    uniform,
)

CPU = torch.device("cpu")
ALL_NEEDS = SamplerNeeds(is_random=True, filters=True, history=True, bias=True)
RANDOM = SamplerNeeds(is_random=True)


@dataclass
class Row:
    """What one request asks, as the arrays of a batch say it."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    seed: int = 0
    position: int = 7
    bias: list[tuple[int, float]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)


def inputs(rows: list[Row], bias_width: int = 4) -> SamplerInputs:
    """The arrays of a batch in which row i of the history belongs to request i."""
    columns = [
        (r.temperature, r.top_p, r.min_p, r.repetition, r.presence, r.frequency)
        for r in rows
    ]
    bias_ids = torch.zeros(len(rows), bias_width, dtype=torch.int32)
    bias_values = torch.zeros(len(rows), bias_width)
    for i, row in enumerate(rows):
        for column, (token, value) in enumerate(row.bias):
            bias_ids[i, column], bias_values[i, column] = token, value
    return SamplerInputs(
        torch.tensor(columns).view(len(rows), NUM_SAMPLING_COLUMNS),
        torch.tensor([r.top_k for r in rows], dtype=torch.int32),
        torch.tensor([r.seed for r in rows], dtype=torch.int32),
        torch.tensor([r.position for r in rows]),
        torch.arange(len(rows)),
        bias_ids,
        bias_values,
    )


def history_of(rows: list[Row], vocab: int) -> TokenHistory:
    """What the device has counted once each request has read all its tokens."""
    history = TokenHistory(len(rows), vocab, CPU)
    for i, row in enumerate(rows):
        places = [i] * len(row.prompt) + [len(rows) + i] * len(row.output)
        tokens = row.prompt + row.output
        history.add(
            torch.tensor(places), torch.tensor(tokens), torch.arange(len(tokens))
        )
    return history


def repeated(row: Row, count: int, seeds: range) -> SamplerInputs:
    """The same request once per seed."""
    one = inputs([row])
    many = SamplerInputs(*(v.expand(count, *v.shape[1:]) for v in one))
    return many._replace(seeds=torch.tensor(list(seeds), dtype=torch.int32))


# ------------------------------------------------------------------ strategies

# Few values, so that ties are common; extremes, and tokens that cannot come.
_logit = st.sampled_from([0.0, 0.5, 1.0, -1.0, -3.0, 4.0, 60.0, -1e4, 1e4, -math.inf])
_logit |= st.floats(-8, 8, width=32)


@st.composite
def logits_of(draw: st.DrawFn, vocab: int | None = None) -> list[float]:
    """Scores of one row; at least one token is possible."""
    size = vocab or draw(st.integers(1, 24))
    values = draw(st.lists(_logit, min_size=size, max_size=size))
    if all(value == -math.inf for value in values):
        values[draw(st.integers(0, size - 1))] = 1.0
    return values


def tensor(values: list[float]) -> Tensor:
    """`[1, V]` as the sampler filters it."""
    return torch.tensor([values], dtype=torch.float64)


# ------------------------------------------------------------------ filters


def narrowed(
    scores: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """`filtered` for one row."""
    p, least = torch.tensor([top_p]), torch.tensor([min_p])
    return filtered(scores, torch.tensor([top_k], dtype=torch.int32), p, least)


NO_IDS: Any = torch.zeros(1, 1, dtype=torch.int64)


@given(values=logits_of(), top_k=st.integers(1, 40))
def test_top_k_is_the_one_of_transformers(values: list[float], top_k: int) -> None:
    """Ties at the k-th place all stay; more than there are tokens means all."""
    scores: Any = tensor(values)
    want = TopKLogitsWarper(top_k)(NO_IDS, scores)
    assert narrowed(scores, top_k=top_k).tolist() == want.tolist()


@given(values=logits_of(), min_p=st.floats(0.0, 1.0, width=32))
def test_min_p_is_the_one_of_transformers(values: list[float], min_p: float) -> None:
    scores: Any = tensor(values)
    want = MinPLogitsWarper(min_p)(NO_IDS, scores)
    got = narrowed(scores, min_p=min_p)
    probabilities = scores.softmax(-1)
    border = min_p * probabilities.max()
    clear = (probabilities - border).abs() > 1e-7 * border  # not a matter of rounding
    assert got[clear].tolist() == want[clear].tolist()
    assert got.argmax() == scores.argmax()


@given(values=logits_of(), top_p=st.floats(2**-10, 1.0, width=32))
def test_top_p_is_the_one_of_transformers(values: list[float], top_p: float) -> None:
    """The same scores stay; which of two equal tokens is cut, nobody promises."""
    scores: Any = tensor(values)
    want = TopPLogitsWarper(top_p)(NO_IDS, scores)
    got = narrowed(scores, top_p=top_p)
    ours, theirs = (
        sorted((v for v in kept[0].tolist() if v > -math.inf), reverse=True)
        for kept in (got, want)
    )
    shorter, longer = sorted([ours, theirs], key=len)
    assert longer[: len(shorter)] == shorter
    if len(longer) > len(shorter):  # only where the sum meets p to the last digits
        sums = scores.softmax(-1).sort(descending=True).values.cumsum(-1)[0]
        assert abs(sums[len(shorter) - 1].item() - top_p) < 1e-6
    changed = got[0] != scores[0]
    assert (got[0][changed] == -math.inf).all(), "a filter only removes"


@given(
    values=logits_of(),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.3, 0.61, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.3]),
)
def test_all_filters_one_after_the_other(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Each one sees what the one before it has left."""
    scores: Any = TemperatureLogitsWarper(temperature)(NO_IDS, tensor(values))
    chain = LogitsProcessorList()
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(torch.tensor(top_p).item()))
    if min_p:
        chain.append(MinPLogitsWarper(torch.tensor(min_p).item()))
    want = chain(NO_IDS, scores)
    got = narrowed(scores, top_k, top_p, min_p)
    kept = [sorted(t[0][t[0] > -math.inf].tolist()) for t in (got, want)]
    assert kept[0] == kept[1]


def test_one_token_is_always_left() -> None:
    for values in ([3.0], [-math.inf, 2.0, -math.inf], [1.0, 1.0, 1.0]):
        got = narrowed(tensor(values), top_k=1, top_p=1e-9, min_p=1.0)
        assert got.max() == max(values)


# ------------------------------------------------------------------ penalties and bias

_penalties = st.builds(
    Row,
    repetition=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    presence=st.sampled_from([0.0, 0.75, -1.5]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 8), max_size=8),
)


@given(rows=st.lists(_penalties, min_size=1, max_size=4), data=st.data())
def test_penalties_are_those_of_transformers(
    rows: list[Row], data: st.DataObject
) -> None:
    """Repetition by transformers' processor, the other two by plain counting."""
    values = [data.draw(logits_of(vocab=9)) for _ in rows]
    logits = torch.tensor(values, dtype=torch.float64)
    got = history_of(rows, 9).penalize(logits, inputs(rows))
    for i, row in enumerate(rows):
        penalty = RepetitionPenaltyLogitsProcessor(torch.tensor(row.repetition).item())
        ids: Any = torch.tensor([row.prompt + row.output])
        want = penalty(ids, logits[i, None].clone())[0]
        for token in set(row.output):
            want[token] -= row.frequency * row.output.count(token) + row.presence
        assert torch.allclose(got[i], want, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
def test_history_counts_the_same_over_any_chunks(chunk: int) -> None:
    """Prompt and output are told apart, wherever a batch ends."""
    tokens, num_prompt, rows = [3, 1, 3, 3, 0, 1, 2, 3, 3], 4, 2
    whole = history_of([Row(), Row(prompt=tokens[:4], output=tokens[4:])], 5)
    history = TokenHistory(rows, 5, CPU)
    for start in range(0, len(tokens), chunk):
        places = torch.arange(start, min(start + chunk, len(tokens)))
        where = torch.where(places < num_prompt, 1, rows + 1)
        history.add(where, torch.tensor(tokens)[places], places)
    assert history.counts[1].tolist() == [0, 1, 0, 3, 0]
    assert history.counts[rows + 1].tolist() == [1, 1, 1, 2, 0]
    assert history.counts[[1, 3]].tolist() == whole.counts[[1, 3]].tolist()


def test_a_restart_forgets_both_counts_of_its_row_only() -> None:
    rows = [Row(prompt=[1, 1], output=[2]), Row(prompt=[0, 2], output=[3, 3])]
    history = history_of(rows, 4)
    history.add(torch.tensor([0, 0]), torch.tensor([3, 1]), torch.tensor([0, 1]))
    assert history.counts[0].tolist() == [0, 1, 0, 1]
    assert history.counts[2].tolist() == [0, 0, 0, 0]
    assert history.counts[1].tolist() == [1, 0, 1, 0]
    assert history.counts[3].tolist() == [0, 0, 0, 2]


def test_two_requests_start_over_in_one_batch() -> None:
    history = history_of([Row(prompt=[1]), Row(prompt=[2]), Row(prompt=[3])], 4)
    history.add(
        torch.tensor([0, 2, 2]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])
    )
    assert history.counts[:3].tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [1, 1, 0, 0]]


def test_tokens_of_nobody_touch_nobody() -> None:
    rows = [Row(prompt=[1], output=[2]), Row(prompt=[0])]
    history = history_of(rows, 4)
    before = history.counts[: history.nobody].clone()
    for position in (0, 5):
        nobody = torch.tensor([history.nobody] * 3)
        places = torch.tensor([position] * 3)
        history.add(nobody, torch.tensor([1, 2, 2]), places)
    assert history.counts[: history.nobody].equal(before)


def test_a_history_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        history = TokenHistory(1, 4, CPU)
    history.add(torch.tensor([0]), torch.tensor([2]), torch.tensor([0]))
    assert history.counts[0].tolist() == [0, 0, 1, 0]


def test_penalties_without_a_history_are_a_mistake_that_shows() -> None:
    with pytest.raises(AssertionError, match="penalties need a history"):
        sample(torch.zeros(1, 3), inputs([Row()]), SamplerNeeds(history=True))


def test_a_bias_beyond_half_precision_still_has_a_softmax() -> None:
    rows = inputs([Row(temperature=1.0, bias=[(2, 1e9)])])
    logits = torch.zeros(1, 5, dtype=torch.float16)
    assert sample(logits, rows, SamplerNeeds(is_random=True, bias=True)).item() == 2


def test_bias_moves_the_argmax_and_padding_moves_nothing() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0], [5.0, 4.0, 3.0]])
    rows = [Row(bias=[(2, 3.0)]), Row(bias=[(0, -math.inf)]), Row()]
    tokens = sample(logits, inputs(rows), SamplerNeeds(bias=True))
    assert tokens.tolist() == [2, 1, 0]
    impossible = torch.tensor([[-math.inf, 1.0, 0.0]])  # padding adds 0 to token 0
    assert sample(impossible, inputs([Row()]), SamplerNeeds(bias=True)).item() == 1


@pytest.mark.parametrize("length", range(5))
def test_held_back_end_tokens_are_those_of_transformers(length: int) -> None:
    """Too short: the end tokens get minus infinity, as MinLength gives them."""
    ends, least = [1, 4], 3
    scores: Any = torch.tensor([[0.0, 9.0, 1.0, 2.0, 8.0]])
    ids: Any = torch.zeros(1, length, dtype=torch.int64)
    want = MinLengthLogitsProcessor(least, ends, device="cpu")(ids, scores).argmax()
    bias = [(token, -math.inf) for token in ends] if length < least else []
    got = sample(scores, inputs([Row(bias=bias)]), SamplerNeeds(bias=True))
    assert got.item() == want.item() == (1 if length >= least else 3)


# ------------------------------------------------------------------ company

_rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition=st.sampled_from([1.0, 1.7]),
    presence=st.sampled_from([0.0, 2.0]),
    frequency=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 99]),
    seed=st.integers(0, 99),
    position=st.integers(0, 99),
    bias=st.lists(st.tuples(st.integers(0, 8), st.sampled_from([4.0, -4.0]))),
    output=st.lists(st.integers(0, 8), max_size=5),
).map(lambda row: Row(**(vars(row) | {"bias": row.bias[:4]})))


def needs_of(row: Row) -> SamplerNeeds:
    """The least that a batch with only this row needs."""
    return SamplerNeeds(
        is_random=row.temperature > 0,
        filters=bool(row.top_k or row.top_p < 1 or row.min_p),
        history=row.repetition != 1 or bool(row.presence or row.frequency),
        bias=bool(row.bias),
    )


@given(rows=st.lists(_rows, min_size=1, max_size=5), data=st.data())
def test_a_row_gives_the_same_alone_and_in_company(
    rows: list[Row], data: st.DataObject
) -> None:
    """Alone it pays for what it needs; in company everything runs over every row."""
    values = [data.draw(logits_of(vocab=9)) for _ in rows]
    logits = torch.tensor(values)
    together = sample(logits, inputs(rows), ALL_NEEDS, history_of(rows, 9)).tolist()
    for i, row in enumerate(rows):
        alone = sample(
            logits[i, None], inputs([row]), needs_of(row), history_of([row], 9)
        )
        assert alone.item() == together[i]


@given(values=logits_of(vocab=9), neighbour=_rows)
def test_who_asks_for_nothing_gets_the_argmax_beside_anybody(
    values: list[float], neighbour: Row
) -> None:
    rows = [neighbour, Row(output=[0, 1, 2, 2]), neighbour]
    logits = torch.tensor([values] * 3)
    got = sample(logits, inputs(rows), ALL_NEEDS, history_of(rows, 9))
    assert got[1].item() == logits[1].argmax().item()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    temperatures = [1.0, 0.0, 0.7, 2.0, 1.0]
    rows = inputs(
        [Row(temperature=t, seed=i, position=i + 3) for i, t in enumerate(temperatures)]
    )
    together = sample(logits, rows, RANDOM)
    alone = [
        sample(logits[i, None], SamplerInputs(*(v[i, None] for v in rows)), RANDOM)
        for i in range(5)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


# ------------------------------------------------------------------ draws


def test_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9]).expand(50, -1)
    assert sample(logits, repeated(Row(), 50, range(50)), RANDOM).eq(1).all()


@given(st.integers(0, 2**31 - 1), st.integers(0, 100_000))
def test_uniform_is_in_range_and_repeats(seed: int, position: int) -> None:
    one = uniform(torch.tensor([seed]), torch.tensor([position]))
    many = uniform(torch.tensor([1, seed, 5]), torch.tensor([9, position, 9]))
    assert 0 <= one.item() < 1
    assert one.item() == many[1].item()


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    numbers = torch.arange(20_000)
    for values in (
        uniform(numbers, torch.zeros_like(numbers)),
        uniform(torch.zeros_like(numbers), numbers),
    ):
        counts = torch.histc(values.float(), bins=20, min=0, max=1)
        # Twenty bins of about a thousand; 5 standard deviations are about 155.
        assert (counts - 1000).abs().max() < 155
        near = values[1:] - values[:-1]
        assert near.abs().mean() > 0.3, "neighbours are not independent"


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    for temperature in (0.5, 1.0, 2.0):
        rows = repeated(Row(temperature=temperature), 20_000, range(20_000))
        tokens = sample(logits.expand(20_000, -1), rows, RANDOM)
        share = torch.bincount(tokens, minlength=4) / len(tokens)
        want = torch.softmax(logits / temperature, dim=0)
        assert (share - want).abs().max() < 0.02


def test_filtered_draws_follow_what_is_left() -> None:
    """The three likeliest, of which the third falls to top-p: two in their ratio."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    row = Row(temperature=1.0, top_k=3, top_p=0.85)
    needs = SamplerNeeds(is_random=True, filters=True)
    rows = repeated(row, 20_000, range(20_000))
    tokens = sample(logits.expand(20_000, -1), rows, needs)
    share = torch.bincount(tokens, minlength=4) / len(tokens)
    want = torch.softmax(torch.tensor([-math.inf, 1.0, -math.inf, 2.0]), dim=0)
    assert (share - want).abs().max() < 0.02


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    rows = repeated(Row(temperature=1.0), 2000, range(2000))
    tokens = sample(logits.expand(2000, -1), rows, RANDOM)
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_draw_at_the_very_end_is_still_a_possible_token(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """Rounding can make the sum of probabilities smaller than the draw times it."""
    values = [-math.inf] * 3
    values[position] = 0.0
    for number in (0.0, 1.0 - 2**-53):
        monkeypatch.setattr(
            "cbasync.sampler.uniform",
            lambda *_, number=number: torch.tensor([number], dtype=torch.float64),
        )
        assert draw(tensor(values), inputs([Row(temperature=1.0)])).item() == position


# ------------------------------------------------------------------ log-probabilities


@given(values=logits_of(), data=st.data())
def test_logprobs_are_those_of_the_softmax(
    values: list[float], data: st.DataObject
) -> None:
    vocab = len(values)
    token = data.draw(st.integers(0, vocab - 1))
    count = data.draw(st.integers(0, vocab + 3))
    logits = torch.tensor([values])
    want = logits.log_softmax(-1)[0]
    ids, logprobs = top_logprobs(logits, torch.tensor([token]), count)
    assert ids.shape == logprobs.shape == (1, 1 + min(count, vocab))
    assert ids[0, 0].item() == token
    assert logprobs[0].tolist() == want[ids[0]].tolist()
    best = want.sort(descending=True).values[:count]
    assert logprobs[0, 1:].tolist() == best.tolist()
    assert len(set(ids[0, 1:].tolist())) == min(count, vocab)


def test_logprobs_of_half_precision_are_computed_in_float32() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, values = top_logprobs(logits, torch.tensor([3, 4]), 5)
    want = logits.double().log_softmax(-1)
    assert values.dtype is torch.float32
    assert torch.allclose(values[:, 0].double(), want[[0, 1], [3, 4]], atol=1e-5)


def test_a_batch_of_plain_requests_needs_nothing() -> None:
    nothing = SamplerNeeds()
    assert nothing == (False, False, False, False, -1, -1)
    assert nothing.is_greedy
    for needs in (RANDOM, SamplerNeeds(bias=True), SamplerNeeds(num_logprobs=0)):
        assert not needs.is_greedy
