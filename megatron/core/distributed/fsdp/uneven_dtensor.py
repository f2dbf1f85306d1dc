"""`UnevenDTensor`: a DTensor whose shards are whole rows, but not the rows of `torch.chunk`.

The tensors of a flat buffer are cut where the buffer is. A plain DTensor over such a shard would
claim `torch.chunk`'s rows: `full_tensor` would mix up rows or hang, and a checkpoint would silently
put them in the wrong place. This class records its rows, and PyTorch's code moves them only through
it:

- operators run on local rows, or on all of them; see uneven_operators.py,
- `full_tensor`, `redistribute` and `to_local`, with their gradients, send only existing rows,
- DCP reads its chunks, as does any copy that PyTorch makes of it,
- `placements` shows `UnevenShard`s, which `compute_local_shape_and_global_offset` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._library.simple_registry import singleton as operator_registry
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types

import megatron.core.distributed.fsdp.collectives as collectives
import megatron.core.distributed.fsdp.uneven_operators as operators
from megatron.core.distributed.fsdp.uneven_operators import CopyOfView
from megatron.core.distributed.fsdp.uneven_rows import (
    RowCut,
    UnevenRows,
    UnevenShard,
    gathered,
    replicated,
    whole_tensor,
)
from megatron.core.dtensors import deep_copied
from megatron.core.issued_collectives import issuing
from megatron.core.transformer.tensor_cut import TensorCut

# Set on a sharded parameter whose gradients are not the mean over the ranks.
SUMS_GRADIENTS = "_fsdp_sums_gradients"


class UnevenDTensor(UnevenRows):
    """A DTensor with uneven rows that PyTorch's distributed code accepts. Made by `over`, or from
    another one by operations.
    """

    # The methods of a DTensor that are not operators

    @_disable_dynamo
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As DTensor's: the local rows, not a copy. Gradients come back cut as this tensor is."""
        self.wait_until_usable()
        # As DTensor does: without autograd, the very tensor rather than a view.
        if not torch.is_grad_enabled():
            return self._local_tensor

        local: torch.Tensor = _ToLocal.apply(self, grad_placements)  # type: ignore[no-untyped-call]
        return local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As DTensor's, but with a gradient that is the mean of the ranks' gradients, so that a
        loss of each rank's data may use it. `grad_placements` is taken as DTensor takes it.
        """
        with issuing("all-gather of a whole tensor", self._local_tensor):
            whole = super().full_tensor(grad_placements=grad_placements)
        return whole if grad_placements is not None else with_mean_gradient(whole, self)

    @_disable_dynamo
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """As DTensor's. Communicates, unless these are the placements that the tensor has.

        Raises:
            RuntimeError: without placements.
            NotImplementedError: for another mesh, as DTensor; for the rows of another parameter.
        """
        if placements is None:
            raise RuntimeError("Expected placements to redistribute to, got None.")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(f"Expected the mesh {self.device_mesh}, got {device_mesh}.")

        # By way of all rows: simple, and rows rarely move from one cut to another.
        wanted = tuple(placements)
        if wanted == self._placements and not options:
            return torch.ops.aten.alias.default(self)  # type: ignore[no-any-return]
        if any(isinstance(placement, UnevenShard) for placement in wanted):
            raise NotImplementedError(
                f"Expected even placements, got {wanted}, the rows of another parameter. Copy to a "
                "tensor with that parameter's rows: torch.zeros_like(parameter).copy_(tensor)."
            )

        whole: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        return whole.redistribute(placements=wanted, **options)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As torch's. RuntimeError for a parameter of `fully_shard`: the hook would never run."""
        if self._before_use is not None:
            raise RuntimeError(
                "Expected hooks on modules or on the optimizer, got one on a parameter of "
                "fully_shard, whose reduced gradient autograd does not accumulate: it would never "
                "be called."
            )
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenDTensor:
        return deep_copied(self, memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A clone: pickling a view would save the whole flat buffer with every tensor in it.
        self.wait_until_usable()
        local = self._local_tensor.detach().clone()
        parts = (local, self.device_mesh, self._placements, self.shape, self.stride())

        return _rebuild, (*parts, self.requires_grad, isinstance(self, nn.Parameter))

    def __repr__(self) -> str:  # type: ignore[override]  # as DTensor
        return (
            f"UnevenDTensor(local_tensor={self._local_tensor}, device_mesh={self.device_mesh}, "
            f"placements={self._placements})"
        )

    # Called by PyTorch's distributed checkpoints

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks of the whole tensor that this rank holds: usually one, none if it holds no
        rows, and one for each section of a parameter that tensor parallelism divides.
        """
        self.check_whole("a checkpoint")
        self.wait_until_usable()
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """The chunks of the tensor that this rank writes."""
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The local rows of one chunk, into which a load writes and from which a save reads."""
        self.wait_until_usable()
        own = next(box.rows for box in self.boxes() if box.offsets == tuple(index.offset or ()))
        return self._local_tensor.narrow(0, own.start - self.rows.start, len(own))

    # Operators

    @classmethod
    @_disable_dynamo  # as DTensor's
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return operators.run(func, args, kwargs or {})


class _Gather(torch.autograd.Function):
    """From uneven rows to a replicated DTensor, and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> DTensor:
        ctx.like = tensor.detach()
        return replicated(gathered(tensor), tensor.device_mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> UnevenDTensor:
        rows = ctx.like.own_rows(whole_tensor(gradient))
        return ctx.like.with_local(rows.clone())  # type: ignore[no-any-return]


class _ToLocal(torch.autograd.Function):
    """The local rows as a plain tensor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: UnevenDTensor, grad_placements: Sequence[Placement] | None
    ) -> torch.Tensor:
        ctx.like, ctx.grad_placements = tensor.detach(), grad_placements
        ctx.set_materialize_grads(False)  # no zeros for a gradient that does not come
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None]:
        if gradient is None:
            return None, None
        if ctx.grad_placements is None or tuple(ctx.grad_placements) == ctx.like.placements:
            return ctx.like.with_local(gradient), None

        return DTensor.from_local(gradient, ctx.like.device_mesh, ctx.grad_placements), None


