"""What the bars of assignment 5 are measured with; not in the student version."""

from __future__ import annotations

from functools import cache

from cbasync.checks.planner_checks import idle_share, run_all
from cbasync.checks.planner_workloads import workloads
from cbasync.checks.planners import Limits, Seen

MARGIN = 16  # rows that are kept back: about what a sudden rush of ends can cost


class EndsOnly:
    """Far ahead while requests seldom end, one batch ahead else; blind to the host."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ended = 0
        self.rate = 0.3  # ends a batch, lately

    def ahead(self, seen: Seen) -> int:
        for rows in seen["ended"]:
            self.ended += rows
            self.rate += 0.4 * (rows - self.rate)
        left = self.limits["ends"] - self.ended
        slack = self.limits["budget"] - seen["discarded"] - left
        if slack < 0:
            return 0
        is_calm = self.rate < 0.3 and slack > MARGIN
        return min(3 if is_calm else 1, self.limits["max_ahead"])


@cache
def ends_only_share(seed: int) -> float:
    """The idle share of `EndsOnly` on the hidden workloads."""
    return idle_share(run_all(EndsOnly, workloads(seed)))
