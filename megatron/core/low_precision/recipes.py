"""The recipes: which scaling each operand of a linear layer has.

A layer of weight [out, in] computes three products. Both operands of a product are quantised along
the dimension that it sums over:

    fprop   outputs [tokens, out]    inputs [tokens, in]      weight [out, in]
    dgrad   gradient [tokens, in]    gradient [tokens, out]   weight, transposed [in, out]
    wgrad   gradient [out, in]       gradient, transposed     inputs, transposed [in, tokens]
                                     [out, tokens]

Where a scale is of a square, or of the whole matrix, the transposed operand has the same codes.
Elsewhere it is quantised again, from high precision.

Tiles, formats and scales are those of TransformerEngine, common/recipe/__init__.py, unless a
function says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.low_precision.formats import E2M1, E4M3, E5M2, Format
from megatron.core.low_precision.scaling import ScaleKind, Scaling, WeightQuantizer


@dataclass(frozen=True)
class HistoryOptions:
    """How delayed scaling chooses a maximum.

    Attributes:
        length: steps that are remembered.
        algorithm: `max` of them, or `most_recent`.
    """

    length: int
    algorithm: str


@dataclass(frozen=True)
class Recipe:
    """The scalings of a linear layer's operands.

    Attributes:
        inputs_t, gradient_t: of transposed operands; None: the codes of the others, transposed.
        history: delayed scaling's; None: scales are of the tensors themselves.
    """

    inputs: Scaling
    weight: Scaling
    gradient: Scaling
    inputs_t: Scaling | None = None
    gradient_t: Scaling | None = None
    history: HistoryOptions | None = None

    @property
    def has_two_planes(self) -> bool:
        """Whether a transposed weight is quantised again, by the same scaling."""
        return self.weight.tile[0] != self.weight.tile[1]

    @property
    def kept_nbytes(self) -> float:
        """Bytes of an element of the inputs that waits for backward, with its share of the scale.
        The few scales of whole rows are left out.
        """
        kept = self.inputs_t or self.inputs
        width = kept.tile[1]
        scale_nbytes = 1 if kept.kind is ScaleKind.E8M0 else 4
        return 1 / kept.format.per_byte + (0 if width is None else scale_nbytes / width)

    def weight_quantizer(self, matrix_rows: int | None = None) -> WeightQuantizer:
        """Quantises weights some rows at a time; for the argument see `WeightQuantizer`."""
        return WeightQuantizer(self.weight, matrix_rows)

    def with_one_plane(self) -> Recipe:
        """This recipe with weights whose codes serve both directions, for weights that are gathered
        as codes: MXFP8 has scales of 32 x 32 then. `rowwise` quantises the transposed weight from
        the values of the codes.
        """
        if self.weight.kind is not ScaleKind.E8M0:
            return self
        return replace(self, weight=replace(self.weight, tile=(32, 32)))


def tensorwise(gradients: Format) -> Recipe:
    """Current scaling: each tensor's scale is of its own maximum. (Float8CurrentScaling.)"""
    whole = Scaling(E4M3, (None, None))
    return Recipe(whole, whole, replace(whole, format=gradients))


def delayed(gradients: Format, margin: int, history: HistoryOptions) -> Recipe:
    """Each tensor's scale is of the maxima of earlier steps: (largest / 2^margin) / maximum.
    (DelayedScaling; `kernel_bulk` of common/recipe/delayed_scaling.cu.)

    `AmaxHistory` has the maxima. They are of a step, where TransformerEngine counts microbatches.
    """
    whole = Scaling(E4M3, (None, None), margin=margin)
    return Recipe(whole, whole, replace(whole, format=gradients), history=history)


def rowwise(gradients: Format) -> Recipe:
    """A scale for each row of every operand. TransformerEngine has no such recipe; it is PyTorch's
    row-wise scaling, which torchao trains with.
    """
    return _by_lines(Scaling(E4M3, (1, None)), gradients)


def blockwise(gradients: Format) -> Recipe:
    """128 x 128 elements of a weight, and 128 consecutive ones of activations and gradients, have a
    scale, a power of two. (Float8BlockScaling; DeepSeek-AI 2024, arXiv:2412.19437.)
    """
    lines = Scaling(E4M3, (1, 128), ScaleKind.POWER_OF_TWO)
    return _by_lines(lines, gradients, replace(lines, tile=(128, 128)))


def mxfp8(gradients: Format) -> Recipe:
    """32 consecutive elements have a scale in e8m0: their maximum * (1 / largest), rounded up to a
    power of two. (MXFP8BlockScaling; Open Compute Project, Microscaling Formats 1.0.)
    """
    return _by_lines(Scaling(E4M3, (1, 32), ScaleKind.E8M0), gradients)


def _by_lines(lines: Scaling, gradients: Format, weight: Scaling | None = None) -> Recipe:
    """Scales of consecutive elements of a row; `weight`: its scaling, if that is another."""
    of_gradients = replace(lines, format=gradients)
    return Recipe(lines, weight or lines, of_gradients, lines, of_gradients)


def nvfp4() -> Recipe:
    """16 consecutive elements, or 16 x 16 of weights, have a scale in e4m3, and each matrix one in
    fp32. (NVFP4BlockScaling and its reference, custom_recipes/quantization_nvfp4.py; NVIDIA 2025,
    arXiv:2509.25149.)

        G = 448 * 6 / maximum of the matrix; 1 if that is 0
        S = e4m3(min(maximum of the tile * (G / 6), 448))
        code = e2m1(x / (S / G))

    Gradients are rounded stochastically. Both operands of wgrad are mixed by a Hadamard matrix
    first. Where TransformerEngine's scale of a tile with an infinity is 448, here it is NaN, as for
    a NaN: the codes could not show either.
    """
    lines = Scaling(E2M1, (1, 16), ScaleKind.TWO_LEVELS)
    of_gradients = replace(lines, is_stochastic=True)
    return Recipe(
        lines,
        replace(lines, tile=(16, 16)),
        of_gradients,
        inputs_t=replace(lines, has_hadamard=True),
        gradient_t=replace(of_gradients, has_hadamard=True),
    )


def recipe_named(
    name: str,
    fp8_format: str = "hybrid",
    *,
    margin: int = 0,
    history: HistoryOptions = HistoryOptions(1, "most_recent"),
) -> Recipe:
    """The recipe of a name of `--fp8-recipe`, or nvfp4.

    Args:
        fp8_format: of gradients: `e4m3`, or e5m2 with `hybrid`; nvfp4 reads none.
        margin, history: delayed scaling's.

    Raises:
        KeyError: there is no such recipe.
    """
    gradients = E5M2 if fp8_format == "hybrid" else E4M3
    if name == "nvfp4":
        return nvfp4()
    if name == "delayed":
        return delayed(gradients, margin, history)
    others = {"tensorwise": tensorwise, "rowwise": rowwise, "blockwise": blockwise, "mxfp8": mxfp8}
    return others[name](gradients)
