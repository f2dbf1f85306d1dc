"""Parameters and gradients from seeds, and snapshots of an optimizer over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.core.dtensors import local_tensor

F32, BF16, F16, F8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(
        sum(1000**place * number for place, number in enumerate(seed, 1))
    )


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.randn(shape, generator=generator(index)).to(dtype))
        for index, shape in enumerate(shapes)
    ]


def gradient(index: int, number: int, like: torch.Tensor, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator(index, number)).to(dtype)


def train(
    optimizer: torch.optim.Optimizer,
    owned: list[nn.Parameter],
    first: int,
    last: int,
) -> None:
    """Steps number `first` up to, not including, `last`, with gradients of the parameters'
    dtype.
    """
    for number in range(first, last):
        for index, parameter in enumerate(owned):
            parameter.grad = gradient(index, number, parameter, parameter.dtype)
        optimizer.step()


def plain(value: Any) -> Any:
    """A copy of nested states, with local tensors as bytes: equal values are equal bits."""
    if isinstance(value, torch.Tensor):
        local = local_tensor(value).detach().contiguous().clone()
        return (str(value.dtype), tuple(value.shape), local.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """Everything an optimizer has, parameters included."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return plain(
        [[parameter, dict(optimizer.state.get(parameter, {}))] for parameter in owned]
    ), plain(options)
