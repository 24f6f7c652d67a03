"""The assignments: what each known submission is worth, by all three ways to grade.

They are not collected by themselves; every reference, starter and wrong submission is
graded here, by the function that grades a class.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cbasync.__main__ import main
from cbasync.grading import Limits, cells, grade, practice
from cbasync.grading import command as command_module
from cbasync.grading import release as release_module
from cbasync.grading.command import declare
from cbasync.grading.course import keep_solution, only_verdicts, write_course
from cbasync.grading.release import release
from cbasync.grading.report import Grade, read_json
from cbasync.grading.rubric import ASSIGNMENTS, ROOT, Assignment, load_items
from cbasync.grading.stopwatch import PATIENCE
from cbasync.grading.worker import FILE_BYTES

# Half a second of computing is plenty for what answers at all.
QUICK = Limits(call_s=0.5)
PYTHON = [sys.executable, "-m"]

# -- rubrics ---------------------------------------------------------------------------

ALL = list(ASSIGNMENTS.values())
each_assignment = pytest.mark.parametrize(
    "assignment", ALL, ids=[assignment.number for assignment in ALL]
)


@each_assignment
def test_rubric_has_a_hundred_points(assignment: Assignment) -> None:
    items = load_items(assignment)
    assert sum(item.points for item in items) == 100
    assert len({item.words for item in items}) == len(items)


@each_assignment
def test_the_notebook_shows_the_rubric(assignment: Assignment) -> None:
    notebook = cells.read_notebook(assignment.folder / f"{assignment.topic}.ipynb")
    prose = "\n".join(
        cells.source_of(cell)
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in prose.splitlines()
        if re.match(r"\| *\d+ *\| ", line)
    ]
    assert [row[:2] for row in rows] == [
        [str(item.points), item.words] for item in load_items(assignment)
    ]


@each_assignment
def test_starter_cells_and_reference_are_one_text(assignment: Assignment) -> None:
    reference = cells.reference_of(assignment)
    starter = (assignment.folder / assignment.file).read_text()
    notebook = cells.read_notebook(assignment.folder / f"{assignment.topic}.ipynb")
    hint = f"run `python -m cbasync.grading.cells {assignment.number}`"
    assert starter == cells.starter_of(reference), hint
    assert notebook == cells.with_new_cells(notebook, assignment.number), hint
    assert cells.module_of(assignment, notebook).rstrip() == reference.rstrip()


# -- the guide -------------------------------------------------------------------------

GUIDE = (ROOT / "notebooks" / "assignments" / "README.md").read_text()


def test_the_guide_lists_every_assignment_as_its_notebook_does() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\S+)\) \| (\d+) \| `(\S+)` ", GUIDE, re.M)
    expected = []
    for assignment in ALL:
        path = assignment.folder / f"{assignment.topic}.ipynb"
        head = cells.source_of(cells.read_notebook(path)["cells"][0])
        minutes = re.search(r"(\d+) minutes", head)
        assert minutes, head
        assert "100 points" in head
        topic = assignment.topic
        row = (topic, f"{topic}/{topic}.ipynb", minutes[1], assignment.file)
        expected.append(row)
    assert rows == expected


def test_commands_of_the_guide_are_understood() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    declare(parser)
    found = re.findall(r"^\S*python -m cbasync assignments (.*)$", GUIDE, re.M)
    assert {line.split()[0] for line in found} == {
        *("release", "grade", "practice", "course"),
    }
    for line in found:
        parser.parse_args(line.split())
    options = set(re.findall(r"`(--[a-z-]+)", GUIDE))
    conftest = (ROOT / "tests" / "assignments" / "conftest.py").read_text()
    command = Path(command_module.__file__).read_text()
    assert [o for o in sorted(options) if f'"{o}"' not in conftest + command] == []


def test_paths_of_the_guide_exist() -> None:
    paths = re.findall(r"`((?:tests|notebooks|cbasync)/[^`]*)`", GUIDE)
    assert len(paths) > 5
    for path in paths:
        for assignment in ALL:
            known = path.replace("aN_topic", assignment.topic)
            assert (ROOT / known.replace("aN", assignment.number)).exists(), path


def test_limits_of_the_guide_are_the_defaults() -> None:
    limits = Limits()
    words = " ".join(GUIDE.split())
    clock = f"({PATIENCE * limits.call_s:g} on the clock"
    assert f"{limits.call_s:g} seconds of computing for a call {clock}" in words
    assert f"{limits.item_s:g} seconds for all calls of an item" in words
    assert f"{limits.memory_mb} MB of memory" in words
    assert f"{FILE_BYTES >> 20} MB for a file" in words


# -- every known submission ------------------------------------------------------------


def known_submissions() -> list[tuple[str, str]]:
    """Assignment and name, as the files say."""
    found = []
    for number, assignment in ASSIGNMENTS.items():
        names = sorted(p.name for p in (assignment.hidden / "wrong").glob("[a-z]*"))
        found += [(number, name) for name in (*names, "reference", "starter")]
    return found


KNOWN = known_submissions()


def source_folder(number: str, name: str) -> Path:
    assignment = ASSIGNMENTS[number]
    if name == "starter":
        return assignment.folder
    wrong = assignment.hidden / "wrong" / name
    return assignment.hidden / "reference" if name == "reference" else wrong


def grade_of(number: str, folder: Path, limits: Limits = QUICK) -> Grade:
    return grade.grade_submission(folder, grade.Plan((number,), limits=limits))[0]


@cache
def known_grade(number: str, name: str) -> Grade:
    # To fill the memory takes longer than any answer.
    limits = Limits() if "memory" in name else QUICK
    return grade_of(number, source_folder(number, name), limits)


def verdicts(graded: Grade) -> list[tuple[str, int, str]]:
    return [(item.name, item.earned, item.message) for item in graded.items]


@each_assignment
def test_expected_points_name_every_wrong_submission(assignment: Assignment) -> None:
    names = {p.name for p in (assignment.hidden / "wrong").glob("[a-z]*")}
    assert set(practice.expected_points(assignment)) == names
    assert len(names) >= 5


@pytest.mark.parametrize(("number", "name"), KNOWN)
def test_a_known_submission_gets_its_points(number: str, name: str) -> None:
    graded = known_grade(number, name)
    assert not graded.checker_failed, [item.message for item in graded.items]
    messages = "\n".join(item.message for item in graded.items)
    if name == "reference":
        assert (graded.points, messages.strip()) == (100, "")
    elif name == "starter":
        assert graded.points == 0
        assert all("not written yet" in item.message for item in graded.items)
    else:
        expected = practice.expected_points(ASSIGNMENTS[number])[name]
        assert graded.points == expected["points"]
        assert graded.points < 100
        assert expected["message"] in messages


@pytest.mark.slow
@each_assignment
def test_the_reference_passes_with_other_seeds(assignment: Assignment) -> None:
    reference = assignment.hidden / "reference"
    for seed in (2, 2027):
        plan = grade.Plan((assignment.number,), seed)
        assert grade.grade_submission(reference, plan)[0].points == 100, seed


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("number", "name"), KNOWN)
def test_the_same_result_twenty_times(number: str, name: str) -> None:
    first = verdicts(known_grade(number, name))
    for _ in range(19):
        known_grade.cache_clear()
        assert verdicts(known_grade(number, name)) == first


# -- pytest ----------------------------------------------------------------------------


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, with the package of this checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*PYTHON, "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The tests of the package have a conftest of their own, which takes seconds.
    return run_in(ROOT, "--confcutdir=tests/assignments", *arguments)


def by_pytest(number: str, name: str, gradebook: Path) -> list[Grade]:
    """Grades of `pytest tests/assignments/aN --submission DIR`."""
    run_pytest(
        f"tests/assignments/{number}",
        f"--submission={source_folder(number, name)}",
        f"--gradebook={gradebook}",
        "--call-seconds=1",
    )
    return read_json(gradebook)


def test_pytest_agrees_on_one(tmp_path: Path) -> None:
    name = sorted(practice.expected_points(ASSIGNMENTS["a1"]))[0]
    (graded,) = by_pytest("a1", name, tmp_path / "grades.json")
    assert verdicts(graded) == verdicts(known_grade("a1", name))


@pytest.mark.parametrize(
    ("number", "name"), [("a1", "forgets_at_release"), ("a2", "first_come")]
)
def test_a_message_does_not_tell_the_seed(number: str, name: str) -> None:
    seed = 47114711
    plan = grade.Plan((number,), seed=seed, limits=QUICK)
    (graded,) = grade.grade_submission(source_folder(number, name), plan)
    messages = "\n".join(item.message for item in graded.items)
    assert graded.points < 100
    assert "4711" not in messages


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), KNOWN)
def test_pytest_agrees_on_all(number: str, name: str, tmp_path: Path) -> None:
    (graded,) = by_pytest(number, name, tmp_path / "grades.json")
    assert [item.earned for item in graded.items] == [
        item.earned for item in known_grade(number, name).items
    ]


def test_pytest_reports_points_and_messages(tmp_path: Path) -> None:
    starter, path = ASSIGNMENTS["a1"].folder, tmp_path / "grades.json"
    first, *others = load_items(ASSIGNMENTS["a1"])
    run = run_pytest(
        f"tests/assignments/a1/test_hidden.py::{first.name}",
        f"--submission={starter}",
        f"--gradebook={path}",
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "a1 of a1_block_manager: 0 of 100 points" in run.stdout
    assert "is not written yet (block_manager.py, line" in run.stdout
    assert "Traceback" not in run.stdout
    # What was not run counts, with no points.
    (graded,) = read_json(path)
    assert graded.out_of == 100
    assert {item.message for item in graded.items[1:]} == {"was not run"}
    assert len(graded.items) == 1 + len(others)


def test_without_a_submission_nothing_is_collected() -> None:
    run = run_pytest("tests/assignments")
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    run = run_pytest("tests/assignments", "--submission=nowhere")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "there is no such folder" in run.stderr


@pytest.mark.slow
def test_a_run_without_items_is_no_pass(tmp_path: Path) -> None:
    reference, path = ASSIGNMENTS["a1"].hidden / "reference", tmp_path / "grades.json"
    options = (f"--submission={reference}", f"--gradebook={path}", "-k", "nothing")
    run = run_pytest("tests/assignments/a1", *options)
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert read_json(path) == []


# -- a class ---------------------------------------------------------------------------


def test_a_class_is_graded_in_processes(tmp_path: Path) -> None:
    folders = [tmp_path / "reference", tmp_path / "nothing"]
    for folder in folders:
        folder.mkdir()
    shutil.copy(source_folder("a1", "reference") / "block_manager.py", folders[0])
    plan = grade.Plan(("a1",), limits=QUICK)
    graded = [g for (g,) in grade.grade_class(folders, plan, processes=2)]
    points = {g.student: g.points for g in graded}
    assert points == {"reference": 100, "nothing": 0}
    nothing = next(g for g in graded if g.student == "nothing")
    assert "no file block_manager.py was handed in" in nothing.items[0].message


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_practice_class_gets_the_points_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class_folder, output = tmp_path / "class", tmp_path / "grades"
    assert main(["assignments", "practice", str(class_folder), "--seed=3"]) == 0
    argv = ["assignments", "grade", str(class_folder), f"--output={output}"]
    assert main([*argv, "--call-seconds=1"]) == 0
    expected = json.loads((class_folder / "expected.json").read_text())
    got: dict[str, dict[str, int]] = {}
    for graded in read_json(output / "grades.json"):
        got.setdefault(graded.student, {})[graded.assignment] = graded.points
    assert got == expected
    assert len(got) == 10
    pages = {path.stem for path in (output / "feedback").glob("*.html")}
    assert pages == set(expected)
    assert "10/10" in capsys.readouterr().err


def test_practice_has_ten_students_and_every_kind(tmp_path: Path) -> None:
    expected = practice.write_class(tmp_path / "class")
    assert len(expected) == 10
    assert all(points == 100 for points in expected["ada"].values())
    assert all(points == 0 for points in expected["jun"].values())
    again = practice.write_class(tmp_path / "again")
    assert again == expected
    with pytest.raises(ValueError, match="is not empty"):
        practice.write_class(tmp_path / "class")


# -- the student version ---------------------------------------------------------------


def text_of(path: Path) -> str:
    """What somebody reads who opens the file."""
    if path.suffix != ".ipynb":
        return path.read_text(errors="replace")
    return "\n".join(map(cells.source_of, cells.read_notebook(path)["cells"]))


def pairs_of(text: str) -> set[str]:
    """Lines that follow each other, without spaces; a single line may be anybody's."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {f"{one} / {two}" for one, two in pairwise(lines)}