class _WithMeanGradient(torch.autograd.Function):
    """A tensor that every rank has whole, whose gradient becomes the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        mean = gradient.to(ctx.mesh.device_type, copy=True, memory_format=torch.contiguous_format)
        for axis in range(ctx.mesh.ndim):
            collectives.combine(mean, ctx.mesh.get_group(axis))
        return mean.div_(ctx.mesh.size()).to(gradient.device), None


def with_mean_gradient(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """The whole of `parameter`, with a gradient that is the mean of the ranks' gradients.

    NotImplementedError for a parameter whose gradients are sums over the ranks: whether this one is
    to be added up depends on the loss.
    """
    if not whole.requires_grad:
        return whole
    if getattr(parameter, SUMS_GRADIENTS, False):
        raise NotImplementedError(
            "full_tensor() of a parameter in a loss has the mean of the ranks' gradients, but "
            "set_gradient_divide_factor() has made the gradients of its module sums. Pass "
            "full_tensor(grad_placements=[Partial()] * parameter.device_mesh.ndim) to add them up, "
            "or [Replicate()] for a term that is the same on all ranks, such as a penalty."
        )
    mean: torch.Tensor = _WithMeanGradient.apply(whole, parameter.device_mesh)  # type: ignore[no-untyped-call]
    return mean


def _rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    strides: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
) -> UnevenDTensor:
    tensor: Any = UnevenDTensor.over(local, mesh, placements, shape, strides)
    if is_parameter:
        return nn.Parameter(tensor, requires_grad)  # type: ignore[return-value]

    return tensor.requires_grad_(requires_grad)  # type: ignore[no-any-return]


def register_dtensor(cls: type[DTensor]) -> None:
    """Makes PyTorch treat a subclass of DTensor as it treats DTensor itself."""
    # `clip_grad_norm_` and optimizers choose operators on lists by the exact types in these.
    # torch.distributed.tensor adds DTensor to them in the same way.
    for supported in (optimizer_foreach_types, utils_foreach_types):
        if cls not in supported:
            supported.append(cls)

    if _dispatches_subclasses():
        return

    # Older versions send every subclass to DTensor's dispatcher in C++. Rules for single operators,
    # as torch.library.register_torch_dispatch makes them, come before it.
    def rule(_: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return cls.__torch_dispatch__(func, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            operator_registry.find(name).torch_dispatch_rules.register(cls, rule)


def _dispatches_subclasses() -> bool:
    """Whether torch calls a DTensor subclass's own `__torch_dispatch__`, as it does since 2.13."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)


register_dtensor(UnevenDTensor)
register_dtensor(CopyOfView)
torch.serialization.add_safe_globals([RowCut, TensorCut, UnevenShard, _rebuild])
