"""The demo: one model answers the same prompts twice, in turns and one batch ahead."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cbasync.bench import fitting_config, machine_facts, table
from cbasync.config import EngineConfig
from cbasync.llm import LLM
from cbasync.models import LoadedModel
from cbasync.prompts import Prompt, read_prompts, token_ids
from cbasync.request import RequestOutput
from cbasync.sampling import SamplingParams
from cbasync.timeline import Timeline, side_by_side

Mode = Literal["sync", "async"]

WIDTH = 88
FEW = 0.02  # of the time; two runs of the same thing differ by more
DRAWN_BATCHES = 4
# Prompts are read in pieces of this many tokens, so that the first batches, which are
# the ones drawn, do not take ten times as long as the later ones.
TOKEN_BUDGET = 64


@dataclass(frozen=True)
class Setup:
    """What both runs are given."""

    loaded: LoadedModel
    device: str
    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    depth: int

    def config(self, mode: Mode) -> EngineConfig:
        """Room for all prompts at the same time; taking turns needs one slot only."""
        prompts = zip(self.prompts, self.prompt_ids, strict=True)
        return fitting_config(
            [len(ids) + prompt.max_tokens for prompt, ids in prompts],
            max_num_batched_tokens=max(TOKEN_BUDGET, len(self.prompts)),
            depth=0 if mode == "sync" else self.depth,
        )

    @property
    def params(self) -> list[SamplingParams]:
        """Greedy, each answer as long as its prompt allows."""
        return [SamplingParams(max_tokens=p.max_tokens) for p in self.prompts]


@dataclass(frozen=True)
class Run:
    """What one engine made of the prompts, and what it took."""

    outputs: list[RequestOutput]
    wall_s: float
    timeline: Timeline

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def numbers(self) -> dict[str, Any]:
        """The run in numbers; times of a step are means over all batches."""
        steps = max(1, len(self.timeline.batches()))
        host_us = sum(self.timeline.host_us().values())
        return {
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(self.num_tokens / self.wall_s, 1),
            "gpu_active": round(self.timeline.gpu_active, 5),
            "steps": steps,
            "host_ms_per_step": round(host_us / steps / 1e3, 3),
            "compute_ms_per_step": round(self.timeline.gpu_busy_us / steps / 1e3, 3),
            "discarded_tokens": sum(o.metrics.discarded_tokens for o in self.outputs),
        }


@dataclass(frozen=True)
class Demo:
    """Both runs and what they were given."""

    setup: Setup
    sync: Run
    overlapped: Run
    machine: dict[str, Any]

    @property
    def num_equal(self) -> int:
        """Answers with the same tokens both times."""
        pairs = zip(self.sync.outputs, self.overlapped.outputs, strict=True)
        return sum(one.token_ids == other.token_ids for one, other in pairs)

    def as_json(self) -> dict[str, Any]:
        """The numbers of the demo, and what they were measured on."""
        return {
            "model": self.setup.loaded.name,
            "device": self.setup.device,
            "depth": self.setup.depth,
            "requests": len(self.setup.prompts),
            "tokens": self.overlapped.num_tokens,
            "tokens_equal": self.num_equal == len(self.setup.prompts),
            "sync": self.sync.numbers,
            "async": self.overlapped.numbers,
            "machine": self.machine,
        }

    def __str__(self) -> str:
        parts = [
            _answers(self.setup, self.overlapped.outputs),
            _verdict(self),
            _numbers(self),
            side_by_side(
                self.sync.timeline,
                self.overlapped.timeline,
                width=WIDTH,
                max_batches=DRAWN_BATCHES,
            ),
            _where_it_pays(self),
        ]
        return "\n\n".join(part for part in parts if part)


def set_up(model: str, device: str, prompts: Path | None, depth: int) -> Setup:
    """Read the prompts, find the device, load the model; refuses what cannot run."""
    entries = read_prompts(prompts)
    EngineConfig(depth=depth)  # checks it before a model is loaded
    with LLM(model, mode="sync", device=device, config=fitting_config([2])) as llm:
        llm.generate([[0]], SamplingParams(max_tokens=1))  # first calls are slow
        ids = [token_ids(llm, p.prompt, seed) for seed, p in enumerate(entries)]
        return Setup(llm.loaded, _name_of(llm.engine.device), entries, ids, depth)


def _name_of(device: object) -> str:
    """What a device is called on the command line.

    >>> from cbasync.devices import ThreadsDevice
    >>> with ThreadsDevice() as device:
    ...     _name_of(device)
    'threads'
    """
    return type(device).__name__.removesuffix("Device").lower()


def run(setup: Setup) -> Demo:
    """Both engines, one after the other, on the same prompts."""
    with _one_core_for_the_host():
        runs = _answer(setup, "sync"), _answer(setup, "async")
        return Demo(setup, *runs, machine_facts())


@contextmanager
def _one_core_for_the_host() -> Iterator[None]:
    """On a CPU, compute on all cores but one.

    The threads of one operation wait for each other. Where the host takes a core from
    one of them, all of them stand still.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, (os.cpu_count() or 1) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _answer(setup: Setup, mode: Mode) -> Run:
    """All prompts through one engine."""
    loaded, config = setup.loaded, setup.config(mode)
    with LLM(loaded, mode=mode, device=setup.device, config=config) as llm:
        start = time.perf_counter()
        outputs = llm.generate(setup.prompt_ids, setup.params)
        wall_s = time.perf_counter() - start
        llm.engine.device.synchronize()  # all spans are there
        timeline = llm.timeline
    timeline.name = mode
    return Run(outputs, wall_s, timeline)