def solution_pairs(assignment: Assignment) -> set[str]:
    """Pairs of lines that only a reference has."""
    reference = cells.reference_of(assignment)
    return pairs_of(reference) - pairs_of(cells.starter_of(reference))


def leaks(folder: Path) -> list[str]:
    """What in a student version gives away solutions or hidden tests."""
    secrets = set().union(*map(solution_pairs, ALL))
    words = (
        *("grade_item(", "test_hidden", "### BEGIN", "### END"),
        *("tests.assignments", "tests/assignments", ".hidden /"),
    )
    names = {"test_hidden.py", "expected.json", "reference", "wrong"}
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.name in names or inside.parts[:2] == ("tests", "assignments"):
            found.append(str(inside))
        elif path.is_file() and inside.parts[0] in ("notebooks", "tests"):
            text = text_of(path)
            found += [f"{inside}: {word}" for word in words if word in text]
            found += [f"{inside}: {pair}" for pair in secrets & pairs_of(text)]
    return found


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "students"
    release(folder)
    return folder


def test_the_student_version_gives_nothing_away(released: Path) -> None:
    assert leaks(released) == []


@each_assignment
def test_the_leak_search_finds_planted_lines(
    assignment: Assignment, released: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    topic = Path("notebooks", "assignments", assignment.topic)
    shutil.copytree(released / topic, copy / topic)
    assert leaks(copy) == []
    reference = assignment.hidden / "reference" / assignment.file
    half = copy / topic / "half.py"
    lines = reference.read_text().splitlines()
    half.write_text("\n".join(lines[len(lines) // 2 :]))
    assert len(leaks(copy)) > 3
    half.unlink()
    notebook = f"{assignment.topic}.ipynb"
    shutil.copy(assignment.folder / notebook, copy / topic / notebook)
    assert len(leaks(copy)) > 3


@each_assignment
def test_the_student_version_has_what_a_student_needs(
    assignment: Assignment, released: Path
) -> None:
    folder = released / "notebooks" / "assignments" / assignment.topic
    starter = (folder / assignment.file).read_text()
    assert cells.STUB in starter
    assert (folder / "test_visible.py").is_file()
    notebook = cells.read_notebook(folder / f"{assignment.topic}.ipynb")
    assert cells.module_of(assignment, notebook).rstrip() == starter.rstrip()
    graded = [c for c in notebook["cells"] if cells.nbgrader_of(c).get("grade")]
    assert [cells.source_of(cell) for cell in graded] == [
        f"# {item.points} points: {item.words}" for item in load_items(assignment)
    ]


def test_the_student_version_imports_and_cannot_grade(released: Path) -> None:
    code = (
        "from cbasync.grading.rubric import *\n"
        "try: load_items(ASSIGNMENTS['a1'])\n"
        "except ValueError as error: print(error)"
    )
    env = {**os.environ, "PYTHONPATH": str(released)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=released,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the student version has no hidden tests" in run.stdout


def test_visible_tests_pass_on_references_and_fail_on_starters(
    released: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(released / "notebooks" / "assignments", folder)
    command = ("-rf", "--import-mode=importlib")
    run = run_in(folder, *command)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-2000:]
    for assignment in ALL:
        assert f"FAILED {assignment.topic}/test_visible.py::" in run.stdout
        reference = assignment.hidden / "reference" / assignment.file
        shutil.copy(reference, folder / assignment.topic)
    run = run_in(folder, *command)
    assert run.returncode == pytest.ExitCode.OK, run.stdout[-2000:]


def test_tests_of_the_student_version_need_nothing_hidden(released: Path) -> None:
    """Each can be imported there: what it reads at its top is handed out."""
    names = sorted(path.stem for path in (released / "tests").glob("test_*.py"))
    assert "test_assignment_contents" not in names
    assert "test_engine" in names
    run = run_in(released, "--collect-only", "tests")
    assert run.returncode == pytest.ExitCode.OK, run.stdout[-2000:]


def test_the_student_version_promises_nothing_that_it_lacks(released: Path) -> None:
    readme = (released / "README.md").read_text()
    assert "assignments grade" in (ROOT / "README.md").read_text()
    assert "Teach with it" not in readme
    assert "assignments grade" not in readme
    assert "\n\n## Contribute\n" in readme
    with pytest.raises(ValueError, match="no section 'Nothing'"):
        release_module.without_section(readme, "Nothing")


def small_checkout(folder: Path) -> set[str]:
    """A few files by the names of ours; those that belong to a checkout."""
    known = {
        *("pyproject.toml", "README.md", "cbasync/engine.py", "data/run.json.gz"),
        *("notebooks/00_setup.ipynb", "notebooks/assignments/a1_x/a1_x.ipynb"),
    }
    left_behind = {
        *("notebooks/out.ipynb", "notebooks/assignments/a1_x/a1_x-Copy1.ipynb"),
        *("notebooks/.ipynb_checkpoints/00_setup.ipynb", "cbasync/run.log"),
        *("cbasync/__pycache__/engine.py", "cbasync/x.egg-info/top_level.txt"),
    }
    for name in known | left_behind:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return known


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("where", ["repository", "copy", "copy in a repository"])
def test_only_files_of_the_checkout_are_copied(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = small_checkout(tmp_path)
    if where != "copy":
        git(tmp_path, "init", "--quiet")
    if where == "repository":
        git(tmp_path, "add", *sorted(known))
    monkeypatch.setattr(release_module, "ROOT", tmp_path)
    assert set(release_module.known_files()) == known


def test_without_git_the_same_files_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    by_git = set(release_module.known_files())

    def no_git(*command: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert by_git <= set(release_module.known_files())


def test_release_refuses_a_full_folder_and_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(ValueError, match="is not empty"):
        release(tmp_path)
    with pytest.raises(ValueError, match="lies in the checkout"):
        release(ROOT / "students")


# -- nbgrader --------------------------------------------------------------------------


def notebook_of(assignment: Assignment, text: str) -> dict[str, Any]:
    """The student's notebook with this module in its solution cell."""
    source = assignment.folder / f"{assignment.topic}.ipynb"
    notebook = cells.student_notebook(cells.read_notebook(source))
    for cell in notebook["cells"]:
        if cells.nbgrader_of(cell).get("solution"):
            cell["source"] = cells.solution_source(assignment, text)
    return notebook


RESOURCES = {"nbgrader": {"assignment": "a1_block_manager"}}


def test_only_the_text_of_one_cell_is_the_students() -> None:
    nbformat = pytest.importorskip("nbformat")
    assignment = ASSIGNMENTS["a1"]
    notebook = notebook_of(assignment, "x = 1")
    honest, _ = keep_solution(nbformat.from_dict(notebook), RESOURCES)
    patch = "import cbasync.grading.course as c; c.grade_item = lambda *_: 100"
    extra = {"cell_type": "code", "metadata": {}, "source": patch, "outputs": []}
    for cell in notebook["cells"]:
        if cells.nbgrader_of(cell).get("grade"):
            cell["source"] = "100"
            cell["metadata"]["nbgrader"]["points"] = 1000
        if cells.nbgrader_of(cell).get("solution"):
            cell["source"] = cell["source"].replace("block_manager.py", "/tmp/x.py")
    notebook["cells"] = [extra, *notebook["cells"][:-3], extra]
    cheated, _ = keep_solution(nbformat.from_dict(notebook), RESOURCES)
    assert cheated == honest
    sources = [cell.source for cell in honest.cells if cell.cell_type == "code"]
    assert sources[0] == "%%writefile block_manager.py\nx = 1"
    assert all("grade_item(" in source for source in sources[1:])
    assert len(sources) == 1 + len(load_items(assignment))


def test_a_notebook_without_its_cell_is_an_untouched_starter() -> None:
    starter = cells.starter_of(cells.reference_of(ASSIGNMENTS["a1"]))
    assert cells.module_of(ASSIGNMENTS["a1"], {"cells": []}) == starter


def test_a_graded_cell_without_a_verdict_gets_nothing() -> None:
    nbformat = pytest.importorskip("nbformat")
    mark = {"nbgrader": {"grade": True, "grade_id": "a", "points": 5}}
    outputs: list[list[dict[str, Any]]] = [
        [],
        [{"output_type": "stream", "name": "stderr", "text": "a warning"}],
        [{"output_type": "execute_result", "data": {"text/plain": "5"}}],
    ]
    code = [
        {"cell_type": "code", "metadata": mark, "source": "", "outputs": found}
        for found in outputs
    ]
    notebook, _ = only_verdicts(nbformat.from_dict({"cells": code}), {})
    kinds = [[o.output_type for o in cell.outputs] for cell in notebook.cells]
    assert kinds == [["error"], ["error"], ["execute_result"]]


def nbgrader(course: Path, *arguments: str) -> None:
    """One command of nbgrader, with the network out of reach."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    run = subprocess.run(
        [*PYTHON, "nbgrader", *arguments],
        cwd=course,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def by_nbgrader(
    course: Path, number: str, names: list[str]
) -> dict[str, dict[str, float]]:
    """Release, hand in, autograde and feedback: points by student and item."""
    api = pytest.importorskip("nbgrader.api", reason="needs the grading extra")
    assignment = ASSIGNMENTS[number]
    topic = assignment.topic
    write_course(course)
    nbgrader(course, "generate_assignment", topic)
    for name in names:
        handed_in = course / "submitted" / name / topic
        shutil.copytree(course / "release" / topic, handed_in)
        text = (source_folder(number, name) / assignment.file).read_text()
        path = handed_in / f"{topic}.ipynb"
        cells.write_notebook(path, notebook_of(assignment, text))
    nbgrader(course, "autograde", topic)
    nbgrader(course, "generate_feedback", topic)
    points: dict[str, dict[str, float]] = {}
    with api.Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        for name in names:
            (own,) = book.find_submission(topic, name).notebooks
            points[name] = {found.name: found.auto_score for found in own.grades}
            feedback = course / "feedback" / name / topic / f"{topic}.html"
            assert feedback.is_file()
    shutil.copytree(course / "release", course / "look" / "notebooks")
    assert leaks(course / "look") == []
    return points


def assert_nbgrader_agrees(course: Path, number: str, names: list[str]) -> None:
    points = by_nbgrader(course, number, names)
    for name in names:
        # As many seconds as the notebook gives; the points are what is compared.
        assert points[name] == {
            item.name: item.earned for item in known_grade(number, name).items
        }, name


@pytest.mark.notebooks
def test_nbgrader_agrees_on_one(tmp_path: Path) -> None:
    # Some points, and not all: what is told apart here is told apart elsewhere.
    assert_nbgrader_agrees(tmp_path, "a1", ["off_by_one"])


@pytest.mark.slow
@pytest.mark.timeout(2400)
@each_assignment
def test_nbgrader_agrees_on_all(assignment: Assignment, tmp_path: Path) -> None:
    names = [name for number, name in KNOWN if number == assignment.number]
    assert_nbgrader_agrees(tmp_path, assignment.number, names)
