"""What a `torch_dcp` checkpoint holds, as state dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from megatron.core.dist_checkpointing.errors import CheckpointError, few, other_model
from megatron.core.optimizer.torch_optimizer import init_states


class DCPState(Stateful):
    """A model, and optionally its optimizer, as PyTorch DCP wants them: `{"model": ..., "optim":
    ...}` by full names.

    Works for plain modules and for sharded ones, whose tensors stay the DTensors they are: nothing
    is gathered. The state dict aliases the live tensors, so `dcp.load` into it writes in place;
    `load_state_dict` then installs the rest (step counters, parameter groups). An optimizer that
    has not stepped yet gets its states allocated on the way.

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
        init_states(self.optimizer)
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Installs what `state_dict()` gave. With an optimizer, `"optim"` must be there; without,
        it is not read.
        """
        if self.optimizer is None:
            set_model_state_dict(self.model, state_dict["model"])
            return
        if "optim" not in state_dict:
            raise CheckpointError(
                f"Expected a state dict with the optimizer's state, got {sorted(state_dict)} alone."
            )
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def flatten(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys, named as DCP names them; empty dicts vanish."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, name + ".")
        else:
            flat[name] = value
    return flat


def check_tensors(
    path: str, wanted: dict[str, Any], metadata: Metadata, ignored_prefixes: tuple[str, ...]
) -> None:
    """Holds the tensors about to be loaded against a checkpoint's metadata, before anything is
    touched.

    Args:
        path: the checkpoint, for the message.
        wanted: the state dict that will be loaded into.
        metadata: the checkpoint's.
        ignored_prefixes: beginnings of keys that the checkpoint may hold without being asked for
            them.

    Raises:
        CheckpointError: naming every key that is missing, not asked for, or of another shape or
            dtype.
    """
    tensors = {
        key: value for key, value in flatten(wanted).items() if isinstance(value, torch.Tensor)
    }
    saved = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    problems = []
    if missing := [key for key in tensors if key not in saved]:
        problems.append(f"it lacks {few(missing)}")
    if extra := [
        key for key in saved if key not in tensors and not key.startswith(ignored_prefixes)
    ]:
        problems.append(f"the model has no {few(extra)}")
    for key, value in tensors.items():
        if key not in saved:
            continue
        if saved[key].size != value.shape:
            problems.append(
                f"{key} has shape {tuple(saved[key].size)} where the model has {tuple(value.shape)}"
            )
        if saved[key].properties.dtype != value.dtype:
            problems.append(
                f"{key} is {saved[key].properties.dtype} where the model has {value.dtype}"
            )
    if problems:
        raise other_model(path, problems)
