"""The virtual machine by itself: times, engines, and the three orders of effects."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbasync.devices import Access, SimDevice
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.virtual import ORDERS, Order, Queue, VirtualMachine


class Cells:
    """Named values that ops copy about; a stand-in for memory."""

    def __init__(self, order: Order) -> None:
        self.machine = VirtualMachine(order)
        self.values: dict[str, str] = {}

    def put(self, queue: Queue, name: str, value: str, us: float, engine: str) -> None:
        def op() -> None:
            self.values[name] = value

        self.machine.launch(queue, op, engine, us, writes=[name])

    def copy(self, queue: Queue, source: str, target: str, us: float) -> None:
        def op() -> None:
            self.values[target] = self.values.get(source, "old")

        self.machine.launch(queue, op, queue.name, us, reads=[source], writes=[target])


def test_an_op_starts_when_stream_waits_engine_and_host_allow() -> None:
    machine = VirtualMachine()
    a, b = Queue("a"), Queue("b")
    first = machine.launch(a, lambda: None, "engine 1", 10.0)
    second = machine.launch(b, lambda: None, "engine 1", 5.0)
    assert (second.start_us, second.end_us) == (10.0, 15.0), "the engine was busy"
    machine.wait(b, first)
    machine.advance(30.0)
    third = machine.launch(b, lambda: None, "engine 2", 1.0)
    assert third.start_us == 30.0, "the host issued it late"
    slow = machine.launch(a, lambda: None, "engine 2", 100.0)
    machine.wait(b, slow)
    fourth = machine.launch(b, lambda: None, "engine 1", 1.0)
    assert fourth.start_us == slow.end_us == 131.0, "it waited for the event"


def test_the_host_waits_no_longer_than_it_has_to() -> None:
    machine = VirtualMachine()
    queue = Queue("a")
    node = machine.launch(queue, lambda: None, "a", 10.0)
    machine.advance(25.0)
    machine.synchronize(node)
    assert machine.now_us == 25.0
    machine.launch(queue, lambda: None, "a", 10.0)
    machine.drain()
    assert machine.now_us == 35.0


@pytest.mark.parametrize("order", ORDERS)
def test_with_an_edge_every_order_gives_the_same(order: Order) -> None:
    cells = Cells(order)
    a, b = Queue("a"), Queue("b")
    cells.put(a, "x", "new", us=10.0, engine="a")
    assert a.tail is not None
    cells.machine.wait(b, a.tail)
    cells.copy(b, "x", "y", us=1.0)
    assert b.tail is not None
    cells.machine.synchronize(b.tail)
    assert cells.values["y"] == "new"
    assert cells.machine.stale_reads == 0


@pytest.mark.parametrize(
    ("order", "starts_late", "seen"),
    [
        ("issue", False, "new"),
        ("durations", False, "old"),  # it starts before the value is there
        ("durations", True, "new"),  # these durations happen to give the right one
        ("worst", True, "old"),  # but no edge says so
    ],
)
def test_an_input_that_has_not_arrived(
    order: Order, starts_late: bool, seen: str
) -> None:
    cells = Cells(order)
    a, b = Queue("a"), Queue("b")
    cells.put(a, "x", "new", us=10.0, engine="a")
    cells.machine.advance(20.0 if starts_late else 1.0)
    cells.copy(b, "x", "y", us=50.0)
    assert b.tail is not None
    cells.machine.synchronize(b.tail)
    assert cells.values["y"] == seen
    assert cells.machine.stale_reads == (seen == "old" and order != "issue")


@pytest.mark.parametrize(
    ("order", "overwritten_after_us", "seen"),
    [
        ("issue", 1.0, "mine"),
        ("durations", 1.0, "next"),  # overwritten while it is read
        ("durations", 20.0, "mine"),  # the read was over
        ("worst", 20.0, "next"),
    ],
)
def test_an_input_that_is_overwritten_in_flight(
    order: Order, overwritten_after_us: float, seen: str
) -> None:
    cells = Cells(order)
    a, b = Queue("a"), Queue("b")
    cells.put(a, "x", "mine", us=0.0, engine="a")
    assert a.tail is not None
    cells.machine.wait(b, a.tail)
    cells.copy(b, "x", "y", us=10.0)
    cells.machine.advance(overwritten_after_us)
    cells.put(a, "x", "next", us=2.0, engine="a")
    assert b.tail is not None
    cells.machine.synchronize(b.tail)
    assert cells.values["y"] == seen


@pytest.mark.parametrize(
    ("order", "seen"), [("issue", "done"), ("durations", "old"), ("worst", "old")]
)
def test_a_host_read_before_the_copy_is_over(order: Order, seen: str) -> None:
    cells = Cells(order)
    queue = Queue("d2h")
    cells.put(queue, "x", "done", us=10.0, engine="d2h")
    cells.machine.advance(9.0)
    cells.machine.host_access([])
    assert cells.values.get("x", "old") == seen
    cells.machine.advance(1.0)
    cells.machine.host_access([])
    assert cells.values.get("x", "old") == ("old" if order == "worst" else "done")
    cells.machine.drain()
    assert cells.values["x"] == "done"


@pytest.mark.parametrize(("order", "seen"), [("durations", "b"), ("worst", "b")])
def test_a_host_write_under_a_copy(order: Order, seen: str) -> None:
    cells = Cells(order)
    queue = Queue("h2d")
    cells.machine.host_access(["x"])
    cells.values["x"] = "a"
    cells.copy(queue, "x", "y", us=10.0)
    cells.machine.advance(5.0)
    cells.machine.host_access(["x"])
    cells.values["x"] = "b"
    cells.machine.drain()
    assert cells.values["y"] == seen


def test_nobody_is_let_through_who_waits_for_the_one_that_holds_back() -> None:
    """The third op may not go before the first, whose stream it follows."""
    machine = VirtualMachine("worst")
    ran: list[int] = []
    h2d, compute = Queue("h2d"), Queue("compute")
    for number, (queue, reads, writes) in enumerate(
        [(h2d, "a", "b"), (compute, "c", "b"), (h2d, "b", "a")]
    ):
        machine.launch(
            queue, partial(ran.append, number), queue.name, 1.0, [reads], [writes]
        )
    machine.drain()
    assert ran == [1, 0, 2]


@given(st.data())
def test_in_any_order_each_op_runs_once_and_no_edge_is_broken(
    data: st.DataObject,
) -> None:
    machine = VirtualMachine(data.draw(st.sampled_from(ORDERS)))
    queues = [Queue(name) for name in "abc"]
    names = st.frozensets(st.sampled_from("xyz"), max_size=2)
    ran: list[int] = []
    before: list[tuple[int, int]] = []
    last: dict[str, int] = {}
    waited: dict[str, list[int]] = {queue.name: [] for queue in queues}
    for number in range(data.draw(st.integers(1, 9))):
        queue = data.draw(st.sampled_from(queues))
        other = data.draw(st.sampled_from(queues))
        if other is not queue and other.tail is not None:
            machine.wait(queue, other.tail)
            waited[queue.name].append(last[other.name])
        edges = [
            *waited[queue.name],
            *([last[queue.name]] if queue.name in last else []),
        ]
        before += [(first, number) for first in edges]
        last[queue.name] = number
        machine.launch(
            queue,
            partial(ran.append, number),
            queue.name,
            data.draw(st.sampled_from([1.0, 3.0])),
            data.draw(names),
            data.draw(names),
        )
    machine.drain()
    assert sorted(ran) == list(range(number + 1))
    assert all(ran.index(first) < ran.index(second) for first, second in before)


def test_the_worst_order_obeys_chains_of_edges() -> None:
    """Not only direct waits: a, then b, then c, each through an event."""
    cells = Cells("worst")
    a, b, c = Queue("a"), Queue("b"), Queue("c")
    cells.put(a, "x", "right", us=5.0, engine="a")
    assert a.tail is not None
    cells.machine.wait(b, a.tail)
    cells.copy(b, "unrelated", "z", us=1.0)
    assert b.tail is not None
    cells.machine.wait(c, b.tail)
    cells.copy(c, "x", "y", us=1.0)
    assert c.tail is not None
    cells.machine.synchronize(c.tail)
    assert cells.values["y"] == "right"


def test_an_unknown_order() -> None:
    with pytest.raises(ValueError, match="order is 'best', the orders are issue"):
        VirtualMachine("best")  # type: ignore[arg-type]


# ------------------------------------------------------------------ default stream


def starts(blocking: bool) -> list[float]:
    """Start times: pool stream, default stream, pool stream again."""
    costs = CostModel(
        "lab", h2d=PhaseCost(10.0), compute=PhaseCost(10.0), d2h=PhaseCost(10.0)
    )
    device = SimDevice(costs=costs)
    stream, default = device.stream("s", blocking=blocking), device.default_stream()
    stream.launch(lambda: None, Access("h2d"))
    default.launch(lambda: None, Access("compute"))
    stream.launch(lambda: None, Access("d2h"))
    assert device.now_us() == 0.0, "no launch holds the host up"
    return [span.start_us for span in device.timeline.spans]


def test_streams_from_the_pool_do_not_heed_the_default_stream() -> None:
    assert starts(blocking=False) == [0.0, 0.0, 10.0]


def test_blocking_streams_and_the_default_stream_take_turns() -> None:
    assert starts(blocking=True) == [0.0, 10.0, 20.0]


def test_the_core_imports_the_standard_library_only() -> None:
    root = Path(__file__).parents[1]
    code = (
        "import sys, types, pathlib\n"
        f"root = pathlib.Path({str(root)!r})\n"
        "for name, path in [('cbasync', root / 'cbasync'),\n"
        "                   ('cbasync.devices', root / 'cbasync' / 'devices')]:\n"
        "    package = types.ModuleType(name); package.__path__ = [str(path)]\n"
        "    sys.modules[name] = package\n"
        "import cbasync.devices.virtual, cbasync.devices.races, cbasync.devices.costs\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy'}))\n"
    )
    # -S leaves site-packages out: an import from there would fail.
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert (run.stdout.strip(), run.stderr) == ("[]", "")
