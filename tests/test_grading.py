"""The grader: what a submission may do, what it cannot, and what comes out of it."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbasync.__main__ import main
from cbasync.grading import (
    BadValue,
    Died,
    Limits,
    NotThere,
    NotWritten,
    StudentError,
    Submission,
    SubmissionFault,
    Timeout,
    grade,
    rubric,
)
from cbasync.grading.page import student_page
from cbasync.grading.report import Grade, read_json, write_csv, write_json
from cbasync.grading.rubric import ROOT, Assignment, ItemResult

# A second is plenty for what answers at all; what never does is waited for.
QUICK = Limits(call_s=1.0, memory_mb=128)
PYTHON = [sys.executable, "-m"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a submission."""
    path = tmp_path / "submission"
    path.mkdir()
    return path


def submit(folder: Path, code: str, limits: Limits = QUICK) -> Submission:
    (folder / "module.py").write_text(code)
    return Submission(folder, "module", limits)


def fault_of(folder: Path, code: str, limits: Limits = QUICK) -> SubmissionFault:
    """What comes back instead of an answer of `f()`."""
    with (
        submit(folder, code, limits) as submission,
        pytest.raises(SubmissionFault) as caught,
    ):
        submission.call("f")
    return caught.value


# -- calls -----------------------------------------------------------------------------

COUNTER = """
print("hello")
class Counter:
    def __init__(self, start): self.value = start
    def add(self, number):
        self.value += number
        return {"value": self.value, "pair": (1, 2.5, None, True)}
def echo(value): return value
def fail(): raise ValueError("no block left")
"""


def test_functions_objects_and_values(folder: Path) -> None:
    with submit(folder, COUNTER) as submission:
        value = {"a": [1, -2.5, "ü\n", None, [True]]}
        assert submission.call("echo", value) == value
        one, other = submission.make("Counter", 1), submission.make("Counter", 10)
        assert one.call("add", 2) == {"value": 3, "pair": [1, 2.5, None, True]}
        assert other.call("add", 2)["value"] == 12
        assert submission.printed == "hello\n"


def test_an_exception_leaves_the_process_alive(folder: Path) -> None:
    with submit(folder, COUNTER) as submission:
        with pytest.raises(StudentError) as caught:
            submission.call("fail")
        assert (caught.value.kind, caught.value.message) == (
            "ValueError",
            "no block left",
        )
        assert "module.py, line 9: def fail()" in str(caught.value)
        assert submission.call("echo", 1) == 1


