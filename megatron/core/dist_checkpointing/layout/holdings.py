"""Which rank holds and which rank writes each part of a tensor: arithmetic, no communication.

A *holding* is a box of a global tensor with the ranks that hold it. From the layout of a flat
buffer, the shape of the mesh and the placements, any rank computes every rank's holdings. Saving
without communication rests on this.

[Note: owners] Parts that several ranks hold are written once. All holdings of the same ranks are
laid end to end and cut, between rows, into as many parts of equal bytes as there are ranks. Three
tensors of 2, 4 and 3 rows of equal size, held by three ranks:

            P0      P1              P2
    rows    0   1 | 0   1   2   3 | 0   1   2
    owner   0   0   0 | 1   1   1 | 2   2   2

So ranks write the same number of bytes to within a row, and a rank computes its part from its
holdings alone.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.dist_checkpointing.format.manifest import data_file
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.distributed.fsdp.layout import Chunk, FlatRange, GlobalLayout


class Holding(NamedTuple):
    """A box of a tensor, and the ranks that hold it."""

    box: Box
    ranks: tuple[int, ...] | range  # ascending


class Division(NamedTuple):
    """Boxes of one tensor, each with the rank that writes it and its file. Tensors that are sharded
    alike share one object, so that what follows from it is computed once.
    """

    boxes: Sequence[Box]
    ranks: Sequence[int]
    files: Sequence[str]

    @classmethod
    def of(cls, shares: Iterable[tuple[Box, int]]) -> Division:
        """With the ranks' data files."""
        boxes, ranks = zip(*shares, strict=True) if (shares := list(shares)) else ((), ())
        return cls(boxes, ranks, list(map(data_file, ranks)))


class HeldBoxes(tuple[Holding, ...]):
    """The boxes of one tensor that have elements, in the order of their offsets."""

    @cached_property
    def division(self) -> Division | None:
        """None if several ranks hold a box."""
        if any(len(ranks) > 1 for _, ranks in self):
            return None
        return Division.of((box, ranks[0]) for box, ranks in self)

    @cached_property
    def _sections(self) -> dict[tuple[int, int], HeldBoxes]:
        return {}

    def section(self, first_row: int, num_rows: int) -> HeldBoxes:
        """The boxes of some rows, as a separate tensor."""
        # Weights and states have the same rows, and so do layers with equal layouts.
        rows = (first_row, num_rows)
        if rows not in self._sections:
            self._sections[rows] = HeldBoxes(self._section(*rows))
        return self._sections[rows]

    def _section(self, first_row: int, num_rows: int) -> Iterator[Holding]:
        # An expert is one of hundreds of sections: not every one looks at every holding.
        first = bisect.bisect_right(self, first_row, key=_stop_row)
        last = bisect.bisect_left(self, first_row + num_rows, key=_first_row)
        for (offsets, sizes), ranks in self[first:last]:
            start = max(offsets[0] - first_row, 0)
            stop = min(offsets[0] + sizes[0] - first_row, num_rows)
            if start < stop:
                yield Holding(Box((start, *offsets[1:]), (stop - start, *sizes[1:])), ranks)


# Given a rank, only this rank's boxes, in time that does not grow with the number of ranks.
Holdings: TypeAlias = Callable[[int | None], HeldBoxes]


