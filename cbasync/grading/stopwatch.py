"""How long a call may take: so much computing, and a few times that on the clock.

A busy machine makes a submission slow on the clock but lets it compute no more, so that
computing is what is counted; the clock is for those that sleep.
"""

from __future__ import annotations

import time

PATIENCE = 6  # who computes all the time has a sixth of a core, or the clock decides


def computed_s(pid: int) -> float | None:
    """Seconds that a process has computed so far; None where nobody can say.

    >>> import os
    >>> before = time.process_time()
    >>> now = computed_s(os.getpid())
    >>> now is None or before <= now <= time.process_time()
    True
    """
    try:
        # The clock of another process, numbered as clock_getcpuclockid(3) does.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


class Stopwatch:
    """Runs during one call; `deadline` is of the whole item, on `time.monotonic`."""

    def __init__(self, pid: int, call_s: float, deadline: float) -> None:
        self._pid = pid
        self._call_s = call_s
        self._before_s = computed_s(pid)
        self._deadline = deadline
        self._started = time.monotonic()

    def _computed_s(self) -> float | None:
        now_s = computed_s(self._pid)
        if self._before_s is None or now_s is None:
            return None
        return now_s - self._before_s

    def left_s(self) -> float:
        """Nothing can be over before; 0 once something is."""
        now = time.monotonic()
        clock_s = now - self._started
        computed = self._computed_s()
        patience = PATIENCE if computed is not None else 1
        most = (
            self._deadline - now,
            patience * self._call_s - clock_s,
            self._call_s - (clock_s if computed is None else computed),
        )
        return max(0.0, min(most))

    def words(self) -> str:
        """Which limit is over, for a message."""
        if time.monotonic() >= self._deadline:
            return "the time for all calls of an item together"
        computed = self._computed_s()
        if computed is None or computed >= self._call_s:
            return f"{self._call_s:g} s"
        return f"{PATIENCE * self._call_s:g} s on the clock"
