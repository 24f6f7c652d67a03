"""cbasync: synchronous and asynchronous continuous batching, small and exact.

Letters for shapes, used in every comment: `R` requests in a batch, `T` tokens in a
batch, `S` sampled rows, `N` blocks in the cache, `P` tokens per block, `M` most blocks
of one request, `L` layers, `Hq` query heads, `H` KV heads, `D` head size, `V`
vocabulary.
"""

from cbasync.config import EDGES, EngineConfig
from cbasync.devices import make_device
from cbasync.engine import AsyncEngine, SyncEngine
from cbasync.llm import LLM
from cbasync.model_runner import ModelRunner, ScriptedRunner
from cbasync.models import load_model
from cbasync.request import Request, RequestOutput, RequestStatus
from cbasync.sampling import SamplingParams
from cbasync.timeline import Span, Timeline

__all__ = [
    "EDGES",
    "LLM",
    "AsyncEngine",
    "EngineConfig",
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
__version__ = "0.1.0"
