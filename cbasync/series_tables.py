"""Series of runs as tables and as a chart of text."""

from __future__ import annotations

from collections.abc import Sequence

from cbasync.bench import Result, table


def series_table(result: Result) -> str:
    """A series as a table, one row a point."""
    rows = _ROWS[result["experiment"]](result)
    machine = result["machine"]
    where = f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}"
    parts = [table(rows)]
    if result["experiment"] == "ladder":
        parts.append(ladder_chart(result))
    return "\n\n".join([*parts, where])


def ladder_chart(result: Result, width: int = 40) -> str:
    """What each step brought: a bar as long as a decode step, wrong ones hollow.

    >>> steps = [{"step": "sync", "total_s": 0.8, "steps": 9, "wrong_tokens": 0.0},
    ...          {"step": "one slot", "total_s": 0.4, "steps": 9, "wrong_tokens": 0.5}]
    >>> print(ladder_chart({"steps": steps}, width=8))
    sync       100.00 ms ########
    one slot    50.00 ms ....
    """
    steps = result["steps"]
    lengths = [1e3 * s["total_s"] / max(1, s["steps"] - 1) for s in steps]
    names = max(len(s["step"]) for s in steps)
    return "\n".join(
        f"{s['step']:{names}} {ms:8.2f} ms "
        + ("." if s["wrong_tokens"] else "#") * round(width * ms / max(lengths))
        for s, ms in zip(steps, lengths, strict=True)
    )


def _ladder_rows(result: Result) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("step", "s", "active %", "wrong %")]
    for s in result["steps"]:
        activity = f"{100 * s['gpu_active']:.2f}"
        wrong = f"{100 * s['wrong_tokens']:.2f}"
        rows.append((s["step"], f"{s['total_s']:.3f}", activity, wrong))
    return rows


def _delay_rows(result: Result) -> list[Sequence[object]]:
    head = (
        "ms",
        "sync ms",
        "predicted",
        "async ms",
        "predicted",
        "gain %",
        "predicted",
    )
    rows: list[Sequence[object]] = [head]
    for p in result["points"]:
        times = [
            f"{p[mode][key]:.3f}"
            for mode in ("sync", "async")
            for key in ("measured_step_ms", "predicted_step_ms")
        ]
        gains = [f"{100 * p[f'gain_{k}']:.2f}" for k in ("measured", "predicted")]
        rows.append((f"{p['delay_ms']:g}", *times, *gains))
    return rows


def _sweep_rows(result: Result) -> list[Sequence[object]]:
    head = ("batch@context", "sync ms", "async ms", "saved %", "active %")
    rows: list[Sequence[object]] = [head]
    for p in result["points"]:
        steps = [f"{p[mode]['steady_step_ms']:.3f}" for mode in ("sync", "async")]
        active = f"{100 * p['async']['gpu_active']:.2f}"
        name = f"{p['batch']}@{p['context']}"
        rows.append((name, *steps, f"{100 * p['saved']:.1f}", active))
    return rows


def _depth_rows(result: Result) -> list[Sequence[object]]:
    head = ("depth", "s", "active %", "discarded", "mean TTFT s", "memory GB")
    rows: list[Sequence[object]] = [head]
    for p in result["points"]:
        seconds = f"{p['total_s']:.3f}"
        active = f"{100 * p['gpu_active']:.2f}"
        first = f"{p['mean_time_to_first_token_s']:.3f}"
        memory = f"{p['memory_used_bytes'] / 1e9:.3f}"
        rows.append((p["depth"], seconds, active, p["discarded_rows"], first, memory))
    return rows


_ROWS = {
    "ladder": _ladder_rows,
    "host-delay": _delay_rows,
    "sweep": _sweep_rows,
    "depth": _depth_rows,
}
