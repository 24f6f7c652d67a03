"""Settings of an engine, and the names of the edges that keep it right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

CarryOverFamily = Literal["slot", "row"]

MAX_DEPTH = 3

EDGES: dict[str, str] = {
    "h2d_done": "inputs arrive on the device before the forward pass reads them",
    "compute_done": "tokens are sampled before they are copied to the host",
    "d2h_done": "the copy to the host is over before the host reads it",
    "slot_refill": "a slot's host buffers are read before they are filled again",
    "slot_reuse": "a slot's device inputs and tokens are used before they are replaced",
    "compute_order": "batch n has computed before batch n+1 carries its tokens over",
    "block_lease": "a block's last batch is collected before its next owner has it",
}
"""Every ordering the engine relies on. Each one can be dropped by name (`ablate`)."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is told before its first batch; checks itself.

    >>> EngineConfig(block_size=0)
    Traceback (most recent call last):
    ...
    ValueError: block_size is 0, at least 1 is needed: give a positive number

    `depth` is how many batches the host runs ahead of the device: 0 takes turns,
    1 is the published design with slots A and B.

    >>> EngineConfig(depth=2).num_slots
    3
    """

    max_num_seqs: int = 32  # most requests in one batch
    max_num_batched_tokens: int = 512  # most tokens in one batch
    block_size: int = 16  # tokens per block of the KV cache
    num_blocks: int = 1024  # blocks in the KV cache; 0: for full seats, if they fit
    max_model_len: int = 2048  # most tokens of one request, prompt and output
    depth: int = 1  # batches the host runs ahead, 0 .. 3
    carry_over: CarryOverFamily = "slot"
    prefix_caching: bool = True  # share blocks of equal prompt beginnings
    max_logprobs: int = 20  # most alternatives a request may ask for
    max_logit_bias: int = 32  # most biased tokens of one request
    debug: bool = False  # placeholder -1, checked on the device; poisoned blocks
    cuda_graphs: bool = True  # on a GPU: replay decode batches as one graph each
    warm_up: tuple[int, ...] | Literal["all"] = ()  # sizes made before the first batch
    compile: bool = False  # decode batches through torch.compile: 20 s and more a size
    merge_weights: bool = False  # q,k,v and gate,up as one matrix each, where exact
    num_slots: int = 0  # 0: depth + 1; fewer is a race, for teaching only
    ablate: frozenset[str] = frozenset()  # edges to drop, for teaching only

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_model_len",
        ):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_blocks", self.num_blocks, 0)
        _at_least("depth", self.depth, 0)
        _at_least("max_logprobs", self.max_logprobs, 0)
        _at_least("max_logit_bias", self.max_logit_bias, 1)
        if self.depth > MAX_DEPTH:
            raise ValueError(
                f"depth is {self.depth}, at most {MAX_DEPTH} is supported: "
                "a deeper ring only adds discarded tokens, use 1 or 2"
            )
        if self.carry_over not in ("slot", "row"):
            raise ValueError(
                f"carry_over is {self.carry_over!r}, the families are 'slot' and "
                "'row': choose one of them"
            )
        object.__setattr__(self, "ablate", frozenset(self.ablate))
        for edge in sorted(self.ablate - set(EDGES)):
            raise ValueError(
                f"ablate names {edge!r}, the edges are {', '.join(EDGES)}: "
                "choose among them"
            )
        self._check_warm_up()
        _at_least("num_slots", self.num_slots, 0)
        if self.num_slots == 0:
            # With enough slots these two edges follow from collecting in order: only a
            # ring that is one short shows what they are for.
            is_short = bool(self.ablate & {"slot_refill", "slot_reuse"})
            slots = max(1, self.default_num_slots - is_short)
            object.__setattr__(self, "num_slots", slots)

    def _check_warm_up(self) -> None:
        given: object = self.warm_up
        if given == "all":
            return
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise ValueError(
                f"warm_up is {given!r}, a list of batch sizes or 'all' is needed: "
                "give one of them"
            )
        object.__setattr__(self, "warm_up", tuple(given))
        for size in self.warm_up:
            if size not in range(1, self.max_batch_requests + 1):
                raise ValueError(
                    f"warm_up holds {size!r}, a decode batch has 1 to "
                    f"{self.max_batch_requests} rows: name sizes among these"
                )

    @property
    def default_num_slots(self) -> int:
        """Slots that let the host fill one while `depth` others are in flight."""
        return self.depth + 1

    @property
    def num_rows(self) -> int:
        """Rows for running requests and for those that batches in flight still name.

        A leased row is as bad as none, so there are enough for every batch in flight.
        """
        return self.max_num_seqs * (self.depth + 1)

    @property
    def max_batch_requests(self) -> int:
        """Rows of the largest decode batch."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_blocks_per_request(self) -> int:
        """Width `M` of a block table.

        >>> EngineConfig(max_model_len=100, block_size=16).max_blocks_per_request
        7
        """
        return -(-self.max_model_len // self.block_size)

    @property
    def is_safe(self) -> bool:
        """Whether every edge is kept and no slot is reused too early."""
        return not self.ablate and self.num_slots >= self.default_num_slots


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}, a whole number is needed: give an int")
    if value < least:
        raise ValueError(
            f"{name} is {value}, at least {least} is needed: "
            f"give a {'positive' if least else 'non-negative'} number"
        )
