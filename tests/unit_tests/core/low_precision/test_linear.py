"""The linear layer's outputs and gradients are products of the recipe's operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.low_precision.amax_history import AmaxHistory, advance
from megatron.core.low_precision.linear import expert_linear, linear
from megatron.core.low_precision.recipes import HistoryOptions, Recipe, recipe_named
from megatron.core.low_precision.scaling import Operand, QuantizedWeight, Scaling

NAMES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
BF16 = torch.bfloat16


def values(scaling: Scaling, matrix: Tensor) -> Tensor:
    return scaling.quantize(matrix).dequantize()


def expected(
    recipe: Recipe, inputs: Tensor, weight: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the inputs, and gradient of the weight [out, in], in fp32."""
    wide = values(recipe.weight, weight)
    wide_t = values(recipe.weight, weight.t()) if recipe.has_two_planes else wide.t()
    output = values(recipe.inputs, inputs) @ wide.t()
    grad_inputs = values(recipe.gradient, gradient) @ wide_t.t()
    inputs_t = (
        values(recipe.inputs_t, inputs.t())
        if recipe.inputs_t
        else values(recipe.inputs, inputs).t()
    )
    gradient_t = (
        values(recipe.gradient_t, gradient.t())
        if recipe.gradient_t
        else values(recipe.gradient, gradient).t()
    )
    return output, grad_inputs, gradient_t @ inputs_t.t()


def close(found: Tensor | None, reference: Tensor) -> bool:
    """Equal up to the rounding of bf16."""
    assert found is not None
    assert found.dtype is BF16
    difference = (found.float() - reference).norm()
    return bool(difference <= 2**-8 * reference.norm())


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator).to(BF16).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_match_the_quantised_operands(name: str) -> None:
    recipe = recipe_named(name)
    inputs, weight, bias, gradient = leaves((2, 20, 40), (50, 40), (50,), (2, 20, 50))
    output = linear(recipe, inputs, weight, bias)
    output.backward(gradient.detach())

    references = expected(
        recipe, *(x.detach().reshape(-1, x.shape[-1]) for x in (inputs, weight, gradient))
    )
    assert close(output.flatten(0, 1), (references[0].to(BF16) + bias).float())
    assert close(inputs.grad.flatten(0, 1), references[1])
    assert close(weight.grad, references[2])
    assert close(bias.grad, gradient.float().sum((0, 1)))
    # And they are not those of bf16.
    assert not close(
        output.flatten(0, 1), (inputs.float() @ weight.float().t() + bias).flatten(0, 1)
    )


