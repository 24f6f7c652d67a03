"""Measurements you can repeat: the host's work per step, and a peer on the same CPU.

Every result is a plain dict that says what it was measured on. Nothing here asserts:
a clock belongs into a result, not into a test.
"""

from __future__ import annotations

import gc
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle, islice, product
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

import cbasync
from cbasync.config import EngineConfig
from cbasync.devices import ThreadsDevice
from cbasync.engine import AsyncEngine, Engine
from cbasync.kv_cache import blocks_for
from cbasync.llm import LLM
from cbasync.models import LoadedModel, load_model
from cbasync.prompts import read_prompts, token_ids
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.timeline import HOST_PHASES

Result = dict[str, Any]

ROOT = Path(__file__).parents[1]

# Rounds of whatever is measured, by turns; the best one of each counts.
_HOST_ROUNDS, _PEER_ROUNDS = 3, 2

# ------------------------------------------------------------------ where and with what


def machine_facts() -> Result:
    """Hardware, versions, commit, command, date: a number is worth nothing without."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "driver": _output_of(driver) if gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": version("transformers"),
        "cbasync": cbasync.__version__,
        # A copy of the tree on another machine has no history: let it be told.
        "commit": os.environ.get("CBASYNC_COMMIT") or _output_of(commit),
        "command": f"python -m cbasync {shlex.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    """The processor as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output_of(command: list[str]) -> str | None:
    """First line that a program prints, None if it is missing or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(run.stdout.splitlines()), None)


# ------------------------------------------------------------------ host work per step

HOST_CASES = ((32, 100), (32, 8000), (256, 2000))  # requests, context
_SETTLE_STEPS = 20  # after the last prompt is read, before the clock starts
_ROOM = 200  # tokens a request may produce while the others still read their prompts


def bench_host(steps: int = 300) -> Result:
    """Host work per decode step without a model, at several sizes."""
    best: dict[str, Result] = {}
    # A busy neighbour only ever adds: by turns, and the quietest run of each size.
    for _, (requests, context) in product(range(_HOST_ROUNDS), HOST_CASES):
        run = measure_host(requests, context, steps)
        name = f"{requests}@{context}"
        best[name] = min(best.get(name, run), run, key=itemgetter("host_ms"))
    keys = ("host_ms", "phases_ms", "samples_ms")
    return {key: {name: run[key] for name, run in best.items()} for key in keys} | {
        "steps": steps,
        "what": "CPU time of the host thread per AsyncEngine.step() of decodes alone "
        "with a null model,\nmedian; its phases in wall time, medians",
        "machine": machine_facts(),
    }


def measure_host(
    requests: int,
    context: int,
    steps: int,
    *,
    clock: Callable[[], int] = time.thread_time_ns,
) -> Result:
    """CPU time of the host thread per step: the median, by phase, and every sample.

    A whole `step()` counts: schedule, prepare, three launches, collect, update.
    """
    with _decoding_engine(requests, context, steps) as engine:
        first, samples = engine.scheduler.num_launched, []
        with collector_frozen():
            for _ in range(steps):
                start = clock()
                engine.step()
                samples.append((clock() - start) / 1e6)
        spans = [span for span in engine.timeline.lane("cpu") if span.batch >= first]
    phases = {
        phase: median(s.duration_us / 1e3 for s in spans if s.phase == phase)
        for phase in HOST_PHASES
    }
    return {
        "host_ms": round(median(samples), 4),
        "phases_ms": {phase: round(ms, 4) for phase, ms in phases.items()},
        "samples_ms": [round(sample, 4) for sample in samples],
    }


@contextmanager
def _decoding_engine(requests: int, context: int, steps: int) -> Iterator[Engine]:
    """An engine in which every request decodes at about this context."""
    block_size, output = 16, _ROOM + steps
    longest = context + block_size + output
    config = EngineConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
        block_size=block_size,
        num_blocks=requests * blocks_for(longest, block_size),
        max_model_len=longest,
    )
    with AsyncEngine(ScriptedRunner(), config, ThreadsDevice()) as engine:
        params = SamplingParams(max_tokens=output)
        # Lengths differ by up to a block: new blocks are then asked for in every
        # step by a few requests, and not by all of them in one step out of 16.
        waiting = [
            engine.add_request([1] * (context + index % block_size), params)
            for index in range(requests)
        ]
        while not all(request.output_token_ids for request in waiting):
            engine.step()
        for _ in range(_SETTLE_STEPS):
            engine.step()
        yield engine


@contextmanager
def collector_frozen() -> Iterator[None]:
    """No garbage collection inside: a pause would be charged to one step."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# ------------------------------------------------------------------ a peer


