"""The command line of the assignments: `python -m cbasync assignments WHAT DIR`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbasync.grading.grade import Plan

Run = Callable[[argparse.Namespace], None]


def declare(parser: argparse.ArgumentParser) -> Run:
    """Declare release, grade, practice and course; what to run for them."""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    for name, part_command in (
        ("release", release_command),
        ("grade", grade_command),
        ("practice", practice_command),
        ("course", course_command),
    ):
        words = str(part_command.__doc__)
        part = what.add_parser(name, help=words, description=words)
        part.add_argument("folder", metavar="DIR", type=Path)
        part.set_defaults(run_part=part_command(part))

    def run(args: argparse.Namespace) -> None:
        args.run_part(args)

    return run


def _seed(parser: argparse.ArgumentParser, what: str) -> None:
    from cbasync.grading.rubric import SEED

    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"{what} (default: {SEED})"
    )


def release_command(parser: argparse.ArgumentParser) -> Run:
    """Write the student version: no solutions, no hidden tests."""

    def run(args: argparse.Namespace) -> None:
        from cbasync.grading.release import release

        files = release(args.folder)
        print(f"wrote {len(files)} files to {args.folder}: hand out this folder")

    return run


def practice_command(parser: argparse.ArgumentParser) -> Run:
    """Write ten made-up submissions whose points are known."""
    _seed(parser, "who hands in what")

    def run(args: argparse.Namespace) -> None:
        from cbasync.grading.practice import write_class

        expected = write_class(args.folder, args.seed)
        print(f"wrote {len(expected)} submissions to {args.folder}")

    return run


def course_command(parser: argparse.ArgumentParser) -> Run:
    """Write a course folder for nbgrader, which grades notebooks."""
    _seed(parser, "of the hidden workloads")

    def run(args: argparse.Namespace) -> None:
        from cbasync.grading.course import write_course

        topics = write_course(args.folder, args.seed)
        print(f"wrote {len(topics)} sources to {args.folder}; in it, run for example")
        print(f"  nbgrader generate_assignment {topics[0]}")

    return run


def grade_command(parser: argparse.ArgumentParser) -> Run:
    """Grade a folder of submissions, one folder for each student."""
    from cbasync.grading.submission import Limits

    limits = Limits()
    add = parser.add_argument
    out = "where grades go (default: grades)"
    add("--output", type=Path, metavar="OUT", default=Path("grades"), help=out)
    add("--only", metavar="a1,a2", help="some assignments (default: all)")
    _seed(parser, "of the hidden workloads")
    cores = os.cpu_count() or 1
    add("--processes", type=int, default=cores, help="at a time (default: one a core)")
    seconds = f"most seconds of a call (default: {limits.call_s:g})"
    add("--call-seconds", type=float, default=limits.call_s, help=seconds)
    memory = f"most memory of a submission (default: {limits.memory_mb})"
    add("--memory-mb", type=int, default=limits.memory_mb, help=memory)

    def run(args: argparse.Namespace) -> None:
        from cbasync.grading.grade import Plan
        from cbasync.grading.rubric import ASSIGNMENTS

        limits = Limits(call_s=args.call_seconds, memory_mb=args.memory_mb)
        numbers = args.only.split(",") if args.only else ASSIGNMENTS
        if args.processes < 1:
            raise ValueError(f"processes are {args.processes}, at least 1 is needed")
        plan = Plan(tuple(numbers), args.seed, limits)
        _grade(args.folder, args.output, plan, args.processes)

    return run


def _grade(folder: Path, output: Path, plan: Plan, processes: int) -> None:
    """Grade with a progress bar, then write every file."""
    from tqdm import tqdm

    from cbasync.grading.grade import grade_class, students_of
    from cbasync.grading.results import write_results

    students = students_of(folder)
    done = grade_class(students, plan, processes)
    grades = [
        grade
        for of_student in tqdm(done, total=len(students), unit="student")
        for grade in of_student
    ]
    print(write_results(output, grades), end="")
