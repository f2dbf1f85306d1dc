"""Optimizers and what they need: gradient norms, learning-rate schedules, parameter groups. What
training loops of one's own need is here; the files beside it hold the parts.
"""

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam

__all__ = ["FusedAdam", "HybridDeviceOptimizer", "OptimizerConfig"]
