"""The content of a `torch_dcp` checkpoint, as state dicts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.distributed.torch_fsdp2 import reshard
from megatron.core.optimizer.torch_optimizer import init_states, reset_states


class DCPState(Stateful):
    """A model and an optional optimizer for PyTorch DCP: `{"model": ..., "optim": ...}` by name.

    Works for plain modules and for sharded ones, whose tensors stay DTensors and are not gathered.
    The state dict aliases the live tensors, so `dcp.load` into it writes in place;
    `load_state_dict` then installs the rest (step counters, parameter groups). Every parameter in
    the optimizer's groups gets states, including frozen ones, whose saved states must last until
    they are trained again. Leave parameters that are never trained out of the groups.

    Hand it to DCP as it is (`dcp.save({"app": DCPState(model, optimizer)})`) or call the two
    methods.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """`{"model": {name: tensor}}`, and `"optim"` if there is an optimizer."""
        if self.optimizer is None:
            return {"model": get_model_state_dict(self.model)}

        # PyTorch's helper takes empty states for missing ones, and would take a step to make some.
        init_states(self.optimizer)
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Installs what `state_dict()` gave. `"optim"` is needed, and read, for an optimizer."""
        if self.optimizer is None:
            set_model_state_dict(self.model, state_dict["model"])
            return

        if "optim" not in state_dict:
            raise CheckpointError(
                f"Expected a state dict with the optimizer's state, got {sorted(state_dict)} alone."
            )
        names = state_dict["optim"]["state"]
        frozen = [
            parameter
            for name, parameter in self.parameters().items()
            if name in names and not parameter.requires_grad
        ]
        with _unfrozen(frozen):
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optim"],
            )

    @property
    def frozen(self) -> list[str]:
        """The names of the parameters that are frozen."""
        named = self.parameters().items()
        return [name for name, parameter in named if not parameter.requires_grad]

    def reset_states(self, names: Collection[str]) -> None:
        """Resets the optimizer states of parameters, as if they had never been stepped."""
        named = self.parameters()
        if names and self.optimizer is not None:
            reset_states(self.optimizer, [named[name] for name in names])

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters, by their names in state dicts."""
        # After a forward without a backward, a module may show gathered compute weights.
        reshard(self.model)
        return {
            fqn: parameter
            for name, parameter in self.model.named_parameters()
            for fqn in _get_fqns(self.model, name)
        }


@contextmanager
def _unfrozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Unfreezes parameters for the duration of a load."""
    # `set_state_dict` drops the states of frozen parameters, which may be trained again later.
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
