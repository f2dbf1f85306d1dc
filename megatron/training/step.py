"""One training step over a global batch, and evaluation.

A rank runs its microbatches forward and backward. One all-reduce computes the gradient norm,
another the loss and the votes; one transfer brings all of it to the host, and then all ranks step
or none does. As much of the optimizer's step as possible is planned while the device computes the
norm, so the device does not idle afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.megatron_fsdp import context_of, microbatch_of
from megatron.core.issued_collectives import issuing
from megatron.core.low_precision.amax_history import AmaxHistory, update_histories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, PlannedStep
from megatron.core.timeline import NO_TIMELINE, RANKS, AnyTimeline
from megatron.core.transformer.expert_bias import update_expert_bias
from megatron.training.health.exits import ExitCode, ExitError
from megatron.training.health.progress import Phase
from megatron.training.model_loss import MOST_AUXILIARY, ModelLoss, Told, as_model_loss

# Tensors go to the device; tuples are values of the host and stay there.
Batch = dict[str, Any]


# (model, one microbatch) -> its mean loss, scalar fp32, differentiable; or that and more
ForwardStep = Callable[[nn.Module, Batch], "torch.Tensor | ModelLoss"]
# called at the start of each phase of a step: batch, forward, backward (for each microbatch),
# agree, step
MarkPhase = Callable[[Phase], None]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one training step; the same on every rank."""

    # Mean over the global batch by `ModelLoss.weight`, before the step; without auxiliary losses.
    loss: float
    grad_norm: float  # global L2 norm, unscaled, before clipping
    is_skipped: bool  # no update, because a loss or the norm was not finite
    bad_ranks: tuple[int, ...]  # ranks of which a loss was not finite
    votes: tuple[float, ...]  # summed over ranks
    loss_scale: float | None = None  # of the next step; None: the loss is not scaled
    num_zeros: int | None = None  # zeros among the elements of all gradients; None: not asked for
    num_samples: int = 0  # in the global batch
    learning_rate: float = 0.0  # of this step
    # All tokens of the global batch are masked: all of its weights are 0. The loss of 0 is
    # meaningless, and only weight decay and momentum have changed the parameters.
    is_masked: bool = False
    # Means over the global batch, by the names of `ModelLoss.auxiliary`.
    auxiliary: dict[str, float] = field(default_factory=dict)
    # Tokens of the global batch that chose each expert: [layers with experts, experts] int64, on
    # the host. Left out of comparisons, in which a tensor is no truth value.
    expert_load: torch.Tensor | None = field(default=None, compare=False)

    @property
    def total_loss(self) -> float:
        """The sum of all losses: what backward was of."""
        return self.loss + sum(self.auxiliary.values())

    @property
    def is_finite(self) -> bool:
        """Whether all losses are finite."""
        return math.isfinite(self.total_loss)


@dataclass
class StepInfo:
    """How far training has come. With the schedule, all that resuming needs besides tensors."""

    iteration: int = 0  # steps made, including skipped ones
    consumed_samples: int = 0  # over all ranks
    skipped_iterations: int = 0  # without an update
    nan_iterations: int = 0  # whose loss was not finite


class NonFiniteLossError(ExitError):
    """The loss of a training step is NaN or infinite, which ends the run."""

    def __init__(self, iteration: int, ranks: tuple[int, ...], loss: float) -> None:
        where = ", ".join(str(rank) for rank in ranks)
        super().__init__(
            ExitCode.NON_FINITE_LOSS,
            f"Expected a finite loss in iteration {iteration}, got {loss} (on rank {where}).",
        )


class AllMaskedError(ValueError):
    """All tokens of an evaluation's data are masked, so its loss is undefined."""


def unmarked(_phase: Phase) -> None:
    """A `MarkPhase` without effect."""


class StepJournal(Protocol):
    """Records a step as it proceeds, so that another process can finish it."""

    def landed(self) -> None:
        """Called after the backward, before the ranks' vote."""

    def decided(self, result: StepResult, grad_divisor: float) -> None:
        """Called once the ranks have agreed, before anything is updated."""


