"""From parallel degrees to a `DeviceMesh`, which is passed to its users; and timeouts, connections
and failures of process groups.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group, _world

from megatron.core import local_ranks
from megatron.core.device import Device
from megatron.core.issued_collectives import issuing
from megatron.core.log import counted

DATA_PARALLEL_AXIS = "dp"
OUTER_AXIS, INNER_AXIS = "dp_outer", "dp_inner"
# Of experts: ranks of one place in different groups of ranks, and the groups that have all experts.
EXPERT_DATA_AXIS, EXPERT_AXIS = "edp", "ep"
TENSOR_AXIS = "tp"  # of tensor parallelism: ranks that divide weights; the last one of its mesh
# Of context parallelism: ranks that read different samples, and ranks that divide a sequence.
SAMPLES_AXIS, CONTEXT_AXIS = "samples", "cp"

# By the names of `ErrorType`, which only builds with NCCL have.
_FAILURES = {
    "TIMEOUT": "a collective timed out",
    "COMM_ERROR": "the communication of a collective failed",
    "REMOTE_ERROR": "a collective failed on another rank",
}

# Of launchers. Slurm sets its own in an allocation too, where a single process may run.
_NUM_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def build_mesh(device_kind: str, num_ranks: int | None = None) -> DeviceMesh:
    """A one-axis mesh over all ranks, over which parameters are sharded. As PyTorch's
    `fully_shard`, it makes a missing default process group.

    Args:
        device_kind: `Device.kind` of the ranks.
        num_ranks: the default process group must have as many.
    """
    ensure_default_group(Device(device_kind, 0).collective_backend)
    size = dist.get_world_size() if num_ranks is None else num_ranks
    return init_device_mesh(device_kind, (size,), mesh_dim_names=(DATA_PARALLEL_AXIS,))


def build_context_mesh(
    device_kind: str, num_ranks: int, context_size: int, tensor_size: int = 1
) -> DeviceMesh:
    """A mesh over the ranks of `build_mesh` with the axes (samples, cp), or (samples, cp, tp) with
    tensor parallelism. The `context_size` ranks of the second axis divide each sequence; they are
    consecutive, or `tensor_size` apart. Parameters are not sharded over it.

    Raises:
        ValueError: if the ranks cannot be divided into groups of `context_size * tensor_size`.
    """
    unit = context_size * tensor_size
    if num_ranks % unit:
        raise ValueError(
            f"Expected a context-parallel size that divides {num_ranks} ranks, got {context_size}"
            f"{f' with {tensor_size} tensor-parallel ranks' if tensor_size > 1 else ''}."
        )
    inner = {TENSOR_AXIS: tensor_size} if tensor_size > 1 else {}
    axes = {SAMPLES_AXIS: num_ranks // unit, CONTEXT_AXIS: context_size, **inner}
    return _build(device_kind, tuple(axes.values()), tuple(axes))


def build_hybrid_mesh(device_kind: str, num_ranks: int, num_instances: int) -> DeviceMesh:
    """A mesh of two axes for hybrid sharding; the outer has `num_instances` groups of consecutive
    ranks.

    Raises:
        ValueError: if the ranks cannot be divided into as many equal groups.
    """
    shape = hybrid_shape(num_ranks, num_instances)
    return _build(device_kind, shape, (OUTER_AXIS, INNER_AXIS))


def hybrid_shape(num_ranks: int, num_instances: int) -> tuple[int, int]:
    """Ranks along the axes of `build_hybrid_mesh`, which documents the error."""
    if num_ranks % num_instances:
        raise ValueError(
            f"Expected a number of instances that divides {num_ranks} ranks, got {num_instances}."
        )
    return (num_instances, num_ranks // num_instances)


def build_tensor_mesh(
    device_kind: str, num_ranks: int, tensor_size: int, num_instances: int = 1
) -> DeviceMesh:
    """A mesh for parameters that tensor parallelism divides: as `build_expert_mesh`, with the axes
    (dp, tp).
    """
    axes = tensor_axes(num_ranks, tensor_size, num_instances)
    return _build(device_kind, tuple(axes.values()), tuple(axes))


def tensor_axes(num_ranks: int, tensor_size: int, num_instances: int = 1) -> dict[str, int]:
    """Ranks along each axis of `build_tensor_mesh`, by its name. ValueError for ranks that cannot
    be divided.
    """
    names = DATA_PARALLEL_AXIS, TENSOR_AXIS
    return _kept_axes(num_ranks, tensor_size, num_instances, names, "a tensor-parallel size")


def build_expert_mesh(
    device_kind: str, num_ranks: int, expert_size: int, num_instances: int = 1
) -> DeviceMesh:
    """A mesh for the experts of a mixture, over the ranks of `build_mesh` or `build_hybrid_mesh`.

    Its last axis has `expert_size` consecutive ranks, which divide the experts among themselves and
    exchange tokens. The ranks of the axis before it hold the same experts, of which each has a
    part, in one instance of hybrid sharding. With several instances these are the first axis. Eight
    ranks, expert size 2:

        1 instance, (edp 4, ep 2)            2 instances, (dp_outer 2, edp 2, ep 2)
        0 1 | 2 3 | 4 5 | 6 7                0 1 | 2 3 || 4 5 | 6 7

    Raises:
        ValueError: if the ranks of an instance cannot be divided into groups of `expert_size`.
    """
    axes = expert_axes(num_ranks, expert_size, num_instances)
    return _build(device_kind, tuple(axes.values()), tuple(axes))


def expert_axes(num_ranks: int, expert_size: int, num_instances: int = 1) -> dict[str, int]:
    """Ranks along each axis of `build_expert_mesh`, which documents the error, by its name."""
    names = EXPERT_DATA_AXIS, EXPERT_AXIS
    return _kept_axes(num_ranks, expert_size, num_instances, names, "an expert-parallel size")


def _kept_axes(
    num_ranks: int, size: int, num_instances: int, names: tuple[str, str], what: str
) -> dict[str, int]:
    unit = size * num_instances
    if num_ranks % unit:
        raise ValueError(
            f"Expected {what} that divides {num_ranks} ranks, got {size} in "
            f"{counted(num_instances, 'instance')}."
        )

    outer = {OUTER_AXIS: num_instances} if num_instances > 1 else {}
    return {**outer, names[0]: num_ranks // unit, names[1]: size}


def _build(device_kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    ensure_default_group(Device(device_kind, 0).collective_backend)
    mesh = init_device_mesh(device_kind, shape, mesh_dim_names=names)
    for axis in range(mesh.ndim):
        inherit_timeouts(mesh.get_group(axis))
    return mesh


def all_reduce_over(
    mesh: DeviceMesh, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str
) -> None:
    """Reduces a tensor in place over all axes of a mesh, so that all of its ranks have the same.

    Args:
        what: the tensor's contents, for the watchdog.
    """
    for axis in range(mesh.ndim):
        with issuing(f"all-reduce of {what}", tensor):
            dist.all_reduce(tensor, op, group=mesh.get_group(axis))


def ensure_default_group(backend: str) -> None:
    """Makes a missing default process group: of the launcher's ranks, or of this process
    alone if no launcher has started it.

    Args:
        backend: for `init_process_group`.

    Raises:
        RuntimeError: another launcher, unknown to torch, has started several ranks.
    """
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    elif several := [name for name in _NUM_RANKS if os.environ.get(name, "1") != "1"]:
        raise RuntimeError(
            f"Expected RANK, since {several[0]} is set to several ranks, got none: call "
            "torch.distributed.init_process_group first, or launch with torchrun."
        )
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)


def inherit_timeouts(group: dist.ProcessGroup) -> None:
    """Gives a group the timeouts of the default group."""
    # torch's `DeviceMesh` gives the groups it makes torch's own default timeouts.
    default = _get_default_group()
    if group is default:
        return

    for device in group._device_types:
        own, inherited = _backend(group, device), _backend(default, device)
        if hasattr(own, "_set_default_timeout") and hasattr(inherited, "options"):
            own._set_default_timeout(inherited.options._timeout)


# By process group; None for groups within one machine, which need no second one.
_second_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = (
    weakref.WeakKeyDictionary()
)


def second_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """Another group of the ranks of `group`, the same one in every call; None if one machine has
    them all. All of them must call it together.

    A communicator of NCCL carries out one operation after the other, on whichever streams they are
    issued. Two communicators overlap, and each takes its own buffers on the device, so within a
    machine, where operations are short, there is only one.

    Args:
        device: this rank's.
    """
    if group not in _second_groups:
        _second_groups[group] = _make_second_group(group, device)
    return _second_groups[group]


def _make_second_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    ranks = dist.get_process_group_ranks(group)
    own = zlib.crc32(local_ranks.machine().encode())
    # The name that torch gives a group of some ranks depends on the number of groups.
    num_groups = len(_world.pg_names)
    extremes = torch.tensor([own, -own, num_groups, -num_groups], device=device)
    with issuing("all-reduce of the ranks' machines", extremes):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    last, first, most, least = extremes.tolist()
    # A new group has its ranks in ascending order.
    if last == -first or most != -least or ranks != sorted(ranks):
        return None

    made: dist.ProcessGroup = dist.new_group(
        ranks, use_local_synchronization=True, group_desc="fsdp reductions"
    )
    inherit_timeouts(made)
    return made


# By mesh and axes.
_groups_over = weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], dist.ProcessGroup]]()


def ranks_over(mesh: DeviceMesh, axes: Sequence[int]) -> list[int]:
    """The ranks that have this rank's place on all other axes, the last of `axes` running fastest.

    Args:
        axes: ascending.
    """
    own = mesh.get_coordinate()
    assert own is not None, "asked by a rank of the mesh"
    index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(own))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def group_over(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """The process group of `ranks_over`, the same one in every call. All of them must call it
    together.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    ranks = sorted(ranks_over(mesh, axes))
    if len(ranks) == dist.get_world_size():
        return _get_default_group()

    own = _groups_over.setdefault(mesh, {})
    if tuple(axes) not in own:
        made: dist.ProcessGroup = dist.new_group(
            ranks, use_local_synchronization=True, group_desc="matrices"
        )
        inherit_timeouts(made)
        own[tuple(axes)] = made
    return own[tuple(axes)]


