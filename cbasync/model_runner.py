"""One forward pass: carry over, run the model, sample, publish."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from cbasync import attention
from cbasync.batch import BatchShape
from cbasync.carry_over import CarryOver, carry
from cbasync.config import EngineConfig
from cbasync.devices.base import Device
from cbasync.io_slot import IOSlot
from cbasync.kv_cache import KVCache
from cbasync.sampler import SamplerInputs, TokenHistory, sample, top_logprobs


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
        self.debug = False
        self.races_expected = False
        self.history: TokenHistory | None = None
        self._former_attention = model.config._attn_implementation
        self._was_training = model.training

    def prepare(self, config: EngineConfig, device: Device) -> None:
        """Take the model over and make its KV cache."""
        self.debug = config.debug
        self.races_expected = not config.is_safe
        self.history = TokenHistory(
            config.num_rows, self.vocab_size, device.torch_device
        )
        self.model.eval()
        self.model.set_attn_implementation(attention.NAME)
        text = self.model.config.get_text_config()
        heads = text.num_attention_heads
        self.cache = KVCache(
            num_layers=text.num_hidden_layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            dtype=self.model.dtype,
            device=device.torch_device,
        )

    def compute(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        """Carry over, forward, sample; everything stays on the device."""
        assert self.cache is not None, "prepare() comes first"
        inputs, tokens = io_slot.device, slice(shape.num_tokens)
        rows, sampled = slice(shape.num_requests), slice(shape.num_sampled)
        input_ids = inputs["input_ids"][tokens]
        source = carry_over.source(previous)
        if source is not None:
            input_ids = carry(input_ids.long(), inputs["carry_over"][tokens], source)
        if self.debug:
            self._check_carried(input_ids)
        logits_indices = inputs["logits_indices"][sampled].long()
        if self.races_expected:  # an old index must give a wrong token, not a crash
            logits_indices.clamp_(max=shape.num_tokens - 1)
        if shape.needs.history:
            assert self.history is not None
            self.history.add(
                inputs["history_rows"][tokens], input_ids, inputs["positions"][tokens]
            )
        wants_prompt = shape.needs.prompt_logprobs >= 0
        logits = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=inputs["positions"][tokens].long().unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if wants_prompt else logits_indices,
            paged=attention.PagedBatch(
                cache=self.cache,
                shape=shape,
                slot_mapping=inputs["slot_mapping"][tokens].long(),
                seq_lens=inputs["seq_lens"][rows],
                block_table=inputs["block_table"][rows],
            ),
        ).logits[0]
        if wants_prompt:
            self._store_prompt_logprobs(logits, shape, io_slot)
            logits = logits[logits_indices]
        if shape.num_sampled:
            self._sample(logits, logits_indices, shape, io_slot, carry_over)

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
        """Give the model back as it was."""
        self.model.set_attn_implementation(self._former_attention)
        self.model.train(self._was_training)
        self.cache = self.history = None
