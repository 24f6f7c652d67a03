"""What an engine needs of a model, and a null model that needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from cbasync.batch import BatchShape
from cbasync.carry_over import CarryOver, carry
from cbasync.config import EngineConfig
from cbasync.devices.base import Device
from cbasync.io_slot import IOSlot


class Runner(Protocol):
    """What an engine needs of a model: its limits, and a batch computed."""

    vocab_size: int
    max_positions: int

    def sized(self, config: EngineConfig, device: Device) -> EngineConfig:
        """The config with a number of blocks, if it leaves that to the memory."""

    def prepare(self, config: EngineConfig, device: Device) -> None:
        """Allocate what the config asks for; called once, before the first batch."""

    def warm_up(
        self, io_slots: Sequence[IOSlot], carry_over: CarryOver, sizes: Sequence[int]
    ) -> None:
        """Make what batches of these sizes need, ahead of time; slots hold padding."""

    def compute(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        """The compute op: device inputs to device tokens, in place."""

    def poison(self, blocks: Sequence[int]) -> None:
        """Spoil blocks that have a new owner, so that a read of old content shows."""

    def close(self) -> None:
        """Leave the model as it was found."""


class ScriptedRunner:
    """A null model: each new token is `script(input token, position)`, no weights.

    It carries tokens over like the real runner, so a missed carry still shows. It
    reads no cache and samples nothing: of `SamplingParams` only the ends matter.
    """

    def __init__(
        self,
        vocab_size: int = 1000,
        script: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_positions = 1 << 30
        self.script = script or self._next

    def _next(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return (token * 7 + position + 1) % self.vocab_size

    def sized(self, config: EngineConfig, device: Device) -> EngineConfig:
        """A block without a cache takes no memory: the default number of them."""
        return config if config.num_blocks else replace(config, num_blocks=1024)

    def prepare(self, config: EngineConfig, device: Device) -> None:
        """Nothing to allocate."""

    def warm_up(
        self, io_slots: Sequence[IOSlot], carry_over: CarryOver, sizes: Sequence[int]
    ) -> None:
        """Nothing to make."""

    def compute(
        self,
        shape: BatchShape,
        io_slot: IOSlot,
        previous: IOSlot | None,
        carry_over: CarryOver,
    ) -> None:
        """One gather and one formula instead of a forward pass."""
        inputs, sampled = io_slot.device, slice(shape.num_sampled)
        last = inputs["logits_indices"][sampled]
        token = inputs["input_ids"].index_select(0, last).long()
        source = carry_over.source(previous)
        if source is not None:
            carried_from = inputs["carry_over"].index_select(0, last)
            token = carry(token, carried_from, source)
        chosen = self.script(token, inputs["positions"].index_select(0, last))
        io_slot.device_sampled[sampled] = chosen
        carry_over.publish(chosen, inputs["token_rows"][sampled])

    def poison(self, blocks: Sequence[int]) -> None:
        """Nothing to spoil."""

    def close(self) -> None:
        """Nothing to give back."""