# ------------------------------------------------------------------ what is printed


def _answers(setup: Setup, outputs: list[RequestOutput]) -> str:
    """Every prompt with its answer below it."""
    parts = [
        _wrapped(repr(setup.loaded)),
        f"{len(outputs)} prompts on device {setup.device}",
    ]
    for number, output in enumerate(outputs):
        text = output.text.strip() or f"token ids {list(output.token_ids)}"
        question = f"{number + 1:2}  {setup.prompts[number].prompt}"
        cut = " ..." if output.finish_reason == "length" else ""
        parts.append(f"{_wrapped(question)}\n{_wrapped(text + cut, '    ')}")
    return "\n\n".join(parts)


def _wrapped(text: str, indent: str = "") -> str:
    """Text in lines that fit, its own line breaks kept; no control characters.

    >>> _wrapped("one" + chr(10) + "two" + chr(7), indent="  ").splitlines()
    ['  one', '  two?']
    """
    lines = []
    for line in text.expandtabs().split("\n"):
        shown = "".join(char if char.isprintable() else "?" for char in line)
        lines += textwrap.wrap(
            shown, WIDTH, initial_indent=indent, subsequent_indent=indent or "    "
        ) or [""]
    return "\n".join(lines)


def _verdict(demo: Demo) -> str:
    equal, total = demo.num_equal, len(demo.setup.prompts)
    text = (
        f"Answered twice, in turns and {demo.setup.depth} ahead: the same tokens in "
        f"{equal} of {total} answers."
    )
    if equal < total:
        text += (
            " In a 16-bit type that is rounding, which depends on who else is in the "
            "batch; in float32 or float64 it would be a bug."
        )
    return textwrap.fill(text, WIDTH)


def _numbers(demo: Demo) -> str:
    """The two runs beside each other."""
    sync, ahead = demo.sync.numbers, demo.overlapped.numbers
    formats = {
        "wall time": ("wall_s", "{:.2f} s"),
        "tokens/s": ("tokens_per_s", "{:.1f}"),
        "gpu_active": ("gpu_active", "{:.2%}"),
        "steps": ("steps", "{}"),
        "host time per step": ("host_ms_per_step", "{:.2f} ms"),
        "compute time per step": ("compute_ms_per_step", "{:.2f} ms"),
        "discarded tokens": ("discarded_tokens", "{}"),
    }
    rows = [
        (label, form.format(sync[key]), form.format(ahead[key]))
        for label, (key, form) in formats.items()
    ]
    legend = (
        "gpu_active is the time in which a batch computes, over the time from the "
        "first batch's start to the last one's end. Host time is schedule, prepare "
        "and update."
    )
    return f"{table([('', 'sync', 'async'), *rows])}\n\n{textwrap.fill(legend, WIDTH)}"


def _where_it_pays(demo: Demo) -> str:
    """On a CPU, why there is little to win; nothing on other devices."""
    if demo.setup.device != "threads":
        return ""
    numbers = demo.sync.numbers
    host_ms, compute_ms = numbers["host_ms_per_step"], numbers["compute_ms_per_step"]
    share = host_ms / (host_ms + compute_ms)
    text = (
        "This machine has no GPU to wait for: the forward pass runs on the CPU and "
        f"takes {compute_ms:.1f} ms a step, the work that async can hide behind it "
        f"{host_ms:.2f} ms. That is {share:.1%} of the time"
    )
    if share < FEW:
        text += ", less than two runs differ by chance, so the two look alike."
    else:
        text += (
            ", and little of it is won: both share the cores and Python's interpreter."
        )
    text += (
        " On a GPU the forward pass is many times faster and the host's work is not: "
        "there the wait is worth removing."
    )
    return textwrap.fill(text, WIDTH)
