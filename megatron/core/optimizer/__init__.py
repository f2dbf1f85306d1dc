"""Optimizers, update rules, gradient norms, learning-rate schedules and parameter groups.

Exports the names that users' training loops need.
"""

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import SGD, Adam, Lion, UpdateRule

__all__ = [
    "SGD",
    "Adam",
    "FusedAdam",
    "HybridDeviceOptimizer",
    "Lion",
    "OptimizerConfig",
    "RuleOptimizer",
    "UpdateRule",
]
