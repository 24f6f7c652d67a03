"""Figures in the README and recorded results say the same."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_RUN = r"\| ([\d.]+) s \| ([\d.]+) % "
ROW = re.compile(rf"{_RUN}{_RUN}\| `(data/results/\S+)` \|")
ROWS = ROW.findall(README)


def result(path: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / path).read_text()))


def test_both_published_runs_are_in_the_readme() -> None:
    names = {Path(row[-1]).name for row in ROWS}
    assert names == {p.name for p in (ROOT / "data/results").glob("published-*.json")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: Path(row[-1]).stem)
def test_a_row_is_what_was_recorded(row: tuple[str, ...]) -> None:
    *shown, path = row
    recorded = result(path)
    figures = [
        f"{recorded[mode][key] * scale:.{digits}f}"
        for mode in ("sync", "async")
        for key, scale, digits in (("total_s", 1, 1), ("gpu_active", 100, 2))
    ]
    assert shown == figures
    assert recorded["tokens_equal"]
    assert recorded["gpu"] == "NVIDIA H200"
    assert recorded["machine"]["command"]


def test_the_comparison_on_a_cpu_is_what_was_recorded() -> None:
    recorded = result("data/results/peer-cpu.json")
    assert f"makes {recorded['ratio']:.2f} times as many tokens" in README
    assert recorded["tokens_equal"]
    assert recorded["ratio"] >= 1.5


def test_host_work_is_small_and_does_not_grow_with_context() -> None:
    host_ms = result("data/results/host-cpu.json")["host_ms"]
    assert max(host_ms["32@100"], host_ms["32@8000"]) <= 0.3
    assert host_ms["256@2000"] <= 1.0
    assert host_ms["32@8000"] < 1.2 * host_ms["32@100"]


def test_the_prediction_is_as_close_as_the_readme_says() -> None:
    recorded = result("data/results/host-delay.json")
    worst = recorded["largest_error"]
    assert f"within {100 * worst:.1f} %," in README
    assert worst < 0.02
    assert [point["delay_ms"] for point in recorded["points"]] == [0, 1, 2, 4, 6, 8, 12]


def test_on_a_gpu_nothing_failed_and_edges_are_missed_where_they_are_dropped() -> None:
    """Leases guard what the host does with blocks: no checker of kernels sees that."""
    recorded = result("data/results/gpu-check.json")
    assert recorded["failed_once"] == recorded["failed_twice"] == []
    assert recorded["tests"]["passed"] > 800
    reports = {
        edge: found["reports"] > 0
        for edge, found in recorded["torch_sanitizer"].items()
    }
    assert reports == {
        "none": False,
        "block_lease": False,
        "compute_done": True,
        "compute_order": True,
        "h2d_done": True,
        "slot_reuse": True,
    }
    for verdicts in recorded["compute_sanitizer"].values():
        assert verdicts
        assert all(verdict.startswith("0 ") for verdict in verdicts)


def names_in(table: str) -> set[str]:
    """File names in back quotes; one in braces stands for each of its choices."""
    names = set()
    for name in re.findall(r"`((?:prompts|results|traces)/[^`]+)`", table):
        parts = re.split(r"\{([^}]+)\}", name)
        choices = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
        names |= {"".join(chosen) for chosen in itertools.product(*choices)}
    return names


def test_every_file_has_a_row_and_every_row_a_file() -> None:
    data = ROOT / "data"
    files = {str(p.relative_to(data)) for p in data.glob("*/*") if p.is_file()}
    assert names_in((data / "README.md").read_text()) == files
