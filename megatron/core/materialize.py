"""Initial weights that do not depend on how many ranks share them.

Every module draws from a generator seeded by the run's seed and the module's name. No rank's draws
depend on another's, on the order of construction, or on how the parameter is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def materialize(model: nn.Module, device: torch.device | str, seed: int) -> None:
    """Gives `model`, built on the meta device or already real, its initial weights.

    Every module that owns parameters draws them whole on `device`, one module at a time, through
    its `reset_parameters`; a plain parameter takes all of it, a DTensor this rank's shard. There is
    no communication. The weights are a function of the seed, the modules' names, shapes and dtypes,
    and the kind of device.

    Args:
        model: real parameters keep their storage, unless some are on meta: then all get new storage
            on `device`, and shared ones stay shared. Real buffers keep their values.
        device: where the weights are drawn.
        seed: of the run; the same on every rank.

    Raises:
        RuntimeError: parameters that no `reset_parameters` initializes, or buffers on the meta
            device, by name.
        NotImplementedError: a DTensor with placements other than Shard and Replicate.
    """
    device = torch.device(device)
    _check_is_covered(model)
    _leave_meta(model, device)

    reset_parameters = seeded_reset(model, device, seed)
    done: set[int] = set()
    for module in model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            # A parameter that several modules share is initialized by the first.
            wanted = {name for name, parameter in own.items() if id(parameter) not in done}
            if wanted:
                _initialize(module, wanted, device, reset_parameters)
                done.update(map(id, own.values()))


def _check_is_covered(model: nn.Module) -> None:
    covered: set[int] = set()
    for module in model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            covered.update(map(id, module.parameters(recurse=False)))

    left_out = [
        name for name, parameter in model.named_parameters() if id(parameter) not in covered
    ]
    if left_out:
        raise RuntimeError(
            f"Expected a reset_parameters in every module with parameters, got none for {left_out}."
        )

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not all(
            type(p) in (Shard, Replicate) for p in parameter.placements
        ):
            raise NotImplementedError(
                f"Expected Shard or Replicate for {name}, got {parameter.placements}."
            )

    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise RuntimeError(
            f"Expected buffers with storage, got {on_meta} on meta, which is for parameters only."
        )


def _leave_meta(model: nn.Module, device: torch.device) -> None:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return

    # to_empty leaves buffers uninitialised, and makes a parameter for every module that has it.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    owners = _owners(model)
    model.to_empty(device=device)
    for (first, first_name), *others in owners:
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def _owners(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For every parameter, the modules that have it and its name in each."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((module, name))
    return list(found.values())


@torch.no_grad()
def draw_parameters(
    module: nn.Module,
    names: Collection[str],
    device: torch.device,
    reset_parameters: Callable[[nn.Module], None],
    dtype: torch.dtype | None = None,
) -> dict[str, nn.Parameter]:
    """New, whole parameters for a module, initialised on `device`. Its own stay as they are.

    Args:
        names: of the parameters that are wanted; all are drawn.
        module: may have its parameters on meta, or as DTensors.
        reset_parameters: initialises the module it is given; usually calls the method of that name.
        dtype: to draw floating-point parameters in; default: their own.

    Raises:
        RuntimeError: if the module has no `reset_parameters`, or it leaves out a parameter.
    """
    kind = type(module).__name__
    if not callable(getattr(module, "reset_parameters", None)):
        raise RuntimeError(
            f"Expected a reset_parameters in {kind}, which has parameters to initialise, got none."
        )
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    drawn = {name: _empty_like_whole(parameter, device, dtype) for name, parameter in own.items()}
    for name, whole in drawn.items():
        setattr(module, name, whole)
    try:
        reset_parameters(module)
    finally:
        for name, parameter in own.items():
            setattr(module, name, parameter)
    for name in names:
        if drawn[name].is_floating_point() and bool(drawn[name].isnan().any()):
            raise RuntimeError(
                f"Expected {kind}.reset_parameters to fill {name}, got it left as it was."
            )
    return {name: drawn[name] for name in names}


def seeded_reset(
    model: nn.Module, device: torch.device | str, seed: int
) -> Callable[[nn.Module], None]:
    """A `reset_parameters` for `draw_parameters` that draws what `materialize` would draw."""
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    device = torch.device(device)

    def reset(module: nn.Module) -> None:
        with _seeded(device, seed, fqns[id(module)]):
            # draw_parameters has checked that it is callable.
            module.reset_parameters()  # type: ignore[operator]

    return reset


@torch.no_grad()
def _initialize(
    module: nn.Module,
    wanted: set[str],
    device: torch.device,
    reset_parameters: Callable[[nn.Module], None],
) -> None:
    """Draws the `wanted` ones of the module's own parameters and copies them into place."""
    for name, whole in draw_parameters(module, wanted, device, reset_parameters).items():
        _copy_local(getattr(module, name), whole)


def _empty_like_whole(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
    if dtype is None or not parameter.is_floating_point():
        dtype = parameter.dtype
    whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    if whole.is_floating_point():
        # NaN shows what reset_parameters has forgotten.
        whole.fill_(float("nan"))
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _copy_local(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copies this rank's part of `whole` into `parameter`."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    if parameter.device_mesh.get_coordinate() is None:
        return  # this rank is not in the mesh and has no shard

    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, parameter.device_mesh, parameter.placements
    )
    local = whole[
        tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    ]
    parameter.to_local().copy_(local)


@contextmanager
def _seeded(device: torch.device, seed: int, module_fqn: str) -> Iterator[None]:
    """Seeds the default generators of the CPU and of `device` for one module, and restores them."""
    module_seed = xxhash.xxh3_64_intdigest(f"{seed}:{module_fqn}".encode())
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(module_seed)
            yield
        return

    index = torch.accelerator.current_device_index() if device.index is None else device.index
    with torch.random.fork_rng(devices=[index], device_type=device.type):
        # Not torch.manual_seed, which seeds the generators of all devices: only two are forked.
        torch.default_generator.manual_seed(module_seed)
        torch.get_device_module(device.type).default_generators[index].manual_seed(module_seed)
        yield
