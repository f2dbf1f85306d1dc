"""`UnevenRows`: a DTensor that records which rows of its tensor each rank holds, and how to bring
them together; `UnevenShard` is its placement.

DTensor's `Shard(0)` means `torch.chunk`: nine rows on two ranks are five and four. A tensor in a
flat buffer is cut where the buffer is, so the same nine rows may be six and three, or nine and
none. Nine rows of 4 elements that start at offset 8 of a buffer of 64, on two ranks:

    offset   0     8    12    16    20    24    28    32    36    40    44        64
             |     | r0 |  r1 |  r2 |  r3 |  r4 |  r5 |  r6 |  r7 |  r8 |         |
             |------------------ rank 0 --------------|---------- rank 1 ---------|

Any rank's rows follow from the integers of a `RowCut`. PyTorch gets a placement's rows from
`_local_shard_size_and_offset`, so `compute_local_shape_and_global_offset` is correct too, and with
it DCP's planner and `set_model_state_dict`. DTensor's collectives pad every shard to the size that
`torch.chunk` gives it. Here the ranks of an axis send their rows, padded to the largest number of
rows among them.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collectives import WHOLE_TENSOR
from megatron.core.distributed.fsdp.layout import GlobalLayout, boxes_of, row_numel
from megatron.core.dtensors import dtensor_over
from megatron.core.issued_collectives import issuing
from megatron.core.transformer.tensor_cut import StoredBox, TensorCut

T = TypeVar("T", bound="UnevenRows")

_CHECK_OF_SPECS = DTensorSpec._verify_shard_order.__code__


class RowCut(NamedTuple):
    """How equal pieces of a flat buffer cut the rows of one tensor in it.

    Attributes:
        row_numel: elements of one row.
        offset: start of the tensor's first row in each block, in elements.
        block_rows: rows of the tensor in each block.
        num_blocks: equal parts of the buffer, laid out alike; see layout's [Note: blocks].
        piece_numel: elements of each piece.
        num_pieces: pieces of the buffer.
        tensor: of a tensor in block order, how tensor parallelism divides it. Its rows are the
            stored ones.
    """

    row_numel: int
    offset: int
    block_rows: int
    num_blocks: int
    piece_numel: int
    num_pieces: int
    tensor: TensorCut | None = None

    @property
    def num_rows(self) -> int:
        return self.block_rows * self.num_blocks

    @property
    def num_global_rows(self) -> int:
        """Rows of the tensor in global coordinates."""
        return self.block_rows if self.has_parts_of_rows else self.num_rows

    @property
    def has_parts_of_rows(self) -> bool:
        """Whether a stored row is a part of a row."""
        return self.tensor is not None and self.tensor.dim == 1

    def bound(self, piece: int) -> int:
        """The first row in `piece` or behind it; `bound(num_pieces)` is the number of rows."""
        block = piece * self.num_blocks // self.num_pieces
        block_numel = self.piece_numel * self.num_pieces // self.num_blocks
        # Whole rows, since pieces end between rows; less than 0 before the first one.
        rows = (piece * self.piece_numel - block * block_numel - self.offset) // self.row_numel
        return block * self.block_rows + min(max(rows, 0), self.block_rows)


class UnevenShard(Shard):
    """A shard of dim 0 whose rows on each rank follow a `RowCut`.

    It is a `Shard` to code that checks `isinstance` or `is_shard`, but never equal to `Shard(0)`,
    which puts rows elsewhere. DTensor's specs accept no placement but a plain `Shard`,
    so `UnevenDTensor.placements` shows uneven shards while its `_spec` does not.

    [Note: order of cuts] Where several mesh axes shard, the last axis cuts the buffer and the axes
    before it cut its pieces further (see `GlobalLayout.local_range`). PyTorch evaluates placements
    from the left and would cut in the other order. So the leftmost uneven shard, which cuts last,
    shows PyTorch where this rank's rows are in the whole tensor, and shards to its right leave them
    as they are.

    Shards are equal if all sharded axes together cut the same rows on *every* rank: ranks that
    compare two tensors must get the same result, or one would gather while another does not.

    Attributes:
        cut: how all axes together cut the tensor; the same on every rank.
        num_places: ranks along this axis.
        num_pieces: pieces of the cut at each place of this axis.
        first_piece: the first piece of this axis, which the axes to the right determine.
        is_leftmost: whether no axis to the left shards.
    """

    cut: RowCut
    num_places: int
    num_pieces: int
    first_piece: int
    is_leftmost: bool

    def __new__(
        cls, cut: RowCut, num_places: int, num_pieces: int, first_piece: int, is_leftmost: bool
    ) -> UnevenShard:
        # `Shard` is a class in C++ and takes its dim here already.
        self = super().__new__(cls, 0)  # type: ignore[call-arg]
        self.cut, self.num_places, self.num_pieces = cut, num_places, num_pieces
        self.first_piece, self.is_leftmost = first_piece, is_leftmost
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__(0)

    # `__new__` needs the cut, which the default would not pass.
    def __reduce__(self) -> tuple[Any, ...]:
        own = (self.cut, self.num_places, self.num_pieces, self.first_piece, self.is_leftmost)
        return type(self), own

    def rows(self, place: int) -> range:
        """The rows of the tensor at a place of this axis."""
        first = self.first_piece + place * self.num_pieces
        return range(self.cut.bound(first), self.cut.bound(first + self.num_pieces))

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return tuple(self.cut.bound(piece) for piece in range(self.cut.num_pieces + 1))

    def __eq__(self, other: object) -> bool:
        self._reject_spec()
        if not isinstance(other, UnevenShard):
            return False
        axis = (self.num_places, self.num_pieces, self.is_leftmost)
        if axis != (other.num_places, other.num_pieces, other.is_leftmost):
            return False

        # Tensors with rows of different sizes may be cut alike without the same integers.
        return self.cut == other.cut or (self._order, self._bounds) == (other._order, other._bounds)

    @property
    def _order(self) -> tuple[TensorCut, int] | None:
        return None if self.cut.tensor is None else (self.cut.tensor, self.cut.num_blocks)

    def __ne__(self, other: object) -> bool:
        self._reject_spec()
        return not self == other

    def _reject_spec(self) -> None:
        """NotImplementedError in `DTensor.from_local`, whose spec compares placements with plain
        shards. PyTorch's own AssertionError does not mention rows.
        """
        if sys._getframe(2).f_code is _CHECK_OF_SPECS:
            raise NotImplementedError(
                f"A DTensor cannot be made with {self}, the placement of a fully_shard parameter: "
                "programs that cut a whole tensor, as PEFT does, cut it as torch.chunk, and rows "
                "would be misplaced. Load whole tensors by model.load_state_dict(weights, "
                "strict=False) or set_model_state_dict with full_state_dict=True, or give PEFT "
                "replicated ones, DTensor.from_local(whole, mesh, [Replicate()]). For rows cut as "
                "the parameter is there is parameter.with_local(rows)."
            )

    def __hash__(self) -> int:
        return hash((UnevenShard, self.num_places, self.cut.num_rows, self.cut.num_pieces))

    def __repr__(self) -> str:
        return f"UnevenShard(bounds={self._bounds})"

    __str__ = __repr__

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        """The number of rows at place `rank` of the axis, and the first of them; for PyTorch.

        Raises:
            ValueError: for a tensor of another size, or another number of ranks, than was cut.
            NotImplementedError: for a tensor in block order, of which a rank may have several
                boxes.
        """
        if self.cut.tensor is not None:
            raise NotImplementedError(
                "Tensor parallelism gives a rank several boxes of this parameter, which this "
                "PyTorch function cannot describe. Load whole tensors on every rank, by "
                "model.load_state_dict(weights) or set_model_state_dict with full_state_dict=True "
                "and without broadcast_from_rank0; dcp.save and dcp.load work as they are."
            )
        if num_chunks != self.num_places:
            raise ValueError(f"Expected {self.num_places} ranks, as {self} has, got {num_chunks}.")
        # See [Note: order of cuts]: the leftmost shard returns the offset for all axes.
        if not self.is_leftmost:
            return curr_local_size, 0
        if curr_local_size != self.cut.num_rows:
            raise ValueError(f"Expected the rows of {self}, got a tensor of {curr_local_size}.")

        rows = self.rows(int(rank))
        return len(rows), rows.start


def uneven_placements(
    layout: GlobalLayout,
    tensor: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[Placement, ...]:
    """The buffer's placements as they are for one of its tensors, with uneven shards.

    Args:
        layout: of the buffer.
        tensor: its index there.
        mesh_shape: ranks along each axis.
        coordinate: this rank's place on each axis.
        placements: of the buffer, one for each axis; the shards are the last ones.
    """
    sharded = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    num_pieces = math.prod(mesh_shape[axis] for axis in sharded)
    cut = RowCut(
        row_numel(layout.tensor_shapes[tensor]),
        layout.tensor_to_offset[tensor],
        layout.block_rows(tensor),
        layout.num_blocks,
        layout.size // num_pieces,
        num_pieces,
        layout.cut(tensor),
    )

    # From the last axis, which cuts the whole buffer, to the first, which cuts this rank's piece.
    found, first_piece = list(placements), 0
    for axis in reversed(sharded):
        num_pieces //= mesh_shape[axis]
        is_leftmost = axis == sharded[0]
        found[axis] = UnevenShard(cut, mesh_shape[axis], num_pieces, first_piece, is_leftmost)
        first_piece += coordinate[axis] * num_pieces

    return tuple(found)


def rows_at(tensor: DTensor, coordinate: Sequence[int]) -> range:
    """The rows of a DTensor at a place of its mesh. No communication.

    Args:
        tensor: replicated, or cut along dim 0, on each axis.
        coordinate: the place on each axis.

    Raises:
        NotImplementedError: for other placements, and for a tensor in block order.
    """
    rows, piece, cut = range(tensor.shape[0]), 0, None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, UnevenShard):
            # The first piece follows from all axes: see [Note: order of cuts].
            piece += coordinate[axis] * placement.num_pieces
            cut = placement.cut
            if cut.tensor is not None:
                raise NotImplementedError(
                    "Expected a parameter whose ranks hold consecutive rows, got one that tensor "
                    f"parallelism divides, by {cut.tensor}."
                )
        elif type(placement) is Shard and placement.dim == 0:
            most = -(-len(rows) // tensor.device_mesh.size(axis))
            rows = rows[coordinate[axis] * most : (coordinate[axis] + 1) * most]
        elif not placement.is_replicate():
            raise NotImplementedError(
                f"Expected a tensor replicated or cut between rows, got {tensor.placements}."
            )
    return rows if cut is None else range(cut.bound(piece), cut.bound(piece + 1))


class _Wait:
    """A method to be called before each use of some rows, of an object that is held weakly."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self) -> None:
        method = self._method()
        if method is not None:
            method()

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        # PyTorch's asynchronous checkpoints copy a tensor's attributes, but no code updates the
        # rows of a copy.
        return None


