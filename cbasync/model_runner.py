"""One forward pass: carry over, run the model, sample, publish."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from cbasync import attention
from cbasync.batch import BatchShape
from cbasync.carry_over import CarryOver, carry
from cbasync.config import EngineConfig
from cbasync.devices.base import Device
from cbasync.fuse import Merged
from cbasync.graphs import DecodeGraphs
from cbasync.io_slot import IOSlot
from cbasync.kv_cache import KVCache
from cbasync.kv_memory import num_blocks_that_fit
from cbasync.sampler import SamplerInputs, TokenHistory, sample, top_logprobs
from cbasync.supported import kv_shape

_MAX_COMPILED_SIZES = 64
_BAR_DELAY_S = 2.0  # a warm-up that takes less shows no progress bar


class ModelRunner:
    """Runs a Hugging Face causal language model on flat, paged batches.

    The model itself is unchanged: its attention is set to ours while the runner is
    open and set back when it closes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        attention.register()
        self.model = model
        text = model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", 0)) or 1 << 30
        self.cache: KVCache | None = None
        self.graphs: DecodeGraphs | None = None
        self.debug = False
        self.races_expected = False
        self.history: TokenHistory | None = None
        self._num_rows = 0
        self._merged: Merged | None = None
        self._compiled: Callable[..., torch.Tensor] | None = None
        self._give_back: Callable[[], object] = lambda: None

    def sized(self, config: EngineConfig, device: Device) -> EngineConfig:
        """The config with a number of blocks, from free memory where it says 0."""
        if config.num_blocks:
            return config
        token_bytes = kv_shape(self.model).values_per_token * self.model.dtype.itemsize
        block_bytes = config.block_size * token_bytes
        return replace(
            config, num_blocks=num_blocks_that_fit(config, device, block_bytes)
        )

    def prepare(self, config: EngineConfig, device: Device) -> None:
        """Take the model over and make its KV cache."""
        self.debug = config.debug
        self.races_expected = not config.is_safe
        self._num_rows = config.num_rows
        if config.merge_weights:
            positions = config.max_model_len if config.compile else 0
            self._merged = Merged(self.model, compiled_for=positions)
        attention.borrow(self.model, pack=not config.compile)
        self._give_back = weakref.finalize(self, attention.give_back, self.model)
        kept = kv_shape(self.model)
        self.cache = KVCache(
            num_layers=kept.num_layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_kv_heads=kept.num_heads,
            head_size=kept.head_size,
            dtype=self.model.dtype,
            device=device.torch_device,
        )
        device.synchronize()  # its memory is filled on another stream than ours
        if config.compile:
            self._compiled = torch.compile(self._decode_logits, dynamic=False)
        # Two compute streams, as without this edge, would share one graph's memory.
        is_ordered = "compute_order" not in config.ablate
        if device.torch_device.type == "cuda" and config.cuda_graphs and is_ordered:
            self.graphs = DecodeGraphs(self._compute, config.max_batch_requests)

    def warm_up(
        self, io_slots: Sequence[IOSlot], carry_over: CarryOver, sizes: Sequence[int]
    ) -> None:
        """Run padding in these sizes: whatever is compiled or captured is there then.

        The slots hold nothing but padding, on the device as well.
        """
        pairs = [(slot, io_slots[i - 1]) for i, slot in enumerate(io_slots)]
        bar = tqdm(
            total=len(sizes) * len(pairs),
            desc="compiling and capturing",
            delay=_BAR_DELAY_S,
            leave=False,
        )
        with bar:
            for size in sizes:
                for io_slot, previous in pairs:
                    shape = BatchShape.of_padding(size)
                    self.compute(shape, io_slot, previous, carry_over)
                    bar.update()

    def compute(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        """Carry over, forward, sample; everything stays on the device."""
        run = self._compute
        no_prompt = shape.needs.prompt_logprobs < 0
        if self.graphs is not None and shape.is_decode and no_prompt:
            run = self.graphs.run
        run(shape, io_slot, previous, carry_over)

    def _compute(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        inputs, tokens = io_slot.device, slice(shape.num_tokens)
        input_ids = inputs["input_ids"][tokens].long()
        source = carry_over.source(previous)
        if source is not None:
            input_ids = carry(input_ids, inputs["carry_over"][tokens], source)
        if self.debug:
            self._check_carried(input_ids)
        logits_indices = inputs["logits_indices"][: shape.num_sampled].long()
        if self.races_expected:  # an old index must give a wrong token, not a crash
            logits_indices.clamp_(max=shape.num_tokens - 1)
        if shape.needs.history:
            # Made when first needed: a counter per request and word of the vocabulary.
            self.history = self.history or TokenHistory(
                self._num_rows, self.vocab_size, input_ids.device
            )
            self.history.add(
                inputs["history_rows"][tokens], input_ids, inputs["positions"][tokens]
            )
        if shape.needs.prompt_logprobs >= 0:
            # An empty choice of places is every place.
            everywhere = self._logits(shape, io_slot, input_ids, None)
            self._store_prompt_logprobs(everywhere, shape, io_slot)
            logits = everywhere[logits_indices]
        else:
            logits = self._logits(shape, io_slot, input_ids, logits_indices)
        if shape.num_sampled:
            self._sample(logits, logits_indices, shape, io_slot, carry_over)

    def _logits(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        input_ids: torch.Tensor,  # [T] int64
        logits_indices: torch.Tensor | None,  # [S] int64, None: every place
    ) -> torch.Tensor:  # [S, V]
        """The forward pass, in the form that suits batch and device."""
        assert self.cache is not None, "prepare() comes first"
        inputs, tokens = io_slot.device, slice(shape.num_tokens)
        positions = inputs["positions"][tokens]
        slot_mapping = inputs["slot_mapping"][tokens].long()
        seq_lens = inputs["seq_lens"][: shape.num_requests]
        block_table = inputs["block_table"][: shape.num_requests]
        by_rows = input_ids.is_cuda or self._compiled is not None
        if by_rows and shape.is_decode:
            # Log-probabilities of a one-token prompt are too rare to be compiled.
            compiled = None if logits_indices is None else self._compiled
            forward = compiled or self._decode_logits
            # Every size is compiled for itself; the default limit is a few of them.
            with torch._dynamo.config.patch(recompile_limit=_MAX_COMPILED_SIZES):
                return forward(
                    input_ids,
                    positions.long(),
                    logits_indices,
                    slot_mapping,
                    seq_lens,
                    block_table,
                )
        paged: attention.PagedBatch | attention.PagedRows
        if input_ids.is_cuda:
            starts = inputs["query_start_loc"][: shape.num_requests + 1]
            paged = attention.PagedRows.of_mixed(
                self.cache, shape, slot_mapping, positions, starts, block_table
            )
        else:
            paged = attention.PagedBatch(
                self.cache, shape, slot_mapping, seq_lens, block_table
            )
        return self._forward(input_ids, positions.long(), logits_indices, paged)

    def _decode_logits(
        self,
        input_ids: torch.Tensor,  # [R] int64
        positions: torch.Tensor,  # [R] int64
        logits_indices: torch.Tensor | None,  # [S] int64, None: every place
        slot_mapping: torch.Tensor,  # [R] int64
        seq_lens: torch.Tensor,  # [R] int32
        block_table: torch.Tensor,  # [R, M] int32
    ) -> torch.Tensor:  # [S, V]
        """The forward pass of a decode batch: tensors in, a tensor out."""
        assert self.cache is not None
        paged = attention.PagedRows(self.cache, slot_mapping, seq_lens, block_table)
        return self._forward(input_ids, positions, logits_indices, paged)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor | None,
        paged: attention.PagedBatch | attention.PagedRows,
    ) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if logits_indices is None else logits_indices,
            paged=paged,
        ).logits[0]
        return logits

    def _sample(
        self,
        logits: torch.Tensor,
        logits_indices: torch.Tensor,
        shape: BatchShape,
        io_slot: IOSlot,
        carry_over: CarryOver,
    ) -> None:
        inputs, sampled = io_slot.device, slice(shape.num_sampled)
        if shape.needs.is_greedy:
            chosen = logits.argmax(dim=-1)
        else:
            rows = SamplerInputs(
                sampling=inputs["sampling"][sampled],
                top_k=inputs["top_k"][sampled],
                seeds=inputs["seeds"][sampled],
                positions=inputs["positions"].index_select(0, logits_indices) + 1,
                rows=inputs["token_rows"][sampled],
                bias_ids=inputs["bias_ids"][sampled],
                bias_values=inputs["bias_values"][sampled],
            )
            chosen = sample(logits, rows, shape.needs, self.history)
        io_slot.device_sampled[sampled] = chosen
        carry_over.publish(chosen, inputs["token_rows"][sampled])
        if shape.needs.num_logprobs >= 0:
            ids, values = top_logprobs(logits, chosen, shape.needs.num_logprobs)
            io_slot.need_logprobs().store(0, ids, values)

    @staticmethod
    def _store_prompt_logprobs(
        logits: torch.Tensor, shape: BatchShape, io_slot: IOSlot
    ) -> None:
        """How likely each next token of the prompts in the batch was."""
        targets = io_slot.device["target_ids"][: shape.num_tokens].long()
        ids, values = top_logprobs(logits, targets, shape.needs.prompt_logprobs)
        buffers = io_slot.need_logprobs()
        buffers.store(buffers.prompt_start, ids, values)

    @staticmethod
    def _check_carried(input_ids: torch.Tensor) -> None:
        """Debug mode: no placeholder may be left once tokens are carried over."""
        ok = (input_ids >= 0).all()
        if input_ids.is_cuda:
            torch._assert_async(ok)
        elif not ok:
            places = (input_ids < 0).nonzero().flatten().tolist()
            raise RuntimeError(
                f"input_ids{places} are still placeholders: nothing was carried over"
            )

    def poison(self, blocks: Sequence[int]) -> None:
        """Spoil blocks that have a new owner; see `KVCache.poison`."""
        assert self.cache is not None, "prepare() comes first"
        self.cache.poison(blocks)

    def close(self) -> None:
        """Give the model back as it was, and the memory of cache and graphs."""
        self.graphs = self._compiled = None
        if self._merged is not None:
            self._merged.undo()
            self._merged = None
        self._give_back()
        self.cache = self.history = None
