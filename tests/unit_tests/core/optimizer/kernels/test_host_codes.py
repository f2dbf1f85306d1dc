"""The pass that writes codes: the bits that torch makes of the new weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.low_precision.recipes import recipe_named
from megatron.core.low_precision.scaling import WeightQuantizer
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam, available_bodies
from megatron.core.optimizer.kernels.piece import Piece, PieceCodes, merged

E4M3, FP32 = torch.float8_e4m3fn, torch.float32
BODIES = [body for body in available_bodies() if body != "torch"]
RECIPES = ["blockwise", "mxfp8", "rowwise"]
STEP = AdamStep(3, lr=1e-2, weight_decay=0.1)
KEEPS_WEIGHTS = AdamStep(1, lr=0.0)
SPECIAL = [0.0, -0.0, 1e-40, -3e-45, 1e30, 3.4e38, torch.inf, -torch.inf, torch.nan]

# Without the library torch makes all codes.
pytestmark = pytest.mark.skipif(not BODIES, reason="the host kernel was not built")


@pytest.fixture(scope="module")
def kernels() -> dict[str, HostAdam]:
    return {body: HostAdam(2, body=body) for body in BODIES}


class Codes(NamedTuple):
    """Codes as integers, NaN being one, and maxima."""

    codes: Tensor
    maxima: Tensor

    @classmethod
    def of(cls, codes: Tensor, maxima: Tensor) -> Codes:
        return cls(codes.view(torch.uint8).where(~codes.float().isnan(), 0x7F), maxima)


def quantizer_of(recipe: str, matrix_rows: int | None = None) -> WeightQuantizer:
    return recipe_named(recipe).with_one_plane().weight_quantizer(matrix_rows)


def by_torch(weight: Tensor, quantizer: WeightQuantizer, limits: Tensor | None = None) -> Codes:
    """By the scales of these maxima, or of the weight's."""
    rounded = weight.bfloat16()
    maxima = torch.zeros(quantizer.maxima_shape(weight.shape))
    codes = torch.zeros(weight.shape, dtype=E4M3)
    quantizer.add_maxima(rounded, 0, maxima)
    multipliers, _ = quantizer.scales_of(maxima if limits is None else limits)
    quantizer.quantize_rows(rounded, 0, multipliers, codes)
    return Codes.of(codes, maxima)


def pieces_of(
    weight: Tensor,
    quantizer: WeightQuantizer,
    cuts: list[int],
    step: AdamStep,
    limits: Tensor | None = None,
) -> list[Piece]:
    """One for each rank's rows of a weight, which are between the cuts, with maxima of its own.
    `limits`: the last maxima.
    """
    numel, shape = weight.numel(), (len(weight), weight.shape[1])
    generator = torch.Generator().manual_seed(7)
    grad, exp_avg = (torch.randn(numel, generator=generator) for _ in range(2))
    exp_avg_sq = torch.rand(numel, generator=generator)
    codes = torch.full((numel,), 1, dtype=torch.uint8).view(E4M3)
    pieces = []
    for begin, end in itertools.pairwise(
        [0, *sorted(min(c, len(weight)) for c in cuts), len(weight)]
    ):
        own = slice(begin * shape[1], end * shape[1])
        # Values of an earlier pass, which must not be taken for maxima of this one.
        maxima, last_maxima = (torch.zeros(quantizer.maxima_shape(shape)) for _ in range(2))
        quantizer.add_maxima(torch.full((end - begin, shape[1]), 1e38), begin, maxima)
        # Most tiles keep their scales, as they do in training.
        quantizer.add_maxima(weight.bfloat16(), 0, last_maxima)
        last_maxima.view(-1)[::5] = 0.0
        last_maxima.view(-1)[1::7] = torch.inf
        last_maxima = last_maxima if limits is None else limits
        pieces.append(
            Piece(
                step,
                grad[own].bfloat16(),
                weight.view(-1)[own],
                {"exp_avg": exp_avg[own], "exp_avg_sq": exp_avg_sq[own]},
                codes=PieceCodes(codes[own], maxima, last_maxima, quantizer, begin, shape),
            )
        )
    return pieces


def codes_in(piece: Piece) -> PieceCodes:
    assert piece.codes is not None
    return piece.codes


def by_pass(
    kernel: HostAdam,
    weight: Tensor,
    quantizer: WeightQuantizer,
    cuts: list[int],
    step: AdamStep = STEP,
) -> Codes:
    """Steps the weight as several ranks do, which exchange maxima in between."""
    pieces = pieces_of(weight, quantizer, cuts, step)
    kernel.run(merged(pieces))
    maxima = made_by(pieces, weight).maxima
    pieces = [piece._replace(codes=codes_in(piece)._replace(maxima=maxima)) for piece in pieces]
    kernel.encode(merged(pieces))
    return made_by(pieces, weight)


