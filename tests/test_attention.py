"""Paged attention against dense, the cache under it, and the models above it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbasync.attention import PagedBatch, paged_attention
from cbasync.batch import BatchShape
from cbasync.config import EngineConfig
from cbasync.kv_cache import KVCache, blocks_for
from cbasync.sampler import SamplerNeeds
from cbasync.sampling import SamplingParams
from cbasync.supported import check_supported
from tests.oracle import Job, dense_attention, make_engine, play
from tests.test_models import GPT, SHAPE, random_model

GARBAGE = 1e30  # huge, but finite also when a product of it is summed in float32
LAYER = 1  # of two: the other one must stay as it is


@dataclass(frozen=True)
class Row:
    """One request of a batch: what is in the cache, and what comes to it."""

    context: int
    length: int

    @property
    def stop(self) -> int:
        return self.context + self.length


@dataclass(frozen=True)
class Case:
    """A ragged batch and the shape of the model that computes it."""

    rows: tuple[Row, ...]
    block_size: int
    kv_heads: int
    group: int  # query heads that share a KV head
    head_size: int = 4
    scaling: float | None = None
    head_first: bool = False  # memory layout of q, k, v; models differ in it
    dtype: torch.dtype = torch.float64
    seed: int = 0


ROWS = {
    "decodes": st.builds(Row, st.integers(0, 40), st.just(1)),
    "chunks": st.builds(Row, st.integers(0, 20), st.integers(2, 20)),
    "mixed": st.builds(Row, st.integers(0, 20), st.integers(1, 4)),
}


def cases(kind: str) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        rows=st.lists(ROWS[kind], min_size=1, max_size=6).map(tuple),
        block_size=st.integers(1, 16),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 3),
        head_size=st.sampled_from([1, 4, 6]),
        scaling=st.sampled_from([None, 0.3]),
        head_first=st.booleans(),
        dtype=st.sampled_from([torch.float64, torch.float32]),
        seed=st.integers(0, 99),
    )


CASES = st.sampled_from(sorted(ROWS)).flatmap(cases)


class Batch:
    """Random tensors of a case, a cache full of garbage, and shuffled blocks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        random = torch.Generator().manual_seed(case.seed)

        def draw(tokens: int, heads: int) -> Tensor:
            size = (tokens, heads, case.head_size)
            return torch.randn(size, generator=random, dtype=case.dtype)

        heads = case.kv_heads * case.group
        self.queries = [draw(row.length, heads) for row in case.rows]
        self.keys = [draw(row.stop, case.kv_heads) for row in case.rows]
        self.values = [draw(row.stop, case.kv_heads) for row in case.rows]

        needs = [blocks_for(row.stop, case.block_size) for row in case.rows]
        self.num_blocks = sum(needs) + 2
        order = torch.randperm(self.num_blocks, generator=random)
        # Behind a row's own blocks stand others: entries of former owners.
        self.tables = torch.randint(
            self.num_blocks, (len(needs), max(needs) + 1), generator=random
        ).int()
        for table, need, end in zip(
            self.tables, needs, torch.tensor(needs).cumsum(0), strict=True
        ):
            table[:need] = order[end - need : end]

    def dense(self) -> list[Tensor]:
        return [
            dense_attention(query, keys, values, self.case.scaling)
            for query, keys, values in zip(
                self.queries, self.keys, self.values, strict=True
            )
        ]

    def new_cache(self, fill: float = GARBAGE) -> KVCache:
        case = self.case
        cache = KVCache(
            num_layers=2,
            num_blocks=self.num_blocks,
            block_size=case.block_size,
            num_kv_heads=case.kv_heads,
            head_size=case.head_size,
            dtype=case.dtype,
        )
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(fill)
        return cache

    def paged(self, cache: KVCache, rows: list[int] | None = None) -> Tensor:
        """The function under test on some of the rows, in the order given."""
        rows = list(range(len(self.case.rows))) if rows is None else rows
        for row in rows:
            context = self.case.rows[row].context
            keys, values = self.keys[row][:context], self.values[row][:context]
            cache.write(LAYER, keys, values, cache.cells(self.places(row)[:context]))
        module = nn.Module()
        module.layer_idx = LAYER  # type: ignore[assignment]
        out, _ = paged_attention(
            module,
            self.flat(self.queries, rows),
            self.flat(self.keys, rows),
            self.flat(self.values, rows),
            None,
            self.case.scaling,
            paged=self.paged_batch(cache, rows),
        )
        return out[0]

    def places(self, row: int) -> Tensor:
        """Where each token of a row lies in the cache."""
        token, size = torch.arange(self.case.rows[row].stop), self.case.block_size
        return self.tables[row][token // size].long() * size + token % size

    def flat(self, tensors: list[Tensor], rows: list[int]) -> Tensor:
        """The newest tokens of all rows in one, as a model hands them over."""
        newest = [tensors[row][-self.case.rows[row].length :] for row in rows]
        joined = torch.cat(newest).transpose(0, 1).unsqueeze(0)
        return joined.contiguous() if self.case.head_first else joined

    def paged_batch(self, cache: KVCache, rows: list[int]) -> PagedBatch:
        chosen = [self.case.rows[row] for row in rows]
        lengths = tuple(row.length for row in chosen)
        stops = tuple(row.stop for row in chosen)
        is_mixed = max(lengths) > 1
        sizes = BatchShape(
            batch=0,
            num_requests=len(rows),
            num_tokens=sum(lengths),
            num_sampled=len(rows),
            max_seq_len=max(stops),
            needs=SamplerNeeds(),
            query_lens=lengths if is_mixed else None,
            seq_lens=stops if is_mixed else None,
            num_context=sum(stops),
        )
        newest = [self.places(row)[self.case.rows[row].context :] for row in rows]
        return PagedBatch(
            cache=cache,
            shape=sizes,
            slot_mapping=torch.cat(newest),
            seq_lens=torch.tensor(stops, dtype=torch.int32),
            block_table=self.tables[rows],
        )


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance, atol=tolerance
    )


