"""`save_checkpoint` and `load_checkpoint`: model and optimizer in one directory, for any loop.

    save_checkpoint(model, optimizer, "runs/mine/10")
    load_checkpoint(model, optimizer, "runs/mine/10")  # on any number of ranks

Megatron-FSDP's experimental interface has the same names and arguments. The directory has PyTorch
DCP's format, as `dcp.save({"model": ..., "optimizer": ...})` writes it and `dcp.load` reads it. In
addition, it appears whole or not at all, and loading never runs code that a checkpoint contains.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.agreement import on_all_ranks
from megatron.core.dist_checkpointing.dcp import torch_dcp
from megatron.core.dist_checkpointing.dcp.torch_dcp import TorchDcpCheckpoint, dcp_param_groups
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.param_groups import install_options, match_param_groups
from megatron.core.dist_checkpointing.store import LocalStore, expect_folder
from megatron.core.optimizer.state_loading import kept_options


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Saves a model and its optimizer. Called by all ranks together.

    Args:
        model: sharded by any engine, or plain.
        optimizer: over its parameters. Missing states are allocated, as by PyTorch's helpers.
        checkpoint_dir: the directory to create; if it exists, it must be empty.

    Raises:
        ValueError: for a path without a name, such as ".".
        CheckpointError: on every rank, if any rank could not write; the directory then does not
            exist.
    """
    folder = Path(checkpoint_dir)
    if folder.name in ("", ".."):
        raise ValueError(
            f"Expected the path of a new directory, got {os.fspath(checkpoint_dir)!r}."
        )

    torch_dcp.save_checkpoint(
        folder.parent, 0, _state(DCPState(model, optimizer)), None, name=folder.name
    )


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
) -> None:
    """Loads a checkpoint of `save_checkpoint`, in place. Called by all ranks together.

    Weights, states and the optimizer's options take the checkpoint's values; compute weights follow
    when they are used next. Options that choose an implementation (`fused`) are kept.

    Args:
        model, optimizer: built as when they were saved; sharding and number of ranks may differ,
            and so may the set of frozen parameters. Parameters that the checkpoint's optimizer did
            not train start with fresh states; a line of the log names them.
        checkpoint_dir: the checkpoint's directory.
        sync_model_weights: must be True: compute weights always follow.

    Raises:
        NotImplementedError: for `sync_model_weights=False`.
        CheckpointNotFoundError: if there is no such directory.
        CheckpointError: naming every key that is missing, unexpected or of another shape or dtype,
            before anything is changed; CheckpointDamagedError for files that changed after the
            save.
    """
    if not sync_model_weights:
        raise NotImplementedError(
            "Expected sync_model_weights=True, since compute weights are made of the main weights "
            "when they are used next, got False."
        )
    folder = Path(checkpoint_dir)
    app = DCPState(model, optimizer)
    state = _state(app)

    # Ranks divide the checks among them; each then reads its shards.
    is_shared = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)

    def checked() -> TorchDcpCheckpoint:
        store = LocalStore(folder.parent)
        expect_folder(store, folder.name)
        checkpoint = TorchDcpCheckpoint.open(store, folder.name)
        checkpoint.check(rank=rank, world_size=world_size)
        torch_dcp.check_steps(checkpoint)
        return checkpoint

    checkpoint = on_all_ranks(checked)
    own_groups = state["optimizer"].pop("param_groups")
    options = on_all_ranks(lambda: _options(checkpoint, app, optimizer, state))
    # From here on tensors change in place; all checks that can reject the checkpoint are done.
    frozen = [f"model.{name}" for name in app.frozen]
    changes = torch_dcp.load_tensors(checkpoint, state, ("optimizer.param_groups.",), frozen)
    optim = {**state["optimizer"], "param_groups": own_groups}
    app.load_state_dict({"model": state["model"], "optim": optim})
    app.reset_states(changes.fresh)
    install_options(optimizer, options)


def _options(
    checkpoint: TorchDcpCheckpoint,
    app: DCPState,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> list[dict[str, Any]]:
    """The saved options of each group, as far as the optimizer has them."""
    fresh = torch_dcp.frozen_changes(checkpoint, state).fresh
    names: dict[torch.Tensor, list[str]] = {
        parameter: [name] for name, parameter in app.parameters().items() if name not in fresh
    }
    known = {
        option for group in optimizer.param_groups for option in group.keys() - kept_options(group)
    }
    saved = [
        {option: value for option, value in group.items() if option in known}
        for group in dcp_param_groups(checkpoint)
    ]
    return match_param_groups(optimizer, names, saved)


def _state(app: DCPState) -> dict[str, Any]:
    # PyTorch's examples call it "optim"; Megatron-FSDP's checkpoints have "optimizer".
    own = app.state_dict()
    return {"model": own["model"], "optimizer": own["optim"]}
