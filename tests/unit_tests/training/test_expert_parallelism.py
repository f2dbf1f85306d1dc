"""Training with experts divided over ranks gives the numbers of training on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp import FsdpModule
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import HostNeed
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.transformer.experts import Experts
from megatron.training import engines
from tests.helpers.engine_contents import Contents, contents_of, differing
from tests.helpers.mixtures import (
    MIXTURE,
    OFFLOADED,
    Trained,
    delayed_exchanges,
    mixture_engine,
    train,
)
from tests.helpers.ranks import on_ranks, random_delays, run_ranks

STEPS = range(2)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
RECOMPUTED = replace(MIXTURE, recompute_granularity="full")


def _trained(expert_size: int, num_microbatches: int, settings: dict[str, Any]) -> Trained:
    engine = mixture_engine(expert_size, **settings)
    # As many sequences on any number of ranks.
    return train(engine, STEPS, 4 * num_microbatches)


@cache
def _on_one_rank(num_microbatches: int) -> Trained:
    return run_ranks(1, _trained, 1, num_microbatches, {})[0]


def _check(expert_size: int, num_microbatches: int, **settings: Any) -> None:
    expected = _on_one_rank(num_microbatches)
    ranks = run_ranks(4, _trained, expert_size, num_microbatches, settings)
    torch.testing.assert_close(sum(r.loads for r in ranks), expected.loads, rtol=0, atol=0)
    assert min(expected.norms) > OptimizerConfig().clip_grad, "gradients are clipped"
    for trained in ranks:
        assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)
        assert trained.norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize(
    ("expert_size", "strategy", "num_microbatches"),
    [(2, "optim_grads_params", 3), (4, "no_shard", 1)],
)
def test_losses_match_one_rank(expert_size, strategy, num_microbatches):
    _check(expert_size, num_microbatches, strategy=strategy)


@pytest.mark.wide
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("expert_size", [1, 2, 4])
def test_losses_match_one_rank_however_weights_are_sharded(expert_size, strategy, num_microbatches):
    _check(expert_size, num_microbatches, strategy=strategy)


INSTANCES = [*product([2], ["no_shard", "optim"], [1, 3])]


@pytest.mark.parametrize(
    ("num_instances", "outer", "num_microbatches"),
    [
        pytest.param(*case, marks=[] if case[1:] == ("optim", 3) else pytest.mark.wide)
        for case in INSTANCES
    ],
)
def test_losses_of_several_instances_match_one_rank(num_instances, outer, num_microbatches):
    parallel = {
        "num_distributed_optimizer_instances": num_instances,
        "outer_dp_sharding_strategy": outer,
    }
    _check(2, num_microbatches, **parallel)


def test_losses_under_fsdp2_which_keeps_experts_in_their_layers_match_one_rank():
    _check(1, 3, use_torch_fsdp2=True)


def test_losses_with_recomputation_match_one_rank():
    _check(2, 3, model=RECOMPUTED)


@on_ranks(4)
def test_experts_are_separate_units_and_resharded_between_forward_and_backward() -> None:
    engine = mixture_engine(2)
    experts = {n: m for n, m in engine.model.named_modules() if isinstance(m, Experts)}
    assert [*experts] == [f"decoder.layers.{n}.mlp.experts" for n in (1, 2)]
    for name, module in experts.items():
        assert isinstance(module, FsdpModule)
        assert module.reshard_after_forward
        (group,) = module.parameter_groups
        assert group.name == name
        assert group.names == [f"{name}.linear_fc{n}.weight" for n in (1, 2)]
        weight = module.linear_fc1.weight
        assert weight.shape == (8 * 14, 20), "of all experts"
        assert weight.device_mesh.mesh_dim_names == ("edp", "ep")
        assert not group.is_unsharded


def _contents(
    expert_size: int, settings: dict[str, Any], seed: int | None
) -> tuple[Trained, Contents]:
    engine = mixture_engine(expert_size, **settings)
    if seed is None:
        return train(engine, STEPS), contents_of(engine)
    with random_delays(seed), delayed_exchanges(seed):
        trained = train(engine, STEPS)
        return trained, contents_of(engine)


def _check_bits(world_size: int, expert_size: int, settings: dict[str, Any], **other: Any) -> None:
    """Expects the same bits with the settings in `other` as without, and with delays."""
    plain = run_ranks(world_size, _contents, expert_size, settings, None)
    varied = run_ranks(world_size, _contents, expert_size, {**settings, **other}, 3)
    for (trained, contents), (other_trained, other_contents) in zip(plain, varied, strict=True):
        assert trained.losses == other_trained.losses
        assert trained.norms == other_trained.norms
        assert differing(contents, other_contents) == []


@pytest.mark.parametrize(
    "strategy", ["optim_grads_params", pytest.param("optim", marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("fraction", [0.4, pytest.param(1.0, marks=pytest.mark.wide)])
def test_offloaded_training_with_delays_is_bit_equal_to_training_on_the_device(strategy, fraction):
    offloaded = replace(OFFLOADED, optimizer_offload_fraction=fraction)
    settings = {"strategy": strategy, "compute_dtype": "bf16"}
    settings |= {"main_grads_dtype": "bf16"}
    _check_bits(4, 2, settings, optimizer=offloaded)


@pytest.mark.wide
@pytest.mark.parametrize("expert_size", [2, 4])
def test_delays_change_no_bit(expert_size):
    _check_bits(4, expert_size, {"optimizer": OptimizerConfig(clip_grad=0.5)})


def _asked_and_held(expert_size: int, strategy: str) -> tuple[int, int]:
    """Elements of main weights that host memory is asked for before there are any, and held."""
    asked: list[HostNeed] = []
    original = engines.check_memory_on_all_ranks

    def recorded(needs: Sequence[HostNeed], *others: Any) -> None:
        asked.extend(need for need in needs if need.what == "main weights")
        original(needs, *others)

    with mock.patch.object(engines, "check_memory_on_all_ranks", recorded):
        engine = mixture_engine(expert_size, strategy, optimizer=OFFLOADED)
    held = engine.state.optimizer.state_memory(engine.model)["main weights"].host
    own = sum(local_tensor(parameter).numel() for parameter in engine.model.parameters())
    assert own <= held // 4 < 1.1 * own, "what is held is a rank's own experts, and padding"
    return sum(need.nbytes for need in asked) // 4, held // 4


@pytest.mark.parametrize(("expert_size", "strategy"), [(2, "no_shard"), (1, "no_shard")])
def test_the_preflight_counts_host_memory_of_a_ranks_experts_only(expert_size, strategy):
    for asked, held in run_ranks(2, _asked_and_held, expert_size, strategy):
        assert asked == held
