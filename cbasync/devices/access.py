"""What an op or a host phase touches, said by name; standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from cbasync.trace import NO_WORK, Work

Resource = str
"""What is read or written: `slot A host_input_ids`, `block 7`, `token row 3`."""


class Access(NamedTuple):
    """What one op or one host phase touches, and on whose behalf.

    `reads` and `writes` are only called when somebody watches: naming every KV block
    of a batch costs more than scheduling it.
    """

    phase: str
    batch: int = -1
    slot: int = -1
    reads: Callable[[], Iterable[Resource]] = tuple
    writes: Callable[[], Iterable[Resource]] = tuple
    work: Work = NO_WORK

    def __str__(self) -> str:
        slot = f" (slot {'ABCD'[self.slot]})" if self.slot >= 0 else ""
        return f"{self.phase} of batch {self.batch}{slot}"


class Observer(Protocol):
    """Sees every call of the device interface, in the order the host makes them.

    Streams are told apart by name, events by identity.
    """

    def on_launch(self, stream: str, access: Access) -> None:
        """An op was put in a stream's queue."""

    def on_record(self, stream: str, event: object) -> None:
        """An event was recorded in a stream."""

    def on_wait(self, stream: str, event: object) -> None:
        """A stream was told to wait for an event."""

    def on_synchronize(self, event: object) -> None:
        """The host waited for an event."""

    def on_host(self, access: Access) -> None:
        """The host is about to work on its own buffers."""