def train_step(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    microbatches: Iterator[Batch],
    *,
    forward_step: ForwardStep,
    num_microbatches: int,
    device: torch.device,
    mesh: DeviceMesh,
    ranks_per_sample: int = 1,
    votes: Callable[[], tuple[float, ...]] = tuple,
    mark: MarkPhase = unmarked,
    journal: StepJournal | None = None,
    histories: Sequence[AmaxHistory] = (),
) -> StepResult:
    """Forward and backward over this rank's share of one global batch, then the optimizer's step.
    Where the forward steps count expert loads, expert biases are moved with it.

    If a loss or the gradient norm is not finite on any rank, no rank changes its weights, its
    expert biases or its optimizer; the loss scaler of fp16, if used, counts an overflow.
    The result is unscaled. Gradients are cleared before the function returns.

    Args:
        microbatches: this rank's; every tensor has its samples in the first dimension, and all
            ranks have equally many.
        ranks_per_sample: how many ranks have the same samples. The means over all ranks are right
            as they are. Tensor-parallel ranks have the same loss. Context-parallel ranks multiply
            their part of the sum by the number of parts (`SequenceSlice`). Each has the weight of
            the whole microbatch.
        votes: called after the backward, so a signal counts in the step that it arrived in.
        journal: records the step.
        histories: delayed scaling's; their step ends, too, also where it is skipped.

    Raises:
        TypeError, ValueError: for microbatches, losses or loads that are not as described, or that
            differ between microbatches or ranks. No update was made, and gradients are
            cleared.
        RuntimeError: that names the first difference between the ranks' collectives or gradients.
            No update was made.
    """
    model.train()
    told = Told(model, device)
    with _clearing_on_error(optimizer, histories):
        num_samples = _forward_and_backward(
            model,
            optimizer,
            microbatches,
            told,
            forward_step=forward_step,
            num_microbatches=num_microbatches,
            device=device,
            mark=mark,
        )
        mark(Phase.AGREE)
        if journal is not None:
            journal.landed()
        agreed, planned = _agree_and_plan(model, optimizer, told, votes, mesh)
    bad_ranks = _ranks_with_bad_loss(told, mesh) if agreed.num_bad else ()

    mark(Phase.STEP)
    norm = math.nan if agreed.num_bad else agreed.grad_norm
    num_samples = num_samples * mesh.size() // ranks_per_sample
    result = _result(agreed, told, num_samples, mesh)
    result = replace(result, is_skipped=not math.isfinite(norm), bad_ranks=bad_ranks)
    if journal is not None:
        journal.decided(result, agreed.grad_divisor)
    # Before the optimizer may quantize the next step's weights.
    update_histories(histories, mesh.get_group())
    optimizer.step(norm, planned, grad_divisor=agreed.grad_divisor)
    optimizer.zero_grad()
    return end_step(model, optimizer, result)


def end_step(model: nn.Module, optimizer: DistributedOptimizer, result: StepResult) -> StepResult:
    """Moves the expert biases, after the optimizer's launch, which does not wait for this. Returns
    the result with the loss scale of the next step.
    """
    if not result.is_skipped and result.expert_load is not None:
        update_expert_bias(model, result.expert_load)
    loss_scale = None if optimizer.loss_scaler is None else optimizer.loss_scale
    return replace(result, loss_scale=loss_scale)


@contextmanager
def _clearing_on_error(
    optimizer: DistributedOptimizer, histories: Sequence[AmaxHistory]
) -> Iterator[None]:
    """Clears gradients and maxima, which would otherwise be added to the ones of the caller's next
    step.
    """
    try:
        yield
    except (TypeError, ValueError):
        optimizer.zero_grad()
        for history in histories:
            history.current.zero_()
        raise


def _result(agreed: _Agreed, told: Told, num_samples: int, mesh: DeviceMesh) -> StepResult:
    """Of a step that is not skipped, with this number of samples."""
    _, *zeros = agreed.measures
    loss, *auxiliary = (total / mesh.size() / agreed.grad_divisor for total in agreed.loss_sums)
    return StepResult(
        loss=loss,
        grad_norm=agreed.grad_norm,
        is_skipped=False,
        bad_ranks=(),
        votes=agreed.votes,
        num_zeros=int(zeros[0]) if zeros else None,
        num_samples=num_samples,
        is_masked=agreed.is_masked,
        auxiliary=dict(zip(told.names, auxiliary, strict=True)),
        expert_load=agreed.load,
    )


