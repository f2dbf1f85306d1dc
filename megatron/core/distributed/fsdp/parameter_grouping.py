"""Which parameters a module owns, and the plans of the groups that they form.

A module takes the parameters that no sharded module in it has taken. `fully_shard` calls this while
it shards, and `plan_shards` before anything is sharded, so both find the same groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.group_plan import GroupPlan, ParameterPlan
from megatron.core.distributed.fsdp.group_weights import REPLACED, OwnedParameter
from megatron.core.distributed.fsdp.layout import GlobalLayout, row_numel
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.placement import Placements
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.fp32_module import Fp32Module
from megatron.core.low_precision.recipes import Recipe
from megatron.core.transformer.tensor_cut import TensorCut

IsSharded = Callable[[nn.Module], bool]

# A group is split where its layout would have more padding than this share of its elements, and
# more elements of it than are worth another collective.
_MAX_PADDING_SHARE = 0.01
_MIN_PADDING_NUMEL = 1 << 18


class Sharding(NamedTuple):
    """How parameters are sharded.

    Attributes:
        mesh_shape: ranks along each axis of `placements`.
        grad_divisor: divides gradients after they have been averaged over the ranks.
        cuts: how tensor parallelism divides them over the last axis, which is kept.
    """

    mesh_shape: tuple[int, ...]
    placements: Placements
    grad_divisor: float = 1
    cuts: Mapping[nn.Parameter, TensorCut] = MappingProxyType({})


class TensorSharding(NamedTuple):
    """How every unit's parameters are sharded that tensor parallelism divides, and their mesh."""

    mesh: DeviceMesh
    sharding: Sharding


def own_modules(module: nn.Module, is_sharded: IsSharded) -> Iterator[nn.Module]:
    """The module and the modules in it, without sharded ones and what these contain.

    In the order of `nn.Module.modules()`, each once.
    """
    seen = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            stack += [child for child in reversed([*current.children()]) if not is_sharded(child)]


def owned_parameters(modules: Sequence[nn.Module], is_sharded: IsSharded) -> list[OwnedParameter]:
    """Every physical parameter that a unit of `modules` will own, with all its names and owners."""
    found: dict[int, tuple[nn.Parameter, list[str], list[tuple[nn.Module, str]]]] = {}
    for number, module in enumerate(modules):
        prefix = "" if len(modules) == 1 else str(number)
        names = {id(submodule): path for path, submodule in module.named_modules(prefix=prefix)}
        for submodule in own_modules(module, is_sharded):
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    _, fqns, owners = found.setdefault(id(parameter), (parameter, [], []))
                    path = names[id(submodule)]
                    fqns.append(f"{path}.{name}" if path else name)
                    owners.append((submodule, name))

    return [
        OwnedParameter(tuple(fqns), tuple(owners), parameter)
        for parameter, fqns, owners in found.values()
    ]


def plan_groups(
    owned: Sequence[OwnedParameter],
    sharding: Sharding,
    policy_for: Callable[[torch.dtype], MixedPrecisionPolicy],
    offload: OffloadPolicy,
    divided: Sharding | None = None,
    *,
    is_accelerator: bool = False,
) -> list[tuple[GroupPlan, list[OwnedParameter]]]:
    """The groups of one unit's parameters, in the order of the first of each. Parameters that
    tensor parallelism divides share no group with others, and come last.

    Parameters share a group if they have one dtype, one requires_grad, one policy and, where
    weights are kept as codes, one recipe, unless that takes too much padding; see `_parts`. An
    `Fp32Module` only costs a group, and its collectives, unless its dtypes differ from its
    neighbours' anyway.

    Args:
        policy_for: the policy of parameters of a dtype.
        offload: whether main weights start in host memory; main weights of frozen parameters never
            do.
        divided: the sharding of parameters that tensor parallelism divides; default: of none.
        is_accelerator: whether the ranks compute on accelerators.

    Raises:
        ValueError: for rows, sections or columns that the ranks of kept axes cannot divide.
        TypeError: for a parameter that is not a float.
    """
    cuts = {} if divided is None else divided.cuts
    parts = [(sharding, [each for each in owned if each.original not in cuts])]
    if divided is not None:
        parts.append((divided, [each for each in owned if each.original in cuts]))
    return [
        group
        for own_sharding, part in parts
        for group in _groups_of(part, own_sharding, policy_for, offload, is_accelerator)
    ]