# ------------------------------------------------------------------ paged and dense


@pytest.mark.parametrize("kind", sorted(ROWS))
@given(data=st.data())
def test_paged_equals_dense(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    batch = Batch(case)
    got = batch.paged(batch.new_cache())
    assert got.shape[1:] == (case.kv_heads * case.group, case.head_size)
    assert_close(got, torch.cat(batch.dense()), case.dtype)


@given(case=CASES)
def test_what_lies_in_unused_places_makes_no_difference(case: Case) -> None:
    batch = Batch(case)
    among_garbage = batch.paged(batch.new_cache(GARBAGE))
    assert torch.equal(among_garbage, batch.paged(batch.new_cache(0.0)))


@given(case=CASES)
def test_only_places_of_the_batch_are_written_in_one_layer(case: Case) -> None:
    batch = Batch(case)
    cache = batch.new_cache()
    batch.paged(cache)
    for layer, tensor in (*enumerate(cache.keys), *enumerate(cache.values)):
        written = (tensor != GARBAGE).flatten(2).any(-1).flatten()
        places = [
            p for row in range(len(case.rows)) for p in batch.places(row).tolist()
        ]
        want = sorted(places) if layer == LAYER else []
        assert written.nonzero().flatten().tolist() == want


@given(case=CASES, random=st.randoms(use_true_random=False))
def test_a_row_alone_equals_the_row_in_company(case: Case, random: Random) -> None:
    batch = Batch(case)
    order = list(range(len(case.rows)))
    random.shuffle(order)
    lengths = [case.rows[row].length for row in order]
    together = batch.paged(batch.new_cache(), order).split(lengths)
    for row, in_company in zip(order, together, strict=True):
        alone = batch.paged(batch.new_cache(), [row])
        assert_close(alone, in_company, case.dtype)


# ------------------------------------------------------------------ the cache


def small_cache() -> KVCache:
    """Two layers, three blocks of two tokens, and the one for padding."""
    return KVCache(
        num_layers=2,
        num_blocks=3,
        block_size=2,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float64,
    )


def column(*numbers: float) -> Tensor:
    """Numbers as K or V of one head of size 1."""
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1)


def test_write_puts_each_token_in_its_place_and_nowhere_else() -> None:
    cache = small_cache()
    cache.write(
        1, column(1, 2, 3), column(4, 5, 6), cache.cells(torch.tensor([5, 0, 3]))
    )
    assert cache.keys[1].flatten().tolist() == [2, 0, 0, 3, 0, 1, 0, 0]
    assert cache.values[1].flatten().tolist() == [5, 0, 0, 6, 0, 4, 0, 0]
    assert not cache.keys[0].any()
    assert not cache.values[0].any()


