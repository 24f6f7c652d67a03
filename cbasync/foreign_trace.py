"""Reads what `torch.profiler` wrote, of this engine or of any other.

The file is read piece by piece, so that a trace of some 100 MB needs little memory and
shows its progress. Only what a timeline needs is kept: kernels, copies, ranges.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from tqdm.auto import tqdm

from cbasync.timeline import HOST_PHASES, PHASES, Span, Timeline

_PIECE = 1 << 20
_RANGES = ("user_annotation",)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
_COPIES = {"HtoD": "h2d", "DtoH": "d2h"}


class Event(NamedTuple):
    """One complete event of a trace, in microseconds."""

    name: str
    start_us: float
    end_us: float
    thread: str  # of a range or an operator
    stream: str = ""  # of device work
    correlation: int = -1  # what the launch of device work shares with it


@dataclass
class Profile:
    """What is kept of a profiler's trace."""

    name: str
    kernels: list[Event] = field(default_factory=list)
    copies: dict[str, list[Event]] = field(
        default_factory=lambda: {"h2d": [], "d2h": []}
    )
    ranges: list[Event] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    launches: dict[int, float] = field(default_factory=dict)  # correlation -> time
    num_events: int = 0

    @property
    def has_device(self) -> bool:
        """Whether anything ran beside the CPU."""
        return bool(self.kernels or self.copies["h2d"] or self.copies["d2h"])

    def streams(self) -> dict[str, int]:
        """Kernels and copies on each stream."""
        counts: dict[str, int] = {}
        for event in (*self.kernels, *self.copies["h2d"], *self.copies["d2h"]):
            counts[event.stream] = counts.get(event.stream, 0) + 1
        return counts

    def timeline(self, per: Literal["kernel", "batch"] = "kernel") -> Timeline:
        """The trace as lanes.

        Per `kernel` a gap between two kernels of a batch is idle time, per `batch` it
        is not. A trace without a device has ranges named `compute` in their place, or
        all of its operators if there are none.
        """
        if per not in ("kernel", "batch"):
            raise ValueError(f"per is {per!r}: choose 'kernel' or 'batch'")
        phases = _numbered(self.ranges)
        lanes = self._device_lanes(phases) if self.has_device else self._lanes(phases)
        spans = [
            Span("cpu", phase, batch, slot, event.start_us, event.end_us)
            for phase, batch, slot, event in phases
            if phase in HOST_PHASES or (phase == "d2h" and self.has_device)
        ]
        for lane, works in lanes.items():
            spans += _joined(lane, works, with_gaps=per == "batch")
        return Timeline(self.name, spans)

    def _device_lanes(self, phases: list[_Phase]) -> dict[str, list[_Work]]:
        launched = [p for p in phases if p.phase not in HOST_PHASES]
        launched.sort(key=lambda p: p.event.start_us)
        starts = [phase.event.start_us for phase in launched]

        def work(event: Event) -> _Work:
            at_us = self.launches.get(event.correlation)
            index = -1 if at_us is None else bisect_right(starts, at_us) - 1
            if index >= 0 and at_us is not None:
                phase = launched[index]
                if at_us <= phase.event.end_us:
                    return _Work(phase.batch, phase.slot, event)
            return _Work(-1, -1, event)

        named = {"compute": self.kernels, **self.copies}
        return {
            lane: [work(event) for event in events] for lane, events in named.items()
        }

    def _lanes(self, phases: list[_Phase]) -> dict[str, list[_Work]]:
        lanes: dict[str, list[_Work]] = {"h2d": [], "compute": [], "d2h": []}
        for phase, batch, slot, event in phases:
            if phase in lanes:
                lanes[phase].append(_Work(batch, slot, event))
        if not lanes["compute"]:
            lanes["compute"] = [_Work(-1, -1, event) for event in self.operators]
        return lanes


class _Phase(NamedTuple):
    phase: str
    batch: int
    slot: int
    event: Event


class _Work(NamedTuple):
    batch: int
    slot: int
    event: Event


_NAME = re.compile(rf"({'|'.join(PHASES)})\b(?: (\d+))?(?: ([A-D])\b)?")


def _numbered(ranges: Iterable[Event]) -> list[_Phase]:
    """Ranges named by one of the six phases; without a number they are counted.

    >>> event = Event("", 0.0, 1.0, "1")
    >>> names = ["compute 7 B", "update", "forward", "update"]
    >>> [p[:3] for p in _numbered(event._replace(name=name) for name in names)]
    [('compute', 7, 1), ('update', 0, -1), ('update', 1, -1)]
    """
    counts = dict.fromkeys(PHASES, 0)
    found = []
    for event in sorted(ranges, key=lambda event: event.start_us):
        if match := _NAME.fullmatch(event.name):
            phase, number, letter = match.groups()
            batch = counts[phase] if number is None else int(number)
            counts[phase] += 1
            slot = "ABCD".index(letter) if letter else -1
            found.append(_Phase(phase, batch, slot, event))
    # A schedule that nothing came of belongs to no batch.
    real = {each.batch for each in found if each.phase != "schedule"}
    return [e if e.batch in real or not real else e._replace(batch=-1) for e in found]