def _groups_of(
    owned: Sequence[OwnedParameter],
    sharding: Sharding,
    policy_for: Callable[[torch.dtype], MixedPrecisionPolicy],
    offload: OffloadPolicy,
    is_accelerator: bool,
) -> list[tuple[GroupPlan, list[OwnedParameter]]]:
    mesh_shape, placements, grad_divisor, cuts = sharding
    num_blocks = placements.num_blocks(mesh_shape)
    for parameter in owned:
        _check_divisible(parameter, cuts.get(parameter.original), placements, num_blocks)
    num_ranks = math.prod(mesh_shape)
    adds_on_device = is_accelerator and num_ranks > num_blocks
    groups: dict[
        tuple[MixedPrecisionPolicy, torch.dtype, bool, Recipe | None], list[OwnedParameter]
    ] = {}
    for parameter in owned:
        dtype = parameter.original.dtype
        policy = policy_for(dtype).resolve(dtype, adds_on_device=adds_on_device)
        if any(isinstance(owner, Fp32Module) for owner, _ in parameter.owners):
            policy = policy.at_least_fp32()
        recipe = None
        if policy.gathers_codes:
            recipe = _recipe_of(parameter, cuts.get(parameter.original), num_blocks)
        kind = policy, dtype, parameter.original.requires_grad, recipe
        groups.setdefault(kind, []).append(parameter)

    return [
        (
            GroupPlan(
                tuple(_planned(p) for p in own),
                layout,
                placements,
                mesh_shape,
                policy,
                requires_grad,
                grad_divisor,
                offload,
                adds_on_device,
                recipe,
            ),
            own,
        )
        for (policy, _, requires_grad, recipe), together in groups.items()
        for own, layout in _parts(together, cuts, num_ranks, num_blocks)
    ]


def _planned(parameter: OwnedParameter) -> ParameterPlan:
    shape, (owner, _) = tuple(parameter.original.shape), parameter.owners[0]
    matrix_rows = getattr(owner, "matrix_rows", None) if len(shape) == 2 else None
    return ParameterPlan(parameter.fqns, shape, matrix_rows)


def _recipe_of(parameter: OwnedParameter, cut: TensorCut | None, num_blocks: int) -> Recipe | None:
    """The recipe of a trained weight that all its modules quantize alike, if no two rows have codes
    in one byte; None for others.
    """
    original = parameter.original
    recipes = {getattr(owner, "recipe", None) for owner, _ in parameter.owners}
    histories = {getattr(owner, "amax_history", None) for owner, _ in parameter.owners}
    is_alike = len(recipes) == len(histories) == 1
    if original.ndim != 2 or not original.requires_grad or not is_alike:
        return None
    recipe: Recipe | None = recipes.pop()
    columns = (cut.stored_shape(original.shape, num_blocks) if cut else original.shape)[1]
    is_whole = recipe is not None and columns % recipe.weight.format.per_byte == 0
    return recipe if is_whole else None


