"""The process of a submission: loads one module and answers calls, nothing else.

Run as a script by `submission.Submission`, with the standard library only. One line of
JSON comes in for each call, one goes out, with the number of the call in front:

    ["3f9c", "make", "Pool", [4]]               ["3f9c", "value", 0]
    ["a01b", "method", 0, "allocate", [2]]      ["a01b", "value", [0, 1]]

It does not know what is checked, and no verdict is made here: a forged answer is worth
exactly what a returned one is.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import json
import os
import random
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

RESERVE_BYTES = 8 << 20  # let go when memory is exhausted, so that this can be said
FILE_BYTES = 1 << 20  # the largest file, printed text included
OPEN_FILES = 64
INT_BITS = 4096

# Modules that reach the system without being heard by an audit hook.
REFUSED_MODULES = frozenset(
    [
        *("ctypes", "_ctypes", "_posixshmem", "_sqlite3", "_dbm", "_gdbm"),
        *("_xxsubinterpreters", "_interpreters", "_testcapi", "_testinternalcapi"),
    ]
)
# Families of audit events that a submission has no use for; reading is looked at.
REFUSED_EVENTS = (
    *("ctypes.", "fcntl.", "gc.", "os.", "pty.", "resource.", "shutil.", "socket."),
    *("sqlite3.", "subprocess.", "syslog.", "_thread."),
)
READING_EVENTS = frozenset(["os.listdir", "os.scandir", "os.walk", "os.fwalk"])

Answer = tuple[str, Any]


class NotPlainError(Exception):
    """A value that the other side could not read."""


def plain(value: Any) -> Any:
    """The value as JSON has it, or `NotPlainError` with the first part that is not.

    >>> plain({"blocks": (1, 2.5, None)})
    {'blocks': [1, 2.5, None]}
    >>> plain([{3}])  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ...
    NotPlainError: a set
    """
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > INT_BITS:
            raise NotPlainError("a number of thousands of digits")
        return value
    if type(value) is float:
        if value - value != 0:
            raise NotPlainError(f"the number {value}")
        return value
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise NotPlainError(f"a dict with {type(key).__name__} keys")
        return {key: plain(part) for key, part in value.items()}
    name = type(value).__name__
    raise NotPlainError(f"a{'n' if name[0] in 'aeiou' else ''} {name}")


def inside(folder: str) -> Callable[[Any, list[str]], bool]:
    """Whether a path lies below one of some folders, as far as its text can say.

    That is enough where no link can be made. Like all of the guard it uses nothing that
    a submission could replace: only names bound here, and methods of built-in types.
    """
    kind, text = type, str

    def below(path: Any, tops: list[str]) -> bool:
        if kind(path) is not text:
            return False
        parts: list[str] = []
        full = path if path.startswith("/") else folder + "/" + path
        for part in full.split("/"):
            if part == "..":
                del parts[-1:]
            elif part not in ("", "."):
                parts.append(part)
        clean = "/" + "/".join(parts)
        if "site-packages" in parts:
            return False
        for top in tops:  # noqa: SIM110 (`any` could be replaced)
            if clean == top or clean.startswith(top + "/"):
                return True
        return False

    return below


def opening(folder: str, libraries: list[str]) -> Callable[[Any, int], None]:
    """What may be opened: files of the folder, and the standard library for reading."""
    kind, number, octets, failed = type, int, bytes, OSError
    stat, decode, below = os.stat, bytes.decode, inside(folder)
    mask, directory = 0o170000, 0o040000
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def is_folder(path: str) -> bool:
        try:
            return stat(path).st_mode & mask == directory
        except failed:
            return False

    def may_open(path: Any, flags: int) -> None:
        if kind(path) is number:
            return  # a file that is open already
        name = decode(path) if kind(path) is octets else path
        verb = "write" if flags & writing else "read"
        tops = [folder] if flags & writing else [folder, *libraries]
        # The number of an open folder could stand in front of other paths.
        if not below(name, tops) or is_folder(name):
            raise PermissionError(
                f"a submission may not {verb} {name!r}: it has its own folder only"
            )

    return may_open


def guard(folder: str, libraries: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that lets a submission read and write its folder, and no more."""
    may_open, below = opening(folder, libraries), inside(folder)
    refused, reading, modules = REFUSED_EVENTS, READING_EVENTS, REFUSED_MODULES

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            may_open(args[0], args[2])
        elif event == "import":
            if args[0] in modules:
                raise ImportError(f"a submission may not import {args[0]}")
        elif event in reading:
            path = folder if args[0] is None else args[0]
            if not below(path, [folder, *libraries]):
                raise PermissionError(f"a submission may not list {path!r}")
        elif event.startswith(refused):
            raise PermissionError(f"a submission may not use {event}")

    return hook


