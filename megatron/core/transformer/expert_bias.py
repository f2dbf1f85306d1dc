"""Balancing without an auxiliary loss: expert biases, moved after each step by the tokens routed.

An expert's bias counts where experts are chosen and not in the weights of their results, so moving
it changes loads without a gradient that competes with the loss (Wang et al. 2024,
arXiv:2408.15664). docs/moe.md explains why loads are balanced. The trainer calls
`update_expert_bias` in each step that is not skipped; so does a training loop of another program,
with the loads summed over its microbatches and ranks:

    losses, report = model(tokens, labels, with_routing=True)
    load += report.load
    ...
    dist.all_reduce(load)
    optimizer.step()
    update_expert_bias(model, load)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.transformer.router import Router


def shape_of_loads(model: nn.Module) -> tuple[int, int] | None:
    """The shape of a model's loads, (routers, experts); None if it has no router. All its routers
    have the same experts.
    """
    routers = _routers(model)
    return (len(routers), routers[0].spec.num_experts) if routers else None


def check_loads(load: Tensor, expected: tuple[int, int] | None) -> None:
    """ValueError unless these are the loads of a model with the expected `shape_of_loads`."""
    if expected is None:
        raise ValueError(
            f"Expected no loads from a model without a Router, got {load.dtype} "
            f"{tuple(load.shape)}."
        )
    if tuple(load.shape) != expected or load.dtype != torch.int64:
        raise ValueError(
            f"Expected int64 loads of shape {expected}, a row for each router, got {load.dtype} "
            f"{tuple(load.shape)}."
        )


def _routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def update_expert_bias(model: nn.Module, load: Tensor) -> None:
    """Moves each expert's bias by the router's `bias_update_rate`: up if the expert has less than
    the mean load of its layer, down if it has more. Routers without such a bias do not change.

    Exact: ranks that give the same loads keep the same biases, to the bit, without communication.

    Args:
        model: sharded or not.
        load: tokens of the global batch that chose each expert, a row for each router in the order
            of `model.modules()`: [routers, experts] int64, on any device.

    Raises:
        ValueError: if a router has a bias and the rows do not match the model's routers.
    """
    routers = _routers(model)
    if all(router.expert_bias is None for router in routers):
        return
    check_loads(load, (len(routers), routers[0].spec.num_experts))

    # In integers, since a mean would be rounded: load < mean is load * experts < sum.
    direction = (load.sum(dim=1, keepdim=True) - load * load.shape[1]).sign().float()
    for router, row in zip(routers, direction, strict=True):
        bias = router.expert_bias
        if bias is not None:
            bias.add_(row.to(bias.device, non_blocking=True), alpha=router.spec.bias_update_rate)
