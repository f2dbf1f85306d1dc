"""Which mesh axes shard the parameters, gradients and optimizer states of a module.

DTensor's placements are used as they are; `Flat` is the one that is added. On each axis of the
data-parallel mesh a buffer is

    Replicate()          the same on every rank
    Partial("sum"|"avg") to be added up, or averaged, over the axis
    Flat()               cut: each rank holds one equal piece of the flat buffer

and the axes that are cut are the last ones, so that every rank's piece is one contiguous range of
the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class Flat(Shard):
    """A dim-0 shard whose storage is part of one flat buffer of many tensors.

    Every tensor in the buffer is cut between rows, but not evenly: a rank may hold three rows of
    one tensor and no row of another. Equal to `Shard(0)`, the placement of a DTensor over such a
    buffer.
    """

    def __init__(self) -> None:
        super().__init__(0)


def check_placements(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """The placements of a flat buffer, one for each mesh axis, after checking them.

    Raises:
        TypeError: for a placement other than Replicate, Partial (sum or avg) and Shard.
        NotImplementedError: for a shard of another dim than 0.
        ValueError: for an axis that is not cut behind one that is.
    """
    checked = tuple(placements)
    is_cut = False
    for axis, placement in enumerate(checked):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise NotImplementedError(
                    f"Expected dim-0 Shard placements, got {placement!r} on axis {axis}."
                )
            is_cut = True
        elif is_cut:
            raise ValueError(
                "Expected the Flat placements to be a suffix of the list, so that each rank's part "
                f"is one range of the buffer, got {checked}."
            )
        elif not isinstance(placement, (Replicate, Partial)):
            raise TypeError(
                f"Expected a Replicate, Partial, Shard(0) or Flat placement, got {placement!r} on "
                f"axis {axis}."
            )
        elif isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise TypeError(
                f"Expected Partial('sum') or Partial('avg'), got {placement!r} on axis {axis}."
            )

    return checked


def sharded_axes(placements: Iterable[Placement]) -> tuple[bool, ...]:
    """For each mesh axis whether it cuts the buffer."""
    return tuple(isinstance(placement, Shard) for placement in placements)


def axes_to_move(old: Sequence[Placement], new: Sequence[Placement]) -> list[int]:
    """The axes whose placements differ, in the order in which a redistribution takes them.

    NotImplementedError for a change that no collective makes.
    """
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        if isinstance(before, Replicate):
            is_possible = isinstance(after, Shard)
        else:
            is_possible = isinstance(after, (Replicate, Shard))
        if before != after and not is_possible:
            raise NotImplementedError(
                "Expected Flat -> Replicate, Partial -> Flat, Partial -> Replicate or Replicate -> "
                f"Flat on axis {axis}, got {before} -> {after}."
            )

    axes = [axis for axis in range(len(new)) if new[axis] != old[axis]]
    # The axes that are cut stay the last ones on the way: shards are added from the inside out and
    # taken away from the outside in.
    is_cut_further = sum(sharded_axes(new)) > sum(sharded_axes(old))
    return axes[::-1] if is_cut_further else axes


SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Placements:
    """Where the three kinds of buffers of a module are cut, on the same mesh axes, outer to inner.

    Optimizer states may be cut more finely than the gradients, and these more finely than the
    parameters, never less: a rank updates a part of the parameters whose gradients it has. A
    gradient that is `Partial` on an axis stays a rank's own sum over the microbatches of a step and
    is reduced over that axis once, after the last of them, to the placement that the optimizer has
    there. On the other axes every backward reduces it.

    | strategy (ZeRO)          | parameter         | gradient         | optimizer         |
    |--------------------------|-------------------|------------------|-------------------|
    | no_shard                 | Replicate         | Partial          | Replicate         |
    | optim (1)                | Replicate         | Partial          | Flat              |
    | optim_grads (2)          | Replicate         | Flat             | Flat              |
    | optim_grads_params (3)   | Flat              | Flat             | Flat              |
    | HSDP  (outer, inner)     | Replicate, Flat   | Partial, Flat    | Replicate, Flat   |
    | HFSDP (outer, inner)     | Replicate, Flat   | Partial, Flat    | Flat, Flat        |

    On a *kept* axis weights stay cut even in use: each rank's module computes with different rows,
    the experts that this rank holds. All three are Flat there, and gradients are reduced over the
    other axes only. Kept axes are the last ones, which cut first; see layout's [Note: blocks].

    Attributes:
        kept_axes: the kept axes among `dp_axes`, by the names or numbers that they have there.
    """

    dp_axes: tuple[int | str, ...]  # names of the mesh's axes, or numbers, from the end if negative
    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]
    kept_axes: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp_axes", tuple(self.dp_axes))
        if len(set(self.dp_axes)) != len(self.dp_axes):
            raise ValueError(f"Expected distinct data-parallel axes, got dp_axes={self.dp_axes}.")

        for name in ("parameter", "gradient", "optimizer"):
            placements = check_placements(getattr(self, name))
            if len(placements) != len(self.dp_axes):
                raise ValueError(
                    f"Expected {len(self.dp_axes)} {name} placements, one for each of dp_axes="
                    f"{self.dp_axes}, got {len(placements)}."
                )
            if name != "gradient" and any(
                isinstance(placement, Partial) for placement in placements
            ):
                raise ValueError(
                    f"Expected Replicate or Shard(0) as {name} placements, got {placements}; only "
                    "gradients are Partial."
                )
            object.__setattr__(self, name, placements)

        for coarse, fine in (("parameter", "gradient"), ("gradient", "optimizer")):
            pairs = zip(
                sharded_axes(getattr(self, coarse)), sharded_axes(getattr(self, fine)), strict=True
            )
            if any(is_coarse_cut and not is_fine_cut for is_coarse_cut, is_fine_cut in pairs):
                raise ValueError(
                    f"Expected Shard(0) as {fine} placement wherever the {coarse} placement is "
                    f"one, got {fine}={getattr(self, fine)} and {coarse}={getattr(self, coarse)}. "
                    "ZeRO-3 shards all three, ZeRO-2 gradient and optimizer, ZeRO-1 optimizer."
                )

        if any(
            isinstance(own, Replicate) and isinstance(fine, Shard)
            for own, fine in zip(self.gradient, self.optimizer, strict=True)
        ):
            raise ValueError(
                "Expected Shard(0) or Partial as gradient placement wherever the optimizer "
                f"placement is Shard(0), got gradient={self.gradient} and "
                f"optimizer={self.optimizer}."
            )
        self._check_kept_axes()

    def _check_kept_axes(self) -> None:
        object.__setattr__(self, "kept_axes", tuple(self.kept_axes))
        num_others = len(self.dp_axes) - len(self.kept_axes)
        if self.kept_axes != self.dp_axes[max(num_others, 0) :]:
            raise ValueError(
                "Expected the kept axes to be the last ones of dp_axes, in the same order, got "
                f"kept_axes={self.kept_axes} of dp_axes={self.dp_axes}."
            )
        # Gradients and optimizer states are cut wherever parameters are.
        if not all(sharded_axes(self.parameter[num_others:])):
            raise ValueError(
                f"Expected Flat placements on the kept axes {self.kept_axes}, got "
                f"parameter={self.parameter}."
            )

    @classmethod
    def for_strategy(cls, strategy: str, axis: int | str = 0) -> Placements:
        """One axis's placements, by a value of --data-parallel-sharding-strategy."""
        if strategy not in SHARDING_STRATEGIES:
            raise ValueError(f"Expected one of {SHARDING_STRATEGIES}, got {strategy!r}.")

        number = SHARDING_STRATEGIES.index(strategy)
        return cls(
            dp_axes=(axis,),
            parameter=(Flat() if number >= 3 else Replicate(),),
            gradient=(Flat() if number >= 2 else Partial("avg"),),
            optimizer=(Flat() if number >= 1 else Replicate(),),
        )

    @classmethod
    def usual(cls, num_axes: int) -> Placements:
        """PyTorch FSDP2's: everything is cut, on two axes by the inner one (ZeRO-3 and HSDP)."""
        if num_axes == 1:
            return cls.for_strategy("optim_grads_params")
        if num_axes != 2:
            raise ValueError(f"Expected placements for a mesh of {num_axes} axes, got none.")

        return cls(
            dp_axes=(0, 1),
            parameter=(Replicate(), Flat()),
            gradient=(Partial("avg"), Flat()),
            optimizer=(Replicate(), Flat()),
        )

    def with_kept_axis(
        self, axis: int | str, other_axes: Sequence[int | str] | None = None
    ) -> Placements:
        """The same strategy on a mesh with one more axis, the last one, which is kept.

        Args:
            axis: the new axis.
            other_axes: names of the axes before it on that mesh; default: as here.
        """
        others = self.dp_axes if other_axes is None else tuple(other_axes)
        return Placements(
            (*others, axis),
            (*self.parameter, Flat()),
            (*self.gradient, Flat()),
            (*self.optimizer, Flat()),
            (*self.kept_axes, axis),
        )

    @cached_property
    def is_kept(self) -> tuple[bool, ...]:
        """For each of `dp_axes` whether it is kept."""
        num_others = len(self.dp_axes) - len(self.kept_axes)
        return (False,) * num_others + (True,) * len(self.kept_axes)

    @property
    def in_use(self) -> tuple[Placement, ...]:
        """The placements of the weights that modules compute with."""
        return tuple(Flat() if kept else Replicate() for kept in self.is_kept)

    def num_blocks(self, mesh_shape: Sequence[int]) -> int:
        """Into how many parts the kept axes of a data-parallel mesh divide every tensor."""
        sizes = zip(mesh_shape, self.is_kept, strict=True)
        return math.prod(size for size, kept in sizes if kept)

    @property
    def defers_reduction(self) -> bool:
        """Whether gradients are reduced over some axis only after the last microbatch."""
        return any(isinstance(placement, Partial) for placement in self.gradient)


