"""Checks of the exercises: each takes the learner's function and says what is wrong.

A failing check shows the smallest case that fails, what was expected, what came, and
one question that points at the mistake.
"""

from cbasync.checks.beginnings import idle_share, tokens_read, total_ms, waits

__all__ = ["idle_share", "tokens_read", "total_ms", "waits"]
