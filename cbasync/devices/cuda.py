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
_MAX_TIMED = 4096  # pairs of timing events that may wait to be read


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
        with torch.cuda.stream(self.raw), torch.no_grad():
            if not device.record_timeline:
                op()
                return
            start, end = device.take_timer(), device.take_timer()
            start.record(self.raw)
            op()
            end.record(self.raw)
        device.timed.append((access, start, end))
        if len(device.timed) > _MAX_TIMED:
            device.read_timers()

    def _record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.raw.record(self.raw)

    def _wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)


class CudaDevice(Device):
    """One GPU: streams with distinct handles, pinned host memory, timing by events.

    Spans are read back only when somebody asks for the timeline or when many have
    gathered, so that the loop itself never waits for a clock.
    """

    def __init__(self, *, index: int = 0, record_timeline: bool = True) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "device is 'cuda', this machine or this build of torch has none: "
                "use device='threads', or install a CUDA build of torch"
            )
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self.record_timeline = record_timeline
        self.timed: deque[tuple[Access, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare_timers: list[torch.cuda.Event] = []
        self._handles: set[int] = set()
        self._streams: list[CudaStream] = []
        # One moment on both clocks: host time 0 is where this event was passed.
        self._zero = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.torch_device)
        self._zero.record(torch.cuda.current_stream(self.torch_device))
        self._zero.synchronize()
        self._epoch = time.perf_counter()

    @property
    def timeline(self) -> Timeline:
        self.read_timers()
        return self._timeline

    def stream(self, name: str) -> CudaStream:
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
            return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def device_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

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

    def read_timers(self) -> None:
        """Turn finished pairs of timing events into spans."""
        while self.timed and self.timed[0][2].query():
            access, start, end = self.timed.popleft()
            begin_us = self._zero.elapsed_time(start) * 1e3
            end_us = begin_us + start.elapsed_time(end) * 1e3
            self._timeline.add(
                Span(
                    access.phase,
                    access.phase,
                    access.batch,
                    access.slot,
                    begin_us,
                    end_us,
                    access.work,
                )
            )
            self._spare_timers += (start, end)
