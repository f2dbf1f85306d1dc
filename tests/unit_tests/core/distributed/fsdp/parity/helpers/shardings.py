"""The ways to shard that training is compared under, and what must hold of any sharded module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.fsdp import (
    DBuffer,
    Flat,
    FsdpModule,
    Partial,
    Placements,
    Replicate,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from tests.helpers.ranks import rank_device

AVG = Partial("avg")
ON_TWO_AXES = {
    "hsdp": Placements(
        ("outer", "inner"), (Replicate(), Flat()), (AVG, Flat()), (Replicate(), Flat())
    ),
    "hfsdp": Placements(("outer", "inner"), (Replicate(), Flat()), (AVG, Flat()), (Flat(), Flat())),
    "full": Placements(("outer", "inner"), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat())),
}
FP32, BF16 = torch.float32, torch.bfloat16
SEED = 7


def mesh_and_placements(sharding: str) -> tuple[DeviceMesh, Placements]:
    """What a strategy on all ranks, or a kind of sharding on two axes of two ranks, is."""
    kind = rank_device().type
    if sharding in ON_TWO_AXES:
        return init_device_mesh(kind, (2, 2), mesh_dim_names=("outer", "inner")), ON_TWO_AXES[
            sharding
        ]
    return init_device_mesh(kind, (dist.get_world_size(),)), Placements.for_strategy(sharding)


def groups_of(modules: Sequence[nn.Module]) -> Iterator[FsdpParameterGroup]:
    for module in modules:
        for submodule in module.modules():
            if isinstance(submodule, FsdpModule):
                yield from submodule.parameter_groups


def whole(buffer: DBuffer) -> DBuffer:
    return buffer.redistribute([Replicate()] * buffer.mesh.ndim)


def assert_at_rest(modules: Sequence[nn.Module]) -> None:
    """No full weights, no unreduced gradients, and parameters that are the optimizer's."""
    for group in groups_of(modules):
        assert not group.is_unsharded, group.name
        if group.is_gathered:
            assert group.unsharded_weight.local_buffer.untyped_storage().nbytes() == 0, group.name
        if group.gradients is not None:
            assert group.gradients.unsharded.local_buffer.untyped_storage().nbytes() == 0, (
                group.name
            )
        for parameter in group.fsdp_parameters:
            assert all(
                owner()._parameters[name] is parameter.sharded for owner, name in parameter.owners
            )


def assert_cut_as_placed(modules: Sequence[nn.Module]) -> None:
    """Every rank holds the share of weights that its placements say: it has not simply
    everything.
    """
    for group in groups_of(modules):
        for buffer, placements in (
            (group.model_weight, group.placements.parameter),
            (group.main_weight, group.placements.optimizer),
        ):
            sizes = zip(placements, group.mesh.shape, strict=True)
            num_parts = (
                torch.tensor([size for placement, size in sizes if isinstance(placement, Flat)])
                .prod()
                .item()
            )
            assert buffer.local_buffer.numel() * num_parts == group.layout.size
