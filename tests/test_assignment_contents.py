"""Assignments 1, 2 and 4: bars are measured, prose says what the code does."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from cbasync.checks import block_manager, policies, ring_loop, rings
from cbasync.checks.planned import serve
from cbasync.checks.policy_machine import STEP_MS, TOKEN_MS, Machine, first_come
from cbasync.checks.ring import Ring, Source, Step
from cbasync.checks.workload import Mistake, attempt, judge
from cbasync.grading import cells
from cbasync.grading.rubric import ASSIGNMENTS, ROOT
from tests.loading import load

NUMBERS = ("a1", "a2", "a4")
each_number = pytest.mark.parametrize("number", NUMBERS)


def reference(number: str) -> Any:
    assignment = ASSIGNMENTS[number]
    return load(assignment.hidden / "reference" / assignment.file)


def wrong(number: str, name: str) -> Any:
    assignment = ASSIGNMENTS[number]
    return load(assignment.hidden / "wrong" / name / assignment.file)


# -- random workloads, made small ------------------------------------------------------


def no_more_than_two(numbers: Sequence[int]) -> None:
    if sum(number > 5 for number in numbers) > 2:
        raise Mistake("two above five", list(numbers), "How many are there?")


def test_a_failing_workload_is_shown_without_what_does_not_matter() -> None:
    with pytest.raises(AssertionError, match=r"given     \[8, 9, 7\]\n"):
        judge("few", [[1, 2], [1, 8, 2, 9, 3, 4, 7, 5]], no_more_than_two, str)


def test_other_errors_pass_with_the_workload_beside_them() -> None:
    def run(numbers: Sequence[int]) -> None:
        raise KeyError(numbers[0])

    with pytest.raises(KeyError) as caught:
        judge("few", [[3, 4]], run, str)
    assert caught.value.__notes__ == ["few\n  given     [3, 4]"]


def test_another_error_does_not_count_as_the_same_failure() -> None:
    """Dropping steps may break the workload: that is not what is to be shown."""

    def run(numbers: Sequence[int]) -> None:
        if 1 not in numbers:
            raise KeyError(1)
        no_more_than_two(numbers)

    with pytest.raises(AssertionError, match=r"given     \[1, 8, 9, 7\]\n"):
        judge("few", [[1, 8, 2, 9, 7]], run, str)


def test_what_is_not_written_is_said_so() -> None:
    def run(numbers: Sequence[int]) -> None:
        raise NotImplementedError

    with pytest.raises(AssertionError, match=r"^few: nothing written yet$"):
        judge("few", [[1]], run, str)


# -- bars are measured, not chosen -----------------------------------------------------


def test_hit_bars_are_the_measured_ones() -> None:
    measured = block_manager.hit_bars(reference("a1").BlockManager)
    assert measured == block_manager.HIT_BARS
    assert measured[0] < measured[1]


def test_latency_bars_are_the_measured_ones() -> None:
    plan = reference("a2").plan
    measured = tuple(policies.latency_bar(plan, part, [0]) for part in (0.5, 0.9))
    assert measured == policies.LATENCY_BARS_MS
    assert measured[0] > measured[1]


def test_the_model_finds_more_than_running_requests_have() -> None:
    cache = block_manager.count_hits(reference("a1").BlockManager, seed=3)
    forgets = wrong("a1", "forgets_at_release").BlockManager
    assert block_manager.count_hits(forgets, seed=3).num_hits == cache.num_owned
    assert cache.num_owned < cache.num_hits < cache.num_tokens


# -- references hold on workloads that nobody has tuned them for -----------------------


@pytest.mark.parametrize("seed", range(20, 24))
def test_references_hold_with_any_seed(seed: int) -> None:
    manager, carry = reference("a1").BlockManager, reference("a4")
    plan = reference("a2").plan
    for check in (
        block_manager.tables,
        block_manager.contents,
        block_manager.beginnings,
        block_manager.copies,
        block_manager.refusals,
        block_manager.all_free,
    ):
        check(manager, seed)
    for of_plan in (
        policies.well_formed,
        policies.limits,
        policies.no_waste,
        policies.nobody_starves,
    ):
        of_plan(plan, seed)
    for of_carry in (rings.one_back, rings.two_back, rings.collected, rings.again):
        of_carry(carry.CarryOver, seed)
    rings.ranks(carry.CarryOver, seed)
    rings.whole(carry.CarryOver, carry.resolve, seed)
    rings.resolved(carry.resolve, seed)
    ring_loop.no_race(carry.loop, seed)
    ring_loop.never_idle(carry.loop, seed)


# -- the smallest failing case ---------------------------------------------------------


def message_of(check: Callable[..., None], *given: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*given)
    return str(caught.value)


def test_a_block_too_many_is_shown_with_the_shortest_prompt() -> None:
    manager = wrong("a1", "off_by_one").BlockManager
    message = message_of(block_manager.tables, manager)
    assert "\n            admit('r0', [0, 1, 2, 3])\n  expected" in message
    assert message.endswith("How many blocks of 4 do these tokens need?")


def test_a_missing_copy_is_shown_in_three_steps() -> None:
    message = message_of(block_manager.copies, wrong("a1", "no_copy").BlockManager)
    calls = re.findall(r"^            (\w+)\(", message, re.MULTILINE)
    assert calls == ["admit", "fork", "append"]
    assert message.endswith("Who else reads the block that is written now?")


def test_a_budget_that_is_exceeded_is_shown_with_one_or_two_requests() -> None:
    message = message_of(policies.limits, wrong("a2", "off_by_one").plan)
    assert len(re.findall(r"^ +r\d+ comes at", message, re.MULTILINE)) <= 2
    assert message.endswith("What is left of the budget when the last one is added?")


def test_starving_needs_many_and_shows_a_few() -> None:
    message = message_of(policies.nobody_starves, wrong("a2", "starves").plan)
    assert re.search(r"\n +\.\.\. \d+ more \.\.\.\n", message)
    assert len(message.splitlines()) < 12
    assert re.search(r"got       '\w+' took \d+", message)
    assert message.endswith("Does waiting ever help a request that wants a lot?")


def test_a_token_two_batches_back_is_shown_in_three_batches() -> None:
    message = message_of(rings.two_back, wrong("a4", "one_back_only").CarryOver)
    shown = re.findall(r"batch (\d): (\w)", message.partition("expected")[0])
    assert shown == [("0", "a"), ("1", "b"), ("2", "a")]


class ReadsItsOwnSlot:
    """Finds every input in the slot of its own batch, rank 0."""

    def prepare(self, batch: int, rows: list[Any]) -> Any:
        return {"slot": [batch % 3] * len(rows), "rank": [0] * len(rows)}

    def collect(self, batch: int) -> None:
        """Nothing to forget."""


@pytest.mark.parametrize("start", [0, 3])
def test_a_slot_that_is_being_filled_is_no_source(start: int) -> None:
    """Three batches back is the batch's own slot, and a prompt is in none."""
    ring = Ring(ReadsItsOwnSlot())
    ring.computed["a"], ring.known["a"] = start, start + 1
    ring.num_batches = ring.num_collected = start
    ring.sources["a", 3] = Source(0, 0)
    with pytest.raises(Mistake, match=f"slot -1 for input {start} of 'a'"):
        ring.run([Step(9, "a", 1)])


