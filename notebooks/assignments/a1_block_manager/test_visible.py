"""What you can run yourself: `pytest test_visible.py` in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from block_manager import BlockManager

from cbasync.checks import block_manager as checks


def test_the_story_of_the_notebook() -> None:
    manager = BlockManager(6, 4)
    assert manager.admit("a", [5, 6, 7, 8, 9]) == {"table": [0, 1], "known": 0}
    assert manager.fork("a", "b") == [0, 1]
    assert manager.append("b", 30) == {"table": [0, 2], "copy": [1, 2]}
    assert manager.append("a", 40) == {"table": [0, 1], "copy": []}
    answer = manager.admit("c", [5, 6, 7, 8, 9, 10])
    assert answer == {"table": [0, 3], "known": 4}


def test_tables() -> None:
    checks.tables(BlockManager)


def test_contents() -> None:
    checks.contents(BlockManager)


def test_beginnings() -> None:
    checks.beginnings(BlockManager)


def test_copies() -> None:
    checks.copies(BlockManager)


def test_refusals() -> None:
    checks.refusals(BlockManager)


def test_all_free() -> None:
    checks.all_free(BlockManager)


def test_hit_rate() -> None:
    for at_least in checks.HIT_BARS:
        checks.hit_rate(BlockManager, at_least)
