"""What a step is planned from, so that a plan which has gone stale is noticed before it is carried out.

Planning takes Python dozens of calls for each parameter; seeing that nothing has changed since takes one. A plan is
made while the device still computes the gradients' norm, and hooks run between that and the step: most only wait for
something, but they may also replace gradients and change options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.gradient_source import gradient_of

_IDENTITIES = ("params", "param_names")  # what a parameter group has besides options


class StepInputs(NamedTuple):
    """The gradients of all parameters, and the options of all groups."""

    gradients: list[torch.Tensor | None]
    options: list[dict[str, Any]]

    @classmethod
    def of(cls, param_groups: Sequence[Mapping[str, Any]], use_decoupled_grad: bool) -> StepInputs:
        """Those of the moment."""
        return cls(
            [gradient_of(parameter, use_decoupled_grad) for group in param_groups for parameter in group["params"]],
            [{name: value for name, value in group.items() if name not in _IDENTITIES} for group in param_groups],
        )

    def are_still(self, now: StepInputs) -> bool:
        """Whether gradients are the same tensors, whatever has been written to them, and options have equal values."""
        # By their ids: tensors that are equal element by element are not meant.
        return self.options == now.options and [*map(id, self.gradients)] == [*map(id, now.gradients)]
