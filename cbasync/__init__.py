"""cbasync: synchronous and asynchronous continuous batching, small and exact.

Letters for shapes, used in every comment: `R` requests in a batch, `T` tokens in a
batch, `S` sampled rows, `N` blocks in the cache, `P` tokens per block, `M` most blocks
of one request, `L` layers, `Hq` query heads, `H` KV heads, `D` head size, `V`
vocabulary.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbasync.config import EDGES, EngineConfig
    from cbasync.devices import make_device
    from cbasync.engine import AsyncEngine, SyncEngine
    from cbasync.llm import LLM
    from cbasync.model_runner import ModelRunner
    from cbasync.models import load_model
    from cbasync.request import Request, RequestOutput, RequestStatus
    from cbasync.runner import ScriptedRunner
    from cbasync.sampling import SamplingParams
    from cbasync.serving import EngineLoop
    from cbasync.timeline import Span, Timeline

__version__ = "0.1.0"

_HOMES = {
    "EDGES": "config",
    "LLM": "llm",
    "AsyncEngine": "engine",
    "EngineConfig": "config",
    "EngineLoop": "serving",
    "ModelRunner": "model_runner",
    "Request": "request",
    "RequestOutput": "request",
    "RequestStatus": "request",
    "SamplingParams": "sampling",
    "ScriptedRunner": "runner",
    "Span": "timeline",
    "SyncEngine": "engine",
    "Timeline": "timeline",
    "load_model": "models",
    "make_device": "devices",
}

__all__ = [
    "EDGES",
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "EngineLoop",
    "ModelRunner",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "ScriptedRunner",
    "Span",
    "SyncEngine",
    "Timeline",
    "load_model",
    "make_device",
]


def __getattr__(name: str) -> Any:
    """Load a name from its module when it is first used.

    Importing torch and transformers takes seconds; a help text needs neither.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
