"""Source, starter and graded cells, all made from the reference and the rubric.

The reference is the one place where a solution is written; marks say what a student
does not get. The notebook's solution cell holds the same text with its marks, and each
rubric item has a cell that grades it:

    reference  --starter_of-->  starter module
    reference  ------------->   solution cell  --student_notebook-->  starter cell
    rubric     ------------->   graded cells   --student_notebook-->  a line of words

`python -m cbasync.grading.cells a1` writes the starter and the cells again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbasync.grading.rubric import ASSIGNMENTS, Assignment, load_items

STUB = "raise NotImplementedError"
SOLUTION = ("### BEGIN SOLUTION", "### END SOLUTION")
HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")

Cell = dict[str, Any]
Notebook = dict[str, Any]


def starter_of(text: str) -> str:
    """A text with each solution replaced by one line that raises.

    >>> print(starter_of('''def twice(x):
    ...     ### BEGIN SOLUTION
    ...     return x + x
    ...     ### END SOLUTION
    ... '''), end="")
    def twice(x):
        raise NotImplementedError
    """
    return _cut(text, SOLUTION, STUB)


def _cut(text: str, marks: tuple[str, str], stub: str) -> str:
    """Replace every marked region by the stub, indented like its first mark."""
    begin, end = marks
    lines: list[str] = []
    inside = False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        mark = line.strip()
        if mark not in marks:
            if not inside:
                lines.append(line)
            continue
        if (mark == begin) == inside:
            raise ValueError(f"line {number}: {mark!r} has no partner: add it")
        inside = mark == begin
        if inside and stub:
            lines.append(line.replace(begin, stub))
    if inside:
        raise ValueError(f"{begin!r} is never closed: add {end!r}")
    return "".join(lines)


def reference_of(assignment: Assignment) -> str:
    """The reference solution, marks included."""
    path = assignment.hidden / "reference" / assignment.file
    return path.read_text(encoding="utf-8")


def _code_cell(source: str, **nbgrader: Any) -> Cell:
    grade_id = nbgrader["grade_id"]
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": grade_id[:64],
        "metadata": {"nbgrader": {"schema_version": 3, "task": False, **nbgrader}},
        "outputs": [],
        "source": source,
    }


def solution_source(assignment: Assignment, text: str) -> str:
    """The cell that writes a module: the only code of a student that counts."""
    return f"%%writefile {assignment.file}\n{text.rstrip()}"


def solution_cell(number: str) -> Cell:
    """The notebook's cell for the module, as the teacher has it."""
    assignment = ASSIGNMENTS[number]
    source = solution_source(assignment, reference_of(assignment))
    return _code_cell(
        source, grade_id="solution", grade=False, locked=False, solution=True
    )


def grade_cells(number: str) -> list[Cell]:
    """One cell for each item of the rubric; a student sees its first line."""
    begin, end = HIDDEN
    return [
        _code_cell(
            f"# {item.points} points: {item.words}\n{begin}\n"
            f"from cbasync.grading.course import grade_item\n\n"
            f'grade_item("{number}", "{item.name}")\n{end}',
            grade_id=item.name,
            grade=True,
            locked=True,
            points=item.points,
            solution=False,
        )
        for item in load_items(ASSIGNMENTS[number])
    ]


def nbgrader_of(cell: Any) -> dict[str, Any]:
    """What nbgrader knows of a cell; empty for a cell that it leaves alone."""
    found: dict[str, Any] = cell["metadata"].get("nbgrader", {})
    return found


def source_of(cell: Any) -> str:
    """A cell's text; files may hold it as a list of lines."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def student_notebook(notebook: Notebook) -> Notebook:
    """A copy of the notebook without solutions, hidden tests and outputs."""
    copy: Notebook = json.loads(json.dumps(notebook))
    for cell in copy["cells"]:
        cell["source"] = _cut(starter_of(source_of(cell)), HIDDEN, "").rstrip("\n")
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return copy


def with_new_cells(notebook: Notebook, number: str) -> Notebook:
    """The notebook with its solution and graded cells written again, in place."""

    def cells() -> Iterator[Cell]:
        graded = grade_cells(number)
        for cell in notebook["cells"]:
            known = nbgrader_of(cell)
            if known.get("grade"):
                yield from graded
                graded = []
            elif known.get("solution"):
                yield solution_cell(number)
            else:
                yield cell
        yield from graded

    return {**notebook, "cells": list(cells())}


def read_notebook(path: Path) -> Notebook:
    """A notebook as plain values, the text of each cell in one piece."""
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = source_of(cell)
    return notebook


def write_notebook(path: Path, notebook: Notebook) -> None:
    """As Jupyter writes it: the text of a cell as a list of lines."""
    lines = [
        {**cell, "source": source_of(cell).splitlines(keepends=True)}
        for cell in notebook["cells"]
    ]
    stored = {**notebook, "cells": lines}
    text = json.dumps(stored, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def module_of(assignment: Assignment, notebook: Any) -> str:
    """What a student's solution cell would write, whatever else its first line says."""
    for cell in notebook["cells"]:
        if nbgrader_of(cell).get("grade_id") == "solution":
            text = source_of(cell)
            return re.sub(r"\A\s*%%writefile[^\n]*\n?", "", text) + "\n"
    return starter_of(reference_of(assignment))


def main(numbers: list[str]) -> None:
    """Write the starter module and the cells of these assignments again."""
    for number in numbers:
        assignment = ASSIGNMENTS[number]
        starter = starter_of(reference_of(assignment))
        (assignment.folder / assignment.file).write_text(starter, encoding="utf-8")
        path = assignment.folder / f"{assignment.topic}.ipynb"
        write_notebook(path, with_new_cells(read_notebook(path), number))


if __name__ == "__main__":
    main(sys.argv[1:])
