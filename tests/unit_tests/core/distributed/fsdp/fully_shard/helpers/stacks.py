"""A stack of layers that can be looked into while it runs, and what must hold of it sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ZERO_3 = "optim_grads_params"
DTYPES = (torch.float32, torch.bfloat16)
DIM = 6
Look = Callable[["Watched"], None]


class Watched(nn.Linear):
    """Calls `look` in the middle of its forward and in the middle of its backward."""

    look: Look | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.look is not None:
            self.look(self)
            if x.requires_grad:
                x.register_hook(lambda _: self.look(self))
        return torch.tanh(x)


class Stack(nn.Module):
    """Layers, one after the other; which of them run may be changed."""

    def __init__(self, num_layers: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Watched(DIM, DIM, dtype=dtype) for _ in range(num_layers))
        self.used = list(range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = self.layers[index](x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(
    *modules: nn.Module,
    strategy: str = ZERO_3,
    policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> FsdpContext:
    """Shards modules in a new context; inner modules come first."""
    mesh, placements = line(), Placements.for_strategy(strategy)
    with fully_shard_context("cpu") as context:
        for module in modules:
            fully_shard(module, mesh, placements, policy, **options)
    return context


def settle(context: FsdpContext) -> None:
    """Waits for pending work, for tests that end in the middle: the next model uses the same
    channels.
    """
    context.gather_lane.enqueue(lambda: None).wait()


def batch(rank: int = 0, number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(100 * rank + number)).to(
        dtype
    )


def own_batch(number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return batch(dist.get_rank(), number, dtype)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum()


def expected_gradients(plain: nn.Module, *numbers: int) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of the sums over batches; every rank computes all ranks' parts."""
    for parameter in plain.parameters():
        parameter.grad = None
    for number in numbers or (0,):
        for rank in range(dist.get_world_size()):
            (loss_of(plain(batch(rank, number))) / dist.get_world_size()).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def held_rows(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """The rows of a parameter's whole value, or gradient, that this rank has."""
    group = group_of(parameter)
    index = next(
        index for index, own in enumerate(group.fsdp_parameters) if own.sharded is parameter
    )
    chunk = group.main_weight.chunk(index)
    return whole[chunk.first_row : chunk.first_row + chunk.num_rows]


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor | None]) -> None:
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in expected.values())
    for name, parameter in model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            rows = held_rows(parameter, expected[name])
            torch.testing.assert_close(
                parameter.grad.to_local(), rows, msg=lambda text, name=name: f"{name}: {text}"
            )


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def groups_of(*modules: nn.Module) -> list[FsdpParameterGroup]:
    found = (
        child for module in modules for child in module.modules() if isinstance(child, FsdpModule)
    )
    return [group for module in found for group in module.parameter_groups]


def whole_weights(model: nn.Module) -> Iterator[FsdpParameterGroup]:
    """The groups that have memory for whole weights which they do not keep at rest."""
    for group in groups_of(model):
        if group.is_unsharded and group.is_gathered:
            assert group.unsharded_weight.local_buffer.untyped_storage().nbytes() > 0
            yield group
        elif group.is_gathered:
            assert group.unsharded_weight.local_buffer.untyped_storage().nbytes() == 0


def assert_resting(model: nn.Module) -> None:
    """Every sharded module has its sharded parameters back, and no whole weights."""
    assert not list(whole_weights(model))
    for module in model.modules():
        if isinstance(module, FsdpModule):
            assert module.activity is FsdpModule.Activity.RESTING
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert group_of(parameter) is not None


def outcome_of(call: Callable[[], Any]) -> str:
    """Returns the outcome of a call for the process that started the ranks, which survive an
    unexpected one.
    """
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The sharded sides of the parameters that a module shows, some of which may be whole."""
    sharded = {
        id(side): own.sharded
        for group in groups_of(module)
        for own in group.fsdp_parameters
        for side in (own.full, own.sharded)
    }
    return [sharded[id(parameter)] for parameter in module.parameters()]


def compute_weights(model: Stack) -> list[torch.Tensor]:
    """Returns the whole weights of the layers that run; this rank's rows are the main weights,
    rounded.
    """
    found: list[torch.Tensor] = []

    def look(module: Watched) -> None:
        found.extend(parameter.detach().clone() for parameter in module.parameters())

    for layer in model.layers:
        layer.look = look
    with torch.no_grad():
        model(own_batch(dtype=groups_of(model)[0].dtype))
    for layer in model.layers:
        layer.look = None
    parameters = [
        parameter for index in model.used for parameter in sharded_parameters(model.layers[index])
    ]
    for parameter, whole in zip(parameters, found, strict=True):
        assert torch.equal(held_rows(parameter, whole), parameter.to_local().to(whole.dtype))
    return found


@torch.no_grad()
def write_weights(model: Stack, way: str) -> None:
    parameters = sharded_parameters(model)
    if way == "list":
        torch._foreach_mul_(parameters, 0.5)
        return
    if way == "scaler's kernel":
        scale = torch.tensor([3.0])
        torch._amp_foreach_non_finite_check_and_unscale_(parameters, torch.zeros(1), scale)
        return

    for parameter in parameters:
        if way == "copy_":
            parameter.copy_(parameter * 0.5)
        elif way == "local tensor":
            parameter.to_local().add_(1.0)
        elif way == "detached":
            parameter.detach().mul_(3.0)
        else:
            group_of(parameter).main_weight.local_buffer.add_(0.25)
