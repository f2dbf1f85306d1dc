"""Linear layers, and fused weights: several matrices stored as consecutive rows of one parameter.

A module that fuses declares the sections where it builds the weight. Checkpoints, which store the
sections unfused, read them from there and never guess them from names. Two query heads and one
key-value head of four channels each:

    FusedWeight((("query", 8), ("key", 4), ("value", 4)))

    rows  0 ........ 7 | 8 .. 11 | 12 .. 15
          query        | key     | value

Muon updates each matrix of a weight separately: `matrices_of` finds them in the same declarations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.linear import linear as low_precision_linear
from megatron.core.low_precision.recipes import Recipe
from megatron.core.products import linear


class Section(NamedTuple):
    """One of the matrices in a fused weight."""

    name: str
    num_rows: int


@dataclass(frozen=True)
class FusedWeight:
    """The sections of a fused weight's dim 0, in order and without gaps. Pairs are taken for
    sections.

    Attributes:
        num_heads: the number of heads in each section, whose rows are consecutive and equally many.

    Raises:
        ValueError: no sections, a name used twice, or a section without rows.
    """

    sections: tuple[Section, ...]
    num_heads: tuple[int, ...]

    def __init__(
        self, sections: Sequence[tuple[str, int]], num_heads: Sequence[int] | None = None
    ) -> None:
        object.__setattr__(
            self, "sections", tuple(Section(name, num_rows) for name, num_rows in sections)
        )
        object.__setattr__(self, "num_heads", tuple(num_heads or (1,) * len(self.sections)))

        if not self.sections:
            raise ValueError("Expected at least one section, got none.")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"Expected sections of different names, got {self.names}.")
        for section in self.sections:
            if section.num_rows < 1:
                raise ValueError(
                    f"Expected at least one row in section {section.name!r}, got "
                    f"{section.num_rows}."
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(section.name for section in self.sections)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each section, in order."""
        return tuple(section.num_rows for section in self.sections)

    @property
    def num_rows(self) -> int:
        """Rows of the whole weight."""
        return sum(self.sizes)

    def matrix_rows(self, *, by_head: bool) -> tuple[int, ...]:
        """Rows of each matrix that Muon updates: a section, or one of its heads."""
        if not by_head:
            return self.sizes
        return tuple(
            num_rows // heads
            for num_rows, heads in zip(self.sizes, self.num_heads, strict=True)
            for _ in range(heads)
        )

    def row_range(self, name: str) -> tuple[int, int]:
        """The rows of section `name`, as (start, stop). ValueError if there is no such section."""
        if name not in self._row_ranges:
            raise ValueError(f"Expected one of the sections {self.names}, got {name!r}.")
        return self._row_ranges[name]

    @cached_property
    def _row_ranges(self) -> dict[str, tuple[int, int]]:
        # Made once: experts have hundreds of sections, each of which is looked up.
        stops = itertools.accumulate(self.sizes)
        return {
            s.name: (stop - s.num_rows, stop) for s, stop in zip(self.sections, stops, strict=True)
        }


class HasSections:
    """A mixin of modules whose parameters are fused."""

    def sections_of(self, parameter: str) -> FusedWeight:
        """The sections of one of the module's own parameters, by its name in the module."""
        raise NotImplementedError


def reset_linear(weight: Tensor, bias: Tensor | None, init_std: float) -> None:
    """Draws the initial weights of a linear layer from the default generator of their device:
    normal(0, init_std). Its biases are zero.
    """
    nn.init.normal_(weight, mean=0.0, std=init_std)
    if bias is not None:
        nn.init.zeros_(bias)


