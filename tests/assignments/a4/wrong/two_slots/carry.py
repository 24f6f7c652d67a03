"""Forgets that there are three slots."""

from typing import Any

Row = dict[str, Any]  # with name, start, tokens and samples


class CarryOver:
    """The host's part: where each token lies that the host has not seen yet."""

    def __init__(self, num_slots: int) -> None:
        """Batch n has slot n % num_slots; nothing has been prepared yet."""
        self.num_slots = 2
        self.sources: dict[tuple[str, int], tuple[int, int]] = {}

    def prepare(self, batch: int, rows: list[Row]) -> dict[str, list[int]]:
        """Slot and rank of every input of this batch; -1 where the host knows it."""
        slots, ranks = [], []
        sampled: dict[tuple[str, int], tuple[int, int]] = {}
        for row in rows:
            name, stop = row["name"], row["start"] + row["tokens"]
            for position in range(row["start"], stop):
                source = self.sources.get((name, position))
                slots.append(-1 if source is None else source[0] % self.num_slots)
                ranks.append(-1 if source is None else source[1])
            if row["samples"]:
                sampled[name, stop] = (batch, len(sampled))
        self.sources.update(sampled)
        return {"slot": slots, "rank": ranks}

    def collect(self, batch: int) -> None:
        """The host knows the tokens of this batch and of all before it."""
        self.sources = {
            token: source for token, source in self.sources.items() if source[0] > batch
        }


def resolve(
    input_ids: list[int], slot: list[int], rank: list[int], sampled: list[list[int]]
) -> list[int]:
    """The device's part: the ids that the model reads; sampled[s] is of slot s."""
    return [
        sampled[s][r] if s >= 0 else token
        for token, s, r in zip(input_ids, slot, rank, strict=True)
    ]


def loop(num_batches: int) -> list[list[Any]]:
    """What the host does, in order: ["prepare" or "launch" or "collect", batch]."""
    actions: list[list[Any]] = []
    for batch in range(num_batches):
        if batch >= 3:
            actions.append(["collect", batch - 3])
        actions += [["prepare", batch], ["launch", batch]]
    last = range(max(0, num_batches - 3), num_batches)
    return actions + [["collect", batch] for batch in last]
