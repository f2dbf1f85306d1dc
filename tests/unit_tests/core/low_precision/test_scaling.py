"""Tiles, scales and codes of whole matrices, and of a few rows at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.low_precision.formats import E2M1, E4M3, E5M2, decode, encode
from megatron.core.low_precision.recipes import Recipe, recipe_named
from megatron.core.low_precision.scaling import Operand, ScaleKind, Scaling, hadamard

NAMES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
RECIPES: dict[str, Recipe] = {name: recipe_named(name) for name in NAMES}
RECIPES["mxfp8 in one plane"] = RECIPES["mxfp8"].with_one_plane()


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Values over many orders of magnitude, bf16, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix *= 10.0 ** torch.randint(-6, 4, (rows, 1), generator=generator)
    matrix[rows // 2] = 0.0
    return matrix.bfloat16()


def by_hand(matrix: Tensor, scaling: Scaling) -> Tensor:
    """The dequantised values, tile by tile, in Python's floats where these are exact."""
    rows, columns = matrix.shape
    height, width = (size or n for size, n in zip(scaling.tile, matrix.shape, strict=True))
    result = torch.zeros(rows, columns)
    whole = matrix.abs().max().item()
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            box = (slice(top, top + height), slice(left, left + width))
            maximum = matrix[box].abs().max().item()
            scale, inverse = scale_by_hand(maximum, whole, scaling)
            codes = encode(matrix[box].float() * scale, scaling.format)
            result[box] = decode(codes, scaling.format, matrix[box].shape[1]) * inverse
    return result


def scale_by_hand(maximum: float, whole: float, scaling: Scaling) -> tuple[float, float]:
    """As numbers of fp32."""

    def fp32(number: float) -> float:
        return torch.tensor(number, dtype=torch.float32).item()

    largest = scaling.format.largest
    if scaling.kind is ScaleKind.TWO_LEVELS:
        outer = fp32(448 * 6 / whole)
        inner = torch.tensor(fp32(maximum * fp32(outer / 6))).clamp(max=448).to(E4M3.dtype).item()
        inverse = fp32(inner * fp32(1 / outer))
        return (min(fp32(1 / inverse), 3.4028234663852886e38) if inverse else 3.4e38), inverse
    if not maximum:
        return 1.0, 1.0
    if scaling.kind is ScaleKind.E8M0:
        power = math.ceil(math.log2(fp32(maximum * fp32(1 / largest))))
        return 2.0**-power, 2.0**power
    scale = fp32(largest / maximum)
    if scaling.kind is ScaleKind.POWER_OF_TWO:
        scale = 2.0 ** math.floor(math.log2(scale))
    return scale, fp32(1 / scale)


@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_quantised_tile_by_tile_with_each_tiles_scale(name: str) -> None:
    recipe = RECIPES[name]
    matrix = random_matrix(150, 140)
    for scaling in (recipe.inputs, recipe.weight):
        assert torch.equal(scaling.quantize(matrix).dequantize(), by_hand(matrix, scaling))


