"""How a matrix is quantised: tiles with one scale each, and a cast.

A tile is a box of rows and columns of a matrix [rows, reduction]; a product sums over the columns.
A weight [5, 300] with tiles of 2 x 128:

    maxima, scales [3, 3]     rows 0 1 | 2 3 | 4     columns 0 .. 127 | 128 .. 255 | 256 .. 299

`Scaling` quantises whole matrices. `WeightQuantizer` does the same, to the bit, a few rows at a
time, so that each rank can quantise the rows that it holds:

    maxima = zeros(quantizer.maxima_shape(weight.shape))
    quantizer.add_maxima(rows, first_row, maxima)               each rank its rows
    all-reduce of maxima, MAX                                   a few bytes a tile
    multipliers, scales = quantizer.scales_of(maxima)           the same on every rank
    quantizer.quantize_rows(rows, first_row, multipliers, codes)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.low_precision.formats import (
    E2M1,
    E4M3,
    Format,
    decode,
    e8m0_of,
    encode,
    scale_of,
)

_HADAMARD = 16  # elements that one transform mixes
# The signs of TransformerEngine's transform (get_wgrad_sign_vector of its NVFP4 reference).
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class ScaleKind(enum.Enum):
    """How scales are computed and stored."""

    FP32 = "fp32"
    POWER_OF_TWO = "power of two"  # fp32 without mantissa
    E8M0 = "e8m0"  # rounded up to a power of two
    TWO_LEVELS = "two levels"  # e4m3 of each tile, times one fp32 of the matrix


class QuantizedWeight(NamedTuple):
    """A weight as it was gathered.

    Attributes:
        codes: [rows, columns] of the format's dtype; e2m1: uint8 [rows, ceil(columns / 2)].
        scales: what decoded values are multiplied by: [tiles of rows, tiles of columns].
        maxima: for a history: of each expert's matrix, or of the one there is, [matrices, 1] fp32.
    """

    codes: Tensor
    scales: Tensor
    maxima: Tensor | None = None


@dataclass(frozen=True)
class Scaling:
    """How a matrix is quantised.

    Attributes:
        tile: rows and columns that share a scale; None: all of them.
        margin: scales are divided by 2^margin.
        is_stochastic: rounds up with the probability of the fraction. The random numbers are a
            hash of an element's place and digits: they need no state, and are the same on any
            number of ranks and when a layer is recomputed.
        has_hadamard: 16 columns at a time are mixed by a Hadamard matrix with fixed signs. A
            product of two matrices that both are stays the same.
    """

    format: Format
    tile: tuple[int | None, int | None]
    kind: ScaleKind = ScaleKind.FP32
    margin: int = 0
    is_stochastic: bool = False
    has_hadamard: bool = False

    @property
    def largest(self) -> float:
        """The value that the maximum of a tile is scaled to."""
        return self.format.largest * 2.0**-self.margin

    def maxima_of(self, matrix: Tensor) -> Tensor:
        """The largest absolute value of each tile, [tiles of rows, tiles of columns] fp32. NaN
        counts as infinity.
        """
        quantizer = WeightQuantizer(self)
        maxima = matrix.new_zeros(quantizer.maxima_shape(matrix.shape), dtype=torch.float32)
        quantizer.add_maxima(matrix, 0, maxima)
        return maxima

    def quantize(self, matrix: Tensor, maxima: Tensor | None = None) -> Operand:
        """A matrix [rows, reduction] of any floating dtype, quantised.

        Args:
            maxima: to scale by; default: those of this matrix.
        """
        if self.has_hadamard:
            matrix = hadamard(matrix)
        if maxima is None:
            maxima = self.maxima_of(matrix)
        multipliers, scales = self.scales_of(maxima)
        codes = self.cast(matrix, _of_rows(multipliers, self.tile[0], len(matrix)))
        return Operand(codes, scales, self, tuple(matrix.shape))

    def cast(self, rows: Tensor, multipliers: Tensor) -> Tensor:
        """The codes of rows [rows, columns] that are multiplied by [rows or 1, tiles of columns].
        With stochastic rounding they are all rows of their matrix.
        """
        num_rows, columns = rows.shape
        tiles = _column_tiles(rows, self.tile[1])
        values = tiles.float() * multipliers[..., None]
        values = values.view(num_rows, -1)[:, :columns]
        return encode(values, self.format, _noise(rows) if self.is_stochastic else None)

    def scales_of(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """The multipliers of each tile: of values before the cast, fp32, and of decoded codes, fp32
        or e8m0. Both have the shape of `maxima`: [..., tiles of rows, tiles of columns].
        """
        if self.kind is ScaleKind.TWO_LEVELS:
            return _two_levels(maxima)
        if self.kind is ScaleKind.E8M0:
            scales = e8m0_of(maxima * (1.0 / self.largest))
            return scales.float().reciprocal(), scales
        is_power = self.kind is ScaleKind.POWER_OF_TWO
        multipliers = scale_of(maxima, self.largest, power_of_two=is_power)
        return multipliers, multipliers.reciprocal()


@dataclass(frozen=True)
class Operand:
    """A quantised matrix.

    Attributes:
        codes, scales: see `QuantizedWeight`.
        shape: rows and columns of the matrix.
    """

    codes: Tensor
    scales: Tensor
    scaling: Scaling
    shape: tuple[int, ...]

    def dequantize(self) -> Tensor:
        """The values: [rows, columns] fp32."""
        rows, columns = self.shape
        values = _column_tiles(
            decode(self.codes, self.scaling.format, columns), self.scaling.tile[1]
        )
        scales = _of_rows(self.scales.float(), self.scaling.tile[0], rows)
        return (values * scales[..., None]).view(rows, -1)[:, :columns]

    def t(self) -> Operand:
        """The transposed matrix, with the same codes and scales."""
        rows, columns = self.shape
        codes = self.codes.t()
        if self.scaling.format.per_byte > 1:
            values = decode(self.codes, self.scaling.format, columns)
            codes = encode(values.t().contiguous(), self.scaling.format)
        tile = (self.scaling.tile[1], self.scaling.tile[0])
        scaling = Scaling(self.scaling.format, tile, self.scaling.kind)
        return Operand(codes, self.scales.t(), scaling, (columns, rows))


@dataclass(frozen=True)
class WeightQuantizer:
    """Quantises a weight [rows, columns] some rows at a time.

    Attributes:
        scaling: of the weight; not stochastic, and without a Hadamard matrix.
        matrix_rows: rows of one expert's matrix, where a weight has the matrices of several; None:
            the weight is one matrix.
    """

    scaling: Scaling
    matrix_rows: int | None = None

    def maxima_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of the maxima, and of the scales, of a whole weight."""
        rows, columns = shape
        own = self.matrix_rows or max(1, rows)
        height, width = self.scaling.tile
        return rows // own * _num_tiles(own, height), _num_tiles(columns, width)

    def add_maxima(self, rows: Tensor, first_row: int, maxima: Tensor) -> None:
        """Raises maxima to those of some rows. NaN counts as infinity, so that ranks may combine
        maxima by any MAX.

        Args:
            rows: [rows, columns] of any floating dtype.
            first_row: number of the first of them in the whole weight.
            maxima: fp32 [`maxima_shape` of the whole weight].
        """
        if not rows.numel():
            return
        found = _column_tiles(rows.abs(), self.scaling.tile[1]).amax(dim=-1).float()
        found = found.nan_to_num(nan=math.inf, posinf=math.inf)
        tiles = self._tiles_of(rows, first_row)
        if isinstance(tiles, slice):
            own = maxima[tiles]
            torch.maximum(own, found.unflatten(0, (len(own), -1)).amax(1), out=own)
        else:
            maxima.scatter_reduce_(0, tiles[:, None].expand_as(found), found, "amax")

    def quantize_rows(
        self, rows: Tensor, first_row: int, multipliers: Tensor, codes: Tensor
    ) -> None:
        """Writes the codes of some rows.

        Args:
            rows, first_row: see `add_maxima`.
            multipliers: of the whole weight; see `scales_of`.
            codes: [rows, columns / codes in a byte].
        """
        if rows.numel():
            codes.copy_(self.scaling.cast(rows, multipliers[self._tiles_of(rows, first_row)]))

    def scales_of(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """`Scaling.scales_of` of each matrix, in the shape of the maxima of the whole weight."""
        if self.matrix_rows is None:
            return self.scaling.scales_of(maxima)
        tiles = _num_tiles(self.matrix_rows, self.scaling.tile[0])
        multipliers, scales = self.scaling.scales_of(maxima.unflatten(0, (-1, tiles)))
        return multipliers.flatten(0, 1), scales.flatten(0, 1)

    def _tiles_of(self, rows: Tensor, first_row: int) -> Tensor | slice:
        """The number of each row's tile. A slice where that is each row's own or all rows' only
        one, without gathers and scatters.
        """
        height, end = self.scaling.tile[0], first_row + len(rows)
        if height == 1:
            return slice(first_row, end)
        if height is None and self.matrix_rows is None:
            return slice(0, 1)
        size = self.matrix_rows or end  # of a matrix, or more than the rows' numbers
        height = height or size
        numbers = torch.arange(first_row, end, device=rows.device)
        return numbers // size * _num_tiles(size, height) + numbers % size // height


def hadamard(matrix: Tensor) -> Tensor:
    """A matrix [rows, columns] whose columns are mixed, 16 at a time: [rows, columns rounded up to
    a multiple of 16], same dtype, rounded once.
    """
    tiles = _column_tiles(matrix, _HADAMARD).float()
    return (tiles @ _hadamard_matrix(matrix.device)).flatten(1).to(matrix.dtype)


@cache
def _hadamard_matrix(device: torch.device) -> Tensor:
    """Orthogonal [16, 16] fp32: diag(signs) @ H / 4, with H of Sylvester's construction."""
    matrix = torch.ones(1, 1)
    while len(matrix) < _HADAMARD:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return (torch.tensor(_SIGNS)[:, None] * matrix / math.sqrt(_HADAMARD)).to(device)


def _two_levels(maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Multipliers and scales of NVFP4: see `recipes.nvfp4`."""
    largest = E4M3.largest * E2M1.largest
    outer = scale_of(maxima.amax((-2, -1), keepdim=True), largest)
    inner = (maxima * (outer / E2M1.largest)).clamp(max=E4M3.largest).to(E4M3.dtype).float()
    # A code of e2m1 cannot be NaN: its scale is.
    inner = inner.where(maxima.isfinite(), math.nan)
    scales = inner * outer.reciprocal()
    return scales.reciprocal().clamp(max=torch.finfo(torch.float32).max), scales


def _num_tiles(size: int, tile: int | None) -> int:
    return min(size, 1) if tile is None else math.ceil(size / tile)


def _column_tiles(matrix: Tensor, tile: int | None) -> Tensor:
    """[rows, columns] -> [rows, tiles, columns of a tile], padded with zeros."""
    columns = matrix.shape[1]
    size = max(1, columns) if tile is None else tile
    if columns % size:
        matrix = F.pad(matrix, (0, -columns % size))
    tiles: Tensor = matrix.unflatten(1, (-1, size))
    return tiles


def _of_rows(scales: Tensor, tile: int | None, num_rows: int) -> Tensor:
    """The scales [tiles of rows, tiles of columns] of each row: [rows or 1, tiles of columns]."""
    if tile is None or tile == 1:
        return scales
    return scales.repeat_interleave(tile, dim=0)[:num_rows]


def _noise(rows: Tensor) -> Tensor:
    """Numbers in [0, 1), in steps of 2^-24: [rows, columns] fp32. Each depends on an element's
    place, and on the signs and mantissas of the element and the one before it in its row, so not on
    a power of two that a loss is divided by.
    """
    places = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
    digits = rows.float().view(torch.int32).long() & 0x807FFFFF
    mixed = places * 0x9E3779B1 + digits * 0x85EBCA6B + digits.roll(1, dims=1) * 0xC2B2AE35
    mask = 0xFFFFFFFF
    mixed &= mask
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & mask
    mixed ^= mixed >> 16
    return (mixed >> 8).float() * 2.0**-24
