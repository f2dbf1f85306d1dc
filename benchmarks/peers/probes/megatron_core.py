"""Builds Megatron-LM's offloaded optimizer; run by the interpreter of its environment."""

import torch

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

HybridDeviceOptimizer(
    [torch.nn.Parameter(torch.ones(8192))],
    offload_fraction=1.0,
    cpu_optimizer_cls=torch.optim.AdamW,
    gpu_optimizer_cls=torch.optim.AdamW,
)
