"""`ModelLoss`, a forward step's losses, and the weights and sums of a step's microbatches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.models.gpt.gpt_model import RoutingReport
from megatron.core.transformer.expert_bias import check_loads, shape_of_loads
from megatron.core.transformer.linear_cross_entropy import WeightedLoss
from megatron.core.transformer.spec import Balancing, ModelSpec

MOST_AUXILIARY = 16  # losses that have room in a step's all-reduce


class ModelLoss(NamedTuple):
    """Result of a forward step with more than one loss.

    Attributes:
        loss: the mean loss of the microbatch, which is reported: scalar, fp32, differentiable.
        auxiliary: further losses by name, times their weights: scalars, fp32. Backward is of the
            sum of all losses; each is reported by itself. The same names on every rank and in every
            microbatch; 16 at most.
        expert_load: tokens that chose each expert, from which expert biases are moved:
            [layers with experts, experts] int64, a row for each `Router` of the model; None in a
            model without.
        weight: weight of the microbatch in the means over the global batch, also of the auxiliary
            losses: scalar, not negative, without a gradient, for instance its share of tokens in
            the loss. On all ranks or on none; None: all microbatches count alike.
    """

    loss: torch.Tensor
    auxiliary: Mapping[str, torch.Tensor] = {}
    expert_load: torch.Tensor | None = None
    weight: torch.Tensor | None = None


def auxiliary_losses(spec: ModelSpec, report: RoutingReport) -> dict[str, torch.Tensor]:
    """The auxiliary losses of a model's routers: all with a coefficient."""
    routers = [mixture.router for mixture in spec.mixtures]
    found: dict[str, torch.Tensor] = {}
    if any(router.balance_coeff and router.balancing is not Balancing.NONE for router in routers):
        found["balance"] = report.balance_loss
    if any(router.z_coeff for router in routers):
        found["z"] = report.z_loss
    return found


def loss_of(
    spec: ModelSpec,
    output: WeightedLoss | tuple[WeightedLoss, RoutingReport | None],
    weight: torch.Tensor | None = None,
) -> torch.Tensor | ModelLoss:
    """Converts the output of a model with this spec to the result of a forward step.

    Args:
        weight: of the microbatch; see `ModelLoss`.
    """
    weighted, report = (output, None) if isinstance(output, WeightedLoss) else output
    auxiliary: dict[str, torch.Tensor] = {}
    if spec.z_loss_coeff:
        # Its gradient is in the sum's.
        auxiliary["logit_z"] = weighted.z_loss
    if report is not None:
        auxiliary |= auxiliary_losses(spec, report)
    if report is None and not auxiliary and weight is None:
        return weighted.loss
    load = None if report is None else report.load
    return ModelLoss(weighted.loss - weighted.z_loss, auxiliary, load, weight)


def mean_of_all(labels: torch.Tensor) -> torch.Tensor:
    """The weights of tokens' losses in their mean: [batch, seq] fp32."""
    return torch.full_like(labels, 1.0 / max(1, labels.numel()), dtype=torch.float32)


def mean_of(mask: torch.Tensor) -> torch.Tensor:
    """Returns the weight of each token's loss in the mean over tokens with a mask of 1: [batch,
    seq] fp32; zeros if the mask is 0 everywhere.
    """
    return mask / mask.sum().clamp(min=1.0)


def weight_of(mask: torch.Tensor, *, is_per_token: bool) -> torch.Tensor:
    """The weight of a microbatch whose tokens have this mask: [] fp32.

    1, or 0 for a microbatch without learned tokens, whose loss of 0 would reduce the mean.

    Args:
        is_per_token: whether the mean of all microbatches is to be one over their tokens. The
            weight is the share of tokens with a mask of 1 then: not their number, so that gradients
            keep their magnitude, which 16 bits may have to hold.
    """
    if is_per_token:
        return mask.sum() / max(1, mask.numel())
    return mask.any().float()


def as_model_loss(said: torch.Tensor | ModelLoss) -> ModelLoss:
    """Converts a forward step's result. Raises TypeError unless its losses are tensors."""
    loss = said if isinstance(said, ModelLoss) else ModelLoss(said)
    weights = () if loss.weight is None else (loss.weight,)
    for part in (loss.loss, *loss.auxiliary.values(), *weights):
        if not torch.is_tensor(part):
            raise TypeError(
                "Expected the loss of a microbatch, its weight and each auxiliary loss as a tensor "
                f"without dimensions, got a {type(part).__name__}. A forward step returns a "
                'tensor, or ModelLoss(loss, {"balance": ...}, expert_load, weight).'
            )
    return loss


