"""A run recorded batch by batch: what both slots hold, who owns which block.

Copies are taken when a batch has been launched, so later batches cannot change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbasync.carry_over import carry
from cbasync.config import EngineConfig
from cbasync.devices.sim import SimDevice
from cbasync.engine import AsyncEngine
from cbasync.runner import Runner, ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import SchedulerOutput

TOKEN_ARRAYS = ("input_ids", "positions", "carry_over", "slot_mapping")


@dataclass(frozen=True)
class Step:
    """One batch as its slot holds it, and the cache as it was then."""

    batch: int
    slot: int
    requests: tuple[str, ...]  # by row of the batch
    query_lens: tuple[int, ...]
    arrays: dict[str, tuple[int, ...]]  # [T] each, as the host wrote them
    read_ids: tuple[int, ...]  # [T] what the forward pass reads, tokens carried over
    former_sampled: tuple[int, ...]  # what `carry_over` points into
    sampled: tuple[int, ...]  # [S] what came out, in the order of the sampled rows
    block_tables: dict[str, tuple[int, ...]]  # request -> its blocks in the cache
    owners: tuple[str, ...]  # [N] request that owns each block, or ""
    waiting: int  # requests that are not in yet


class RecordingEngine(AsyncEngine):
    """The asynchronous engine, keeping a `Step` of every batch."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        # Effects at issue: once launched, a batch has been computed.
        super().__init__(runner, config, SimDevice(order="issue"))
        self.steps: list[Step] = []

    def launch(self, output: SchedulerOutput) -> None:
        source = self.carry_over.source(self._previous)
        former = None if source is None else source.clone()
        super().launch(output)
        io_slot, shape = self.in_flight[-1].io_slot, self.in_flight[-1].shape
        tokens = slice(output.num_tokens)
        arrays = {
            name: tuple(int(value) for value in io_slot.host[name][tokens])
            for name in TOKEN_ARRAYS
        }
        ids = io_slot.device["input_ids"][tokens].long()
        if former is not None:
            ids = carry(ids, io_slot.device["carry_over"][tokens], former)
        last = self.steps[-1].sampled if self.steps else ()
        self.steps.append(
            Step(
                batch=output.batch,
                slot=io_slot.index,
                requests=tuple(o.request.request_id for o in output.occurrences),
                query_lens=tuple(o.length for o in output.occurrences),
                arrays=arrays,
                read_ids=tuple(ids.tolist()),
                former_sampled=last,
                sampled=tuple(io_slot.device_sampled[: shape.num_sampled].tolist()),
                block_tables={
                    o.request.request_id: tuple(o.request.blocks.block_ids)
                    for o in output.occurrences
                },
                owners=self._owners(),
                waiting=len(self.scheduler.waiting),
            )
        )

    def _owners(self) -> tuple[str, ...]:
        owners = [""] * self.config.num_blocks
        for request in self.scheduler.running:
            for block in request.blocks.block_ids:
                owners[block] = request.request_id
        return tuple(owners)


DEMO_CONFIG = EngineConfig(
    max_num_seqs=3,
    max_num_batched_tokens=8,
    block_size=4,
    num_blocks=12,
    max_model_len=24,
)
DEMO_LENGTHS = ((5, 4), (3, 7), (6, 3), (4, 5))  # prompt, new tokens


def record_steps(
    lengths: Sequence[tuple[int, int]] = DEMO_LENGTHS,
    config: EngineConfig = DEMO_CONFIG,
) -> list[Step]:
    """Steps of a run of requests with these prompt and output lengths.

    Two requests, the second batch takes both first tokens from the first one:

    >>> steps = record_steps([(2, 2), (3, 2)])
    >>> steps[1].arrays["carry_over"], steps[1].arrays["input_ids"]
    ((0, 1), (0, 0))
    >>> steps[1].read_ids == steps[0].sampled
    True
    """
    engine = RecordingEngine(ScriptedRunner(vocab_size=100), config)
    for number, (prompt, new) in enumerate(lengths):
        ids = [(10 * (number + 1) + place) % 100 for place in range(prompt)]
        engine.add_request(ids, SamplingParams(max_tokens=new), request_id=f"r{number}")
    with engine:
        engine.run()
    return engine.steps
