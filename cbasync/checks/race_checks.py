"""Checks of assignment 3: does it find the race, and does it mend it for little?

Each check takes an object with the four functions: a module, or something that hands
the call on to another process. The package's race detector says what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import combinations
from random import Random
from typing import Any, Protocol

from cbasync.checks.race_faults import (
    FAULTS,
    WAIT_RECORDED,
    a_pipeline,
    faulty_scripts,
    random_script,
    random_scripts,
)
from cbasync.checks.race_scripts import (
    STREAMS,
    Line,
    Ordering,
    Pair,
    Script,
    bars,
    conflict,
    first_race,
    ops,
    show,
    unordered,
)
from cbasync.checks.workload import Mistake, generator, judge


class RaceFinder(Protocol):
    """What a learner writes."""

    def comes_before(self, script: Script, first: str, second: str) -> bool:
        """Whether the script orders one op before another, whatever they take."""

    def missing_edge(self, script: Script) -> Sequence[str] | None:
        """First and second op of the race that comes first; None without a race."""

    def shown(self, bars: list[Line]) -> Sequence[Sequence[str]]:
        """Pairs of ops that a timeline shows in conflict."""

    def mended(self, script: Script) -> Script:
        """The script with lines added, so that nothing races."""


def ask(function: Callable[..., Any], *given: Any) -> Any:
    """The learner's answer; what was given stays as it is, whatever he does to it."""
    return function(*deepcopy(given))


def _judge(
    name: str,
    cases: Iterable[list[Line]],
    run: Callable[[list[Line]], None],
    show: Callable[[list[Line]], str] = show,
) -> None:
    judge(name, cases, lambda case: run(list(case)), lambda case: show(list(case)))


# ------------------------------------------------------------------ comes_before


def _order(finder: RaceFinder, script: Script) -> None:
    """Every pair of a script, one by one."""
    ordering = Ordering(script)
    for first, second in combinations(ordering.names, 2):
        expected = ordering.before(first, second)
        got = ask(finder.comes_before, script, first, second)
        if got is not expected:
            words = f"{expected} from comes_before(script, {first!r}, {second!r})"
            question = "What keeps the second from running before the first is over?"
            if expected:
                question = "Which chain of queues, launches and events orders the two?"
            raise Mistake(words, got, question)


def queues(finder: RaceFinder, seed: int) -> None:
    """Order by streams, by the host and by launches; there are no events."""
    rng = generator("queues", seed)
    cases = random_scripts(rng, 12, events=False)
    _judge("comes_before without events", cases, partial(_order, finder))


def events(finder: RaceFinder, seed: int) -> None:
    """Order by records, waits and synchronizes too."""
    rng = generator("events", seed)
    cases = [*random_scripts(rng, 48), a_pipeline(rng, 3).script(), WAIT_RECORDED]
    _judge("comes_before with events", cases, partial(_order, finder))


# ------------------------------------------------------------------ missing_edge


def _edge(finder: RaceFinder, script: Script) -> None:
    expected = first_race(script)
    got = ask(finder.missing_edge, script)
    if got is None and expected:
        question = "Which two ops touch one array, and what orders them?"
        raise Mistake(repr(expected), got, question)
    if (list(got) if isinstance(got, (list, tuple)) else got) != expected:
        raise Mistake(
            repr(expected),
            got,
            "Does an event already order these two? If not: is there a race whose "
            "second op stands earlier, or for the same second op a later first one?",
        )


