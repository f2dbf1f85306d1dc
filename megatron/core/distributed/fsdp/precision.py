"""The dtypes in which weights and gradients are kept, computed with and sent, and the device of
main weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.host_keeper import KeptMemory

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a module's compute weights, main weights and gradients. Buffers keep their
    dtypes.

    Attributes:
        main_params_dtype: of the main weights, which the optimizer updates; None: the compute
            weights' own.
        main_grads_dtype: of the gradients that the optimizer reads, and of their sums over
            microbatches; None: the compute weights' own.
        grad_comm_dtype: in which gradients are reduced over ranks; None: fp32 where an
            accelerator's backend adds them up, main_grads_dtype elsewhere. On the CPU gradients
            travel in this dtype or in the compute weights', whichever is narrower, and are always
            added in fp32.
        compute_dtype: of the weights in forward and backward; None: that of the module's
            parameters. Main weights are made of the parameters as they are.
        frozen_params_dtype: of the main weights of parameters that need no gradient, which no
            optimizer updates; None: the compute weights' own.
        gathers_codes: trained weights of layers with a low-precision recipe are kept and gathered
            as codes of its format, quantized after each update. Needs fp32 main weights.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    frozen_params_dtype: torch.dtype | None = None
    gathers_codes: bool = False

    def __post_init__(self) -> None:
        for name, dtype in self._dtypes.items():
            if dtype is not None and dtype not in _FLOATING:
                raise ValueError(f"Expected {name} to be None or one of {_FLOATING}, got {dtype}.")
        if self.gathers_codes and self.main_params_dtype != torch.float32:
            raise ValueError(
                "Expected fp32 main weights with gathers_codes, got main_params_dtype="
                f"{self.main_params_dtype}: codes cannot be updated."
            )

    @property
    def _dtypes(self) -> dict[str, torch.dtype | None]:
        return {name: value for name, value in vars(self).items() if name != "gathers_codes"}

    def resolve(self, dtype: torch.dtype, *, adds_on_device: bool = False) -> MixedPrecisionPolicy:
        """This policy with every dtype filled in, for parameters of `dtype`.

        TypeError if that is not a float.

        Args:
            adds_on_device: see `GroupPlan`.
        """
        if dtype not in _FLOATING:
            raise TypeError(f"Expected parameters of one of the dtypes {_FLOATING}, got {dtype}.")

        # Each default follows the one before: parameters -> compute weights -> main gradients ->
        # communication.
        compute_dtype = self.compute_dtype or dtype
        main_grads = self.main_grads_dtype or compute_dtype
        comm_dtype = main_grads
        if adds_on_device:
            # A ring rounds at every hop; see docs/decisions/0052-gradients-sent-in-fp32.md.
            comm_dtype = torch.promote_types(main_grads, torch.float32)
        return MixedPrecisionPolicy(
            main_params_dtype=self.main_params_dtype or compute_dtype,
            main_grads_dtype=main_grads,
            grad_comm_dtype=self.grad_comm_dtype or comm_dtype,
            compute_dtype=compute_dtype,
            frozen_params_dtype=self.frozen_params_dtype or compute_dtype,
            gathers_codes=self.gathers_codes,
        )

    def at_least_fp32(self) -> MixedPrecisionPolicy:
        """This policy, which must be resolved, with fp32 instead of every 16-bit dtype."""
        narrow = [
            name
            for name, dtype in self._dtypes.items()
            if dtype is not None and dtype.itemsize < torch.float32.itemsize
        ]
        changes: dict[str, Any] = dict.fromkeys(narrow, torch.float32)
        return dataclasses.replace(self, **changes)


def known(dtype: torch.dtype | None) -> torch.dtype:
    """A dtype of a resolved policy."""
    assert dtype is not None, "the policy is resolved"
    return dtype


@dataclass(frozen=True)
class OffloadPolicy:
    """Where tensors are that only the optimizer needs.

    Attributes:
        main_weights_on_host: main weights are in host memory from the start, even if they have the
            compute weights' dtype. The optimizer that updates them there, `HybridDeviceOptimizer`,
            copies the compute weights to the device.
        pin_memory: they are in page-locked memory: for an optimizer that streams them through the
            device.
        kept: where their memory comes from, if it is to survive the process. If it does so with
            its contents, they are not initialized.
    """

    main_weights_on_host: bool = False
    pin_memory: bool = False
    kept: KeptMemory | None = None
