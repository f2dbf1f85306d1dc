"""Training a GPT with `fully_shard` gives the losses of training it unsharded, on one rank, with
the same global batch, and of training it with PyTorch FSDP2.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.helpers.ranks import random_delays, rank_device, run_ranks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import (
    BF16,
    FP32,
    ON_TWO_AXES,
    SEED,
    assert_at_rest,
    assert_cut_as_placed,
    groups_of,
    mesh_and_placements,
    whole,
)

TOLERANCES = {FP32: 1e-6, BF16: 3e-3}  # of losses, relative
VOCAB = 40


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main_weights(model: nn.Module) -> list[Tensor]:
    """This rank's rows of all main weights."""
    return [group.main_weight.local_buffer.clone() for group in groups_of([model])]


# Losses, against one rank and against PyTorch's FSDP2


@dataclass(frozen=True)
class Run:
    """A training run of the GPT."""

    world_size: int
    num_microbatches: int
    optimizer: str
    dtype: torch.dtype
    num_steps: int = 4

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-2)

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        """The tokens and labels of a rank in a microbatch. The same in every step, so only learning
        changes losses.
        """
        generator = torch.Generator().manual_seed(number * self.world_size + rank)
        text = torch.randint(VOCAB, (2, 9), generator=generator)
        device = rank_device()
        return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)

    def loss(self, model: nn.Module, number: int, rank: int) -> Tensor:
        return model(*self.batch(number, rank)).mean() / self.num_microbatches


def gpt_on_meta(**changes: Any) -> GPTModel:
    """Two layers, and an embedding that is also the output projection, with `changes`
    to the configuration.
    """
    values = {
        "ffn_hidden_size": 24,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.1,
    }
    config = TransformerConfig(2, 16, 2, **{**values, **changes})
    with torch.device("meta"):
        return GPTModel(config, VOCAB)


def gpt(**changes: Any) -> GPTModel:
    model = gpt_on_meta(**changes)
    materialize(model, "cpu", SEED)
    return model


def sharded_gpt(sharding: str, dtype: torch.dtype, **changes: Any) -> tuple[GPTModel, FsdpContext]:
    """From meta, as a model that no rank can hold. One group for each layer, one for the rest."""
    mesh, placements = mesh_and_placements(sharding)
    model = gpt_on_meta(**changes).to(dtype)
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=FP32)
    device = rank_device()
    with fully_shard_context(device, reset_parameters=seeded_reset(model, device, SEED)) as context:
        for layer in model.decoder.layers:
            fully_shard(layer, mesh, placements, policy)
        fully_shard(model, mesh, placements, policy)
    return model, context


@cache
def losses_on_one_rank(run: Run) -> list[float]:
    """Of an unsharded model. In bf16 it computes with weights that are refreshed from fp32 ones in
    every step.
    """
    main = gpt()
    model = copy.deepcopy(main).to(run.dtype)
    optimizer = run.make_optimizer(main.parameters())
    losses = []
    for _ in range(run.num_steps):
        losses.append(0.0)
        with torch.no_grad():
            for own, source in zip(model.parameters(), main.parameters(), strict=True):
                own.copy_(source)
        for number in range(run.num_microbatches):
            for rank in range(run.world_size):
                loss = run.loss(model, number, rank) / run.world_size
                loss.backward()
                losses[-1] += loss.item()
                move_gradients(model, main)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def move_gradients(source: nn.Module, target: nn.Module) -> None:
    """Adds one model's gradients to another's, and clears them."""
    for parameter, wider in zip(source.parameters(), target.parameters(), strict=True):
        gradient, parameter.grad = parameter.grad.to(wider.dtype), None
        wider.grad = gradient if wider.grad is None else wider.grad + gradient


@cache
def losses_of_fsdp2(run: Run) -> list[float]:
    return run_ranks(run.world_size, _train_with_fsdp2, run)[0]


