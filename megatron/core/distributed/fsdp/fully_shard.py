"""The public entry: `fully_shard` and its context.

    with fully_shard_context(device) as context:
        for layer in model.layers:
            fully_shard(layer, mesh, placements)
        fully_shard(model, mesh, placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fully_shard_optimizer(optimizer)

    for number, batch in enumerate(microbatches):
        with microbatch(context, is_last=number == len(microbatches) - 1):
            loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()

The names come from Megatron-FSDP's experimental interface. As with PyTorch's FSDP2, calling
`fully_shard(layer, mesh)` for every layer and then for the model needs neither a context nor
placements: modules join the one that contains them, and the first forward ends their construction.
FSDP2's own arguments are taken as it means them, or rejected: see fsdp2_arguments.py.

The module's parameters become DTensors over this rank's main weights, `UnevenDTensor`s where they
are cut: shards are whole rows, but not the rows of `torch.chunk`. They are what optimizers and
checkpoints see, and what PyTorch's own helpers (`get_state_dict`, `dcp.save`, `full_tensor`) work
on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, overload

import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import Device, kind_of
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.fsdp2_arguments import (
    PrecisionPolicies,
    check_arguments,
    own_offload_policy,
)
from megatron.core.distributed.fsdp.group_weights import REPLACED, OwnedParameter
from megatron.core.distributed.fsdp.module import FsdpModule, attach, names_taken
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.parameter_grouping import (
    Sharding,
    TensorSharding,
    check_parameters,
    own_modules,
    owned_parameters,
    plan_groups,
)
from megatron.core.distributed.fsdp.placement import Placements, data_parallel_mesh
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.distributed.fsdp.replica import ReplicaDTensor
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.materialize import draw_parameters
from megatron.core.mesh import TENSOR_AXIS, build_mesh

ResetParameters = Callable[[nn.Module], None]


class _Construction(NamedTuple):
    """A context that is being filled."""

    context: FsdpContext
    reset_parameters: ResetParameters
    tensor: TensorSharding | None


# The context that is being filled, in this thread.
_current: ContextVar[_Construction | None] = ContextVar("fully_shard_context", default=None)


def _reset_parameters(module: nn.Module) -> None:
    # draw_parameters has checked that it is callable.
    module.reset_parameters()  # type: ignore[operator]


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
    reset_parameters: ResetParameters = _reset_parameters,
    tensor: TensorSharding | None = None,
) -> Iterator[FsdpContext]:
    """Collects the modules that are sharded inside it into one context. They may run once it is
    left.

    Args:
        device: where the modules compute; default: the GPU, if any.
        use_symmetric_memory: must be False.
        unify_communication_stream: gather and reduce on one stream. Less memory, less overlap.
            Always so on the CPU.
        reset_parameters: initialises a module with parameters on meta, given whole on `device`;
            default: its own method of that name. It must draw the same on every rank, since every
            rank draws for itself and keeps its part.
        tensor: how parameters that tensor parallelism divides are sharded, in every module; the
            arguments of `fully_shard` are for the others. All meshes have the same ranks.

    Raises:
        RuntimeError: inside another.
        NotImplementedError: for symmetric memory.
    """
    if use_symmetric_memory:
        raise NotImplementedError(
            "Expected use_symmetric_memory=False, since staging buffers are ordinary memory here, "
            "got True."
        )
    if _current.get() is not None:
        raise RuntimeError(
            "Expected one fully_shard_context at a time, got one in another; it does not support "
            "nesting."
        )

    context = FsdpContext(_as_device(device), unify_communication_stream)
    token = _current.set(_Construction(context, reset_parameters, tensor))
    try:
        yield context
    finally:
        _current.reset(token)
    # Not after an error inside: modules may be missing on this rank alone, and this communicates.
    context.finalize()


@overload
def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = ...,
    placements: Placements | None = ...,
    mixed_precision_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = ...,
    grad_divisor: float = ...,
    *,
    reshard_after_forward: bool | None = ...,
    offload_policy: OffloadPolicy | fsdp2.OffloadPolicy | None = ...,
    mp_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = ...,
    **not_offered: Any,
) -> FsdpModule: ...


@overload
def fully_shard(
    module: list[nn.Module] | tuple[nn.Module, ...],
    mesh: DeviceMesh | None = ...,
    placements: Placements | None = ...,
    mixed_precision_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = ...,
    grad_divisor: float = ...,
    *,
    reshard_after_forward: bool | None = ...,
    offload_policy: OffloadPolicy | fsdp2.OffloadPolicy | None = ...,
    mp_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = ...,
    **not_offered: Any,
) -> Sequence[nn.Module]: ...


def fully_shard(
    module: nn.Module | list[nn.Module] | tuple[nn.Module, ...],
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = None,
    grad_divisor: float = 1,
    *,
    reshard_after_forward: bool | None = True,
    offload_policy: OffloadPolicy | fsdp2.OffloadPolicy | None = None,
    mp_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None = None,
    **not_offered: Any,
) -> nn.Module | Sequence[nn.Module]:
    """Shards in place the parameters of `module` that no module in it has sharded: call it for
    inner modules first. The module's docstring describes the new parameters.

    Args:
        module: with floating-point parameters, on any device, of the same values on every rank;
            parameters on meta are drawn by one submodule at a time, see `fully_shard_context`, or
            have to be filled before the first forward if their submodule cannot draw them. A list
            is one unit, whose weights are gathered and whose gradients are reduced together.
        mesh: with the axes of `placements`, and no others; default: one axis over all ranks of the
            default process group, which is made if needed.
        placements: which tensors are cut, on which axis; default: `Placements.usual`.
        mixed_precision_policy, mp_policy: dtypes of main weights and gradients; default: fp32 main
            weights. PyTorch's policy, and the second name, have the meaning of FSDP2. No dtype
            of an `Fp32Module`'s own parameters is narrower than fp32.
        grad_divisor: divides gradients after they have been averaged over the ranks.
        reshard_after_forward: free the full weights between forward and backward; None: except
            for the outermost module. If not, parameters are plain and whole until a backward,
            or `reshard()`.
        offload_policy: tensors in host memory from the start; default: none.

    Returns:
        `module`, whose class is now a subclass of its class and of `FsdpModule`; a list as it is.

    Raises:
        RuntimeError: a `reset_parameters` that leaves out a parameter; an inner module has run; a
            rank outside.
        ValueError: a module or parameter that is sharded already; placements that do not fit the
            mesh, or none for more than two axes; rows that kept axes do not divide; a divisor that
            is not positive; two policies.
        TypeError: a parameter that is not a float, or is another library's DTensor; no module.
        NotImplementedError: arguments of FSDP2 with no or another meaning here; a mesh with a
            tensor-parallel axis.
    """
    modules = _outermost(module if isinstance(module, (list, tuple)) else [module])
    check_arguments(reshard_after_forward, grad_divisor, not_offered)
    policies = PrecisionPolicies.of(mixed_precision_policy, mp_policy)
    offload = own_offload_policy(offload_policy)

    construction, mesh, placements = _construction_for(modules, mesh, placements)
    context = construction.context
    owned = _checked_parameters(modules, context)
    tensor = construction.tensor
    planned = plan_groups(
        owned,
        Sharding(tuple(mesh.shape), placements, grad_divisor),
        policies.for_dtype,
        offload,
        None if tensor is None else tensor.sharding,
        is_accelerator=context.device.is_accelerator,
    )
    meshes = {} if tensor is None else dict.fromkeys(tensor.sharding.cuts, tensor.mesh)
    groups = [
        FsdpParameterGroup(plan, own, meshes.get(own[0].original, mesh), context.device)
        for plan, own in planned
    ]
    is_filled = _fill(groups, owned, construction)
    _attach(modules, context, groups, reshard_after_forward, policies, is_filled)
    return module


@contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:
    """Sets whether the forward and backward inside it are a step's last.

    Gradients that are partial on an axis of `Placements.gradient` are summed up on each rank until
    the last microbatch, and then reduced over that axis. Until then, the gradients that parameters
    show are partial sums. Without this, every microbatch counts as a last one.
    """
    before = context.is_last_microbatch
    context.is_last_microbatch = is_last
    try:
        yield
    finally:
        context.is_last_microbatch = before


def _as_device(device: torch.device | str | None) -> Device:
    if device is None:
        device = torch.device(kind_of())

    device = torch.device(device)
    index = device.index
    if index is None:
        index = 0 if device.type == "cpu" else torch.accelerator.current_device_index()
    return Device(device.type, index)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that no other one of them contains, each once.

    TypeError for something else than a module; ValueError for none.
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"Expected a module or a list of modules, got a {type(module).__name__}."
            )
    if not modules:
        raise ValueError("Expected a module or a list of modules, got an empty list.")
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inner]


def _construction_for(
    modules: Sequence[nn.Module], mesh: DeviceMesh | None, placements: Placements | None
) -> tuple[_Construction, DeviceMesh, Placements]:
    """The construction that a unit of `modules` joins, its mesh, and its placements."""
    construction = _current.get()
    if mesh is None:
        kind = kind_of() if construction is None else construction.context.device.kind
        mesh = build_mesh(kind)  # one axis over all ranks
    if placements is None:
        placements = Placements.usual(mesh.ndim)
    own = data_parallel_mesh(mesh, placements)
    if TENSOR_AXIS in (own.mesh_dim_names or ()):
        raise NotImplementedError(
            f"fully_shard() cannot shard over the tensor-parallel axis {TENSOR_AXIS!r}, since it "
            "does not divide computations. Pass the mesh of the data-parallel axes, or train with "
            "--tensor-model-parallel-size."
        )

    if construction is None:
        construction = _Construction(_open_context(modules, mesh), _reset_parameters, None)
    return construction, own, placements


def _open_context(modules: Sequence[nn.Module], mesh: DeviceMesh) -> FsdpContext:
    """The open context of the modules sharded inside `modules`, or a new one.

    RuntimeError if one of them has run: its context takes no more modules.
    """
    contexts: list[FsdpContext] = []
    for module in modules:
        for name, child in module.named_modules():
            if isinstance(child, FsdpModule) and child is not module and child.context.is_open:
                if child.context.is_finalized:
                    raise RuntimeError(
                        "Expected every fully_shard before the first forward, got one of "
                        f"{type(module).__name__} after {name} has run."
                    )
                if all(child.context is not context for context in contexts):
                    contexts.append(child.context)

    if not contexts:
        return FsdpContext(
            _as_device(mesh.device_type), unify_communication_stream=False, is_open=True
        )
    # Layers that were sharded one by one have a context each, until a module contains them all.
    # From then on they share one order and one set of lanes.
    for other in contexts[1:]:
        contexts[0].absorb(other)

    return contexts[0]


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FsdpModule)


def _checked_parameters(modules: Sequence[nn.Module], context: FsdpContext) -> list[OwnedParameter]:
    """The parameters that a unit of `modules` will own, after all checks."""
    for module in modules:
        _check_module(module, context)
    owned = owned_parameters(modules, _is_sharded)
    check_parameters(modules, owned)
    return owned


def _check_module(module: nn.Module, context: FsdpContext) -> None:
    if isinstance(module, fsdp2.FSDPModule):
        raise ValueError(
            f"Expected a module that is not sharded yet, got a {type(module).__name__}."
        )
    if taken := names_taken(module):
        raise ValueError(f"Expected a module without attributes that FsdpModule has, got {taken}.")

    for name, child in module.named_modules():
        if isinstance(child, FsdpModule) and child.context is not context:
            raise ValueError(
                f"Expected inner modules of the same context, got {name} of another "
                "fully_shard_context."
            )


# A parameter's group and its index there, by the id of an owner and the name in it.
_Places = dict[tuple[int, str], tuple[FsdpParameterGroup, int]]


def _fill(
    groups: Sequence[FsdpParameterGroup],
    owned: Sequence[OwnedParameter],
    construction: _Construction,
) -> bool:
    """Gives the main weights their values, and frees the originals' memory. Returns whether all
    have values now; main weights of modules without `reset_parameters` are NaN.
    """
    places: _Places = {
        (id(owner()), name): (group, index)
        for group in groups
        for index, parameter in enumerate(group.fsdp_parameters)
        for owner, name in parameter.owners
    }
    is_filled, drawn = True, set[int]()
    for parameter in owned:
        module, name = parameter.owners[0]
        group, index = places[id(module), name]
        if group.is_restored:
            continue
        if not parameter.original.is_meta:
            _set_values(group, index, parameter.original)
        elif not callable(getattr(module, "reset_parameters", None)):
            group.main_weight.get_local_tensor(index).fill_(float("nan"))
            is_filled = False
        elif id(module) not in drawn:
            # A parameter that several modules have is drawn by the first.
            drawn.add(id(module))
            _draw(module, owned, places, construction)

    for group in groups if is_filled else ():
        if not group.is_restored:
            group.keep_initial_sample()
    for parameter in owned:
        _leave_original(parameter, places)
    return is_filled


def _draw(
    module: nn.Module,
    owned: Sequence[OwnedParameter],
    places: _Places,
    construction: _Construction,
) -> None:
    """Draws a module's parameters on meta: all at once, as `reset_parameters` draws them
    together.
    """
    names = [
        parameter.owners[0][1]
        for parameter in owned
        if parameter.owners[0][0] is module and parameter.original.is_meta
    ]
    group, _ = places[id(module), names[0]]
    drawn = draw_parameters(
        module,
        names,
        construction.context.device.torch_device,
        construction.reset_parameters,
        group.main_weight.dtype,
    )
    for name, values in drawn.items():
        _set_values(*places[id(module), name], values)


def _set_values(group: FsdpParameterGroup, index: int, whole: torch.Tensor) -> None:
    if group.is_restored:
        return  # a module's parameters are drawn together, also for other groups
    group.main_weight.copy_from(index, whole)
    group.sample_initial_weight(whole)


def _leave_original(parameter: OwnedParameter, places: _Places) -> None:
    """Frees an original parameter's memory, and leaves on it which group has replaced it."""
    original = parameter.original
    # An object that still holds the original, such as an early optimizer, must not keep its memory.
    if not original.is_meta:
        original.data = torch.empty(0, dtype=original.dtype, device=original.device)

    owner, name = parameter.owners[0]
    group, index = places[id(owner), name]
    setattr(original, REPLACED, (weakref.ref(group), index))


