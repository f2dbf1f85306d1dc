"""A linear layer, or one of each expert, whose products have quantised operands.

Kept for backward are the codes of the inputs, as the gradient of the weight reads them, and not the
inputs. The weight is quantised again in backward: its codes would outlive the gathered weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autocast import without_autocast
from megatron.core.low_precision.amax_history import AmaxHistory, Slot
from megatron.core.low_precision.products import product
from megatron.core.low_precision.recipes import Recipe
from megatron.core.low_precision.scaling import Operand, QuantizedWeight, Scaling


def linear(
    recipe: Recipe,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    history: AmaxHistory | None = None,
) -> Tensor:
    """`F.linear` by a recipe: [..., in], [out, in], [out] -> [..., out], differentiable.

    Args:
        weight: bf16 or fp32; if it has an attribute `quantized`, a `QuantizedWeight`, its own
            elements are not read.
        history: delayed scaling's.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    layer = _Layer(recipe, weight, history, [len(rows)])
    apply: Any = _Linear.apply  # torch declares it without types
    output: Tensor = apply(rows, weight, bias, layer)
    return output.view(*inputs.shape[:-1], output.shape[1])


def expert_linear(
    recipe: Recipe,
    tokens: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    rows_are_inputs: bool = False,
    history: AmaxHistory | None = None,
) -> Tensor:
    """A linear layer of every expert by a recipe. Each expert's tokens are operands by themselves.
    The host waits for the counts.

    Args:
        tokens: [tokens, in], tokens of the first expert, then of the second, ...
        weight: [experts x out, in], or [experts x in, out] if `rows_are_inputs`; see `linear`.
        counts: tokens of each expert: [experts] int64.
        bias: [experts x out].

    Returns:
        [tokens, out].

    Raises:
        ValueError: for counts that do not add up to the tokens.
    """
    sizes = counts.tolist()
    if sum(sizes) != len(tokens):
        raise ValueError(f"Expected counts that add up to {len(tokens)} tokens, got {sum(sizes)}.")
    layer = _Layer(recipe, weight, history, sizes, rows_are_inputs=rows_are_inputs)
    apply: Any = _Linear.apply
    output: Tensor = apply(tokens, weight, bias, layer)
    return output