@pytest.mark.parametrize("name", RECIPES)
@settings(max_examples=20)
@given(st.integers(1, 70), st.integers(1, 70), st.lists(st.integers(0, 70), max_size=4), st.data())
def test_rows_quantised_by_several_ranks_have_the_bits_of_the_whole_weight(
    name: str, rows: int, columns: int, cuts: list[int], data: st.DataObject
) -> None:
    # Small tiles, so that cuts go through them; of several matrices in one weight, too.
    num_matrices = data.draw(st.integers(1, 3))
    recipe = RECIPES[name]
    quantizer = recipe.weight_quantizer(rows if num_matrices > 1 else None)
    weight = torch.cat([random_matrix(rows, columns, seed) for seed in range(num_matrices)])
    bounds = [0, *sorted(min(cut, len(weight)) for cut in cuts), len(weight)]
    spans = [slice(*pair) for pair in itertools.pairwise(bounds)]

    maxima = torch.zeros(quantizer.maxima_shape(weight.shape))
    code = recipe.weight.format
    num_bytes = -(-columns // code.per_byte)
    codes = torch.zeros(len(weight), num_bytes, dtype=code.dtype)
    for span in reversed(spans):
        quantizer.add_maxima(weight[span], span.start, maxima)
    multipliers, scales = quantizer.scales_of(maxima)
    for span in spans:
        quantizer.quantize_rows(weight[span], span.start, multipliers, codes[span])

    expected = [recipe.weight.quantize(part) for part in weight.split(rows)]
    assert torch.equal(
        codes.view(torch.uint8), torch.cat([one.codes.view(torch.uint8) for one in expected])
    )
    assert torch.equal(scales.float(), torch.cat([one.scales.float() for one in expected]))


@pytest.mark.parametrize("name", RECIPES)
def test_a_transposed_operand_has_the_same_values(name: str) -> None:
    operand = RECIPES[name].weight.quantize(random_matrix(37, 51))
    assert torch.equal(operand.t().dequantize(), operand.dequantize().t())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_or_saturates_in_its_tile_only(
    name: str, number: float
) -> None:
    scaling = RECIPES[name].inputs
    matrix = random_matrix(8, 64)
    matrix[1, 3] = number
    found = scaling.quantize(matrix).dequantize()
    if scaling.format is E2M1 or math.isnan(number):
        assert not found[1, 3].isfinite()
    else:
        # A scale of 1, as for TransformerEngine; in e8m0 the largest scale overflows.
        expected = math.inf if scaling.kind is ScaleKind.E8M0 else 448.0
        assert found[1, 3] == math.copysign(expected, number)
    assert found[0].isfinite().all()


def test_subnormal_maxima_have_the_largest_scale_and_stay_small() -> None:
    tiny = torch.full((4, 32), 1e-44)
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        found = RECIPES[name].inputs.quantize(tiny).dequantize()
        assert found.isfinite().all()
        assert found.max() <= 2e-44 if name == "mxfp8" else found.max() <= 1e-40


@pytest.mark.parametrize("columns", [16, 40, 48])
def test_the_hadamard_matrix_leaves_products_as_they_are(columns: int) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 24, columns, generator=generator)
    assert torch.allclose(hadamard(left) @ hadamard(right).T, left @ right.T, atol=1e-5)
    assert hadamard(left).shape[1] % 16 == 0
    # The signs are TransformerEngine's: a row of ones becomes the row of their sums.
    mixed = hadamard(torch.ones(1, 16))
    assert mixed[0, 0] == sum((1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)) / 4


def test_stochastic_rounding_is_unbiased_and_the_same_each_time() -> None:
    scaling = Scaling(E2M1, (1, 16), ScaleKind.TWO_LEVELS, is_stochastic=True)
    # 2.6 of a maximum of 6: between 2 and 3.
    matrix = torch.full((2000, 16), 2.6)
    matrix[:, 0] = 6.0
    # A divisor of the loss that is a power of two changes no code.
    assert torch.equal(scaling.quantize(matrix).codes, scaling.quantize(matrix / 8).codes)
    found = scaling.quantize(matrix).dequantize()[:, 1:]
    assert torch.equal(found, scaling.quantize(matrix).dequantize()[:, 1:])
    assert {round(value, 3) for value in found.unique().tolist()} == {2.0, 3.0}
    # 30,000 draws have a standard deviation of 0.003.
    assert found.mean().item() == pytest.approx(2.6, abs=0.012)
    # Neighbours, in a row and in a column, are independent.
    is_up = (found > 2.5).float() - 0.6
    assert abs((is_up[:, 1:] * is_up[:, :-1]).mean()) < 0.01
    assert abs((is_up[1:] * is_up[:-1]).mean()) < 0.01


def test_hybrid_gives_gradients_the_range_of_e5m2() -> None:
    for name in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"):
        assert recipe_named(name, "hybrid").gradient.format is E5M2
        assert recipe_named(name, "e4m3").gradient.format is E4M3
        assert recipe_named(name, "hybrid").inputs.format is E4M3


def test_a_margin_leaves_room_above_the_maximum() -> None:
    scaling = recipe_named("delayed", margin=2).weight
    operand: Operand = scaling.quantize(torch.tensor([[7.0, 1.0]]))
    assert operand.codes.float().tolist() == [[112.0, 16.0]]
    assert operand.dequantize().tolist() == [[7.0, 1.0]]