def _attach(
    modules: Sequence[nn.Module],
    context: FsdpContext,
    groups: list[FsdpParameterGroup],
    reshard_after_forward: bool | None,
    policies: PrecisionPolicies,
    is_filled: bool,
) -> None:
    """Makes `modules` a sharded unit of the context."""
    _exclude_parameters_from_compile()
    for group in groups:
        context.add_group(group)
    for module in modules:
        for submodule in own_modules(module, _is_sharded):
            _move_buffers(submodule, context.device.torch_device)
            # torch.compile looks for these names. It then installs no guards on the parameters,
            # which are other tensors in every forward.
            vars(submodule).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
            hook = _assignment_hook(weakref.ref(modules[0]))
            submodule.register_load_state_dict_pre_hook(hook)
            is_filled &= not any(buffer.is_meta for buffer in submodule.buffers(recurse=False))

        # Around the forward itself: before inputs are cast, `attach` has its hooks see them as they
        # came, and outputs as the module made them.
        policies.cast_inputs(module)
    attach(modules, context, groups, reshard_after_forward, policies, is_filled)
    for module in modules:
        policies.cast_outputs(module)
        module.register_state_dict_pre_hook(_pre_state_dict)
        module.register_load_state_dict_pre_hook(_pre_state_dict)
        context.add_module(module)
    # An optimizer may be built before the first forward completes the context.
    if context.is_open:
        context.name_groups()


