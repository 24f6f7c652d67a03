"""What `gpu_check.sh` found, as one JSON file: tests, and a verdict of each checker.

    python tools/gpu_summary.py OUT

OUT is the folder with its logs; the result is OUT/gpu-check.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cbasync.bench import machine_facts

# The numbers that a process draws anew: addresses of tensors and of streams.
_ADDRESS = re.compile(r"\b\d{9,}\b")


def counts(logs: list[Path]) -> dict[str, int]:
    """Outcomes of the last lines of pytest logs, added up."""
    total: Counter[str] = Counter()
    for log in logs:
        last = log.read_text().splitlines()[-1]
        for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", last):
            total[outcome] += int(number)
    return dict(total)


def sanitized(log: Path) -> dict[str, Any]:
    """What PyTorch's sanitizer said of a run, without addresses."""
    said = json.loads(log.read_text().splitlines()[-1])
    first = [_ADDRESS.sub("N", line) for line in said["first"] if "===" not in line]
    return {"reports": said["reports"], "first": first}


def verdicts(log: Path) -> list[str]:
    """Last lines of NVIDIA's checker, one a process."""
    return re.findall(r"SUMMARY: (.*)", log.read_text())


def summary(out: Path) -> dict[str, Any]:
    """All of it; `failed_twice` is what a second try did not mend."""
    return {
        "experiment": "gpu-check",
        "tests": counts(sorted(out.glob("tests-*.log"))),
        "failed_once": (out / "failed.txt").read_text().splitlines(),
        "failed_twice": (out / "failed-twice.txt").read_text().splitlines(),
        "torch_sanitizer": {
            log.stem.removeprefix("sanitizer-"): sanitized(log)
            for log in sorted(out.glob("sanitizer-*.json"))
        },
        "compute_sanitizer": {
            tool: verdicts(out / f"compute-{tool}.log")
            for tool in ("memcheck", "racecheck")
        },
        "machine": machine_facts() | {"command": "tools/gpu_check.sh OUT"},
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    text = json.dumps(summary(folder), indent=2)
    (folder / "gpu-check.json").write_text(text + "\n")
    print(text)
