"""Models by name: a small real one, seeded random ones, any from Hugging Face.

Knows names, folders and tokenizers; never requests, batches or the KV cache.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cbasync.devices.threads import alone
from cbasync.random_models import frozen, random_8b, random_tiny, tiny_model

__all__ = ["LoadedModel", "load_model", "tiny_model"]

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # "owner/model" or "model"


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
    with alone() if device.type == "cpu" else nullcontext():
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
    return LoadedModel(frozen(model), tokenizer, name, frozenset(stops - {None}))


def _load_smollm2(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The small real model; a random one, with a notice, where it is not installed."""
    from cbasync import smollm2  # the only one that needs a library for GGUF files

    folder = smollm2.package_folder()
    if folder is None:
        warnings.warn(
            "the model smollm2 is not installed: using random-tiny instead, whose text "
            f"means nothing. To install it: {smollm2.INSTALL_HINT}",
            stacklevel=3,
        )
        return _load_random_tiny(dtype, device)
    return _finished("smollm2", *smollm2.load_smollm2(folder, dtype, device))


def _load_random_tiny(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A tiny random model that reads bytes."""
    return _finished("random-tiny", *random_tiny(dtype, device))


def _load_random_8b(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A large random model, without a tokenizer."""
    return _finished("random-8b", random_8b(dtype, device), None)


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


_KNOWN_MODELS: dict[Any, Callable[[torch.dtype, torch.device], LoadedModel]] = {
    "smollm2": _load_smollm2,
    "random-tiny": _load_random_tiny,
    "random-8b": _load_random_8b,
}
