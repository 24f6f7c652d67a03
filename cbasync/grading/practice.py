"""A class of made-up students, to try the grading before there are real submissions.

Each student has for each assignment the reference, the untouched starter or one of the
wrong submissions, whose points are known.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from cbasync.grading.rubric import ASSIGNMENTS, Assignment, load_items

STUDENTS = (
    "ada",
    "bo",
    "chidi",
    "dana",
    "emre",
    "farah",
    "goran",
    "hana",
    "ines",
    "jun",
)


def expected_points(assignment: Assignment) -> dict[str, dict[str, Any]]:
    """Each wrong submission's points, and a word that its messages hold."""
    path = assignment.hidden / "expected.json"
    known: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return known


def choices(assignment: Assignment) -> dict[str, tuple[Path, int]]:
    """By name: where a submission for practice lies, and its points."""
    full = sum(item.points for item in load_items(assignment))
    found = {
        name: (assignment.hidden / "wrong" / name, int(entry["points"]))
        for name, entry in sorted(expected_points(assignment).items())
    }
    found["reference"] = (assignment.hidden / "reference", full)
    found["starter"] = (assignment.folder, 0)
    return found


def write_class(folder: str | Path, seed: int = 1) -> dict[str, dict[str, int]]:
    """Ten submissions; the points that each should get, also in `expected.json`.

    The first student has all references, the last one handed in the starters.
    """
    top, chance = Path(folder), random.Random(seed)
    if top.exists() and any(top.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder, or empty this one")
    expected: dict[str, dict[str, int]] = {name: {} for name in STUDENTS}
    for number, assignment in ASSIGNMENTS.items():
        known = choices(assignment)
        wrong = sorted(set(known) - {"reference", "starter"})
        drawn = ["reference", *chance.choices(wrong, k=len(STUDENTS) - 2), "starter"]
        for student, name in zip(STUDENTS, drawn, strict=True):
            source, points = known[name]
            target = top / student / assignment.topic
            target.mkdir(parents=True)
            shutil.copyfile(source / assignment.file, target / assignment.file)
            expected[student][number] = points
    text = json.dumps(expected, indent=2)
    (top / "expected.json").write_text(text + "\n", encoding="utf-8")
    return expected
