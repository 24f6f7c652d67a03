"""The student version: a copy of the checkout without solutions and hidden tests.

Only what is named here and known to git is copied: a file that somebody left behind,
such as an executed notebook, is not. Solutions live in three places, and none of them
comes along: `tests/assignments` (references, wrong submissions, rubrics), the tests
that read it, and the solution cells of the source notebooks, which are emptied.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cbasync.grading import cells
from cbasync.grading.rubric import ASSIGNMENTS, ROOT

FILES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("pyproject.toml", "constraints.txt", "environment.yml"),
)
FOLDERS = ("cbasync", "data", "notebooks", "tests", "tools")
# Below the checkout, and every test that reads the first of them. The guide of the
# teacher tells where the mistakes are.
KEPT_BACK = (
    "tests/assignments",
    "tests/test_grading.py",
    "notebooks/assignments/README.md",
)
NEEDS_HIDDEN = re.compile(r"tests[./]assignments|\.hidden\b")
# Where there is no git to ask.
SUFFIXES = frozenset([".gz", ".html", ".json", ".jsonl", ".md", ".py", ".sh", ".svg"])
NOTEBOOK = re.compile(r"notebooks/(\d\d_\w+|assignments/(\w+)/\2)\.ipynb")
LITTER = re.compile(r"(^|/)(\..*|__pycache__|[^/]*\.egg-info)(/|$)")

STUDENT_PAGE = """\
# Assignments

{table}

First run this in the top folder, once, and then open the notebooks with the second
command: the browser shows their folder on the left, with `assignments` in it.

    make setup
    make lab

Work in the notebook. Its solution cell writes the module beside it. If you edit the
module itself, do not run the solution cell again: it writes over the file. Then try it,
in the folder of the assignment:

    ../../../.venv/bin/python -m pytest test_visible.py

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
    for name in known_files():
        if _is_for_students(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for assignment in ASSIGNMENTS.values():
        path = target / "notebooks" / "assignments" / assignment.topic
        path /= f"{assignment.topic}.ipynb"
        notebook = cells.read_notebook(path)
        cells.write_notebook(path, cells.student_notebook(notebook))
    readme = target / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(without_section(text, "Teach with it"), encoding="utf-8")
    page = target / "notebooks" / "assignments" / "README.md"
    page.write_text(student_page(), encoding="utf-8")
    return sorted(path for path in target.rglob("*") if path.is_file())


def known_files() -> list[str]:
    """Files of the checkout that belong to it, by their path from its top."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *FILES, *FOLDERS]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        names = run.stdout.split("\0") if run.returncode == 0 else []
    except OSError:  # there is no git
        names = []
    # A copy that lies in somebody else's repository is not known to it.
    if "pyproject.toml" not in names:
        names = list(_files_by_name())
    return sorted(name for name in names if name and (ROOT / name).is_file())


def _files_by_name() -> Iterator[str]:
    yield from FILES
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            is_known = path.suffix in SUFFIXES or NOTEBOOK.fullmatch(name)
            if is_known and not LITTER.search(name):
                yield name


def _is_for_students(name: str) -> bool:
    """Whether a file is none of ours: no hidden test, and none that needs one."""
    if any(name == kept or name.startswith(f"{kept}/") for kept in KEPT_BACK):
        return False
    if not (name.startswith("tests/") and name.endswith(".py")):
        return True
    return not NEEDS_HIDDEN.search((ROOT / name).read_text(encoding="utf-8"))


def without_section(text: str, title: str) -> str:
    r"""A page without the section of this title, up to the next one.

    >>> without_section("# A\n\n## B\n\nb\n\n## C\n\nc\n", "B")
    '# A\n\n## C\n\nc\n'
    """
    before, found, after = text.partition(f"## {title}\n")
    if not found:
        raise ValueError(f"the page has no section {title!r}: give the title it has")
    _, next_title, rest = after.partition("\n## ")
    return before + (next_title + rest).removeprefix("\n")


def student_page() -> str:
    """The students' own README of the assignments."""
    lines = ["| assignment | you hand in |", "|---|---|"]
    for assignment in ASSIGNMENTS.values():
        topic = assignment.topic
        lines.append(f"| [{topic}]({topic}/{topic}.ipynb) | `{assignment.file}` |")
    return STUDENT_PAGE.format(table="\n".join(lines))