def _with_clean(rng: Random, faulty: Iterable[Script]) -> Iterable[Script]:
    """Each script with a fault after a right one: to say None always is no answer."""
    for number, script in enumerate(faulty):
        yield a_pipeline(rng, 1 + number // 3).script()
        yield script


def removed_lines(finder: RaceFinder, seed: int) -> None:
    """A record, wait or synchronize was left out."""
    rng = generator("removed", seed)
    cases = _with_clean(rng, faulty_scripts(rng, 12, ("removed",)))
    _judge("missing_edge, a line removed", cases, partial(_edge, finder))


def misplaced_lines(finder: RaceFinder, seed: int) -> None:
    """All lines are there, one of them in the wrong place or with the wrong name."""
    rng = generator("misplaced", seed)
    faulty = [s for kind in FAULTS[1:] for s in faulty_scripts(rng, 5, (kind,))]
    cases = _with_clean(rng, sorted(faulty, key=len))
    _judge("missing_edge, a line misplaced", cases, partial(_edge, finder))


def any_script(finder: RaceFinder, seed: int) -> None:
    """Scripts without a plan, with any number of races."""
    rng = generator("any", seed)
    cases = [*random_scripts(rng, 80), WAIT_RECORDED]
    _judge("missing_edge, any script", cases, partial(_edge, finder))


# ------------------------------------------------------------------ shown


def conflicts_shown(timeline: list[Line]) -> list[Pair]:
    """Pairs in conflict whose second op starts before the first one has ended."""
    return [
        (first["op"], second["op"])
        for first, second in combinations(timeline, 2)
        if conflict(first, second) and second["start_us"] < first["end_us"]
    ]


def _shown(finder: RaceFinder, timeline: list[Line]) -> None:
    expected = sorted(map(list, conflicts_shown(timeline)))
    got = ask(finder.shown, timeline)
    if _sorted_pairs(got) != expected:
        question = "Which bar starts before another, issued earlier, has ended?"
        raise Mistake(repr(expected), got, question)


def _bars_as_text(timeline: list[Line]) -> str:
    lines = [
        f"{bar['start_us']:5} to {bar['end_us']:5} us  {bar['op']}: "
        f"reads {bar['reads']}, writes {bar['writes']}"
        for bar in timeline
    ]
    return "\n".join(lines) or "(no bars)"


def _sorted_pairs(got: Any) -> Any:
    try:
        return sorted([str(first), str(second)] for first, second in got)
    except (TypeError, ValueError):
        return got


def _random_bars(rng: Random, size: int, *, in_order: bool) -> list[Line]:
    """Bars at random times; `in_order`: as issued, and never two at one moment."""
    lines = ops(random_script(rng, size, events=False))
    moments = range(0, 100 * size, 7) if in_order else range(0, 10 * size, 10)
    starts = [rng.choice(moments) for _ in lines]
    if in_order:
        starts = sorted(rng.sample(moments, len(lines)))
    lengths = [rng.choice((33, 80, 150) if in_order else (10, 20)) for _ in lines]
    return [
        line | {"start_us": start, "end_us": start + length}
        for line, start, length in zip(lines, starts, lengths, strict=True)
    ]


def overlaps(finder: RaceFinder, seed: int) -> None:
    """Two bars at the same time."""
    rng = generator("overlaps", seed)
    cases = [_random_bars(rng, 2 + n // 6, in_order=True) for n in range(30)]
    _judge("shown, overlapping bars", cases, partial(_shown, finder), _bars_as_text)


def turned_round(finder: RaceFinder, seed: int) -> None:
    """Bars that touch, bars in the wrong order, and timelines of faulty scripts."""
    rng = generator("turned", seed)
    cases = [_random_bars(rng, 2 + n // 6, in_order=False) for n in range(30)]
    cases += map(bars, faulty_scripts(rng, 10))
    _judge("shown, any timeline", cases, partial(_shown, finder), _bars_as_text)


# ------------------------------------------------------------------ mended


def missing_edges(script: Script) -> list[Pair]:
    """As few edges as make a script free of races, each of them a race itself."""
    ordering, races, edges = Ordering(script), unordered(script), list[Pair]()
    while True:
        earlier = ordering.with_pairs(edges)
        left = [race for race in races if not earlier[race[1]] & ordering.bit[race[0]]]
        if not left:
            return edges
        edges.append(max((r for r in left if r[1] == left[0][1]), key=races.index))


def added_lines(script: Script, mended: Any) -> list[Line]:
    """What was added; AssertionError if anything else was done to the script."""
    assert isinstance(mended, list), (
        f"a list, not a {type(mended).__name__}: what is returned?"
    )
    left, added = list(script), []
    for line in mended:
        if left and line == left[0]:
            left.pop(0)
        else:
            assert _is_event_line(line), (
                "only new lines that record, wait or synchronize: "
                f"where does {line!r} come from?"
            )
            added.append(line)
    assert not left, f"all lines of the script kept: where is {left[0]!r}?"
    return added


def _is_event_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return False
    if line.get("do") == "synchronize":
        return line.keys() == {"do", "event"}
    on_stream = line.get("do") in ("record", "wait") and line.get("on") in STREAMS
    return on_stream and line.keys() == {"do", "on", "event"}


def still_racing(script: Script, mended: Any) -> str:
    """Empty if lines are kept and races gone, else what is expected, and a question."""
    try:
        added_lines(script, mended)
    except AssertionError as error:
        return str(error)
    race = first_race(mended)
    if not race:
        return ""
    return f"no race: {race[0]} and {race[1]} still race. What orders them now?"


def overlap_lost(script: Script, mended: Any) -> str:
    """Is anything ordered that could have run at the same time?"""
    if problem := still_racing(script, mended):
        return problem
    needed = Ordering(script).with_pairs(unordered(script))
    ordering = Ordering(mended)
    for first, second in combinations(ordering.names, 2):
        if ordering.before(first, second) and not needed[second] & ordering.bit[first]:
            return (
                f"no overlap lost: {second} now comes after {first}, and no race asks "
                "for it. Who waits: a stream, or the host and all it does later?"
            )
    return ""


def lines_wasted(script: Script, mended: Any) -> str:
    """Are two lines for each missing edge enough?"""
    if problem := still_racing(script, mended):
        return problem
    allowed, added = 2 * len(missing_edges(script)), added_lines(script, mended)
    if len(added) <= allowed:
        return ""
    return (
        f"{allowed} lines added at most: there are {len(added)}. Which race is gone "
        "already, once the one before it is mended?"
    )


def _mended(
    finder: RaceFinder, problem_of: Callable[[Script, Any], str], script: Script
) -> None:
    mended = ask(finder.mended, script)
    if problem := problem_of(script, mended):
        got = show(mended) if _is_script(mended) else repr(mended)
        expected, _, question = problem.partition(": ")
        raise Mistake(expected, got.replace("\n", "\n" + 12 * " "), question)


def _is_script(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(line, dict) and (_is_event_line(line) or "op" in line)
        for line in value
    )


def _broken_scripts(rng: Random) -> list[Script]:
    """One fault, two faults, and no plan at all."""
    scripts = [*random_scripts(rng, 24), *faulty_scripts(rng, 10)]
    return sorted([*scripts, *faulty_scripts(rng, 6, faults=2)], key=len)


def race_free(finder: RaceFinder, seed: int) -> None:
    """Lines were only added, and nothing races any more."""
    cases = _broken_scripts(generator("race free", seed))
    _judge("mended, free of races", cases, partial(_mended, finder, still_racing))


def overlap_kept(finder: RaceFinder, seed: int) -> None:
    """What may run at the same time still may."""
    cases = _broken_scripts(generator("overlap", seed))
    _judge("mended, overlap kept", cases, partial(_mended, finder, overlap_lost))


def few_lines(finder: RaceFinder, seed: int) -> None:
    """Not more lines than the missing edges need."""
    cases = _broken_scripts(generator("lines", seed))
    _judge("mended, few lines", cases, partial(_mended, finder, lines_wasted))


Check = Callable[[RaceFinder, int], None]

ALL: tuple[Check, ...] = (
    queues,
    events,
    removed_lines,
    misplaced_lines,
    any_script,
    overlaps,
    turned_round,
    race_free,
    overlap_kept,
    few_lines,
)
