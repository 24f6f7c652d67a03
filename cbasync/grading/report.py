"""Grades as text, as JSON for a gradebook, as a table, as a leaderboard."""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbasync.grading.rubric import ItemResult


@dataclass
class Grade:
    """One student's result in one assignment: every item of the rubric, run or not."""

    student: str
    assignment: str  # its number, such as a1
    seed: int
    items: list[ItemResult]

    @property
    def points(self) -> int:
        return sum(item.earned for item in self.items)

    @property
    def out_of(self) -> int:
        return sum(item.points for item in self.items)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the items that passed, for the leaderboard."""
        return {k: v for item in self.items for k, v in item.metrics.items()}

    @property
    def checker_failed(self) -> bool:
        """Whether a teacher should look: a check failed, not the submission."""
        return any(item.checker_failed for item in self.items)

    def as_json(self) -> dict[str, Any]:
        """Plain values: points first, then every item."""
        head = {"student": self.student, "assignment": self.assignment}
        points = {"points": self.points, "out_of": self.out_of, "seed": self.seed}
        return {**head, **points, "items": [asdict(item) for item in self.items]}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Grade:
        """What `as_json` wrote; the points are counted again."""
        items = [ItemResult(**item) for item in entry["items"]]
        return cls(entry["student"], entry["assignment"], entry["seed"], items)


def as_text(grade: Grade) -> str:
    """A rubric with points, and under each lost item why.

    >>> lines = [ItemResult("a", "all blocks are free", 10, 10, ""),
    ...          ItemResult("b", "no block has two owners", 5, 0, "got [1, 1]")]
    >>> print(as_text(Grade("ada", "a1", 1, lines)))
    a1 of ada: 10 of 15 points
       10 of  10  all blocks are free
        0 of   5  no block has two owners
                  got [1, 1]
    """
    lines = [
        f"{grade.assignment} of {grade.student}: "
        f"{grade.points} of {grade.out_of} points"
    ]
    for item in grade.items:
        lines.append(f"  {item.earned:>3} of {item.points:>3}  {item.words}")
        if item.message:
            lines.append(textwrap.indent(item.message, " " * 14))
            if item.printed:
                printed = f"printed: {item.printed.rstrip()}"
                lines.append(textwrap.indent(printed, " " * 14))
    return "\n".join(lines)


def write_json(path: str | Path, grades: Iterable[Grade]) -> None:
    """A gradebook: one entry for each student and assignment."""
    entries = [grade.as_json() for grade in grades]
    text = json.dumps(entries, indent=2, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> list[Grade]:
    """The grades that `write_json` wrote."""
    return [Grade.from_json(entry) for entry in json.loads(Path(path).read_text())]


def write_csv(path: str | Path, grades: Sequence[Grade]) -> None:
    """One row a student: points by assignment, their sum, and what to look at."""
    numbers = sorted({grade.assignment for grade in grades})
    by_student: dict[str, dict[str, Grade]] = {}
    for grade in grades:
        by_student.setdefault(grade.student, {})[grade.assignment] = grade
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["student", *numbers, "points", "out_of", "look_at"])
        for student, row in sorted(by_student.items()):
            table.writerow(
                [
                    cell_text(student),
                    *(row[number].points for number in numbers),
                    sum(grade.points for grade in row.values()),
                    sum(grade.out_of for grade in row.values()),
                    " ".join(n for n, grade in row.items() if grade.checker_failed),
                ]
            )


def cell_text(text: str) -> str:
    """A text that no spreadsheet takes for a formula.

    >>> cell_text("=1+1"), cell_text("ada")
    ("'=1+1", 'ada')
    """
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def leaderboard(grades: Iterable[Grade]) -> list[dict[str, Any]]:
    """Measured values, the smallest of each name first, equal ones on one rank.

    >>> board = leaderboard([Grade(who, "a5", 1, [
    ...     ItemResult("idle", "", 1, 1, "", metrics={"idle": value})])
    ...     for who, value in [("ada", 0.5), ("bo", 0.25), ("cy", 0.5)]])
    >>> [(line["rank"], line["student"], line["value"]) for line in board]
    [(1, 'bo', 0.25), (2, 'ada', 0.5), (2, 'cy', 0.5)]
    """
    found = sorted(
        (grade.assignment, name, value, grade.student)
        for grade in grades
        for name, value in grade.metrics.items()
    )
    board: list[dict[str, Any]] = []
    for number, (assignment, name, value, student) in enumerate(found):
        above = found[:number]
        rank = 1 + sum(
            line[:2] == (assignment, name) and line[2] < value for line in above
        )
        board.append(
            {
                "assignment": assignment,
                "metric": name,
                "rank": rank,
                "value": value,
                "student": student,
            }
        )
    return board


def leaderboard_text(board: Sequence[dict[str, Any]]) -> str:
    """The leaderboard as a Markdown table."""
    lines = [
        "| assignment | metric | rank | value | student |",
        "|---|---|---|---|---|",
    ]
    for line in board:
        student = str(line["student"]).replace("|", "\\|")
        lines.append(
            f"| {line['assignment']} | {line['metric']} | {line['rank']} "
            f"| {line['value']:.4f} | {student} |"
        )
    return "\n".join(lines) + "\n"
