"""Products of quantised operands, by PyTorch's operator and from their values."""

from __future__ import annotations

import pytest
import torch

from megatron.core.low_precision.products import (
    _has_operator,
    _scaled_mm,
    _scales,
    padded,
    product,
    swizzled,
)
from megatron.core.low_precision.recipes import recipe_named
from megatron.core.low_precision.scaling import Scaling

BF16 = torch.bfloat16
# PyTorch 2.11 has none on the CPU.
IN_TORCH = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
SHAPES = {"aligned": (64, 128, 96), "odd": (5, 37, 11)}


def pairs(name: str, *, one_plane: bool = False) -> dict[str, tuple[Scaling, Scaling]]:
    """The scalings of a recipe's three products."""
    recipe = recipe_named(name)
    recipe = recipe.with_one_plane() if one_plane else recipe
    gradient_t = recipe.gradient_t or recipe.gradient
    return {
        "fprop": (recipe.inputs, recipe.weight),
        "dgrad": (recipe.gradient, recipe.weight),
        "wgrad": (gradient_t, recipe.inputs_t or recipe.inputs),
    }


@pytest.mark.parametrize(
    "name", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
)
def test_a_product_is_that_of_the_values_whoever_computes_it(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for left, right in pairs(name).values():
        for rows, inner, columns in SHAPES.values():
            matrices = (
                torch.randn(rows, inner, generator=generator),
                torch.randn(columns, inner, generator=generator),
            )
            one, other = left.quantize(matrices[0]), right.quantize(matrices[1])
            expected = one.dequantize() @ other.dequantize().t()
            found = product(one, other, BF16)
            assert found.dtype is BF16
            assert found.shape == (rows, columns)
            # The rounding of bf16, and sums in another order.
            error = (found.float() - expected).abs() / (
                expected.abs() + 0.05 * expected.abs().max()
            )
            assert error.max() < 2**-7


@pytest.mark.parametrize(
    "name", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
)
def test_the_cpu_has_an_operator_for_scales_of_matrices_and_of_rows(name: str) -> None:
    has_operator = IN_TORCH and name in ("delayed", "tensorwise", "rowwise")
    for left, right in pairs(name).values():
        assert _has_operator(torch.device("cpu"), left, right, BF16) == has_operator


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_operands_padded_to_what_a_gpu_takes_have_the_same_product(name: str) -> None:
    left, right = pairs(name)["wgrad"]
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 37, 130, 160):
        one = left.quantize(torch.randn(5, tokens, generator=generator))
        other = right.quantize(torch.randn(7, tokens, generator=generator))
        for operand in (one, other):
            wider = padded(operand)
            assert wider.shape[1] == wider.codes.shape[1]
            assert wider.shape[1] % (32 if name == "mxfp8" else 16) == 0
            assert 0 <= wider.shape[1] - tokens < 32
            assert torch.equal(wider.dequantize()[:, :tokens], operand.dequantize())
            assert not wider.dequantize()[:, tokens:].any()
        if IN_TORCH and name in ("delayed", "tensorwise", "rowwise"):
            found = _scaled_mm(padded(one), padded(other), torch.float32)
            torch.testing.assert_close(found, _scaled_mm(one, other, torch.float32))


@pytest.mark.skipif(not IN_TORCH, reason="PyTorch has no scaled_mm on the CPU")
def test_an_operator_that_computes_something_else_is_not_used(monkeypatch) -> None:
    scaling = Scaling(recipe_named("tensorwise").weight.format, (None, None), margin=3)
    assert _has_operator(torch.device("cpu"), scaling, scaling, BF16)
    _has_operator.cache_clear()
    monkeypatch.setattr(
        "megatron.core.low_precision.products._scaled_mm",
        lambda left, right, dtype: _scaled_mm(left, right, dtype) * 1.1,
    )
    assert not _has_operator(torch.device("cpu"), scaling, scaling, BF16)
    _has_operator.cache_clear()


def test_swizzled_scales_are_where_the_formula_says() -> None:
    rows, tiles = 200, 6
    scales = torch.arange(rows * tiles).view(rows, tiles)
    found = swizzled(scales)
    assert found.numel() == 256 * 8
    for row, column in ((0, 0), (1, 0), (31, 3), (32, 1), (127, 3), (128, 0), (199, 5)):
        block = row // 128 * 2 + column // 4
        inside = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert found[512 * block + inside] == scales[row, column]


@pytest.mark.parametrize("one_plane", [False, True])
def test_operators_for_1_x_32_read_the_scale_of_every_row(one_plane: bool) -> None:
    recipe = recipe_named("mxfp8")
    scaling = (recipe.with_one_plane() if one_plane else recipe).weight
    matrix = torch.randn(140, 160, generator=torch.Generator().manual_seed(0))
    # Of other sizes from tile to tile.
    matrix *= 2.0 ** torch.arange(140)[:, None].div(20, rounding_mode="floor")
    operand = scaling.quantize(matrix)
    flat = _scales(operand, is_right=True).float()
    row, column = torch.meshgrid(torch.arange(140), torch.arange(5), indexing="ij")
    block = row // 128 * 2 + column // 4
    inside = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
    scales = flat[512 * block + inside].repeat_interleave(32, 1)
    assert torch.equal(operand.codes.float() * scales, operand.dequantize())


@pytest.mark.gpu
@pytest.mark.parametrize("one_plane", [False, True])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_gpu_has_the_operators_of_its_generation(name: str, one_plane: bool) -> None:
    capability = torch.cuda.get_device_capability()
    device = torch.device("cuda", torch.cuda.current_device())
    expected = {
        "delayed": capability >= (8, 9),
        "tensorwise": capability >= (8, 9),
        "rowwise": capability >= (8, 9),
        "blockwise": capability == (9, 0),
        "mxfp8": capability >= (10, 0),
    }[name]
    for left, right in pairs(name, one_plane=one_plane).values():
        assert _has_operator(device, left, right, BF16) == expected
        for inner in (384, 390):  # the latter is padded
            matrices = torch.randn(2, 256, inner, device=device)
            one, other = left.quantize(matrices[0]), right.quantize(matrices[1])
            found = product(one, other, BF16).float()
            reference = one.dequantize() @ other.dequantize().t()
            assert (found - reference).norm() < 0.01 * reference.norm()
