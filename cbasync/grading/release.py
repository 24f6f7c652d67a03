"""The student version: a copy of the checkout without solutions and hidden tests.

Only what is named here is copied. Solutions live in three places, and none of them
comes along: `tests/assignments` (references, wrong submissions, rubrics), the tests of
the grader, and the solution cells of the source notebooks, which are emptied.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cbasync.grading import cells
from cbasync.grading.rubric import ASSIGNMENTS, ROOT

FILES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("pyproject.toml", "constraints.txt", "environment.yml"),
)
FOLDERS = ("cbasync", "data", "notebooks", "tests", "tools")
# Below the checkout, and every test that names the first of them. The guide of the
# teacher tells where the mistakes are.
KEPT_BACK = (
    "tests/assignments",
    "tests/test_grading.py",
    "notebooks/assignments/README.md",
)
LITTER = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.pyc")

STUDENT_PAGE = """\
# Assignments

{table}

Work in the notebook, or in the module beside it: the notebook's solution cell writes
the module. Then try it, in the folder of the assignment:

    python -m pytest test_visible.py

Hand in the module, one file for each assignment. It may use Python's standard library
and nothing else, and no files, threads or processes. More tests than the visible ones
decide about the points; each notebook says which properties they look at.
"""


def release(folder: str | Path) -> list[Path]:
    """Write the student version into a folder that is empty or new; its files."""
    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder, or empty this one")
    if target.resolve().is_relative_to(ROOT):
        raise ValueError(f"{folder} lies in the checkout: give a folder outside of it")
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, target / name)
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=_ignored)
    for assignment in ASSIGNMENTS.values():
        path = target / "notebooks" / "assignments" / assignment.topic
        path /= f"{assignment.topic}.ipynb"
        notebook = cells.read_notebook(path)
        cells.write_notebook(path, cells.student_notebook(notebook))
    page = target / "notebooks" / "assignments" / "README.md"
    page.write_text(student_page(), encoding="utf-8")
    return sorted(path for path in target.rglob("*") if path.is_file())


def _ignored(folder: str, names: list[str]) -> set[str]:
    """What `copytree` leaves out."""
    here = Path(folder).relative_to(ROOT)
    kept_back = {
        name
        for name in names
        if (here / name).as_posix() in KEPT_BACK
        or (here.parts[:1] == ("tests",) and _names_hidden(Path(folder, name)))
    }
    return set(LITTER(folder, names)) | kept_back


def _names_hidden(path: Path) -> bool:
    """Whether a test of ours needs what students do not get."""
    if path.suffix != ".py":
        return False
    text = path.read_text(encoding="utf-8")
    return "tests.assignments" in text or "tests/assignments" in text


def student_page() -> str:
    """The students' own README of the assignments."""
    lines = ["| assignment | you hand in |", "|---|---|"]
    for assignment in ASSIGNMENTS.values():
        topic = assignment.topic
        lines.append(f"| [{topic}]({topic}/{topic}.ipynb) | `{assignment.file}` |")
    return STUDENT_PAGE.format(table="\n".join(lines))