def made_by(pieces: list[Piece], weight: Tensor) -> Codes:
    maxima = torch.stack([codes_in(piece).maxima for piece in pieces]).amax(0)
    codes = torch.cat([codes_in(piece).codes.view(torch.uint8) for piece in pieces])
    return Codes.of(codes.view(E4M3).view(weight.shape), maxima)


def by_known_scales(
    kernel: HostAdam,
    weight: Tensor,
    quantizer: WeightQuantizer,
    cuts: list[int],
    limits: Tensor,
    step: AdamStep = STEP,
) -> tuple[Codes, Codes]:
    """Steps the weight as several ranks do, by the scales of these maxima, and then makes its codes
    again by the scales of smaller ones.
    """
    pieces = pieces_of(weight, quantizer, cuts, step, limits)
    kernel.run(merged(pieces))
    found = made_by(pieces, weight)
    again = [
        piece._replace(codes=codes_in(piece)._replace(maxima=found.maxima, last_maxima=limits / 2))
        for piece in pieces
    ]
    kernel.encode(merged(again))
    return found, made_by(again, weight)


def expect_equal(found: Codes, expected: Codes) -> None:
    assert torch.equal(found.maxima, expected.maxima)
    assert torch.equal(found.codes, expected.codes)


def weights_with_all_bf16_values() -> Iterator[Tensor]:
    """[510, 128]: all finite ones in the order of their sizes, in which the scales of tiles are of
    all orders of magnitude, and shuffled; and random bits.
    """
    bits = torch.arange(1 << 16).to(torch.int32) << 16
    values = bits.view(FP32)
    values = values[values.isfinite()]
    generator = torch.Generator().manual_seed(5)
    yield values[values.abs().argsort(stable=True)].view(-1, 128)
    yield values[torch.randperm(len(values), generator=generator)].view(-1, 128)
    yield torch.randint(-(1 << 31), 1 << 31, (510, 128), generator=generator).int().view(FP32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("body", BODIES)
def test_codes_of_all_bf16_values_and_of_random_bits_are_those_of_torch(
    kernels: dict[str, HostAdam], body: str, recipe: str
) -> None:
    quantizer = quantizer_of(recipe)
    for values in weights_with_all_bf16_values():
        weight = values.clone()
        found = by_pass(kernels[body], weight, quantizer, [], KEEPS_WEIGHTS)
        assert torch.equal(weight.nan_to_num(7.0), values.nan_to_num(7.0))
        expect_equal(found, by_torch(weight, quantizer))


def random_weight(rows: int, columns: int, num_special: int, smallest: int = -30) -> Tensor:
    """Values over many orders of magnitude, with some special ones."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= 10.0 ** torch.randint(smallest, 9, (rows, 1), generator=generator)
    weight[rows // 2] = 0.0
    places = torch.randint(weight.numel(), (num_special,), generator=generator)
    weight.view(-1)[places] = torch.tensor((SPECIAL * num_special)[:num_special])
    return weight


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 600),
    st.integers(1, 3),
    st.lists(st.integers(0, 900), max_size=4),
    st.integers(0, 20),
)
def test_ranks_whose_rows_are_cut_anywhere_make_the_codes_of_the_whole_weight(
    kernels: dict[str, HostAdam],
    recipe: str,
    rows: int,
    columns: int,
    num_matrices: int,
    cuts: list[int],
    num_special: int,
) -> None:
    quantizer = quantizer_of(recipe, rows if num_matrices > 1 else None)
    before = random_weight(rows * num_matrices, columns, num_special)
    stepped = before.clone()
    plain = [piece._replace(codes=None) for piece in pieces_of(stepped, quantizer, cuts, STEP)]
    kernels[BODIES[0]].run(plain)
    for kernel in kernels.values():
        weight = before.clone()
        found = by_pass(kernel, weight, quantizer, cuts)
        assert torch.equal(weight.nan_to_num(7.0), stepped.nan_to_num(7.0))
        expect_equal(found, by_torch(stepped, quantizer))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("body", BODIES)
def test_rows_that_are_longer_than_what_a_thread_takes_at_a_time_have_the_codes_of_torch(
    kernels: dict[str, HostAdam], body: str, recipe: str
) -> None:
    weight, quantizer = random_weight(131, 4500, 20), quantizer_of(recipe)
    found = by_pass(kernels[body], weight, quantizer, [40])
    expect_equal(found, by_torch(weight, quantizer))


def delayed(margin: int = 0, matrix_rows: int | None = None) -> WeightQuantizer:
    return recipe_named("delayed", margin=margin).weight_quantizer(matrix_rows)


@pytest.mark.parametrize("limit", [3e38, 448.0, 1.0, 1e-39])
@pytest.mark.parametrize("body", BODIES)
def test_codes_of_all_bf16_values_by_a_known_scale_are_those_of_torch(
    kernels: dict[str, HostAdam], body: str, limit: float
) -> None:
    limits = torch.full((1, 1), limit)
    for weight in weights_with_all_bf16_values():
        found = by_known_scales(kernels[body], weight, delayed(), [], limits, KEEPS_WEIGHTS)
        for own, other in zip(found, (limits, limits / 2), strict=True):
            expect_equal(own, by_torch(weight, delayed(), other))


# The largest value of a matrix, divided by the one that its scale is of. Codes are rounded down to
# 448, or saturate, above 464 / 448.
GROWTH = st.sampled_from([1 / 64, 1.0, 1.03, 1.04, 64.0])


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 600),
    st.lists(GROWTH, min_size=1, max_size=3),
    st.lists(st.integers(0, 900), max_size=4),
    st.integers(0, 3).map(lambda count: count * count),
    st.sampled_from([0, 0, 3]),
)
def test_known_scales_make_the_codes_of_torch_in_one_pass_and_the_maxima_of_all_ranks(
    kernels: dict[str, HostAdam],
    rows: int,
    columns: int,
    growths: list[float],
    cuts: list[int],
    num_special: int,
    margin: int,
) -> None:
    num_matrices = len(growths)
    quantizer = delayed(margin, rows if num_matrices > 1 else None)
    before = random_weight(rows * num_matrices, columns, num_special, smallest=5)
    stepped = before.clone()
    plain = [piece._replace(codes=None) for piece in pieces_of(stepped, quantizer, cuts, STEP)]
    kernels[BODIES[0]].run(plain)
    limits = by_torch(stepped, quantizer).maxima / torch.tensor(growths)[:, None]
    limits = limits.where(limits.isfinite(), 1e8)
    expected = [by_torch(stepped, quantizer, own) for own in (limits, limits / 2)]
    for kernel in kernels.values():
        weight = before.clone()
        found = by_known_scales(kernel, weight, quantizer, cuts, limits)
        assert torch.equal(weight.nan_to_num(7.0), stepped.nan_to_num(7.0))
        for own, other in zip(found, expected, strict=True):
            expect_equal(own, other)


@pytest.mark.parametrize("body", BODIES)
def test_known_scales_make_codes_of_long_rows(kernels: dict[str, HostAdam], body: str) -> None:
    weight, limits = random_weight(290, 9000, 2, smallest=5), torch.full((1, 1), 1e7)
    found = by_known_scales(kernels[body], weight, delayed(), [40], limits)
    for own, other in zip(found, (limits, limits / 2), strict=True):
        expect_equal(own, by_torch(weight, delayed(), other))


def test_old_values_are_kept_while_codes_are_made(kernels: dict[str, HostAdam]) -> None:
    weight = random_weight(200, 300, 0)
    before = weight.clone()
    (piece,) = pieces_of(weight, quantizer_of("blockwise"), [], STEP)
    arrays = {"weight": piece.weight, **piece.states}
    piece = piece._replace(undo={name: torch.zeros_like(array) for name, array in arrays.items()})
    kernels[BODIES[0]].run([piece])
    assert not torch.equal(weight, before)
    piece.restore_old()
    assert torch.equal(weight, before)


def test_pieces_whose_codes_do_not_fit_are_refused(kernels: dict[str, HostAdam]) -> None:
    kernel, quantizer = kernels[BODIES[0]], quantizer_of("blockwise")
    (piece,) = pieces_of(random_weight(200, 300, 0), quantizer, [], STEP)
    codes = codes_in(piece)
    wrong = [
        codes._replace(codes=codes.codes[1:]),
        codes._replace(codes=codes.codes.view(torch.uint8)),
        codes._replace(maxima=codes.maxima[:1]),
        codes._replace(maxima=codes.maxima.double()),
        codes._replace(last_maxima=codes.last_maxima[:1]),
        codes._replace(first_row=1),
        codes._replace(shape=(250, 240)),
        codes._replace(quantizer=recipe_named("tensorwise").weight_quantizer()),
        codes._replace(quantizer=recipe_named("nvfp4").weight_quantizer()),
        # With maxima of the same shape.
        codes._replace(quantizer=WeightQuantizer(replace(quantizer.scaling, is_stochastic=True))),
    ]
    for codes in wrong:
        for run in (kernel.run, kernel.encode):
            with pytest.raises(ValueError, match=r"Expected .*, got"):
                run([piece._replace(codes=codes)])
    with pytest.raises(ValueError, match=r"Expected .*, got"):
        kernel.submit([piece], touch=True)
    narrow = piece._replace(weight=piece.weight.bfloat16())
    for other, wrong_piece in ((kernel, narrow), (HostAdam(1, body="torch"), piece)):
        with pytest.raises(ValueError, match=r"Expected .*, got"):
            other.run([wrong_piece])
