"""From a model, its optimizer and a trainer's tensors to the entries of a checkpoint.

Entries have the names of the model's parameters. The shards of a parameter follow from the layout
of its FSDP group, or from its DTensor; any other is whole on every rank. A fused weight's module
names its sections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.index import SavedAs
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import (
    EvenShards,
    FlatShards,
    Holdings,
    RankMesh,
    replicated,
    section_holdings,
)
from megatron.core.dist_checkpointing.state.entries import (
    Contents,
    Entry,
    EntryGroup,
    ScaledValues,
    Values,
)
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS, as_plain
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.placement import sharded_axes
from megatron.core.distributed.torch_fsdp2 import reshard
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.planning_optimizer import state_units
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.optimizer.step_inputs import IDENTITIES
from megatron.core.optimizer.torch_optimizer import init_states
from megatron.core.transformer.fused_weight import FusedWeight, fused_weights


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    with_states: bool = True,
    private: Mapping[str, torch.Tensor] | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Contents:
    """Collects the content of a checkpoint without copies. Allocates missing states.

    Args:
        model: sharded or plain.
        optimizer: over its parameters.
        with_states: whether to collect the optimizer's states; else it only determines when weights
            may be read.
        private: tensors on the CPU that are each rank's own, `rng.<name>` for the key
            `rng.<rank>.<name>`; all ranks have the same names, dtypes and shapes. Only rank 0 makes
            entries for other ranks'.
        rank, world_size: among all ranks that save or load together.

    Raises:
        ValueError: for parameters that several modules share under one canonical name.
        CheckpointError: for states that the format does not support, and for modules with an extra
            state.
    """
    _expect_no_extra_state(model)
    # After a forward without a backward, a module may show gathered compute weights.
    reshard(model)
    collector = _Collector(model, rank, world_size)
    groups: list[EntryGroup] = []
    plain = {}
    if optimizer is not None:
        if with_states:
            init_states(optimizer)
            plain[PARAM_GROUPS] = [
                collector.plain_group(group, number)
                for number, group in enumerate(optimizer.param_groups)
            ]
        # First, because the next update of a unit waits until it has been read.
        groups += [
            EntryGroup(unit, collector.unit(unit, with_states)) for unit in state_units(optimizer)
        ]
    groups += [
        EntryGroup(None, collector.frozen_weights(optimizer)),
        EntryGroup(None, collector.buffers()),
        EntryGroup(None, collector.private(private or {})),
    ]

    contents = Contents(groups, plain, collector.names)
    keys = [entry.key for entry in contents.entries]
    if len(set(keys)) < len(keys):
        doubled = sorted(key for key, count in Counter(keys).items() if count > 1)
        raise ValueError(
            f"Expected one tensor for each name in a checkpoint, got several for {doubled}."
        )
    return contents


def _expect_no_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                "Expected modules without `get_extra_state`, got "
                f"{type(module).__name__} at {name!r}; --ckpt-format torch_dcp takes others."
            )


class _Collector:
    """Makes the entries of one model."""

    def __init__(self, model: nn.Module, rank: int, world_size: int) -> None:
        self._model = model
        self._rank = rank
        self._ranks = range(world_size)
        self._ranks_of = cache(RankMesh.of)
        fused = fused_weights(model)
        self._shards: dict[int, FlatShards] = {}  # by id of the group
        # Most layers have equal layouts, and share the computed shards.
        self._alike: dict[FlatShards, FlatShards] = {}
        self._own_boxes: dict[torch.Tensor, _OwnBoxes] = {}
        self._fqns: dict[torch.Tensor, str] = {}
        self._named_rows: dict[torch.Tensor, list[_NamedRows]] = {}
        self.names: dict[torch.Tensor, list[str]] = {}

        for fqn, parameter in model.named_parameters():
            self._named_rows[parameter] = _named_rows(fqn, parameter, fused.get(fqn))
            self._own_boxes[parameter] = self._boxes_of(parameter)
            self._fqns[parameter] = fqn
            self.names[parameter] = [section.name for section in self._named_rows[parameter]]

    def frozen_weights(self, optimizer: torch.optim.Optimizer | None) -> list[Entry]:
        """Weights that the optimizer does not update; without an optimizer, all."""
        groups = [] if optimizer is None else optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        return [entry for p in self._fqns if id(p) not in updated for entry in self._weight(p)]

    def buffers(self) -> list[Entry]:
        """Buffers that belong to a state dict."""
        found: list[Entry] = []
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                is_kept = name.rpartition(".")[2] not in module._non_persistent_buffers_set
                # A buffer that modules share is saved once, as parameters are.
                if is_kept and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found.append(self._whole(f"model.{name}", buffer, self._ranks, is_copied=True))
        return found

    def unit(self, unit: StateUnit, with_states: bool) -> list[Entry]:
        """The weights of a unit and its states, parameter by parameter."""
        found: list[Entry] = []
        for parameter, states in zip(unit.parameters, unit.states, strict=True):
            if parameter not in self._fqns:
                raise ValueError(
                    "Expected an optimizer over the model's parameters, got another of shape "
                    f"{tuple(parameter.shape)}."
                )
            # Sorted: all ranks use one order, whichever state each of them has made first.
            found += self._weight(parameter)
            for name in sorted(states) if with_states else ():
                found += self._state(unit, parameter, name, states[name])
        return found

    def private(self, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
        """The private tensors of this rank; on rank 0 of each, without values of the others."""
        # Rank 0 describes the files of all ranks.
        ranks = self._ranks if self._rank == 0 else (self._rank,)
        names = {name: name.partition(".") for name in sorted(tensors)}
        return [
            self._whole(
                f"{kind}.{rank}.{rest}", tensors[name], (rank,), is_copied=rank == self._rank
            )
            for name, (kind, _, rest) in names.items()
            for rank in ranks
        ]

    def plain_group(self, group: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A parameter group as plain data, with names instead of parameters."""
        options = {
            name: as_plain(value, f"{name} of parameter group {number}")
            for name, value in group.items()
            if name not in IDENTITIES
        }
        return {
            "params": [name for parameter in group["params"] for name in self.names[parameter]],
            **options,
        }

    def _weight(self, parameter: torch.Tensor) -> list[Entry]:
        return self._like(parameter, Values(local_tensor(parameter).detach()), "model.", "")

    def _state(
        self, unit: StateUnit, parameter: torch.Tensor, name: str, value: Any
    ) -> list[Entry]:
        fqn = self._fqns[parameter]
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"Expected optimizer states that are tensors, got {type(value).__name__} for "
                f"{name} of {fqn}; --ckpt-format torch_dcp takes others."
            )

        values = Values(local_tensor(value).detach())
        if unit.scaled_by is not None and scaled_states.is_scaled(value.dtype):
            values = ScaledValues(unit.scaled_by, parameter, name)
        if value.shape == parameter.shape and value.dim():
            return self._like(parameter, values, "optimizer.state.", f".{name}")

        if isinstance(parameter, DTensor) and value.numel() > 1:
            own, got = tuple(parameter.shape), tuple(value.shape)
            raise CheckpointError(
                "Expected optimizer states of one element or of their parameter's shape "
                f"{own}, got {got} for {name} of {fqn}; --ckpt-format torch_dcp takes others."
            )

        # A counter, which every section of a fused weight has under its own key.
        return [
            self._whole(f"optimizer.state.{section}.{name}", values, self._ranks, is_copied=True)
            for section in self.names[parameter]
        ]

    def _like(
        self, parameter: torch.Tensor, values: Values, prefix: str, suffix: str
    ) -> list[Entry]:
        """The entries, one per section, of a weight or of a state that is sharded like it."""
        own, shape, dtype = self._own_boxes[parameter], tuple(parameter.shape), values.dtype
        found = []
        for section in self._named_rows[parameter]:
            key = f"{prefix}{section.name}{suffix}"
            if section.num_rows is None:
                saved_as = SavedAs(key, dtype, shape, own.holdings)
                (box,) = own.boxes or [Box.whole(shape)]
                found.append(Entry(saved_as, box.offsets, values))
                continue

            holdings = partial(section_holdings, own.holdings, section.first_row, section.num_rows)
            saved_as = SavedAs(key, dtype, (section.num_rows, *shape[1:]), holdings)
            offsets, first_row, num_rows = own.rows_of(section.first_row, section.num_rows)
            found.append(Entry(saved_as, offsets or (0,) * len(shape), values, first_row, num_rows))
        return found

    def _whole(
        self,
        key: str,
        tensor: torch.Tensor | Values,
        ranks: Sequence[int],
        *,
        is_copied: bool = False,
    ) -> Entry:
        values = tensor if isinstance(tensor, Values) else Values(local_tensor(tensor).detach())
        shape = tuple(values.shape)
        saved_as = SavedAs(key, values.dtype, shape, replicated(shape, ranks))
        is_own = self._rank in ranks
        return Entry(saved_as, (0,) * len(shape), values, is_own=is_own, is_copied=is_copied)

    def _boxes_of(self, parameter: torch.Tensor) -> _OwnBoxes:
        group = group_of(parameter)
        holdings: Holdings
        if group is not None:
            index = group.index_of(parameter)
            holdings = partial(self._shards_of(group).holdings, index)
        elif isinstance(parameter, DTensor):
            mesh = self._ranks_of(parameter.device_mesh)
            holdings = EvenShards(parameter.shape, mesh, _sharded_dims(parameter)).holdings
        else:
            holdings = replicated(parameter.shape, self._ranks)

        return _OwnBoxes(holdings, [own.box for own in holdings(self._rank)])

    def _shards_of(self, group: FsdpParameterGroup) -> FlatShards:
        if id(group) not in self._shards:
            shards = FlatShards(
                group.layout, self._ranks_of(group.mesh), sharded_axes(group.placements.optimizer)
            )
            self._shards[id(group)] = self._alike.setdefault(shards, shards)
        return self._shards[id(group)]