def _train_with_fsdp2(run: Run) -> list[float]:
    model = gpt()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = fsdp2.MixedPrecisionPolicy(
        param_dtype=run.dtype, reduce_dtype=FP32, cast_forward_inputs=False
    )
    for unit in (*model.decoder.layers, model):
        fsdp2.fully_shard(unit, mesh=mesh, mp_policy=policy)
    optimizer = run.make_optimizer(model.parameters())
    losses = []
    for _ in range(run.num_steps):
        loss_of_step = 0.0
        for number in range(run.num_microbatches):
            loss = run.loss(model, number, dist.get_rank())
            loss.backward()
            loss_of_step += loss.item()
        losses.append(mean_over_ranks(loss_of_step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train_sharded(run: Run, sharding: str) -> list[float]:
    model, context = sharded_gpt(sharding, run.dtype)
    assert_cut_as_placed([model])
    return train_sharded_gpt(run, model, context)


def train_sharded_gpt(run: Run, model: GPTModel, context: FsdpContext) -> list[float]:
    optimizer = run.make_optimizer(model.parameters())
    fully_shard_optimizer(optimizer)
    losses = []
    for step in range(run.num_steps):
        loss_of_step = 0.0
        for number in range(run.num_microbatches):
            with microbatch(context, is_last=number == run.num_microbatches - 1):
                loss = run.loss(model, number, dist.get_rank())
                assert_at_rest([model])
                loss.backward()
                assert_at_rest([model])
            loss_of_step += loss.item()
        losses.append(mean_over_ranks(loss_of_step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def parity_cases() -> Iterator[Any]:
    """All of them. By default, every strategy with every value on two ranks, and the meshes of two
    axes on four.
    """
    for world_size, dtype, optimizer, num_microbatches in itertools.product(
        (2, 4), (FP32, BF16), ("sgd", "adamw"), (1, 3)
    ):
        for sharding in (*SHARDING_STRATEGIES, *(ON_TWO_AXES if world_size == 4 else ())):
            number = (dtype == BF16) + (optimizer == "adamw") + (num_microbatches == 3)
            is_default = (
                number in (0, 3) if world_size == 2 else number == 3 and sharding in ON_TWO_AXES
            )
            yield pytest.param(
                Run(world_size, num_microbatches, optimizer, dtype),
                sharding,
                id=f"{world_size}-{str(dtype).removeprefix('torch.')}-{optimizer}-{num_microbatches}-{sharding}",
                marks=() if is_default else pytest.mark.wide,
            )


@pytest.mark.parametrize(("run", "sharding"), list(parity_cases()))
def test_losses_match_one_rank_with_the_same_global_batch_and_fsdp2(run, sharding):
    expected = losses_on_one_rank(run)
    assert expected[-1] < 0.97 * expected[0], (
        "the loss falls, so losses of weights that are not updated would differ"
    )
    tolerance = TOLERANCES[run.dtype]
    for losses in run_ranks(run.world_size, _train_sharded, run, sharding):
        assert losses == pytest.approx(expected, rel=tolerance, abs=0)
        assert losses == pytest.approx(losses_of_fsdp2(run), rel=tolerance, abs=0)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("run", "sharding"),
    [
        (Run(2, 3, "adamw", FP32), "optim_grads_params"),
        *(
            pytest.param(Run(size, 3, "adamw", dtype), sharding, marks=pytest.mark.wide)
            for size, dtype in itertools.product((2, 4), (FP32, BF16))
            for sharding in (*SHARDING_STRATEGIES, *(ON_TWO_AXES if size == 4 else ()))
            if (size, dtype, sharding) != (2, FP32, "optim_grads_params")
        ),
    ],
)
def test_losses_on_accelerators_match_one_rank_of_the_cpu(run, sharding):
    expected = losses_on_one_rank(run)
    for losses in run_ranks(run.world_size, _train_sharded, run, sharding, device="sim"):
        assert losses == pytest.approx(expected, rel=TOLERANCES[run.dtype], abs=0)


def _train_delayed(run: Run, shardings: Sequence[str], seeds: Sequence[int]) -> None:
    for sharding in shardings:
        model, context = sharded_gpt(sharding, run.dtype)
        losses = train_sharded_gpt(run, model, context)
        weights = main_weights(model)
        assert len(set(losses)) == len(losses)
        for seed in seeds:
            delayed, context = sharded_gpt(sharding, run.dtype)
            # Another seed on every rank, or they would pause in step.
            with random_delays(seed * run.world_size + dist.get_rank()):
                assert train_sharded_gpt(run, delayed, context) == losses, (sharding, seed)
            assert all(map(torch.equal, main_weights(delayed), weights)), (sharding, seed)


@pytest.mark.parametrize(
    ("run", "shardings", "seeds"),
    [
        (Run(2, 2, "adamw", BF16, num_steps=3), SHARDING_STRATEGIES, (1, 2)),
        (Run(4, 2, "sgd", FP32, num_steps=3), ("hfsdp",), (1, 2)),
        pytest.param(
            Run(4, 3, "adamw", BF16),
            (*SHARDING_STRATEGIES, *ON_TWO_AXES),
            (4, 5, 6, 7),
            marks=pytest.mark.wide,
        ),
    ],
    ids=["2-strategies", "4-hfsdp", "4-all"],
)
def test_lanes_that_pause_at_random_change_no_bit_of_losses_and_weights(run, shardings, seeds):
    run_ranks(run.world_size, _train_delayed, run, shardings, seeds)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("run", "shardings", "seeds"),
    [
        (Run(2, 2, "adamw", BF16, num_steps=2), ["optim_grads"], (1,)),
        pytest.param(
            Run(2, 2, "adamw", BF16), SHARDING_STRATEGIES, (1, 2, 3), marks=pytest.mark.wide
        ),
        pytest.param(
            Run(4, 3, "adamw", BF16), list(ON_TWO_AXES), (4, 5, 6), marks=pytest.mark.wide
        ),
    ],
    ids=["2-zero2", "2-strategies", "4-two-axes"],
)
def test_streams_that_pause_at_random_change_no_bit_of_losses_and_weights(run, shardings, seeds):
    run_ranks(run.world_size, _train_delayed, run, shardings, seeds, device="sim", timeout=600)


# Weights that are drawn from meta


def _draw(config: dict[str, Any], dtype: torch.dtype, shardings: Sequence[str]) -> None:
    expected = dict(gpt(**config).named_parameters())
    for sharding in shardings:
        model, _ = sharded_gpt(sharding, dtype, **config)
        found = {}
        for group in groups_of([model]):
            assert (group.dtype, group.main_weight.dtype) == (dtype, FP32)
            tensors = whole(group.main_weight)
            found |= {
                name: tensors.get_local_tensor(index) for index, name in enumerate(group.names)
            }
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name
        assert all(parameter.is_meta for parameter in gpt_on_meta(**config).parameters())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "config",
    [{}, {"swiglu": True, "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True}],
)
def test_weights_drawn_from_meta_are_the_bits_of_an_unsharded_model(dtype, config):
    run_ranks(2, _draw, config, dtype, SHARDING_STRATEGIES)


@pytest.mark.wide
def test_weights_drawn_from_meta_on_two_axes_are_the_bits_of_an_unsharded_model():
    run_ranks(4, _draw, {}, BF16, (*SHARDING_STRATEGIES, *ON_TWO_AXES))
