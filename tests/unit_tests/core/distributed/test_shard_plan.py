from __future__ import annotations

import pytest
import torch

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import FsdpModule
from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.distributed.megatron_fsdp import shard_model
from megatron.core.distributed.shard_plan import plan_shards
from megatron.core.distributed.units import units_of
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.helpers.mixtures import MIXTURE, VOCAB
from tests.helpers.ranks import run_ranks

OFFLOADED = {"decoder.layers.1.mlp.experts", "decoder.layers.2", THE_MODEL}


def build() -> GPTModel:
    """With frozen attention, so that layers have groups with and without gradients."""
    with torch.device("meta"):
        model = GPTModel(MIXTURE, VOCAB)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention" not in name)
    return model


def _sharded_as_planned(config: DataParallelConfig, world_size: int) -> None:
    model = build()
    plan = plan_shards(model, world_size, config, compute_dtype=torch.bfloat16, offloaded=OFFLOADED)
    units = units_of(model)
    device = Device("cpu")
    shard_model(
        model,
        build_mesh("cpu", world_size),
        device,
        config,
        compute_dtype=torch.bfloat16,
        reset_parameters=seeded_reset(model, device.torch_device, seed=3),
        offloaded=OFFLOADED,
    )
    assert [unit.name for unit in units] == [unit.name for unit in plan.units]
    for unit, planned in zip(units, plan.units, strict=True):
        assert isinstance(unit.module, FsdpModule)
        groups = unit.module.parameter_groups
        assert [group.plan for group in groups] == list(planned.groups)
        for group, own in zip(groups, planned.groups, strict=True):
            assert group.is_on_host == (own.requires_grad and unit.name in OFFLOADED)
            assert group.model_weight.local_buffer.nbytes == own.compute_nbytes
            assert group.main_weight.local_buffer.numel() == own.optimizer_numel
            assert group.main_weight.dtype == own.main_dtype


def test_several_accelerators_plan_gradients_in_the_dtype_that_they_add_up():
    def planned(world_size: int, is_accelerator: bool, **options: str) -> tuple[int, ...]:
        config = DataParallelConfig(main_grads_dtype="bf16", **options)
        dtype = torch.bfloat16
        plan = plan_shards(
            build(), world_size, config, compute_dtype=dtype, is_accelerator=is_accelerator
        )
        group = next(group for group in plan.groups if group.requires_grad)
        numel = group.whole_grads_nbytes // group.sent_dtype.itemsize
        totals = (group.whole_grads_nbytes, group.reduced_nbytes, group.reduction_nbytes)
        return tuple(4 * total // numel for total in (*totals, group.reduced_last_nbytes))

    # In quarters of a byte an element: in memory, sent, and in memory while it is sent.
    assert planned(4, is_accelerator=True) == (16, 12, 0, 0)
    assert planned(4, is_accelerator=False) == (8, 6, 0, 0)
    assert planned(1, is_accelerator=True)[0] == 8
    sent_in_bf16 = {"megatron_fsdp_grad_comm_dtype": "bf16"}
    assert planned(4, is_accelerator=True, **sent_in_bf16) == (8, 6, 0, 0)
    # The sums over microbatches are bf16, and sent in fp32.
    deferred = {"data_parallel_sharding_strategy": "optim"}
    assert planned(4, is_accelerator=True, **deferred) == (16, 0, 16, 12)
    assert planned(4, is_accelerator=False, **deferred) == (8, 0, 0, 6)


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        pytest.param({}, 3, id="one axis"),
        pytest.param({"data_parallel_sharding_strategy": "optim_grads"}, 2, id="ZeRO-2"),
        pytest.param(
            {"num_distributed_optimizer_instances": 2, "expert_model_parallel_size": 2},
            4,
            id="HSDP with divided experts",
        ),
    ],
)
def test_a_model_is_sharded_as_its_plan_says(options, world_size):
    run_ranks(world_size, _sharded_as_planned, DataParallelConfig(**options), world_size)


def test_a_plan_needs_no_ranks_and_has_every_parameter_once():
    model = build()
    plan = plan_shards(model, 1024, DataParallelConfig(), compute_dtype=torch.bfloat16)
    prefixes = {unit.name: f"{unit.name}." for unit in plan.units} | {THE_MODEL: ""}
    names = [
        prefixes[unit.name] + parameter.fqns[0]
        for unit in plan.units
        for group in unit.groups
        for parameter in group.parameters
    ]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert plan.units[-1].name == THE_MODEL
    assert [len(unit.groups) for unit in plan.units] == [1, 1, 2, 2, 2, 1]