def refuse(what: str) -> Callable[..., Any]:
    """In place of a function that no audit hook hears of; the same for root, too."""

    def refused(*args: object, **names: object) -> None:
        raise PermissionError(f"a submission may not {what}")

    return refused


def set_limits(memory_bytes: int, cpu_s: int) -> None:
    """Limits of the operating system; they hold whatever Python code does."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),  # root is not bound by this one
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


class Desk:
    """The submission's module and objects, and the calls to them."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.module = types.ModuleType(name)
        self.module.__file__ = path
        self.objects: list[Any] = []
        self.source: list[str] = []

    def load(self) -> None:
        with open(self.path, encoding="utf-8") as file:
            text = file.read()
        self.source = text.splitlines()
        sys.modules[self.module.__name__] = self.module
        exec(compile(text, self.path, "exec"), self.module.__dict__)

    def find(self, owner: Any, name: str) -> Any:
        """What a name stands for; `LookupError` if there is no such name."""
        try:
            return getattr(owner, name)
        except AttributeError:
            raise LookupError from None

    def answer(self, kind: str, *rest: Any) -> Answer:
        """The answer to one call, whatever the submission does in it."""
        try:
            return self._work(kind, *rest)
        except NotPlainError as error:
            return "bad_value", str(error)
        except SystemExit as error:
            code = error.code
            return "exited", code if isinstance(code, int) else int(code is not None)
        except NotImplementedError as error:
            return "not_written", self.line_of(error)
        except MemoryError as error:
            error.__traceback__ = None  # the frames hold what filled the memory
            return "memory", None
        except BaseException as error:
            message = str(error)
            if isinstance(error, SyntaxError) and error.filename == self.path:
                message = error.msg  # without the place, which follows
            words = [type(error).__name__, message[:500]]
            return "raised", [*words, *self.line_of(error)]

    def _work(self, kind: str, *rest: Any) -> Answer:
        if kind == "load":
            self.load()
            return "value", None
        owner: Any = self.module
        if kind == "method":
            owner, rest = self.objects[rest[0]], rest[1:]
        name, args = rest
        try:
            function = self.find(owner, name)
        except LookupError:
            return "not_there", name
        result = function(*args)
        if kind == "make":
            self.objects.append(result)
            return "value", len(self.objects) - 1
        return "value", plain(result)

    def line_of(self, error: BaseException) -> list[Any]:
        """Number and text of the last line of the submission that took part."""
        number = 0
        if isinstance(error, SyntaxError) and error.filename == self.path:
            number = error.lineno or 0
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == self.path:
                number = step.tb_lineno
            step = step.tb_next
        known = 0 < number <= len(self.source)
        return [number, self.source[number - 1].strip()[:100] if known else ""]


def serve(desk: Desk, requests: Any, answers: int) -> None:
    """Answer one line after the other until there are no more."""
    loads, dumps, write = json.loads, json.dumps, os.write
    reserve: Any = bytearray(RESERVE_BYTES)
    for line in requests:
        number, *call = loads(line)
        kind, value = desk.answer(*call)
        if kind == "memory":
            reserve = None
            desk.objects.clear()
        try:
            left = (dumps([number, kind, value]) + "\n").encode()
        except (MemoryError, RecursionError):
            reserve = None
            left = (dumps([number, "memory", None]) + "\n").encode()
        while left:
            left = left[write(answers, left) :]
    del reserve


def main() -> None:
    """worker.py FILE MODULE MEMORY_BYTES CPU_SECONDS; calls come on standard input."""
    path, name, memory_bytes, cpu_s = sys.argv[1:]
    # Prints, and whoever reads or writes the three usual numbers, miss the calls.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    _thread.start_new_thread = refuse("start a thread")
    _posixsubprocess.fork_exec = refuse("start a process")
    random.seed(0)  # the same results on every run
    set_limits(int(memory_bytes), int(cpu_s))
    libraries = [os.path.normpath(folder) for folder in sys.path]
    sys.argv[:] = [path]
    sys.addaudithook(guard(os.path.dirname(path), libraries))
    serve(Desk(path, name), requests, answers)


if __name__ == "__main__":
    main()
