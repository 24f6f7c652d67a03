"""Series of runs on a GPU: what each step brings, where it pays, what was predicted.

A series is a function from a model and a base setting to a plain dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from cbasync.bench import Result, machine_facts
from cbasync.gpu_bench import MODES, PREFILL_TOKENS, TURN, Measured, Setting, measure
from cbasync.host_delay import DELAYS_MS, host_delay_points
from cbasync.models import LoadedModel

Series = Callable[[LoadedModel, Setting], Result]


def _with_facts(name: str, loaded: LoadedModel, **parts: object) -> Result:
    gpu = torch.cuda.get_device_name()
    head = {"experiment": name, "gpu": gpu, "model": loaded.name}
    return head | parts | {"machine": machine_facts()}


# ------------------------------------------------------------------ step by step

_NO_EVENTS = ("h2d_done", "compute_done")

LADDER: dict[str, dict[str, object]] = {
    "one default stream, sync": {"mode": "sync", "one_stream": True},
    "three streams without events, sync": {"mode": "sync", "ablate": _NO_EVENTS},
    "three streams with events, sync": {"mode": "sync"},
    "async, one slot": {"num_slots": 1},
    "async, two slots, no carry-over": {"carry": False},
    "async, two slots, carry-over": {},
    "graphs, sync": {"mode": "sync", "cuda_graphs": True},
    "graphs, one slot": {"cuda_graphs": True, "num_slots": 1},
    "graphs, async": {"cuda_graphs": True},
    "graphs, async, pageable memory": {"cuda_graphs": True, "pinned": False},
    "merged, sync": {"mode": "sync", "cuda_graphs": True, "merge": True},
    "merged, async": {"cuda_graphs": True, "merge": True},
    "compiled and merged, sync": {
        "mode": "sync",
        "cuda_graphs": True,
        "merge": True,
        "compile": True,
    },
    "compiled and merged, async": {"cuda_graphs": True, "merge": True, "compile": True},
}
"""Steps from the simplest loop to the fastest, as changes to a setting."""


def ladder(loaded: LoadedModel, base: Setting) -> Result:
    """Each step's time and activity, and how many tokens are wrong where some are.

    Tokens are held against the step of the same kernels that is known to be right:
    other kernels round otherwise, and may choose another token.
    """
    steps: list[Result] = []
    right: dict[tuple[bool, bool, bool], list[list[int]]] = {}
    runs: dict[str, Measured] = {}
    for name, changes in LADDER.items():
        setting = replace(base, **({"cuda_graphs": False} | changes))  # type: ignore[arg-type]
        runs[name] = run = measure(loaded, setting)
        kernels = (setting.cuda_graphs, setting.merge, setting.compile)
        is_right = not setting.ablate and not setting.num_slots and setting.carry
        if is_right:
            right.setdefault(kernels, run.tokens)
    for name, run in runs.items():
        setting = Setting(**run.result["setting"])
        kernels = (setting.cuda_graphs, setting.merge, setting.compile)
        wrong = wrong_fraction(run.tokens, right[kernels])
        steps.append({"step": name, "wrong_tokens": wrong, **run.result})
    return _with_facts("ladder", loaded, steps=steps)


def wrong_fraction(tokens: list[list[int]], right: list[list[int]]) -> float:
    """Share of tokens that differ at their place.

    >>> wrong_fraction([[1, 2], [3, 4]], [[1, 2], [3, 5]])
    0.25
    """
    pairs = [
        (ours, theirs)
        for row, other in zip(tokens, right, strict=True)
        for ours, theirs in zip(row, other, strict=True)
    ]
    return sum(ours != theirs for ours, theirs in pairs) / len(pairs)


# ------------------------------------------------------------------ slower hosts


def host_delay(loaded: LoadedModel, base: Setting) -> Result:
    """Host time added to steps, measured and predicted by the virtual device.

    Raises a `ValueError` for fewer steps than a round of delays takes.
    """
    least = (len(DELAYS_MS) + 1) * TURN
    if base.new_tokens < least:
        raise ValueError(
            f"new_tokens is {base.new_tokens}, {len(DELAYS_MS)} delays in turns of "
            f"{TURN} steps take at least {least}: raise it"
        )
    base = replace(base, host_delays_ms=DELAYS_MS)
    runs = {mode: measure(loaded, replace(base, mode=mode)) for mode in MODES}
    model, points = host_delay_points(runs, base)
    return _with_facts(
        "host-delay",
        loaded,
        setting=vars(base),
        points=points,
        largest_error=max(abs(p[mode]["error"]) for p in points for mode in MODES),
        cost_model=asdict(model),
    )


# ------------------------------------------------------------------ where it pays

SIZES = (
    (1, 128), (1, 2048), (1, 16384), (8, 128), (8, 16384), (32, 128), (32, 2048),
    (32, 16384), (128, 128), (128, 2048), (256, 128), (256, 2048),
)  # fmt: skip


def sweep(loaded: LoadedModel, base: Setting) -> Result:
    """Batch and context from small to large: what async saves, and the host's work.

    Steps count in which every request decodes.
    """
    points = []
    for batch, context in SIZES:
        setting = replace(
            base,
            batch=batch,
            prompt_tokens=context,
            # Prompts are read one after the other, and the first has to last so long.
            new_tokens=base.new_tokens + batch * context // PREFILL_TOKENS + 2,
            skip_prefill=True,
        )
        point: Result = {"batch": batch, "context": context}
        for mode in MODES:
            run = measure(loaded, replace(setting, mode=mode)).result
            keys = ("steady_step_ms", "gpu_active", "host_ms_per_step")
            point[mode] = {key: run[key] for key in keys}
        steps = [point[mode]["steady_step_ms"] for mode in MODES]
        points.append(point | {"saved": 1 - steps[1] / steps[0]})
    return _with_facts("sweep", loaded, new_tokens=base.new_tokens, points=points)


# ------------------------------------------------------------------ deeper rings


def depth(loaded: LoadedModel, base: Setting) -> Result:
    """Depth 0 to 3 with requests that end at tokens nobody can foresee.

    Twice as many requests as fit: the others wait for the first ones to end.
    """
    points = []
    for ahead in range(4):
        setting = replace(
            base,
            mode="async",
            depth=ahead,
            requests=2 * base.batch,
            stop_every=150,
            warm_all=True,
        )
        run = measure(loaded, setting)
        keep = (
            "total_s", "steps", "output_tokens", "discarded_rows", "gpu_active",
            "first_token_s", "mean_time_to_first_token_s", "memory_used_bytes",
            "io_bytes_of_a_slot", "host_ms_per_step", "slots",
        )  # fmt: skip
        point = {"depth": ahead, **{key: run.result[key] for key in keep}}
        points.append(point | {"tokens": run.tokens})
    first = points[0].pop("tokens")
    equal = [point.pop("tokens") == first for point in points[1:]]
    return _with_facts(
        "depth", loaded, setting=vars(base), points=points, tokens_equal=all(equal)
    )


SERIES: dict[str, Series] = {
    "ladder": ladder,
    "host-delay": host_delay,
    "sweep": sweep,
    "depth": depth,
}
