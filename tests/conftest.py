"""Shared by all tests: one torch thread, hypothesis profiles, devices, models."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import LlamaForCausalLM

from cbasync.devices import Device, SimDevice, make_device
from cbasync.mutants import EVEN_COSTS
from cbasync.random_models import tiny_model

torch.set_num_threads(1)

_common = settings(
    deadline=None,  # a busy machine is not a failure
    derandomize=True,  # the same examples on every run
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.register_profile("default", _common, max_examples=30)
settings.register_profile("long", _common, max_examples=1000)
settings.load_profile(os.environ.get("CBASYNC_PROFILE", "default"))

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU skip themselves elsewhere."""
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Machine:
    """A kind of device with a model on it: what every engine test runs on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = tiny_model()
        if name == "cuda":
            self.model.to("cuda")  # type: ignore[arg-type]

    def new_device(self) -> Device:
        """A fresh device of this kind."""
        if self.name == "sim":
            # The wrongest order that the events allow: what is right here is right
            # on any machine.
            return SimDevice(costs=EVEN_COSTS, order="worst")
        return make_device(self.name)


@pytest.fixture(
    scope="session",
    params=["threads", "sim", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def machine(request: pytest.FixtureRequest) -> Machine:
    """Two layers, float64, vocabulary 17: small, and it really reads its cache."""
    return Machine(request.param)


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    """The same model by itself, on the CPU."""
    return tiny_model()
