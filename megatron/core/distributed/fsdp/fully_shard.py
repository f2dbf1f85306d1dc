"""The public entry: `fully_shard` and what goes with it.

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

The names are those of Megatron-FSDP's experimental interface. As with PyTorch's FSDP2,
`fully_shard(layer, mesh)` for every layer and then for the model does without a context and
placements; see `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron.core.device import Device, DeviceConfig
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.module import FsdpModule, attach, names_taken
from megatron.core.distributed.fsdp.optimizer_hooks import CASTS_GRADIENTS
from megatron.core.distributed.fsdp.parameter_group import (
    FsdpParameterGroup,
    OwnedParameter,
    group_of,
)
from megatron.core.distributed.fsdp.placement import Flat, Placements
from megatron.core.distributed.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.dtensors import check_whole
from megatron.core.materialize import draw_parameters
from megatron.core.mesh import build_mesh

ResetParameters = Callable[[nn.Module], None]

# The context that is being filled, in this thread.
_current: ContextVar[_Construction | None] = ContextVar("fully_shard_context", default=None)

# Left on a parameter that `fully_shard` has replaced: whoever still has it holds nothing.
_REPLACED = "_fsdp_replaced"


class _Construction:
    """A context that is being filled."""

    def __init__(self, context: FsdpContext, reset_parameters: ResetParameters) -> None:
        self.context = context
        self.reset_parameters = reset_parameters


def _reset_parameters(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]  # draw_parameters has checked that it is callable


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    unify_communication_stream: bool = False,
    reset_parameters: ResetParameters = _reset_parameters,
) -> Iterator[FsdpContext]:
    """What the modules that are sharded inside it share; forward may run once it is left.

    Args:
        device: where the modules compute; default: the GPU if there is one.
        unify_communication_stream: gather and reduce on one stream. Less memory, less overlap.
            Always so on the CPU.
        reset_parameters: initialises a module with parameters on meta, given whole on `device`;
            default: its own method of that name. The same on every rank: every rank keeps its part
            of what it has drawn itself.

    Raises:
        RuntimeError: inside another.
    """
    if _current.get() is not None:
        raise RuntimeError(
            "Expected one fully_shard_context at a time, got one in another; it does not support "
            "nesting."
        )
    context = FsdpContext(_as_device(device), unify_communication_stream)
    token = _current.set(_Construction(context, reset_parameters))
    try:
        yield context
    finally:
        _current.reset(token)
    context.finalize()


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float = 1,
    *,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> FsdpModule:
    """Shards in place the parameters of `module` that no module in it has sharded already: inner
    modules come first.

    The module's parameters become DTensors over this rank's main weights, `UnevenDTensor`s where
    they are cut: shards are whole rows, but not `torch.chunk`'s. They are what optimizers and
    checkpoints see, and what PyTorch's own helpers (`get_state_dict`, `dcp.save`, `full_tensor`)
    work on. Gradients are averaged over the ranks.

    Outside of a `fully_shard_context`, modules join what contains them, and the first forward ends
    their construction.

    Args:
        module: with floating-point parameters, on any device. Every rank must pass the same values;
            those on meta are drawn one submodule at a time in main_params_dtype, see
            `fully_shard_context`.
        mesh: has the axes of `placements`, and no others; default: one axis over all ranks.
        placements: what is cut, on which axis; default: everything, on a mesh of one axis, and on
            the second of two (ZeRO-3 and HSDP, as FSDP2 has them).
        mixed_precision_policy: dtypes of main weights and gradients; default: fp32 main weights.
        grad_divisor: what averaged gradients are divided by besides.
        reshard_after_forward: free the full weights between forward and backward and gather them
            again.
        offload_policy: what lies in host memory from the start; default: nothing.

    Returns:
        `module`, whose class is now a subclass of its class and of `FsdpModule`.

    Raises:
        RuntimeError: meta parameters that nothing initialises; a module in which another has run
            already.
        ValueError: a module that is sharded already, here or in another context; a parameter that
            two sharded modules have; placements that do not fit the mesh; a mesh of more than two
            axes without placements; a divisor that is not positive.
        TypeError: a parameter that is not a float, or a DTensor of somebody else.
    """
    construction = _current.get()
    mesh = _world_mesh(construction) if mesh is None else mesh
    placements = _usual_placements(mesh) if placements is None else placements
    if construction is None:
        construction = _Construction(_open_context(module, mesh), _reset_parameters)
    context = construction.context
    mesh = _data_parallel_mesh(mesh, placements)
    if not grad_divisor > 0:
        raise ValueError(f"Expected a positive grad_divisor, got {grad_divisor}.")
    _check_module(module, context)
    owned = _owned_parameters(module)
    _check_parameters(module, owned)
    _check_buffers(module)
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    groups = [
        FsdpParameterGroup(
            parameters,
            mesh,
            placements,
            policy,
            grad_divisor,
            context.device,
            context.next_number + number,
            offload_policy,
        )
        for number, parameters in enumerate(_grouped(owned))
    ]
    _fill(groups, owned, context.device.torch_device, construction.reset_parameters)
    for group in groups:
        context.add_group(group)
    for submodule in _submodules(module):
        _move_buffers(submodule, context.device.torch_device)
        submodule.register_load_state_dict_pre_hook(_refuse_assignment)
    sharded = attach(module, context, groups, reshard_after_forward)
    sharded.register_state_dict_pre_hook(_wait_main_weights)  # type: ignore[no-untyped-call]
    sharded.register_load_state_dict_pre_hook(_wait_main_weights)  # type: ignore[no-untyped-call]
    context.add_module(sharded)
    return sharded


@contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:
    """Says of the forward and backward inside it whether they are a step's last.

    Gradients that are partial on an axis of `Placements.gradient` are summed up on each rank until
    the last microbatch and reduced over that axis after it; until then, the gradients that
    parameters show are partial sums. Without this, every microbatch counts as a last one.
    """
    before = context.is_last_microbatch
    context.is_last_microbatch = is_last
    try:
        yield
    finally:
        context.is_last_microbatch = before


def fully_shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer over sharded parameters take gradients of another dtype than theirs, and
    refuse partial sums.

    Gradients are cast to the parameters' dtype for the time of a step. Compute weights follow the
    main weights when they are used next, once for each group; for that nothing needs to be called.

    Raises:
        TypeError: for something else than a `torch.optim.Optimizer`.
        ValueError: if it has none of the sharded parameters, or has some that `fully_shard` has
            replaced.

    Later, by `optimizer.step()`:
        RuntimeError: for gradients of which the last microbatch is still to come.
        NotImplementedError: for a closure, where gradients have to be cast.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    parameters = list(_parameters(optimizer))
    num_replaced = sum(_REPLACED in vars(parameter) for parameter in parameters)
    if num_replaced:
        raise ValueError(
            f"Expected an optimizer built after fully_shard, got {num_replaced} parameters from "
            "before."
        )
    if not any(group_of(parameter) for parameter in parameters):
        raise ValueError(
            "Expected an optimizer over sharded parameters, got none among its parameters."
        )
    uncast: list[_Cast] = []

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A step may run inside another, a subclass's. What a step that has raised left behind may
        # be gone.
        uncast[:] = [cast for cast in uncast if cast.parameter.grad is cast.gradient]
        with_gradient = [
            (parameter, parameter.grad)
            for parameter in _parameters(optimizer)
            if parameter.grad is not None and group_of(parameter) is not None
        ]
        check_whole(gradient for _, gradient in with_gradient)
        to_cast = [
            (parameter, gradient)
            for parameter, gradient in with_gradient
            if gradient.dtype != parameter.dtype
        ]
        # A hook's arguments begin with the optimizer itself.
        if to_cast and any(closure is not None for closure in (*args[1:], *kwargs.values())):
            raise NotImplementedError(
                f"Expected step without a closure, whose {to_cast[0][1].dtype} gradients nothing "
                "would cast to "
                f"{to_cast[0][0].dtype}, got one."
            )
        for parameter, gradient in to_cast:
            parameter.grad = gradient.to(parameter.dtype)
            uncast.append(_Cast(parameter, gradient, parameter.grad))

    def after_step(*_: Any) -> None:
        while uncast:
            cast = uncast.pop()
            cast.parameter.grad = cast.original

    vars(optimizer)[CASTS_GRADIENTS] = True
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


class _Cast(NamedTuple):
    """A parameter whose gradient has been cast for the time of a step."""

    parameter: nn.Parameter
    original: torch.Tensor
    gradient: torch.Tensor | None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _as_device(device: torch.device | str | None) -> Device:
    if device is None:
        device = torch.device(DeviceConfig().kind)
    device = torch.device(device)
    index = device.index
    if index is None:
        index = 0 if device.type == "cpu" else torch.accelerator.current_device_index()
    return Device(device.type, index)


def _world_mesh(construction: _Construction | None) -> DeviceMesh:
    """One axis over all ranks."""
    kind = DeviceConfig().kind if construction is None else construction.context.device.kind
    return build_mesh(kind, dist.get_world_size())


def _usual_placements(mesh: DeviceMesh) -> Placements:
    """Those of FSDP2: ZeRO-3 on one axis; on two, replicas on the outer one."""
    if mesh.ndim == 1:
        return Placements.for_strategy("optim_grads_params")
    if mesh.ndim != 2:
        raise ValueError(f"Expected placements for a mesh of {mesh.ndim} axes, got none.")

    return Placements(
        dp_axes=(0, 1),
        parameter=(Replicate(), Flat()),
        gradient=(Partial("avg"), Flat()),
        optimizer=(Replicate(), Flat()),
    )


def _open_context(module: nn.Module, mesh: DeviceMesh) -> FsdpContext:
    """The context of what is sharded in `module` already, or a new one; the first forward completes
    it.

    RuntimeError if one of the inner modules has run: its context can take no more modules.
    """
    contexts: list[FsdpContext] = []
    for name, child in module.named_modules():
        if isinstance(child, FsdpModule) and child is not module and child.context.is_open:
            if child.context.is_finalized:
                raise RuntimeError(
                    "Expected every fully_shard before the first forward, got one of "
                    f"{type(module).__name__} after "
                    f"{name} has run."
                )
            if all(child.context is not context for context in contexts):
                contexts.append(child.context)

    if not contexts:
        return FsdpContext(
            _as_device(mesh.device_type), unify_communication_stream=False, is_open=True
        )
    for other in contexts[1:]:
        contexts[0].absorb(other)

    return contexts[0]


def _data_parallel_mesh(mesh: DeviceMesh, placements: Placements) -> DeviceMesh:
    """The mesh of the placements' axes, which are numbers or names of axes of `mesh`, outer to
    inner.
    """
    names = mesh.mesh_dim_names or ()
    numbers = []
    for axis in placements.dp_axes:
        if axis not in names and axis not in range(mesh.ndim):
            raise ValueError(
                f"Expected axes of the mesh, 0 to {mesh.ndim - 1} or one of {names}, got {axis!r}."
            )
        numbers.append(axis if isinstance(axis, int) else names.index(axis))
    if numbers == list(range(mesh.ndim)):
        return mesh
    if numbers != sorted(set(numbers)) or not names:
        raise ValueError(
            "Expected the axes of a mesh in their order, by name if they are not all of it, got "
            f"{placements.dp_axes} "
            f"of {names or mesh.ndim}."
        )
    return mesh[tuple(names[number] for number in numbers)]


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it, without what is sharded already."""
    seen = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            stack += [
                child
                for child in reversed(list(current.children()))
                if not isinstance(child, FsdpModule)
            ]