def _joined(lane: str, works: list[_Work], *, with_gaps: bool) -> Iterator[Span]:
    """Work of one batch that overlaps or touches, as one span; or all of a batch."""
    works = sorted(works, key=lambda work: work.event.start_us)
    for (batch, slot), group in groupby(works, key=lambda work: work[:2]):
        start_us = end_us = -1.0
        for _, _, event in group:
            joins = with_gaps and batch >= 0
            if end_us >= 0 and (joins or event.start_us <= end_us):
                end_us = max(end_us, event.end_us)
                continue
            if end_us >= 0:
                yield Span(lane, lane, batch, slot, start_us, end_us)
            start_us, end_us = event.start_us, event.end_us
        yield Span(lane, lane, batch, slot, start_us, end_us)


# ------------------------------------------------------------------ reading files


def read_profile(path: str | Path, *, progress: bool = True) -> Profile:
    """What a profiler's trace holds; packed if its name ends in .gz."""
    profile = Profile(Path(path).name.split(".")[0])
    for event in iter_events(path, progress=progress):
        profile.num_events += 1
        if event.get("ph") == "X":
            _keep(profile, event)
    if not (profile.has_device or profile.ranges or profile.operators):
        raise ValueError(
            f"{path} has {profile.num_events} events, none of them a kernel, a copy, a "
            "range or an operator: give a trace of torch.profiler"
        )
    return profile


def _keep(profile: Profile, raw: dict[str, Any]) -> None:
    category, args = raw.get("cat", ""), raw.get("args", {})
    start_us = float(raw["ts"])
    if category in LAUNCHES:
        if "correlation" in args:
            profile.launches[args["correlation"]] = start_us
        return
    event = Event(
        raw["name"],
        start_us,
        start_us + float(raw.get("dur", 0)),
        str(raw.get("tid", "")),
        str(args.get("stream", "")),
        args.get("correlation", -1),
    )
    if category in _DEVICE:
        copies = (lane for way, lane in _COPIES.items() if way in event.name)
        lane = next(copies, "") if category == "gpu_memcpy" else ""
        (profile.copies[lane] if lane else profile.kernels).append(event)
    elif category in _RANGES:
        profile.ranges.append(event)
    elif category == "cpu_op":
        profile.operators.append(event)


def iter_events(path: str | Path, *, progress: bool = True) -> Iterator[dict[str, Any]]:
    """The events of a trace file, one after the other."""
    path = Path(path)
    size = path.stat().st_size
    bar = tqdm(total=size, unit="B", unit_scale=True, disable=not progress)
    with path.open("rb") as file, bar:
        try:
            yield from _parse(_pieces(file, path.suffix == ".gz", bar), path)
        except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error


def _pieces(file: BinaryIO, is_packed: bool, bar: Any) -> Iterator[str]:
    stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
    text = io.TextIOWrapper(stream, encoding="utf-8")
    while piece := text.read(_PIECE):
        bar.update(min(file.tell(), bar.total) - bar.n)
        yield piece
    bar.update(bar.total - bar.n)


_START = re.compile(r'"traceEvents"\s*:\s*\[|^\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def _parse(pieces: Iterator[str], path: Path) -> Iterator[dict[str, Any]]:
    """Events out of text that comes in pieces; what is around them is skipped."""
    buffer = next(pieces, "")
    while not (start := _START.search(buffer)):
        piece = next(pieces, "")
        if not piece:
            raise _damaged(path, "it has no traceEvents")
        buffer += piece
    decode, place = json.JSONDecoder().raw_decode, start.end()
    while True:
        place = _end(_BETWEEN.match(buffer, place))
        if buffer[place : place + 1] == "]":
            return
        try:
            event, place = decode(buffer, place)
        except ValueError as error:
            piece = next(pieces, "")
            if not piece:
                raise _damaged(path, error) from error
            buffer, place = buffer[place:] + piece, 0
            continue
        yield event


def _end(match: re.Match[str] | None) -> int:
    assert match is not None, "a pattern that may be empty always matches"
    return match.end()


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(
        f"{path} does not hold a whole JSON trace ({why}): "
        "give a file of torch.profiler or of Timeline.save"
    )


def load_timeline(path: str | Path, *, progress: bool = True) -> Timeline:
    """The timeline of any trace file: one of ours exactly, any other by its kernels."""
    packed = str(path).endswith(".gz")
    with gzip.open(path) if packed else Path(path).open("rb") as file:
        head = file.read(1000).partition(b'"traceEvents"')[0]
    if b'"cbasync"' in head:
        return Timeline.from_chrome_trace(path)
    return read_profile(path, progress=progress).timeline()
