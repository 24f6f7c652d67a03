"""The sampler: greedy, stateless draws, the right distribution."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cbasync.sampler import SamplerInputs, SamplerNeeds, sample, uniform


def inputs(
    temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> SamplerInputs:
    """Rows that only have a temperature."""
    count = len(temperature)
    sampling = torch.zeros(count, 6)
    sampling[:, 0] = temperature
    sampling[:, 1] = sampling[:, 3] = 1
    none = torch.zeros(count, 1)
    return SamplerInputs(
        sampling,
        torch.zeros(count),
        seeds,
        positions,
        torch.arange(count),
        none.int(),
        none,
    )


RANDOM = SamplerNeeds(is_random=True)


def draw(logits: torch.Tensor, temperature: float, seeds: range) -> torch.Tensor:
    count = len(seeds)
    rows = inputs(
        torch.full((count,), temperature),
        torch.tensor(list(seeds), dtype=torch.int32),
        torch.full((count,), 7),
    )
    return sample(logits.expand(count, -1), rows, RANDOM)


def test_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    assert draw(logits, 0.0, range(50)).eq(1).all()


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
        tokens = draw(logits, temperature, range(20_000))
        share = torch.bincount(tokens, minlength=4) / len(tokens)
        want = torch.softmax(logits / temperature, dim=0)
        assert (share - want).abs().max() < 0.02


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0])
    seeds, positions = torch.arange(5), torch.arange(5) + 3
    rows = inputs(temperature, seeds, positions)
    together = sample(logits, rows, RANDOM)
    alone = [
        sample(logits[i, None], SamplerInputs(*(v[i, None] for v in rows)), RANDOM)
        for i in range(5)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    tokens = draw(logits, 1.0, range(2000))
    assert set(tokens.tolist()) == {1, 3}