FAULTS: dict[str, tuple[str, type[SubmissionFault], str]] = {
    "raises": ("def f(): return 1 / 0", StudentError, "ZeroDivisionError: division by"),
    "starter": ("def f(): raise NotImplementedError", NotWritten, "not written yet"),
    "no name": ("", NotThere, "module.py has no f"),
    "syntax": ("def f(:", StudentError, "invalid syntax (module.py, line 1: def f(:)"),
    "notebook's line": (
        "%%writefile module.py\ndef f(): return 1",
        StudentError,
        "%%writefile module.py; remove the first line, it belongs to the notebook)",
    ),
    "notebook's command": (
        "def f(): return 1\n!pip list",
        StudentError,
        "line 2: !pip list; remove this line, it belongs to the notebook)",
    ),
    "numpy": ("import numpy", StudentError, "has the standard library only"),
    "set": ("def f(): return {1}", BadValue, "gave a set back"),
    "object": ("def f(): return f", BadValue, "gave a function back"),
    "nan": ("def f(): return [float('nan')]", BadValue, "the number nan"),
    "keys": ("def f(): return {1: 2}", BadValue, "a dict with int keys"),
    "long int": ("def f(): return 10 ** 5000", BadValue, "thousands of digits"),
    "large": ("def f(): return 'x' * (9 << 20)", BadValue, "more than 8 MB"),
    "deep": (
        "def f():\n x = []\n for _ in range(9999): x = [x]\n return x",
        StudentError,
        "RecursionError",
    ),
    "recursion": ("def f(): return f()", StudentError, "RecursionError"),
    "endless": ("def f():\n while True: pass", Timeout, "longer than 1 s in f()"),
    "sleeps": (
        "import time\ndef f(): time.sleep(99)",
        Timeout,
        "6 s on the clock in f",
    ),
    "endless at import": ("while True: pass", Timeout, "while it was loaded"),
    "endless message": (
        "class E(Exception):\n def __str__(self):\n  while True: pass\n"
        "def f(): raise E",
        Timeout,
        "longer than 1 s in f()",
    ),
    "exit 0": (
        "import sys\ndef f(): sys.exit(0)",
        Died,
        "itself with exit code 0 in f",
    ),
    "exit text": ("def f(): raise SystemExit('ok')", Died, "exit code 1 in f()"),
    "exit at import": ("raise SystemExit", Died, "exit code 0 in the module"),
    "_exit": ("import os\ndef f(): os._exit(0)", Died, "itself with exit code 0 in f"),
    "signal": (
        "import signal\ndef f(): signal.raise_signal(9)",
        Died,
        "was ended by signal SIGKILL in f()",
    ),
    "memory": (
        "def f():\n x = []\n while True: x.append(bytearray(1 << 20))",
        Died,
        "used more than 128 MB in f()",
    ),
    "memory at once": ("def f(): return [0] * 10**12", Died, "more than 128 MB"),
    "floods": ("def f():\n while True: print('x' * 999)", StudentError, "too large"),
    "input": ("def f(): return input()", StudentError, "EOFError"),
    "closes": (
        "import os\ndef f():\n os.closerange(3, 60)\n while True: pass",
        Died,
        "closed the grader's line in f()",
    ),
    "forges": (
        "import os\ndef f():\n for n in range(3, 20):\n  try: "
        'os.write(n, b\'["0", "value", 1]\\n\')\n  except OSError: pass',
        Died,
        "wrote on the grader's own line in f()",
    ),
    "forges noise": (
        "import os\ndef f():\n for n in range(3, 20):\n  try: "
        "os.write(n, b'passed\\n')\n  except OSError: pass",
        Died,
        "wrote on the grader's own line in f()",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_end_is_a_fault_with_its_own_words(name: str, folder: Path) -> None:
    code, kind, words = FAULTS[name]
    fault = fault_of(folder, code)
    assert type(fault) is kind
    assert words in str(fault)


def test_memory_is_limited_to_what_the_message_says(folder: Path) -> None:
    code = "def f(mb): return len(bytearray(mb << 20))"
    with submit(folder, code, Limits(memory_mb=128)) as submission:
        assert submission.call("f", 64) == 64 << 20
        with pytest.raises(Died, match="more than 128 MB"):
            submission.call("f", 129)


def test_a_dead_process_stays_dead(folder: Path) -> None:
    code = "import os\ndef f(): os._exit(0)\ndef g(): return 1"
    with submit(folder, code) as submission:
        for name in ("f", "g", "g"):
            with pytest.raises(Died, match="exit code 0 in f"):
                submission.call(name)
        process = submission._process
        assert process is not None
        assert process.poll() == 0


def test_all_calls_of_an_item_have_one_limit(folder: Path) -> None:
    code = "import time\ndef f(): time.sleep(0.2)"
    limits = Limits(call_s=5.0, item_s=1.0)

    def call_often() -> None:
        for _ in range(100):
            submission.call("f")

    submission = submit(folder, code, limits)
    with submission, pytest.raises(Timeout, match="longer than the time for all calls"):
        call_often()


def test_closing_ends_the_process_and_removes_its_folder(folder: Path) -> None:
    with submit(folder, "import os\ndef f(): return [os.getpid(), os.getcwd()]") as one:
        pid, path = one.call("f")
        assert Path(path).is_dir()
        assert Path(path) != folder
    assert not Path(path).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(SubmissionFault, match="is closed"):
        one.call("f")


def test_a_link_is_not_a_submission(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "hidden.py"
    secret.write_text("def f(): return 1")
    (folder / "module.py").symlink_to(secret)
    with Submission(folder, "module") as submission, pytest.raises(NotThere):
        submission.call("f")


def test_a_linked_folder_is_not_looked_into(tmp_path: Path) -> None:
    secret = tmp_path / "reference"
    secret.mkdir()
    (secret / "module.py").touch()
    student = tmp_path / "students" / "eve"
    student.mkdir(parents=True)
    assignment = Assignment("a0_x", "module")
    (student / "a0_x").symlink_to(secret)
    (tmp_path / "students" / "mallory").symlink_to(secret)
    assert assignment.find(student) == student
    assert grade.students_of(tmp_path / "students") == [student]
    (student / "a0_x").unlink()
    (student / "a0_x").mkdir()
    (student / "a0_x" / "module.py").touch()
    assert assignment.find(student) == student / "a0_x"


@pytest.mark.parametrize("name", ["call_s", "item_s", "memory_mb"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, a limit is above 0"):
        Limits(**{name: 0})


def test_sets_and_random_numbers_repeat(folder: Path) -> None:
    code = "import random\ndef f(): return [list(set('abcdefgh')), random.random()]"
    results = []
    for _ in range(3):
        with submit(folder, code) as submission:
            results.append(submission.call("f"))
    assert results[0] == results[1] == results[2]


# -- the guard -------------------------------------------------------------------------

HIDDEN = str(ROOT / "tests" / "test_grading.py")
RENAMED = f"""
import builtins
def f():
    kept = int, bytes, OSError
    builtins.int = builtins.bytes = str
    builtins.OSError = ValueError
    try:
        return open({HIDDEN!r}).read()
    finally:
        builtins.int, builtins.bytes, builtins.OSError = kept
"""
ESCAPES = {
    "read": f"def f(): return open({HIDDEN!r}).read()",
    "read bytes name": f"def f(): return open({HIDDEN.encode()!r}).read()",
    "read by path": (
        f"from pathlib import Path\ndef f(): return Path({HIDDEN!r}).read_text()"
    ),
    "read dotted": f"def f(): return open('../../../../../..{HIDDEN}').read()",
    "read /proc": f"def f(): return open('/proc/self/root{HIDDEN}').read()",
    "read os": f"import os\ndef f(): return os.open({HIDDEN!r}, os.O_RDONLY)",
    "read renamed": RENAMED,
    "read a liar": (
        "class Liar(str):\n def startswith(self, *a): return True\n"
        f"def f(): return open(Liar({HIDDEN!r})).read()"
    ),
    "patch os": (
        "import os, posixpath\nos.stat = posixpath.normpath = lambda p: 'a'\n"
        f"def f(): return open({HIDDEN!r}).read()"
    ),
    "list": f"import os\ndef f(): return os.listdir({str(ROOT)!r})",
    "scan": f"import os\ndef f(): return [e.name for e in os.scandir({str(ROOT)!r})]",
    "open a folder": (
        "import os\ndef f(): return os.open(os.path.dirname(os.__file__), 0)"
    ),
    "write": "def f(): open('/tmp/forged', 'w')",
    "write library": "import os\ndef f(): open(os.__file__, 'a')",
    "remove": f"import os\ndef f(): os.remove({HIDDEN!r})",
    "link": f"import os\ndef f(): os.symlink({HIDDEN!r}, 'a')",
    "chdir": "import os\ndef f(): os.chdir('/')",
    "fork": "import os\ndef f(): os.fork()",
    "kill": "import os\ndef f(): os.kill(os.getppid(), 9)",
    "subprocess": "import subprocess\ndef f(): subprocess.run(['true'])",
    "system": "import os\ndef f(): os.system('true')",
    "socket": "import socket\ndef f(): socket.socket()",
    "ctypes": "def f(): import ctypes",
    "thread": "from threading import Thread\ndef f(): Thread(target=f).start()",
    "thread below": "import _thread as t\ndef f(): t.start_new_thread(f, ())",
    "process below": (
        "import subprocess\nfrom _posixsubprocess import fork_exec\n"
        "def f(): fork_exec([b'true'], [b'/bin/true'], *range(20))"
    ),
    "limits": (
        "import resource as r\ndef f(): r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))"
    ),
    "find the hook": "import gc\ndef f(): return len(gc.get_objects())",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_the_guard_refuses(name: str, folder: Path) -> None:
    fault = fault_of(folder, ESCAPES[name])
    assert isinstance(fault, StudentError)
    assert "a submission may not" in str(fault)


def test_the_guard_lets_be_what_a_submission_may_do(folder: Path) -> None:
    code = """
import bisect, collections, copy, dataclasses, enum, fractions, functools, heapq
import inspect, itertools, json, logging, math, random, re, statistics, typing
@dataclasses.dataclass
class Point: x: int
def f():
    open("notes.txt", "w").write("mine")
    import decimal, pprint, uuid
    return [open("notes.txt").read(), repr(Point(1)), len(inspect.getsource(Point)) > 9]
"""
    with submit(folder, code) as submission:
        assert submission.call("f") == ["mine", "Point(x=1)", True]
    assert sorted(path.name for path in folder.iterdir()) == ["module.py"]


def test_a_submission_sees_neither_our_environment_nor_our_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBASYNC_ASSIGNMENTS_SEED", "77")
    code = "import os, sys\ndef f(): return [sorted(os.environ), sys.path, sys.argv]"
    with submit(folder, code) as submission:
        names, path, arguments = submission.call("f")
    assert set(names) <= {"PATH", "PYTHONHASHSEED", "PYTHONUTF8", "LC_CTYPE"}
    assert not any("site-packages" in p or str(ROOT) in p for p in path)
    assert len(arguments) == 1


# -- rubrics ---------------------------------------------------------------------------


def result_of(function: Any, folder: Path) -> ItemResult:
    """An item of our own on a module of our own."""
    item = rubric.Item("test_x", 10, "x holds", function)
    return rubric.run_item(Assignment("a0_x", "module"), item, folder, 7, QUICK)


def test_an_item_gives_all_points_or_none_and_says_why(folder: Path) -> None:
    (folder / "module.py").write_text("def f(x):\n print('passed')\n return x + 1")

    def right(submission: Submission, seed: int) -> None:
        submission.metrics["idle"] = 0.5
        assert seed == rubric.seed_of(Assignment("a0_x", "module"), 7)
        assert submission.call("f", seed) == seed + 1

    def wrong(submission: Submission) -> None:
        submission.metrics["idle"] = 0.1
        got = submission.call("f", 1)
        error = AssertionError(f"f(1)\n  expected 3\n  got {got}")
        error.add_note("with a note")
        raise error

    passed, failed = result_of(right, folder), result_of(wrong, folder)
    assert (passed.earned, passed.message, passed.metrics) == (10, "", {"idle": 0.5})
    assert (failed.earned, failed.metrics) == (0, {})
    assert failed.message == "f(1)\n  expected 3\n  got 2\nwith a note"
    assert failed.printed == "passed\n"
    assert not failed.checker_failed


MISSING = {
    "no file": (None, "no file module.py was handed in"),
    "syntax": ("def f(:", "SyntaxError: invalid syntax (module.py, line 1: def f(:)"),
    "import": ("import there_is_none", "ModuleNotFoundError: "),
    "ends": ("raise SystemExit", "ended itself with exit code 0 in the module"),
    "no name": ("", "module.py has no f"),
    "starter": ("def f(x): raise NotImplementedError", "f() is not written yet"),
}


@pytest.mark.parametrize("name", MISSING)
def test_where_nothing_can_be_run_no_workload_is_shown(name: str, folder: Path) -> None:
    code, words = MISSING[name]
    if code is not None:
        (folder / "module.py").write_text(code)

    def item(submission: Submission) -> None:
        for number in (1, 2):
            try:
                submission.call("f", number)
            except SubmissionFault as fault:
                fault.add_note("a hidden workload")
                raise

    message = result_of(item, folder).message
    assert message.startswith(words)
    assert "hidden" not in message
    (folder / "module.py").write_text("def f(x): return 1 / (x - 2)")
    assert "ZeroDivisionError" in result_of(item, folder).message
    assert result_of(item, folder).message.endswith("\na hidden workload")


def test_items_get_a_number_that_does_not_tell_the_seed() -> None:
    assignments = list(rubric.ASSIGNMENTS.values())
    given = {rubric.seed_of(a, seed) for a in assignments for seed in range(100)}
    assert len(given) > 490  # of 500; a few may meet by chance
    assert all(0 <= number < 10**6 for number in given)
    assert not given & set(range(100))


def test_a_mistake_of_the_checker_is_no_point_and_is_told_to_the_teacher(
    folder: Path,
) -> None:
    (folder / "module.py").write_text("def f(): return None")

    def trusting(submission: Submission) -> None:
        assert len(submission.call("f")) == 3

    def lazy(submission: Submission) -> None:
        pass

    for function, words in ((trusting, "TypeError"), (lazy, "without a call")):
        result = result_of(function, folder)
        assert (result.earned, result.checker_failed) == (0, True)
        assert words in result.message


def test_a_checker_that_never_ends_is_stopped() -> None:
    def check() -> None:
        with rubric.watchdog(0.05):
            while True:
                pass

    with pytest.raises(rubric.CheckerTimeoutError, match=r"longer than 0\.05 s"):
        check()


def test_points_are_whole_numbers_with_words() -> None:
    @pytest.mark.points(0, "x")
    def nothing() -> None: ...

    with pytest.raises(ValueError, match="points of nothing are"):
        rubric.points_of(nothing)
    assert rubric.points_of(test_points_are_whole_numbers_with_words) is None


# -- a class ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal SIGKILL"),
        ("", "ended itself with exit code 0"),
        ("0", "the grader's file is broken"),
        ("print(1 / 0)", "exit code 1: ZeroDivisionError: division by zero"),
        ("import time; time.sleep(99)", "not graded within 1 s"),
    ],
)
def test_a_grading_process_that_ends_early_gives_no_points(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def broken(command: list[str], **options: Any) -> Any:
        if program:
            Path(command[-2]).write_text("[]" if program != "0" else '[{"a": 1')
        return run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "run", broken)
    graded = grade._in_a_process(tmp_path, grade.Plan(("a1",)), 1.0)
    assert [g.points for g in graded] == [0]
    assert graded[0].checker_failed
    assert all(words in item.message for item in graded[0].items)


EVIL = "<script>alert(1)</script>"


def evil_grade(student: str, **more: Any) -> Grade:
    items = [
        ItemResult("a", f"holds {EVIL}", 10, 0, f"got {EVIL}", f"printed {EVIL}"),
        ItemResult("b", "b", 5, 5, "", metrics=more.get("metrics", {})),
    ]
    return Grade(student, "a1", 1, items)


def test_a_page_shows_text_as_text_and_loads_nothing() -> None:
    page = student_page(f"ada {EVIL}", [evil_grade("ada")])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 5  # name twice, words, message, printed
    assert not re.search(r"(src|href)=|https?:", page)
    assert "5 of 15" in page


def test_table_and_gradebook(tmp_path: Path) -> None:
    grades = [evil_grade("=1+1"), evil_grade("bo")]
    write_csv(tmp_path / "grades.csv", grades)
    with open(tmp_path / "grades.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["student", "a1", "points", "out_of", "look_at"],
        ["'=1+1", "5", "5", "15", ""],
        ["bo", "5", "5", "15", ""],
    ]
    write_json(tmp_path / "grades.json", grades)
    assert read_json(tmp_path / "grades.json") == grades


# -- the command line ------------------------------------------------------------------


def test_each_part_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("release", "grade", "practice", "course"):
        with pytest.raises(SystemExit) as caught:
            main(["assignments", part, "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: python -m cbasync assignments {part}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["grade", "nowhere"], "no folder nowhere: give one"),
        (["grade", "data", "--only=a9"], "assignment is 'a9', there are a1, a2"),
        (["grade", "data", "--processes=0"], "processes are 0"),
        (["grade", "data", "--memory-mb=0"], "memory_mb is 0"),
        (["release", "."], "is not empty"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["assignments", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cbasync: ")
    assert message in error
    assert error.count("\n") == 1
