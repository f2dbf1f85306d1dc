"""Steps whose forward gives more than a loss: auxiliary losses and the loads of experts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import Placements, fully_shard, fully_shard_context
from megatron.core.distributed.torch_fsdp2 import shard_model
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.router import Router
from megatron.core.transformer.spec import RouterSpec, Scores
from megatron.training.model_loss import ModelLoss, weight_of
from megatron.training.step import (
    AllMaskedError,
    Batch,
    ForwardStep,
    StepResult,
    evaluate,
    train_step,
)
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


def step(
    model: nn.Module,
    mine: list[int],
    forward_step: ForwardStep,
    optimizer: DistributedOptimizer | None = None,
) -> StepResult:
    return train_step(
        model,
        optimizer or DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 0.0),
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
    loss, auxiliary, load, _ = everything(model, whole)
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


def test_microbatches_that_teach_nothing_do_not_count_and_others_alike_or_by_their_tokens():
    masks = [torch.tensor(rows) for rows in ([[1.0, 0.0, 0.0, 0.0]], [[0.0] * 4], [[1.0] * 4])]
    assert [weight_of(mask, is_per_token=False).item() for mask in masks] == [1, 0, 1]
    assert [weight_of(mask, is_per_token=True).item() for mask in masks] == [0.25, 0, 1]


@pytest.mark.parametrize("count", [3, 7, 10])
@on_ranks(1)
def test_weights_of_one_change_no_bit(count: int):
    def all_alike(model: nn.Module, batch: Batch) -> ModelLoss:
        return ModelLoss(plain(model, batch), weight=torch.ones(()))

    numbers = list(range(count))
    models = [Net(), Net()]
    found = [step(*pair) for pair in zip(models, [numbers] * 2, (plain, all_alike), strict=True)]
    assert found[0] == found[1]
    assert torch.equal(*(model.linear.weight for model in models))


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
        lambda model, batch: everything(model, batch)._replace(weight=torch.ones(())),
    ],
)
@on_ranks(1)
def test_microbatches_that_report_different_losses_or_loads_are_rejected(second: ForwardStep):
    answers = iter([everything, second])
    with pytest.raises(ValueError, match="Expected the same losses and loads of every microbatch"):
        step(Net(), [1, 2], lambda model, batch: next(answers)(model, batch))


def of_the_outputs(model: nn.Module, batch: Batch) -> ModelLoss:
    """As many losses as `everything`, without weights that are not whole outside of forward."""
    loss, load = model(batch["x"])
    return ModelLoss(loss, {"size": 0.5 * loss, "decay": 0.1 * loss}, load)


def weighted(model: nn.Module, batch: Batch) -> ModelLoss:
    """Weights that are far from 1, and 0 for one of the microbatches."""
    said = of_the_outputs(model, batch)
    return said._replace(weight=(300 * batch["x"][0, 0] + 400).clamp(min=0).detach())


def _weighted_step(shares: list[list[int]], is_megatron: bool) -> tuple[StepResult, Any, float]:
    """With clipping, for which gradients must have their right size."""
    model = Net()
    if is_megatron:
        with fully_shard_context("cpu"):
            fully_shard(
                model,
                init_device_mesh("cpu", (dist.get_world_size(),)),
                Placements.for_strategy("optim_grads_params"),
            )
    else:
        model = sharded()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    mine = shares[dist.get_rank()]
    evaluated = evaluate(
        model,
        batches(mine),
        forward_step=weighted,
        num_microbatches=len(mine),
        device=CPU,
        mesh=build_mesh("cpu", dist.get_world_size()),
    )
    if not is_megatron:
        model.reshard()
    result = step(model, mine, weighted, optimizer)
    return result, [p.full_tensor().detach() for p in model.linear.parameters()], evaluated


@pytest.mark.parametrize("is_megatron", [True, False], ids=["megatron-fsdp", "torch-fsdp2"])
def test_a_microbatch_counts_by_its_weight_on_whatever_rank_it_is(is_megatron: bool):
    """As plain PyTorch has the weighted mean of all losses, the auxiliary ones included."""
    model = Net()
    said = [weighted(model, batch) for batch in batches([1, 2, 3, 4])]
    weights = torch.stack([one.weight for one in said])
    assert weights.min() == 0, "a microbatch that does not count"
    assert weights.unique().numel() > 2

    def mean(losses: list[torch.Tensor]) -> torch.Tensor:
        return (torch.stack(losses) * weights).sum() / weights.sum()

    loss = mean([one.loss for one in said])
    auxiliary = {n: mean([one.auxiliary[n] for one in said]) for n in ("decay", "size")}
    sum(auxiliary.values(), start=loss).backward()
    norm = nn.utils.clip_grad_norm_(model.linear.parameters(), 0.5)
    assert norm > 0.5, "gradients are clipped"
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    for world_size, shares in ((1, [[1, 2, 3, 4]]), (2, [[1, 3], [2, 4]])):
        for result, found, evaluated in run_ranks(world_size, _weighted_step, shares, is_megatron):
            assert result.loss == pytest.approx(loss.item(), rel=1e-6)
            assert evaluated == pytest.approx(loss.item(), rel=1e-6)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            for name, value in auxiliary.items():
                assert result.auxiliary[name] == pytest.approx(value.item(), rel=1e-6)
            for ours, theirs in zip(found, model.linear.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


@on_ranks(1)
def test_a_step_of_microbatches_that_do_not_count_has_no_gradients():
    def forward_step(model: nn.Module, batch: Batch) -> ModelLoss:
        return of_the_outputs(model, batch)._replace(weight=torch.zeros(()))

    model, before = Net(), Net()
    result = step(model, [1, 2], forward_step)
    assert (result.loss, result.grad_norm, result.is_skipped) == (0.0, 0.0, False)
    assert result.is_masked
    assert torch.equal(model.linear.weight, before.linear.weight)


def _on_masked_ranks(masked: tuple[int, ...]) -> tuple[bool, float | None]:
    """Whether a step is fully masked, and an evaluation's loss, with weights of 0 on some ranks."""
    weight = torch.tensor(float(dist.get_rank() not in masked))

    def forward_step(model: nn.Module, batch: Batch) -> ModelLoss:
        return of_the_outputs(model, batch)._replace(weight=weight)

    loss, model = None, Net()
    with contextlib.suppress(AllMaskedError):
        loss = evaluate(
            model,
            batches([1, 2]),
            forward_step=forward_step,
            num_microbatches=2,
            device=CPU,
            mesh=build_mesh("cpu", dist.get_world_size()),
        )
    assert model.training
    return step(model, [1, 2], forward_step).is_masked, loss


