"""One step as HTML: slots, carried tokens, block tables and the cache."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from cbasync.palette import (
    CARRIED_GROUND,
    IDLE_GROUND,
    PHASE_COLOURS,
    SOFT_INK,
    request_tint,
    shade,
    text_colour,
)
from cbasync.steps import TOKEN_ARRAYS, Step

_CELL = "padding:2px 7px;text-align:right;border:1px solid #ddd"


def step_html(steps: Sequence[Step], index: int) -> str:
    """The tables of one batch, with the slot of the batch before beside them."""
    if not 0 <= index < len(steps):
        raise ValueError(
            f"step is {index}, the run has steps 0 to {len(steps) - 1}: "
            "choose one of these"
        )
    step = steps[index]
    tables = [_slot_table(step, steps, "is prepared now")]
    if index > 0:
        tables.append(_slot_table(steps[index - 1], steps, "computes meanwhile"))
    tables.sort(key=lambda table: "slot B" in table[:400])
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:18px;font-size:13px">'
        f"{''.join(tables)}{_cache_table(step, steps)}</div>"
        f'<p style="font-size:14px;margin:8px 0;max-width:900px">{_words(step)}</p>'
    )


def _words(step: Step) -> str:
    carried = [source for source in step.arrays["carry_over"] if source >= 0]
    text = (
        f"Batch {step.batch} lies in slot {_letter(step)}: {len(step.requests)} "
        f"requests, {sum(step.query_lens)} tokens."
    )
    if carried:
        text += (
            f" {len(carried)} of its inputs are placeholders: the GPU takes their "
            f"tokens from what batch {step.batch - 1} sampled."
        )
    if step.waiting:
        text += f" {step.waiting} waiting."
    return text


def _letter(step: Step) -> str:
    return "ABCD"[step.slot]


def _tint(steps: Sequence[Step], request: str) -> str:
    names = sorted({name for step in steps for name in step.requests})
    return request_tint(names.index(request)) if request in names else ""


def _slot_table(step: Step, steps: Sequence[Step], what: str) -> str:
    colour = shade(PHASE_COLOURS["prepare"], step.slot)
    owners = [
        name
        for name, length in zip(step.requests, step.query_lens, strict=True)
        for _ in range(length)
    ]
    head = (
        f'<div style="background:{colour};color:{text_colour(colour)};padding:3px 8px">'
        f"<b>slot {_letter(step)}</b>: batch {step.batch} {what}</div>"
    )
    rows = [_row("request", owners, [_tint(steps, name) for name in owners])]
    is_carried = [source >= 0 for source in step.arrays["carry_over"]]
    marks = [CARRIED_GROUND if carried else "" for carried in is_carried]
    for name in TOKEN_ARRAYS:
        colours = marks if name in ("input_ids", "carry_over") else [""] * len(owners)
        rows.append(_row(name, step.arrays[name], colours))
    rows.append(_row("the GPU reads", step.read_ids, marks))
    rows.append(_row("sampled", step.sampled, [""] * len(step.sampled)))
    table = "".join(rows)
    return f'<div>{head}<table style="border-collapse:collapse">{table}</table></div>'


def _row(name: str, values: Iterable[object], colours: Iterable[str]) -> str:
    cells = "".join(
        f'<td style="{_CELL};background:{colour or "#ffffff"};color:#1c1c1c">'
        f"{html.escape(str(value))}</td>"
        for value, colour in zip(values, colours, strict=True)
    )
    return (
        f'<tr><th style="text-align:left;padding:2px 8px 2px 0;color:{SOFT_INK}">'
        f"{name}</th>{cells}</tr>"
    )


def _cache_table(step: Step, steps: Sequence[Step]) -> str:
    rows = [
        _row(name, blocks, [_tint(steps, name)] * len(blocks))
        for name, blocks in step.block_tables.items()
    ]
    cells = "".join(
        f'<span style="display:inline-block;width:30px;margin:1px;text-align:center;'
        f"border:1px solid #ccc;color:#1c1c1c;"
        f'background:{_tint(steps, owner) or IDLE_GROUND}">{owner or "·"}</span>'
        for owner in step.owners
    )
    return (
        '<div><b>block tables</b><table style="border-collapse:collapse">'
        f"{''.join(rows)}</table><b>cache, block 0 first</b>"
        f'<div style="max-width:230px">{cells}</div></div>'
    )
