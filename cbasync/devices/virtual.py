"""A machine on a virtual clock: queues, engines, and when each op takes effect.

Nothing here looks at a real clock, and nothing but the standard library is imported.
Times are computed when an op is issued, since its length is known then: it starts when
the op before it in its stream is over, its waits are over, its engine is free, and the
host has issued it.

*When* an op runs on the virtual clock and *what* it sees are two questions. For a
program without races the second has one answer. For a program with a race it depends
on the order, so the order is a setting:

- `issue`: every op takes effect when it is issued. This is what the program *means*.
- `durations`: what these durations would really give. An op whose input has not arrived
  sees the old value, one whose input is overwritten while it runs sees the new one.
- `worst`: of all orders that the events allow, one that is wrong wherever one can be.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from cbasync.devices.access import Resource

Order = Literal["issue", "durations", "worst"]
ORDERS: tuple[Order, ...] = ("issue", "durations", "worst")


class Node:
    """A point in a stream: an op with an effect, or a wait without one."""

    __slots__ = (
        "done", "end_us", "expected", "number", "op", "preds", "reads", "start_us",
        "writes",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        op: Callable[[], None] | None,
        preds: list[Node],
        reads: frozenset[Resource],
        writes: frozenset[Resource],
    ) -> None:
        self.number = number
        self.op = op
        self.preds = preds
        self.reads = reads
        self.writes = writes
        self.start_us = self.end_us = 0.0
        self.done = False
        self.expected: dict[Resource, object] = {}


class Queue:
    """One stream: its last node, and whether it heeds the default stream."""

    def __init__(self, name: str, *, blocking: bool = False) -> None:
        self.name = name
        self.blocking = blocking
        self.tail: Node | None = None


class VirtualMachine:
    """The host's clock, the engines' clocks, and the order of effects.

    Two ops on one stream and a host that waits for the second:

    >>> machine = VirtualMachine()
    >>> queue, log = Queue("compute"), []
    >>> _ = machine.launch(queue, lambda: log.append("a"), "compute", duration_us=5.0)
    >>> _ = machine.launch(queue, lambda: log.append("b"), "compute", duration_us=5.0)
    >>> machine.now_us, log
    (0.0, [])
    >>> machine.synchronize(queue.tail)
    >>> machine.now_us, log
    (10.0, ['a', 'b'])
    """

    def __init__(self, order: Order = "durations") -> None:
        if order not in ORDERS:
            raise ValueError(
                f"order is {order!r}, the orders are {', '.join(ORDERS)}: "
                "choose one of them"
            )
        self.order = order
        self.now_us = 0.0
        self.stale_reads = 0  # ops that saw another value than the program means
        self._engine_free_us: dict[str, float] = {}
        self._count = 0
        self._moments: list[tuple[float, int, int, Node]] = []  # durations
        self._pending: deque[Node] = deque()  # worst
        self._issued: dict[Resource, object] = {}  # newest writer in program order
        self._current: dict[Resource, object] = {}  # newest writer in effect

    @property
    def tracks(self) -> bool:
        """Whether reads and writes matter: not when ops take effect at once."""
        return self.order != "issue"

    # ------------------------------------------------------------------ streams

    def launch(
        self,
        queue: Queue,
        op: Callable[[], None],
        engine: str,
        duration_us: float,
        reads: Iterable[Resource] = (),
        writes: Iterable[Resource] = (),
        after: Iterable[Node] = (),
    ) -> Node:
        """Issue an op now; `after` are nodes of other streams that come before it."""
        node = self._node(queue, op, after, frozenset(reads), frozenset(writes))
        ready_us = max((pred.end_us for pred in node.preds), default=0.0)
        free_us = self._engine_free_us.get(engine, 0.0)
        node.start_us = max(self.now_us, ready_us, free_us)
        node.end_us = node.start_us + duration_us
        self._engine_free_us[engine] = node.end_us
        if self.tracks:
            node.expected = {r: self._issued.get(r) for r in node.reads}
            self._issued.update(dict.fromkeys(node.writes, node))
        self._schedule(node)
        return node

    def wait(self, queue: Queue, node: Node) -> None:
        """Let whatever comes next in the queue come after `node`."""
        waiting = self._node(queue, None, [node], frozenset(), frozenset())
        waiting.start_us = waiting.end_us = max(p.end_us for p in waiting.preds)
        if self.order != "worst":
            waiting.preds = []  # only times are needed from here on
            waiting.done = True

    def _node(
        self,
        queue: Queue,
        op: Callable[[], None] | None,
        after: Iterable[Node],
        reads: frozenset[Resource],
        writes: frozenset[Resource],
    ) -> Node:
        preds = [*after] if queue.tail is None else [queue.tail, *after]
        self._count += 1
        queue.tail = node = Node(self._count, op, preds, reads, writes)
        return node

    # ------------------------------------------------------------------ the host

    def advance(self, duration_us: float) -> None:
        """Let the host be busy for a while."""
        self.now_us += duration_us

    def synchronize(self, node: Node) -> None:
        """Let the host wait for a node, and see what it and all before it have done."""
        self.now_us = max(self.now_us, node.end_us)
        if self.order == "worst":
            self._demand(node)
        self._settle()

    def host_access(self, writes: Iterable[Resource]) -> None:
        """The host is about to touch its buffers: apply what is over by now."""
        self._settle()
        if self.tracks:
            token = object()
            for resource in writes:
                self._issued[resource] = self._current[resource] = token

    def drain(self) -> None:
        """Let everything that was issued take effect, and the host wait for it."""
        self.now_us = max(self.now_us, *self._engine_free_us.values(), 0.0)
        for node in list(self._pending):
            self._demand(node)
        self._settle()

    # ------------------------------------------------------------------ effects

    def _schedule(self, node: Node) -> None:
        if self.order == "issue":
            self._take_effect(node)
        elif self.order == "durations":
            # At equal times what ends comes before what starts.
            heapq.heappush(self._moments, (node.start_us, 1, node.number, node))
            heapq.heappush(self._moments, (node.end_us, 0, node.number, node))
        else:
            self._pending.append(node)

    def _settle(self) -> None:
        """Apply, in the order of time, all that has happened up to now."""
        while self._pending and self._pending[0].done:
            self._pending.popleft()
        while self._moments and self._moments[0][0] <= self.now_us:
            _, starts, _, node = heapq.heappop(self._moments)
            # An op whose inputs are right when it starts takes effect when it ends, so
            # that it sees what overwrites them meanwhile; any other sees them as they
            # are at its start, so that it does not profit from what arrives later.
            if not node.done and (not starts or self._is_stale(node)):
                self._take_effect(node)

    def _is_stale(self, node: Node) -> bool:
        return any(self._current.get(r) is not w for r, w in node.expected.items())

    def _take_effect(self, node: Node) -> None:
        if node.op is not None:
            if self.tracks:
                self.stale_reads += self._is_stale(node)
                self._current.update(dict.fromkeys(node.writes, node))
            node.op()
        node.done = True
        node.preds = []
        node.expected = {}

    # ------------------------------------------------------------------ worst order

    def _demand(self, node: Node, held: tuple[Node, ...] = ()) -> None:
        """Make a node take effect, as late as allowed: what may go before it goes.

        An op issued later that conflicts with this one, and that no chain of streams
        and events holds back, is let through first.
        """
        if node.done:
            return
        held = (*held, node)
        for pred in node.preds:
            self._demand(pred, held)
        for other in list(self._pending):
            if (
                not other.done
                and other.number > node.number
                and _conflict(node, other)
                # Nor may it be one that has to wait for whoever lets this one through.
                and not any(_comes_before(each, other) for each in held)
            ):
                self._demand(other, held)
        self._take_effect(node)


def _conflict(a: Node, b: Node) -> bool:
    return not (
        a.writes.isdisjoint(b.reads)
        and a.reads.isdisjoint(b.writes)
        and a.writes.isdisjoint(b.writes)
    )


def _comes_before(first: Node, second: Node) -> bool:
    """Whether streams and events order `first` before `second`."""
    stack, seen = [second], set()
    while stack:
        node = stack.pop()
        if node is first:
            return True
        if node.number not in seen and not node.done:
            seen.add(node.number)
            stack.extend(node.preds)
    return False
