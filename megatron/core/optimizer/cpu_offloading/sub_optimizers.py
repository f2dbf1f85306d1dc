"""Read-only views of the parts of a `HybridDeviceOptimizer` as optimizers.

megatron-core's class has a torch optimizer for each side, and programs read states and options from
these. `HybridDeviceOptimizer` updates a bucket in one flat pass; this presents it as a torch
optimizer: its parameters and states are views of the bucket's arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn


class BucketView(torch.optim.Optimizer):
    """What our AdamW updates in a bucket: main weights in host memory, with their states.

    A group for each parameter. The values are from the last finished update; the options are
    copied from the optimizer's groups when the view is created.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], states: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        """`parameters` and `states` share the bucket's memory, one of each for every slot."""
        super().__init__([{"params": [parameter]} for parameter in parameters], {})
        for parameter, own in zip(parameters, states, strict=True):
            self.state[parameter] = dict(own)

    def step(self, closure: Any = None) -> NoReturn:  # noqa: ARG002
        """RuntimeError: both sides step together."""
        raise _refusal("step")

    def load_state_dict(self, state_dict: Any) -> NoReturn:  # noqa: ARG002
        """RuntimeError: states are loaded for both sides together."""
        raise _refusal("load_state_dict")

    def register_step_pre_hook(self, hook: Any) -> NoReturn:  # noqa: ARG002
        """Raises RuntimeError: the hook would never be called."""
        raise _refusal("register_step_pre_hook")

    def register_step_post_hook(self, hook: Any) -> NoReturn:  # noqa: ARG002
        """Raises RuntimeError: the hook would never be called."""
        raise _refusal("register_step_post_hook")


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"Call {name} on the HybridDeviceOptimizer; this is a read-only view of part of its host "
        "side."
    )