def test_gather_reads_blocks_in_the_order_of_each_table() -> None:
    cache = small_cache()
    numbers = column(0, 1, 2, 3, 4, 5)
    cache.write(1, numbers, -numbers, cache.cells(torch.arange(6)))
    table = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    keys, values = cache.gather(1, cache.pieces(table))
    assert keys.shape == (2, 1, 4, 1)
    assert keys.flatten(1).tolist() == [[4, 5, 0, 1], [2, 3, 4, 5]]
    assert torch.equal(values, -keys)


def test_poison_spoils_every_layer_of_the_named_blocks_only() -> None:
    cache = small_cache()
    cache.poison([0, 2])
    for tensor in (*cache.keys, *cache.values):
        assert (tensor[[0, 2]] > 1000).all()
        assert tensor.isfinite().all()
        assert not tensor[[1, 3]].any()


def test_padding_is_written_where_no_request_reads() -> None:
    cache = small_cache()
    cache.write(
        0, column(9), column(9), cache.cells(torch.tensor([cache.padding_position]))
    )
    keys, values = cache.gather(
        0, cache.pieces(torch.arange(cache.num_blocks).unsqueeze(0))
    )
    assert not keys.any()
    assert not values.any()
    assert cache.keys[0].sum() == 9


def test_a_cache_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        cache = small_cache()
    cache.write(0, column(1), column(1), cache.cells(torch.tensor([2])))
    assert cache.kv_bytes == 2 * 2 * 4 * 2 * 8  # K and V, layers, blocks, tokens, bytes


# ------------------------------------------------------------------ model families

BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def shape(kv_heads: int = 2, **changes: object) -> Mapping[str, object]:
    """Four query heads of size 8, unless the changes say otherwise."""
    return {**SHAPE, "num_key_value_heads": kv_heads, **changes}


FAMILIES: list[tuple[str, Mapping[str, object]]] = [
    ("Llama", shape(tie_word_embeddings=False)),
    ("Llama", shape(kv_heads=4, tie_word_embeddings=True, **BIASES)),
    ("Llama", shape(kv_heads=1, rope_parameters=YARN)),
    ("Llama", shape(head_dim=16)),
    ("Qwen2", shape(tie_word_embeddings=True)),
    ("Qwen3", shape(attention_bias=True)),
    ("Mistral", shape(sliding_window=None)),
    ("Gemma", shape(kv_heads=1)),
    ("SmolLM3", shape(no_rope_layers=[1, 0])),
    ("Starcoder2", shape(sliding_window=None)),
    ("Granite", shape(attention_multiplier=0.05)),
    ("Cohere", shape()),
    ("Glm4", shape()),
    ("Olmo", shape(clip_qkv=1.0)),
    ("Olmo2", shape()),
    ("Phi", shape(qk_layernorm=True)),
    ("Phi3", shape()),
    ("GPTNeoX", shape(kv_heads=4)),
    ("OPT", shape(kv_heads=4, ffn_dim=64, word_embed_proj_dim=32)),
    ("GPT2", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    ("GPTJ", {**GPT, "rotary_dim": 4}),
    ("GPTBigCode", {**GPT, "multi_query": True}),
    ("GPTBigCode", {**GPT, "multi_query": False}),
    ("Mixtral", shape(**EXPERTS)),
    ("Qwen3Moe", shape(**EXPERTS, moe_intermediate_size=16)),
]


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights large enough that its tokens depend on all it reads."""
    random = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or name.endswith("bias"):
            weight.data.normal_(0.0, 0.5, generator=random)
    return model


@pytest.mark.parametrize(
    ("kind", "changed"), FAMILIES, ids=[f"{n}-{k}" for n, (k, _) in enumerate(FAMILIES)]
)
def test_families_equal_their_own_uncached_tokens(
    kind: str, changed: Mapping[str, object]
) -> None:
    model = lively(random_model(kind, changed))
    if "num_experts" not in changed:  # torch has no grouped product in float64
        torch.nn.Module.to(model, torch.float64)
    check_supported(model, max_model_len=16)
    params = SamplingParams(max_tokens=5)
    jobs = [Job(tuple(range(1, 10)), params), Job(tuple(range(5, 10)), params)]
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=4,
        block_size=3,
        num_blocks=12,
        max_model_len=16,
        debug=True,
    )
    result = play(model, make_engine(model, config), jobs)
    assert result.tokens[0] != result.tokens[1]  # the beginning of a prompt matters