@pytest.mark.parametrize("name", NAMES)
def test_without_tokens_there_are_no_outputs_and_the_weight_has_a_gradient_of_zero(
    name: str,
) -> None:
    inputs, weight = leaves((2, 0, 40), (50, 40))
    output = linear(recipe_named(name), inputs, weight)
    assert output.shape == (2, 0, 50)
    output.sum().backward()
    assert inputs.grad.shape == (2, 0, 40)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("rows_are_inputs", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_expert_is_a_layer_of_its_own(name: str, rows_are_inputs: bool) -> None:
    recipe = recipe_named(name)
    sizes, num_in, num_out = [7, 0, 20], 40, 36
    tokens, matrices, bias, gradient = leaves(
        (27, num_in), (3, num_out, num_in), (3 * num_out,), (27, num_out)
    )
    stored = matrices.detach().transpose(1, 2) if rows_are_inputs else matrices.detach()
    weight = stored.reshape(-1, stored.shape[-1]).clone().requires_grad_()
    output = expert_linear(
        recipe, tokens, weight, torch.tensor(sizes), bias, rows_are_inputs=rows_are_inputs
    )
    output.backward(gradient.detach())

    grads = weight.grad.view(stored.shape)
    grads = grads.transpose(1, 2) if rows_are_inputs else grads
    for expert, span in ((0, slice(0, 7)), (2, slice(7, 27))):
        own = expected(
            recipe, *(x.detach() for x in (tokens[span], matrices[expert], gradient[span]))
        )
        own_bias = bias[expert * num_out : (expert + 1) * num_out]
        assert close(output[span], (own[0].to(BF16) + own_bias).float())
        assert close(tokens.grad[span], own[1])
        assert close(grads[expert], own[2])
    assert not grads[1].any()
    assert not bias.grad[num_out : 2 * num_out].any()


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_weight_that_is_there_as_codes_alone_gives_the_same_bits(name: str) -> None:
    recipe = recipe_named(name).with_one_plane()
    inputs, weight, gradient = leaves((20, 40), (50, 40), (20, 50))
    output = linear(recipe, inputs, weight)
    output.backward(gradient.detach())

    empty: Any = nn.Parameter(torch.full((50, 40), torch.nan, dtype=BF16))
    operand = recipe.weight.quantize(weight.detach())
    empty.quantized = QuantizedWeight(operand.codes, operand.scales)
    again = inputs.detach().clone().requires_grad_()
    found = linear(recipe, again, empty)
    found.backward(gradient.detach())
    assert torch.equal(found, output)
    assert torch.equal(again.grad, inputs.grad)
    assert torch.equal(empty.grad, weight.grad)


def test_what_waits_for_backward_is_the_codes_of_the_inputs() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs, weight = leaves((64, 32), (48, 32))
    for name, dtype, numel in (
        ("mxfp8", torch.float8_e4m3fn, 64 * 32),
        ("nvfp4", torch.uint8, 64 * 32 // 2),
    ):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            linear(recipe_named(name), inputs, weight)
        _, codes, scales = kept  # after the weight
        assert (codes.dtype, codes.numel()) == (dtype, numel)
        assert scales.numel() <= 64 * 32 // 16

        # A frozen layer keeps the weight alone.
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            linear(recipe_named(name), inputs, weight.detach())
        assert [tensor.shape for tensor in kept] == [weight.shape]


def test_without_autograd_only_the_operands_of_the_output_are_quantised(monkeypatch) -> None:
    quantised: list[Scaling] = []
    original = Scaling.quantize

    def counted(scaling: Scaling, matrix: Tensor, maxima: Tensor | None = None) -> Operand:
        quantised.append(scaling)
        return original(scaling, matrix, maxima)

    monkeypatch.setattr(Scaling, "quantize", counted)
    recipe = recipe_named("blockwise")
    inputs, weight = leaves((64, 32), (48, 32))
    with torch.no_grad():
        linear(recipe, inputs, weight)
    assert quantised == [recipe.inputs, recipe.weight]
    linear(recipe, inputs, weight)
    assert quantised[2:] == [recipe.inputs, recipe.weight, recipe.inputs_t]


def test_delayed_scaling_uses_the_maxima_of_the_step_before() -> None:
    recipe = recipe_named("delayed", history=HistoryOptions(2, "max"))
    assert recipe.history is not None
    history = AmaxHistory(recipe.history)
    inputs, weight, gradient = leaves((20, 40), (50, 40), (20, 50))

    def run(factor: float) -> Tensor:
        output = linear(recipe, inputs * factor, weight, history=history)
        output.backward(gradient.detach())
        return output

    run(1.0)
    maxima = [x.abs().max().float().item() for x in (inputs, weight, gradient)]
    assert history.current.tolist() == maxima
    advance([history], history.current[None])
    # Ten times as much saturates at the maximum of before.
    found = run(10.0)
    limit = torch.tensor([[maxima[0]]])
    saturated = recipe.inputs.quantize(inputs.detach() * 10, limit).dequantize()
    assert saturated.abs().max().item() == pytest.approx(maxima[0])
    assert close(found, saturated @ values(recipe.weight, weight.detach()).t())
    assert history.current[0].item() == pytest.approx(10 * maxima[0], rel=2**-7)
