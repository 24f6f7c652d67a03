"""A cache beside a block manager: who has which block, and what is written in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbasync.checks.workload import Mistake, is_whole
from cbasync.kv_cache import blocks_for


class Cache:
    """Who has which block, and what is written in it: what the manager should know.

    What is written at a place stands for the token and for all before it, as keys and
    values do: it is the tuple of them.

    >>> cache = Cache(num_blocks=2, block_size=4)
    >>> cache.admitted("a", [5, 6], {"table": [1], "known": 0})
    >>> cache.cells[1]
    [(5,), (5, 6), (), ()]
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cells: list[list[tuple[int, ...]]] = [
            [()] * block_size for _ in range(num_blocks)
        ]
        # Blocks that were filled when another one held the same already.
        self.doubles: set[int] = set()
        # Tokens of admitted prompts, how many were known, how many had an owner then.
        self.num_tokens = self.num_hits = self.num_owned = 0

    # ------------------------------------------------------------------ what is so

    def owners(self, block: int) -> list[str]:
        """The requests that have a block."""
        return [name for name, table in self.tables.items() if block in table]

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        owned = {block for table in self.tables.values() for block in table}
        return self.num_blocks - len(owned)

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that did not have to be computed."""
        return self.num_hits / max(1, self.num_tokens)

    def owned_beginning(self, tokens: Sequence[int]) -> int:
        """Full blocks of these tokens that somebody has, never all of the tokens.

        Doubles do not count: a manager may know the first block that holds something,
        and no other one.
        """
        blocks = {block for table in self.tables.values() for block in table}
        owned = {tuple(self.cells[block]) for block in blocks - self.doubles}
        size, count = self.block_size, 0
        while (count + 1) * size < len(tokens):
            if self._names(tokens, count * size, (count + 1) * size) not in owned:
                break
            count += 1
        return count

    @staticmethod
    def _names(
        tokens: Sequence[int], start: int, stop: int
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tokens[: place + 1]) for place in range(start, stop))

    # ------------------------------------------------------------------ what is said

    def admitted(self, name: str, tokens: list[int], answer: Any) -> None:
        """Check the answer to `admit`, then write the tokens that are not known."""
        size = self.block_size
        _keys(answer, "table", "known")
        table = self._table(answer["table"], blocks_for(len(tokens), size))
        known = answer["known"]
        if not is_whole(known, 0, len(tokens)) or known % size:
            raise Mistake(
                f"known is 0, {size}, {2 * size} ... and below {len(tokens)}",
                answer,
                "Which tokens lie in full blocks, and who computes the last one?",
            )
        owned = self.owned_beginning(tokens) * size
        for index, block in enumerate(table):
            if index * size < known:
                self._check_known(tokens, index, block)
            else:
                self._check_nobody_has(block, "a new block belongs to nobody else")
                self.cells[block] = [()] * size
        self.tables[name], self.tokens[name] = table, list(tokens)
        self._write(name, known)
        self.num_hits += known
        self.num_owned += owned
        self.num_tokens += len(tokens)

    def appended(self, name: str, token: int, answer: Any) -> None:
        """Check the answer to `append`, copy what it copies, write the token."""
        table, place = self.tables[name], len(self.tokens[name])
        _keys(answer, "table", "copy")
        new = self._table(answer["table"], place // self.block_size + 1)
        last = table[-1]
        if place % self.block_size == 0:
            self._check_append(answer, new, [*table, new[-1]], [])
            self._check_nobody_has(new[-1], "a new block belongs to nobody else")
            self.cells[new[-1]] = [()] * self.block_size
        elif self.owners(last) == [name]:
            self._check_append(answer, new, table, [])
        else:
            self._check_copy(name, answer, new)
            self.cells[new[-1]] = list(self.cells[last])
        self.tables[name] = new
        self.tokens[name].append(token)
        self._write(name, place)

    def forked(self, name: str, child: str, answer: Any) -> None:
        """Check the answer to `fork`: the same blocks."""
        if answer != self.tables[name]:
            raise Mistake(
                f"the table of {name!r}, {self.tables[name]}",
                answer,
                "Which tokens does a child have that its parent has not?",
            )
        self.tables[child] = list(self.tables[name])
        self.tokens[child] = list(self.tokens[name])

    def released(self, name: str) -> None:
        """Forget a request; what it wrote stays until somebody writes over it."""
        del self.tables[name], self.tokens[name]

    # ------------------------------------------------------------------ small checks

    def _table(self, table: Any, length: int) -> list[int]:
        is_list = isinstance(table, list) and len(table) == length
        if not is_list or not all(is_whole(b, 0, self.num_blocks) for b in table):
            raise Mistake(
                f"a table of {blocks_told(length)}, from 0 to {self.num_blocks - 1}",
                table,
                f"How many blocks of {self.block_size} do these tokens need?",
            )
        if len(set(table)) < length:
            raise Mistake(
                "a table that names no block twice",
                table,
                "Can one block hold two pieces of a request?",
            )
        return list(table)

    def _check_known(self, tokens: Sequence[int], index: int, block: int) -> None:
        start = index * self.block_size
        names = self._names(tokens, start, start + self.block_size)
        if tuple(self.cells[block]) != names:
            raise Mistake(
                f"a known block {block} that holds {list(tokens[start:][:4])} "
                f"after {list(tokens[:start])}",
                f"in block {block}: {_told(self.cells[block])}",
                "What does a key depend on, besides the tokens of its own block?",
            )

    def _check_nobody_has(self, block: int, expected: str) -> None:
        if owners := self.owners(block):
            raise Mistake(
                expected,
                f"block {block}, which {' and '.join(map(repr, owners))} still "
                f"{'has' if len(owners) == 1 else 'have'}",
                "Who must have let go of a block before it is handed out?",
            )

    def _check_append(
        self, answer: Any, new: list[int], table: list[int], copy: list[int]
    ) -> None:
        if new != table or answer["copy"] != copy:
            raise Mistake(
                f"table {table}, copy {copy}",
                answer,
                "Is the last block full, and does anybody else have it?",
            )

    def _check_copy(self, name: str, answer: Any, new: list[int]) -> None:
        last = self.tables[name][-1]
        if new[-1] == last:
            raise Mistake(
                f"a copy of block {last}, for "
                f"{[n for n in self.owners(last) if n != name]} has it too",
                answer,
                "Who else reads the block that is written now?",
            )
        self._check_append(
            answer, new, [*self.tables[name][:-1], new[-1]], [last, new[-1]]
        )
        self._check_nobody_has(new[-1], "a copy goes to a block that nobody has")

    def _write(self, name: str, start: int) -> None:
        tokens, table, size = self.tokens[name], self.tables[name], self.block_size
        for place in range(start, len(tokens)):
            block = table[place // size]
            self.cells[block][place % size] = tuple(tokens[: place + 1])
            if (place + 1) % size == 0:
                self.doubles.discard(block)
                if self.cells.count(self.cells[block]) > 1:
                    self.doubles.add(block)


def blocks_told(count: int) -> str:
    """A number of blocks, in words.

    >>> blocks_told(1), blocks_told(2)
    ('1 block', '2 blocks')
    """
    return f"{count} block{'s' if count != 1 else ''}"


def _keys(answer: Any, *keys: str) -> None:
    if not isinstance(answer, dict) or set(answer) != set(keys):
        raise Mistake(
            f"a dict with {' and '.join(map(repr, keys))}",
            answer,
            "What does the first cell say that this method returns?",
        )


def _told(cells: Sequence[tuple[int, ...]]) -> str:
    """What lies in a block, in words.

    >>> _told([(1, 2), (1, 2, 3), ()])
    '[2, 3, nothing] after [1]'
    """
    tokens = ", ".join(str(cell[-1]) if cell else "nothing" for cell in cells)
    return f"[{tokens}] after {list(cells[0][:-1])}"
