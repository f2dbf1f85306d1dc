from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.torch_fsdp2 import shard_model
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training.step import StepResult, evaluate, train_step
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def squared_error(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def root_of_zero(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) * 0.0).abs().sqrt().mean()


def batches(numbers: list[int], poison: float | None = None) -> Iterator[dict[str, torch.Tensor]]:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        y = torch.randn(2, 1, generator=generator)
        yield {"x": torch.randn(2, 4, generator=generator), "y": y if poison is None else y * poison}


def step(
    model: nn.Module, mine: list[int], votes=(0.0, 0.0), poison=None, clip_grad=0.0, forward_step=squared_error
) -> StepResult:
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad)
    return train_step(
        model,
        optimizer,
        batches(mine, poison),
        forward_step=forward_step,
        num_microbatches=len(mine),
        device=CPU,
        mesh=build_mesh("cpu", dist.get_world_size()),
        stop_votes=lambda: votes,
    )


def _sharded_step(shares: list[list[int]], clip_grad: float) -> tuple[StepResult, list[torch.Tensor]]:
    model = make_model()
    model[1].p = 0.0
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    outcome = step(model, shares[dist.get_rank()], clip_grad=clip_grad)
    return outcome, [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_ranks_and_microbatches_are_one_mean(clip_grad):
    """Four microbatches on one rank, or two on each of two, are the step of plain PyTorch on all eight samples."""
    model = make_model()
    model[1].p = 0.0
    everything = list(batches([1, 2, 3, 4]))
    whole = {name: torch.cat([batch[name] for batch in everything]) for name in ("x", "y")}
    loss = squared_error(model, whole)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for world_size, shares in ((1, [[1, 2, 3, 4]]), (2, [[1, 3], [2, 4]])):
        for outcome, weights in run_ranks(world_size, _sharded_step, shares, clip_grad):
            assert outcome.loss == pytest.approx(loss.item(), rel=1e-6)
            assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
            for ours, expected in zip(weights, model.parameters(), strict=True):
                torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-7)


def _poisoned_step(bad_rank: int, poison: float, forward_step=squared_error) -> tuple[StepResult, bool]:
    model = make_model()
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    mine = poison if dist.get_rank() == bad_rank else None
    outcome = step(model, [1], poison=mine, forward_step=forward_step)
    is_same = all(
        torch.equal(parameter.to_local(), old) for parameter, old in zip(model.parameters(), before, strict=True)
    )
    return outcome, is_same


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_loss_on_one_rank_stops_the_update_on_all_and_the_rank_is_named(poison):
    for outcome, is_same in run_ranks(2, _poisoned_step, 1, poison):
        assert outcome.is_skipped
        assert not math.isfinite(outcome.loss)
        assert outcome.bad_ranks == (1,)
        assert is_same


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too():
    """The square root of zero is finite, its slope is not."""
    for outcome, is_same in run_ranks(2, _poisoned_step, 0, 1.0, root_of_zero):
        assert math.isfinite(outcome.loss)
        assert outcome.bad_ranks == ()
        assert not math.isfinite(outcome.grad_norm)
        assert outcome.is_skipped
        assert is_same


def _voting_step() -> StepResult:
    model = make_model()
    shard_model(
        model, build_mesh("cpu", dist.get_world_size()), compute_dtype=torch.float32, reshard_after_forward=True
    )
    return step(model, [dist.get_rank()], votes=(float(dist.get_rank() == 1), 0.0))


def test_votes_are_summed_over_ranks():
    assert [outcome.stop_votes for outcome in run_ranks(2, _voting_step)] == [(1.0, 0.0), (1.0, 0.0)]


def _evaluation(shares: list[list[int]]) -> tuple[float, float, bool]:
    model = make_model()
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    mine = shares[dist.get_rank()]

    def loss() -> float:
        return evaluate(
            model, batches(mine), forward_step=squared_error, num_microbatches=len(mine), device=CPU, mesh=mesh
        )

    return loss(), loss(), model.training


def test_evaluation_has_no_dropout_and_does_not_depend_on_the_number_of_ranks():
    ((one, again, is_training),) = run_ranks(1, _evaluation, [[1, 2, 3, 4]])
    assert one == again
    assert is_training
    for two, _, _ in run_ranks(2, _evaluation, [[1, 3], [2, 4]]):
        assert two == pytest.approx(one, rel=1e-6)
