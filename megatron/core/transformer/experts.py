"""The experts of a mixture: many dense networks of one shape, whose weights are one parameter each.

An expert's matrix is consecutive rows of a parameter [experts x rows, columns], which the forward
views as [experts, rows, columns]. Stored so, a parameter is cut between rows like any other, into
as many parts as there are ranks: see docs/decisions/0037. Each expert's rows are sections of the
parameter, so checkpoints store every expert under its own name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.linear import expert_linear
from megatron.core.low_precision.recipes import Recipe
from megatron.core.transformer.fused_weight import FusedWeight, HasSections, reset_linear
from megatron.core.transformer.grouped_matmul import grouped_matmul
from megatron.core.transformer.mlp import activate, activate_gated
from megatron.core.transformer.spec import MoeSpec


class ExpertLinear(HasSections, nn.Module):
    """One linear layer of every expert.

    Attributes:
        weight: [experts x rows, columns], where rows are output channels, or input channels if
            `rows_are_inputs`. A rank that holds some experts only has the rows of these.
        bias: [experts x out_features], or None.
        matrix_rows: rows of one expert's matrix in `weight`.
        recipe, amax_history: see `Linear`.
    """

    recipe: Recipe | None = None

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool,
        rows_are_inputs: bool,
        num_experts: int,
        init_std: float,
    ) -> None:
        """
        Args:
            parts: the matrices that an expert's is made of, each with its output channels.
        """
        super().__init__()
        out_features = sum(size for _, size in parts)
        self.rows_are_inputs = rows_are_inputs
        self.amax_history: AmaxHistory | None = None
        self.init_std = init_std

        rows, columns = out_features, in_features
        sections = {"weight": parts, "bias": parts}
        if rows_are_inputs:
            rows, columns = in_features, out_features
            # Parts that alternate in the columns are one section.
            name = parts[0][0] if len(parts) == 1 else "linear_fc1"
            sections = {"weight": [(name, rows)], "bias": [(name, out_features)]}
        self._sections = {
            name: FusedWeight(
                [(f"{n}.{part}", size) for n in range(num_experts) for part, size in own]
            )
            for name, own in sections.items()
        }

        self.matrix_rows = rows
        self.weight = nn.Parameter(torch.empty(num_experts * rows, columns))
        self.bias = nn.Parameter(torch.empty(num_experts * out_features)) if bias else None
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights: see `reset_linear`."""
        reset_linear(self.weight, self.bias, self.init_std)

    def sections_of(self, parameter: str) -> FusedWeight:
        """Each expert's rows, or the parts of these."""
        return self._sections[parameter]

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features].

        Args:
            tokens: tokens of the first expert, then of the second, ...
            counts: tokens of each expert whose weights are here: [experts here] int64.
        """
        if self.recipe is not None:
            return expert_linear(
                self.recipe,
                tokens,
                self.weight,
                counts,
                self.bias,
                rows_are_inputs=self.rows_are_inputs,
                history=self.amax_history,
            )
        matrices = self.weight.unflatten(0, (len(counts), -1))
        if not self.rows_are_inputs:
            matrices = matrices.mT
        biases = None if self.bias is None else self.bias.unflatten(0, (len(counts), -1))
        return grouped_matmul(tokens, matrices, counts, biases)


class Experts(nn.Module):
    """All experts of a mixture, or this rank's part of them."""

    def __init__(
        self, spec: MoeSpec, hidden_size: int, *, init_std: float, output_init_std: float
    ) -> None:
        super().__init__()
        self.spec = spec
        expert = spec.expert
        build = partial(
            ExpertLinear,
            bias=expert.has_bias,
            rows_are_inputs=spec.rows_are_inputs,
            num_experts=spec.router.num_experts,
        )
        first = [("gate", expert.size), ("up", expert.size)]
        if not expert.is_gated:
            first = [("linear_fc1", expert.size)]
        self.linear_fc1 = build(hidden_size, first, init_std=init_std)
        self.linear_fc2 = build(
            expert.size, [("linear_fc2", hidden_size)], init_std=output_init_std
        )

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; for the arguments see `ExpertLinear.forward`."""
        inner = self.linear_fc1(tokens, counts)
        expert = self.spec.expert
        if not expert.is_gated:
            inner = activate(expert, inner)
        elif self.spec.rows_are_inputs:
            inner = activate_gated(expert, inner[..., ::2], inner[..., 1::2])
        else:
            inner = activate_gated(expert, *inner.chunk(2, dim=-1))
        output: Tensor = self.linear_fc2(inner, counts)
        return output