@dataclass(frozen=True)
class RankMesh:
    """The places of ranks in a mesh, as integers."""

    shape: tuple[int, ...]
    ranks: Sequence[int]  # row by row, the last axis running fastest; a range is found in a moment

    @classmethod
    def of(cls, mesh: DeviceMesh) -> RankMesh:
        ranks = mesh.mesh.flatten()
        first, last, number = int(ranks[0]), int(ranks[-1]), len(ranks)
        step = max((last - first) // max(number - 1, 1), 1)  # also where they descend
        regular = range(first, first + step * number, step)
        if not torch.equal(ranks, torch.arange(regular.start, regular.stop, regular.step)):
            return cls(tuple(mesh.shape), tuple(ranks.tolist()))
        return cls(tuple(mesh.shape), regular)

    def coordinate(self, place: int) -> tuple[int, ...]:
        """Of the rank at this place in `ranks`."""
        found = []
        for size in reversed(self.shape):  # the last axis runs fastest
            place, index = divmod(place, size)
            found.append(index)
        return tuple(reversed(found))

    def place(self, rank: int) -> int | None:
        """Of a rank in `ranks`; None if it is not in the mesh."""
        return self.ranks.index(rank) if rank in self.ranks else None


@dataclass(frozen=True)
class FlatShards:
    """The shards of a flat buffer of tensors on the ranks of a mesh.

    Attributes:
        layout: the layout of the tensors in the whole buffer.
        mesh: the ranks.
        is_sharded: for each axis whether it cuts the buffer; the last axes do.
    """

    layout: GlobalLayout
    mesh: RankMesh
    is_sharded: tuple[bool, ...]

    @cached_property
    def _num_pieces(self) -> int:
        return math.prod(
            size for size, cuts in zip(self.mesh.shape, self.is_sharded, strict=True) if cuts
        )

    def _piece(self, number: int) -> tuple[FlatRange, tuple[int, ...]]:
        """A piece of the buffer, and the ranks that hold it.

        They are at the places `number`, `number` + the number of pieces, ...: these differ on the
        outer axes only, which do not cut.
        """
        coordinate = self.mesh.coordinate(number)
        piece = self.layout.local_range(self.mesh.shape, self.is_sharded, coordinate)
        return piece, tuple(sorted(self.mesh.ranks[number :: self._num_pieces]))

    @cached_property
    def _all_holdings(self) -> list[HeldBoxes]:
        """The holdings of each tensor, in the order of its rows."""
        # Computed once for the weights and all states, which are sharded alike. Sorted by offsets
        # in the buffer, which may differ from the order of ranks in the mesh.
        found: list[list[Holding]] = [[] for _ in self.layout.tensor_shapes]
        for piece, ranks in sorted(self._piece(number) for number in range(self._num_pieces)):
            for chunk in self.layout.chunks(piece):
                found[chunk.tensor] += self._holdings_in(chunk, ranks)
        # The buffer has tensors in block order, which is another one.
        return [HeldBoxes(sorted(each) if self.layout.cuts else each) for each in found]

    def _holdings_in(self, chunk: Chunk, ranks: tuple[int, ...]) -> list[Holding]:
        return [Holding(Box(box.offsets, box.sizes), ranks) for box in self.layout.boxes(chunk)]

    def holdings(self, tensor: int, rank: int | None) -> HeldBoxes:
        """The holdings of a tensor; with `rank`, only its own."""
        if rank is None:
            return self._all_holdings[tensor]
        if rank not in self._held_by:
            self._held_by[rank] = self._holdings_of(rank)
        return self._held_by[rank].get(tensor, _NOTHING)

    @cached_property
    def _held_by(self) -> dict[int, dict[int, HeldBoxes]]:
        """The holdings of each tensor, by rank, for ranks that have been asked about."""
        return {}

    def _holdings_of(self, rank: int) -> dict[int, HeldBoxes]:
        place = self.mesh.place(rank)
        if place is None:
            return {}

        # Places that differ by a multiple of the number of pieces hold the same piece.
        piece, ranks = self._piece(place % self._num_pieces)
        chunks = self.layout.chunks(piece)
        return {chunk.tensor: HeldBoxes(self._holdings_in(chunk, ranks)) for chunk in chunks}


_NOTHING = HeldBoxes()


def section_holdings(whole: Holdings, first_row: int, num_rows: int, rank: int | None) -> HeldBoxes:
    """The holdings of some rows of a tensor as a separate one: a matrix in a fused weight."""
    return whole(rank).section(first_row, num_rows)


def _first_row(holding: Holding) -> int:
    return holding.box.offsets[0]


def _stop_row(holding: Holding) -> int:
    return holding.box.offsets[0] + holding.box.sizes[0]


class EvenShards:
    """A tensor as PyTorch's DTensor shards it: ceil(size / ranks) to each rank, like `torch.chunk`.

    The last ranks may have less, or no rows: 9 rows on 4 ranks are 3, 3, 3 and 0.
    """

    def __init__(
        self, shape: Sequence[int], mesh: RankMesh, sharded_dims: Sequence[int | None]
    ) -> None:
        """
        Args:
            shape: of the whole tensor.
            mesh: the ranks.
            sharded_dims: for each axis of the mesh the dim that it shards; None: it replicates.
        """
        self._shape = tuple(shape)
        self._mesh = mesh
        self._sharded_dims = tuple(sharded_dims)

    def holdings(self, rank: int | None) -> HeldBoxes:
        """The holdings of all ranks, or of one."""
        if rank is None:
            return self._all_holdings
        place = self._mesh.place(rank)
        if place is None:
            return _NOTHING
        return HeldBoxes(self._holdings([(index,) for index in self._mesh.coordinate(place)]))

    @cached_property
    def _all_holdings(self) -> HeldBoxes:
        # Made once: many sections may be rows of this tensor.
        found = self._holdings([range(size) for size in self._mesh.shape])
        return HeldBoxes(sorted(found, key=lambda holding: holding.box.offsets))

    def _holdings(self, indices: Sequence[Sequence[int]]) -> list[Holding]:
        """The holdings at these indices of each axis."""
        # On an axis that replicates, all ranks hold the same box.
        cuts = [
            (0,) if dim is None else own
            for own, dim in zip(indices, self._sharded_dims, strict=True)
        ]
        boxes = ((self._box(coordinate), coordinate) for coordinate in itertools.product(*cuts))
        return [Holding(box, self._ranks(coordinate)) for box, coordinate in boxes if box.numel]

    def _box(self, coordinate: tuple[int, ...]) -> Box:
        offsets, sizes = [0] * len(self._shape), list(self._shape)
        # Two axes may shard one dim; the second then cuts the shards of the first.
        for index, num_ranks, dim in self._axes(coordinate):
            if dim is not None:
                most = -(-sizes[dim] // num_ranks)
                start = min(index * most, sizes[dim])
                offsets[dim], sizes[dim] = offsets[dim] + start, min(most, sizes[dim] - start)
        return Box(tuple(offsets), tuple(sizes))

    def _ranks(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """All ranks with the same indices on the axes that shard."""
        places = [0]
        for index, num_ranks, dim in self._axes(coordinate):
            indices = range(num_ranks) if dim is None else (index,)
            places = [place * num_ranks + i for place in places for i in indices]
        return tuple(sorted(self._mesh.ranks[place] for place in places))

    def _axes(self, coordinate: tuple[int, ...]) -> Iterator[tuple[int, int, int | None]]:
        """For each axis of the mesh the index of a rank, the number of ranks, the sharded dim."""
        return zip(coordinate, self._mesh.shape, self._sharded_dims, strict=True)


def replicated(shape: Sequence[int], ranks: Sequence[int]) -> Holdings:
    """The holdings of a tensor that some ranks hold whole: all ranks, or a single one."""
    # A range finds a rank, and is hashed, in constant time, however many ranks it has.
    own = ranks if isinstance(ranks, range) else tuple(ranks)
    held = HeldBoxes([Holding(Box.whole(shape), own)] if math.prod(shape) else ())
    return lambda rank: held if rank is None or rank in own else _NOTHING


def shares(tensors: Sequence[tuple[Holdings, int]], rank: int | None = None) -> Iterator[Division]:
    """Divides the tensors among the ranks that write them. See [Note: owners].

    Args:
        tensors: the holdings of each, and the bytes of one element, in the same order on every
            rank.
        rank: only the parts of this rank, computed from its holdings alone.
    """
    # Each rank has all holdings that it shares with others, so all compute the same totals.
    held = [holdings(rank) for holdings, _ in tensors]
    totals: dict[tuple[int, ...] | range, int] = {}
    for (_, itemsize), holdings in zip(tensors, held, strict=True):
        for box, ranks in holdings if holdings.division is None else ():
            totals[ranks] = totals.get(ranks, 0) + box.numel * itemsize

    before = dict.fromkeys(totals, 0)  # bytes that the same ranks hold in earlier holdings
    for (_, itemsize), holdings in zip(tensors, held, strict=True):
        if holdings.division is not None:
            yield holdings.division
            continue
        parts: list[tuple[Box, int]] = []
        for holding in holdings:
            nbytes, ranks = holding.box.numel * itemsize, holding.ranks
            parts += _cut(holding, nbytes, before[ranks], totals[ranks])
            before[ranks] += nbytes
        yield Division.of(part for part in parts if rank in (None, part[1]))


def _cut(holding: Holding, nbytes: int, before: int, total: int) -> Iterator[tuple[Box, int]]:
    """Cuts what several ranks hold, `before` bytes into the `total` that the same ranks hold, into
    boxes with the one rank that writes each.
    """
    (offsets, sizes), ranks = holding
    num_rows = sizes[0] if sizes else 1
    row_bytes, num_ranks = nbytes // num_rows, len(ranks)

    # Starts with the first part that the box reaches into. A row belongs to the part with its first
    # byte, so a part may have no row of the box.
    part = before * num_ranks // total
    row = 0
    while row < num_rows:
        stop = num_rows
        if part < num_ranks - 1:
            end_bytes = -(-(part + 1) * total // num_ranks) - before
            stop = min(num_rows, -(-end_bytes // row_bytes))

        if stop > row:
            own = Box((offsets[0] + row, *offsets[1:]), (stop - row, *sizes[1:])) if sizes else None
            yield own or holding.box, ranks[part]
            row = stop
        part += 1
