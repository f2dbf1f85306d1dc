"""The steps of matrices, whose rows may be on several ranks: `Muon` for tensors and DTensors.

A step has three phases for each batch of parameters:

    1  elementwise      update the momentum, write its mix with the gradient, in bf16
       all-to-all       rows -> whole matrices on their owners, see matrix_owners.py
    2  by matrix        orthogonalize
       all-to-all       the way back, in the same memory
    3  elementwise      decay the weight, add the result

The collectives of a batch are asynchronous, and batches overlap: while the rows of one travel, the
matrices of the previous one are orthogonalized.

    batch 0    1  ->  2  ->  3
    batch 1           1  ->  2  ->  3
    batch 2                  1  ->  2  ->  3

With states in host memory, the host runs phases 1 and 3. Rows are copied to the device and back in
the memory of the new compute weights, without additional buffers. The host works on one batch while
the device orthogonalizes another.

A matrix is always copied to new memory before it is orthogonalized, so the result is bit-equal for
any number of ranks. A rank sends each of its rows up to two times in bf16: to the owner, and back.
For P elements on N ranks, it sends and receives about 4 P / N bytes if the costs of matrices can be
balanced.

All ranks have the same batches in the same order, even if readers delay the states of one rank: see
[Note: order of exchanges] in distributed/experts.py. Before the step, `CollectiveHistory` detects
gradients that only some ranks have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.uneven_rows import rows_at
from megatron.core.issued_collectives import issuing
from megatron.core.lanes import Event, Lane, ThreadEvent
from megatron.core.mesh import group_over, ranks_over
from megatron.core.optimizer.kernels.newton_schulz import MuonStep, orthogonalize
from megatron.core.optimizer.kernels.piece import Kernel
from megatron.core.optimizer.matrix_owners import (
    NUM_SLOTS,
    Batch,
    Division,
    HeldMatrices,
    Segment,
    batches_of,
)
from megatron.core.optimizer.rule_states import LocalArray, PlannedUpdates, Update, carry_out, plan


class _AtOnce:
    """A lane that runs work immediately, in the calling thread and on its current stream."""

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        del after  # done, or already issued to this stream
        work()
        return ThreadEvent.done()

    def close(self) -> None:
        """Does nothing: no work is queued."""


class DeviceLanes(NamedTuple):
    """The lanes that run the device's part of a step.

    Attributes:
        matrices: sends rows and orthogonalizes matrices.
        down: copies rows to host memory.
    """

    matrices: Lane = _AtOnce()
    down: Lane = _AtOnce()


class MatrixStep(NamedTuple):
    """The step of a parameter [rows, columns].

    Attributes:
        num_rows: rows of each of the matrices that are stacked in the parameter.
        arrays: the arrays of the step, as in `RuleStates.arrays`; on the device or host.
        passage: [rows, columns] bf16 or fp32, if the arrays are in host memory: a buffer for the
            rows to the device and for the results. It may share memory with `grad` and `out` if the
            elements have the same size.
    """

    parameter: torch.Tensor
    num_rows: tuple[int, ...]
    scalars: MuonStep
    arrays: Mapping[str, LocalArray]
    passage: torch.Tensor | None = None


class _Route(NamedTuple):
    """The exchanges of the rows of some parameters, the same in every step.

    Attributes:
        steps: the parameters' indices.
        group: the ranks that exchange rows, where a place is a rank; None: this rank alone.
        rows: this rank's rows of each parameter.
        sent, received: this rank's segments, in the order of the messages.
        sent_numels, received_numels: the sizes of the messages to and from each place.
    """

    steps: list[int]
    group: dist.ProcessGroup | None
    rows: list[range]
    division: Division
    sent: list[Segment]
    received: list[Segment]
    sent_numels: list[int]
    received_numels: list[int]


class MatrixBatch(NamedTuple):
    """Parameters whose rows are exchanged together.

    Attributes:
        scalars: the constants of each parameter's step.
        buffer: [sum of `route.sent_numels`] bf16: rows to send, then the received results.
        passages: rows of offloaded parameters in host memory, each with its place in `buffer`.
        update, add: the elementwise phases.
    """

    parameters: list[torch.Tensor]
    scalars: list[MuonStep]
    route: _Route
    buffer: torch.Tensor
    passages: list[tuple[torch.Tensor, torch.Tensor]]
    update: PlannedUpdates
    add: PlannedUpdates

    @property
    def traffic(self) -> int:
        """Bytes that the elementwise phases read and write."""
        return sum(piece.traffic for piece in (*self.update.pieces, *self.add.pieces))


def check_matrices(parameter: torch.Tensor, num_rows: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the number of rows of each matrix in a parameter.

    Args:
        num_rows: rows of each matrix; None: the parameter is one matrix.

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


def matrix_rows_of(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Returns the rows of the matrices in each parameter of a group.

    Raises ValueError if `matrix_rows` and the parameters differ in number, and as `check_matrices`.
    """
    parameters = group["params"]
    given = group.get("matrix_rows") or [None] * len(parameters)
    if len(given) != len(parameters):
        raise ValueError(f"Expected matrix_rows of {len(parameters)} parameters, got {len(given)}.")
    return [*map(check_matrices, parameters, given)]


