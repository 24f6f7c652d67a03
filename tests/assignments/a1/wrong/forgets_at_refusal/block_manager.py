"""A refusal empties the cache: what was released is not found again."""


class BlockManager:
    """Hands out the blocks of a KV cache; knows names and numbers, never tensors."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All blocks are free: numbers 0 to num_blocks - 1, block_size tokens each."""
        self.block_size = block_size
        self.pool = Pool(num_blocks)
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def admit(self, name: str, tokens: list[int]) -> dict[str, object] | None:
        """Take blocks for a new request; None, and no change, if they do not suffice.

        {"table": its blocks in order, "known": how many tokens at its beginning lie
        in shared blocks already}. The last token is never known.
        """
        size, pool = self.block_size, self.pool
        found = pool.find(tokens, size)
        missing = -(-len(tokens) // size) - len(found)
        if missing > len(pool.free) - sum(block in pool.free for block in found):
            pool.forget_the_free()
            return None
        for block in found:
            pool.own(block)
        table = found + [pool.take() for _ in range(missing)]
        for index in range(len(tokens) // size):
            pool.publish(table[index], tuple(tokens[: (index + 1) * size]))
        self.tables[name], self.tokens[name] = table, list(tokens)
        return {"table": list(table), "known": len(found) * size}

    def append(self, name: str, token: int) -> dict[str, object] | None:
        """Make room for one more token; None, and no change, if there is no block.

        {"table": its blocks, "copy": [from, to] if a block has to be copied before
        the token is written, else []}.
        """
        table, tokens, pool = self.tables[name], self.tokens[name], self.pool
        is_full = len(tokens) % self.block_size == 0
        is_shared = pool.num_owners[table[-1]] > 1
        if (is_full or is_shared) and not pool.free:
            return None
        copy = []
        if is_full:
            table.append(pool.take())
        elif is_shared:
            copy = [table[-1], pool.take()]
            pool.disown(table[-1])
            table[-1] = copy[1]
        tokens.append(token)
        if len(tokens) % self.block_size == 0:
            pool.publish(table[-1], tuple(tokens))
        return {"table": list(table), "copy": copy}

    def fork(self, name: str, child: str) -> list[int]:
        """Start a child with the tokens and blocks of a request; return its table."""
        self.tables[child] = list(self.tables[name])
        self.tokens[child] = list(self.tokens[name])
        for block in self.tables[child]:
            self.pool.own(block)
        return list(self.tables[child])

    def release(self, name: str) -> None:
        """End a request and take back what nobody else has."""
        self.tokens.pop(name)
        # From the end: the beginning of a prompt is what others are likely to ask for.
        for block in reversed(self.tables.pop(name)):
            self.pool.disown(block)

    def num_free(self) -> int:
        """How many blocks no request has."""
        return len(self.pool.free)


class Pool:
    """Who has how many shares of a block, and which beginning it ends."""

    def __init__(self, num_blocks: int) -> None:
        self.num_owners = [0] * num_blocks
        self.free = dict.fromkeys(range(num_blocks))  # unused for longest comes first
        self.block_of: dict[tuple[int, ...], int] = {}  # beginning -> its last block
        self.beginning_of: dict[int, tuple[int, ...]] = {}

    def own(self, block: int) -> None:
        """One owner more."""
        self.free.pop(block, None)
        self.num_owners[block] += 1

    def disown(self, block: int) -> None:
        """One owner less."""
        self.num_owners[block] -= 1
        if self.num_owners[block] == 0:
            self.free[block] = None

    def take(self) -> int:
        """A free block: one that nobody can find, or the one unused for longest."""
        unknown = (block for block in self.free if block not in self.beginning_of)
        block = next(unknown, None)
        if block is None:
            block = next(iter(self.free))
            del self.block_of[self.beginning_of.pop(block)]
        self.own(block)
        return block

    def publish(self, block: int, beginning: tuple[int, ...]) -> None:
        """Let a full block be found, unless another one holds the same."""
        if beginning not in self.block_of:
            self.block_of[beginning] = block
            self.beginning_of[block] = beginning

    def forget_the_free(self) -> None:
        """No free block can be found any more."""
        for block in self.free:
            if block in self.beginning_of:
                del self.block_of[self.beginning_of.pop(block)]

    def find(self, tokens: list[int], block_size: int) -> list[int]:
        """Blocks that hold the beginning of these tokens, never all of them."""
        found = []
        for stop in range(block_size, len(tokens), block_size):
            block = self.block_of.get(tuple(tokens[:stop]))
            if block is None:
                break
            found.append(block)
        return found
