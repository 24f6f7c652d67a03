"""Streams as CUDA streams: the machine the design is for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from cbasync.devices.access import Access
from cbasync.devices.base import Device, Event, Stream
from cbasync.timeline import Span, Timeline

_MAX_DRAWS = 64  # PyTorch hands streams out from a pool of 32 a priority, in turn
_MIN_TIMED = 16  # pairs of timing events that wait before the oldest is read
_PINNED_TRIES = 5
_ANCHOR_MS = 500.0  # farther from its anchor a float32 time loses its microseconds


class CudaEvent(Event):
    """A CUDA event that lets the host sleep, not spin, while it waits."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, name)
        self.raw = torch.cuda.Event(blocking=True)

    def query(self) -> bool:
        return bool(self.raw.query())

    def _synchronize(self) -> None:
        self.raw.synchronize()


class CudaStream(Stream):
    """A CUDA stream of its own, never one that another stream of the device shares."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, name: str, raw: torch.cuda.Stream) -> None:
        super().__init__(device, name)
        self.raw = raw

    def _launch(self, op: Callable[[], None], access: Access) -> None:
        device = self.device
        # The stream by itself: torch.cuda.stream() would look its GPU up three times.
        with self.raw, torch.no_grad():
            if not device.record_timeline:
                op()
                return
            start, end = device.take_timer(), device.take_timer()
            start.record(self.raw)
            op()
            end.record(self.raw)
        device.timed.append((access, start, end))
        if len(device.timed) > _MIN_TIMED:
            device.read_timers(at_most=2)

    def _record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.raw.record(self.raw)

    def _wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)


def granted(allocate: Callable[[], Tensor]) -> Tensor:
    """Pinned memory, asked for again if it is refused for the moment.

    On virtual machines the driver now and then refuses it as an "invalid argument",
    though nothing is wrong with the call: the next one, or the one after, is granted.
    """
    for _ in range(_PINNED_TRIES - 1):
        try:
            return allocate()
        except RuntimeError as error:
            if "invalid argument" not in str(error):
                raise
    return allocate()


class CudaDevice(Device):
    """One GPU: streams with distinct handles, pinned host memory, timing by events.

    Spans are read back a few at a time, and only when they are long over, so that the
    loop itself never waits for a clock.

    Two options show what the machine does without its means: `one_stream` puts all ops
    on the default stream, `pinned=False` takes host memory that copies cannot read by
    themselves.
    """

    def __init__(
        self,
        *,
        index: int = 0,
        record_timeline: bool = True,
        one_stream: bool = False,
        pinned: bool = True,
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "device is 'cuda', this machine or this build of torch has none: "
                "use device='threads', or install a CUDA build of torch"
            )
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self.record_timeline = record_timeline
        self.one_stream = one_stream
        self.pinned = pinned
        self.timed: deque[tuple[Access, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare_timers: list[torch.cuda.Event] = []
        self._handles: set[int] = set()
        self._streams: list[CudaStream] = []
        # One moment on both clocks: host time 0 is where this event was passed.
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor_us = 0.0
        torch.cuda.synchronize(self.torch_device)
        self._anchor.record(torch.cuda.current_stream(self.torch_device))
        self._anchor.synchronize()
        self._epoch = time.perf_counter()

    @property
    def timeline(self) -> Timeline:
        self.read_timers()
        return self._timeline

    def stream(self, name: str) -> CudaStream:
        if self.one_stream:
            return CudaStream(self, name, torch.cuda.default_stream(self.torch_device))
        for _ in range(_MAX_DRAWS):
            raw = torch.cuda.Stream(self.torch_device)
            if raw.cuda_stream not in self._handles:
                break
        else:
            raise RuntimeError(
                f"{len(self._handles)} streams are in use and no other is left in "
                "PyTorch's pool: two of them would share a queue; close a device"
            )
        self._handles.add(raw.cuda_stream)
        stream = CudaStream(self, name, raw)
        self._streams.append(stream)
        return stream

    def event(self, name: str) -> CudaEvent:
        return CudaEvent(self, name)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return granted(
                lambda: torch.zeros(shape, dtype=dtype, pin_memory=self.pinned)
            )

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            buffer = torch.zeros(shape, dtype=dtype, device=self.torch_device)
        # The zeros are written on the default stream, which orders none of ours.
        torch.cuda.current_stream(self.torch_device).synchronize()
        return buffer

    def now_us(self) -> float:
        return (time.perf_counter() - self._epoch) * 1e6

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()
        self.read_timers()
        self._streams.clear()
        self._handles.clear()

    # ------------------------------------------------------------------ timing

    def take_timer(self) -> torch.cuda.Event:
        """A timing event, used again once its span has been read."""
        if self._spare_timers:
            return self._spare_timers.pop()
        return torch.cuda.Event(enable_timing=True)

    def read_timers(self, at_most: int | None = None) -> None:
        """Turn finished pairs of timing events into spans, the oldest first."""
        while self.timed and at_most != 0 and self.timed[0][2].query():
            access, start, end = self.timed.popleft()
            begin_us = self._anchor_us + self._anchor.elapsed_time(start) * 1e3
            length_ms = start.elapsed_time(end)
            self._timeline.add(
                Span(
                    access.phase,
                    access.phase,
                    access.batch,
                    access.slot,
                    begin_us,
                    begin_us + length_ms * 1e3,
                    access.work,
                )
            )
            self._spare_timers.append(end)
            if begin_us - self._anchor_us > _ANCHOR_MS * 1e3:
                start, self._anchor = self._anchor, start
                self._anchor_us = begin_us
            self._spare_timers.append(start)
            if at_most is not None:
                at_most -= 1
