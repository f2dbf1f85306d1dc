"""The memory that a rank's weights, gradients and optimizer states will take, before there are any.

    planned.at_rest       the result of `state_memory` in the run, to the byte, by state and side
    planned.host_needs    the host's part of it, which a run holds against the machine before it
                          makes a single weight
    planned.shards        the parameter groups, whose whole weights and gradients come on top while
                          they are in use
    planned.matrices      the buffers on the device with which a step of Muon updates its matrices

It is arithmetic on shapes: the model may be on meta, and no process group is needed. What decides
about buffers is asked where it is decided when they are made: which parameters share one
(parameter_grouping.py), where they are cut (layout.py, placement.py), which buffers are apart
(group_plan.py), and the host's arrays (host_layout.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.distributed.fsdp.placement import sharded_axes
from megatron.core.distributed.shard_plan import ShardPlan, plan_shards
from megatron.core.distributed.units import units_of
from megatron.core.dtypes import DTYPES
from megatron.core.host_memory import HostNeed
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.bucket import StatePlaces, padded_numel
from megatron.core.optimizer.cpu_offloading.groups import OffloadGroup
from megatron.core.optimizer.cpu_offloading.host_layout import BucketShape, HostLayout, HostRules
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.cpu_offloading.streamed_pass import NUM_SLOTS, SlotSize
from megatron.core.optimizer.cpu_offloading.update_split import interleaved
from megatron.core.optimizer.distrib_optimizer import offload_groups
from megatron.core.optimizer.matrix_owners import (
    Batch,
    HeldMatrices,
    batches_of,
    buffer_nbytes,
)
from megatron.core.optimizer.rules import rule_of
from megatron.core.optimizer.state_memory import (
    COMPUTE,
    GRADIENTS,
    MAIN,
    SHOWN,
    SLOTS,
    StateBytes,
    in_order,
)
from megatron.core.optimizer.torch_optimizer import parameter_groups

_T = TypeVar("_T")


@dataclass(frozen=True)
class StateSettings:
    """What decides about a run's memory besides its model.

    Attributes:
        compute_dtype: of weights and activations in forward and backward.
        world_size: ranks of the run.
        is_accelerator: whether the device is one, and host memory is pinned for it.
    """

    optimizer: OptimizerConfig
    parallel: DataParallelConfig
    compute_dtype: torch.dtype
    world_size: int
    is_accelerator: bool = False


class MatrixBytes(NamedTuple):
    """The bytes of the buffers with which Muon updates its matrices.

    Attributes:
        in_step: between a backward and the next forward.
        in_forward: of updates that continue under the next forward.
    """

    in_step: int = 0
    in_forward: int = 0


@dataclass(frozen=True)
class PlannedMemory:
    """Planned bytes of one rank.

    Attributes:
        at_rest: by state, in the order of `state_memory`'s table. The states of other optimizers
            than our own, which allocate them in their first step, are in it.
        host_needs: by purpose, the states of a rule together.
        shards: of Megatron-FSDP; without units for other engines.
        matrices: buffers of Muon on the device; at most, since ranks differ.
        rounded_nbytes: new weights on the device, which it has updated, until their next gather
            makes codes of them; at most, where a run chooses what the device updates.
    """

    at_rest: dict[str, StateBytes]
    host_needs: list[HostNeed]
    shards: ShardPlan
    matrices: MatrixBytes
    rounded_nbytes: int

    @property
    def device_nbytes(self) -> int:
        """Of everything at rest on the device."""
        return sum(row.device for row in self.at_rest.values())

    @property
    def host_nbytes(self) -> int:
        """Of everything in host memory."""
        return sum(row.host for row in self.at_rest.values())


def plan_memory(
    model: nn.Module, settings: StateSettings, plan: OffloadPlan | None, rank: int = 0
) -> PlannedMemory:
    """Plans the memory of a rank between two steps.

    Args:
        model: on meta or real, not sharded, with frozen what will be frozen.
        plan: what `plan_offload` has answered for this model.
        rank: ranks differ in the rows that uneven cuts leave them, which are few.
    """
    planner = _Planner(model, settings)
    shards = ShardPlan(())
    if settings.parallel.use_megatron_fsdp:
        shards = plan_shards(
            model,
            settings.world_size,
            settings.parallel,
            compute_dtype=settings.compute_dtype,
            main_params_dtype=DTYPES[settings.optimizer.main_params_dtype],
            offloaded=plan.names_on_host if plan else (),
            is_accelerator=settings.is_accelerator,
        )
        planner.add_groups(model, shards, plan, rank)
    else:
        planner.add_tensors(model, plan, rank)
    return PlannedMemory(
        planner.table(), planner.host_needs(), shards, planner.matrices(), planner.rounded_nbytes
    )


class _Share(NamedTuple):
    """This rank's part of a tensor outside of parameter groups, in elements."""

    numel: int
    stored: int  # of its storage, which FSDP2 pads to the longest part


