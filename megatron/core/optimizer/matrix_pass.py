"""The steps of matrices, whose rows may be on several ranks: `Muon` for tensors and DTensors.

A step has three phases for each batch of parameters:

    1  elementwise      update the momentum, write what is to be orthogonalized, in bf16
       all-to-all       rows -> whole matrices on their owners, see matrix_owners.py
    2  by matrix        orthogonalize
       all-to-all       the way back, in the same memory
    3  elementwise      decay the weight, add the result

The collectives of a batch are asynchronous, and batches overlap: while the rows of one travel, the
matrices of the one before it are orthogonalized.

    batch 0    1  ->  2  ->  3
    batch 1           1  ->  2  ->  3
    batch 2                  1  ->  2  ->  3

A matrix is copied to new memory before it is orthogonalized, wherever its rows came from, so its
result has the same bits for any number of ranks. A rank sends each of its rows up to two times in
bf16: to the owner, and back. So of P elements on N ranks it sends about 4 P / N bytes, if the costs
of matrices can be balanced, and receives as many.

All ranks have the same batches in the same order, whatever readers hold a rank's states back: see
[Note: order of exchanges] in distributed/experts.py. A gradient that only some ranks have is found
before the step, by `CollectiveHistory`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.uneven_rows import rows_at
from megatron.core.dtensors import local_tensor
from megatron.core.issued_collectives import issuing
from megatron.core.mesh import group_over, ranks_over
from megatron.core.optimizer.kernels.newton_schulz import MuonStep, orthogonalize
from megatron.core.optimizer.kernels.piece import Kernel
from megatron.core.optimizer.matrix_owners import Division, HeldMatrices, Segment, divide
from megatron.core.optimizer.rule_states import LocalArray, PlannedUpdates, Update, carry_out, plan

# Of a batch on each rank: 64 MiB in bf16. All ranks together have enough matrices then.
_MOST_NUMEL = 1 << 25
_USUAL_BATCHES = 4  # about as many if there is little to exchange, so that they can overlap
_NUM_SLOTS = 3  # batches that are under way at a time


class MatrixStep(NamedTuple):
    """The step of a parameter [rows, columns].

    Attributes:
        num_rows: of each of the matrices that are stacked in it.
        arrays: of the step, as `RuleStates.arrays` returns them.
    """

    parameter: torch.Tensor
    num_rows: tuple[int, ...]
    scalars: MuonStep
    arrays: Mapping[str, LocalArray]


class _Places(NamedTuple):
    """The ranks among which rows are exchanged; a place is a rank's number in the group."""

    group: dist.ProcessGroup | None  # None: this rank alone
    own: int
    coordinates: tuple[tuple[int, ...], ...]  # of each place in the parameter's mesh


class MatrixBatch(NamedTuple):
    """Parameters whose rows travel together.

    Attributes:
        parameters: of the batch.
        sent, received: the sizes of the messages to and from each place, in elements.
        buffer: [sum of `sent`] bf16: what is sent, and the results that come back.
        update, add: the elementwise phases.
        matrices: which this rank orthogonalizes.
    """

    parameters: list[torch.Tensor]
    group: dist.ProcessGroup | None
    sent: list[int]
    received: list[int]
    buffer: torch.Tensor
    update: PlannedUpdates
    add: PlannedUpdates
    matrices: list[_OwnMatrix]


class _OwnMatrix(NamedTuple):
    """A matrix that this rank orthogonalizes, and the offsets of its rows in what it receives."""

    step: MuonStep
    num_rows: int
    num_columns: int
    parts: list[tuple[Segment, int]]  # with offsets


def check_matrices(parameter: torch.Tensor, num_rows: Sequence[int] | None) -> tuple[int, ...]:
    """The rows of the matrices in a parameter.

    Args:
        num_rows: of each; None: the parameter is one matrix.

    Raises:
        ValueError: for a parameter without two dims, and for rows that are not all of its rows.
    """
    shape = tuple(parameter.shape)
    if len(shape) != 2:
        raise ValueError(
            f"Expected matrices in a group of Muon, got a parameter of {shape}. Put it into a "
            "group with use_muon=False."
        )
    found = shape[:1] if num_rows is None else tuple(map(int, num_rows))
    if sum(found) != shape[0] or min(found, default=1) < 1:
        raise ValueError(f"Expected matrix_rows of {shape[0]} rows in all, got {found}.")
    return found


