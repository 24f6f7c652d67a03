"""What you can run yourself, in this folder.

The command is `../../../.venv/bin/python -m pytest test_visible.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from carry import CarryOver, loop, resolve

from cbasync.checks import ring_loop, rings


def test_the_token_of_the_batch_before() -> None:
    carry = CarryOver(3)
    row = {"name": "a", "start": 0, "tokens": 2, "samples": True}
    assert carry.prepare(0, [row]) == {"slot": [-1, -1], "rank": [-1, -1]}
    row = {"name": "a", "start": 2, "tokens": 1, "samples": True}
    assert carry.prepare(1, [row]) == {"slot": [0], "rank": [0]}


def test_resolve() -> None:
    assert resolve([0, 0, 5], [-1, 2, -1], [-1, 1, -1], [[], [], [7, 8]]) == [0, 8, 5]
    rings.resolved(resolve)


def test_known() -> None:
    rings.known(CarryOver)


def test_one_back() -> None:
    rings.one_back(CarryOver)


def test_two_back() -> None:
    rings.two_back(CarryOver)


def test_collected() -> None:
    rings.collected(CarryOver)


def test_ranks() -> None:
    rings.ranks(CarryOver)


def test_again() -> None:
    rings.again(CarryOver)


def test_whole() -> None:
    rings.whole(CarryOver, resolve)


def test_loop() -> None:
    ring_loop.no_race(loop)
    ring_loop.never_idle(loop)
