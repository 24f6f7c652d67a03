"""What can go wrong in a submission; the text of each is for the student."""

from __future__ import annotations

import signal


class SubmissionFault(Exception):  # noqa: N818 (a fault of theirs, no error of ours)
    """A submission did not give an answer; this says why, to the student."""


class NotThere(SubmissionFault):
    """A file, function, class or method is missing."""


class NotWritten(SubmissionFault):
    """The student's code raised NotImplementedError: the starter, untouched."""


class BadValue(SubmissionFault):
    """A value came back that is not None, bool, int, float, str, list or dict."""


class Timeout(SubmissionFault):
    """A call took longer than its limit; the process is gone."""


class Died(SubmissionFault):
    """The process ended before it gave an answer: by itself, or out of memory."""


class StudentError(SubmissionFault):
    """An exception in the student's code; the process goes on.

    >>> error = StudentError("ValueError", "no block left", 12, "raise Full", "pool.py")
    >>> print(error)
    ValueError: no block left (pool.py, line 12: raise Full)
    """

    def __init__(
        self, kind: str, message: str, line: int, text: str, file: str
    ) -> None:
        where = f"{file}, line {line}: {text}" if line else file
        hint = ""
        if kind == "ModuleNotFoundError":
            hint = "; a submission has the standard library only"
        elif kind == "SyntaxError" and text.startswith(("%", "!")):
            what = "the first line" if line == 1 else "this line"
            hint = f"; remove {what}, it belongs to the notebook"
        super().__init__(f"{kind}: {message} ({where}{hint})")
        self.kind = kind  # the exception's class, as a name
        self.message = message
        self.line = line


def ending(returncode: int) -> str:
    """How a process ended, in words.

    >>> ending(0), ending(-11)
    ('ended itself with exit code 0', 'was ended by signal SIGSEGV')
    """
    if returncode >= 0:
        return f"ended itself with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = str(-returncode)
    return f"was ended by signal {name}"