class UnevenRows(DTensor):
    """A DTensor whose ranks hold any number of rows: the data of an `UnevenDTensor`, without its
    operators. Made by `over`, or from another one by `with_local`.
    """

    _placements: tuple[Placement, ...]
    _before_use: _Wait | None = None

    @classmethod
    def over(
        cls: type[T],
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> T:
        """A DTensor over local rows, without communication.

        Args:
            local: the rows that this rank holds: [rows here, *shape[1:]], or parts of rows; may
                start anywhere in its storage.
            mesh: where the rows are.
            placements: one for each axis, at least one of them an `UnevenShard`.
            shape, strides: of the whole tensor.
        """
        rows = {each.cut.num_global_rows for each in placements if isinstance(each, UnevenShard)}
        if rows != {shape[0]}:
            raise ValueError(
                f"Expected placements of a tensor of {shape[0]} rows, got {tuple(placements)}."
            )

        # DTensor's own code reads the spec, and caches by specs: a cached result for one tensor
        # must be true for every tensor with an equal spec. So the spec is Shard(0), and
        # `placements` has the rows.
        plain = [Shard(0) if isinstance(each, UnevenShard) else each for each in placements]
        meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
        spec = DTensorSpec(mesh, tuple(plain), tensor_meta=meta)

        return cls._over(local, spec, tuple(placements))

    @classmethod
    def _over(
        cls: type[T], local: torch.Tensor, spec: DTensorSpec, placements: tuple[Placement, ...]
    ) -> T:
        tensor: Any = dtensor_over(local, spec, cls=cls)
        tensor._placements = placements
        return tensor  # type: ignore[no-any-return]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each mesh axis; `UnevenShard` where rows are cut."""
        return self._placements

    @property
    def rows(self) -> range:
        """The stored rows of the whole tensor that this rank holds, perhaps none."""
        axis, shard = self._last_shard
        return shard.rows(self.device_mesh.get_local_rank(axis))

    @property
    def cut(self) -> RowCut:
        """How all axes together cut the tensor."""
        return self._last_shard[1].cut

    @property
    def _last_shard(self) -> tuple[int, UnevenShard]:
        """The axis and the shard that have cut last; see [Note: order of cuts]."""
        return next(
            (axis, placement)
            for axis, placement in enumerate(self._placements)
            if isinstance(placement, UnevenShard) and placement.is_leftmost
        )

    def boxes(self) -> list[StoredBox]:
        """The boxes of the whole tensor that this rank holds, in the order of its rows."""
        return boxes_of(self.rows, self.shape, self.cut.tensor, self.cut.num_blocks)

    def with_local(self: T, local: torch.Tensor) -> T:
        """A tensor cut as this one is, over other local rows: [rows here, ...], of any dtype."""
        own = self._local_tensor
        if (local.dtype, local.shape, local.stride()) == (own.dtype, own.shape, own.stride()):
            found = self._over(local, self._spec, self._placements)
        else:
            shape = self.shape if local.shape == own.shape else (self.shape[0], *local.shape[1:])
            # Strides of an empty shard, and of parts of rows, have no meaning.
            has_strides = local.numel() and not self.cut.has_parts_of_rows
            strides = (local if has_strides else torch.empty(shape, device="meta")).stride()
            found = self.over(local, self.device_mesh, self._placements, shape, strides)

        # Whatever updates these rows in the background updates them for a view as well.
        if self._before_use is not None and _is_same_storage(local, own):
            found._before_use = self._before_use
        return found

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that it has whole: a view, or a copy of several boxes."""
        parts = [whole[box.slices()] for box in self.boxes()]
        if not parts:
            return whole.new_empty(self._local_tensor.shape)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def is_cut_as(self, other: UnevenRows) -> bool:
        """Whether every rank holds the same rows of both, of as many dims."""
        if self is other:
            return True
        if self.dim() != other.dim() or self._spec.mesh != other._spec.mesh:
            return False
        # Identity first: views share the tuple, and comparing shards may compute all their bounds.
        return self._placements is other._placements or self._placements == other._placements

    def is_partial(self) -> bool:
        """Whether the rows are sums that have still to be reduced over an axis."""
        return len(self._placements) > 1 and any(
            placement.is_partial() for placement in self._placements
        )

    def wait_until_usable(self) -> None:
        """Waits for pending updates of these rows on other threads."""
        if self._before_use is not None:
            self._before_use()

    def precede_uses_by(self, wait: Callable[[], None]) -> None:
        """Has the method `wait` called before each use of these rows; its object is held weakly."""
        self._before_use = _Wait(wait)

    def check_whole(self, purpose: str) -> None:
        """RuntimeError if the rows are partial sums."""
        if self.is_partial():
            raise RuntimeError(
                f"Expected a tensor that is reduced for {purpose}, got the partial sums of "
                f"{self._placements}. The last microbatch has to run in microbatch(context, "
                "is_last=True)."
            )


def _is_same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def gathered(tensor: UnevenRows) -> torch.Tensor:
    """All rows of a tensor, in new memory on its device. All ranks of the mesh call it."""
    tensor.check_whole("an operation on all rows")
    tensor.wait_until_usable()
    mesh, rows = tensor.device_mesh, tensor._local_tensor.detach()
    device = rows.device

    # Ranks communicate on the mesh's device, so rows in host memory go there first.
    if device.type != mesh.device_type:
        rows = rows.to(mesh.device_type)

    # The leftmost axis has cut last; see [Note: order of cuts].
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, UnevenShard):
            rows = _gather_axis(rows, placement, mesh, axis)

    if tensor.cut.tensor is not None:
        rows = tensor.cut.tensor.to_global(rows, tensor.cut.num_blocks)
    return rows.to(device)


def _gather_axis(
    rows: torch.Tensor, shard: UnevenShard, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """The rows of all ranks of one axis."""
    counts = [len(shard.rows(place)) for place in range(shard.num_places)]

    # Padded, since an all-gather takes equal parts.
    most, tail = max(counts), rows.shape[1:]
    own = rows.new_zeros((most, *tail))
    own[: len(rows)] = rows
    parts = rows.new_empty((len(counts), most, *tail))

    # As bytes: backends do not support all dtypes.
    if parts.numel():
        sent, received = own.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8)
        collectives.all_gather(received, sent, mesh.get_group(axis), WHOLE_TENSOR)

    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def replicated(whole: torch.Tensor, mesh: DeviceMesh, kind: type[DTensor] = DTensor) -> DTensor:
    """A DTensor over a tensor that every rank has whole."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)

    return kind(whole, spec, requires_grad=False)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of any DTensor, as a plain tensor without a graph; a plain tensor itself. All ranks of
    the mesh call it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(tensor, UnevenRows):
        return gathered(tensor)
    if all(placement.is_replicate() for placement in tensor._spec.placements):
        return tensor._local_tensor.detach()

    # One collective for each axis of the mesh that cuts it, all of them PyTorch's. Not of a tensor
    # that was detached: DTensor's cache may give that an equal mesh whose groups are gone.
    name = f"gather of a DTensor of {tensor.numel()} elements"
    with torch.no_grad(), issuing(name, tensor._local_tensor):
        whole: torch.Tensor = tensor.full_tensor()

    return whole


def recut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A state or gradient with the rows that its parameter `like` has on each rank.

    PyTorch's helpers distribute whole tensors as `torch.chunk` would. If that has happened, all
    ranks of the mesh bring the rows where they belong, together. Anything else stays as it is.
    """
    if (
        not isinstance(like, UnevenRows)
        or not isinstance(tensor, DTensor)
        or tensor.shape != like.shape
    ):
        return tensor
    if isinstance(tensor, UnevenRows) and tensor.is_cut_as(like):
        return tensor

    return like.with_local(like.own_rows(whole_tensor(tensor)).clone())
