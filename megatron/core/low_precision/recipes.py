"""Recipes: in which format and with which scales a linear layer's products read their operands.

    recipe       weights        inputs      gradients             scales
    tensorwise   e4m3, all      e4m3, all   e5m2, all             fp32, of this tensor
    delayed      e4m3, all      e4m3, all   e5m2, all             fp32, of earlier tensors
    rowwise      e4m3, row      e4m3, row   e5m2, row             fp32
    blockwise    e4m3, 128x128  e4m3, 128   e4m3, 128             fp32 powers of two
    mxfp8        e4m3, 32x32    e4m3, 32    e4m3, 32              e8m0
    nvfp4        e2m1, 16x16    e2m1, 16    e2m1, 16, random      e4m3, and fp32 of the tensor

The second column of a block is the number of elements along the dim that the product sums over. With
`--fp8-format e4m3` gradients are e4m3 too. Square blocks of weights serve both the forward and the
gradient of the input. Inputs and gradients are quantized once for each direction in which a product
sums over them, both times from 16 bits: the weight's gradient sums over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.low_precision.formats import E2M1, E4M3, E5M2
from megatron.core.low_precision.scaling import Rule, Scheme


@dataclass(frozen=True)
class Recipe:
    """How the operands of a linear layer's products are quantized.

    Attributes:
        weight, input, gradient: of matrices whose columns are summed over.
        transforms_tokens: whether the operands of the weight's gradient get a Hadamard transform along
            tokens, which spreads outliers over a block.
        is_delayed: whether scales follow from the maxima of earlier iterations.
    """

    name: str
    weight: Scheme
    input: Scheme
    gradient: Scheme
    transforms_tokens: bool = False
    is_delayed: bool = False

    @property
    def has_square_weights(self) -> bool:
        """Whether one copy of the weight serves forward and backward."""
        return self.weight.block[0] == self.weight.block[1]


FP8_RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
FP8_FORMATS = ("e4m3", "hybrid")


def fp8_recipe(name: str, format_name: str) -> Recipe:
    """A recipe of eight bits.

    Args:
        name: one of `FP8_RECIPES`.
        format_name: "hybrid": gradients in e5m2, where the recipe has a choice; or "e4m3".
    """
    gradients = E5M2 if format_name == "hybrid" else E4M3
    if name == "blockwise":
        weight = Scheme(E4M3, (128, 128), Rule.POWER_OF_TWO)
        tokens = Scheme(E4M3, (1, 128), Rule.POWER_OF_TWO)
        return Recipe(name, weight, tokens, tokens)
    if name == "mxfp8":
        tokens = Scheme(E4M3, (1, 32), Rule.E8M0)
        return Recipe(name, Scheme(E4M3, (32, 32), Rule.E8M0), tokens, tokens)
    block = (1, 0) if name == "rowwise" else (0, 0)
    both = Scheme(E4M3, block, Rule.FP32)
    gradient = Scheme(gradients, block, Rule.FP32)
    return Recipe(name, both, both, gradient, is_delayed=name == "delayed")


NVFP4 = Recipe(
    "nvfp4",
    Scheme(E2M1, (16, 16), Rule.E4M3),
    Scheme(E2M1, (1, 16), Rule.E4M3),
    Scheme(E2M1, (1, 16), Rule.E4M3, rounds_randomly=True),
    transforms_tokens=True,
)