@dataclass
class _Layer:
    """One call of a layer.

    Attributes:
        sizes: tokens of each expert; of a layer without experts, all of them.
        rows_are_inputs: whether the weight's matrices are [in, out].
        records: whether autograd records the call. Inside `forward` grad mode is always off.
    """

    recipe: Recipe
    weight: Tensor
    history: AmaxHistory | None
    sizes: Sequence[int]
    rows_are_inputs: bool = False
    records: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def out_features(self) -> int:
        rows, columns = self.weight.shape
        return columns if self.rows_are_inputs else rows // len(self.sizes)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """The experts that have tokens, and where these are."""
        start = 0
        for expert, size in enumerate(self.sizes):
            if size:
                yield expert, slice(start, start + size)
            start += size

    def quantize(self, slot: Slot, scaling: Scaling, matrix: Tensor) -> Operand:
        if self.history is None:
            return scaling.quantize(matrix)
        return scaling.quantize(matrix, self.history.maximum(slot, scaling.maxima_of(matrix)))

    def weight_operand(self, expert: int, *, transposed: bool) -> Operand:
        """An expert's matrix as an operand [out, in], or [in, out]."""
        is_swapped = transposed != self.rows_are_inputs
        gathered = self._gathered(expert)
        if is_swapped and self.recipe.has_two_planes:
            values = self._matrix(expert) if gathered is None else gathered.dequantize()
            return self.recipe.weight.quantize(values.t())
        operand = gathered or self.quantize(Slot.WEIGHT, self.recipe.weight, self._matrix(expert))
        return operand.t() if is_swapped else operand

    def _matrix(self, expert: int) -> Tensor:
        matrices: Tensor = self.weight.detach().unflatten(0, (len(self.sizes), -1))
        return matrices[expert]

    def _gathered(self, expert: int) -> Operand | None:
        quantized: QuantizedWeight | None = getattr(self.weight, "quantized", None)
        if quantized is None:
            return None
        num_experts, (rows, columns) = len(self.sizes), self.weight.shape
        codes = quantized.codes.unflatten(0, (num_experts, -1))[expert]
        scales = quantized.scales.unflatten(0, (num_experts, -1))[expert]
        if self.history is not None:
            assert quantized.maxima is not None, "kept for histories"
            # Recorded here, as without codes: in evaluation, or without tokens, it is not.
            self.history.maximum(Slot.WEIGHT, quantized.maxima[expert])
        return Operand(codes, scales, self.recipe.weight, (rows // num_experts, columns))


def _transposed(operand: Operand, scaling: Scaling | None, matrix: Tensor) -> Operand:
    """The operand of a matrix, transposed: with the same codes, or quantised again by `scaling`."""
    return operand.t() if scaling is None else scaling.quantize(matrix.t())


class _Linear(torch.autograd.Function):
    """[tokens, in] -> [tokens, out], expert by expert."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: _Layer,
    ) -> Tensor:
        recipe, kept = layer.recipe, list[Operand]()
        keeps_inputs = layer.records and ctx.needs_input_grad[1]
        output = tokens.new_empty(len(tokens), layer.out_features)
        with without_autocast(tokens.device):
            for expert, span in layer.spans():
                own = tokens[span]
                inputs = layer.quantize(Slot.INPUTS, recipe.inputs, own)
                matrix = layer.weight_operand(expert, transposed=False)
                output[span] = product(inputs, matrix, output.dtype)
                if bias is not None:
                    output[span] += bias.unflatten(0, (len(layer.sizes), -1))[expert]
                if keeps_inputs:
                    kept.append(_transposed(inputs, recipe.inputs_t, own))

        # The weight as well: autograd detects a write to it before backward.
        parts = [part for one in kept for part in (one.codes, one.scales)]
        ctx.save_for_backward(weight, *parts)
        ctx.kept = [(one.scaling, one.shape) for one in kept]
        ctx.layer, ctx.dtype = layer, tokens.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer: _Layer = ctx.layer
        recipe, weight = layer.recipe, layer.weight
        wants_tokens, wants_weight, wants_bias, _ = ctx.needs_input_grad
        _, *parts = ctx.saved_tensors
        kept = [
            Operand(codes, scales, scaling, shape)
            for codes, scales, (scaling, shape) in zip(
                parts[::2], parts[1::2], ctx.kept, strict=True
            )
        ]
        grad_tokens = grad_weight = grad_bias = None
        num_experts = len(layer.sizes)
        if wants_tokens:
            in_features = weight.numel() // num_experts // layer.out_features
            grad_tokens = grad_output.new_empty(len(grad_output), in_features, dtype=ctx.dtype)
        if wants_weight:
            grad_weight = weight.new_zeros(num_experts, len(weight) // num_experts, weight.shape[1])
        if wants_bias:
            grad_bias = weight.new_zeros(num_experts, layer.out_features)

        with without_autocast(grad_output.device):
            for number, (expert, span) in enumerate(layer.spans()):
                own = grad_output[span]
                if grad_bias is not None:
                    torch.sum(own, 0, dtype=grad_bias.dtype, out=grad_bias[expert])
                gradient = layer.quantize(Slot.GRADIENT, recipe.gradient, own)
                if grad_tokens is not None:
                    matrix = layer.weight_operand(expert, transposed=True)
                    grad_tokens[span] = product(gradient, matrix, grad_tokens.dtype)
                if grad_weight is not None:
                    gradient_t = _transposed(gradient, recipe.gradient_t, own)
                    found = product(gradient_t, kept[number], grad_weight.dtype)
                    grad_weight[expert] = found.t() if layer.rows_are_inputs else found

        return (
            grad_tokens,
            None if grad_weight is None else grad_weight.flatten(0, 1),
            None if grad_bias is None else grad_bias.flatten(),
            None,
        )
