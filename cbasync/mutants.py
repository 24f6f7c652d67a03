"""Engines with one mistake each: what the race detector has to find.

A mutant drops one edge, shares one slot, moves one array out of the slots, frees blocks
early, or writes to the KV cache from another stream. Each one runs a workload made to
hurt it, on a given device, under the race detector, beside the complete engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cbasync.config import EDGES, CarryOverFamily, EngineConfig
from cbasync.devices import SimDevice
from cbasync.devices import make_device as make_named_device
from cbasync.devices.base import Device, StreamError
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.races import Race, RaceDetector
from cbasync.devices.virtual import Order
from cbasync.engine import AsyncEngine, Engine
from cbasync.io_slot import SlotLayout
from cbasync.model_runner import ModelRunner
from cbasync.random_models import tiny_model
from cbasync.sampling import SamplingParams

Build = Callable[[EngineConfig, Device], AsyncEngine]

# Round figures at which every phase matters, so that a drawing shows all of them.
EVEN_COSTS = CostModel(
    name="even",
    schedule=PhaseCost(100.0),
    prepare=PhaseCost(200.0),
    h2d=PhaseCost(400.0),
    compute=PhaseCost(1000.0),
    d2h=PhaseCost(400.0),
    update=PhaseCost(100.0),
    launch_us=5.0,
    note="round figures, for drawings and for the mutation table",
)

BASE = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=4,
    num_blocks=16,
    max_model_len=32,
)


@dataclass(frozen=True)
class Mutant:
    """One mistake: how to build the engine that makes it, and where it matters."""

    name: str
    config: EngineConfig
    build: Build
    edge: str  # what the detector should say is missing


@dataclass(frozen=True)
class Verdict:
    """What came of running a mutant on a device."""

    name: str
    device: str
    detected: bool  # a race was reported
    named: bool  # and with the edge that is missing
    wrong_token: bool  # the answers differ from the complete engine's
    races: tuple[Race, ...]
    right: tuple[tuple[int, ...], ...]  # tokens of the complete engine
    got: tuple[tuple[int, ...], ...]  # tokens of the mutant, as far as it came


def _sharing(name: str) -> Build:
    """An engine whose slots share one array."""

    def build(config: EngineConfig, device: Device) -> AsyncEngine:
        engine = _complete(config, device)
        for io_slot in engine.io_slots[1:]:
            io_slot.share(name, engine.io_slots[0])
        return engine

    return build


def _complete(config: EngineConfig, device: Device) -> AsyncEngine:
    model = tiny_model().to(device.torch_device)  # type: ignore[arg-type]
    return AsyncEngine(ModelRunner(model), config, device)


def _foreign_kv_write(config: EngineConfig, device: Device) -> AsyncEngine:
    """New blocks are written from a stream that compute does not wait for."""
    engine = _complete(config, device)
    engine.poison_stream = engine.d2h_stream
    return engine


def mutants() -> list[Mutant]:
    """The whole table: every edge, one slot, every array, and the KV cache."""
    both = frozenset({"slot_refill", "slot_reuse"})
    table = [_edge_mutant(edge) for edge in EDGES]
    table.append(
        Mutant("single slot", replace(BASE, num_slots=1, ablate=both), _complete, "")
    )
    for name in SlotLayout.of(BASE).sections:
        # Token rows are only written by the per-request family.
        family: CarryOverFamily = "row" if name == "token_rows" else "slot"
        config = replace(BASE, carry_over=family)
        table.append(Mutant(f"shared {name}", config, _sharing(name), ""))
    debug = replace(BASE, debug=True)
    table.append(Mutant("kv write from d2h", debug, _foreign_kv_write, "block_lease"))
    return table


def _edge_mutant(edge: str) -> Mutant:
    changes: dict[str, Any] = {"ablate": frozenset({edge}), "num_slots": 0}
    if edge == "block_lease":
        # Few blocks, so that one request is preempted while its token is in flight,
        # and poison, so that the new owner's claim is a write of its own.
        changes |= {"num_blocks": 4, "debug": True}
    return Mutant(f"without {edge}", replace(BASE, **changes), _complete, edge)


# ------------------------------------------------------------------ running them


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of several lengths; some draw at random, so that every array matters."""
    return [
        ([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=5)),
        ([7, 6, 5, 4, 3, 2, 1], SamplingParams(max_tokens=6)),
        ([4, 4], SamplingParams(max_tokens=9, temperature=2.0, seed=5, top_k=2)),
        ([0, 3, 1], SamplingParams(max_tokens=7, frequency_penalty=9.0)),
        ([9, 8, 7, 6], SamplingParams(max_tokens=9, logit_bias={5: 99.0})),
        ([2, 1], SamplingParams(max_tokens=6, temperature=0.7, logit_bias={6: 99.0})),
    ]


def make_device(name: str, order: Order = "worst") -> Device:
    """A device to run mutants on: `sim` in the given order, `threads`, or `cuda`."""
    if name == "sim":
        return SimDevice(costs=EVEN_COSTS, order=order)
    return make_named_device(name)


def tokens_of(engine: Engine) -> tuple[tuple[int, ...], ...]:
    """The tokens that the workload gives, as far as the engine gets."""
    requests = [engine.add_request(prompt, params) for prompt, params in workload()]
    try:
        with engine:
            engine.run()
    except (StreamError, RuntimeError, IndexError):
        pass  # what a GPU would call an illegal access; the tokens so far are shown
    return tuple(tuple(request.output_token_ids) for request in requests)


def run_mutant(mutant: Mutant, device: str, order: Order = "worst") -> Verdict:
    """Run a mutant beside the complete engine and see what the detector says."""
    complete = replace(mutant.config, ablate=frozenset(), num_slots=0)
    right = tokens_of(_complete(complete, SimDevice(order="issue")))
    detector = RaceDetector()
    machine = make_device(device, order)
    machine.observers.append(detector)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = tokens_of(mutant.build(mutant.config, machine))
    races = tuple(detector.races)
    return Verdict(
        name=mutant.name,
        device=device,
        detected=bool(races),
        named=not mutant.edge or any(race.edge == mutant.edge for race in races),
        wrong_token=got != right,
        races=races,
        right=right,
        got=got,
    )


def run_table(devices: Iterable[str]) -> Iterator[Verdict]:
    """Every mutant on every device."""
    for mutant in mutants():
        for device in devices:
            yield run_mutant(mutant, device)


def shipped_reports(devices: Iterable[str]) -> int:
    """Races reported for the complete engine: depth 0 to 3, both families."""
    reports = 0
    for device in devices:
        for depth in range(4):
            for family in ("slot", "row"):
                config = replace(
                    BASE, depth=depth, carry_over=family, num_slots=0, num_blocks=6
                )
                machine = make_device(device)
                detector = RaceDetector()
                machine.observers.append(detector)
                tokens_of(_complete(config, machine))
                reports += len(detector.races)
    return reports
