"""The same event scripts on every device: all of them must agree with CUDA."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from cbasync.devices import (
    Access,
    CudaDevice,
    Device,
    SimDevice,
    StreamError,
    ThreadsDevice,
    make_device,
)
from cbasync.devices.costs import CostModel, PhaseCost

QUICK = PhaseCost(10.0)


class Lab:
    """A device with two cells of memory, X and Y, and ops on them.

    `slow` is an op that is certainly not over before `release()`: a gate on threads, a
    long time on the virtual clock, a busy kernel on CUDA.
    """

    def __init__(self, name: str) -> None:
        self._gate = threading.Event()
        if name == "sim":
            costs = CostModel("lab", h2d=QUICK, compute=PhaseCost(1000.0), d2h=QUICK)
            self.device: Device = SimDevice(costs=costs)
        else:
            self.device = ThreadsDevice() if name == "threads" else CudaDevice()
        self.name = name
        self.x = self.device.device_buffer((1,), torch.int64)
        self.y = self.device.device_buffer((1,), torch.int64)
        self.a, self.b, self.c = (self.device.stream(letter) for letter in "abc")

    def slow(self, stream: object) -> None:
        ops: dict[str, Callable[[], object]] = {
            "threads": self._gate.wait,
            "sim": lambda: None,
            "cuda": lambda: torch.cuda._sleep(500_000_000),
        }
        op = ops[self.name]
        stream.launch(lambda: (op(), None)[1], Access("compute"))  # type: ignore[attr-defined]

    def write_x(self, stream: object, value: int) -> None:
        access = Access("h2d", writes=lambda: ["x"])
        stream.launch(lambda: self.x.fill_(value), access)  # type: ignore[attr-defined]

    def read_x(self, stream: object) -> None:
        """Copy X to Y."""
        access = Access("d2h", reads=lambda: ["x"], writes=lambda: ["y"])
        stream.launch(lambda: self.y.copy_(self.x), access)  # type: ignore[attr-defined]

    def finished(self, stream: object) -> None:
        """The host waits for what is in the stream now."""
        event = self.device.event("finished")
        stream.record(event)  # type: ignore[attr-defined]
        event.synchronize()

    def release(self) -> None:
        self._gate.set()


@pytest.fixture(params=["threads", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(request.param)
    yield lab
    lab.release()
    lab.device.synchronize()
    lab.device.close()


def test_a_wait_makes_the_stream_wait_and_not_the_host(lab: Lab) -> None:
    event = lab.device.event("e")
    lab.slow(lab.a)
    lab.write_x(lab.a, 1)
    lab.a.record(event)
    lab.b.wait(event)
    lab.read_x(lab.b)
    assert not event.query()
    lab.release()
    lab.finished(lab.b)
    assert event.query()
    assert lab.y.item() == 1


def test_a_wait_before_the_record_orders_nothing(lab: Lab) -> None:
    event = lab.device.event("e")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab.b.wait(event)
    assert len(caught) == (lab.name == "sim"), "only the virtual device can tell"
    lab.slow(lab.a)
    lab.write_x(lab.a, 1)
    lab.a.record(event)
    lab.read_x(lab.b)
    lab.finished(lab.b)
    assert lab.y.item() == 0
    lab.release()


def test_recording_again_replaces(lab: Lab) -> None:
    event = lab.device.event("e")
    lab.write_x(lab.a, 1)
    lab.a.record(event)
    lab.slow(lab.a)
    lab.write_x(lab.a, 2)
    lab.a.record(event)
    lab.b.wait(event)
    lab.read_x(lab.b)
    assert not event.query()
    lab.release()
    lab.finished(lab.b)
    assert lab.y.item() == 2


def test_a_wait_keeps_to_the_record_it_was_issued_on(lab: Lab) -> None:
    event = lab.device.event("e")
    lab.write_x(lab.a, 1)
    lab.a.record(event)
    lab.b.wait(event)
    lab.slow(lab.a)
    lab.write_x(lab.a, 2)
    lab.a.record(event)
    lab.read_x(lab.b)
    lab.finished(lab.b)
    assert lab.y.item() == 1
    lab.release()
    event.synchronize()
    assert lab.x.item() == 2


def test_one_event_on_two_streams_stands_for_the_last(lab: Lab) -> None:
    event = lab.device.event("e")
    lab.slow(lab.a)
    lab.write_x(lab.a, 1)
    lab.a.record(event)
    lab.c.record(event)
    lab.b.wait(event)
    lab.read_x(lab.b)
    lab.finished(lab.b)
    assert lab.y.item() == 0
    lab.release()


def test_a_fresh_event_is_over(lab: Lab) -> None:
    event = lab.device.event("e")
    assert event.query()
    event.synchronize()


def test_a_stream_is_first_in_first_out(lab: Lab) -> None:
    for value in range(20):
        lab.write_x(lab.a, value)
        lab.read_x(lab.a)
    lab.finished(lab.a)
    assert lab.y.item() == 19


def test_a_dropped_edge_is_no_wait_at_all(lab: Lab) -> None:
    event = lab.device.event("e")
    lab.device.ablate = frozenset({"e"})
    lab.slow(lab.a)
    lab.write_x(lab.a, 1)
    lab.a.record(event)
    lab.b.wait(event)
    lab.read_x(lab.b)
    event.synchronize()  # returns at once: the edge is dropped for the host as well
    lab.finished(lab.b)
    assert lab.y.item() == 0
    lab.release()


def test_host_and_device_buffers_never_share_memory(lab: Lab) -> None:
    host = lab.device.host_buffer((4,), torch.int32)
    device = lab.device.device_buffer((4,), torch.int32)
    assert host.data_ptr() != device.data_ptr()
    assert host.device.type == "cpu"
    device.copy_(host)
    host.fill_(7)
    assert device.tolist() == [0, 0, 0, 0]


def test_after_an_error_nothing_else_runs_on_threads() -> None:
    device = ThreadsDevice()
    stream, other = device.stream("a"), device.stream("b")
    ran: list[str] = []

    def fail() -> None:
        raise KeyError("planted")

    stream.launch(fail, Access("compute", batch=3))
    with pytest.raises(StreamError, match="compute of batch 3 failed on the a stream"):
        device.synchronize()
    other.launch(lambda: ran.append("later"), Access("d2h"))
    with pytest.raises(StreamError):
        device.synchronize()
    assert ran == []
    device.close()


def test_devices_by_name() -> None:
    with make_device("threads") as device:
        assert isinstance(device, ThreadsDevice)
    assert isinstance(make_device("sim", order="issue"), SimDevice)
    with pytest.raises(ValueError, match="device is 'abacus', the devices are auto"):
        make_device("abacus")


@pytest.mark.timeout(20)
def test_a_closed_stream_takes_no_more_work() -> None:
    device = ThreadsDevice()
    stream, event = device.stream("compute"), device.event("done")
    device.close()
    for late in (
        lambda: stream.launch(lambda: None, Access("compute")),
        lambda: stream.record(event),
    ):
        with pytest.raises(StreamError, match="compute stream is closed: make a new"):
            late()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="use device='threads'"):
        make_device("cuda")


@pytest.mark.gpu
def test_streams_have_handles_of_their_own_after_many_engines() -> None:
    for _ in range(40):
        device = CudaDevice()
        streams = [device.stream(name) for name in ("h2d", "compute", "d2h")]
        assert len({stream.raw.cuda_stream for stream in streams}) == 3
        assert torch.cuda.default_stream().cuda_stream not in {
            stream.raw.cuda_stream for stream in streams
        }
        device.close()


@pytest.mark.gpu
def test_a_launch_uses_its_own_stream_from_any_thread() -> None:
    device = CudaDevice()
    stream, seen = device.stream("compute"), []

    def launch() -> None:
        op = lambda: seen.append(torch.cuda.current_stream().cuda_stream)  # noqa: E731
        stream.launch(op, Access("compute"))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    launch()
    assert seen == [stream.raw.cuda_stream] * 2
    device.close()
