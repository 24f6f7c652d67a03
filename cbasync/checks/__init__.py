"""Checks of the exercises: each takes the learner's function and says what is wrong.

A failing check shows the smallest case that fails, what was expected, what came, and
one question that points at the mistake.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbasync.checks.beginnings import idle_share, tokens_read, total_ms, waits
    from cbasync.checks.carrying import async_engine, calls, carry_over
    from cbasync.checks.memory import flat_arrays, slot_mapping
    from cbasync.checks.paying import gain, gain_with_stops
    from cbasync.checks.queues import idle_by_cause, starts
    from cbasync.checks.slots import missing_edge, turns

_HOMES = {
    "async_engine": "carrying",
    "calls": "carrying",
    "carry_over": "carrying",
    "flat_arrays": "memory",
    "gain": "paying",
    "gain_with_stops": "paying",
    "idle_by_cause": "queues",
    "idle_share": "beginnings",
    "missing_edge": "slots",
    "slot_mapping": "memory",
    "starts": "queues",
    "tokens_read": "beginnings",
    "total_ms": "beginnings",
    "turns": "slots",
    "waits": "beginnings",
}

__all__ = [
    "async_engine",
    "calls",
    "carry_over",
    "flat_arrays",
    "gain",
    "gain_with_stops",
    "idle_by_cause",
    "idle_share",
    "missing_edge",
    "slot_mapping",
    "starts",
    "tokens_read",
    "total_ms",
    "turns",
    "waits",
]


def __getattr__(name: str) -> Any:
    """Load a check when it is first used: some need the engines, most do not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