def test_a_copy_is_read_by_whoever_finds_it_later() -> None:
    """The checker's own cache copies, too: else a right manager would be blamed."""
    ops = [("admit", "a", [1, 2]), ("fork", "a", "b"), ("append", "b", 3)]
    ops += [("append", "b", 4), ("admit", "c", [1, 2, 3, 4, 5])]
    cache = block_manager.play(reference("a1").BlockManager, ops, 8, shares=True)
    assert cache.num_hits == 4


def test_a_removed_wait_is_named_by_its_edge() -> None:
    message = message_of(ring_loop.no_race, wrong("a4", "removed_wait").loop)
    assert "loop(4)" in message
    assert "missing edge slot_refill" in message


@pytest.mark.parametrize(
    "answer",
    [None, 7, "plan", [None], [["a"]], [[1, 2]], [["a", True]], [["a", 1.0]], {}],
)
def test_a_policy_that_answers_nonsense_is_told_so(answer: Any) -> None:
    message = message_of(policies.well_formed, lambda *given: answer)
    assert "expected" in message


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"table": None, "known": 0}, {"table": [0.0], "known": 0}],
)
def test_a_manager_that_answers_nonsense_is_told_so(answer: Any) -> None:
    class Nonsense:
        def admit(self, name: str, tokens: list[int]) -> Any:
            return answer

    assert "expected" in message_of(block_manager.tables, lambda *sizes: Nonsense())


@pytest.mark.parametrize("answer", [None, [], {"slot": [0]}, {"slot": 1, "rank": 1}])
def test_a_carry_over_that_answers_nonsense_is_told_so(answer: Any) -> None:
    class Nonsense:
        def prepare(self, batch: int, rows: list[Any]) -> Any:
            return answer

    assert "expected" in message_of(rings.known, lambda slots: Nonsense())


@pytest.mark.parametrize("answer", [None, [1], [["wait", 0]], [["launch", 0]], []])
def test_a_loop_of_nonsense_is_told_so(answer: Any) -> None:
    assert "expected" in message_of(ring_loop.no_race, lambda batches: answer)


