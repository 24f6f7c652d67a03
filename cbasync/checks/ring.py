"""A ring of three slots: planned batches, and what every input should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict

from cbasync.checks.workload import Mistake, is_whole

NUM_SLOTS = 3
LETTERS = "ABC"
PLACEHOLDER = 0  # an ordinary token, too: only the arrays say which inputs are carried
VOCABULARY = 10  # small, so that token 0 is frequent
ALL = 100  # more inputs than any request has


class Row(TypedDict):
    """One request in a batch, as the host plans it."""

    name: str
    start: int  # position of its first input in the request
    tokens: int  # how many inputs
    samples: bool  # whether a token is sampled of it: the one at start + tokens


class Carry(Protocol):
    """What is tested: the host's part."""

    def prepare(self, batch: int, rows: list[Row]) -> Any:
        """`{"slot": [...], "rank": [...]}`, one entry for each input, -1: none."""

    def collect(self, batch: int) -> Any:
        """The host knows the tokens of this batch now."""


Make = Callable[[int], Carry]
"""Number of slots: a new one."""

Resolve = Callable[[list[int], list[int], list[int], list[list[int]]], Any]
"""Input ids, slots, ranks, sampled tokens of each slot: the ids the model reads."""


class Step(NamedTuple):
    """What happens to a request in a batch; without a name: the host catches up."""

    batch: int
    name: str = ""
    prompt: int = 0  # tokens of its prompt
    tokens: int = 1  # most inputs that it has now
    again: bool = False  # it lost what it had computed, and begins anew


class Source(NamedTuple):
    """Where a token was sampled."""

    batch: int
    rank: int

    def __str__(self) -> str:
        letter = LETTERS[self.batch % NUM_SLOTS]
        return f"slot {self.batch % NUM_SLOTS} ({letter}), rank {self.rank}"


def show(steps: Sequence[Step]) -> str:
    """Steps in words, their batches numbered as they will be.

    >>> print(show([Step(3, "a", 2, 1), Step(5), Step(7, "a", 2, again=True)]))
    batch 0: a (prompt 2), at most 1 inputs
    before batch 1 the host collects all
    batch 1: a (prompt 2), at most 1 inputs, from its beginning
    """
    full = sorted({step.batch for step in steps if step.name})
    lines = []
    for step in steps:
        number = sum(batch < step.batch for batch in full)
        most = f", at most {step.tokens} inputs" if step.tokens < ALL else ""
        anew = ", from its beginning" if step.again else ""
        line = f"batch {number}: {step.name} (prompt {step.prompt}){most}{anew}"
        lines.append(
            line if step.name else f"before batch {number} the host collects all"
        )
    return "\n".join(lines)


def next_token(token: int, position: int) -> int:
    """The whole model: what follows a token at a position."""
    return (7 * token + position + 1) % VOCABULARY


class Answers:
    """What each request says when it is served alone, one token at a time.

    >>> answers = Answers()
    >>> answers.token("a", position=4, prompt=3) == next_token(
    ...     answers.token("a", position=3, prompt=3), 3
    ... )
    True
    """

    def token(self, name: str, position: int, prompt: int) -> int:
        """The token at a position, of the prompt or of the answer."""
        if position < prompt:
            return (sum(map(ord, name)) + 3 * position) % VOCABULARY
        return next_token(self.token(name, position - 1, prompt), position - 1)


