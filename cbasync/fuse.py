"""Weights of a Llama-like model merged: q,k,v in one matrix, gate and up in another.

A decode batch has few rows, so a projection takes as long as reading its weights does,
and the GPU reads one large matrix faster than several small ones:

    q_proj  k_proj  v_proj    ->  qkv_proj       gate_proj  up_proj  ->  gate_up_proj

The old weights become views into the merged ones: nothing is stored twice, and `undo`
only has to put the former modules back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_HALVES = 2
_MAX_SPLIT_ROWS = 64  # with more rows there are tiles enough
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
_PROBE = (1, 2, 3, 5, 8)  # token ids of the comparing forward pass


class MergedLinear(nn.Module):
    """Several projections of one input, as one matrix product."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        self.weight = nn.Parameter(_joined(parts, "weight"), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if parts[0].bias is not None:
            self.bias = nn.Parameter(_joined(parts, "bias"), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output for each of the projections."""
        joined: Tensor = linear(x, self.weight, self.bias)
        return torch.split(joined, self.sizes, dim=-1)


class SplitLinear(nn.Module):
    """A projection as two products over half of the inputs each, added in float32.

    With few rows a GPU cuts the outputs into too few tiles to read the weights at full
    speed; two halves make twice as many. `torch.compile` adds them in the kernel that
    follows, so that the sum costs nothing.
    """

    def __init__(self, former: nn.Linear) -> None:
        super().__init__()
        self.weight = former.weight
        outputs, inputs = former.weight.shape
        self._halves = (outputs, _HALVES, inputs // _HALVES)

    def forward(self, x: Tensor) -> Tensor:
        """As the former module, but with a sum of float32 numbers."""
        rows = x.numel() // x.shape[-1]
        if rows > _MAX_SPLIT_ROWS:
            return linear(x, self.weight)
        halves = x.view(rows, _HALVES, -1).transpose(0, 1)
        weights = self.weight.view(self._halves).permute(1, 2, 0)
        parts = torch.bmm(halves, weights, out_dtype=torch.float32)
        return parts.sum(0).to(x.dtype).view(*x.shape[:-1], -1)


class TabledRotary(nn.Module):
    """Cosines and sines of all positions, computed once and then looked up.

    A compiler would compute them again in every layer, in the kernel that uses them.
    """

    def __init__(self, former: Any, model: PreTrainedModel, positions: int) -> None:
        super().__init__()
        places = torch.arange(positions, device=model.device).unsqueeze(0)
        # It only looks at the dtype and the device of its first argument.
        like = torch.empty(1, dtype=model.dtype, device=model.device)
        self.cos, self.sin = (table[0].contiguous() for table in former(like, places))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As the former module."""
        return self.cos[position_ids], self.sin[position_ids]


def _has_fixed_angles(module: nn.Module) -> bool:
    """Whether it is a rotary embedding whose angles depend on the position alone."""
    return getattr(module, "rope_type", None) in _FIXED_ROTARY and not isinstance(
        module, TabledRotary
    )


def _split(module: Any) -> nn.Module:
    """A projection in two halves where that is quicker; else the projection itself."""
    weight = module.weight
    is_half = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
    if not is_half or module.bias is not None or weight.shape[1] % (2 * _HALVES):
        return module  # type: ignore[no-any-return]
    return SplitLinear(module)


def _joined(parts: Sequence[nn.Linear], name: str) -> Tensor:
    """The parameters of several projections as one; the old ones become views."""
    old = [getattr(part, name) for part in parts]
    joined = torch.cat([parameter.data for parameter in old])
    pieces = joined.split([len(parameter) for parameter in old])
    for parameter, piece in zip(old, pieces, strict=True):
        parameter.data = piece
    return joined


class MergedAttention(nn.Module):
    """Llama's attention module with one projection for q, k and v."""

    def __init__(self, former: Any, *, split: bool) -> None:
        super().__init__()
        self.qkv_proj = MergedLinear([former.q_proj, former.k_proj, former.v_proj])
        self.o_proj = _split(former.o_proj) if split else former.o_proj
        self.config = former.config
        self.layer_idx = former.layer_idx
        self.head_dim = former.head_dim
        self.scaling = former.scaling
        self.num_key_value_groups = former.num_key_value_groups
        self.is_causal = True
        self._rotate = _rotary_of(former)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the former module, without a cache of transformers' own."""
        shape = hidden_states.shape[:-1]
        query, key, value = (
            part.view(*shape, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv_proj(hidden_states)
        )
        query, key = self._rotate(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out.reshape(*shape, -1)), weights


class MergedMLP(nn.Module):
    """Llama's feed-forward module with one projection for gate and up."""

    def __init__(self, former: Any, *, split: bool) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear([former.gate_proj, former.up_proj])
        self.down_proj = _split(former.down_proj) if split else former.down_proj
        self.act_fn = former.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """As the former module."""
        gate, up = self.gate_up_proj(x)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


class Merged:
    """A model whose projections have been merged, until `undo`.

    Only modules that have exactly Llama's parts are replaced, and the whole is held
    against the former model: it must give the same logits, up to rounding.

    `compiled_for` is the number of positions of a model that will be compiled, or 0.
    Two more changes then pay: the other two projections of a layer become sums of two
    halves, and the angles of rotary embeddings come from a table.
    """

    def __init__(self, model: PreTrainedModel, *, compiled_for: int = 0) -> None:
        self._former: list[tuple[nn.Module, str, nn.Module]] = []
        before = _probe(model)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                merged = _merged(child, split=compiled_for > 0)
                if compiled_for and _has_fixed_angles(child):
                    merged = TabledRotary(child, model, compiled_for)
                if merged is not None:
                    setattr(parent, name, merged)
                    self._former.append((parent, name, child))
        if not self._former:
            raise ValueError(
                f"merge_weights is on, but {type(model).__name__} has no modules with "
                "the parts of Llama's: turn it off"
            )
        error = _distance(_probe(model), before)
        if error > 16 * torch.finfo(model.dtype).eps:
            self.undo()
            raise ValueError(
                f"merge_weights is on, but {type(model).__name__} gives other logits "
                f"with merged weights, off by {error:.2g} of their size: turn it off"
            )

    @property
    def num_merged(self) -> int:
        """Modules replaced."""
        return len(self._former)

    def undo(self) -> None:
        """Put the former modules back."""
        for parent, name, module in self._former:
            setattr(parent, name, module)
        self._former.clear()


def _merged(module: nn.Module, *, split: bool) -> nn.Module | None:
    """The merged form of an attention or feed-forward module; None for any other."""
    children = dict(module.named_children())
    linear_children = {n for n, child in children.items() if type(child) is nn.Linear}
    if set(children) == linear_children == set(_ATTENTION_PARTS):
        return MergedAttention(module, split=split) if _rotary_of(module) else None
    if linear_children == set(_MLP_PARTS) and set(children) - {"act_fn"} == set(
        _MLP_PARTS
    ):
        return MergedMLP(module, split=split)
    return None


def _rotary_of(module: nn.Module) -> Any:
    """The rotary function of the module's own file; None where it has none."""
    file = sys.modules[type(module).__module__]
    return getattr(file, "apply_rotary_pos_emb", None)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Tensor:
    """Logits of a short prompt, through plain attention."""
    ids = torch.tensor([_PROBE], device=model.device) % model.config.vocab_size
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        return model(input_ids=ids, use_cache=False).logits.double()  # type: ignore[no-any-return]
    finally:
        model.set_attn_implementation(before)


def _distance(a: Tensor, b: Tensor) -> float:
    """Size of the difference over the size of `b`."""
    return float((a - b).norm() / b.norm())
