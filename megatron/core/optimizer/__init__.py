"""Optimizers, gradient norms, learning-rate schedules and parameter groups.

Exports the names that users' training loops need.
"""

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam

__all__ = ["FusedAdam", "HybridDeviceOptimizer", "OptimizerConfig"]
