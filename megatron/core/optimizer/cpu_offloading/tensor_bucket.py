"""`TensorBucket`: parameters outside of FSDP groups, of one dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.dtypes import FLOAT_DTYPES
from megatron.core.optimizer.cpu_offloading.bucket import Bucket, Slot, fetch_each, flat_local
from megatron.core.optimizer.state_tensors import TensorWrites, is_rounding, like

_ALIGNMENT = 64  # elements: every parameter starts on a cache line


class TensorBucket(Bucket):
    """Main weights that are copies of the parameters, and follow writes to them."""

    is_delivered = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        main_dtype: torch.dtype,
        use_decoupled_grad: bool = False,
    ) -> None:
        slots, numel = [], 0
        for parameter in parameters:
            slots.append(Slot(parameter, numel, local_tensor(parameter).numel()))
            numel += padded_numel(slots[-1].numel)

        # Decoupled gradients may have other dtypes than parameters: they travel in fp32.
        dtype = parameters[0].dtype
        grad_dtype = torch.float32 if use_decoupled_grad else dtype
        super().__init__(
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            slots,
            numel,
            main_dtype=main_dtype,
            grad_dtype=grad_dtype,
            weight_dtype=dtype,
            accepted_grad_dtypes=FLOAT_DTYPES if use_decoupled_grad else (grad_dtype,),
        )
        self._writes = TensorWrites()

    def adopt(self, owner: object) -> None:
        del owner  # no other optimizer has these arrays
        self.reload()

    def reload(self) -> None:
        for slot in self.slots:
            self._writes.see(slot.parameter)
            slot.of(self.main_weight).copy_(flat_local(slot.parameter))

    def main_weight_loaded(self, index: int) -> None:
        self._writes.see(self.slots[index].parameter)

    def keep_main_weight(self, stepped: Sequence[Slot]) -> None:
        for slot in stepped:
            if self._writes.are_new(slot.parameter):
                self._writes.see(slot.parameter)
                own, given = slot.of(self.main_weight), flat_local(slot.parameter)
                if not is_rounding(given, own):
                    own.copy_(given)

    def fetch(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        fetch_each(self.grad, gradients)

    def send(self, stepped: Sequence[Slot]) -> None:
        for slot in stepped:
            target = local_tensor(slot.parameter).detach()
            target.copy_(slot.of(self.weight).view(target.shape), non_blocking=True)
            # This write must not look like a write of the user.
            self._writes.see(slot.parameter)

    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = self.slots[index]
        return like(slot.parameter, slot.of(flat).view(local_tensor(slot.parameter).shape))


def padded_numel(numel: int) -> int:
    """The elements of each array that a parameter occupies."""
    return math.ceil(numel / _ALIGNMENT) * _ALIGNMENT
