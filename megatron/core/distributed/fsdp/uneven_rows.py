"""`UnevenRows`: a DTensor that records which rows of its tensor each rank holds, and how to bring
them together.

DTensor's own collectives pad every shard to `torch.chunk`'s size, which ours do not have. Here the
ranks of an axis send what they hold, padded to the most that any of them holds; see also
`UnevenDTensor`, which is this with operators.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collectives import WHOLE_TENSOR
from megatron.core.distributed.fsdp.uneven_shard import UnevenShard
from megatron.core.issued_collectives import issuing

T = TypeVar("T", bound="UnevenRows")


class _Wait:
    """A method to be called before each use of some rows, of an object that is held weakly."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self) -> None:
        method = self._method()
        if method is not None:
            method()

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        # PyTorch's asynchronous checkpoints copy a tensor's attributes, but no code updates the
        # rows of a copy.
        return None


class UnevenRows(DTensor):
    """A DTensor whose ranks hold any number of rows. Made by `over`, or from another one by
    `with_local`.
    """

    _placements: tuple[Placement, ...]
    _before_use: _Wait | None = None

    @classmethod
    def over(
        cls: type[T],
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> T:
        """A DTensor over local rows, without communication.

        Args:
            local: the rows that this rank holds: [rows here, *shape[1:]]; may start anywhere in its
                storage.
            mesh: where the rows are.
            placements: one for each axis, at least one of them an `UnevenShard`.
            shape, strides: of the whole tensor.
        """
        rows = {
            placement.whole.num_rows
            for placement in placements
            if isinstance(placement, UnevenShard)
        }
        if rows != {shape[0]}:
            raise ValueError(
                f"Expected placements of a tensor of {shape[0]} rows, got {tuple(placements)}."
            )

        # DTensor's own code reads the spec, and caches by specs: a cached result for one tensor
        # must be true for every tensor with an equal spec. So the spec is Shard(0), and
        # `placements` has the rows.
        plain = [
            Shard(0) if isinstance(placement, UnevenShard) else placement
            for placement in placements
        ]
        meta = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
        spec = DTensorSpec(mesh, tuple(plain), tensor_meta=meta)

        return cls._over(local, spec, tuple(placements))

    @classmethod
    def _over(
        cls: type[T],
        local: torch.Tensor,
        spec: DTensorSpec,
        placements: tuple[Placement, ...],
    ) -> T:
        # A DTensor made over `local` itself would take over its offset in the storage, and code
        # that copies tensors would take it for one with a separate storage.
        placeholder = torch.empty(0, dtype=local.dtype, device=local.device)
        tensor = cls(placeholder, spec, requires_grad=False)
        tensor._local_tensor = local
        tensor._placements = placements

        return tensor

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each mesh axis; `UnevenShard` where rows are cut."""
        return self._placements

    @property
    def rows(self) -> range:
        """The rows of the whole tensor that this rank holds, perhaps none."""
        # The shard that has cut last; see [Note: order of cuts] in uneven_shard.py.
        axis, shard = next(
            (axis, placement)
            for axis, placement in enumerate(self._placements)
            if isinstance(placement, UnevenShard) and placement.is_leftmost
        )
        own = shard.cut.rows(self.device_mesh.get_local_rank(axis))

        return range(shard.first_row + own.start, shard.first_row + own.stop)

    def with_local(self: T, local: torch.Tensor) -> T:
        """A tensor cut as this one is, over other local rows: [rows here, ...], of any dtype."""
        own = self._local_tensor
        if (local.dtype, local.shape, local.stride()) == (own.dtype, own.shape, own.stride()):
            found = self._over(local, self._spec, self._placements)
        else:
            shape = (self.shape[0], *local.shape[1:])
            found = self.over(
                local, self.device_mesh, self._placements, shape, _strides(local, shape)
            )

        # Whatever updates these rows in the background updates them for a view as well.
        if self._before_use is not None and _is_same_storage(local, own):
            found._before_use = self._before_use
        return found

    def flattened(self: T, local: torch.Tensor) -> T:
        """A view of this tensor with several rows instead of each: [rows here, ...]."""
        factor = math.prod(self.shape[1:]) // math.prod(local.shape[1:])
        placements = [
            placement.flattened(factor) if isinstance(placement, UnevenShard) else placement
            for placement in self._placements
        ]
        return self.recut_view(local, placements, (self.shape[0] * factor, *local.shape[1:]))

    def recut_view(
        self: T, local: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int]
    ) -> T:
        """A view of this tensor that divides the same memory into other rows."""
        found = self.over(local, self.device_mesh, placements, shape, _strides(local, shape))
        found._before_use = self._before_use

        return found

    def own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that it has whole, a view."""
        rows = self.rows
        return whole.narrow(0, rows.start, len(rows))

    def is_cut_as(self, other: UnevenRows) -> bool:
        """Whether every rank holds the same rows of both, of as many dims."""
        if self is other:
            return True
        if self.dim() != other.dim() or self._spec.mesh != other._spec.mesh:
            return False
        # Identity first: views share the tuple, and comparing shards may compute all their bounds.
        return self._placements is other._placements or self._placements == other._placements

    def is_partial(self) -> bool:
        """Whether the rows are sums that have still to be reduced over an axis."""
        return len(self._placements) > 1 and any(
            placement.is_partial() for placement in self._placements
        )

    def wait_until_usable(self) -> None:
        """Waits for pending updates of these rows on other threads."""
        if self._before_use is not None:
            self._before_use()

    def precede_uses_by(self, wait: Callable[[], None]) -> None:
        """Has the method `wait` called before each use of these rows; its object is held weakly."""
        self._before_use = _Wait(wait)

    def check_whole(self, purpose: str) -> None:
        """RuntimeError if the rows are partial sums."""
        if self.is_partial():
            raise RuntimeError(
                f"Expected a tensor that is reduced for {purpose}, got the partial sums of "
                f"{self._placements}. The last microbatch has to run in microbatch(context, "
                "is_last=True)."
            )


def _strides(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of the whole tensor."""
    # Strides of an empty shard have no meaning.
    return local.stride() if local.numel() else torch.empty(tuple(shape), device="meta").stride()


def _is_same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def gathered(tensor: UnevenRows) -> torch.Tensor:
    """All rows of a tensor, in new memory on its device. All ranks of the mesh call it."""
    tensor.check_whole("an operation on all rows")
    tensor.wait_until_usable()
    mesh, rows = tensor.device_mesh, tensor._local_tensor.detach()
    device = rows.device

    # Ranks communicate on the mesh's device, so rows in host memory go there first.
    if device.type != mesh.device_type:
        rows = rows.to(mesh.device_type)

    # The leftmost axis has cut last; see [Note: order of cuts] in uneven_shard.py.
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, UnevenShard):
            rows = _gather_axis(rows, placement, mesh, axis)

    return rows.to(device)


def _gather_axis(
    rows: torch.Tensor, shard: UnevenShard, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """The rows of all ranks of one axis."""
    counts = [len(shard.cut.rows(place)) for place in range(shard.cut.num_pieces)]

    # Padded, since an all-gather takes equal parts.
    most, tail = max(counts), rows.shape[1:]
    own = rows.new_zeros((most, *tail))
    own[: len(rows)] = rows
    parts = rows.new_empty((len(counts), most, *tail))

    # As bytes: backends do not support all dtypes.
    if parts.numel():
        sent, received = own.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8)
        collectives.all_gather(received, sent, mesh.get_group(axis), WHOLE_TENSOR)

    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class CopyOfView(DTensor):
    """A gathered copy of what would be a view on one process: the same on all ranks, read-only.

    Writes to it would be lost, so in-place operators are refused. All others are DTensor's.
    """

    @classmethod
    @_disable_dynamo  # as DTensor's
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for argument, value in itertools.chain(
            zip(func._schema.arguments, args, strict=False),
            ((each, kwargs.get(each.name)) for each in func._schema.arguments),
        ):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and any(isinstance(leaf, CopyOfView) for leaf in tree_leaves(value)):
                raise RuntimeError(
                    f"Expected memory of the parameter's own to write to in {func}, got a gathered "
                    "copy, since the view would move rows between ranks. Write to the parameter, "
                    "or to its to_local()."
                )

        for tensor in tensors_among(args, kwargs):
            if tensor.dim() and not isinstance(tensor, DTensor):
                raise mixed_error(tensor, func)

        result = func(*tree_map(_as_dtensor, args), **tree_map(_as_dtensor, kwargs))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        return tree_map(_as_copy, result) if is_view else result


def mixed_error(tensor: torch.Tensor, func: Any) -> RuntimeError:
    """The error for a plain tensor and a sharded one as arguments of one operator."""
    return RuntimeError(
        f"{func} got a sharded tensor, a weight say, and a plain one of shape "
        f"{tuple(tensor.shape)}. Take full_tensor() of the sharded one, whose gradient is the mean "
        "of the ranks' gradients. Or keep the weights of its module whole from forward to "
        "backward, with fully_shard(..., reshard_after_forward=False). to_local() has the rows of "
        "this rank."
    )


def _as_dtensor(value: Any) -> Any:
    if not isinstance(value, CopyOfView):
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=False)


def _as_copy(value: Any) -> Any:
    if type(value) is not DTensor:
        return value
    local, spec = value._local_tensor, value._spec
    return CopyOfView(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def replicated(whole: torch.Tensor, mesh: DeviceMesh, kind: type[DTensor] = DTensor) -> DTensor:
    """A DTensor over a tensor that every rank has whole."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)

    return kind(whole, spec, requires_grad=False)


def whole_tensor(tensor: DTensor) -> torch.Tensor:
    """All of any DTensor, as a plain tensor without a graph. All ranks of the mesh call it."""
    if isinstance(tensor, UnevenRows):
        return gathered(tensor)
    if all(placement.is_replicate() for placement in tensor._spec.placements):
        return tensor._local_tensor.detach()

    detached: Any = tensor.detach()
    # One collective for each axis of the mesh that cuts it, all of them PyTorch's.
    with issuing(f"gather of a DTensor of {tensor.numel()} elements", tensor._local_tensor):
        whole: torch.Tensor = detached.full_tensor()

    return whole


def recut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A state or gradient with the rows that its parameter `like` has on each rank.

    PyTorch's helpers distribute whole tensors as `torch.chunk` would. If that has happened, all
    ranks of the mesh bring the rows where they belong, together. Anything else stays as it is.
    """
    if (
        not isinstance(like, UnevenRows)
        or not isinstance(tensor, DTensor)
        or tensor.shape != like.shape
    ):
        return tensor
    if isinstance(tensor, UnevenRows) and tensor.is_cut_as(like):
        return tensor

    return like.with_local(like.own_rows(whole_tensor(tensor)).clone())


def tensors_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments, also in lists."""
    # Faster than a walk through nested containers, which operators do not take.
    for value in itertools.chain(args, kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


def uneven_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[UnevenRows]:
    return (tensor for tensor in tensors_among(args, kwargs) if isinstance(tensor, UnevenRows))
