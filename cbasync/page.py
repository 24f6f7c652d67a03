"""The zero-install page: both timelines and sliders in one HTML file.

Whoever opens the file needs neither Python nor a network. The page has its own virtual
clock, small and in JavaScript; the tests hold it to the engines bar by bar.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from cbasync.config import EngineConfig
from cbasync.devices.costs import ARTICLE, LAPTOP, WAITS, CostModel, PhaseCost
from cbasync.io_slot import SlotLayout
from cbasync.palette import PHASE_COLOURS
from cbasync.simulate import PUBLISHED, published_difference
from cbasync.trace import PHASES

CONTEXT = 512  # tokens of a request in the cache, where a preset's costs depend on it


def write_page(
    path: str | Path,
    costs: CostModel = ARTICLE,
    *,
    batch: int = 32,
    depth: int = 1,
    context: int = CONTEXT,
) -> None:
    """Write the page; it opens with this cost model, batch size and depth."""
    html = page_html(costs, batch=batch, depth=depth, context=context)
    try:
        Path(path).write_text(html, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write {path} ({error.strerror}): give a file in a folder that "
            "exists and that you may write to"
        ) from error


def page_html(
    costs: CostModel = ARTICLE,
    *,
    batch: int = 32,
    depth: int = 1,
    context: int = CONTEXT,
) -> str:
    """The page as text: template, presets and colours."""
    EngineConfig(max_num_seqs=batch, max_num_batched_tokens=batch, depth=depth)
    models = [costs, *(model for model in (ARTICLE, LAPTOP) if model != costs)]
    presets = [_preset(model, batch, depth, context) for model in models]
    template = resources.files("cbasync").joinpath("page_template.html")
    html = template.read_text(encoding="utf-8")
    for name, default, value in (
        ("PRESETS", "[]", presets),
        ("COLOURS", "{}", PHASE_COLOURS),
    ):
        place = f"/*{name}*/{default}"
        assert html.count(place) == 1, f"the template has no single {place}"
        html = html.replace(place, _as_script(value))
    return html


def steady(costs: CostModel, context: int = CONTEXT) -> CostModel:
    """The same machine for one kind of step: each request decodes one token.

    Then tokens, context and bytes all grow with the requests and nothing else:

    >>> model = CostModel("m", compute=PhaseCost(100.0, 1.0, 2.0, 0.5))
    >>> steady(model, context=10).compute
    PhaseCost(fixed_us=100.0, per_request_us=8.0, per_token_us=0.0, \
per_context_us=0.0, per_byte_us=0.0)
    """
    parts: dict[str, Any] = {}
    for phase in PHASES:
        cost: PhaseCost = getattr(costs, phase)
        fixed_bytes, request_bytes = _bytes(phase, context)
        per_request_us = cost.per_request_us + cost.per_token_us
        per_request_us += cost.per_context_us * context
        per_request_us += cost.per_byte_us * request_bytes
        fixed_us = cost.fixed_us + cost.per_byte_us * fixed_bytes
        parts[phase] = PhaseCost(fixed_us, per_request_us)
    return replace(costs, **parts)


def _bytes(phase: str, context: int) -> tuple[int, int]:
    """Bytes that a phase copies for each batch, and beyond that for each request."""
    if phase == "d2h":
        return 0, 8
    if phase != "h2d":
        return 0, 0
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=context
    )
    # One word, the 0 that query_start_loc begins with, is there for any number.
    return 4, 4 * (SlotLayout.of(config).used(1) - 1)


def _preset(costs: CostModel, batch: int, depth: int, context: int) -> dict[str, Any]:
    """What the page has to know of a cost model."""
    model = steady(costs, context)
    parts: dict[str, Any] = {
        phase: {
            "fixed_us": getattr(model, phase).fixed_us,
            "per_request_us": getattr(model, phase).per_request_us,
        }
        for phase in PHASES
    }
    note = costs.note
    if all(part["per_request_us"] == 0 for part in parts.values()):
        note += "; here no time depends on the number of requests"
    return {
        "name": costs.name,
        "note": f"{costs.name}: {note}.",
        "remark": _article_remark() if costs == ARTICLE else "",
        "batch": batch,
        "depth": depth,
        "costs": {name: getattr(costs, name) for name in WAITS} | parts,
    }


def _article_remark() -> str:
    """What the published run says about the same numbers."""
    sync, overlapped = PUBLISHED["sync"], PUBLISHED["async"]
    parts = published_difference(0.0)
    return (
        f"Published for this machine: {sync['gpu_active']:.1%} and {sync['total_s']} s "
        f"in turns, {overlapped['gpu_active']:.1%} and {overlapped['total_s']} s one "
        f"batch ahead. In that run the GPU was active {parts['extra_active_s']:.1f} s "
        f"longer and idle for {parts['idle_s']:.1f} s; this model has neither."
    ).replace("%", " %")


def _as_script(value: object) -> str:
    """JSON that may stand inside a script element, whatever a name or note says."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
