from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import FsdpModule
from megatron.core.distributed.fsdp.uneven_rows import UnevenShard
from megatron.core.distributed.megatron_fsdp import microbatch_of, shard_model
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_hybrid_mesh, build_mesh
from tests.helpers.ranks import on_ranks


class Model(nn.Module):
    """Layers, and a head of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def sharded(config: DataParallelConfig, compute_dtype: torch.dtype = torch.float32) -> Model:
    with torch.device("meta"):
        model = Model()
    mesh = build_mesh("cpu", dist.get_world_size())
    reset = seeded_reset(model, "cpu", seed=3)
    shard_model(
        model, mesh, Device("cpu"), config, compute_dtype=compute_dtype, reset_parameters=reset
    )
    return model


@on_ranks(2)
def test_layers_and_the_rest_are_sharded_and_get_the_weights_of_the_unsharded_model() -> None:
    model = sharded(DataParallelConfig(), torch.bfloat16)
    assert [isinstance(module, FsdpModule) for module in (model, *model.layers, model.head)] == [
        True
    ] * 4 + [False]
    assert [model.reshard_after_forward, model.layers[0].reshard_after_forward] == [False, True]
    reference = Model()
    materialize(reference, "cpu", seed=3)
    names = dict(reference.named_parameters())
    for module in (model, *model.layers):
        (group,) = module.parameter_groups
        assert (group.dtype, group.main_weight.dtype, group.plan.grad_dtype) == (
            torch.bfloat16,
            *[torch.float32] * 2,
        )
        whole = group.main_weight.redistribute([Replicate()])
        for index, name in enumerate(group.names):
            assert torch.equal(whole.get_local_tensor(index), names.pop(name))
    assert not names


@pytest.mark.parametrize(
    ("outer", "expected"),
    [("no_shard", [Replicate, UnevenShard]), ("optim", [UnevenShard, UnevenShard])],
)
@on_ranks(4)
def test_instances_make_a_mesh_of_two_axes(outer: str, expected: list) -> None:
    config = DataParallelConfig(
        num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer
    )
    parameter = next(sharded(config).parameters())
    assert parameter.device_mesh.mesh_dim_names == ("dp_outer", "dp_inner")
    assert [type(placement) for placement in parameter.placements] == expected


@on_ranks(1)
def test_a_microbatchs_scope_reaches_the_context_and_does_nothing_for_other_engines() -> None:
    model = sharded(DataParallelConfig())
    with microbatch_of(model, is_last=False):
        assert not model.context.is_last_microbatch
    assert model.context.is_last_microbatch
    with microbatch_of(Model(), is_last=False):
        pass


def test_instances_that_do_not_divide_the_ranks_are_rejected():
    with pytest.raises(
        ValueError, match="Expected a number of instances that divides 4 ranks, got 3"
    ):
        build_hybrid_mesh("cpu", 4, 3)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "Megatron-FSDP (optim_grads_params)"),
        ({"use_torch_fsdp2": True}, "PyTorch FSDP2"),
        ({"use_megatron_fsdp": False}, "unsharded"),
        ({"num_distributed_optimizer_instances": 2}, "Megatron-FSDP (HSDP, 2 instances)"),
    ],
)
def test_the_engine_has_a_name_for_the_log(settings, name):
    config = DataParallelConfig(**settings)
    assert config.engine == name
    assert config.is_sharded == (name != "unsharded")