class _OwnBoxes(NamedTuple):
    """The shards of a parameter, and this rank's, in the order of its local rows: at most one, or
    one of each section that tensor parallelism divides.
    """

    holdings: Holdings
    boxes: list[Box]

    def rows_of(self, first_row: int, num_rows: int) -> tuple[tuple[int, ...] | None, int, int]:
        """This rank's rows of a section: their offsets in it, None without any; the first of them
        among the local rows; their number.
        """
        local = 0
        for offsets, sizes in self.boxes:
            begin = max(offsets[0], first_row)
            end = min(offsets[0] + sizes[0], first_row + num_rows)
            if begin < end:
                own = (begin - first_row, *offsets[1:])
                return own, local + begin - offsets[0], end - begin
            local += sizes[0]
        return None, 0, 0


class _NamedRows(NamedTuple):
    """Rows of a parameter under a separate name. `num_rows` None: the whole parameter."""

    name: str
    first_row: int
    num_rows: int | None


def _named_rows(fqn: str, parameter: torch.Tensor, fused: FusedWeight | None) -> list[_NamedRows]:
    if fused is None:
        return [_NamedRows(fqn, 0, None)]
    wanted, got = fused.num_rows, parameter.shape[0]
    if wanted != got:
        raise ValueError(f"Expected {wanted} rows in {fqn}, as its sections have, got {got}.")

    # As separate layers next to the fused one: `attention.linear_qkv` has `attention.query`.
    module, _, name = fqn.rpartition(".")
    parent = module.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return [
        _NamedRows(f"{prefix}{s}.{name}", fused.row_range(s)[0], num) for s, num in fused.sections
    ]


def _sharded_dims(parameter: DTensor) -> list[int | None]:
    dims: list[int | None] = []
    for placement in parameter.placements:
        if type(placement) is Shard:
            dims.append(placement.dim)
        elif isinstance(placement, Replicate):
            dims.append(None)
        else:
            raise CheckpointError(
                f"Expected DTensors that are sharded or replicated, got {placement}."
            )
    return dims
