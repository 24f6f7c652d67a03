"""Llamas with seeded random weights, from one for tests to one of 8 B parameters.

How a Llama is built without weights, filled and frozen is here too, for any that
comes from a file.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

_M = TypeVar("_M", bound=PreTrainedModel)


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
    return frozen(_random_llama(config, seed, dtype, torch.device("cpu")))


def random_tiny(
    dtype: torch.dtype, device: torch.device
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Text in, noise out: a tiny random model that reads bytes."""
    config = tiny_config(256, hidden=64, initializer_range=0.2)
    return _random_llama(config, 0, dtype, device), _byte_tokenizer()


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


def random_8b(dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
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
    return _random_llama(config, 0, dtype, device)


def _check_memory(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse weights that would fill the device, before anything is allocated."""
    parameters = sum(p.numel() for p in meta_llama(config, dtype).parameters())
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
    model = meta_llama(config, dtype).to_empty(device=device)
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
    return with_rotary(model, device)


def meta_llama(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama without memory, ready to be given weights.

    On the meta device nothing is drawn: the global generator stays as it was.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    return model


def with_rotary(model: LlamaForCausalLM, device: torch.device) -> LlamaForCausalLM:
    """The model with its rotary frequencies computed again, in float32.

    They are buffers, not weights: no file holds them, and `.to(dtype)` rounds them.
    """
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config).to(device)
    return model


def frozen(model: _M) -> _M:
    """The model in eval mode, without gradients."""
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    return model
