"""The inputs of a planned step, by which a stale plan is noticed before it is carried out.

Planning takes Python dozens of calls for each parameter; seeing that nothing has changed since
takes one. A plan is made while the device still computes the gradients' norm, and hooks run between
that and the step: most only wait for something, but they may also replace gradients and change
options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.te_parity import gradient_of

IDENTITIES = ("params", "param_names")  # what a parameter group has besides options


class StepInputs(NamedTuple):
    """The gradients of all parameters, the options of all groups, a count of writes to states."""

    gradients: list[torch.Tensor | None]
    options: list[dict[str, Any]]
    revision: int

    @classmethod
    def of(
        cls, param_groups: Sequence[Mapping[str, Any]], use_decoupled_grad: bool, revision: int
    ) -> StepInputs:
        """The inputs of the moment.

        Args:
            revision: a number that grows with each step, and when states are loaded.
        """
        gradients = [
            gradient_of(parameter, use_decoupled_grad)
            for group in param_groups
            for parameter in group["params"]
        ]
        options = [
            {name: _snapshot(value) for name, value in group.items() if name not in IDENTITIES}
            for group in param_groups
        ]
        return cls(gradients, options, revision)

    def are_still(self, now: StepInputs) -> bool:
        """Whether gradients are the same tensors, whatever was written to them, and all else is
        equal.
        """
        if (self.revision, self.options) != (now.revision, now.options):
            return False

        # By their ids: comparing tensors would read their elements, on their device.
        return [*map(id, self.gradients)] == [*map(id, now.gradients)]


def _snapshot(option: Any) -> Any:
    """A value that changes when an option does, in place too."""
    if isinstance(option, torch.Tensor):
        # Its value may be on a device, which this thread would have to wait for.
        return id(option), option._version
    return tuple(option) if isinstance(option, list) else option
