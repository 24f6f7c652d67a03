"""Assignment 3: scripts, faults and checks; the detector beside a second opinion."""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import compress, product
from types import ModuleType

import pytest

from cbasync.checks import race_checks
from cbasync.checks.race_faults import (
    FAULTS,
    SHARED,
    Pipeline,
    faulty_scripts,
    planted,
    random_scripts,
)
from cbasync.checks.race_scripts import (
    Ordering,
    Script,
    first_race,
    host,
    launch,
    record,
    run,
    synchronize,
    unordered,
    wait,
)
from cbasync.grading.rubric import ASSIGNMENTS, load_items
from tests.loading import load

A3 = ASSIGNMENTS["a3"]

COPY = launch("h2d", "h2d 0", ["ids"], ["x"])
COMPUTE = launch("compute", "compute 0", ["x"], ["y"])
UPDATE = host("update 0", ["y"])
RACING = [COPY, COMPUTE]
MENDED = [COPY, record("h2d", "e"), wait("compute", "e"), COMPUTE]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load(A3.hidden / "reference" / A3.file)


# -- two opinions on what races --------------------------------------------------------


def by_pairs(script: Script) -> list[str] | None:
    """The missing edge from all unordered pairs, without the race detector."""
    places = {line["op"]: place for place, line in enumerate(script) if "op" in line}
    pairs = sorted(unordered(script), key=lambda p: (places[p[1]], -places[p[0]]))
    return [*pairs[0]] if pairs else None


@pytest.mark.parametrize("seed", range(5))
def test_detector_and_pairs_agree_on_the_missing_edge(seed: int) -> None:
    rng = random.Random(seed)
    found = set()
    for script in [*random_scripts(rng, 150), *faulty_scripts(rng, 15)]:
        assert first_race(script) == by_pairs(script)
        found.add(first_race(script) is None)
    assert found == {True, False}


PIPELINES = [
    Pipeline(batches, depth, frozenset(compress(SHARED, kept)))
    for batches, depth, kept in product((1, 2, 6), (1, 2), product((0, 1), repeat=3))
]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipeline_has_no_race_and_the_right_tokens(pipeline: Pipeline) -> None:
    script = pipeline.script()
    assert first_race(script) is None
    assert unordered(script) == []
    seen = run(script).seen
    assert all(int(op.split()[1]) == batch for op, batch in seen.items())


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_fault_makes_a_race(kind: str) -> None:
    for script in faulty_scripts(random.Random(kind), 10, (kind,)):
        assert first_race(script) is not None


def test_some_faults_bring_a_wrong_batch_to_the_host() -> None:
    runs = [run(script) for script in faulty_scripts(random.Random(2), 40)]
    wrong = [
        any(batch != int(op.split()[1]) for op, batch in machine.seen.items())
        for machine in runs
    ]
    assert {True, False} == set(wrong)


def test_fault_that_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault of removed makes a race in 1 ops"):
        planted(random.Random(0), [COPY], ("removed",))


# -- the four rules --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "is_ordered"),
    [
        ([COPY, COMPUTE], False),
        ([COPY, launch("h2d", "compute 0")], True),
        (MENDED, True),
        ([COPY, wait("compute", "e"), record("h2d", "e"), COMPUTE], False),
        ([record("h2d", "e"), COPY, wait("compute", "e"), COMPUTE], False),
        ([COPY, record("h2d", "e"), wait("d2h", "e"), COMPUTE], False),
        ([COPY, record("h2d", "e"), record("d2h", "e"), wait("compute", "e"), COMPUTE],
         False),
        ([COPY, record("h2d", "e"), wait("compute", "e"), record("d2h", "e"), COMPUTE],
         True),
        ([COPY, record("h2d", "e"), synchronize("e"), COMPUTE], True),
        ([COPY, record("h2d", "e"), COMPUTE, synchronize("e")], False),
        ([COPY, record("h2d", "e"), wait("d2h", "e"), record("d2h", "f"),
          synchronize("f"), COMPUTE], True),
    ],
)  # fmt: skip
def test_order_follows_queues_launches_and_events(
    script: Script, is_ordered: bool
) -> None:
    assert Ordering(script).before("h2d 0", "compute 0") is is_ordered


def test_chain_leads_over_the_host() -> None:
    script = [COPY, record("h2d", "e"), synchronize("e"), UPDATE, COMPUTE]
    ordering = Ordering(script)
    assert ordering.before("h2d 0", "update 0")
    assert ordering.before("h2d 0", "compute 0")


# -- mending ---------------------------------------------------------------------------


def test_mended_script_may_only_have_more_event_lines() -> None:
    assert race_checks.added_lines(RACING, MENDED) == MENDED[1:3]
    for spoilt in (
        [COMPUTE, COPY],
        [COPY],
        [COPY, COMPUTE, COMPUTE],
        [COPY | {"writes": []}, COMPUTE],
        [COPY, record("disk", "e"), COMPUTE],
        [COPY, {"do": "wait", "event": "e"}, COMPUTE],
        [COPY, None, COMPUTE],
        None,
    ):
        with pytest.raises(AssertionError):
            race_checks.added_lines(RACING, spoilt)


