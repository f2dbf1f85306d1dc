"""Where tensors are in one flat buffer, and which of their rows are on which rank. Integers only.

The layout is the same on every rank and for everything that belongs to a group of parameters:
compute weights, main weights, gradients, optimizer states. So a rank can compute what any other
rank holds, which is what checkpoints without communication rest on.

[Note: alignment] A buffer may be cut only between rows of every tensor in it: each rank then holds
whole rows, and a shard is a DTensor shard of dim 0. All offsets are multiples of the tensor's own
row size, and ranks' ranges are multiples of the *alignment*, the least common multiple of all row
sizes. Worked example, shapes P0 (2, 6), P1 (4, 4), P2 (4, 4), P3 (1, 2), P4 (1, 6) on 5 ranks. The
alignment is lcm(6, 4, 2) = 12:

    offset  0           12          24          36          48          60
            |P0 row 0,1 |P1 row 0-2 |P1 3|P3|..|P2|P2 row 1-3 |P4 |  pad  |
            |  rank 0   |  rank 1   |  rank 2   |  rank 3   |  rank 4   |

P1 ends at 28, 8 short of the next multiple. P2 has 4 elements more than a multiple of 12: its first
4 elements fill the gap, at 32, and it ends aligned. P3 fits between the two; P4 does not and goes
to the end.

[Note: blocks] Experts are divided among ranks before anything else is: with expert parallelism of
2, the first half of every tensor's rows belongs to the ranks of the first two experts, and the
second half to the others. The buffer of such tensors is a row of equal *blocks*, each with its part
of every tensor, laid out alike. Shapes P0 (4, 2) and P1 (8, 1), 2 blocks on 4 ranks:

    offset  0       4       8       12      16
            |P0 0,1 |P1 0-3 |P0 2,3 |P1 4-7 |
            |rank 0 |rank 1 |rank 2 |rank 3 |
            |--- block 0 ---|--- block 1 ---|

A mesh's last axis cuts first, so one of as many ranks as there are blocks cuts between them.

Tensor parallelism divides a parameter in the same way, but a block is not always consecutive in the
parameter: it may be rows of every section, or columns. Such a tensor is laid out in its *block
order*, and its `TensorCut` leads from there to global coordinates; see transformer/tensor_cut.py.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.core.transformer.tensor_cut import StoredBox, TensorCut


class Chunk(NamedTuple):
    """Consecutive whole rows of one tensor in a piece of the buffer."""

    tensor: int  # index in the layout
    first_row: int  # of the tensor
    num_rows: int
    offset: int  # elements from the beginning of the piece


class FlatRange(NamedTuple):
    """A contiguous range of the flat buffer, in elements."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def covers(self, other: FlatRange) -> bool:
        """Whether this range contains `other`."""
        return self.start <= other.start and other.stop <= self.stop

    def overlap(self, other: FlatRange) -> FlatRange:
        """The intersection of two ranges, possibly empty."""
        start = max(self.start, other.start)
        return FlatRange(start, max(0, min(self.stop, other.stop) - start))