def _parts(
    together: Sequence[OwnedParameter],
    cuts: Mapping[nn.Parameter, TensorCut],
    num_ranks: int,
    num_blocks: int,
) -> list[tuple[list[OwnedParameter], GlobalLayout]]:
    """Parameters that could share a group, as one or as several, each with its layout.

    Every rank's piece of a buffer is a multiple of its alignment, the least common multiple of all
    row sizes. Among many ranks that is much of a layer: with rows of 2,560 and 9,728 elements 23 %
    at 64 ranks, and three times the layer at 1,024. A part has row sizes that divide its largest,
    so that a piece is at most one row longer than its parameters need.
    """

    own_cuts = [cuts.get(parameter.original) for parameter in together]
    shapes = [
        tuple(parameter.original.shape)
        if cut is None
        else cut.stored_shape(parameter.original.shape, num_blocks)
        for parameter, cut in zip(together, own_cuts, strict=True)
    ]

    def laid_out(part: Iterable[int]) -> GlobalLayout:
        # Rows that are divided without sections are in block order already.
        order = [cut if cut and cut.reorders else None for cut in map(own_cuts.__getitem__, part)]
        return GlobalLayout.build(
            [shapes[index] for index in part],
            num_ranks,
            num_blocks,
            order if num_blocks > 1 and any(order) else (),
        )

    everything = range(len(together))
    whole = laid_out(everything)
    numel = sum(parameter.original.numel() for parameter in together)
    if whole.size - numel <= max(_MAX_PADDING_SHARE * numel, _MIN_PADDING_NUMEL):
        return [([*together], whole)]

    by_row: dict[int, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_row.setdefault(row_numel(shape), []).append(index)
    parts: list[tuple[list[int], GlobalLayout]] = []
    # The largest rows first: others join a part that has them, where that adds the fewest elements.
    for row, own in sorted(by_row.items(), reverse=True):
        best, chosen = len(parts), (own, laid_out(own))
        least = chosen[1].size + _MIN_PADDING_NUMEL
        for number, (part, layout) in enumerate(parts):
            if layout.alignment % row == 0:
                joined = sorted([*part, *own])
                longer = laid_out(joined)
                if longer.size - layout.size < least:
                    best, chosen, least = number, (joined, longer), longer.size - layout.size
        parts[best : best + 1] = [chosen]

    if sum(layout.size + _MIN_PADDING_NUMEL for _, layout in parts) >= whole.size:
        return [([*together], whole)]
    parts.sort(key=lambda part: part[0][0])
    return [([together[index] for index in part], layout) for part, layout in parts]


def check_parameters(modules: Sequence[nn.Module], owned: Sequence[OwnedParameter]) -> None:
    """Rejects parameters that no buffer can hold.

    Args:
        modules: of the unit that will own them, for messages.

    Raises:
        ValueError: for one that another sharded module owns, has hooks, or has no rows or elements.
        TypeError: for a DTensor, and for one whose shape is not known yet.
    """
    kinds = " and ".join(type(module).__name__ for module in modules)
    for parameter in owned:
        name, original = parameter.fqns[0], parameter.original
        other = _owner_of(original)
        if other is not None:
            raise ValueError(
                f"Expected every parameter in one sharded module, got {name} of {kinds}, which "
                f"another owns already, as {_name_in(modules, *other)}. Shard the module that "
                "contains both, or both as a list: fully_shard([one, other])."
            )
        if isinstance(original, DTensor):
            raise TypeError(
                f"Expected plain parameters, got the DTensor {name} with {original.placements}."
            )
        if isinstance(original, nn.parameter.UninitializedParameter):
            raise TypeError(
                f"Expected parameters whose shapes are known, got {name}, which is lazy."
            )
        if original._backward_hooks or getattr(original, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"Expected parameters without hooks, which would be lost, got some on {name}."
            )
        if original.ndim == 0 or original.numel() == 0:
            raise ValueError(
                f"Expected parameters with rows and elements, got {name} of "
                f"{tuple(original.shape)}."
            )


def _owner_of(parameter: nn.Parameter) -> tuple[nn.Module | None, str] | None:
    """The sharded module that has the parameter, or had it before, and the name there."""
    group, index = group_of(parameter), -1
    if group is not None:
        index = group.index_of(parameter)
    elif REPLACED in vars(parameter):
        reference, index = vars(parameter)[REPLACED]
        group = reference()
        if group is None:
            return None, "a parameter of a deleted module"
    if group is None:
        return None
    owner, name = group.fsdp_parameters[index].owners[0]
    return owner(), name


def _name_in(modules: Sequence[nn.Module], owner: nn.Module | None, name: str) -> str:
    for module in modules:
        for path, submodule in module.named_modules():
            if submodule is owner:
                return f"{path}.{name}" if path else name
    return name if owner is None else f"{name} of a {type(owner).__name__} outside"


def _check_divisible(
    parameter: OwnedParameter, cut: TensorCut | None, placements: Placements, num_blocks: int
) -> None:
    shape = tuple(parameter.original.shape)
    if cut is not None:
        cut.check(shape, num_blocks, parameter.fqns[0])
    elif shape[0] % num_blocks:
        raise ValueError(
            f"Expected rows that the {num_blocks} ranks of the kept axes {placements.kept_axes} "
            f"divide, got {parameter.fqns[0]} of {shape}."
        )
