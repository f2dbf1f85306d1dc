"""Optimizers, update rules, gradient norms, learning-rate schedules and parameter groups.

Exports the names that users' training loops need. The optimizers are imported at their first use:
flags are generated from config.py and lr_schedule.py, and `--help` must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megatron.core.optimizer.config import OptimizerConfig

if TYPE_CHECKING:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.fused_adam import FusedAdam
    from megatron.core.optimizer.rule_optimizer import RuleOptimizer
    from megatron.core.optimizer.rules import SGD, Adam, Lion, Muon, UpdateRule

__all__ = [
    "SGD",
    "Adam",
    "FusedAdam",
    "HybridDeviceOptimizer",
    "Lion",
    "Muon",
    "OptimizerConfig",
    "RuleOptimizer",
    "UpdateRule",
]

_RULES = "megatron.core.optimizer.rules"
_MODULES = {
    "FusedAdam": "megatron.core.optimizer.fused_adam",
    "HybridDeviceOptimizer": "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "RuleOptimizer": "megatron.core.optimizer.rule_optimizer",
    **dict.fromkeys(("Adam", "Lion", "Muon", "SGD", "UpdateRule"), _RULES),
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
