"""Assignment 1: a block manager whose requests share, fork and copy on write."""


class BlockManager:
    """Hands out the blocks of a KV cache; knows names and numbers, never tensors."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All blocks are free: numbers 0 to num_blocks - 1, block_size tokens each."""
        raise NotImplementedError

    def admit(self, name: str, tokens: list[int]) -> dict[str, object] | None:
        """Take blocks for a new request; None, and no change, if they do not suffice.

        {"table": its blocks in order, "known": how many tokens at its beginning lie
        in shared blocks already}. The last token is never known.
        """
        raise NotImplementedError

    def append(self, name: str, token: int) -> dict[str, object] | None:
        """Make room for one more token; None, and no change, if there is no block.

        {"table": its blocks, "copy": [from, to] if a block has to be copied before
        the token is written, else []}.
        """
        raise NotImplementedError

    def fork(self, name: str, child: str) -> list[int]:
        """Start a child with the tokens and blocks of a request; return its table."""
        raise NotImplementedError

    def release(self, name: str) -> None:
        """End a request and take back what nobody else has."""
        raise NotImplementedError

    def num_free(self) -> int:
        """How many blocks no request has."""
        raise NotImplementedError