# -- the policy in the engine ----------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_the_engine_runs_what_the_small_machine_runs(seed: int) -> None:
    jobs, sizes = policies.rush_hour(seed)[:40], (policies.BUDGET, policies.SEATS)
    tokens: list[dict[str, list[int]]] = []
    for plan in (reference("a2").plan, first_come):
        small = Machine(plan, *sizes).run(jobs)
        real, answers = serve(plan, jobs, *sizes)
        assert real.batches == small.batches
        assert real.latency_ms == small.latency_ms
        tokens.append(answers)
    assert tokens[0] == tokens[1]


# -- what a student sees ---------------------------------------------------------------


def visible_tests(
    number: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> list[Callable[[], None]]:
    """The functions of `test_visible.py`, with this module as the handed-in one."""
    assignment = ASSIGNMENTS[number]
    monkeypatch.setattr(sys, "path", list(sys.path))
    stand_in = ModuleType(assignment.module)
    vars(stand_in).update(vars(module))
    monkeypatch.setitem(sys.modules, assignment.module, stand_in)
    tests = load(assignment.folder / "test_visible.py")
    return [value for name, value in vars(tests).items() if name.startswith("test_")]


@each_number
def test_visible_tests_pass_with_the_reference(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = visible_tests(number, reference(number), monkeypatch)
    assert len(tests) >= 6
    for test in tests:
        test()


@each_number
def test_visible_tests_fail_with_the_starter(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignment = ASSIGNMENTS[number]
    starter = load(assignment.folder / assignment.file)
    for test in visible_tests(number, starter, monkeypatch):
        with pytest.raises((AssertionError, NotImplementedError)):
            test()


def notebook(number: str) -> Any:
    assignment = ASSIGNMENTS[number]
    return cells.read_notebook(assignment.folder / f"{assignment.topic}.ipynb")


def prose(number: str) -> str:
    parts = [
        cells.source_of(cell)
        for cell in notebook(number)["cells"]
        if cell["cell_type"] == "markdown"
    ]
    return re.sub(r"\s+", " ", " ".join(parts))


def test_numbers_in_the_prose_are_those_of_the_checks() -> None:
    assert f"on {block_manager.HIT_BLOCKS} blocks" in prose("a1")
    policy = prose("a2")
    assert f"longer than {policies.PATIENCE} times" in policy
    assert f"takes {STEP_MS:g} ms, and {TOKEN_MS:g} ms more" in policy
    assert len(policies.rush_hour()) == 100
    assert "a hundred requests" in policy
    costs = ring_loop.SLOW_COPY
    assert costs.d2h.fixed_us == 800
    assert costs.compute.fixed_us == 1000
    assert "(0.8 ms, and a batch computes for 1 ms)" in prose("a4")


@each_number
def test_notebook_is_stored_clean_and_links_exist(number: str) -> None:
    folder, found = ASSIGNMENTS[number].folder, notebook(number)
    nbformat.validate(nbformat.from_dict(found))
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in code)
    assert all(cell["execution_count"] is None for cell in code)
    text = "".join(map(cells.source_of, found["cells"]))
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (folder / link).exists()] == []
    assert "About " in text
    assert "100 points" in text


def run_notebook(found: Any, folder: Path) -> list[Any]:
    """Run a notebook in a folder; what its cells print and show."""
    os.environ["PYTHONPATH"] = str(ROOT)
    for cell in found["cells"]:
        cell["source"] = cells.source_of(cell)
        if cells.nbgrader_of(cell).get("grade"):
            cell["source"] = ""  # graded elsewhere, in a process of its own
    client = NotebookClient(
        nbformat.from_dict(found),
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    done = client.execute()
    return [output for cell in done.cells for output in cell.get("outputs", [])]


@pytest.mark.notebooks
@each_number
def test_notebook_runs_with_the_reference(number: str, tmp_path: Path) -> None:
    outputs = run_notebook(notebook(number), tmp_path)
    printed = "".join(output.get("text", "") for output in outputs)
    assert [o for o in outputs if o.output_type == "error"] == []
    assert ": right, " in printed
    assert "\n  given" not in printed


@pytest.mark.notebooks
@each_number
def test_notebook_runs_to_its_end_with_the_starter(number: str, tmp_path: Path) -> None:
    outputs = run_notebook(cells.student_notebook(notebook(number)), tmp_path)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "nothing written yet" in printed
    assert ": right, " not in printed


def test_an_attempt_says_where_a_submission_stopped_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def answer(given):\n    return {}[given]\n")
    mine = load(path)

    def stops(module: Any, given: str) -> None:
        module.answer(given)

    def is_wrong(module: Any, given: str) -> None:
        raise AssertionError(f"wrong for {given}")

    for check in (stops, is_wrong):
        attempt(check, mine, "out", module=mine)
    words = capsys.readouterr().out
    assert "stops: KeyError: 'out' (loaded_mine.py, line 2)" in words
    assert "wrong for out" in words
