"""What you can run yourself, in this folder.

The command is `../../../.venv/bin/python -m pytest test_visible.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from block_manager import BlockManager

from cbasync.checks import block_manager as checks


def test_the_story_of_the_notebook() -> None:
    """Whatever numbers the blocks have: who has which, and what is copied."""
    manager = BlockManager(6, 4)
    answer = manager.admit("a", [5, 6, 7, 8, 9])
    full, last = answer["table"]
    assert answer == {"table": [full, last], "known": 0}
    assert manager.fork("a", "b") == [full, last]
    answer = manager.append("b", 30)
    own = answer["table"][1]
    assert answer == {"table": [full, own], "copy": [last, own]}
    assert manager.append("a", 40) == {"table": [full, last], "copy": []}
    answer = manager.admit("c", [5, 6, 7, 8, 50, 51])
    new = answer["table"][1]
    assert answer == {"table": [full, new], "known": 4}
    assert len({full, last, own, new}) == 4
    manager.release("a")
    assert manager.append("c", 52) == {"table": [full, new], "copy": []}
    manager.release("b")
    manager.release("c")
    assert manager.num_free() == 6


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
