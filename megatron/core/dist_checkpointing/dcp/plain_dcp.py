"""Weights and an optimizer's options from a directory that another program wrote with PyTorch DCP.

Programs choose their own keys. So weights are found by the names of the model's parameters,
whatever prefix they have in the folder:

    dcp.save({"model": model.state_dict()})          model.layers.0.weight
    dcp.save(model.state_dict())                     layers.0.weight
    dcp.save({"app": AppState(model, optimizer)})    app.model.layers.0.weight, app.optim.state....
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from megatron.core.dist_checkpointing.dcp.dcp_checkpoint import TorchDcpCheckpoint
from megatron.core.dist_checkpointing.dcp.torch_dcp import load_tensors
from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.param_groups import check_param_groups

MODEL_PREFIX = "model."  # the usual one, and that of our checkpoints

# Keys that stay unread if weights have no prefix. With a prefix, all other keys do.
_OTHERS = ("optim.", "optimizer.", "rng.")
_OPTION_KEY = re.compile(r"optim(?:izer)?\.param_groups\.(\d{1,9})\.(.+)")


def load_model_weights(checkpoint: TorchDcpCheckpoint, model: nn.Module) -> None:
    """Loads a model's weights and buffers in place from a directory that DCP wrote.

    Args:
        model: sharded or plain; every rank of its process group calls this.

    Raises:
        CheckpointError: before anything is changed, if weights are missing, if the model does not
            have all weights under the prefix, or if shapes or dtypes differ.
    """
    app = DCPState(model)
    own = app.state_dict()["model"]
    prefix = _prefix(checkpoint, own)
    others: tuple[str, ...] = _OTHERS
    if prefix:
        others = tuple(key for key in checkpoint.keys if not key.startswith(prefix))

    # The tensors are the model's own memory. Plain data, of extra states, comes back in the dict.
    wanted = {f"{prefix}{name}": value for name, value in own.items()}
    load_tensors(checkpoint, wanted, others, [f"{prefix}{name}" for name in app.frozen])
    app.load_state_dict({"model": {name: wanted[f"{prefix}{name}"] for name in own}})


def weight_keys(checkpoint: TorchDcpCheckpoint, model: nn.Module) -> set[str]:
    """The keys that `load_model_weights` would read. Raises the same errors for missing weights."""
    own = DCPState(model).state_dict()["model"]
    return {f"{_prefix(checkpoint, own)}{name}" for name in own}


def _prefix(checkpoint: TorchDcpCheckpoint, own: Collection[str]) -> str:
    return weights_prefix(own, checkpoint.keys, checkpoint.path)


def weights_prefix(names: Collection[str], keys: Sequence[str], path: str) -> str:
    """The prefix of a model's weights in the keys: "model.", "app.model.", "".

    If no prefix has all names, it is the one with most of them, so the missing ones can be named.
    Of several with equally many, it is `model.`.

    Args:
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: if no prefix has any of the names, or if several have equally many and none
            of them is `model.`.
    """
    known = set(names)
    # A key counts for every prefix that leaves a name of the model.
    found: Counter[str] = Counter()
    for key in keys:
        starts = [0, *(match.end() for match in re.finditer(r"\.", key))]
        found.update(key[:start] for start in starts if key[start:] in known)
    if not found:
        raise CheckpointError(
            f"Expected the weights of this model in {path}, as {MODEL_PREFIX}<name> or under any "
            f"other prefix, got {few(list(keys)) or 'nothing'}, where the model has "
            f"{few(list(names))}."
        )

    most = max(found.values())
    best = [prefix for prefix, number in found.items() if number == most]
    if MODEL_PREFIX in best:
        return MODEL_PREFIX
    if len(best) > 1:
        raise CheckpointError(
            f"Expected the weights of this model under one prefix in {path}, got {most} of its "
            f"{len(known)} names under each of {few([repr(prefix) for prefix in sorted(best)])}."
        )
    return best[0]


def dcp_param_groups(checkpoint: ReadableCheckpoint) -> list[dict[str, Any]]:
    """The parameter groups in a checkpoint that PyTorch DCP wrote:
    `optim.param_groups.<number>.<option>`, or `optimizer.param_groups...`.

    Raises:
        CheckpointError: for missing or wrong parameter groups.
    """
    groups: dict[int, dict[str, Any]] = {}
    for key in [*checkpoint.plain, *checkpoint.tensors]:
        match = _OPTION_KEY.fullmatch(key)
        if match is None:
            continue
        group, tensor = groups.setdefault(int(match[1]), {}), checkpoint.tensors.get(key)
        if tensor is None:
            group[match[2]] = checkpoint.read_plain(key)
        elif (whole := Box.whole(tensor.shape)).numel == 1:
            # A learning rate that an optimizer keeps on the device, for example.
            group[match[2]] = read_piece(checkpoint, key, whole).item()
    if not groups:
        raise CheckpointError(f"Expected parameter groups in {checkpoint.path}, got none.")
    return check_param_groups([groups[number] for number in sorted(groups)], checkpoint.path)