@dataclass(frozen=True)
class GlobalLayout:
    """Offsets of tensors in a flat buffer that can be cut between rows.

    `dp_size` ranks can share it, or any number that divides `dp_size`.

    Raises:
        ValueError: for a tensor that does not start at a multiple of its rows, overlaps another
            or ends outside of its block; for blocks that are not whole alignment units; for a
            scalar, for rows without elements, for rows that blocks do not divide.
    """

    tensor_shapes: tuple[tuple[int, ...], ...]
    tensor_to_offset: tuple[int, ...]  # elements, in each block
    size: int  # elements of all blocks, padding included
    num_blocks: int = 1  # see [Note: blocks]
    cuts: tuple[TensorCut | None, ...] = ()  # of tensors in block order, by tensor; (): of none

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.size % (self.num_blocks * self.alignment):
            raise ValueError(
                f"Expected {self.num_blocks} blocks of whole units of {self.alignment} elements, "
                f"got {self.size} elements."
            )

        end = 0
        placed = zip(self.tensor_to_offset, self.tensor_shapes, strict=True)
        for offset, shape in sorted(placed):
            numel = math.prod(_block_shape(shape, self.num_blocks))
            if offset % row_numel(shape) or (numel and offset < end):
                raise ValueError(
                    f"Expected {shape} at a multiple of its rows behind element {end}, got it at "
                    f"{offset}."
                )
            end = max(end, offset + numel)
        if end > self.block_numel:
            raise ValueError(
                f"Expected tensors within blocks of {self.block_numel} elements, got one that ends "
                f"at {end}."
            )

    @classmethod
    def build(
        cls,
        shapes: Iterable[Sequence[int]],
        dp_size: int,
        num_blocks: int = 1,
        cuts: Sequence[TensorCut | None] = (),
    ) -> GlobalLayout:
        """Lays out tensors of these shapes for `dp_size` ranks. See [Note: alignment].

        Tensors of at least one alignment unit come first, in their order. The gap behind one that
        does not fill its last unit is shared with the first later tensor whose own remainder fits;
        the rest of it is filled with tensors smaller than a unit, the largest first. Small
        tensors that found no gap come last.

        Args:
            shapes: of tensors in block order, their stored shapes.
            num_blocks: see [Note: blocks]. Each block is laid out for its share of the ranks.
            cuts: of each tensor that is in block order, None for others; default: none is.

        Raises:
            ValueError: for a scalar, for rows without elements, for a `dp_size` below 1; for ranks
                or rows that blocks do not divide.
        """
        if dp_size < 1:
            raise ValueError(f"Expected at least one rank, got {dp_size}.")
        if num_blocks < 1 or dp_size % num_blocks:
            raise ValueError(
                f"Expected a number of blocks that divides {dp_size} ranks, got {num_blocks}."
            )

        tensor_shapes = tuple(tuple(shape) for shape in shapes)
        packer = _Packer(tuple(_block_shape(shape, num_blocks) for shape in tensor_shapes))
        packer.place_large_tensors()
        packer.append_small_tensors()
        # The end is padded as well, so that every rank's piece is as long and as aligned.
        block_numel = _round_up(packer.end, packer.alignment * (dp_size // num_blocks))
        size = block_numel * num_blocks
        return cls(tensor_shapes, tuple(packer.offsets), size, num_blocks, tuple(cuts))

    def packed(self, num: int) -> GlobalLayout:
        """The layout of a buffer with `num` neighbours of a row in each element. ValueError for
        columns that are no multiple of `num`.
        """
        if any(shape[-1] % num for shape in self.tensor_shapes):
            raise ValueError(f"Expected columns in multiples of {num}, got {self.tensor_shapes}.")
        shapes = tuple((*shape[:-1], shape[-1] // num) for shape in self.tensor_shapes)
        offsets = tuple(offset // num for offset in self.tensor_to_offset)
        return GlobalLayout(shapes, offsets, self.size // num, self.num_blocks)

    @property
    def block_numel(self) -> int:
        """Elements of each block, padding included."""
        return self.size // self.num_blocks

    def cut(self, tensor: int) -> TensorCut | None:
        """How a tensor in block order is divided; None if it is in global order."""
        return self.cuts[tensor] if self.cuts else None

    def global_shape(self, tensor: int) -> tuple[int, ...]:
        """The shape of a tensor in global coordinates."""
        cut, shape = self.cut(tensor), self.tensor_shapes[tensor]
        return shape if cut is None else cut.global_shape(shape, self.num_blocks)

    def boxes(self, chunk: Chunk) -> list[StoredBox]:
        """The boxes of the global tensor that are a chunk's rows, in their order."""
        cut, shape = self.cut(chunk.tensor), self.global_shape(chunk.tensor)
        rows = range(chunk.first_row, chunk.first_row + chunk.num_rows)
        return boxes_of(rows, shape, cut, self.num_blocks)

    def block_rows(self, tensor: int) -> int:
        """Rows of a tensor in each block."""
        return self.tensor_shapes[tensor][0] // self.num_blocks

    @cached_property
    def alignment(self) -> int:
        """The unit of every rank's range, in elements. See [Note: alignment]."""
        return math.lcm(*(row_numel(shape) for shape in self.tensor_shapes))

    @cached_property
    def gaps(self) -> tuple[FlatRange, ...]:
        """The padding: ranges of the whole buffer without a tensor, in order."""
        taken = sorted(
            (offset, self.numel(i) // self.num_blocks)
            for i, offset in enumerate(self.tensor_to_offset)
        )
        found, end = [], 0
        for offset, numel in [*taken, (self.block_numel, 0)]:
            if offset > end:
                found.append(FlatRange(end, offset - end))
            end = max(end, offset + numel)

        begins = (block * self.block_numel for block in range(self.num_blocks))
        return tuple(FlatRange(begin + gap.start, gap.numel) for begin in begins for gap in found)

    @cached_property
    def _by_offset(self) -> tuple[list[int], list[int]]:
        """The offsets of tensors that have elements, ascending, and their indices."""
        taken = sorted(
            (offset, i) for i, offset in enumerate(self.tensor_to_offset) if self.numel(i)
        )
        return [offset for offset, _ in taken], [i for _, i in taken]

    def numel(self, tensor: int) -> int:
        """Elements of a tensor."""
        return math.prod(self.tensor_shapes[tensor])

    def local_range(
        self, mesh_shape: Sequence[int], is_sharded: Sequence[bool], coordinate: Sequence[int]
    ) -> FlatRange:
        """The range of the buffer that the rank at `coordinate` of a mesh holds.

        The last axis cuts first and the axes before it cut its pieces further, so that the piece of
        a rank that is cut on more axes is inside the piece it would have on fewer.

        Args:
            mesh_shape: ranks along each axis.
            is_sharded: for each axis whether it cuts the buffer.
            coordinate: the rank's place on each axis.

        Raises:
            ValueError: if the layout was built for another number of ranks.
        """
        piece = FlatRange(0, self.size)
        for axis_size, cuts, place in reversed(
            list(zip(mesh_shape, is_sharded, coordinate, strict=True))
        ):
            if not cuts:
                continue

            numel = piece.numel // axis_size
            if numel * axis_size != piece.numel or numel % self.alignment:
                raise ValueError(
                    f"Expected a layout built for the mesh {tuple(mesh_shape)}, got one of size "
                    f"{self.size} that cannot be cut into multiples of {self.alignment}."
                )
            piece = FlatRange(piece.start + place * numel, numel)

        return piece

    def chunks(self, piece: FlatRange) -> list[Chunk]:
        """The rows in a piece, tensor by tensor, without tensors that have none there.

        ValueError as from `chunk`.
        """
        offsets, tensors = self._by_offset
        begin = self._block_of(piece) * self.block_numel

        # Of the tensors that start before the piece, only the last can reach into it.
        first = max(bisect.bisect_right(offsets, piece.start - begin) - 1, 0)
        last = bisect.bisect_left(offsets, piece.stop - begin)
        found = (self.chunk(tensor, piece) for tensor in sorted(tensors[first:last]))
        return [chunk for chunk in found if chunk.num_rows]

    def chunk(self, tensor: int, piece: FlatRange) -> Chunk:
        """The rows of one tensor in a piece; zero rows at offset 0 if it has none.

        Raises:
            ValueError: if the piece cuts through a row of the tensor, which pieces of `local_range`
                never do, or if it is in several blocks, where its rows are not consecutive.
        """
        block = self._block_of(piece)
        begin = block * self.block_numel + self.tensor_to_offset[tensor]
        start, numel = piece.overlap(FlatRange(begin, self.numel(tensor) // self.num_blocks))
        if not numel:
            return Chunk(tensor, 0, 0, 0)

        row = row_numel(self.tensor_shapes[tensor])
        first_row, before = divmod(start - begin, row)
        num_rows, behind = divmod(numel, row)
        if before or behind:
            raise ValueError(
                f"Expected a piece cut between rows of tensor {tensor} ({row} elements each), got "
                f"{piece}."
            )
        first_row += block * self.block_rows(tensor)
        return Chunk(tensor, first_row, num_rows, start - piece.start)

    def _block_of(self, piece: FlatRange) -> int:
        """The block that contains a piece. ValueError if the piece spans several."""
        if self.num_blocks == 1 or not piece.numel:
            return 0
        block = piece.start // self.block_numel
        if piece.stop > (block + 1) * self.block_numel:
            raise ValueError(
                f"Expected a piece inside one of {self.num_blocks} blocks of {self.block_numel} "
                f"elements, got {piece}: the axis that divides the blocks stays Flat."
            )
        return block


def boxes_of(
    rows: range, shape: Sequence[int], cut: TensorCut | None, num_blocks: int
) -> list[StoredBox]:
    """The boxes of a global tensor that are some of its stored rows, in their order.

    Args:
        shape: global shape.
        cut: None for a tensor that is not in block order.
    """
    if cut is not None:
        return cut.boxes(shape, num_blocks, rows)
    tail = shape[1:]
    return [StoredBox(rows, (rows.start, *[0] * len(tail)), (len(rows), *tail))] if rows else []


class _Packer:
    """Assigns offsets; lives for one `GlobalLayout.build`."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.rows = [row_numel(shape) for shape in shapes]
        self.numels = [math.prod(shape) for shape in shapes]
        self.alignment = math.lcm(*self.rows)
        self.offsets = [0] * len(shapes)
        # Behind everything placed so far; aligned while large tensors are being placed.
        self.end = 0

        self._large = [i for i, numel in enumerate(self.numels) if numel >= self.alignment]
        small = [i for i, numel in enumerate(self.numels) if numel < self.alignment]
        self._small = sorted(small, key=lambda i: -self.numels[i])

    def place_large_tensors(self) -> None:
        while self._large:
            tensor = self._large.pop(0)
            self.offsets[tensor] = self.end
            gap = self.end + self.numels[tensor]
            self.end = gap_end = _round_up(gap, self.alignment)

            # A partner starts inside the gap, so far back that it ends aligned.
            partner = self._partner(gap_end - gap)
            if partner is not None:
                self._large.remove(partner)
                whole, remainder = divmod(self.numels[partner], self.alignment)
                gap_end -= remainder
                self.offsets[partner] = gap_end
                self.end += whole * self.alignment

            self._fill(gap, gap_end)

    def append_small_tensors(self) -> None:
        for tensor in self._small:
            self.offsets[tensor] = _round_up(self.end, self.rows[tensor])
            self.end = self.offsets[tensor] + self.numels[tensor]

    def _partner(self, gap_numel: int) -> int | None:
        """The first large tensor whose remainder fits into a gap."""
        for tensor in self._large:
            # One without a remainder cannot fill a gap.
            if 0 < self.numels[tensor] % self.alignment <= gap_numel:
                return tensor
        return None

    def _fill(self, gap: int, gap_end: int) -> None:
        """Moves small tensors into a gap while one fits, the largest first."""
        for tensor in list(self._small):
            offset = _round_up(gap, self.rows[tensor])
            if offset + self.numels[tensor] <= gap_end:
                self.offsets[tensor] = offset
                gap = offset + self.numels[tensor]
                self._small.remove(tensor)


def row_numel(shape: Sequence[int]) -> int:
    """Elements of one row: the product of all dims but the first.

    ValueError for scalars and empty rows.
    """
    row = math.prod(shape[1:]) if len(shape) else 0
    if row < 1:
        raise ValueError(
            f"Expected a tensor with rows of at least one element, got shape {tuple(shape)}."
        )
    return row


def _block_shape(shape: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    """The shape of a tensor's part in each block. ValueError for rows that blocks do not divide."""
    if num_blocks == 1:
        return shape

    row_numel(shape)  # a scalar has no rows to divide
    if not shape[0] or shape[0] % num_blocks:
        raise ValueError(f"Expected rows that {num_blocks} blocks divide, got shape {shape}.")
    return (shape[0] // num_blocks, *shape[1:])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