def bench_peer(
    model: str = "smollm2", requests: int = 32, max_tokens: int = 64
) -> Result:
    """Tokens per second on the CPU, ours against transformers' `generate_batch`.

    Same process, same prompts, float32, greedy, and nobody stops at an end token, so
    both make exactly the same number of tokens. The time of each includes making
    its cache.
    """
    loaded = load_model(model, dtype=torch.float32)
    texts = islice(cycle(read_prompts()), requests)
    with LLM(loaded, device="threads", config=fitting_config([2])) as llm:
        prompts = [token_ids(llm, p.prompt, seed) for seed, p in enumerate(texts)]
    for generate in (_ours, _peers):
        generate(loaded, prompts[:2], 2)  # warm
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(_PEER_ROUNDS):
        for name, generate in (("ours", _ours), ("peer", _peers)):
            start = time.perf_counter()
            tokens[name] = generate(loaded, prompts, max_tokens)
            seconds[name].append(time.perf_counter() - start)
    best = {name: requests * max_tokens / min(each) for name, each in seconds.items()}
    pairs = list(zip(tokens["ours"], tokens["peer"], strict=True))
    return {
        "ours_tok_s": round(best["ours"], 1),
        "peer_tok_s": round(best["peer"], 1),
        "ratio": round(best["ours"] / best["peer"], 2),
        "tokens_equal": all(ours == peer for ours, peer in pairs),
        "requests_equal": sum(ours == peer for ours, peer in pairs),
        "model": loaded.name,
        "requests": requests,
        "max_tokens": max_tokens,
        "prompt_tokens": sum(map(len, prompts)),
        "seconds": {
            name: [round(s, 3) for s in each] for name, each in seconds.items()
        },
        "machine": machine_facts(),
    }


def _peer_config(prompts: list[list[int]], max_tokens: int) -> EngineConfig:
    """Room for all prompts in one batch, the same for both sides."""
    lengths = [len(prompt) + max_tokens for prompt in prompts]
    budget = max(sum(map(len, prompts)), len(prompts))
    return fitting_config(lengths, max_num_batched_tokens=budget)


def _ours(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """Tokens of the asynchronous engine."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    config = _peer_config(prompts, max_tokens)
    with LLM(loaded, device="threads", config=config) as llm:
        outputs = llm.generate(prompts, params)
    return [list(output.token_ids) for output in outputs]


def _peers(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """Tokens of transformers' own continuous batching, with as many blocks as ours."""
    config = _peer_config(prompts, max_tokens)
    # Without these sizes it would take most of the free memory for its cache.
    batching = peer_batching(
        config.block_size,
        num_blocks=config.num_blocks,
        max_batch_tokens=config.max_num_batched_tokens,
        use_cuda_graph=False,
        use_async_batching=False,  # needs CUDA
        allow_block_sharing=False,
    )
    # No token is -1, so nobody stops.
    generation = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    loaded.model.set_attn_implementation("sdpa")
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns of the -1
    try:
        outputs = loaded.model.generate_batch(  # type: ignore[operator]
            inputs=prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            warmup=False,
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
        loaded.model.set_attn_implementation("sdpa")
    return [list(output.generated_tokens) for output in outputs.values()]


def peer_batching(block_size: int, **options: Any) -> ContinuousBatchingConfig:
    """Settings of transformers' continuous batching, whose blocks had two names."""
    fields = ContinuousBatchingConfig.__dataclass_fields__
    name = "page_size" if "page_size" in fields else "block_size"
    return ContinuousBatchingConfig(**(options | {name: block_size}))


def fitting_config(lengths: Sequence[int], **changes: Any) -> EngineConfig:
    """Room for requests of these lengths, prompt and output, all at the same time.

    >>> config = fitting_config([20, 50], block_size=16)
    >>> config.max_num_seqs, config.max_model_len, config.num_blocks
    (2, 50, 6)
    """
    block_size = changes.pop("block_size", 16)
    return EngineConfig(
        max_num_seqs=len(lengths),
        max_model_len=max(lengths),
        block_size=block_size,
        num_blocks=sum(blocks_for(length, block_size) for length in lengths),
        **changes,
    )


# ------------------------------------------------------------------ tables


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows in columns: the first to the left, the others to the right.

    >>> print(table([("", "sync", "async"), ("wall time", "7.61 s", "7.5 s")]))
                 sync  async
    wall time  7.61 s  7.5 s
    """
    words = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in words
    )


def host_table(result: Result) -> str:
    """The host's work as a table, with what it was measured on."""
    head = ("requests@context", "host ms", *(f"{phase} ms" for phase in HOST_PHASES))
    rows: list[Sequence[object]] = [head]
    for name, host_ms in result["host_ms"].items():
        phases = result["phases_ms"][name].values()
        rows.append((name, f"{host_ms:.3f}", *(f"{ms:.3f}" for ms in phases)))
    return f"{table(rows)}\n\n{result['what']}\n{_where(result)}"


def peer_table(result: Result) -> str:
    """The comparison as a table, with what it was measured on."""
    rows = [
        ("", "tokens/s"),
        ("cbasync, async", result["ours_tok_s"]),
        ("transformers, generate_batch", result["peer_tok_s"]),
        ("ratio", result["ratio"]),
    ]
    return (
        f"{table(rows)}\n\nsame tokens: {result['requests_equal']} of "
        f"{result['requests']} requests, {result['max_tokens']} tokens each, "
        f"{result['model']}\n{_where(result)}"
    )


def _where(result: Result) -> str:
    machine = result["machine"]
    return (
        f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores compute, "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )
