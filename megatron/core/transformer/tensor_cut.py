"""How tensor parallelism divides a parameter, and the order in which it is stored.

Each rank of a tensor-parallel group computes with one *part* of a weight. The parameter is stored
in *block order*, part after part, so that each part is consecutive rows of one tensor. The weight
of a fused column-parallel layer is divided by rows within each section, and the weight of a
row-parallel layer by columns. On two ranks:

    dim 0, sections q | k:   global [R, C]   stored [R, C]        q_0 | k_0 | q_1 | k_1
    dim 1:                   global [R, C]   stored [2 R, C / 2]  W[:, : C / 2] | W[:, C / 2 :]

Flat buffers, collectives and optimizers use the stored tensor alone. Code that needs global
coordinates converts here: DTensors, initial weights, checkpoints and Hugging Face files.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.transformer.fused_weight import HasSections


class StoredBox(NamedTuple):
    """A box of a parameter in global coordinates, and the stored rows that hold it.

    Attributes:
        rows: stored rows, in the order of the box: [len(rows), ...] has its `sizes`.
    """

    rows: range
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the global tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


@dataclass(frozen=True)
class TensorCut:
    """How tensor parallelism divides one parameter.

    Attributes:
        dim: 0 or 1.
        sections: global rows of each section of dim 0, all of which are divided alike; one entry
            if the parameter is not fused, none for dim 1.
    """

    dim: int
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or (self.dim == 0) != bool(self.sections):
            raise ValueError(
                f"Expected dim 0 with sections or dim 1 without, got dim {self.dim} with "
                f"{self.sections}."
            )

    @property
    def reorders(self) -> bool:
        """Whether the stored order differs from the global one, for several parts."""
        return self.dim == 1 or len(self.sections) > 1

    def check(self, shape: Sequence[int], num_parts: int, name: str) -> None:
        """ValueError for a parameter that cannot be divided.

        Args:
            shape: global shape.
            name: of the parameter, for the message.
        """
        if len(shape) <= self.dim or (self.dim == 0 and sum(self.sections) != shape[0]):
            raise ValueError(
                f"Tensor parallelism divides dim {self.dim} of {name} in sections of "
                f"{self.sections}, but its shape is {tuple(shape)}."
            )
        uneven = [size for size in self.sections or (shape[1],) if size % num_parts]
        if uneven:
            raise ValueError(
                f"Tensor parallelism over {num_parts} ranks cannot divide the {uneven[0]} "
                f"{'rows of a section' if self.dim == 0 else 'columns'} of {name}."
            )

    def stored_shape(self, shape: Sequence[int], num_parts: int) -> tuple[int, ...]:
        """The shape of all parts, stored one after the other along dim 0."""
        rows, *row = self.part_shape(shape, num_parts)
        return (rows * num_parts, *row)

    def global_shape(self, stored_shape: Sequence[int], num_parts: int) -> tuple[int, ...]:
        """The reverse of `stored_shape`."""
        sizes = list(stored_shape)
        sizes[0] //= num_parts
        sizes[self.dim] *= num_parts
        return tuple(sizes)

    def part_shape(self, shape: Sequence[int], num_parts: int) -> tuple[int, ...]:
        """The shape of each rank's part, with which its module computes."""
        sizes = list(shape)
        sizes[self.dim] //= num_parts
        return tuple(sizes)

    def to_global(self, stored: Tensor, num_parts: int) -> Tensor:
        """A tensor in block order, in global order: a view if these are the same."""
        blocks: Tensor = stored.unflatten(0, (num_parts, -1))
        if self.dim == 1:
            return blocks.movedim(0, 1).flatten(1, 2)
        parts = blocks.split([size // num_parts for size in self.sections], 1)
        parts = [part.flatten(0, 1) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def boxes(self, shape: Sequence[int], num_parts: int, rows: range) -> list[StoredBox]:
        """The boxes that some stored rows hold: one for each section, or part of the columns, of
        which they have rows, in stored order.

        Args:
            shape: global shape.
            rows: consecutive stored rows, also of several parts.
        """
        found = []
        stored = 0
        for part, (first, size) in itertools.product(range(num_parts), self._runs(shape)):
            num_rows = size // num_parts if self.dim == 0 else size
            start, stop = max(rows.start, stored), min(rows.stop, stored + num_rows)
            if start < stop:
                offsets, sizes = [0] * len(shape), list(self.part_shape(shape, num_parts))
                offsets[0], sizes[0] = first + start - stored, stop - start
                offsets[self.dim] += part * (num_rows if self.dim == 0 else sizes[1])
                found.append(StoredBox(range(start, stop), tuple(offsets), tuple(sizes)))
            stored += num_rows
        return found

    def _runs(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """The first global row and the number of rows of each section."""
        sizes = self.sections or (shape[0],)
        return list(zip(itertools.accumulate(sizes[:-1], initial=0), sizes, strict=True))


def tensor_cuts(model: nn.Module) -> dict[nn.Parameter, TensorCut]:
    """How tensor parallelism divides the parameters of a model. Others are whole on every rank.

    A module declares its own: `tensor_dims` maps their names in the module to the dims that are
    divided. `HasSections` names the sections of dim 0.

    Raises:
        ValueError: for a shared parameter that its modules declare differently.
    """
    found: dict[nn.Parameter, TensorCut] = {}
    for module_name, module in model.named_modules():
        dims: Mapping[str, int] = getattr(module, "tensor_dims", {})
        for name, parameter in module._parameters.items():
            if parameter is None or name not in dims:
                continue
            cut = _cut_of(module, name, parameter, dims[name])
            if found.setdefault(parameter, cut) != cut:
                raise ValueError(
                    f"{module_name}.{name} is shared with a module that divides it by "
                    f"{found[parameter]}, not by {cut}."
                )
    return found


def _cut_of(module: nn.Module, name: str, parameter: nn.Parameter, dim: int) -> TensorCut:
    sections: tuple[int, ...] = (parameter.shape[0],)
    if isinstance(module, HasSections):
        sections = module.sections_of(name).sizes
    if dim and len(sections) > 1:
        raise ValueError(
            f"Tensor parallelism divides the columns of {name} in a {type(module).__name__}, whose "
            f"rows are {len(sections)} sections; divide its rows instead."
        )
    return TensorCut(dim, () if dim else sections)
