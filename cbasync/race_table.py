"""The mutation table: every mistake, whether it is found, what it does to tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from cbasync.bench import table
from cbasync.mutants import Verdict, run_table, shipped_reports

DEVICES = ("sim", "threads", "cuda")


class RaceTable:
    """Every mutant on every named device, and the complete engine beside them."""

    def __init__(self, devices: Sequence[str] = ("sim", "threads")) -> None:
        for name in devices:
            if name not in DEVICES:
                raise ValueError(
                    f"device is {name!r}, mutants run on {', '.join(DEVICES)}: "
                    "name some of these, with commas between"
                )
        self.devices = list(dict.fromkeys(devices))
        self.verdicts = list(run_table(self.devices))
        self.shipped_reports = shipped_reports(self.devices)

    def as_json(self) -> dict[str, Any]:
        """The table as plain values; `edges` are those that the reports name."""
        return {
            "shipped_reports": self.shipped_reports,
            "devices": self.devices,
            "mutants": [
                {
                    "name": verdict.name,
                    "device": verdict.device,
                    "detected": verdict.detected,
                    "named": verdict.named,
                    "wrong_token": verdict.wrong_token,
                    "edges": sorted({race.edge for race in verdict.races}),
                }
                for verdict in self.verdicts
            ],
        }

    def __str__(self) -> str:
        undetected = [
            f"{v.name} on {v.device}" for v in self.verdicts if not v.detected
        ]
        parts = [
            "Engines with one mistake each, under the race detector. found: a race is\n"
            "reported; named: with the edge that is missing; wrong: a token differs.",
            self._overview(),
            f"Not detected: {', '.join(undetected) or 'none'}.\n"
            f"The complete engine, depth 0 to 3, both carry-over families, on "
            f"{', '.join(self.devices)}: {self.shipped_reports} reports.",
            f"What each mistake does on {self.devices[0]}, and the first report of it:",
            *(_example(v) for v in self.verdicts if v.device == self.devices[0]),
        ]
        return "\n\n".join(parts)

    def _overview(self) -> str:
        """One row a mutant, three columns a device."""
        head = ["mutant"]
        for device in self.devices:
            head += [f"{device}: found", "named", "wrong"]
        rows: dict[str, list[str]] = {}
        for v in self.verdicts:
            answers = (v.detected, v.named, v.wrong_token)
            row = rows.setdefault(v.name, [v.name])
            row += ["yes" if answer else "-" for answer in answers]
        return table([head, *rows.values()])


def _example(verdict: Verdict) -> str:
    """The first request whose tokens differ, right above wrong, and a report."""
    lines = [verdict.name]
    pairs = zip(verdict.right, verdict.got, strict=True)
    wrong = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if wrong:
        number, right, got = wrong[0]
        lines.append(f"  request {number}  right  {_tokens(right)}")
        lines.append(f"             got    {_tokens(got)}")
    else:
        lines.append("  no token differs")
    if verdict.races:
        lines += textwrap.wrap(
            str(verdict.races[0]), 88, initial_indent="  ", subsequent_indent="    "
        )
    return "\n".join(lines)


def _tokens(ids: Sequence[int]) -> str:
    """Token ids in columns, so that two rows of them can be compared.

    >>> _tokens((0, 13, 5)), _tokens(())
    (' 0 13  5', 'none')
    """
    return " ".join(f"{token:2}" for token in ids) or "none"
