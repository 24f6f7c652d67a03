"""Weights laid out for oneDNN while an engine has a model: decode steps on a CPU.

A decode step reads every weight once, for a few rows. PyTorch's own product takes the
weights as they lie; oneDNN reads a copy in the order in which it uses them, and needs
less time for it. The sums are the same but for rounding.
"""

from __future__ import annotations

import platform
from functools import partial

import torch
from torch import Tensor, nn

_MOST_BYTES = 2 << 30  # a copy of more weights is too much for a laptop
_ROWS = 32  # the layout is made for batches of about this size
_MACHINES = ("x86_64", "AMD64")  # where this has been measured


class PackedLinears:
    """A model's linear layers with packed weights, until `undo`.

    A model is left alone where packing is of no use: on a GPU, in another dtype than
    float32, with more weights than `_MOST_BYTES`, without oneDNN.
    """

    def __init__(self, model: nn.Module) -> None:
        self._changed: list[nn.Linear] = []
        layers = [m for m in model.modules() if type(m) is nn.Linear]
        if not _is_of_use(layers):
            return
        with torch.no_grad():
            for layer in layers:
                packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _ROWS)
                # The instance's own attribute goes before that of its class.
                layer.forward = partial(_forward, packed, layer.bias)  # type: ignore[method-assign]
                self._changed.append(layer)

    def __len__(self) -> int:
        return len(self._changed)

    def undo(self) -> None:
        """Give the layers their own products back."""
        for layer in self._changed:
            del layer.forward
        self._changed.clear()


def _is_of_use(layers: list[nn.Linear]) -> bool:
    if platform.machine() not in _MACHINES or not torch.backends.mkldnn.is_available():
        return False
    weights = [layer.weight for layer in layers]
    return sum(w.nbytes for w in weights) <= _MOST_BYTES and all(
        w.device.type == "cpu" and w.dtype == torch.float32 for w in weights
    )


def _forward(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
