"""A submission as a checker sees it: calls go out, plain values or faults come back.

    with Submission("handed_in/ada", "block_manager") as submission:
        submission.call("blocks_needed", 9, 4)          # a function of the module
        pool = submission.make("BlockPool", 8)          # an object, kept over there
        pool.call("allocate", 3)                        # a method of it

Arguments and results are None, bool, int, float, str, list and dict with str keys; a
tuple arrives as a list. Everything else that can happen is a `SubmissionFault`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cbasync.grading.faults import (
    BadValue,
    Died,
    NotThere,
    NotWritten,
    StudentError,
    SubmissionFault,
    Timeout,
    ending,
)
from cbasync.grading.stopwatch import Stopwatch

WORKER = Path(__file__).with_name("worker.py")
# No packages, no folder of ours on the path, nothing compiled, prints unbuffered.
FLAGS = ("-s", "-S", "-P", "-B", "-u")
ANSWER_BYTES = 8 << 20
SOURCE_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a submission may use, for each rubric item."""

    call_s: float = 5.0  # one call, in seconds of computing; on the clock, six times
    item_s: float = 60.0  # all calls of one item, on the clock
    memory_mb: int = 512  # address space of the process
    printed: int = 2000  # characters of printed text that are kept

    def __post_init__(self) -> None:
        for name in ("call_s", "item_s", "memory_mb"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, a limit is above 0: raise it"
                )


DEFAULT_LIMITS = Limits()


class Remote:
    """An object of the submission; it lives in the worker, here is its number."""

    def __init__(self, submission: Submission, number: int, name: str) -> None:
        self._submission = submission
        self._number = number
        self.name = name

    def call(self, method: str, *args: Any) -> Any:
        """Call a method; its result as a plain value."""
        where = f"{self.name}.{method}()"
        return self._submission.ask(where, "method", self._number, method, list(args))