@pytest.mark.parametrize(
    ("mended", "free", "kept", "few"),
    [
        (MENDED, True, True, True),
        (RACING, False, False, False),
        ([*MENDED[:3], record("h2d", "f"), COMPUTE], True, True, False),
        ([*MENDED[:2], COMPUTE, wait("compute", "e")], False, False, False),
    ],
)  # fmt: skip
def test_mended_script_is_judged(
    mended: Script, free: bool, kept: bool, few: bool
) -> None:
    assert (race_checks.still_racing(RACING, mended) == "") is free
    assert (race_checks.overlap_lost(RACING, mended) == "") is kept
    assert (race_checks.lines_wasted(RACING, mended) == "") is few


def test_host_that_stops_loses_overlap() -> None:
    other = launch("d2h", "d2h 0")
    script = [*RACING, other]
    stopped = [COPY, record("h2d", "e"), synchronize("e"), COMPUTE, other]
    assert race_checks.still_racing(script, stopped) == ""
    assert "d2h 0 now comes after h2d 0" in race_checks.overlap_lost(script, stopped)
    assert race_checks.overlap_lost(script, [*MENDED, other]) == ""


@pytest.mark.parametrize("faults", [1, 2])
def test_reference_mends_with_the_fewest_orders(
    reference: ModuleType, faults: int
) -> None:
    """What it adds is the closure of the races: each of them has to be ordered."""
    for script in faulty_scripts(random.Random(faults), 20, faults=faults):
        earlier = Ordering(reference.mended(script)).earlier
        assert earlier == Ordering(script).with_pairs(unordered(script))


# -- checks ----------------------------------------------------------------------------


@pytest.mark.parametrize("check", race_checks.ALL)
@pytest.mark.parametrize("seed", [0, 5, 9])
def test_reference_passes_every_check(
    reference: ModuleType,
    check: race_checks.Check,
    seed: int,
) -> None:
    check(reference, seed)


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_record_stands_for_waits_with_any_seed(seed: int) -> None:
    """Scripts at random seldom tell: one that does is in both checks."""
    forgets = load(A3.hidden / "wrong" / "record_forgets_waits" / A3.file)
    with pytest.raises(AssertionError, match="Which chain of queues"):
        race_checks.events(forgets, seed)
    with pytest.raises(AssertionError, match="Does an event already order these"):
        race_checks.any_script(forgets, seed)


class Forgetful:
    """The reference with one function replaced."""

    def __init__(self, reference: ModuleType, **other: object) -> None:
        for name in ("comes_before", "missing_edge", "shown", "mended"):
            setattr(self, name, other.get(name, getattr(reference, name)))


def test_failing_script_is_made_small(reference: ModuleType) -> None:
    blind = Forgetful(reference, missing_edge=lambda script: None)
    with pytest.raises(AssertionError) as caught:
        race_checks.removed_lines(blind, 0)  # type: ignore[arg-type]
    assert len(re.findall(r" \d  (host|launch) ", str(caught.value))) == 2
    assert "got       None" in str(caught.value)


def test_check_is_not_fooled_by_a_changed_script(reference: ModuleType) -> None:
    def hides(script: Script) -> None:
        for line in script:
            line.clear()

    with pytest.raises(AssertionError, match=r"given +0  (host|launch|wait|record)"):
        race_checks.removed_lines(
            Forgetful(reference, missing_edge=hides),  # type: ignore[arg-type]
            0,
        )


# -- what a student gets ---------------------------------------------------------------


def test_rubric_of_the_notebook_is_that_of_the_tests() -> None:
    notebook = json.loads((A3.folder / f"{A3.topic}.ipynb").read_text())
    prose = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", prose, re.MULTILINE)
    items = load_items(A3)
    assert rows == [(str(item.points), item.words) for item in items]
    assert sum(item.points for item in items) == 100


def test_links_of_the_notebook_exist() -> None:
    text = (A3.folder / f"{A3.topic}.ipynb").read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert len(links) >= 2
    assert [link for link in links if not (A3.folder / link).exists()] == []


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The visible tests, with another `races` beside them."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "races", ModuleType("races"))
    return load(A3.folder / "test_visible.py")


def run_examples(visible: ModuleType, races: ModuleType) -> None:
    visible.races = races  # type: ignore[attr-defined]
    examples = [name for name in vars(visible) if name.startswith("test_example")]
    assert len(examples) == 4
    for name in examples:
        getattr(visible, name)()


def test_reference_passes_the_visible_examples(
    visible: ModuleType, reference: ModuleType
) -> None:
    run_examples(visible, reference)


def test_hard_coded_answers_pass_the_visible_examples(visible: ModuleType) -> None:
    """So that the wrong submission is what its name says."""
    run_examples(visible, load(A3.hidden / "wrong" / "hard_coded" / A3.file))


def test_visible_and_hidden_checks_are_the_same() -> None:
    hidden = [item.name.removeprefix("test_") for item in load_items(A3)]
    assert [check.__name__ for check in race_checks.ALL] == hidden