class _Planner:
    """Adds up memory by name and side; lives for one `plan_memory`.

    Attributes:
        rounded_nbytes: see `PlannedMemory`.
    """

    def __init__(self, model: nn.Module, settings: StateSettings) -> None:
        self._settings = settings
        self._config = settings.optimizer
        rule = rule_of(self._config)
        self._state_dtypes = rule.all_state_dtypes
        self._has_parts = len(rule.parts) > 1
        groups = parameter_groups(model, self._config)
        # Of each parameter, by id.
        self._rules = {
            id(parameter): rule.part_for({**rule.defaults, **group})
            for group in groups
            for parameter in group["params"]
        }
        self._matrix_rows = {
            id(parameter): rows
            for group in groups
            if "matrix_rows" in group
            for parameter, rows in zip(group["params"], group["matrix_rows"], strict=True)
        }
        # By parameter, with the ranks that share its rows.
        self._held: dict[int, tuple[HeldMatrices, Hashable]] = {}
        self._held_on_host: list[int] = []  # in the order of their buckets
        self._cuts: dict[Hashable, list[tuple[range, ...]]] = {}  # of equal groups
        self._device: dict[str, int] = {}
        self._host: dict[str, int] = {}
        self._pinned: set[str] = set()
        self.rounded_nbytes = 0

    def table(self) -> dict[str, StateBytes]:
        """As `state_memory` orders it."""
        shown = {SHOWN.get(name, name): nbytes for name, nbytes in self._host.items()}
        return in_order(self._device, shown)

    def host_needs(self) -> list[HostNeed]:
        """The host's part, the states of a rule as one need."""
        needs: dict[str, HostNeed] = {}
        for name, size in self._host.items():
            what = "optimizer states" if name in self._state_dtypes else name
            before = needs[what].nbytes if what in needs else 0
            needs[what] = HostNeed(what, before + size, name in self._pinned)
        return [need for need in needs.values() if need.nbytes]

    def matrices(self) -> MatrixBytes:
        """The buffers of Muon, which each side has for its matrices."""
        on_host = self._batches(self._held_on_host)
        others = self._held.keys() - {*self._held_on_host}
        on_device = self._batches(own for own in self._matrix_rows if own in others)
        late = buffer_nbytes(on_host)
        # A step waits for exchanges.
        waits = any(batch.division.num_places > 1 for batch in on_host)
        overlaps = self._config.overlap.in_forward and not waits
        return MatrixBytes(buffer_nbytes(on_device) + late, late if overlaps else 0)

    def _batches(self, parameters: Iterable[int]) -> list[Batch]:
        held = [self._held[own] for own in parameters]
        return batches_of([matrices for matrices, _ in held], [ranks for _, ranks in held])

    # Parameter groups

    def add_groups(
        self, model: nn.Module, shards: ShardPlan, plan: OffloadPlan | None, rank: int
    ) -> None:
        """Takes in the groups of Megatron-FSDP."""
        for group in shards.groups:
            self._add(COMPUTE, group.compute_nbytes)
            self._add(GRADIENTS, group.grad_nbytes)
            if not group.is_on_host:
                self._add(MAIN, group.main_nbytes)

        by_parameter: dict[int, GroupPlan] = {}
        members: dict[int, list[int]] = {}  # by id of the group
        places: dict[int, StatePlaces] = {}
        for unit, planned in zip(units_of(model), shards.units, strict=True):
            for group in planned.groups:
                own = [id(unit.module.get_parameter(each.fqns[0])) for each in group.parameters]
                by_parameter.update(dict.fromkeys(own, group))
                if not group.requires_grad:
                    continue
                members[id(group)] = own
                self._hold(group, own, rank)
                if not group.is_on_host:
                    self._add_group_states(group, own, rank)
                elif self._has_parts:
                    rules = [self._rules[parameter] for parameter in own]
                    places[id(group)] = StatePlaces.of(_local_numels(group, rank), rules)

        # In the order of the offloaded optimizer's buckets, which decides where gaps are.
        buckets = [
            fsdp_group
            for group in self._offloaded(model, plan, by_module=True)
            for fsdp_group in _each_once(by_parameter[id(p)] for p in group.parameters)
        ]
        self._held_on_host = [
            own for group in buckets for own in members[id(group)] if own in self._held
        ]
        if buckets and self._config.update_on_device != 0:
            size = SlotSize.of(
                [(group.optimizer_numel, group.main_dtype) for group in buckets],
                self._state_dtypes.values(),
            )
            self._add(SLOTS, NUM_SLOTS * size.nbytes)
            numels = [sum(math.prod(own.shape) for own in group.parameters) for group in buckets]
            fraction = self._config.update_on_device
            streamed = interleaved(numels, 1.0 if fraction is None else fraction)
            self.rounded_nbytes = sum(
                group.optimizer_numel * group.dtype.itemsize
                for group in itertools.compress(buckets, streamed)
                if group.quantizers
            )
        self._add_buckets(
            [
                BucketShape(
                    group.optimizer_numel,
                    group.main_dtype,
                    group.grad_dtype,
                    group.weight_dtype,
                    has_main=True,
                    weight_numel=group.weight_numel(group.optimizer_numel),
                    is_watched=any(sharded_axes(group.placements.optimizer)),
                    state_numels=places[id(group)].numels if self._has_parts else None,
                )
                for group in buckets
            ]
        )

    def _hold(self, group: GroupPlan, parameters: Sequence[int], rank: int) -> None:
        """Takes in the matrices of a group.

        Args:
            parameters: the ids of its parameters, in order.
        """
        if not any(own in self._matrix_rows for own in parameters):
            return
        coordinate = _coordinate(group, rank)
        key = (group.layout, group.mesh_shape, group.placements, coordinate)
        if key not in self._cuts:
            self._cuts[key] = group.rows_by_place(coordinate)
        axes = group.divided_axes
        ranks = (group.mesh_shape, *axes) if axes else ()
        for parameter, planned, rows in zip(
            parameters, group.parameters, self._cuts[key], strict=True
        ):
            if parameter in self._matrix_rows:
                held = HeldMatrices(self._matrix_rows[parameter], planned.shape[1], rows)
                self._held[parameter] = (held, ranks)

    def _add_group_states(self, group: GroupPlan, parameters: Sequence[int], rank: int) -> None:
        """States of a group that is stepped on the device.

        Args:
            parameters: the ids of its parameters, in order.
        """
        numels = _local_numels(group, rank)
        for name, dtype in self._all_dtypes(parameters).items():
            having = [name in self._rules[own].state_dtypes for own in parameters]
            numel = sum(itertools.compress(numels, having))
            # States of a rule that all parameters have are padded like the group's own buffers.
            if self._config.has_rule and all(having):
                numel = group.optimizer_numel
            self._add_state(name, numel, dtype, group.main_dtype)

    # Other tensors

    def add_tensors(self, model: nn.Module, plan: OffloadPlan | None, rank: int) -> None:
        """Takes in the parameters of PyTorch FSDP2, or of a model that is not sharded."""
        offloaded = self._offloaded(model, plan, by_module=False)
        for parameter in model.parameters():
            if id(parameter) in self._matrix_rows:
                rows = self._rows_by_rank(parameter)
                matrices = self._matrix_rows[id(parameter)]
                held = HeldMatrices(matrices, parameter.shape[1], rows)
                self._held[id(parameter)] = (held, len(rows))
        on_host = {id(p): None for group in offloaded for p in group.parameters}
        self._held_on_host = [own for own in on_host if own in self._held]
        is_sharded = self._settings.parallel.use_torch_fsdp2
        for parameter in _each_once(model.parameters()):
            share, itemsize = self._share(parameter, rank), parameter.dtype.itemsize
            is_main = is_sharded and id(parameter) not in on_host
            self._add(MAIN if is_main else COMPUTE, share.stored * itemsize)
            if not parameter.requires_grad:
                continue

            self._add(GRADIENTS, share.numel * itemsize)
            if id(parameter) in on_host:
                continue
            for name, dtype in self._rules[id(parameter)].state_dtypes.items():
                self._add_state(name, share.numel, dtype, parameter.dtype)
            # With an offloaded optimizer, 16-bit parameters have separate fp32 main weights.
            is_narrow = itemsize < torch.float32.itemsize
            if self._config.has_rule and plan is not None and is_narrow:
                self._add(MAIN, share.numel * torch.float32.itemsize)

        # Every array is whole cache lines, so it does not matter which tensors share a bucket.
        numels: dict[torch.dtype, int] = {}
        states: dict[torch.dtype, dict[str, int]] = {}
        for parameter in (p for group in offloaded for p in group.parameters):
            numel, dtype = padded_numel(self._share(parameter, rank).numel), parameter.dtype
            numels[dtype] = numels.get(dtype, 0) + numel
            own = states.setdefault(dtype, {})
            for name in self._rules[id(parameter)].state_dtypes:
                own[name] = own.get(name, 0) + numel
        self._add_buckets(
            [
                BucketShape(
                    numel,
                    torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype,
                    dtype,
                    dtype,
                    has_main=False,
                    state_numels=states[dtype],
                )
                for dtype, numel in numels.items()
            ]
        )

    def _share(self, parameter: nn.Parameter, rank: int) -> _Share:
        if not self._settings.parallel.use_torch_fsdp2:
            return _Share(parameter.numel(), parameter.numel())
        rows, row = self._rows_by_rank(parameter), math.prod(parameter.shape[1:])
        return _Share(len(rows[rank]) * row, len(rows[0]) * row)

    def _rows_by_rank(self, parameter: nn.Parameter) -> tuple[range, ...]:
        """The rows of each rank, in FSDP2; otherwise of this one."""
        rows, is_sharded = range(parameter.shape[0]), self._settings.parallel.use_torch_fsdp2
        num_ranks = self._settings.world_size if is_sharded else 1
        most = -(-len(rows) // num_ranks)
        return tuple(rows[rank * most : (rank + 1) * most] for rank in range(num_ranks))

    # Common

    def _add(self, name: str, nbytes: int) -> None:
        self._device[name] = self._device.get(name, 0) + nbytes

    def _add_buckets(self, buckets: Sequence[BucketShape]) -> None:
        config = self._config
        layout = HostLayout(
            buckets,
            HostRules(
                self._state_dtypes,
                config.pin_cpu_grads,
                config.pin_cpu_params,
                config.pins_states,
                self._settings.is_accelerator,
                config.early_update_bytes,
            ),
        )
        self._host.update(layout.nbytes_by_state)
        self._pinned = {need.what for need in layout.needs if need.is_pinned}
        # Main weights that start in host memory are not among the needs.
        if layout.pins[MAIN] and self._settings.is_accelerator:
            self._pinned.add(MAIN)

    def _all_dtypes(self, parameters: Iterable[int]) -> dict[str, torch.dtype]:
        """The dtypes of all states that some of these parameters have."""
        found: dict[str, torch.dtype] = {}
        for own in parameters:
            found |= self._rules[own].state_dtypes
        return found

    def _add_state(
        self, name: str, numel: int, dtype: torch.dtype, parameter_dtype: torch.dtype
    ) -> None:
        """Adds a state of parameters of a dtype that are stepped on the device."""
        if not self._config.has_rule:
            # TransformerEngine's and Apex's are fp32, torch's like their parameter.
            dtype = parameter_dtype if self._config.gpu_optimizer == "torch" else torch.float32
        self._add(name, numel * dtype.itemsize)

    def _offloaded(
        self, model: nn.Module, plan: OffloadPlan | None, *, by_module: bool
    ) -> list[OffloadGroup]:
        """The groups planned on the host, in the order in which the optimizer finds them."""
        if plan is None:
            return []
        groups = offload_groups(model, self._config, by_module=by_module)
        return [group for index, group in enumerate(groups) if plan.is_on_host(index)]


def _local_numels(group: GroupPlan, rank: int) -> list[int]:
    """A rank's elements of each of a group's parameters."""
    coordinate = _coordinate(group, rank)
    return [group.local_numel(tensor, coordinate) for tensor in range(len(group.parameters))]


def _coordinate(group: GroupPlan, rank: int) -> tuple[int, ...]:
    """A rank's place on each axis of a group's mesh."""
    coordinate: list[int] = []
    for size in reversed(group.mesh_shape):
        rank, place = divmod(rank, size)
        coordinate.insert(0, place)
    return tuple(coordinate)


def _each_once(items: Iterable[_T]) -> list[_T]:
    """Without repetitions, by identity."""
    return list({id(item): item for item in items}.values())