def set_timeout(device: torch.device, timeout: timedelta) -> None:
    """Limits how long the default group's collectives on this kind of device take once issued."""
    backend = _backend(_get_default_group(), device)
    if hasattr(backend, "_set_default_timeout"):
        backend._set_default_timeout(timeout)


def connect(device: torch.device) -> None:
    """Connects the ranks' devices now if the backend would do so in the first collective.

    Ranks that cannot reach each other then fail where the group is made.
    """
    # Not by `init_process_group(device_id=...)`, which binds the group to the device as well: a
    # `DeviceMesh` then splits its groups off that one, and torch 2.11 hands NCCL's options to gloo.
    backend = _backend(_get_default_group(), device)
    if getattr(backend, "supports_splitting", False):
        backend.eager_connect_single_device(device)


def failed_collective() -> str | None:
    """The failure of a collective that a group's backend has found, in words; None without one, or
    if the backend does not look.

    On an accelerator a collective fails after it was issued, and the thread that issued it may not
    be told.
    """
    for group in list(_world.pg_map):
        for device in group._device_types:
            # Not every backend has `get_error`, though torch's debugging wrapper always does.
            with suppress(RuntimeError, AttributeError):
                error = _backend(group, device).get_error()
                if error.name != "SUCCESS":
                    failure = _FAILURES.get(error.name, error.name)
                    return f"{failure}, in the group {group.group_desc!r}"
    return None


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group's tensors on this kind of device; None without one."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)
