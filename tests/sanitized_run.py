"""The asynchronous engine under PyTorch's CUDA sanitizer, whole or without an edge.

    TORCH_CUDA_SANITIZER=1 python -m tests.sanitized_run [EDGE ...]

The sanitizer sees the operators of PyTorch with their streams and events. It does not
see a kernel that PyTorch does not launch as an operator (Triton's, or those inside a
CUDA graph), and nothing of what the host reads and writes. So the run is eager and in
float64, where attention is made of operators, and the edges it can miss are those that
only guard the host: d2h_done, slot_refill, block_lease.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch

from cbasync.config import EngineConfig
from cbasync.devices import CudaDevice
from cbasync.engine import AsyncEngine
from cbasync.model_runner import ModelRunner
from cbasync.random_models import tiny_model
from cbasync.sampling import SamplingParams


def run(edges: list[str]) -> dict[str, object]:
    """One workload with chunked prompts; what the sanitizer said about it."""
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=64,
        max_model_len=64,
        ablate=frozenset(edges),
        cuda_graphs=False,
    )
    model = torch.nn.Module.to(tiny_model(), "cuda")
    warnings.simplefilter("ignore")  # of the edges that are dropped on purpose
    engine = AsyncEngine(ModelRunner(model), config, CudaDevice())
    reports: list[str] = []
    try:
        for start in range(5):
            prompt = [(start + i) % 17 for i in range(3 + 5 * start)]
            engine.add_request(prompt, SamplingParams(max_tokens=12))
        engine.run()
        engine.device.synchronize()
    except Exception as error:
        if type(error).__name__ != "CUDASanitizerErrors":
            raise
        reports = [str(each) for each in error.errors]  # type: ignore[attr-defined]
    # What is in conflict; where the calls came from is told behind it.
    first = reports[0].partition("With stack trace")[0].splitlines() if reports else []
    return {"dropped": edges, "reports": len(reports), "first": first}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])), flush=True)
    os._exit(0)  # closing an engine that was stopped half-way would report again
