"""The machines an engine runs on: one interface, several implementations."""

from __future__ import annotations

import torch

from cbasync.devices.access import Access, Observer, Resource
from cbasync.devices.base import Device, Event, Stream, StreamError
from cbasync.devices.cuda import CudaDevice
from cbasync.devices.sim import SimDevice
from cbasync.devices.threads import ThreadsDevice

__all__ = [
    "Access",
    "CudaDevice",
    "Device",
    "Event",
    "Observer",
    "Resource",
    "SimDevice",
    "Stream",
    "StreamError",
    "ThreadsDevice",
    "make_device",
]

DEVICES: dict[str, type[Device]] = {
    "threads": ThreadsDevice,
    "cuda": CudaDevice,
    "sim": SimDevice,
}


def make_device(name: str = "auto", **options: object) -> Device:
    """Build a device by name; `auto` takes the GPU when there is one.

    >>> make_device("tpu")
    Traceback (most recent call last):
    ...
    ValueError: device is 'tpu', the devices are auto, threads, cuda, sim: choose one
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "threads"
    if name not in DEVICES:
        raise ValueError(
            f"device is {name!r}, the devices are {', '.join(['auto', *DEVICES])}: "
            "choose one"
        )
    return DEVICES[name](**options)