def test_a_loss_is_missing_where_no_rank_learns_a_token_and_there_where_one_does():
    assert run_ranks(2, _on_masked_ranks, (0, 1)) == [(True, None)] * 2
    (first, second) = run_ranks(2, _on_masked_ranks, (1,))
    assert first == second
    is_masked, loss = first
    assert not is_masked
    assert loss is not None
    assert loss > 0


def told_alike(_number: int, said: ModelLoss) -> ModelLoss:
    """Returns the losses unchanged, on every rank."""
    return said


def other_names(number: int, said: ModelLoss) -> ModelLoss:
    """As many losses on both ranks, which could be summed."""
    return said._replace(auxiliary={"size": said.loss, f"of {number}": said.loss})


def other_numbers_of_losses(number: int, said: ModelLoss) -> ModelLoss:
    return said._replace(auxiliary={"size": said.loss} if number else {})


def loads_on_one(number: int, said: ModelLoss) -> ModelLoss:
    return said if number else said._replace(expert_load=None)


def weights_on_one(number: int, said: ModelLoss) -> ModelLoss:
    return said if number else said._replace(weight=torch.ones(()))


class Outcome(NamedTuple):
    error: str
    unchanged: bool
    next_norm: float


def _refused(
    change: Callable[[int, ModelLoss], ModelLoss],
    of_microbatches: bool,
    is_megatron: bool,
) -> Outcome:
    """A step of two microbatches that differ, between ranks or else microbatches, and one of which
    nothing is changed.
    """
    model = Net()
    if is_megatron:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with fully_shard_context("cpu"):
            fully_shard(model, mesh, Placements.for_strategy("optim_grads_params"))
    else:
        mesh = build_mesh("cpu", dist.get_world_size())
        shard_model(model, mesh, compute_dtype=torch.float32, reshard_after_forward=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 0.0)
    numbers = iter([0, 1] if of_microbatches else [dist.get_rank()] * 2)

    def forward_step(model: nn.Module, batch: Batch) -> ModelLoss:
        return change(next(numbers), of_the_outputs(model, batch))

    before = [local_tensor(x).clone() for x in (*model.parameters(), model.router.expert_bias)]
    error = ""
    try:
        step(model, [1, 2], forward_step, optimizer)
    except ValueError as raised:
        error = str(raised)
    if not is_megatron:
        model.reshard()  # FSDP2 keeps the root's weights whole between forward and backward
    after = [local_tensor(x) for x in (*model.parameters(), model.router.expert_bias)]
    unchanged = all(map(torch.equal, before, after))
    return Outcome(error, unchanged, step(model, [3], of_the_outputs, optimizer).grad_norm)


