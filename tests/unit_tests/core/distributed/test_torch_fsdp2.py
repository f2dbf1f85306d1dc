from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megatron.core.distributed.torch_fsdp2 import shard_model
from megatron.core.distributed.units import sharding_units
from megatron.core.fp32_module import Fp32Module
from megatron.core.mesh import build_mesh
from tests.helpers.ranks import on_ranks, run_ranks


class Layer(nn.Module):
    """Remembers the dtypes it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        self.seen = [self.linear.weight.dtype, x.dtype, angles.dtype]
        return self.linear(x).tanh()


class Model(nn.Module):
    """Layers two levels down, and a head of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        angles = torch.ones(3)
        for layer in self.decoder.layers:
            x = layer(x, angles)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))


def test_layers_are_the_units_and_the_rest_belongs_to_the_root():
    model = make_model()
    assert sharding_units(model) == list(model.decoder.layers)


def _gradients(compute_dtype: torch.dtype) -> list[torch.Tensor]:
    model = make_model()
    shard_model(
        model,
        build_mesh("cpu", dist.get_world_size()),
        compute_dtype=compute_dtype,
        reshard_after_forward=True,
    )
    assert all(isinstance(module, FSDPModule) for module in (model, *model.decoder.layers))
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert (parameter.placements, parameter.dtype) == ((Shard(0),), torch.float32)
    model(inputs(dist.get_rank())).square().mean().backward()
    assert [layer.seen for layer in model.decoder.layers] == [
        [compute_dtype, compute_dtype, torch.float32]
    ] * 2
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("compute_dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_gradients_are_the_mean_over_ranks_in_fp32(compute_dtype, tolerance):
    """Layers compute in the compute dtype; what they are given in fp32 (rotary angles) stays
    fp32.
    """
    model = make_model()
    sum(model(inputs(rank)).square().mean() / 2 for rank in range(2)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for grads in run_ranks(2, _gradients, compute_dtype):
        for grad, exact in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, exact, rtol=tolerance, atol=tolerance)


def _weights_after_forward(reshard_after_forward: bool) -> bool:
    """Whether a layer's full weights are still there between forward and backward."""
    model = make_model()
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(
        model, mesh, compute_dtype=torch.float32, reshard_after_forward=reshard_after_forward
    )
    model(inputs(0))
    return not isinstance(model.decoder.layers[0].linear.weight, DTensor)


def test_a_layers_weights_are_freed_after_its_forward_unless_told_otherwise():
    assert run_ranks(2, _weights_after_forward, True) == [False, False]
    assert run_ranks(2, _weights_after_forward, False) == [True, True]


@on_ranks(1)
def test_a_mesh_of_two_axes_is_rejected() -> None:
    with pytest.raises(ValueError, match="Expected a mesh with one axis, got 2 axes"):
        shard_model(
            make_model(),
            init_device_mesh("cpu", (1, 1)),
            compute_dtype=torch.float32,
            reshard_after_forward=True,
        )


class Scale(Fp32Module):
    """A parameter of its own, and perhaps an inner module's."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = nn.ModuleList(inner)


@on_ranks(1)
def test_fp32_modules_are_groups_of_their_own_where_the_others_have_16_bits() -> None:
    for dtype, is_group in ((torch.bfloat16, True), (torch.float32, False)):
        model = make_model()
        model.decoder.layers[0].scale = Scale()
        mesh = build_mesh("cpu", 1)
        shard_model(model, mesh, compute_dtype=dtype, reshard_after_forward=True)
        assert isinstance(model.decoder.layers[0].scale, FSDPModule) == is_group


@on_ranks(1)
def test_an_fp32_module_with_inner_parameters_is_rejected() -> None:
    """They would be fp32 too."""
    model = make_model()
    model.decoder.layers[0].scale = Scale(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"got decoder\.layers\.0\.scale\."):
        shard_model(
            model,
            build_mesh("cpu", 1),
            compute_dtype=torch.bfloat16,
            reshard_after_forward=True,
        )
