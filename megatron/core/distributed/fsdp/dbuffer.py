"""`DBuffer`: many tensors in one flat, distributed buffer.

A DBuffer generalizes a DTensor to a group of tensors: a mesh, a placement for each of its
axes, and this rank's part of the storage. Weights, gradients and states of a group of parameters
are DBuffers with the same layout; they differ in placements (which axes shard them) and in device.
It is the only caller of tensor collectives.

    Flat      -> Replicate   allgather
    Partial   -> Flat        reduce_scatter
    Partial   -> Replicate   allreduce
    Replicate -> Flat        scatter: no communication, a copy of the own part

A rank outside the mesh may build the same buffers: its parts are empty, and it takes no part in
communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collectives import UNLABELLED, Label
from megatron.core.distributed.fsdp.layout import Chunk, FlatRange, GlobalLayout
from megatron.core.distributed.fsdp.placement import axes_to_move, check_placements, sharded_axes
from megatron.core.distributed.fsdp.replica import ReplicaDTensor
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.distributed.fsdp.uneven_rows import uneven_placements

P = TypeVar("P", bound=Placement)


class DBuffer:
    """This rank's part of a flat buffer of tensors that is distributed over a mesh.

    Attributes:
        mesh: the data-parallel mesh.
        placements: one for each of its axes.
        layout: positions of the tensors in the whole buffer; the same on every rank.
        range: this rank's part of the whole buffer, in elements; empty outside the mesh.
        local_buffer: that part, flat: [range.numel].
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    layout: GlobalLayout
    range: FlatRange
    local_buffer: torch.Tensor

    _owns_storage: bool

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Sequence[int]] | GlobalLayout,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        pin_memory: bool = False,
    ) -> None:
        """Allocates this rank's part, uninitialised but for the padding, which is zero.

        Args:
            mesh: any number of axes.
            placements: one for each axis; the sharded ones last.
            tensor_shapes: the shapes, or the layout of another buffer.
            dtype: of all tensors.
            device: of the memory; need not be the mesh's.
            pin_memory: page-locked host memory, for asynchronous copies; for the CPU only.
        """
        layout = tensor_shapes
        if not isinstance(layout, GlobalLayout):
            layout = GlobalLayout.build(layout, mesh.size())

        self._describe(mesh, placements, layout)
        # Only the padding needs a value: the caller fills the tensors.
        self.local_buffer = torch.empty(
            self.range.numel, dtype=dtype, device=device, pin_memory=pin_memory
        )
        self._owns_storage = True
        self.zero_padding()

    @classmethod
    def from_local(
        cls,
        local_buffer: torch.Tensor,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        layout: GlobalLayout,
    ) -> DBuffer:
        """A buffer over an existing tensor, flat and contiguous. It cannot release that storage."""
        buffer = cls.__new__(cls)
        buffer._describe(mesh, placements, layout)
        if local_buffer.ndim != 1 or not local_buffer.is_contiguous():
            raise ValueError(
                f"Expected a flat, contiguous tensor, got shape {tuple(local_buffer.shape)}."
            )
        if local_buffer.numel() != buffer.range.numel:
            raise ValueError(
                f"Expected {buffer.range.numel} elements on this rank, got {local_buffer.numel()}."
            )

        buffer.local_buffer = local_buffer
        buffer._owns_storage = False
        return buffer

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Iterable[torch.Tensor],
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        device: torch.device | str | None = None,
    ) -> DBuffer:
        """This rank's part of tensors that every rank has in full. No communication.

        Args:
            tensors: of one dtype, on any device. Meta tensors leave their place uninitialised.
            device: of the buffer; default: the mesh's kind.
        """
        tensors = tuple(tensors)
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"Expected tensors of one dtype, got {sorted(map(str, dtypes))}.")

        shapes = [tensor.shape for tensor in tensors]
        buffer = cls(mesh, placements, shapes, dtypes.pop(), device or mesh.device_type)
        for index, tensor in enumerate(tensors):
            buffer.copy_from(index, tensor)
        return buffer

    @property
    def dtype(self) -> torch.dtype:
        return self.local_buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.local_buffer.device

    def chunk(self, index: int) -> Chunk:
        """Which rows of tensor `index` this rank holds, and where."""
        return self.layout.chunk(index, self.range)

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """A view of this rank's rows of tensor `index`: [rows held, *shape[1:]], perhaps none."""
        shape = self.layout.tensor_shapes[index]
        chunk = self.chunk(index)
        numel = chunk.num_rows * (self.layout.numel(index) // shape[0]) if chunk.num_rows else 0
        return self.local_buffer.narrow(0, chunk.offset, numel).view(chunk.num_rows, *shape[1:])

    def get_dtensor(self, index: int) -> UnevenDTensor | ReplicaDTensor:
        """Tensor `index` as a DTensor over this rank's rows, a view of the buffer: an
        `UnevenDTensor`, or a `ReplicaDTensor` if no axis shards.
        """
        shape = torch.Size(self.layout.global_shape(index))
        strides = torch.empty(shape, device="meta").stride()
        local = self.get_local_tensor(index)
        # Not by `DTensor.from_local`, which copies tensors on another device than the mesh's.
        if not any(sharded_axes(self.placements)):
            meta = TensorMeta(shape, strides, self.dtype)
            spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
            return ReplicaDTensor.of(local, spec)

        # Outside the mesh there are no rows, whichever rank's placements these are.
        coordinate = self.mesh.get_coordinate() or (0,) * self.mesh.ndim
        placements = uneven_placements(
            self.layout, index, tuple(self.mesh.shape), coordinate, self.placements
        )

        return UnevenDTensor.over(local, self.mesh, placements, shape, strides)

    def copy_from(self, index: int, tensor: torch.Tensor) -> None:
        """Copies this rank's rows out of the full tensor `index`, in global order. A meta tensor is
        not copied.
        """
        if tuple(tensor.shape) != self.layout.global_shape(index):
            raise ValueError(
                f"Expected tensor {index} of shape {self.layout.global_shape(index)}, got "
                f"{tuple(tensor.shape)}."
            )
        self._check_memory()

        chunk = self.chunk(index)
        if not tensor.is_meta:
            local = self.get_local_tensor(index)
            for box in self.layout.boxes(chunk):
                own = local.narrow(0, box.rows.start - chunk.first_row, len(box.rows))
                own.copy_(tensor.detach()[box.slices()])

    def redistribute(
        self,
        placements: Iterable[Placement],
        *,
        out: DBuffer | None = None,
        label: Label = UNLABELLED,
    ) -> DBuffer:
        """The same tensors under other placements; this very buffer if it has them and there is no
        `out`.
        """
        # All checks come before the first step, or other ranks would wait for the steps after it.
        wanted = self._check(placements)
        axes = axes_to_move(self.placements, wanted)
        if out is not None:
            out = self._output(out, wanted)
        if wanted == self.placements:
            return self.cast(self.dtype, out=out)

        result = self
        for number, axis in enumerate(axes):
            step_out = out
            # On the way, a step writes straight to the part of `out` where its result belongs.
            if out is not None and number < len(axes) - 1:
                step_out = out.part_for(result._with(axis, wanted[axis]))
            result = result._move(axis, wanted[axis], step_out, label)
        return result

    def allgather(
        self, axis: int, *, out: DBuffer | None = None, label: Label = UNLABELLED
    ) -> DBuffer:
        """Flat -> Replicate on one axis."""
        self._expect(axis, Shard, "allgather")
        out = self._output(out, self._with(axis, Replicate()))
        if self._is_in_mesh:
            collectives.all_gather(
                out.local_buffer, self.local_buffer, self.mesh.get_group(axis), label
            )
        return out

    def reduce_scatter(
        self,
        axis: int,
        placement: Placement,
        *,
        dtype: torch.dtype | None = None,
        out: DBuffer | None = None,
        divisor: float = 1.0,
        accumulates: bool = False,
        device_dtype: torch.dtype | None = None,
        label: Label = UNLABELLED,
        group: dist.ProcessGroup | None = None,
    ) -> DBuffer:
        """Partial -> Flat on one axis, by sum or average as in the Partial.

        Args:
            dtype: of the result; default: this buffer's. For the dtype in which parts travel and
                are added, see `collectives.reduce_scatter`.
            out: may be this rank's part of this buffer.
            divisor: of the sum or average.
            accumulates: add to `out` instead of overwriting it.
            device_dtype: in which a GPU's backend sends and adds; default: the result's.
            group: of the axis's ranks; default: the mesh's.
        """
        partial = self._expect(axis, Partial, "reduce_scatter")
        how = _reduction(partial, divisor, accumulates, device_dtype, out)
        out = self._output(out, self._with(axis, placement, Shard), dtype)

        if self._is_in_mesh:
            group = group or self.mesh.get_group(axis)
            collectives.reduce_scatter(out.local_buffer, self.local_buffer, group, how, label)
        return out

    def allreduce(
        self,
        axis: int,
        *,
        dtype: torch.dtype | None = None,
        out: DBuffer | None = None,
        divisor: float = 1.0,
        accumulates: bool = False,
        device_dtype: torch.dtype | None = None,
        label: Label = UNLABELLED,
        group: dist.ProcessGroup | None = None,
    ) -> DBuffer:
        """Partial -> Replicate on one axis. `out` may be over this very storage. For the rest see
        `reduce_scatter`.
        """
        partial = self._expect(axis, Partial, "allreduce")
        how = _reduction(partial, divisor, accumulates, device_dtype, out)
        out = self._output(out, self._with(axis, Replicate()), dtype)
        if self._is_in_mesh:
            group = group or self.mesh.get_group(axis)
            collectives.all_reduce(out.local_buffer, self.local_buffer, group, how, label)
        return out

    def scatter(self, axis: int, placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Replicate -> Flat on one axis: a copy of the own part. No communication."""
        self._expect(axis, Replicate, "scatter")
        out = self._output(out, self._with(axis, placement, Shard))
        part = self.local_buffer.narrow(0, out.range.start - self.range.start, out.range.numel)
        # `out` may be a view of this very part.
        if part.data_ptr() != out.local_buffer.data_ptr():
            out.local_buffer.copy_(part)
        return out

    def view(self, placements: Iterable[Placement]) -> DBuffer:
        """A part of this very storage, for placements that shard more axes, without a copy."""
        part = self.part_for(placements)
        if part is None:
            wanted = self._check(placements)
            inner = _local_range(self.layout, self.mesh, wanted)
            raise ValueError(
                f"Expected placements whose range is in {self.range}, got {wanted} with {inner}."
            )
        return part

    def part_for(self, placements: Iterable[Placement]) -> DBuffer | None:
        """As `view`, but None where this buffer does not contain the range of these placements."""
        wanted = self._check(placements)
        inner = _local_range(self.layout, self.mesh, wanted)
        if not self.range.covers(inner):
            return None
        part = self.local_buffer.narrow(0, inner.start - self.range.start, inner.numel)
        return DBuffer.from_local(part, self.mesh, wanted, self.layout)

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """This buffer in another dtype; itself if it has that dtype and there is no `out`."""
        if dtype == self.dtype and out is None:
            return self

        self._check_memory()
        out = self._output(out, self.placements, dtype)
        out.local_buffer.copy_(self.local_buffer)
        return out

    def zero_padding(self) -> None:
        """Zeroes the padding between and behind the tensors, which sums over the buffer include."""
        for gap in self.layout.gaps:
            start, numel = self.range.overlap(gap)
            if numel:
                self.local_buffer.narrow(0, start - self.range.start, numel).zero_()

    def release_storage(self) -> None:
        """Frees the memory that the buffer has allocated. Views of it stay valid objects, and have
        memory again after `reallocate_storage`.

        On a GPU, memory goes back to the stream it was taken on: call this and `reallocate_storage`
        on the same one, after the events of everything that used the buffer.
        """
        self._check_owner()
        self._resize(0)

    def reallocate_storage(self) -> None:
        """Takes memory again, uninitialised, padding included, for this buffer and all its views.

        A buffer that has its memory keeps it, and its contents.
        """
        self._check_owner()
        # To resize a storage to the size it has, torch takes other memory and copies everything.
        if not self._has_memory:
            self._resize(self.range.numel)

    def _describe(
        self, mesh: DeviceMesh, placements: Iterable[Placement], layout: GlobalLayout
    ) -> None:
        self.mesh = mesh
        self.placements = self._check(placements)
        self.layout = layout
        self.range = _local_range(layout, mesh, self.placements)
        self._is_in_mesh = mesh.get_coordinate() is not None

    def _check(self, placements: Iterable[Placement]) -> tuple[Placement, ...]:
        checked = check_placements(placements)
        if len(checked) != self.mesh.ndim:
            raise ValueError(
                f"Expected {self.mesh.ndim} placements, one for each mesh axis, got {len(checked)}."
            )
        return checked

    def _expect(self, axis: int, kind: type[P], operation: str) -> P:
        if not 0 <= axis < self.mesh.ndim:
            raise ValueError(
                f"Expected an axis of the mesh, 0 to {self.mesh.ndim - 1}, for {operation}, got "
                f"{axis}."
            )
        placement = self.placements[axis]
        if not isinstance(placement, kind):
            raise ValueError(
                f"Expected {kind.__name__} on axis {axis} for {operation}, got {placement}."
            )
        self._check_memory()
        return placement

    def _with(
        self, axis: int, placement: Placement, kind: type[Placement] | None = None
    ) -> tuple[Placement, ...]:
        if kind is not None and not isinstance(placement, kind):
            raise ValueError(
                f"Expected {kind.__name__} as the new placement of axis {axis}, got {placement}."
            )
        return self._check((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def _output(
        self,
        out: DBuffer | None,
        placements: tuple[Placement, ...],
        dtype: torch.dtype | None = None,
    ) -> DBuffer:
        """`out`, or a new buffer, not pinned. ValueError if `out` does not fit."""
        dtype = dtype or self.dtype
        if out is None:
            return DBuffer(self.mesh, placements, self.layout, dtype, self.device)

        for name, expected, got in (
            ("mesh", self.mesh, out.mesh),
            ("placements", placements, out.placements),
            ("layout", self.layout, out.layout),
            ("dtype", dtype, out.dtype),
            ("device", self.device, out.device),
        ):
            if expected != got:
                raise ValueError(f"Expected out with {name} {expected}, got {got}.")

        out._check_memory()
        return out

    def _check_memory(self) -> None:
        """RuntimeError if the storage is released: writing to it would crash the process."""
        if not self._has_memory:
            raise RuntimeError(
                "Expected a buffer that has its memory, got one whose storage is released."
            )

    @property
    def _has_memory(self) -> bool:
        """Whether the storage reaches to the buffer's end. Meta buffers never need any."""
        local = self.local_buffer
        end = (local.storage_offset() + self.range.numel) * local.element_size()
        return local.is_meta or local.untyped_storage().nbytes() >= end

    def _move(self, axis: int, placement: Placement, out: DBuffer | None, label: Label) -> DBuffer:
        """One step of `redistribute`, of a kind that `_check_move` has let through."""
        old = self.placements[axis]
        if isinstance(old, Shard) and isinstance(placement, Replicate):
            return self.allgather(axis, out=out, label=label)
        if isinstance(old, Partial) and isinstance(placement, Shard):
            return self.reduce_scatter(axis, placement, out=out, label=label)
        if isinstance(old, Partial) and isinstance(placement, Replicate):
            return self.allreduce(axis, out=out, label=label)
        return self.scatter(axis, placement, out=out)

    def _check_owner(self) -> None:
        if not self._owns_storage:
            raise RuntimeError(
                "Expected a buffer that owns its storage, got a view or one made from a local "
                "tensor."
            )

    def _resize(self, numel: int) -> None:
        self.local_buffer.untyped_storage().resize_(numel * self.local_buffer.element_size())


def _reduction(
    partial: Partial,
    divisor: float,
    accumulates: bool,
    device_dtype: torch.dtype | None,
    out: DBuffer | None,
) -> collectives.Reduction:
    if accumulates and out is None:
        raise ValueError("Expected an out to accumulate in, got none.")
    return collectives.Reduction(partial.reduce_op == "avg", divisor, accumulates, device_dtype)


def _local_range(
    layout: GlobalLayout, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> FlatRange:
    """This rank's part of the whole buffer; empty for a rank that is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return FlatRange(0, 0)
    return layout.local_range(tuple(mesh.shape), sharded_axes(placements), coordinate)