def _forward_and_backward(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    microbatches: Iterator[Batch],
    told: Told,
    *,
    forward_step: ForwardStep,
    num_microbatches: int,
    device: torch.device,
    mark: MarkPhase,
) -> int:
    """Runs this rank's microbatches, and adds the results of the forward steps to `told`. Returns
    the number of samples.
    """
    num_samples = 0
    for number in range(num_microbatches):
        mark(Phase.BATCH)
        batch = _to_device(_next(microbatches, number, num_microbatches), device)
        num_samples += len(next(iter(batch.values())))
        with microbatch_of(model, is_last=number == num_microbatches - 1):
            mark(Phase.FORWARD)
            said = as_model_loss(forward_step(model, batch))
            mark(Phase.BACKWARD)
            optimizer.scale_loss(told.add(said, num_microbatches)).backward()
    return num_samples


@torch.no_grad()
def evaluate(
    model: nn.Module,
    microbatches: Iterator[Batch],
    *,
    forward_step: ForwardStep,
    num_microbatches: int,
    device: torch.device,
    mesh: DeviceMesh,
) -> float:
    """The mean loss over `num_microbatches` microbatches of every rank by their weights, without
    auxiliary losses and dropout; the same on every rank. AllMaskedError, on every rank, if all
    weights are 0.
    """
    was_training = model.training
    model.eval()
    # The sum of the losses, times their weights, and that of the weights.
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        for number in range(num_microbatches):
            batch = _to_device(_next(microbatches, number, num_microbatches), device)
            said = as_model_loss(forward_step(model, batch))
            weight = torch.ones_like(sums[0]) if said.weight is None else said.weight.double()
            sums += torch.stack([said.loss * weight, weight])
    finally:
        model.train(was_training)
    total, total_weight = _sum_over_ranks(sums, mesh)
    if total_weight == 0:
        raise AllMaskedError(
            f"Expected learned tokens in the {num_microbatches} microbatches of each rank, got "
            "masks, or weights of losses, that are all 0. Evaluate on other data, or on more of it "
            "(--eval-iters)."
        )
    return total / total_weight


def _sum_over_ranks(sums: torch.Tensor, mesh: DeviceMesh) -> list[float]:
    """The sums over the ranks, on the host."""
    with issuing("all-reduce of the evaluation's loss", sums):
        dist.all_reduce(sums, group=mesh.get_group())
    found: list[float] = sums.tolist()
    return found


def _next(microbatches: Iterator[Batch], number: int, wanted: int) -> Batch:
    """The next microbatch. Raises ValueError at the end: a StopIteration would silently end a loop
    of the caller.
    """
    batch = next(microbatches, None)
    if batch is None:
        raise ValueError(f"Expected {wanted} microbatches, got {number}.")
    return batch


def _plan(optimizer: DistributedOptimizer) -> PlannedStep | None:
    """Plans as much of the step as does not depend on the norm; None if the optimizer raises.

    The step itself will raise the error again. It is deferred because ranks first compare their
    collectives, and a skipped step needs no plan.
    """
    try:
        return optimizer.plan_step()
    except (ValueError, RuntimeError):
        return None


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if not isinstance(batch, Mapping) or not all(
        isinstance(value, (torch.Tensor, tuple)) for value in batch.values()
    ):
        kind = type(batch).__name__
        got = f"a {kind} of other values" if isinstance(batch, Mapping) else f"a {kind}"
        raise TypeError(
            f"Expected microbatches that are each a dict of tensors, got {got}. A global batch is "
            'a sequence of them: train_batch([{"tokens": ...}, ...], forward_step).'
        )
    return {
        name: value if isinstance(value, tuple) else value.to(device, non_blocking=True)
        for name, value in batch.items()
    }


class _Agreed(NamedTuple):
    """Values that are equal on all ranks at the end of a step."""

    loss_sums: tuple[float, ...]  # the loss, then the auxiliary ones, times weights
    # The mean weight of all microbatches, by which gradients are too large; 1 without weights, or
    # if all are 0.
    grad_divisor: float
    is_masked: bool  # there are weights, and all are 0
    num_bad: float  # ranks of which a loss is not finite
    votes: tuple[float, ...]  # summed
    digests: tuple[float, ...]  # of each rank's collectives; see `CollectiveHistory`
    told: tuple[float, ...]  # of each rank's results; see `Told.digest`
    load: torch.Tensor | None  # summed: [layers with experts, experts] int64, on the host
    # Norm of gradients that are not yet divided and, if asked for, zeros among them.
    measures: tuple[float, ...]

    @property
    def grad_norm(self) -> float:
        return self.measures[0] / self.grad_divisor


