"""How many KV blocks fit into a device's memory."""

from __future__ import annotations

import torch

from cbasync.config import EngineConfig
from cbasync.devices.base import Device

_KEPT_SHARE = 0.1  # of the whole memory: for activations, graphs and others' needs


def num_blocks_that_fit(config: EngineConfig, device: Device, block_bytes: int) -> int:
    """Blocks for every request at its longest, or as many of them as memory holds."""
    wanted = config.max_num_seqs * config.max_blocks_per_request
    if device.torch_device.type != "cuda":
        return wanted
    torch.cuda.empty_cache()  # what PyTorch only keeps in reserve is free, too
    free, total = torch.cuda.mem_get_info(device.torch_device)
    usable = free - int(_KEPT_SHARE * total)
    # One block more than those handed out: padding rows write there.
    fitting = usable // block_bytes - 1
    if fitting < config.max_blocks_per_request:
        needed = (config.max_blocks_per_request + 1) * block_bytes
        raise ValueError(
            f"one request of max_model_len {config.max_model_len} needs {needed:,} "
            f"bytes of KV cache, {device.torch_device} has {free:,} free and keeps a "
            f"tenth of {total:,}: lower max_model_len or use a smaller model"
        )
    return int(min(wanted, fitting))
