"""Assignment 4: a carry-over for a ring of three slots, two batches in flight."""

from typing import Any

Row = dict[str, Any]  # with name, start, tokens and samples


class CarryOver:
    """The host's part: where each token lies that the host has not seen yet."""

    def __init__(self, num_slots: int) -> None:
        """Batch n has slot n % num_slots; nothing has been prepared yet."""
        raise NotImplementedError

    def prepare(self, batch: int, rows: list[Row]) -> dict[str, list[int]]:
        """Slot and rank of every input of this batch; -1 where the host knows it."""
        raise NotImplementedError

    def collect(self, batch: int) -> None:
        """The host knows the tokens of this batch and of all before it."""
        raise NotImplementedError


def resolve(
    input_ids: list[int], slot: list[int], rank: list[int], sampled: list[list[int]]
) -> list[int]:
    """The device's part: the ids that the model reads; sampled[s] is of slot s."""
    raise NotImplementedError


def loop(num_batches: int) -> list[list[Any]]:
    """What the host does, in order: ["prepare" or "launch" or "collect", batch]."""
    raise NotImplementedError
