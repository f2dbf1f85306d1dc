"""Converts the arguments of PyTorch FSDP2.

Code written for `torch.distributed.fsdp.fully_shard` passes that package's policies. Settings that
mean the same here are converted, including the casts of inputs and outputs. Other settings raise an
error that suggests a replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch._compile import _disable_dynamo

from megatron.core.distributed.fsdp.nested_tensors import cast_floats
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy

# Arguments of FSDP2 that are not here, with what to do instead.
_INSTEAD = {
    "shard_placement_fn": "Rows are cut by the layout of the module's flat buffer.",
    "ignored_params": "Keep such parameters in a module outside of the sharded one.",
    "dp_mesh_dims": "Pass the data-parallel mesh, or Placements(dp_axes=...) with names of axes.",
}


def check_arguments(
    reshard_after_forward: bool | None,
    grad_divisor: float,
    not_offered: Mapping[str, Any],
) -> None:
    """Rejects unsupported arguments of `fully_shard`, as FSDP2 defines them, and a bad divisor.

    Raises:
        NotImplementedError: for an argument of FSDP2, among them a number of ranks between which
            weights would stay cut.
        TypeError: for an argument of neither.
        ValueError: for a divisor that is not positive.
    """
    for name, value in not_offered.items():
        if name not in _INSTEAD:
            raise TypeError(f"fully_shard() got an unexpected keyword argument {name!r}")
        ignores_nothing = name == "ignored_params" and not value
        if value is not None and not ignores_nothing:
            raise NotImplementedError(
                f"Expected fully_shard without {name}, got a {type(value).__name__}. "
                f"{_INSTEAD[name]}"
            )

    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            "Expected reshard_after_forward to be True, False or None, got "
            f"{reshard_after_forward!r}: weights are freed or kept as a whole."
        )
    if not grad_divisor > 0:
        raise ValueError(f"Expected a positive grad_divisor, got {grad_divisor}.")


def own_offload_policy(policy: OffloadPolicy | fsdp2.OffloadPolicy | None) -> OffloadPolicy:
    """The policy as an `OffloadPolicy`.

    Raises:
        NotImplementedError: for FSDP2's `CPUOffloadPolicy`, with which any optimizer steps in host
            memory.
        TypeError: for something else.
    """
    if isinstance(policy, fsdp2.CPUOffloadPolicy):
        raise NotImplementedError(
            "Expected OffloadPolicy(main_weights_on_host=True) of megatron.core.distributed.fsdp "
            "together with HybridDeviceOptimizer(model.parameters(), offload_fraction=1.0), got "
            f"{policy}."
        )
    # The base class means no offload.
    if policy is None or isinstance(policy, fsdp2.OffloadPolicy):
        return OffloadPolicy()
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(f"Expected an OffloadPolicy, got {type(policy).__name__}.")
    return policy


@dataclass(frozen=True)
class PrecisionPolicies:
    """The policy passed to `fully_shard`: a `MixedPrecisionPolicy`, or the one of FSDP2.

    FSDP2 keeps sharded weights and their gradients in the dtype in which parameters come, computes
    in `param_dtype`, reduces gradients in `reduce_dtype`, and casts inputs and outputs. One thing
    differs: sums over microbatches are kept in the parameters' dtype, while FSDP2 keeps sums
    that are not reduced yet in `reduce_dtype`. With 16-bit parameters, they are rounded more often
    here.

    Attributes:
        own: this project's policy; None if FSDP2's was passed.
        theirs: the policy of FSDP2; None if it was not passed.
    """

    own: MixedPrecisionPolicy | None
    theirs: fsdp2.MixedPrecisionPolicy | None

    @classmethod
    def of(
        cls,
        policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None,
        mp_policy: MixedPrecisionPolicy | fsdp2.MixedPrecisionPolicy | None,
    ) -> PrecisionPolicies:
        """The one that was given, under either name.

        Raises:
            ValueError: for two.
            TypeError: for something else.
        """
        if policy is not None and mp_policy is not None:
            raise ValueError(
                f"Expected mixed_precision_policy or mp_policy, got both, {policy} and {mp_policy}."
            )

        given = policy if mp_policy is None else mp_policy
        if given is None:
            return cls(MixedPrecisionPolicy(), None)
        if isinstance(given, fsdp2.MixedPrecisionPolicy):
            return cls(None, given)
        if not isinstance(given, MixedPrecisionPolicy):
            raise TypeError(f"Expected a MixedPrecisionPolicy, got {type(given).__name__}.")
        return cls(given, None)

    def for_dtype(self, dtype: torch.dtype) -> MixedPrecisionPolicy:
        """Our policy for parameters that come in `dtype`."""
        if self.theirs is None:
            assert self.own is not None, "one of the two was given"
            return self.own

        # This project's policy would keep fp32 main weights of 16-bit parameters.
        compute_dtype = self.theirs.param_dtype or dtype
        return MixedPrecisionPolicy(
            main_params_dtype=dtype,
            main_grads_dtype=dtype,
            grad_comm_dtype=self.theirs.reduce_dtype or compute_dtype,
            compute_dtype=compute_dtype,
            # Rounded to the compute dtype, a base model under adapters would be saved so.
            frozen_params_dtype=dtype,
        )

    def inputs(self, values: Any) -> Any:
        """Inputs of a module, cast if FSDP2's policy casts them."""
        is_cast = self.theirs is not None and self.theirs.cast_forward_inputs
        dtype = self.theirs.param_dtype if self.theirs is not None and is_cast else None
        return values if dtype is None else cast_floats(values, dtype)

    def outputs(self, output: Any) -> Any:
        """Outputs of a module, cast if FSDP2's policy casts them."""
        dtype = None if self.theirs is None else self.theirs.output_dtype
        return output if dtype is None else cast_floats(output, dtype)

    def cast_inputs(self, module: nn.Module) -> None:
        """Has the inputs of the module's forward cast."""
        if self.theirs is None:
            return

        @_disable_dynamo  # as FSDP2's hooks are
        def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return self.inputs(args), self.inputs(kwargs)

        module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)

    def cast_outputs(self, module: nn.Module) -> None:
        """Has the outputs of the module's forward cast."""
        if self.theirs is None:
            return

        @_disable_dynamo
        def cast(_: nn.Module, __: Any, output: Any) -> Any:
            return self.outputs(output)

        module.register_forward_hook(cast)