def _exclude_parameters_from_compile() -> None:
    """Has graphs of torch.compile end where they would use sharded parameters, which run as they
    are.

    A graph would take them for DTensors with the rows of `torch.chunk`. Full weights are ordinary
    parameters, which graphs take.
    """
    # Not with this file: it imports the compiler.
    from torch._dynamo import config

    config.nontraceable_tensor_subclasses |= {UnevenDTensor, ReplicaDTensor}


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        # One on meta is filled later, like parameters.
        if buffer is not None and not buffer.is_meta:
            module._buffers[name] = buffer.to(device)


def _pre_state_dict(module: nn.Module, *_: Any) -> None:
    """Puts sharded parameters in place, and waits for background updates, before state dicts read
    or write the main weights.
    """
    assert isinstance(module, FsdpModule), "the hook of one"
    unit = module._fsdp_unit
    unit._fsdp_let_go()
    for group in unit.parameter_groups:
        group.wait_main_weight()


def _assignment_hook(reference: weakref.ref[nn.Module]) -> Callable[..., None]:
    """Returns a hook that copies what load_state_dict(assign=True) would assign, as long as the
    model has not run; afterwards it raises RuntimeError.

    Args:
        reference: the first module of the unit that has the parameters.
    """

    def copy_instead(*arguments: Any) -> None:
        local_metadata: dict[str, Any] = arguments[3]  # after module, state_dict and prefix
        if not local_metadata.get("assign_to_params_buffers", False):
            return
        unit = reference()
        assert isinstance(unit, FsdpModule), "it has the submodule"
        if unit.context.is_finalized:
            raise RuntimeError(
                "load_state_dict(assign=True) cannot replace parameters that fully_shard() has "
                "sharded: they are views of its buffers. Load before fully_shard(), or in place "
                "with assign=False."
            )
        # Programs that shard on meta fill the model in this way. Copied, values are the same.
        local_metadata["assign_to_params_buffers"] = False

    return copy_instead