class MatrixPass:
    """Plans and runs steps of matrices. Caches their routes for the next step."""

    def __init__(self) -> None:
        self._steps: list[MatrixStep] = []
        self._routes: list[_Route] = []

    def plan(self, steps: Sequence[MatrixStep]) -> list[MatrixBatch]:
        """Returns the batches of a step, in the same order on all ranks. Does not access arrays.

        Raises:
            ValueError: for a matrix of which other ranks on a kept axis hold some rows.
            NotImplementedError: for DTensors that are not cut between rows.
        """
        if [*map(_identity, steps)] != [*map(_identity, self._steps)]:
            self._routes = _routes(steps)
            # The cache must not keep gradients alive.
            self._steps = [step._replace(arrays={}, passage=None) for step in steps]

        # Batches that are not in flight at the same time share memory.
        sizes = [sum(route.sent_numels) for route in self._routes]
        memory: dict[tuple[int, torch.device], torch.Tensor] = {}
        found = []
        for number, (route, numel) in enumerate(zip(self._routes, sizes, strict=True)):
            own = [steps[index] for index in route.steps]
            slot, device = number % NUM_SLOTS, own[0].parameter.device
            if (slot, device) not in memory:
                most = max(sizes[slot::NUM_SLOTS])
                memory[slot, device] = torch.empty(most, dtype=torch.bfloat16, device=device)
            found.append(_batch(route, own, memory[slot, device][:numel]))
        return found

    @staticmethod
    def stages(
        batches: Sequence[MatrixBatch],
        grad_scale: float,
        kernel: Kernel,
        lanes: DeviceLanes = DeviceLanes(),  # noqa: B008 (immutable)
    ) -> list[Callable[[], None]]:
        """Returns the work on all batches, as functions that all ranks call in order. Stage `n`
        starts batch `n`, which is done after stage `n + 2`.
        """
        arriving: dict[int, Callable[[], torch.Tensor]] = {}
        returning: dict[int, Callable[[], torch.Tensor]] = {}
        orthogonalized: dict[int, Event] = {}

        def send(number: int) -> None:
            for rows, place in batches[number].passages:
                place.copy_(rows, non_blocking=True)
            arriving[number] = _send(batches[number])

        def orthogonalize_all(number: int) -> None:
            matrices = arriving.pop(number)()
            _orthogonalize(batches[number], matrices)
            returning[number] = _return(batches[number], matrices)

        def bring_down(number: int) -> None:
            returning[number]()
            for rows, place in batches[number].passages:
                rows.copy_(place, non_blocking=True)

        def stage(number: int) -> None:
            if number < len(batches):
                carry_out(batches[number].update, grad_scale, kernel)
                lanes.matrices.enqueue(partial(send, number))
            if 1 <= number <= len(batches):
                work = partial(orthogonalize_all, number - 1)
                orthogonalized[number - 1] = lanes.matrices.enqueue(work)
            if number >= 2:
                after = [orthogonalized.pop(number - 2)]
                down = lanes.down.enqueue(partial(bring_down, number - 2), after)
                down.synchronize()
                # Not earlier: another lane could reuse the memory of the send buffer.
                del returning[number - 2]
                carry_out(batches[number - 2].add, 1.0, kernel)

        return [partial(stage, number) for number in range(len(batches) + 2 if batches else 0)]


def _identity(step: MatrixStep) -> tuple[int, tuple[int, ...]]:
    return id(step.parameter), step.num_rows


def _routes(steps: Sequence[MatrixStep]) -> list[_Route]:
    held, kinds = [], []
    for step in steps:
        group, rows = _rows_by_place(step.parameter)
        held.append(HeldMatrices(step.num_rows, step.parameter.shape[1], rows))
        kinds.append((group, step.parameter.device))
    # In the order of the steps, which is the same on all ranks.
    return [_route(batch, held, kinds[batch.parameters[0]][0]) for batch in batches_of(held, kinds)]


def _route(batch: Batch, held: Sequence[HeldMatrices], group: dist.ProcessGroup | None) -> _Route:
    parameters, division = batch
    own = 0 if group is None else dist.get_rank(group)
    sent, received = division.sent(own), division.received(own)
    sent_numels, received_numels = [0] * division.num_places, [0] * division.num_places
    for segment in sent:
        sent_numels[division.owners[segment.matrix]] += division.numel(segment)
    for segment in received:
        received_numels[segment.place] += division.numel(segment)
    rows = [held[index].rows_at[own] for index in parameters]
    return _Route(parameters, group, rows, division, sent, received, sent_numels, received_numels)


