"""One set of host and device buffers with its three events: slot A, slot B, ..."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbasync.config import EngineConfig
from cbasync.devices.access import Access, Resource
from cbasync.devices.base import Device
from cbasync.trace import NO_WORK, Work

SLOT_LETTERS = "ABCD"


@dataclass(frozen=True)
class SlotLayout:
    """Where each array of a batch lies in a slot's one int32 buffer.

    All inputs of a batch travel in one copy. The block table comes last, so that the
    copy can stop after the rows that are in use:

    >>> layout = SlotLayout.of(EngineConfig(max_num_seqs=4, max_num_batched_tokens=8,
    ...                                     block_size=4, max_model_len=16))
    >>> print(layout)
    input_ids 0:8, positions 8:16, carry_over 16:24, slot_mapping 24:32,
    query_start_loc 32:37, seq_lens 37:41, logits_indices 41:45, token_rows 45:49,
    temperature 49:53, seeds 53:57, block_table 57:73
    """

    sections: dict[str, tuple[int, int]]
    max_blocks: int  # M

    @classmethod
    def of(cls, config: EngineConfig) -> SlotLayout:
        """Sizes for the largest batch that the config allows."""
        tokens, requests = config.max_num_batched_tokens, config.max_num_seqs
        sizes = {
            "input_ids": tokens,  # [T]
            "positions": tokens,  # [T]   place of each token in its own request
            "carry_over": tokens,  # [T]   source of a token in flight, or -1
            "slot_mapping": tokens,  # [T]   where its K,V is written
            "query_start_loc": requests + 1,  # [R + 1]
            "seq_lens": requests,  # [R]   tokens in the cache after this batch
            "logits_indices": requests,  # [S]   rows whose logits are sampled
            "token_rows": requests,  # [S]   device row of each sampled request
            "temperature": requests,  # [S] float32, carried as its bits
            "seeds": requests,  # [S]
            "block_table": requests * config.max_blocks_per_request,  # [R, M]
        }
        sections, start = {}, 0
        for name, size in sizes.items():
            sections[name] = (start, start + size)
            start += size
        return cls(sections, config.max_blocks_per_request)

    @property
    def size(self) -> int:
        """Length of the whole buffer, in int32 words."""
        return self.sections["block_table"][1]

    def used(self, num_requests: int) -> int:
        """Words that a batch of this many requests has to copy."""
        return self.sections["block_table"][0] + num_requests * self.max_blocks

    def __str__(self) -> str:
        parts = [
            f"{name} {start}:{end}" for name, (start, end) in self.sections.items()
        ]
        lines = [", ".join(parts[:4]), ", ".join(parts[4:8]), ", ".join(parts[8:])]
        return ",\n".join(lines)


class IOSlot:
    """A batch's buffers on both sides, and the events that guard them.

        host_inputs  --h2d-->  device_inputs  --compute-->  device_sampled
                                                                  |
        host_sampled  <--------------------------d2h--------------+

    While slot A is anywhere on this path the host fills slot B. `host` and `device`
    hold the named arrays, all of them views into one buffer a side.
    """

    def __init__(self, index: int, device: Device, layout: SlotLayout) -> None:
        self.index = index
        self.layout = layout
        self.was_used = False
        self.host_inputs = device.host_buffer((layout.size,), torch.int32)
        self.device_inputs = device.device_buffer((layout.size,), torch.int32)
        requests = layout.sections["seq_lens"]
        max_requests = requests[1] - requests[0]
        self.host_sampled = device.host_buffer((max_requests,), torch.int64)
        self.device_sampled = device.device_buffer((max_requests,), torch.int64)
        self.h2d_done = device.event("h2d_done")
        self.compute_done = device.event("compute_done")
        self.d2h_done = device.event("d2h_done")
        self.host = _host_views(self.host_inputs, layout)
        self.device = _device_views(self.device_inputs, layout)
        self._owners: dict[str, IOSlot] = {}

    @property
    def letter(self) -> str:
        """A, B, C or D."""
        return SLOT_LETTERS[self.index]

    @property
    def io_bytes(self) -> int:
        """Memory of one side's buffers."""
        return self.host_inputs.nbytes + self.host_sampled.nbytes

    def resources(self, side: str) -> list[Resource]:
        """Names of the input arrays on one side, `host` or `device`."""
        return [
            f"slot {self._owners.get(name, self).letter} {side}_{name}"
            for name in self.layout.sections
        ]

    def sampled(self, side: str) -> list[Resource]:
        """Name of the sampled tokens on one side."""
        return [f"slot {self.letter} {side}_sampled"]

    def access(self, phase: str, batch: int, work: Work = NO_WORK) -> Access:
        """What a phase touches of this slot, for any phase but compute."""
        reads: dict[str, Callable[[], list[Resource]]] = {
            "h2d": lambda: self.resources("host"),
            "d2h": lambda: self.sampled("device"),
            "update": lambda: self.sampled("host"),
        }
        writes: dict[str, Callable[[], list[Resource]]] = {
            "prepare": lambda: self.resources("host"),
            "h2d": lambda: self.resources("device"),
            "d2h": lambda: self.sampled("host"),
        }
        return Access(
            phase,
            batch,
            self.index,
            reads.get(phase, list),
            writes.get(phase, list),
            work,
        )

    def share(self, name: str, owner: IOSlot) -> None:
        """Move one array out of this slot, into another's: a mistake, for teaching."""
        self.host[name], self.device[name] = owner.host[name], owner.device[name]
        self._owners[name] = owner

    def copy_inputs(self, num_requests: int) -> None:
        """The h2d op: one copy of all that the batch uses."""
        used = self.layout.used(num_requests)
        self.device_inputs[:used].copy_(self.host_inputs[:used], non_blocking=True)
        for name, owner in self._owners.items():
            place = slice(*self.layout.sections[name])
            owner.device_inputs[place].copy_(owner.host_inputs[place])

    def copy_sampled(self, num_sampled: int) -> None:
        """The d2h op: the sampled tokens back to the host."""
        self.host_sampled[:num_sampled].copy_(
            self.device_sampled[:num_sampled], non_blocking=True
        )

    def __repr__(self) -> str:
        return f"IOSlot({self.letter}, {self.io_bytes} bytes a side)"


def _host_views(buffer: Tensor, layout: SlotLayout) -> dict[str, npt.NDArray[np.int32]]:
    array = buffer.numpy()
    views = {name: array[a:b] for name, (a, b) in layout.sections.items()}
    views["temperature"] = views["temperature"].view(np.float32)
    views["block_table"] = views["block_table"].reshape(-1, layout.max_blocks)
    return views


def _device_views(buffer: Tensor, layout: SlotLayout) -> dict[str, Tensor]:
    views = {name: buffer[a:b] for name, (a, b) in layout.sections.items()}
    views["temperature"] = views["temperature"].view(torch.float32)
    views["block_table"] = views["block_table"].view(-1, layout.max_blocks)
    return views