def _check_module(module: nn.Module, context: FsdpContext) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected a module, got {type(module).__name__}.")
    if isinstance(module, FsdpModule):
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


def _owned_parameters(module: nn.Module) -> list[OwnedParameter]:
    """Every physical parameter that `module` will own, with all its names and owners."""
    names = {id(submodule): name for name, submodule in module.named_modules()}
    found: dict[int, tuple[nn.Parameter, list[str], list[tuple[nn.Module, str]]]] = {}
    for submodule in _submodules(module):
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                _, fqns, owners = found.setdefault(id(parameter), (parameter, [], []))
                prefix = names[id(submodule)]
                fqns.append(f"{prefix}.{name}" if prefix else name)
                owners.append((submodule, name))
    return [
        OwnedParameter(tuple(fqns), tuple(owners), parameter)
        for parameter, fqns, owners in found.values()
    ]


def _check_parameters(module: nn.Module, owned: Sequence[OwnedParameter]) -> None:
    for parameter in owned:
        name, original = parameter.fqns[0], parameter.original
        if group_of(original) is not None or _REPLACED in vars(original):
            raise ValueError(
                f"Expected every parameter in one sharded module, got {name} of "
                f"{type(module).__name__}, which another "
                "owns already. Shard the module that contains both."
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


def _grouped(owned: Sequence[OwnedParameter]) -> list[list[OwnedParameter]]:
    """By dtype and requires_grad, in the order of the first of each."""
    groups: dict[tuple[torch.dtype, bool], list[OwnedParameter]] = {}
    for parameter in owned:
        groups.setdefault((parameter.original.dtype, parameter.original.requires_grad), []).append(
            parameter
        )
    return list(groups.values())


def _fill(
    groups: Sequence[FsdpParameterGroup],
    owned: Sequence[OwnedParameter],
    device: torch.device,
    reset_parameters: ResetParameters,
) -> None:
    """Gives the main weights their values, and takes the originals' memory."""
    places = {
        (id(owner()), name): (group, index)
        for group in groups
        for index, parameter in enumerate(group.fsdp_parameters)
        for owner, name in parameter.owners
    }
    drawn: set[int] = set()
    for parameter in owned:
        module, name = parameter.owners[0]
        if not parameter.original.is_meta:
            group, index = places[id(module), name]
            group.main_weight.copy_from(index, parameter.original)
        elif id(module) not in drawn:
            drawn.add(id(module))
            # A parameter that several modules have is drawn by the first.
            on_meta = [
                other.owners[0][1]
                for other in owned
                if other.owners[0][0] is module and other.original.is_meta
            ]
            main_dtype = places[id(module), name][0].main_weight.dtype
            for own_name, whole in draw_parameters(
                module, on_meta, device, reset_parameters, main_dtype
            ).items():
                group, index = places[id(module), own_name]
                group.main_weight.copy_from(index, whole)
    for parameter in owned:
        original = parameter.original
        if not original.is_meta:
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        setattr(original, _REPLACED, True)


def _check_buffers(module: nn.Module) -> None:
    on_meta = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if on_meta:
        raise RuntimeError(
            f"Expected buffers with storage, which nothing would fill, got {on_meta} on meta."
        )


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


def _wait_main_weights(module: nn.Module, *_: Any) -> None:
    """Before main weights are read or written from outside: what updates them in the background has
    ended.
    """
    assert isinstance(module, FsdpModule), "the hook of one"
    for group in module.parameter_groups:
        group.wait_main_weight()


def _refuse_assignment(*arguments: Any) -> None:
    local_metadata: dict[str, Any] = arguments[3]  # after module, state_dict and prefix
    if local_metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "Expected load_state_dict(assign=False) for a sharded module, whose parameters are "
            "views of its buffers, "
            "got assign=True."
        )