class Linear(nn.Linear):
    """`nn.Linear` whose initial weights are normal(0, init_std) and whose initial biases are
    zero.

    Args:
        tensor_dim: of the weight, see `TensorCut`; None: tensor parallelism leaves the layer whole.

    Attributes:
        is_hidden: whether the outputs are hidden channels. Muon does not update other layers.
        tensor_dims: see `tensor_cuts`. A layer whose input channels are divided has a whole bias.
        recipe: how operands are quantised; None: they are not. `use_recipe` sets it.
        amax_history: of a recipe with delayed scaling.
    """

    is_hidden: ClassVar[bool] = True
    tensor_dims: Mapping[str, int]
    recipe: Recipe | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_std: float = 0.02,
        tensor_dim: int | None = None,
    ) -> None:
        # Before nn.Linear's constructor, which calls reset_parameters.
        self.init_std = init_std
        super().__init__(in_features, out_features, bias=bias)
        self.tensor_dims = {} if tensor_dim is None else {"weight": tensor_dim}
        if tensor_dim == 0:
            self.tensor_dims["bias"] = 0
        self.amax_history: AmaxHistory | None = None

    def reset_parameters(self) -> None:
        """Draws the initial weights: see `reset_linear`."""
        reset_linear(self.weight, self.bias, self.init_std)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.product(inputs, self.bias)

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `forward`, with this bias instead of the layer's."""
        if self.recipe is None:
            return linear(inputs, self.weight, bias)
        return low_precision_linear(
            self.recipe, inputs, self.weight, bias, history=self.amax_history
        )


class FusedLinear(HasSections, Linear):
    """A linear layer whose output features are the sections of a `FusedWeight`, still fused.

    Attributes:
        fused: the sections of `weight` [fused.num_rows, in_features] and of `bias`
            [fused.num_rows].
    """

    def __init__(
        self,
        in_features: int,
        fused: FusedWeight,
        bias: bool = True,
        *,
        init_std: float = 0.02,
        tensor_dim: int | None = None,
    ) -> None:
        super().__init__(
            in_features, fused.num_rows, bias, init_std=init_std, tensor_dim=tensor_dim
        )
        self.fused = fused

    def sections_of(self, parameter: str) -> FusedWeight:  # noqa: ARG002  the same for both
        return self.fused

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """Views of the forward's output [..., fused.num_rows], one per section: [...,
        section.num_rows]. Of a part of the weight: equal parts of both.
        """
        num_parts = self.fused.num_rows // output.shape[-1]
        sizes = [size // num_parts for size in self.fused.sizes]
        sections: tuple[Tensor, ...] = output.split(sizes, dim=-1)
        return sections


def fused_weights(model: nn.Module) -> dict[str, FusedWeight]:
    """The sections of every parameter that a module of `model` has declared, by qualified name."""
    found = {}
    for module_fqn, module in model.named_modules():
        if isinstance(module, HasSections):
            assert isinstance(module, nn.Module), "a mixin of modules"
            for name, _ in module.named_parameters(prefix=module_fqn, recurse=False):
                found[name] = module.sections_of(name.rpartition(".")[2])
    return found


def matrices_of(model: nn.Module, *, by_head: bool) -> dict[nn.Parameter, tuple[int, ...]]:
    """The matrices that Muon updates: for each weight of a hidden linear layer, the rows of every
    matrix in it, in order.

    A weight of one row or one column is a vector and not among them, nor is a weight that another
    kind of module shares, such as an embedding.

    Args:
        by_head: whether each attention head's queries, keys and values are a matrix.
    """
    found: dict[nn.Parameter, tuple[int, ...]] = {}
    others: set[nn.Parameter] = set()
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear | HasSections)
        is_hidden = is_linear and getattr(module, "is_hidden", True)
        for name, parameter in module.named_parameters(recurse=False):
            if not is_hidden or name != "weight" or min(parameter.shape) == 1:
                others.add(parameter)
            elif isinstance(module, HasSections):
                found[parameter] = module.sections_of(name).matrix_rows(by_head=by_head)
            else:
                found[parameter] = (parameter.shape[0],)
    return {parameter: rows for parameter, rows in found.items() if parameter not in others}