class Submission:
    """One handed-in module, in a process of its own that starts with the first call."""

    def __init__(
        self, folder: str | Path, module: str, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.module = module
        self.limits = limits
        self.metrics: dict[str, float] = {}  # what an item wants on the leaderboard
        self.asked = False  # an item that never asks proves nothing
        self.loaded = False  # whether the module is there and could be imported
        self._source = Path(folder) / f"{module}.py"
        self._ended: SubmissionFault | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None
        self._folder = ""
        self._received = b""
        self._deadline = math.inf

    def call(self, function: str, *args: Any) -> Any:
        """Call a function of the module; its result as a plain value."""
        return self.ask(f"{function}()", "call", function, list(args))

    def make(self, name: str, *args: Any) -> Remote:
        """Make an object of a class of the module."""
        number = self.ask(f"{name}()", "make", name, list(args))
        if type(number) is not int:
            raise self._end(Died(f"wrote on the grader's own line in {name}()"))
        return Remote(self, number, name)

    def ask(self, where: str, *call: Any) -> Any:
        """One call and its answer; `where` names it in a message."""
        self.asked = True
        if self._ended is not None:
            raise self._ended
        if self._process is None:
            self._start()
            self._exchange("the module, while it was loaded", ["load"])
            self.loaded = True
        return self._exchange(where, list(call))

    @property
    def printed(self) -> str:
        """The beginning of what the submission printed."""
        if self._printed is None:
            return ""
        self._printed.seek(0)
        most = self.limits.printed
        text = self._printed.read(4 * most + 4).decode(errors="replace")
        return text if len(text) <= most else text[:most] + " ..."

    # -- the process -----------------------------------------------------------------

    def _start(self) -> None:
        """Copy the module away from the tests and start the worker on it."""
        text = self._read_source()
        self._folder = os.path.realpath(tempfile.mkdtemp(prefix="submission-"))
        path = Path(self._folder, self._source.name)
        path.write_bytes(text)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        cpu_s = math.ceil(self.limits.item_s) + 1
        limits = [self.module, str(self.limits.memory_mb << 20), str(cpu_s)]
        self._process = subprocess.Popen(
            [sys.executable, *FLAGS, str(WORKER), str(path), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            cwd=self._folder,
            # The same order of sets on every run, and nothing of ours to be read.
            env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PATH": os.defpath},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._deadline = time.monotonic() + self.limits.item_s

    def _read_source(self) -> bytes:
        """The module as bytes; never by a link, which could point at the tests."""
        name = self._source.name
        if self._source.is_symlink() or not self._source.is_file():
            raise self._end(NotThere(f"no file {name} was handed in"))
        if self._source.stat().st_size > SOURCE_BYTES:
            raise self._end(NotThere(f"{name} has more than {SOURCE_BYTES} bytes"))
        return self._source.read_bytes()

    def _end(self, fault: SubmissionFault) -> SubmissionFault:
        """Kill the process; from now on every call gives this fault."""
        self._ended = fault
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return fault

    def close(self) -> None:
        """End the process and remove its folder."""
        self._end(self._ended or Died("is closed"))
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
        if self._printed is not None:
            self._printed.close()
            self._printed = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- one call --------------------------------------------------------------------

    def _exchange(self, where: str, call: list[Any]) -> Any:
        number = secrets.token_hex(8)  # an answer written in advance cannot know it
        line = json.dumps([number, *call], allow_nan=False) + "\n"
        assert self._process is not None
        watch = Stopwatch(self._process.pid, self.limits.call_s, self._deadline)
        self._send(where, line.encode(), watch)
        answer = self._parse(where, self._receive(where, watch))
        match answer:
            case [str(echo), str(kind), value] if echo == number:
                return self._open(where, kind, value)
        raise self._end(Died(f"wrote on the grader's own line in {where}"))

    def _send(self, where: str, line: bytes, watch: Stopwatch) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        while line:
            while not select.select([], [pipe], [], watch.left_s())[1]:
                self._check_time(where, watch)
            try:
                line = line[os.write(pipe, line) :]
            except BrokenPipeError:
                raise self._died(where) from None

    def _receive(self, where: str, watch: Stopwatch) -> bytes:
        """One line, of a bounded length and in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._received:
            if len(self._received) > ANSWER_BYTES:
                most = f"{ANSWER_BYTES >> 20} MB"
                raise self._end(BadValue(f"gave more than {most} back in {where}"))
            while not select.select([pipe], [], [], watch.left_s())[0]:
                self._check_time(where, watch)
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self._died(where)
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _check_time(self, where: str, watch: Stopwatch) -> None:
        if watch.left_s() <= 0:
            raise self._end(Timeout(f"took longer than {watch.words()} in {where}"))

    def _died(self, where: str) -> SubmissionFault:
        """The pipe is closed: the process has ended, or closed it and lives on."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return self._end(Died(f"closed the grader's line in {where}"))
        return self._end(Died(f"{ending(code)} in {where}"))

    def _parse(self, where: str, line: bytes) -> Any:
        try:
            return json.loads(line, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            fault = Died(f"wrote on the grader's own line in {where}")
            raise self._end(fault) from None

    def _open(self, where: str, kind: str, value: Any) -> Any:
        """The value of an answer, or the fault that it tells of."""
        file = self._source.name
        match kind, value:
            case "value", _:
                return value
            case "raised", [str(name), str(message), int(line), str(text)]:
                fault: SubmissionFault = StudentError(name, message, line, text, file)
            case "not_written", [int(line), str(text)]:
                fault = NotWritten(f"{where} is not written yet ({file}, line {line})")
            case "not_there", _:
                fault = NotThere(f"{file} has no {where.removesuffix('()')}")
            case "bad_value", str(what):
                fault = BadValue(
                    f"{where} gave {what} back: give plain values and lists"
                )
            case "memory", _:
                most = f"{self.limits.memory_mb} MB"
                fault = self._end(Died(f"used more than {most} in {where}"))
            case "exited", int(code):
                fault = self._end(Died(f"{ending(abs(code))} in {where}"))
            case _:
                fault = self._end(Died(f"wrote on the grader's own line in {where}"))
        if where.startswith("the module"):
            self._end(fault)
        raise fault


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