def _agree_and_plan(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    told: Told,
    votes: Callable[[], tuple[float, ...]],
    mesh: DeviceMesh,
) -> tuple[_Agreed, PlannedStep | None]:
    """Agrees on the step's scalars after the backward, and plans the optimizer's step meanwhile."""
    measures = [optimizer.grad_norm(), optimizer.num_zeros()]
    own_votes = votes()
    context = context_of(model)
    digest = 0 if context is None else context.digest
    shared = _agree(told, measures, own_votes, mesh, digest, optimizer.timeline)

    # While the device still computes the norm: after the transfer it would wait for Python.
    planned = _plan(optimizer)
    agreed = _read(shared, told, len(own_votes), mesh)
    if context is not None:
        context.compare_digests(agreed.digests)
    told.compare(agreed.told)
    return agreed, planned


def _agree(
    told: Told,
    measures: Sequence[torch.Tensor | None],
    own_votes: Sequence[float],
    mesh: DeviceMesh,
    digest: int = 0,
    timeline: AnyTimeline = NO_TIMELINE,
) -> torch.Tensor:
    """Scalars for `_read`, the same on every rank; on the device.

    The measures (fp64; None is left out) are equal on all ranks already; the rest takes one
    all-reduce.
    """
    loss = told.losses[0]
    is_bad = told.is_bad.to(loss.dtype)
    votes = [torch.full_like(loss, vote) for vote in own_votes]

    # Two places for each rank, where the others add zero. Kernels fill the numbers in, since a copy
    # from the host would wait for the device.
    digests = torch.zeros(2, mesh.size(), dtype=loss.dtype, device=loss.device)
    for row, number in zip(digests, (digest, told.digest), strict=True):
        row[mesh.get_local_rank()].fill_(number)

    shared = torch.cat([told.room, torch.stack([is_bad, *votes]), digests.flatten()])
    name = "all-reduce of the step's loss and votes"
    with timeline.waiting(RANKS), issuing(name, shared):
        dist.all_reduce(shared, group=mesh.get_group())
    known = [measure.to(loss.device).reshape(1) for measure in measures if measure is not None]
    return torch.cat([shared, *known])


def _read(scalars: torch.Tensor, told: Told, num_votes: int, mesh: DeviceMesh) -> _Agreed:
    """Copies the agreed scalars to the host: the step's only synchronisation."""
    num_loads = math.prod(told.load_shape or (0,))
    sizes = [1, 1 + MOST_AUXILIARY, num_loads, 1, num_votes, mesh.size(), mesh.size()]
    on_host = scalars.cpu()
    weight, losses, load, num_bad, votes, digests, kinds, measures = on_host.split(
        [*sizes, len(on_host) - sum(sizes)]
    )
    return _Agreed(
        tuple(losses[: len(told.losses)].tolist()),
        _grad_divisor(float(weight), told, mesh),
        told.is_weighted and float(weight) == 0,
        float(num_bad),
        tuple(votes.tolist()),
        tuple(digests.tolist()),
        tuple(kinds.tolist()),
        None if told.load is None else load.long().view(told.load.shape),
        tuple(measures.tolist()),
    )


def _grad_divisor(weight: float, told: Told, mesh: DeviceMesh) -> float:
    """See `_Agreed.grad_divisor`. Exactly 1 for weights of 1.

    Args:
        weight: the sum over all microbatches of all ranks.
    """
    return weight / (told.num_microbatches * mesh.size()) if weight else 1.0


def _ranks_with_bad_loss(told: Told, mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of which a loss is not finite. A collective: all ranks call it, or none does."""
    flags = torch.zeros(mesh.size(), dtype=torch.float64, device=told.losses[0].device)
    flags[mesh.get_local_rank()] = told.is_bad.double()
    with issuing("all-reduce of who has a bad loss", flags):
        dist.all_reduce(flags, group=mesh.get_group())
    return tuple(rank for rank, flag in enumerate(flags.tolist()) if flag)
