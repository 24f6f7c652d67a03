"""Checks of the exercises: each takes the learner's function and says what is wrong.

A failing check shows the smallest case that fails, what was expected, what came, and
one question that points at the mistake.
"""

from cbasync.checks.beginnings import idle_share, tokens_read, total_ms, waits
from cbasync.checks.carrying import async_engine, calls, carry_over
from cbasync.checks.memory import flat_arrays, slot_mapping
from cbasync.checks.queues import idle_by_cause, starts
from cbasync.checks.slots import missing_edge, turns

__all__ = [
    "async_engine",
    "calls",
    "carry_over",
    "flat_arrays",
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