class Ring:
    """Runs planned batches through three slots and checks every input."""

    def __init__(self, carry: Carry, resolve: Resolve | None = None) -> None:
        self.carry, self.resolve = carry, resolve
        self.answers = Answers()
        self.computed: dict[str, int] = {}  # inputs computed, by request
        self.known: dict[str, int] = {}  # tokens that exist, in flight or not
        self.prompts: dict[str, int] = {}
        self.sources: dict[tuple[str, int], Source] = {}  # by request and position
        self.sampled: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self.num_batches = self.num_collected = 0

    def run(self, steps: Sequence[Step]) -> None:
        """Go through the steps, batch by batch; batches without rows are left out."""
        for number in sorted({step.batch for step in steps}):
            mine = [step for step in steps if step.batch == number]
            rows = self._rows([step for step in mine if step.name])
            if not rows:
                continue
            catches_up = any(not step.name for step in mine)
            self._collect(0 if catches_up else NUM_SLOTS - 1)
            self._check(rows, self.carry.prepare(self.num_batches, _copies(rows)))
            self._compute(rows)

    def _rows(self, steps: Sequence[Step]) -> list[Row]:
        rows: list[Row] = []
        for step in steps:
            name = step.name
            if any(row["name"] == name for row in rows):
                continue
            self.prompts[name] = step.prompt
            known = self.known.setdefault(name, step.prompt)
            start = 0 if step.again else self.computed.get(name, 0)
            tokens = min(step.tokens, known - start)
            samples = start + tokens == known
            rows.append(
                {"name": name, "start": start, "tokens": tokens, "samples": samples}
            )
        return rows

    def _collect(self, most_in_flight: int) -> None:
        while self.num_batches - self.num_collected > most_in_flight:
            self.carry.collect(self.num_collected)
            self.num_collected += 1

    def _compute(self, rows: Sequence[Row]) -> None:
        tokens: list[int] = []
        for row in rows:
            name, stop = row["name"], row["start"] + row["tokens"]
            self.computed[name] = stop
            if row["samples"]:
                self.known[name] = stop + 1
                self.sources[name, stop] = Source(self.num_batches, len(tokens))
                tokens.append(self._true(name, stop))
        self.sampled[self.num_batches % NUM_SLOTS] = tokens
        self.num_batches += 1

    def _true(self, name: str, position: int) -> int:
        return self.answers.token(name, position, self.prompts[name])

    # ------------------------------------------------------------------ checks

    def _check(self, rows: Sequence[Row], answer: Any) -> None:
        inputs = [
            (row["name"], position)
            for row in rows
            for position in range(row["start"], row["start"] + row["tokens"])
        ]
        slots, ranks = _arrays(answer, len(inputs), self._told(rows))
        for (name, position), slot, rank in zip(inputs, slots, ranks, strict=True):
            self._check_source(name, position, slot, rank, self._told(rows))
        if self.resolve is not None:
            self._check_resolve(inputs, slots, ranks, self._told(rows))

    def _check_source(
        self, name: str, position: int, slot: int, rank: int, told: str
    ) -> None:
        source = self.sources.get((name, position))
        is_in_flight = source is not None and source.batch >= self.num_collected
        if slot < 0:
            if is_in_flight:
                raise Mistake(
                    f"{source} for input {position} of {name!r}, which batch "
                    f"{source.batch if source else 0} samples; {told}",
                    "slot -1: a token that the host knows",
                    "Has the host collected that batch yet?",
                )
            return
        got = f"slot {slot} ({LETTERS[slot]}), rank {rank}"
        if source is None or not is_in_flight:
            raise Mistake(
                f"slot -1 for input {position} of {name!r}: the host knows it; {told}",
                got,
                self._why_known(source),
            )
        if (slot, rank) != (source.batch % NUM_SLOTS, source.rank):
            raise Mistake(
                f"{source} for input {position} of {name!r}, which batch "
                f"{source.batch} samples; {told}",
                got,
                _question(slot, source),
            )

    def _why_known(self, source: Source | None) -> str:
        """A question about a token that is not in flight, or was never sampled."""
        if source is None:
            return "Was that token sampled at all, or is it part of the prompt?"
        if self.num_batches - source.batch >= NUM_SLOTS:
            return "Which batch has this slot by now?"
        return f"Batch {source.batch} was collected: who knows its tokens since then?"

    def _check_resolve(
        self,
        inputs: Sequence[tuple[str, int]],
        slots: list[int],
        ranks: list[int],
        told: str,
    ) -> None:
        assert self.resolve is not None
        true = [self._true(name, position) for name, position in inputs]
        pairs = zip(true, slots, strict=True)
        ids = [token if slot < 0 else PLACEHOLDER for token, slot in pairs]
        sampled = [list(tokens) for tokens in self.sampled]
        got = self.resolve(ids, list(slots), list(ranks), sampled)
        if got != true:
            raise Mistake(
                f"input ids {true}, as if each request were alone; {told}",
                got,
                "Which inputs are carried, and where do they lie?",
            )

    def _told(self, rows: Sequence[Row]) -> str:
        letter = LETTERS[self.num_batches % NUM_SLOTS]
        return f"batch {self.num_batches} (slot {letter}) has {list(map(dict, rows))}"


def _copies(rows: Sequence[Row]) -> list[Row]:
    return [row.copy() for row in rows]


def _arrays(answer: Any, length: int, told: str) -> tuple[list[int], list[int]]:
    """Both arrays, if they are such."""
    is_dict = isinstance(answer, dict) and set(answer) == {"slot", "rank"}
    lists = [answer["slot"], answer["rank"]] if is_dict else []
    if not is_dict or any(not isinstance(one, list) for one in lists):
        raise Mistake(
            "a dict with two lists, 'slot' and 'rank'",
            answer,
            "What does the table say that prepare returns?",
        )
    if any(len(one) != length for one in lists):
        raise Mistake(
            f"{length} entries in each list: {told}",
            answer,
            "Is there an entry for every row, or for every input?",
        )
    if not all(is_whole(slot, -1, NUM_SLOTS) for slot in lists[0]) or not all(
        is_whole(rank, -1, 1 << 20) for rank in lists[1]
    ):
        raise Mistake(
            f"slots from -1 to {NUM_SLOTS - 1} and ranks from -1 up",
            answer,
            "Which slots are there?",
        )
    return lists[0], lists[1]


def _question(slot: int, source: Source) -> str:
    if slot != source.batch % NUM_SLOTS:
        return "In which batch was that token sampled, and which slot does it have?"
    return "Which rows of that batch are sampled, and which of them is this one?"