@pytest.fixture(scope="module")
def next_norm() -> float:
    """Of a step whose model has never seen another one."""
    model = Net()
    (batch,) = batches([3])
    loss, auxiliary, *_ = of_the_outputs(model, batch)
    sum(auxiliary.values(), start=loss).backward()
    return float(nn.utils.get_total_norm(p.grad for p in model.linear.parameters()))


@pytest.mark.parametrize("is_megatron", [True, False], ids=["megatron-fsdp", "torch-fsdp2"])
@pytest.mark.parametrize(
    ("change", "others"),
    [
        (other_names, "has auxiliary losses ['of 0', 'size'], loads and no weights."),
        (other_numbers_of_losses, "has auxiliary losses [], loads and no weights."),
        (loads_on_one, "has auxiliary losses ['decay', 'size'], no loads and no weights."),
        (weights_on_one, "has auxiliary losses ['decay', 'size'], loads and weights."),
    ],
)
def test_ranks_that_tell_different_things_are_an_error_on_all_before_anything_moves(
    change, others: str, is_megatron: bool, next_norm: float
):
    found = run_ranks(2, _refused, change, False, is_megatron)
    for outcome in found:
        assert "on every rank, got others on ranks [1] than on rank 0." in outcome.error
        assert outcome.unchanged
        assert outcome.next_norm == pytest.approx(next_norm, rel=1e-5)
    assert found[0].error.endswith(others)


def loads_of_another_model(_number: int, said: ModelLoss) -> ModelLoss:
    return said._replace(expert_load=torch.ones(2, 4, dtype=torch.int64))


def loads_in_fp32(_number: int, said: ModelLoss) -> ModelLoss:
    return said._replace(expert_load=said.expert_load.float())


def more_rows_later(number: int, said: ModelLoss) -> ModelLoss:
    """A sum that broadcasting would allow."""
    return said._replace(expert_load=said.expert_load.expand(1 + 2 * number, -1))


@pytest.mark.parametrize("is_megatron", [True, False], ids=["megatron-fsdp", "torch-fsdp2"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (loads_of_another_model, "torch.int64 (2, 4)"),
        (loads_in_fp32, "torch.float32 (1, 4)"),
        (more_rows_later, "torch.int64 (3, 4)"),
    ],
)
def test_loads_of_another_shape_or_dtype_are_rejected_before_anything_moves(
    change, got: str, is_megatron: bool, next_norm: float
):
    for outcome in run_ranks(2, _refused, change, True, is_megatron):
        assert outcome.error == (
            f"Expected int64 loads of shape (1, 4), a row for each router, got {got}."
        )
        assert outcome.unchanged
        assert outcome.next_norm == pytest.approx(next_norm, rel=1e-5)


def _alike() -> Outcome:
    return _refused(told_alike, False, True)


def test_ranks_that_report_the_same_losses_are_accepted_and_step():
    for outcome in run_ranks(2, _alike):
        assert outcome.error == ""
        assert not outcome.unchanged


@on_ranks(1)
def test_loads_of_a_model_without_routers_and_too_many_losses_are_rejected():
    model = nn.Linear(4, 1)
    load = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="Expected no loads from a model without a Router, got"):
        step(model, [1], lambda model, batch: ModelLoss(model(batch["x"]).mean(), {}, load))
    many = {str(number): torch.zeros(()) for number in range(17)}
    with pytest.raises(ValueError, match="Expected at most 16 auxiliary losses, got 17"):
        step(model, [1], lambda model, batch: ModelLoss(model(batch["x"]).mean(), many))


@pytest.mark.parametrize(
    ("wrap", "got"),
    [
        (lambda loss: (loss, {}), "tuple"),
        (float, "float"),
        (lambda loss: ModelLoss(loss, {"size": 0.5}), "float"),
        (lambda loss: ModelLoss(loss, weight=3), "int"),
    ],
)
@on_ranks(1)
def test_a_loss_that_is_no_tensor_is_rejected_with_what_to_return(
    wrap: Callable[[torch.Tensor], Any], got: str
):
    expected = f"without dimensions, got a {got}. A forward step returns a tensor, or ModelLoss"
    with pytest.raises(TypeError, match=expected):
        step(Net(), [1], lambda model, batch: wrap(plain(model, batch)))


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
