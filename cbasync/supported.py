"""Which models the engine can serve, and why it refuses the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from cbasync.devices.threads import alone

# What some models ask of their attention function, by the argument's name. The
# engine's function does plain attention and would give other tokens in silence.
_SPECIAL_ATTENTION = {
    "softcap": "capped attention logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "position biases",
    "indices": "an index of chosen tokens",
    "block_indices": "an index of chosen blocks",
}


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of each token, as its layers really hand it over."""

    num_layers: int
    num_heads: int  # KV heads
    head_size: int

    @property
    def values_per_token(self) -> int:
        """Numbers of K and V over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_size


def kv_shape(model: PreTrainedModel) -> KVShape:
    """Seen in one small forward pass: a config may say otherwise.

    >>> from cbasync.random_models import tiny_model
    >>> kv_shape(tiny_model())
    KVShape(num_layers=2, num_heads=2, head_size=8)
    """
    record = _recorded(model)
    heads, _, head_size, _ = record[0].shapes
    return KVShape(len(record), heads, head_size)


def check_supported(
    model: PreTrainedModel, *, max_model_len: int | None = None
) -> None:
    """Refuse a model that keeps what the engine cannot page, and say what it keeps.

    The engine pages the keys and values of full causal self-attention. It asks the
    model's class and config first, then watches one forward pass of two tokens.

    A sliding window counts when it is smaller than the longest request,
    `max_model_len` tokens; by default the most that the model allows.
    """
    misfit = _declared_misfit(model, max_model_len) or _observed_misfit(model)
    if misfit:
        raise ValueError(
            f"model type {model.config.model_type!r} cannot be served: {misfit}. The "
            "engine pages keys and values of full causal self-attention: use a "
            "decoder-only text model such as Llama, Qwen2, Qwen3, Mistral without a "
            "window, GPT-2, GPT-NeoX, Phi or OLMo"
        )


def _declared_misfit(model: PreTrainedModel, max_model_len: int | None) -> str | None:
    """What the model's class and config say against it; None if nothing."""
    config = model.config
    if model._is_stateful:
        return "it keeps a recurrent or state-space state"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder and keeps the encoder's states"
    modalities = model.input_modalities
    if modalities not in ("text", ("text",), ["text"]):
        return f"it reads {', '.join(modalities)}, not text alone"
    if config.get_text_config(decoder=True) is not config:
        return "it holds a text model beside other models"
    if getattr(config, "is_heterogeneous", False):
        return "its layers keep keys and values of different shapes"
    if not model._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    return _window_misfit(config, max_model_len) or _rope_misfit(config, max_model_len)


def _rope_misfit(config: Any, max_model_len: int | None) -> str | None:
    """Rotations chosen by the longest request of a batch; None if they are not."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    declared = getattr(config, "original_max_position_embeddings", 0)
    short = int(rope.get("original_max_position_embeddings") or declared)
    limit = int(max_model_len or config.max_position_embeddings)
    if limit <= short:
        return None
    return (
        f"it rotates keys by the longest request of the batch beyond {short} tokens, "
        f"and requests may have {limit} (set max_model_len to {short})"
    )


def _window_misfit(config: Any, max_model_len: int | None) -> str | None:
    """Layers that see less than the whole context; None if there are none."""
    layer_types = getattr(config, "layer_types", None)
    kinds = set(layer_types or ()) - {"full_attention"}
    if kinds - {"sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if window is None or (layer_types is not None and not kinds):
        return None
    limit = max_model_len or getattr(config, "max_position_embeddings", window + 1)
    if window >= limit:
        return None
    return f"it keeps a sliding window of {window} of up to {limit} tokens"


@dataclass(frozen=True)
class _AttentionCall:
    """What one layer handed to its attention function."""

    layer: int | None
    shapes: tuple[int, int, int, int]  # KV heads, head sizes of q, k and v
    causal: bool
    masked: bool
    special: tuple[str, ...]  # the known arguments that change the result


def _recording_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, H, T, D]
    value: Tensor,  # [1, H, T, D]
    attention_mask: Tensor | None,
    *,
    record: list[_AttentionCall] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """An attention function that notes what it is given and returns zeros."""
    if record is not None:
        given = [name for name in _SPECIAL_ATTENTION if arguments.get(name) is not None]
        sizes = (key.shape[1], query.shape[-1], key.shape[-1], value.shape[-1])
        layer = getattr(module, "layer_idx", None)
        causal = bool(getattr(module, "is_causal", True))
        masked = attention_mask is not None
        record.append(_AttentionCall(layer, sizes, causal, masked, tuple(given)))
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[-1]), None


AttentionInterface.register("cbasync_recording", _recording_attention)


_records: WeakKeyDictionary[PreTrainedModel, list[_AttentionCall]] = WeakKeyDictionary()


def _recorded(model: PreTrainedModel) -> list[_AttentionCall]:
    """The attention calls of a forward pass of two tokens; watched once a model."""
    if model in _records:
        return _records[model]
    record: list[_AttentionCall] = []
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)
    before = model.config._attn_implementation
    model.set_attn_implementation("cbasync_recording")
    try:
        with torch.no_grad(), alone():
            model(
                input_ids=ids,
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=positions[-1:],
                record=record,
            )
    finally:
        model.set_attn_implementation(before)
    _records[model] = record
    return record


def _observed_misfit(model: PreTrainedModel) -> str | None:
    """What one small forward pass shows against the model; None if nothing."""
    try:
        record = _recorded(model)
    except Exception as error:  # whatever it is, the engine would meet it too
        return f"a forward pass in the engine's form fails ({error!r})"
    return _recorded_misfit(record, model.config.num_hidden_layers)


def _recorded_misfit(record: list[_AttentionCall], layers: int) -> str | None:
    """What the calls of one forward pass show against a model; None if nothing."""
    if not record:
        return "it does not pass extra arguments down to its attention function"
    special = {_SPECIAL_ATTENTION[name] for call in record for name in call.special}
    if special:
        return f"its attention uses {', '.join(sorted(special))}"
    if not all(call.causal for call in record):
        return "its tokens attend to later ones"
    if any(call.masked for call in record):
        return "its attention adds a mask of its own"
    order = [call.layer for call in record]
    if order != list(range(layers)):
        return f"its {layers} layers do not run once each in order, but as {order}"
    shapes = {call.shapes for call in record}
    if len(shapes) > 1 or len(set(record[0].shapes[1:])) > 1:
        return f"its keys and values differ in shape: {sorted(shapes)}"
    return None
