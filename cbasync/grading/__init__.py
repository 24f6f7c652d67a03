"""Grades submissions: the checker here, the student's code in a process of its own.

What a submission gives back is data to be judged. Nothing that it prints, raises,
patches or ends can become a point.
"""

from cbasync.grading.faults import (
    BadValue,
    Died,
    NotThere,
    NotWritten,
    StudentError,
    SubmissionFault,
    Timeout,
)
from cbasync.grading.submission import Limits, Remote, Submission

__all__ = [
    "BadValue",
    "Died",
    "Limits",
    "NotThere",
    "NotWritten",
    "Remote",
    "StudentError",
    "Submission",
    "SubmissionFault",
    "Timeout",
]
