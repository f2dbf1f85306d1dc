"""Steps whose forward gives more than a loss: auxiliary losses and the loads of experts."""

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
from megatron.core.transformer.router import Router
from megatron.core.transformer.spec import RouterSpec, Scores
from megatron.training.step import Batch, ForwardStep, ModelLoss, StepResult, evaluate, train_step
from tests.helpers.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")
RATE = 0.25


class Net(nn.Module):
    """A linear layer, and a router whose choices are counted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        spec = RouterSpec(
            num_experts=4,
            top_k=2,
            scores=Scores.SIGMOID,
            is_scored_first=True,
            is_normalized=False,
            has_expert_bias=True,
            bias_update_rate=RATE,
        )
        self.router = Router(spec, 4, init_std=0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).square().mean(), self.router(x[:, None]).report.load[None]


def batches(numbers: list[int]) -> Iterator[Batch]:
    for number in numbers:
        yield {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(number))}


def plain(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"])[0]


def nothing_more(model: nn.Module, batch: Batch) -> ModelLoss:
    return ModelLoss(model(batch["x"])[0])


def everything(model: nn.Module, batch: Batch) -> ModelLoss:
    """The second of the auxiliary losses comes first by name."""
    loss, load = model(batch["x"])
    decay = model.linear.weight.square().sum()
    return ModelLoss(loss, {"size": 0.5 * loss, "decay": 0.1 * decay}, load)


def step(model: nn.Module, mine: list[int], forward_step: ForwardStep) -> StepResult:
    return train_step(
        model,
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 0.0),
        batches(mine),
        forward_step=forward_step,
        num_microbatches=len(mine),
        device=CPU,
        mesh=build_mesh("cpu", dist.get_world_size()),
    )


def sharded() -> nn.Module:
    model = Net()
    mesh = build_mesh("cpu", dist.get_world_size())
    shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    return model


def _sharded_step(
    shares: list[list[int]],
) -> tuple[StepResult, list[torch.Tensor], torch.Tensor]:
    model = sharded()
    result = step(model, shares[dist.get_rank()], everything)
    weights = [parameter.full_tensor().detach() for parameter in model.linear.parameters()]
    return result, weights, model.router.expert_bias


def test_backward_is_of_all_losses_and_each_is_a_mean_of_its_own_over_ranks_and_microbatches():
    """As plain PyTorch has it on everything at once."""
    model = Net()
    whole = {"x": torch.cat([batch["x"] for batch in batches([1, 2, 3, 4])])}
    loss, auxiliary, load = everything(model, whole)
    sum(auxiliary.values(), start=loss).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert load.unique().numel() > 2, "loads differ"
    expected_bias = RATE * (load[0].double().mean() - load[0]).sign().float()
    for world_size, shares in ((1, [[1, 2, 3, 4]]), (2, [[1, 3], [2, 4]])):
        for result, weights, bias in run_ranks(world_size, _sharded_step, shares):
            assert result.loss == pytest.approx(loss.item(), rel=1e-6)
            assert list(result.auxiliary) == ["decay", "size"]
            for name, value in auxiliary.items():
                assert result.auxiliary[name] == pytest.approx(value.item(), rel=1e-6)
            assert result.total_loss == pytest.approx(1.5 * loss.item() + result.auxiliary["decay"])
            assert result.expert_load.dtype == torch.int64
            assert torch.equal(result.expert_load, load)
            assert torch.equal(bias, expected_bias)
            for ours, theirs in zip(weights, model.linear.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


def _collectives(forward_step: ForwardStep) -> tuple[int, StepResult, list[torch.Tensor]]:
    calls = 0
    real = dist.all_reduce

    def all_reduce(*arguments, **options):
        nonlocal calls
        calls += 1
        return real(*arguments, **options)

    model = Net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        result = step(model, [1, 2], forward_step)
    return calls, result, [*model.parameters()]


@on_ranks(1)
def test_a_loss_alone_may_be_a_tensor_and_more_of_them_cost_no_collective():
    calls, expected, weights = _collectives(plain)
    same_calls, result, own_weights = _collectives(nothing_more)
    assert result == expected
    assert result.auxiliary == {}
    assert result.expert_load is None
    assert all(torch.equal(*pair) for pair in zip(own_weights, weights, strict=True))
    assert 0 < calls == same_calls == _collectives(everything)[0]


def huge_loads(model: nn.Module, batch: Batch) -> ModelLoss:
    return ModelLoss(model(batch["x"])[0], {}, torch.tensor([[2**51, 2**51 - 1, 0, 1]]))


def _huge_loads() -> StepResult:
    return step(Net(), [1, 2], huge_loads)


def test_loads_are_exact_up_to_2_to_the_53():
    for result in run_ranks(2, _huge_loads):
        assert result.expert_load.tolist() == [[2**53, 2**53 - 4, 0, 4]]


def poisoned(model: nn.Module, batch: Batch) -> ModelLoss:
    said = everything(model, batch)
    poison = math.nan if dist.get_rank() == 1 else 1.0
    return said._replace(
        auxiliary={**said.auxiliary, "size": said.auxiliary["size"].detach() * poison}
    )


def _poisoned_step() -> tuple[StepResult, bool, torch.Tensor]:
    model = sharded()
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    result = step(model, [1], poisoned)
    after = [parameter.to_local() for parameter in model.parameters()]
    is_same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return result, is_same, model.router.expert_bias


def test_an_auxiliary_loss_that_is_not_finite_on_one_rank_moves_nothing_on_any():
    for result, is_same, bias in run_ranks(2, _poisoned_step):
        assert math.isfinite(result.loss)
        assert math.isfinite(result.grad_norm), "the gradients would have been usable"
        assert result.is_skipped
        assert not result.is_finite
        assert result.bad_ranks == (1,)
        assert is_same
        assert not bias.any()


@pytest.mark.parametrize(
    "second",
    [
        plain,
        lambda model, batch: everything(model, batch)._replace(auxiliary={"size": torch.zeros(())}),
    ],
)
@on_ranks(1)
def test_microbatches_that_tell_different_things_are_refused(second: ForwardStep):
    answers = iter([everything, second])
    with pytest.raises(ValueError, match="Expected the same losses and loads of every microbatch"):
        step(Net(), [1, 2], lambda model, batch: next(answers)(model, batch))


@on_ranks(1)
def test_an_evaluation_is_of_the_loss_alone_and_moves_no_bias():
    model = Net()
    losses = [
        evaluate(
            model,
            batches([1, 2]),
            forward_step=forward_step,
            num_microbatches=2,
            device=CPU,
            mesh=build_mesh("cpu", 1),
        )
        for forward_step in (plain, everything)
    ]
    assert losses[0] == losses[1] > 0
    assert not model.router.expert_bias.any()
