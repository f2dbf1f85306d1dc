"""`UnevenShard`: a dim-0 shard that records which rows each rank holds.

DTensor's `Shard(0)` means `torch.chunk`: nine rows on two ranks are five and four. A tensor in a
flat buffer is cut where the buffer is, so the same nine rows may be six and three, or nine and
none. Nine rows of 4 elements that start at offset 8 of a buffer of 64, on two ranks:

    offset   0     8    12    16    20    24    28    32    36    40    44        64
             |     | r0 |  r1 |  r2 |  r3 |  r4 |  r5 |  r6 |  r7 |  r8 |         |
             |------------------ rank 0 --------------|---------- rank 1 ---------|

Any rank's rows follow from the integers of a `RowCut`: how many rows there are (`num_rows`), how
long (`row_numel`), where they start (`offset`), how long pieces are (`piece_numel`), and the blocks
they lie in (`num_blocks`, `block_rows`, `first_row`).
PyTorch gets a placement's rows from `_local_shard_size_and_offset`, so
`compute_local_shape_and_global_offset` is correct too, and with it DCP's planner and
`set_model_state_dict`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.layout import FlatRange, GlobalLayout, row_numel

_CHECK_OF_SPECS = DTensorSpec._verify_shard_order.__code__


class RowCut(NamedTuple):
    """How equal pieces of a flat range cut the rows of one tensor inside it.

    Attributes:
        num_rows: of the tensor in the range.
        row_numel: elements of one row.
        offset: start of the first of these rows in the range, in elements.
        piece_numel: elements of each piece.
        num_pieces: pieces in the range.
        num_blocks: equal parts of the range, each with equally many rows; see layout's
            [Note: blocks]. With more than one, `offset` is that of a block's first row in it.
        block_rows: rows in each block, where there are several.
        first_row: of these `num_rows`, among the rows of all blocks, where there are several.

    Two blocks of 16 elements, each with 3 rows of 4 that start at its offset 2, in 4 pieces of 8:

        piece    0        1        2        3
             |..0---1-|--2---..|..3---4-|--5---..|
             |---- block 0 ----|---- block 1 ----|

    are `RowCut(6, 4, 2, 8, 4, num_blocks=2, block_rows=3)`. A row is in the piece in which it
    starts: the four pieces have rows 0 and 1, 2, 3 and 4, 5.
    """

    num_rows: int
    row_numel: int
    offset: int
    piece_numel: int
    num_pieces: int
    num_blocks: int = 1
    block_rows: int = 0
    first_row: int = 0

    @classmethod
    def of(
        cls, layout: GlobalLayout, tensor: int, flat_range: FlatRange, num_pieces: int
    ) -> RowCut:
        """The cut of a layout's tensor where `flat_range` is divided into `num_pieces`.

        Args:
            flat_range: some whole blocks of the layout, or a part of one.
        """
        row = row_numel(layout.tensor_shapes[tensor])
        piece_numel = flat_range.numel // num_pieces
        if flat_range.numel <= layout.block_numel:
            chunk = layout.chunk(tensor, flat_range)
            return cls(chunk.num_rows, row, chunk.offset, piece_numel, num_pieces)

        blocks, rows = flat_range.numel // layout.block_numel, layout.block_rows(tensor)
        offset = layout.tensor_to_offset[tensor]
        return cls(rows * blocks, row, offset, piece_numel, num_pieces, blocks, rows)

    def bound(self, piece: int) -> int:
        """The first row in `piece` or behind it; `bound(num_pieces)` is the number of rows."""
        begin = piece * self.piece_numel
        if self.num_blocks == 1:
            return self._rows_before(begin, self.num_rows)

        block, place = divmod(begin, self._block_numel)
        inside = self._rows_before(place, self.block_rows)
        return min(max(block * self.block_rows + inside - self.first_row, 0), self.num_rows)

    def _rows_before(self, place: int, num_rows: int) -> int:
        """How many of a block's rows start before a position in it, in elements."""
        # Rounded up. Positions before the first row give less than 0, positions behind the last too
        # much.
        rows = -(-(place - self.offset) // self.row_numel)
        return min(max(rows, 0), num_rows)

    @property
    def _block_numel(self) -> int:
        return self.piece_numel * self.num_pieces // self.num_blocks

    def rows(self, piece: int) -> range:
        """The rows in a piece."""
        return range(self.bound(piece), self.bound(piece + 1))

    def flattened(self, factor: int) -> RowCut:
        """The same cut, with `factor` rows instead of each row."""
        return self._replace(
            num_rows=self.num_rows * factor,
            row_numel=self.row_numel // factor,
            block_rows=self.block_rows * factor,
            first_row=self.first_row * factor,
        )

    def grouped(self, factor: int) -> RowCut:
        """The same cut, with one row instead of `factor` rows, which no cut may separate."""
        return self._replace(
            num_rows=self.num_rows // factor,
            row_numel=self.row_numel * factor,
            block_rows=self.block_rows // factor,
            first_row=self.first_row // factor,
        )

    def can_group(self, factor: int) -> bool:
        """Whether no cut, and no end of a block, separates rows that `grouped` makes one of."""
        return not (self.block_rows % factor or self.first_row % factor) and not any(
            bound % factor for bound in self.bounds
        )

    def window(self, first_row: int, num_rows: int) -> RowCut:
        """The same cut of some of these rows alone, as rows of a separate tensor."""
        if self.num_blocks == 1:
            return self._replace(num_rows=num_rows, offset=self.offset + first_row * self.row_numel)

        first_row += self.first_row
        block, inside = divmod(first_row, self.block_rows)
        if inside + num_rows > self.block_rows:
            return self._replace(num_rows=num_rows, first_row=first_row)
        # The other blocks have none of these rows, so they do not repeat.
        offset = block * self._block_numel + self.offset + inside * self.row_numel
        return RowCut(num_rows, self.row_numel, offset, self.piece_numel, self.num_pieces)

    @property
    def bounds(self) -> tuple[int, ...]:
        """All bounds: [num_pieces + 1]."""
        return tuple(self.bound(piece) for piece in range(self.num_pieces + 1))


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

    [Note: equal on all ranks] The rows that an axis cuts depend on the axes to its right have put
    this rank. Shards are equal if the axes cut alike *together*, on every rank: ranks that compare
    two tensors must come to the same result, or one would gather while another does not.

    Attributes:
        cut: how this axis cuts the rows that the axes to its right leave.
        first_row: the first of these rows in the tensor.
        is_leftmost: whether no axis to the left shards.
        whole: how all axes together cut the tensor; the same on every rank.
    """

    cut: RowCut
    first_row: int
    is_leftmost: bool
    whole: RowCut

    def __new__(
        cls,
        cut: RowCut,
        first_row: int = 0,
        is_leftmost: bool = True,
        whole: RowCut | None = None,
    ) -> UnevenShard:
        # `Shard` is a class in C++ and takes its dim here already.
        self = super().__new__(cls, 0)  # type: ignore[call-arg]
        self.cut, self.first_row, self.is_leftmost = cut, first_row, is_leftmost
        self.whole = cut if whole is None else whole
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(0)

    def window(self, first_row: int, num_rows: int) -> UnevenShard:
        """The placement of `num_rows` consecutive rows of the tensor, as a separate tensor."""
        # This axis has only the rows that the axes to its right leave; the window may start before
        # them or end behind them, or have none of them.
        start = max(self.first_row, first_row)
        stop = min(self.first_row + self.cut.num_rows, first_row + num_rows)
        cut = self.cut.window(start - self.first_row, max(0, stop - start))
        whole = self.whole.window(first_row, num_rows)

        return UnevenShard(cut, min(start - first_row, num_rows), self.is_leftmost, whole)

    def flattened(self, factor: int) -> UnevenShard:
        """The placement of the tensor with `factor` rows instead of each row."""
        cut, whole = self.cut.flattened(factor), self.whole.flattened(factor)
        return UnevenShard(cut, self.first_row * factor, self.is_leftmost, whole)

    def grouped(self, factor: int) -> UnevenShard | None:
        """The placement with one row instead of every `factor` rows; None if a rank holds only
        some of them.
        """
        # All bounds, not this rank's own: ranks must come to the same result.
        if not self.whole.can_group(factor):
            return None
        cut, whole = self.cut.grouped(factor), self.whole.grouped(factor)
        return UnevenShard(cut, self.first_row // factor, self.is_leftmost, whole)

    # `__new__` needs the cut, which the default would not pass.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cut, self.first_row, self.is_leftmost, self.whole)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return self.whole.bounds

    def __eq__(self, other: object) -> bool:
        self._reject_spec()
        if not isinstance(other, UnevenShard):
            return False
        axis, other_axis = (
            (self.cut.num_pieces, self.is_leftmost),
            (other.cut.num_pieces, other.is_leftmost),
        )
        if axis != other_axis:
            return False

        # Tensors with rows of different sizes may be cut alike without the same integers.
        return self.whole == other.whole or self._bounds == other._bounds

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
        return hash((UnevenShard, self.cut.num_pieces, self.whole.num_rows, self.whole.num_pieces))

    def __repr__(self) -> str:
        return f"UnevenShard(bounds={self._bounds})"

    __str__ = __repr__

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        """The number of rows at place `rank` of the axis, and the first of them; for PyTorch.

        Raises:
            ValueError: for a tensor of another size, or another number of ranks, than was cut.
        """
        if num_chunks != self.cut.num_pieces:
            raise ValueError(
                f"Expected {self.cut.num_pieces} ranks, as {self} has, got {num_chunks}."
            )
        # See [Note: order of cuts]: the leftmost shard returns the offset for all axes.
        if not self.is_leftmost:
            return curr_local_size, 0

        rows = self.cut.rows(int(rank))
        if self.first_row + self.cut.num_rows > curr_local_size:
            raise ValueError(f"Expected the rows of {self}, got a tensor of {curr_local_size}.")

        return len(rows), self.first_row + rows.start


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
    found = list(placements)
    piece, first_row = FlatRange(0, layout.size), 0
    sharded = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    num_pieces = math.prod(mesh_shape[axis] for axis in sharded)
    whole = RowCut.of(layout, tensor, piece, num_pieces)

    # From the last axis, which cuts the whole buffer, to the first, which cuts this rank's piece.
    for axis in reversed(sharded):
        cut = RowCut.of(layout, tensor, piece, mesh_shape[axis])
        found[axis] = UnevenShard(cut, first_row, axis == sharded[0], whole)

        place = coordinate[axis]
        piece = FlatRange(piece.start + place * cut.piece_numel, cut.piece_numel)
        first_row += cut.rows(place).start

    return tuple(found)