def data_parallel_mesh(mesh: DeviceMesh, placements: Placements) -> DeviceMesh:
    """The mesh of the placements' axes, outer to inner.

    Raises:
        ValueError: for axes that the mesh does not have, or has in another order.
        RuntimeError: on a rank outside the mesh.
    """
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"Expected a rank of the mesh {mesh}, got one outside it.")

    names = mesh.mesh_dim_names or ()
    numbers = [_axis_number(mesh, axis) for axis in placements.dp_axes]
    # One axis may have been given twice, by its name and its number.
    if len(set(numbers)) != len(numbers):
        raise ValueError(
            f"Expected distinct data-parallel axes, got dp_axes={placements.dp_axes} of a mesh "
            f"with {mesh.ndim}."
        )
    if numbers != sorted(numbers):
        raise ValueError(
            f"Expected data-parallel axes in mesh-axis order, got dp_axes={placements.dp_axes}."
        )

    if numbers == list(range(mesh.ndim)):
        return mesh
    if not names:
        raise ValueError(
            f"Expected dp_axes to match every axis of a mesh without mesh_dim_names, got "
            f"{placements.dp_axes} of {mesh.ndim} axes. Name the axes in init_device_mesh."
        )
    return mesh[tuple(names[number] for number in numbers)]


def _axis_number(mesh: DeviceMesh, axis: int | str) -> int:
    """The number of an axis given by name or number. ValueError if the mesh has none such."""
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise ValueError(
        f"Expected an axis of the mesh, {-mesh.ndim} to {mesh.ndim - 1} or one of {names}, got "
        f"{axis!r} in dp_axes."
    )
