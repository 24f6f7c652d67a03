"""The nbgrader way: a course folder, and what keeps its grades ours.

nbgrader runs a student's notebook and gives a cell its points if it raises nothing. So
while grading, the notebook is the teacher's, with the text of one cell of the
student's; that cell writes a file, and each graded cell judges the file in a process of
its own. Nothing that a student wrote runs in the notebook.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from cbasync.grading import cells
from cbasync.grading.rubric import (
    ASSIGNMENTS,
    SEED,
    Assignment,
    load_items,
    run_item,
)

SEED_VARIABLE = "CBASYNC_ASSIGNMENTS_SEED"

CONFIG = """\
\"\"\"nbgrader's settings for the assignments of cbasync.\"\"\"

import os

from cbasync.grading.course import keep_solution, only_verdicts

c = get_config()
c.CourseDirectory.course_id = "cbasync"
c.CourseDirectory.root = os.path.dirname(os.path.abspath(__file__))
os.environ["{variable}"] = "{seed}"
c.ClearSolutions.code_stub = {{"python": "{stub}"}}
c.Execute.timeout = 120  # above the limit of an item, which gives the better message
names = "nbgrader.preprocessors."
c.Autograde.sanitize_preprocessors = [keep_solution] + [
    names + name
    for name in [
        "ClearOutput",
        "DeduplicateIds",
        "OverwriteKernelspec",
        "OverwriteCells",
        "CheckCellMetadata",
    ]
]
c.Autograde.autograde_preprocessors = [names + "Execute", only_verdicts] + [
    names + name
    for name in [
        "LimitOutput",
        "SaveAutoGrades",
        "AssignLatePenalties",
        "CheckCellMetadata",
    ]
]
"""


def write_course(folder: str | Path, seed: int = SEED) -> list[str]:
    """Write a course folder with every assignment as a source; their names.

    Files that are there already are written again, submissions are left alone.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    config = CONFIG.format(variable=SEED_VARIABLE, seed=seed, stub=cells.STUB)
    (root / "nbgrader_config.py").write_text(config, encoding="utf-8")
    topics = []
    for assignment in ASSIGNMENTS.values():
        target = root / "source" / assignment.topic
        ignore = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(assignment.folder, target, dirs_exist_ok=True, ignore=ignore)
        topics.append(assignment.topic)
    return topics


def grade_item(number: str, name: str) -> int:
    """Judge `./MODULE.py` by one rubric item: its points, or `AssertionError`."""
    assignment = ASSIGNMENTS[number]
    seed = int(os.environ.get(SEED_VARIABLE, SEED))
    for item in load_items(assignment):
        if item.name == name:
            result = run_item(assignment, item, Path.cwd(), seed)
            # A traceback through the checks would be no help to a student.
            if not result.passed:
                _quiet()
                raise AssertionError(result.message)
            return result.points
    raise ValueError(
        f"the rubric of {number} has no item {name!r}: write the cells again"
    )


def _quiet() -> None:
    """Show errors of this notebook without a traceback."""
    shell = sys.modules.get("IPython")
    if shell is not None and (running := shell.get_ipython()) is not None:
        running.run_line_magic("xmode", "Minimal")


def _assignment(resources: Any) -> Assignment:
    topic = resources["nbgrader"]["assignment"]
    return ASSIGNMENTS[topic.partition("_")[0]]


def _node(value: Any) -> Any:
    """Plain values as nbformat's own kind of dict."""
    import nbformat

    convert: Any = nbformat.from_dict
    return convert(value)


def keep_solution(notebook: Any, resources: Any) -> tuple[Any, Any]:
    """For nbgrader: the teacher's notebook with the text of the student's one cell.

    Cells that a student added, changed or removed are gone, and so are the teacher's
    own cells that would run the student's code here, such as figures.
    """
    assignment = _assignment(resources)
    module = cells.module_of(assignment, notebook)
    source = cells.read_notebook(assignment.folder / f"{assignment.topic}.ipynb")
    kept = []
    for cell in source["cells"]:
        known = cells.nbgrader_of(cell)
        if known.get("solution"):
            cell["source"] = cells.solution_source(assignment, module)
        if known or cell["cell_type"] == "markdown":
            kept.append({**cell, "source": cells.source_of(cell)})
    return _node({**source, "cells": kept}), resources


def only_verdicts(notebook: Any, resources: Any) -> tuple[Any, Any]:
    """For nbgrader: a graded cell has a number or an error; one with neither gets none.

    nbgrader itself takes a cell without output for passed, and a warning for failed.
    """
    missing = {
        "output_type": "error",
        "ename": "AssertionError",
        "evalue": "was not run",
    }
    for cell in notebook.cells:
        if not cells.nbgrader_of(cell).get("grade"):
            continue
        verdicts = ("execute_result", "error")
        cell.outputs = [o for o in cell.outputs if o.output_type in verdicts]
        if not cell.outputs:
            cell.outputs = [_node({**missing, "traceback": ["was not run"]})]
    return notebook, resources
