"""`ReplicaDTensor`: a DTensor without a shard, as a flat buffer holds it.

It differs from PyTorch's in two ways:

- Every write moves its version counter. DTensor's operators on lists move none, and compute weights
  and offloaded gradients detect writes by them.
- A parameter's data may be in host memory. The gradients of such main weights are on the device,
  and torch accepts gradients only on the `device` of their parameter. So the parameter's `device`
  is the gradients', while its local tensor is in host memory.

DTensor's operators would give a view of such a parameter the parameter's storage, which torch does
not allow for another device. So operators run on a DTensor whose `device` is that of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map

from megatron.core.distributed.fsdp.collective_history import compare_over
from megatron.core.distributed.fsdp.uneven_dtensor import register_dtensor, with_mean_gradient
from megatron.core.distributed.fsdp.uneven_operators import count_writes
from megatron.core.dtensors import deep_copied, dtensor_over
from megatron.core.issued_collectives import issuing


class ReplicaDTensor(DTensor):
    """A DTensor without a shard. Operators return plain DTensors, on the device of the data."""

    @classmethod
    def of(cls, local: torch.Tensor, spec: DTensorSpec) -> ReplicaDTensor:
        """A DTensor over a local tensor, on its device."""
        return dtensor_over(local, spec, cls=cls)  # type: ignore[return-value]

    @classmethod
    def over(cls, other: DTensor, device: torch.device) -> DTensor:
        """The parameter `other` without a gradient, over the same memory.

        Args:
            device: reported as the parameter's device.
        """
        return dtensor_over(other._local_tensor, other._spec, device, cls)

    def with_local(self, local: torch.Tensor) -> ReplicaDTensor:
        """A DTensor as this one over another local tensor of its shape, strides and dtype."""
        return self.of(local, self._spec)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As `UnevenDTensor`'s."""
        with issuing("all-gather of a whole tensor", self._local_tensor):
            whole = super().full_tensor(grad_placements=grad_placements)
        return whole if grad_placements is not None else with_mean_gradient(whole, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return deep_copied(self, memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a plain DTensor: `torch.load` admits no class of this project. A clone, since pickling
        # a view would save the whole flat buffer with every tensor in it.
        plain: Any = dtensor_over(self._local_tensor.detach().clone(), self._spec)
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @classmethod
    @_disable_dynamo  # as DTensor's
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        stand_ins: dict[int, tuple[ReplicaDTensor, DTensor]] = {}

        def stand_in(value: Any) -> Any:
            if not isinstance(value, ReplicaDTensor):
                return value
            if id(value) not in stand_ins:
                stand_ins[id(value)] = value, dtensor_over(value._local_tensor, value._spec)
            return stand_ins[id(value)][1]

        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.copy_.default and _is_whole(args[1], args[0]):
            # Loading a plain tensor, which every rank has, needs no communication.
            args = (args[0], dtensor_over(args[1], args[0]._spec), *args[2:])
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            # A rank without a gradient would step, while the others take their NaN for an overflow.
            compare_over(args[0])
        result = func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        count_writes(func, args, kwargs)
        if func is torch.ops.aten.detach.default:
            # `nn.Parameter` requires the same class.
            return cls.over(result, args[0].device)

        # An operator that writes to a tensor returns that very tensor.
        originals = {id(plain): own for own, plain in stand_ins.values()}
        return tree_map(lambda value: originals.get(id(value), value), result)


def _is_whole(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a plain tensor has all that each rank holds of a replica."""
    return (
        isinstance(target, ReplicaDTensor)
        and not isinstance(source, DTensor)
        and source.shape == target.shape
        and all(placement.is_replicate() for placement in target.placements)
    )


register_dtensor(ReplicaDTensor)
