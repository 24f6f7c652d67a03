"""Notebooks: form, order of imports, stored clean, executed solved and as a stub."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

from cbasync.figures import FIGURES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEADINGS = [
    "Question",
    "Predict",
    "Build it small",
    "See it",
    "Your turn",
    "In the package",
    "In three sentences",
]
MAX_BYTES = 60_000

# What a notebook introduces; later ones may import it too. The explorer stands outside
# of the course: it may import all that there is.
INTRODUCES: dict[str, set[str]] = {
    "00": {"timeline", "explore", "plot", "widgets", "checks"},
    "01": {"models", "llm", "sampling"},
    "02": {"config", "devices", "engine", "figures", "runner", "scheduler"},
    "03": {"kv_cache", "charts", "steps"},
    "04": {"batch", "request"},
    "05": {"simulate", "foreign_trace", "profile", "trace"},
    "06": {"event_log", "paper"},
    "07": {"io_slot", "mutants", "race_table"},
    "08": {"step_table"},
    "09": {"carry_over", "graphs"},
    "10": {"timeline_diff", "serving"},
    "12": {"gpu_bench", "host_delay"},
}
FREE = {"11"}

Notebook = nbformat.NotebookNode


def read(path: Path) -> Notebook:
    notebook: Notebook = nbformat.read(path, as_version=4)
    return notebook


def tags(cell: Notebook) -> set[str]:
    return set(cell.metadata.get("tags", []))


def ids(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))


# -- form ------------------------------------------------------------------------------


@every_notebook
def test_notebook_has_the_fixed_form(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    prose = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    code = [c.source for c in notebook.cells if c.cell_type == "code"]
    headings = re.findall(r"^## (.*)$", "\n".join(prose), re.MULTILINE)
    assert re.match(r"\d\d_[a-z_]+$", path.stem)
    assert prose[0].startswith("# ")
    assert headings == HEADINGS
    assert 25 <= len(notebook.cells) <= 45
    assert 600 <= sum(len(text.split()) for text in prose) <= 1200
    assert sum(len(text.splitlines()) for text in code) <= 150
    assert max(len(text.splitlines()) for text in code) <= 20


@every_notebook
def test_notebook_is_stored_clean(path: Path) -> None:
    assert path.stat().st_size <= MAX_BYTES
    for cell in read(path).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@every_notebook
def test_exercise_has_hole_check_and_solution(path: Path) -> None:
    cells = read(path).cells
    exercises = [c for c in cells if "exercise" in tags(c)]
    checks = [c for c in cells if "check" in tags(c)]
    solutions = [c for c in cells if "solution" in tags(c)]
    assert len(exercises) == len(checks) == len(solutions) >= 1
    for exercise, check, solution in zip(exercises, checks, solutions, strict=True):
        name = re.search(r"def (my_\w+)", exercise.source)
        assert name
        assert "NotImplementedError" in exercise.source
        assert name[1] in check.source
        assert f"def {name[1]}" in solution_of(solution)
        assert "raises-exception" in tags(check)  # run all goes on after a stub


@every_notebook
def test_links_and_figures_exist(path: Path) -> None:
    prose = "\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
    missing = [t for t in targets if not (path.parent / t).exists()]
    assert missing == []


def imported(source: str) -> set[str]:
    """Modules of the package that a cell imports; `cbasync` itself is open to all."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "cbasync":
                package = ROOT / "cbasync"
                modules = [
                    f"cbasync.{a.name}"
                    for a in node.names
                    if (package / f"{a.name}.py").exists()
                ]
            names |= {m.split(".")[1] for m in modules if m.startswith("cbasync.")}
        elif isinstance(node, ast.Import):
            names |= {
                a.name.split(".")[1]
                for a in node.names
                if a.name.startswith("cbasync.")
            }
    return names


def import_faults(
    sources: dict[str, str], introduces: dict[str, set[str]]
) -> list[str]:
    """Notebook and module, where a notebook imports what comes only later."""
    known: set[str] = set()
    faults = []
    for number, source in sorted(sources.items()):
        known |= introduces.get(number, set())
        if number not in FREE:
            faults += [f"{number}: {name}" for name in sorted(imported(source) - known)]
    return faults


def test_notebooks_import_only_what_was_introduced() -> None:
    sources = {
        path.stem[:2]: "\n".join(
            c.source for c in read(path).cells if c.cell_type == "code"
        )
        for path in NOTEBOOKS
    }
    assert import_faults(sources, INTRODUCES) == []


def test_import_check_finds_planted_import() -> None:
    sources = {
        "00": "from cbasync.plot import figure",
        "01": "from cbasync import checks\nimport cbasync.engine",
    }
    introduces = {"00": {"plot", "checks"}}
    assert import_faults(sources, introduces) == ["01: engine"]


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_stored_figure_is_what_the_code_draws(name: str) -> None:
    stored = (ROOT / "notebooks" / "figures" / name).read_text()
    ElementTree.fromstring(stored)  # a browser shows nothing of an image with a mistake
    assert stored == FIGURES[name](), "run `make figures`"


def test_no_figure_is_left_over() -> None:
    stored = {path.name for path in (ROOT / "notebooks" / "figures").iterdir()}
    assert stored == set(FIGURES)


# -- running them ----------------------------------------------------------------------


def solution_of(cell: Notebook) -> str:
    """The code of a folded solution."""
    fence = re.search(r"```python\n(.*?)```", cell.source, re.DOTALL)
    assert fence, f"a solution without code: {cell.source}"
    return fence[1]


def solved(notebook: Notebook) -> Notebook:
    """The notebook with every hole filled by its solution, and no error allowed."""
    exercises = [c for c in notebook.cells if "exercise" in tags(c)]
    solutions = [c for c in notebook.cells if "solution" in tags(c)]
    for exercise, solution in zip(exercises, solutions, strict=True):
        exercise.source = solution_of(solution)
    for cell in notebook.cells:
        cell.metadata["tags"] = sorted(tags(cell) - {"raises-exception"})
    return notebook


def run(notebook: Notebook) -> Notebook:
    # The kernel is a process of its own: it finds the package of this checkout.
    os.environ["PYTHONPATH"] = str(ROOT)
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    return client.execute()


@pytest.mark.notebooks
@every_notebook
def test_solved_notebook_runs_without_an_error(path: Path) -> None:
    notebook = run(solved(read(path)))
    for cell in notebook.cells:
        assert all(o.output_type != "error" for o in cell.get("outputs", []))
    printed = "".join(
        o.get("text", "")
        for c in notebook.cells
        if "check" in tags(c)
        for o in c.outputs
    )
    assert ": right," in printed


@pytest.mark.notebooks
@every_notebook
def test_check_fails_on_the_untouched_stub(path: Path) -> None:
    notebook = run(read(path))
    checks = [c for c in notebook.cells if "check" in tags(c)]
    for cell in checks:
        errors = [o for o in cell.outputs if o.output_type == "error"]
        assert [error.ename for error in errors] == ["CheckError"]
        assert "nothing written yet" in errors[0].evalue
        assert len(errors[0].traceback) == 1  # more would show the answers
