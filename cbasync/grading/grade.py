"""A folder of submissions: one process for each student, a few of them at a time.

The process of a student grades all that the student handed in and writes one file. If
it ends in any other way, or takes too long, every item counts as not run: no points,
and a message for the teacher. Other students never notice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from cbasync.grading.faults import ending
from cbasync.grading.report import Grade, read_json, write_json
from cbasync.grading.rubric import (
    ASSIGNMENTS,
    MARGIN_S,
    ROOT,
    SEED,
    ItemResult,
    load_items,
    run_item,
)
from cbasync.grading.submission import DEFAULT_LIMITS, Limits

START_S = 60.0  # for a grading process to import what the checks need


@dataclass(frozen=True)
class Plan:
    """What is graded, and how."""

    numbers: tuple[str, ...] = tuple(ASSIGNMENTS)
    seed: int = SEED
    limits: Limits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        for number in self.numbers:
            if number not in ASSIGNMENTS:
                raise ValueError(
                    f"assignment is {number!r}, there are {', '.join(ASSIGNMENTS)}: "
                    "name some of these, with commas between"
                )

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        limits = Limits(**values["limits"])
        return cls(tuple(values["numbers"]), values["seed"], limits)


def grade_submission(folder: Path, plan: Plan) -> list[Grade]:
    """Judge every item of every assignment, one after the other, in this process."""
    grades = []
    for number in plan.numbers:
        assignment = ASSIGNMENTS[number]
        items = [
            run_item(assignment, item, folder, plan.seed, plan.limits)
            for item in load_items(assignment)
        ]
        grades.append(Grade(folder.name, number, plan.seed, items))
    return grades


def not_graded(student: str, plan: Plan, message: str) -> list[Grade]:
    """No points for anything, with the reason."""
    return [
        Grade(
            student,
            number,
            plan.seed,
            [
                ItemResult(
                    item.name,
                    item.words,
                    item.points,
                    message=message,
                    checker_failed=True,
                )
                for item in load_items(ASSIGNMENTS[number])
            ],
        )
        for number in plan.numbers
    ]


def students_of(folder: str | Path) -> list[Path]:
    """The folders of the students, by name."""
    top = Path(folder)
    if not top.is_dir():
        raise ValueError(f"no folder {folder}: give one with a folder for each student")
    folders = (p for p in top.iterdir() if p.is_dir() and not p.is_symlink())
    found = sorted(path for path in folders if path.name[0] not in "._")
    if not found:
        raise ValueError(
            f"no submissions in {folder}: put the files of each student into a folder "
            "with the student's name"
        )
    return found


def grade_class(
    folders: Sequence[Path], plan: Plan, processes: int
) -> Iterator[list[Grade]]:
    """The grades of one student after the other, as they are done."""
    items = sum(len(load_items(ASSIGNMENTS[number])) for number in plan.numbers)
    most_s = START_S + items * (plan.limits.item_s + MARGIN_S)
    with ThreadPoolExecutor(processes) as pool:
        jobs = [pool.submit(_in_a_process, folder, plan, most_s) for folder in folders]
        for job in as_completed(jobs):
            yield job.result()


def _in_a_process(folder: Path, plan: Plan, most_s: float) -> list[Grade]:
    with tempfile.TemporaryDirectory(prefix="grading-") as out:
        path = Path(out, "grades.json")
        command = [sys.executable, "-m", "cbasync.grading.grade"]
        command += [str(folder.resolve()), str(path), plan.as_json()]
        path_list = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        # One thread each: the processes share the machine.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path_list))}
        env["OMP_NUM_THREADS"] = "1"
        try:
            run = subprocess.run(
                command, env=env, capture_output=True, timeout=most_s, check=False
            )
        except subprocess.TimeoutExpired:
            return not_graded(folder.name, plan, f"not graded within {most_s:g} s")
        if run.returncode != 0 or not path.is_file():
            lines = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
            words = ": ".join([f"the grader {ending(run.returncode)}", *lines])
            return not_graded(folder.name, plan, words)
        try:
            return read_json(path)
        except (ValueError, KeyError, TypeError) as error:
            words = f"the grader's file is broken: {error!r}"
            return not_graded(folder.name, plan, words)


def main(arguments: list[str]) -> None:
    """FOLDER FILE PLAN: grade one submission, write its grades."""
    folder, path, plan = arguments
    write_json(path, grade_submission(Path(folder), Plan.from_json(plan)))


if __name__ == "__main__":
    main(sys.argv[1:])