class MatrixPass:
    """Plans and carries out steps of matrices. Keeps what it has divided for the next step."""

    def __init__(self) -> None:
        self._steps: list[MatrixStep] = []
        self._divided: list[_Divided] = []

    def plan(self, steps: Sequence[MatrixStep]) -> list[MatrixBatch]:
        """The batches of a step, in the order of all ranks. Reads and writes no array.

        Raises:
            ValueError: for a matrix of which other ranks on a kept axis hold some rows.
            NotImplementedError: for DTensors that are not cut between rows.
        """
        if [*map(_identity, steps)] != [*map(_identity, self._steps)]:
            self._divided = _divided(steps)
            # Without gradients, which would be kept in memory.
            self._steps = [step._replace(arrays={}) for step in steps]
        batches = self._divided

        # Batches that are not under way at the same time share memory.
        slots = [
            max((divided.num_sent for divided in batches[slot::_NUM_SLOTS]), default=0)
            for slot in range(_NUM_SLOTS)
        ]
        memory: dict[tuple[int, torch.device], torch.Tensor] = {}
        found = []
        for number, divided in enumerate(batches):
            own = [steps[index] for index in divided.steps]
            slot, device = number % _NUM_SLOTS, own[0].arrays["weight"].tensor.device
            if (slot, device) not in memory:
                memory[slot, device] = torch.empty(slots[slot], dtype=torch.bfloat16, device=device)
            found.append(_batch(divided, own, memory[slot, device][: divided.num_sent]))
        return found

    def run(
        self,
        batches: Sequence[MatrixBatch],
        grad_scale: float,
        kernel: Kernel,
        begin: Callable[[MatrixBatch], None],
    ) -> None:
        """Carries out all batches. All ranks call it together.

        Args:
            begin: called with each batch before its states are touched.
        """
        received: dict[int, _Travelling] = {}
        returned: dict[int, _Travelling] = {}
        for number in range(len(batches) + 2):
            if number < len(batches):
                batch = batches[number]
                begin(batch)
                carry_out(batch.update, grad_scale, kernel)
                received[number] = _send(batch)
            if number - 1 in received:
                batch = batches[number - 1]
                matrices = received.pop(number - 1).wait()
                for own in batch.matrices:
                    _orthogonalize(own, matrices)
                returned[number - 1] = _return(batch, matrices)
            if number - 2 in returned:
                returned.pop(number - 2).wait()
                carry_out(batches[number - 2].add, 1.0, kernel)


def _identity(step: MatrixStep) -> tuple[int, tuple[int, ...]]:
    return id(step.parameter), step.num_rows


class _Divided(NamedTuple):
    """What a batch does, for any step."""

    steps: list[int]  # indices
    places: _Places
    held: list[HeldMatrices]
    division: Division
    num_sent: int


