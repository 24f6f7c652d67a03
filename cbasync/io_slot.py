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
from cbasync.sampler import NUM_SAMPLING_COLUMNS
from cbasync.trace import NO_WORK, Work

SLOT_LETTERS = "ABCD"

Names = Callable[[], list[Resource]]


@dataclass(frozen=True)
class SlotLayout:
    """Where each array of a batch lies in a slot's one int32 buffer.

    All inputs of a batch travel in one copy. The block table comes last, so that the
    copy can stop after the rows that are in use:

    >>> layout = SlotLayout.of(EngineConfig(max_num_seqs=4, max_num_batched_tokens=8,
    ...                                     block_size=4, max_model_len=16))
    >>> print(layout)  # doctest: +ELLIPSIS
    input_ids 0:8, positions 8:16, carry_over 16:24, slot_mapping 24:32,
    history_rows 32:40, target_ids 40:48, query_start_loc 48:53, seq_lens 53:57,
    logits_indices 57:61, token_rows 61:65, sampling 65:89, top_k 89:93,
    seeds 93:97, bias_ids 97:225, bias_values 225:353, block_table 353:369
    """

    sections: dict[str, tuple[int, int]]
    widths: dict[str, int]  # second dimension of the arrays that have one
    max_requests: int
    max_tokens: int
    max_logprobs: int

    @classmethod
    def of(cls, config: EngineConfig) -> SlotLayout:
        """Sizes for the largest batch that the config allows."""
        tokens, requests = config.max_num_batched_tokens, config.max_num_seqs
        sizes = {
            "input_ids": tokens,  # [T]
            "positions": tokens,  # [T]   place of each token in its own request
            "carry_over": tokens,  # [T]   source of a token in flight, or -1
            "slot_mapping": tokens,  # [T]   where its K,V is written
            "history_rows": tokens,  # [T]   where penalties count it
            "target_ids": tokens,  # [T]   next token of the prompt, or -1
            "query_start_loc": requests + 1,  # [R + 1]
            "seq_lens": requests,  # [R]   tokens in the cache after this batch
            "logits_indices": requests,  # [S]   rows whose logits are sampled
            "token_rows": requests,  # [S]   device row of each sampled request
            "sampling": requests * NUM_SAMPLING_COLUMNS,  # [S, 6] float32
            "top_k": requests,  # [S]
            "seeds": requests,  # [S]
            "bias_ids": requests * config.max_logit_bias,  # [S, K]
            "bias_values": requests * config.max_logit_bias,  # [S, K] float32
            "block_table": requests * config.max_blocks_per_request,  # [R, M]
        }
        sections, start = {}, 0
        for name, size in sizes.items():
            sections[name] = (start, start + size)
            start += size
        widths = {
            "sampling": NUM_SAMPLING_COLUMNS,
            "bias_ids": config.max_logit_bias,
            "bias_values": config.max_logit_bias,
            "block_table": config.max_blocks_per_request,
        }
        return cls(sections, widths, requests, tokens, config.max_logprobs)

    @property
    def size(self) -> int:
        """Length of the whole buffer, in int32 words."""
        return self.sections["block_table"][1]

    def used(self, num_requests: int) -> int:
        """Words that a batch of this many requests has to copy."""
        return (
            self.sections["block_table"][0] + num_requests * self.widths["block_table"]
        )

    def __str__(self) -> str:
        parts = [
            f"{name} {start}:{end}" for name, (start, end) in self.sections.items()
        ]
        lines = [", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4)]
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
        requests = layout.max_requests
        self.host_sampled = device.host_buffer((requests,), torch.int64)
        self.device_sampled = device.device_buffer((requests,), torch.int64)
        self.sampled_tokens = self.host_sampled.numpy()  # the host's view of it
        # First the sampled rows, then the tokens of prompts; made when first asked for.
        self._device = device
        self.logprobs: LogprobBuffers | None = None
        self.h2d_done = device.event("h2d_done")
        self.compute_done = device.event("compute_done")
        self.d2h_done = device.event("d2h_done")
        self.host = _host_views(self.host_inputs, layout)
        self.device = _device_views(self.device_inputs, layout)
        self._owners: dict[str, IOSlot] = {}
        # What each phase reads and writes; only who watches asks for the names.
        self._touched: dict[str, tuple[Names, Names]] = {
            "prepare": (list, lambda: self.resources("host")),
            "h2d": (
                lambda: self.resources("host"),
                lambda: self.resources("device"),
            ),
            "d2h": (lambda: self.sampled("device"), lambda: self.sampled("host")),
            "update": (lambda: self.sampled("host"), list),
        }

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
        nothing = (list, list)
        reads, writes = self._touched.get(phase, nothing)
        return Access(phase, batch, self.index, reads, writes, work)

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

    def need_logprobs(self) -> LogprobBuffers:
        """Buffers for log-probabilities, from the first batch that asks for them."""
        if self.logprobs is None:
            self.logprobs = LogprobBuffers(self._device, self.layout)
        return self.logprobs

    def copy_sampled(self, num_sampled: int, *, logprobs: bool = False) -> None:
        """The d2h op: the sampled tokens back to the host, and what goes with them."""
        self.host_sampled[:num_sampled].copy_(
            self.device_sampled[:num_sampled], non_blocking=True
        )
        if logprobs and self.logprobs is not None:
            self.logprobs.copy()

    def __repr__(self) -> str:
        return f"IOSlot({self.letter}, {self.io_bytes} bytes a side)"


class LogprobBuffers:
    """Log-probabilities of a batch on both sides: `[R + T, 1 + top]` ids and values."""

    def __init__(self, device: Device, layout: SlotLayout) -> None:
        self.prompt_start = layout.max_requests  # where the tokens of prompts begin
        shape = (layout.max_requests + layout.max_tokens, 1 + layout.max_logprobs)
        self.host_ids = device.host_buffer(shape, torch.int64)
        self.host_values = device.host_buffer(shape, torch.float32)
        self.device_ids = device.device_buffer(shape, torch.int64)
        self.device_values = device.device_buffer(shape, torch.float32)

    def store(self, start: int, ids: Tensor, values: Tensor) -> None:
        """Keep `[n, 1 + k]` ids and values, from row `start` on; a device op."""
        rows, columns = ids.shape
        self.device_ids[start : start + rows, :columns] = ids
        self.device_values[start : start + rows, :columns] = values

    def copy(self) -> None:
        """Part of the d2h op."""
        self.host_ids.copy_(self.device_ids, non_blocking=True)
        self.host_values.copy_(self.device_values, non_blocking=True)


_FLOATS = ("sampling", "bias_values")  # float32, carried as their bits


def _host_views(buffer: Tensor, layout: SlotLayout) -> dict[str, npt.NDArray[np.int32]]:
    array = buffer.numpy()
    views = {name: array[a:b] for name, (a, b) in layout.sections.items()}
    for name in _FLOATS:
        views[name] = views[name].view(np.float32)
    for name, width in layout.widths.items():
        views[name] = views[name].reshape(-1, width)
    return views


def _device_views(buffer: Tensor, layout: SlotLayout) -> dict[str, Tensor]:
    views = {name: buffer[a:b] for name, (a, b) in layout.sections.items()}
    for name in _FLOATS:
        views[name] = views[name].view(torch.float32)
    for name, width in layout.widths.items():
        views[name] = views[name].view(-1, width)
    return views
