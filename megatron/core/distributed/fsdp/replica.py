"""`ReplicaDTensor`: a replicated parameter whose data may be in host memory.

Main weights that an optimizer keeps in host memory have their gradients on the device, and torch
accepts gradients only on the device that a parameter says it is on. So the parameter says the
device, while its local tensor is elsewhere.

DTensor's operators would give a view of such a parameter the parameter's own storage, and torch
refuses to give a tensor on one device a storage on another. So operators run on a DTensor that says
where the data is. (`UnevenDTensor` has operators of its own.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from megatron.core.distributed.fsdp.aliases import dtensor_over
from megatron.core.dtensors import deep_copied


class ReplicaDTensor(DTensor):
    """A DTensor without a shard. Operators return plain DTensors, on the device of the data."""

    @classmethod
    def over(cls, other: DTensor, device: torch.device) -> DTensor:
        """The parameter `other` without a gradient, over the same memory.

        Args:
            device: where it says it is.
        """
        return dtensor_over(other._local_tensor, other._spec, device, cls)

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

        result = func(*tree_map(stand_in, args), **tree_map(stand_in, dict(kwargs or {})))
        if func is torch.ops.aten.detach.default:
            # `nn.Parameter` asks for the same class.
            return cls.over(result, args[0].device)

        # An operator that writes to a tensor returns that very tensor.
        originals = {id(plain): own for own, plain in stand_ins.values()}
        return tree_map(lambda value: originals.get(id(value), value), result)