def _divided(steps: Sequence[MatrixStep]) -> list[_Divided]:
    # By ranks and device, in the order in which they come first, which is the same on all ranks.
    together: dict[tuple[object, ...], list[int]] = {}
    places = [_places_of(step.parameter) for step in steps]
    for index, (own, step) in enumerate(zip(places, steps, strict=True)):
        key = (own.group, local_tensor(step.parameter).device)
        together.setdefault(key, []).append(index)

    found = []
    for indices in together.values():
        held = {index: _held(steps[index], places[index]) for index in indices}
        num_places = len(held[indices[0]].rows_at)
        loads = [0] * num_places
        total = sum(each.numel for each in held.values())
        most = min(_MOST_NUMEL * num_places, -(-total // _USUAL_BATCHES))
        for batch in _batches(indices, [held[index].numel for index in indices], most):
            parameters = [held[index] for index in batch]
            division = divide(parameters, loads)
            place = places[batch[0]]
            num_sent = sum(map(division.numel, division.sent(place.own)))
            found.append(_Divided(batch, place, parameters, division, num_sent))
    return found


def _batches(indices: Sequence[int], numels: Sequence[int], most: int) -> Iterable[list[int]]:
    """Consecutive parameters, of about `most` elements together."""
    ends = itertools.accumulate(numels)
    numbers = [(end - 1) // max(most, 1) for end in ends]
    for _, run in itertools.groupby(zip(numbers, indices, strict=True), key=lambda each: each[0]):
        yield [index for _, index in run]


def _places_of(parameter: torch.Tensor) -> _Places:
    if not isinstance(parameter, DTensor):
        return _Places(None, 0, ((),))

    mesh, group = parameter.device_mesh, group_of(parameter)
    own = mesh.get_coordinate()
    assert own is not None, "an optimizer is made by ranks of the mesh"
    # A matrix is on one place of a kept axis, as an expert is.
    kept = (False,) * mesh.ndim if group is None else group.placements.is_kept
    axes = [
        axis
        for axis, placement in enumerate(parameter.placements)
        if placement.is_shard() and not kept[axis] and mesh.size(axis) > 1
    ]
    if not axes:
        return _Places(None, 0, (tuple(own),))

    process_group = group_over(mesh, axes)
    coordinates = {}
    cuts = itertools.product(*(range(mesh.size(axis)) for axis in axes))
    for rank, places in zip(ranks_over(mesh, axes), cuts, strict=True):
        coordinate = [*own]
        for axis, place in zip(axes, places, strict=True):
            coordinate[axis] = place
        coordinates[dist.get_group_rank(process_group, rank)] = tuple(coordinate)
    ordered = tuple(coordinates[place] for place in range(len(coordinates)))
    return _Places(process_group, dist.get_rank(process_group), ordered)


def _held(step: MatrixStep, places: _Places) -> HeldMatrices:
    parameter = step.parameter
    rows = (
        tuple(rows_at(parameter, coordinate) for coordinate in places.coordinates)
        if isinstance(parameter, DTensor)
        else (range(parameter.shape[0]),)
    )
    return HeldMatrices(step.num_rows, parameter.shape[1], rows)


def _batch(divided: _Divided, steps: Sequence[MatrixStep], buffer: torch.Tensor) -> MatrixBatch:
    division, own = divided.division, divided.places.own
    updates, additions, offset = [], [], 0
    for segment in division.sent(own):
        matrix = division.matrices[segment.matrix]
        step, rows = steps[matrix.parameter], divided.held[matrix.parameter].rows_at[own]
        first = matrix.first_row + segment.first_row - rows.start
        arrays = {
            name: LocalArray(array.tensor.narrow(0, first, segment.num_rows))
            for name, array in step.arrays.items()
        }
        travelling = buffer.narrow(0, offset, division.numel(segment))
        offset += travelling.numel()
        place = LocalArray(travelling.view(segment.num_rows, matrix.num_columns))
        inputs = {name: arrays.pop(name) for name in ("grad", "momentum_buffer")}
        updates.append(Update(step.scalars, {**inputs, "weight": place}))
        addition = step.scalars.addition(matrix.num_rows, matrix.num_columns)
        additions.append(Update(addition, {**arrays, "grad": place}))

    return MatrixBatch(
        [step.parameter for step in steps],
        divided.places.group,
        division.sent_numels(own, len(divided.places.coordinates)),
        division.received_numels(own, len(divided.places.coordinates)),
        buffer,
        plan(updates),
        plan(additions),
        _own_matrices(division, own, steps),
    )


def _own_matrices(division: Division, own: int, steps: Sequence[MatrixStep]) -> list[_OwnMatrix]:
    found: dict[int, _OwnMatrix] = {}
    offset = 0
    for segment in division.received(own):
        number = segment.matrix
        if number not in found:
            matrix = division.matrices[number]
            scalars = steps[matrix.parameter].scalars
            found[number] = _OwnMatrix(scalars, matrix.num_rows, matrix.num_columns, [])
        found[number].parts.append((segment, offset))
        offset += division.numel(segment)
    return list(found.values())


def _orthogonalize(own: _OwnMatrix, received: torch.Tensor) -> None:
    """Replaces a matrix by its orthogonalization, where it was received."""
    places = [
        received.narrow(0, offset, part.num_rows * own.num_columns).view(part.num_rows, -1)
        for part, offset in own.parts
    ]
    # With separate memory always, whose alignment may decide which kernel multiplies.
    matrix = received.new_empty(own.num_rows, own.num_columns)
    for (part, _), place in zip(own.parts, places, strict=True):
        matrix.narrow(0, part.first_row, part.num_rows).copy_(place)
    result = orthogonalize(matrix, own.step)
    for (part, _), place in zip(own.parts, places, strict=True):
        place.copy_(result.narrow(0, part.first_row, part.num_rows))


class _Travelling(NamedTuple):
    """Rows on their way. `sent` is only kept alive."""

    work: dist.Work | None
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        """What has been received, for later work of this thread."""
        if self.work is not None:
            numel = self.received.numel()
            with issuing(f"all-to-all of {numel} elements of matrices", self.received):
                self.work.wait()
        return self.received


def _send(batch: MatrixBatch) -> _Travelling:
    if batch.group is None:
        return _Travelling(None, batch.buffer, batch.buffer)
    received = batch.buffer.new_empty(sum(batch.received))
    return _exchange(batch.buffer, batch.sent, received, batch.received, batch.group)


def _return(batch: MatrixBatch, matrices: torch.Tensor) -> _Travelling:
    if batch.group is None:
        return _Travelling(None, matrices, matrices)
    return _exchange(matrices, batch.received, batch.buffer, batch.sent, batch.group)


def _exchange(
    sent: torch.Tensor,
    sent_numels: list[int],
    received: torch.Tensor,
    received_numels: list[int],
    group: dist.ProcessGroup,
) -> _Travelling:
    work = dist.all_to_all_single(
        received, sent, received_numels, sent_numels, group=group, async_op=True
    )
    return _Travelling(work, sent, received)
