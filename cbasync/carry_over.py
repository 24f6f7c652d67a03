"""A token that does not exist yet: handed from batch to batch on the device.

A request in batches n and n+1 needs n's token as an input of n+1, before the host has
seen it. The host writes a placeholder and says, in `carry_over`, where the device finds
the token; the device puts it in place at the head of the forward pass.

Both families read the same array, `carry_over[t]`: an index into their source, or -1
for a token that the host knows. The mask is explicit: an input that happens to be 0 is
an ordinary token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from cbasync.config import EngineConfig
from cbasync.devices.access import Resource
from cbasync.devices.base import Device
from cbasync.io_slot import IOSlot


def carry(input_ids: Tensor, carry_over: Tensor, source: Tensor) -> Tensor:
    """Replace the placeholders: `[T]` ids, `[T]` indices or -1, any source `[K]`.

    >>> ids, tokens = torch.tensor([5, 9, 2, 0, 0]), torch.tensor([11, 12, 13])
    >>> carry(ids, torch.tensor([-1, -1, -1, 2, 0]), tokens)
    tensor([ 5,  9,  2, 13, 11])
    """
    carried = source.index_select(0, carry_over.clamp(0, len(source) - 1))
    return torch.where(carry_over >= 0, carried, input_ids)


class CarryOver(ABC):
    """Where the tokens of one batch wait for the next."""

    @abstractmethod
    def source(self, previous: IOSlot | None) -> Tensor | None:
        """What `carry_over` indexes; None when there is nothing to carry from."""

    @abstractmethod
    def publish(self, tokens: Tensor, token_rows: Tensor) -> None:
        """Keep a batch's sampled tokens for later batches."""

    @abstractmethod
    def reads(self, previous: IOSlot | None, carries: Sequence[int]) -> list[Resource]:
        """Names of what a forward pass with these carried indices reads."""

    @abstractmethod
    def writes(self, rows: Sequence[int]) -> list[Resource]:
        """Names of what sampling for these request rows writes besides the slot."""


class SlotCarryOver(CarryOver):
    """Slot to slot, the published design: ranks in the batch before.

    Nothing is kept besides the slots. It reaches exactly one batch back, so a request
    that sits a batch out continues from its host-known token.
    """

    def source(self, previous: IOSlot | None) -> Tensor | None:
        return previous.device_sampled if previous else None

    def publish(self, tokens: Tensor, token_rows: Tensor) -> None:
        """Nothing to do: the tokens wait in the slot they were sampled into."""

    def reads(self, previous: IOSlot | None, carries: Sequence[int]) -> list[Resource]:
        return previous.sampled("device") if previous and carries else []

    def writes(self, rows: Sequence[int]) -> list[Resource]:
        return []


class RowCarryOver(CarryOver):
    """One device row per request: it survives skipped batches and deeper rings.

    Its hazard is the lifetime of a row: a row must not have a new owner while a batch
    in flight still writes to it. The scheduler leases rows as it leases blocks.
    """

    def __init__(self, device: Device, num_rows: int) -> None:
        self.token_rows = device.device_buffer((num_rows,), torch.int64)

    def source(self, previous: IOSlot | None) -> Tensor | None:
        return self.token_rows

    def publish(self, tokens: Tensor, token_rows: Tensor) -> None:
        self.token_rows.index_copy_(0, token_rows.long(), tokens)

    def reads(self, previous: IOSlot | None, carries: Sequence[int]) -> list[Resource]:
        return [f"token row {row}" for row in carries]

    def writes(self, rows: Sequence[int]) -> list[Resource]:
        return [f"token row {row}" for row in rows]


def make_carry_over(config: EngineConfig, device: Device) -> CarryOver:
    """The family that the config names."""
    if config.carry_over == "slot":
        return SlotCarryOver()
    # One row more than requests can have: the tokens of padding rows go there.
    return RowCarryOver(device, config.num_rows + 1)
