"""PyTorch's own optimizers over the parameters of a model, sharded by FSDP2 or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.config import OptimizerConfig


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay; groups that would be empty are left out.

    Matrices decay; vectors (biases, norm weights) and scalars do not, as in Megatron. Frozen parameters have no group.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_torch_optimizer(model: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """AdamW or SGD over `model`'s parameters. `lr` is only its first value: the schedule sets it every step."""
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    if config.optimizer == "sgd":
        # Not fused: that kernel takes no DTensors.
        return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum)
    # Fused, not foreach: its arithmetic is correctly rounded and therefore the same on every machine.
    return torch.optim.AdamW(
        groups, lr=lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
    )