class Told:
    """Sums of this rank's forward step results, on the device.

    Attributes:
        names: of the auxiliary losses, in the order that all ranks have.
        losses: means over the microbatches, times their weights: the loss, then the auxiliary
            ones; [] fp64 each.
        weight: the sum of the weights of the microbatches: [] fp64, 0 if they have none.
        is_weighted: whether they have weights.
        num_microbatches: that were counted.
        load: tokens of each expert: [layers with experts, experts] int64, or None.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.names: list[str] = []
        # fp64: the mean over ranks and microbatches must not depend on how many of either there
        # are.
        self.losses = [torch.zeros((), dtype=torch.float64, device=device)]
        self.weight = torch.zeros_like(self.losses[0])
        self.is_weighted = False
        self.num_microbatches = 0
        self.load: torch.Tensor | None = None
        self._is_empty = True
        self._model = model

    @cached_property
    def load_shape(self) -> tuple[int, int] | None:
        """The shape that loads of this model have; None without routers."""
        # Looked up while the device computes a forward or backward: it walks over all modules.
        return shape_of_loads(self._model)

    def add(self, said: ModelLoss, num_microbatches: int) -> torch.Tensor:
        """Counts one of so many microbatches in. Returns its part of the loss to train with, whose
        gradients are still to be divided by the mean weight of all microbatches.

        Raises:
            ValueError: for loads of another model, for too many auxiliary losses, and for losses
                that differ from the first microbatch's. The microbatch is not counted.
        """
        names, load, weight = sorted(said.auxiliary), said.expert_load, said.weight
        if load is not None:
            check_loads(load, self.load_shape)
        if len(names) > MOST_AUXILIARY:
            raise ValueError(
                f"Expected at most {MOST_AUXILIARY} auxiliary losses, got {len(names)}."
            )

        if self._is_empty:
            self._is_empty, self.names, self.load = False, names, load
            self.is_weighted = weight is not None
            self.losses += [torch.zeros_like(self.losses[0]) for _ in names]
        elif (names, load is None, weight is None) != (
            self.names,
            self.load is None,
            not self.is_weighted,
        ):
            raise ValueError(
                "Expected the same losses and loads of every microbatch, got auxiliary losses "
                f"{self.names}, then {names}, or loads or a weight in one of them only."
            )
        elif load is not None and self.load is not None:
            self.load = self.load + load

        parts = [said.loss, *(said.auxiliary[name] for name in names)]
        parts = [part / num_microbatches for part in parts]
        if weight is not None:
            self.weight += weight.detach()
            parts = [part * weight.detach().to(part.dtype) for part in parts]
        self.num_microbatches += 1
        for total, part in zip(self.losses, parts, strict=True):
            total += part.detach()
        return sum(parts[1:], start=parts[0])

    @property
    def is_bad(self) -> torch.Tensor:
        """Whether a loss is not finite: [] bool."""
        return ~torch.isfinite(torch.stack([self.weight, *self.losses])).all()

    @property
    def room(self) -> torch.Tensor:
        """Weight, losses and loads in one fp64 tensor, with zeros for missing ones.

        Its length follows from the model alone. Ranks that report different values can therefore
        detect this in the all-reduce that sums these tensors.
        """
        unused = torch.zeros_like(self.losses[0]).expand(MOST_AUXILIARY - len(self.names))
        losses = torch.cat([torch.stack([self.weight, *self.losses]), unused])
        if self.load_shape is None:
            return losses
        if self.load is None:
            return torch.cat([losses, losses.new_zeros(math.prod(self.load_shape))])
        # fp64 counts tokens exactly, up to 2**53.
        return torch.cat([losses, self.load.flatten().to(losses)])

    @property
    def digest(self) -> int:
        """A number below 2^48 for the names and for whether there are loads and weights."""
        kind = repr((self.names, self.load is not None, self.is_weighted)).encode()
        return int.from_bytes(hashlib.blake2b(kind, digest_size=6).digest(), "little")

    def compare(self, digests: Sequence[float]) -> None:
        """ValueError, on every rank, unless all ranks' digests are the same."""
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            loads = "no loads" if self.load is None else "loads"
            weights = "weights" if self.is_weighted else "no weights"
            raise ValueError(
                "Expected forward steps that report the same auxiliary losses, loads and weights "
                f"on every rank, got others on ranks {others} than on rank 0. This rank has "
                f"auxiliary losses {self.names}, {loads} and {weights}."
            )
