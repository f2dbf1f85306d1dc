"""Experts that are offloaded before anything else: in runs, and without a trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import plan_offload
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.experts import Experts
from megatron.training.arguments import parse_config
from tests.helpers.ranks import on_ranks, run_ranks

FIRST = {"optimizer_cpu_offload": True, "optimizer_offload_experts_first": True}


def model_of() -> GPTModel:
    """Two layers with experts, and a dense one after them."""
    torch.manual_seed(0)
    config = TransformerConfig(
        3,
        16,
        2,
        ffn_hidden_size=24,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_experts=4,
        moe_layer_freq="[1,1,0]",
    )
    return GPTModel(config, 40)


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    ]


def sharded(model: GPTModel) -> None:
    """Shards experts as separate modules, inside the modules of their layers."""
    mesh = build_mesh("cpu", dist.get_world_size())
    layers = list(model.decoder.layers)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    with fully_shard_context("cpu"):
        for module in (*experts, *layers, model):
            fully_shard(
                module, mesh, Placements.for_strategy("optim_grads_params"), MixedPrecisionPolicy()
            )


def _trained(fraction: float, goes_first: bool) -> tuple[Any, list[torch.Tensor]]:
    model = model_of()
    sharded(model)
    optimizer = HybridDeviceOptimizer(
        [{"params": list(model.parameters())}],
        fraction,
        offload_first=experts_of(model) if goes_first else (),
        lr=0.01,
        weight_decay=0.1,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(40, (2, 9), generator=generator)
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return optimizer.plan, [local_tensor(p).detach().clone() for p in model.parameters()]


def on_host(plan: Any) -> list[str]:
    return [group.name for group in plan.groups if group.is_on_host]


def test_a_program_of_its_own_puts_experts_first_and_the_bits_match_no_offload():
    kept = run_ranks(2, _trained, 0.0, False)
    last = run_ranks(2, _trained, 0.2, False)
    first = run_ranks(2, _trained, 0.2, True)
    more = run_ranks(2, _trained, 0.9, True)

    experts = [f"decoder.layers.{number}.mlp.experts" for number in (0, 1)]
    for rank in range(2):
        assert on_host(kept[rank][0]) == []
        assert on_host(last[rank][0])[-1] == "decoder.layers.2"
        assert on_host(first[rank][0]) == experts[1:]
        assert set(experts) < set(on_host(more[rank][0])), "and then others"
        assert "the model" not in on_host(more[rank][0])
        for other in (last, first, more):
            for ours, expected in zip(other[rank][1], kept[rank][1], strict=True):
                assert torch.equal(ours, expected)


def test_a_plan_of_single_tensors_takes_those_of_experts_before_others():
    with torch.device("meta"):
        model = model_of()
    own = [parameter.numel() for parameter in experts_of(model)]
    share = round(sum(own) / sum(parameter.numel() for parameter in model.parameters()), 4)
    for fraction, num_first, has_others in (
        (0.0, 0, False),
        (1e-6, 1, False),
        (share - 1e-3, len(own), False),
        (share + 1e-3, len(own), True),
    ):
        config = OptimizerConfig(**FIRST, optimizer_offload_fraction=fraction)
        plan = plan_offload(model, config, by_module=False)
        sides = [group.is_on_host for group in plan.groups if group.goes_first]
        assert len(sides) == len(own)
        assert sum(sides) == num_first
        assert has_others == any(g.is_on_host for g in plan.groups if not g.goes_first)


MINIMAL = [
    *("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mock-data").split(),
    *"--tokenizer-type NullTokenizer --vocab-size 31".split(),
    *"--micro-batch-size 1 --train-iters 4 --lr 0.1".split(),
]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer-cpu-offload", "--num-experts: expected an integer >= 1, since "),
        ("--num-experts 4", "--optimizer-offload-experts-first: expected --optimizer-cpu-offload"),
    ],
)
def test_the_flag_needs_experts_and_offloading(flags: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_config([*MINIMAL, "--optimizer-offload-experts-first", *flags.split()], 1)


@on_ranks(1)
def test_parameters_of_another_optimizer_cannot_go_first_and_frozen_ones_of_its_own_may():
    model = model_of()
    named = experts_of(model)
    sharded(model)
    for first in (named, iter([*experts_of(model), nn.Parameter(torch.ones(3))])):
        with pytest.raises(
            ValueError, match="Expected offload_first among this optimizer's parameters, got"
        ):
            HybridDeviceOptimizer(model.parameters(), 0.5, offload_first=first, lr=0.01)

    model = model_of()
    for parameter in experts_of(model):
        parameter.requires_grad_(False)
    sharded(model)
    first = iter(experts_of(model))
    plan = HybridDeviceOptimizer(model.parameters(), 0.5, offload_first=first, lr=0.01).plan
    assert not any(group.goes_first for group in plan.groups)
    assert any(group.is_on_host for group in plan.groups)
