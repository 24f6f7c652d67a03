"""The files that grading a class leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cbasync.bench import table
from cbasync.grading.page import student_page
from cbasync.grading.report import (
    Grade,
    leaderboard,
    leaderboard_text,
    write_csv,
    write_json,
)


def write_results(folder: str | Path, grades: Sequence[Grade]) -> str:
    """Write the table, the gradebook, the leaderboard and the pages; a short overview.

    grades.csv  grades.json  leaderboard.md  leaderboard.json  feedback/STUDENT.html
    """
    top = Path(folder)
    (top / "feedback").mkdir(parents=True, exist_ok=True)
    ordered = sorted(grades, key=lambda grade: (grade.student, grade.assignment))
    write_csv(top / "grades.csv", ordered)
    write_json(top / "grades.json", ordered)
    board = leaderboard(ordered)
    (top / "leaderboard.md").write_text(leaderboard_text(board), encoding="utf-8")
    text = json.dumps(board, indent=2, ensure_ascii=False)
    (top / "leaderboard.json").write_text(text + "\n", encoding="utf-8")
    for student in dict.fromkeys(grade.student for grade in ordered):
        own = [grade for grade in ordered if grade.student == student]
        page = top / "feedback" / f"{student}.html"
        page.write_text(student_page(student, own), encoding="utf-8")
    return overview(ordered, top)


def overview(grades: Sequence[Grade], folder: Path) -> str:
    """Points by student and assignment, and what needs the teacher's eyes."""
    numbers = sorted({grade.assignment for grade in grades})
    rows: dict[str, list[str]] = {}
    for grade in grades:
        rows.setdefault(grade.student, [grade.student]).append(str(grade.points))
    lines = [table([["student", *numbers], *rows.values()]), ""]
    lines += [
        f"look at {grade.assignment} of {grade.student}: a check failed by itself"
        for grade in grades
        if grade.checker_failed
    ]
    lines.append(f"wrote grades.csv, grades.json and feedback/ to {folder}")
    return "\n".join(lines) + "\n"