def _rows_by_place(
    parameter: torch.Tensor,
) -> tuple[dist.ProcessGroup | None, tuple[range, ...]]:
    """Returns the group of ranks that share the rows of a parameter, and each rank's rows."""
    if not isinstance(parameter, DTensor):
        return None, (range(parameter.shape[0]),)

    mesh, fsdp_group = parameter.device_mesh, group_of(parameter)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "only ranks of the mesh create an optimizer"
    # A matrix has one coordinate on a kept axis, like an expert.
    kept = (False,) * mesh.ndim if fsdp_group is None else fsdp_group.placements.is_kept
    axes = [
        axis
        for axis, placement in enumerate(parameter.placements)
        if placement.is_shard() and not kept[axis] and mesh.size(axis) > 1
    ]
    if not axes:
        return None, (rows_at(parameter, coordinate),)

    group = group_over(mesh, axes)
    found = {}
    cuts = itertools.product(*(range(mesh.size(axis)) for axis in axes))
    for rank, places in zip(ranks_over(mesh, axes), cuts, strict=True):
        own = dict(zip(axes, places, strict=True))
        at = [own.get(axis, place) for axis, place in enumerate(coordinate)]
        found[dist.get_group_rank(group, rank)] = rows_at(parameter, at)
    return group, tuple(found[place] for place in range(len(found)))


def _batch(route: _Route, steps: Sequence[MatrixStep], buffer: torch.Tensor) -> MatrixBatch:
    updates, additions, passages = [], [], []
    for segment, place in zip(route.sent, _rows_in(buffer, route, route.sent), strict=True):
        matrix = route.division.matrices[segment.matrix]
        step, rows = steps[matrix.parameter], route.rows[matrix.parameter]
        first = matrix.first_row + segment.first_row - rows.start
        arrays = {
            name: LocalArray(array.tensor.narrow(0, first, segment.num_rows))
            for name, array in step.arrays.items()
        }
        travelling = place
        if step.passage is not None:
            travelling = step.passage.narrow(0, first, segment.num_rows)
            passages.append((travelling, place))
        inputs = {name: arrays.pop(name) for name in ("grad", "momentum_buffer")}
        updates.append(Update(step.scalars, {**inputs, "weight": LocalArray(travelling)}))
        addition = step.scalars.addition(matrix.num_rows, matrix.num_columns)
        additions.append(Update(addition, {**arrays, "grad": LocalArray(travelling)}))
    parameters, scalars = [step.parameter for step in steps], [step.scalars for step in steps]
    return MatrixBatch(parameters, scalars, route, buffer, passages, plan(updates), plan(additions))


def _rows_in(
    buffer: torch.Tensor, route: _Route, segments: Sequence[Segment]
) -> Iterator[torch.Tensor]:
    """Yields the views of segments in a buffer, as [rows, columns]."""
    numels = [route.division.numel(segment) for segment in segments]
    for segment, part in zip(segments, buffer.split(numels), strict=True):
        yield part.view(segment.num_rows, -1)


def _orthogonalize(batch: MatrixBatch, received: torch.Tensor) -> None:
    """Orthogonalizes all received matrices, in place."""
    route = batch.route
    parts: dict[int, list[tuple[Segment, torch.Tensor]]] = {}
    places = _rows_in(received, route, route.received)
    for segment, place in zip(route.received, places, strict=True):
        parts.setdefault(segment.matrix, []).append((segment, place))

    for number, own in parts.items():
        parameter, _, *shape = route.division.matrices[number]
        # Always copy: the alignment of the memory may decide which kernel multiplies.
        matrix = received.new_empty(shape)
        for segment, place in own:
            matrix.narrow(0, segment.first_row, segment.num_rows).copy_(place)
        result = orthogonalize(matrix, batch.scalars[parameter])
        for segment, place in own:
            place.copy_(result.narrow(0, segment.first_row, segment.num_rows))


def _send(batch: MatrixBatch) -> Callable[[], torch.Tensor]:
    route = batch.route
    if route.group is None:
        return lambda: batch.buffer
    received = batch.buffer.new_empty(sum(route.received_numels))
    sizes = (route.sent_numels, route.received_numels)
    return _exchange(batch.buffer, received, *sizes, route.group)


def _return(batch: MatrixBatch, matrices: torch.Tensor) -> Callable[[], torch.Tensor]:
    route = batch.route
    if route.group is None:
        return lambda: matrices
    sizes = (route.received_numels, route.sent_numels)
    return _exchange(matrices, batch.buffer, *sizes, route.group)


def _exchange(
    sent: torch.Tensor,
    received: torch.Tensor,
    sent_numels: list[int],
    received_numels: list[int],
    group: dist.ProcessGroup,
) -> Callable[[], torch.Tensor]:
    """Starts an exchange. Returns a function that waits for it and returns `received`."""

    def what() -> str:
        return f"all-to-all of {sent.numel()} elements of matrices"

    with issuing(what(), received):
        work = dist.all_to_all_single(
            received, sent, received_numels, sent_numels, group=group, async_op=True
        )

    def wait() -> torch.Tensor:
        # The closure of `what` keeps `sent` alive.
        with issuing(what(), received):
            work.wait()
        return received

    return wait
