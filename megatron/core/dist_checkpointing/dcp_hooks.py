"""Which part of a tensor a rank holds, said in DCP's words.

DCP takes the shards of a DTensor to be even. Those over flat buffers are whole rows, but as many as the layout says; a
DTensor's local tensor may tell DCP so itself, through methods that DCP looks for on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.gradients import local_tensor
from megatron.core.distributed.fsdp.parameter_group import group_of


def describe_shards(model: nn.Module, weights: Mapping[str, Any], states: Any) -> None:
    """Lets the DTensors that belong to `model`'s sharded parameters tell DCP which rows they hold.

    Parameters that are not over a flat buffer, and what has another shape than its parameter, are left as they are.

    Args:
        weights: {parameter's name: tensor}.
        states: {parameter's name: {state's name: tensor or else}}, the optimizer's.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = group_of(parameter)
        if group is not None:
            first_row = group.main_weight.chunk(group.index_of(parameter)).first_row
            for tensor in (weights.get(name), *states.get(name, {}).values()):
                if isinstance(tensor, DTensor) and tensor.shape == parameter.shape:
                    describe(tensor, (first_row, *[0] * (tensor.dim() - 1)))


def describe(tensor: DTensor, begin: Sequence[int]) -> None:
    """Attaches DCP's methods to the local tensor, which holds the chunk that begins there; maybe nothing."""
    local = local_tensor(tensor)
    offsets = torch.Size(begin)
    chunks = [ChunkStorageMetadata(offsets, local.shape)] if local.numel() else []
    size, properties = tensor.size(), TensorProperties.create_from_tensor(local)

    def create_write_items(fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in chunks
        ]

    # Not the third that DCP looks for, `__get_tensor_shard__`: DCP copies tensors with their attributes, and a copy
    # must not answer for the original. Without it a DTensor answers with its local tensor, which is right for both.
    for name, method in (("__create_chunk_list__", lambda: chunks), ("__create_write_items__", create_write_items)):
        setattr(local, name, method)
