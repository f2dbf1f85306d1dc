"""Tells DCP which part of a plain DTensor a rank holds.

DCP assumes that the shards of a DTensor are even. Those of a section of an evenly sharded tensor
are not; the local tensor tells DCP so, through methods that DCP looks for on it. (Tensors over flat
buffers need no help, see `UnevenDTensor`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.uneven_dtensor import write_items
from megatron.core.dtensors import local_tensor


def describe(tensor: DTensor, begin: Sequence[int]) -> None:
    """Attaches DCP's methods to the local tensor, which holds the chunk beginning at `begin`."""
    local = local_tensor(tensor)
    offsets = torch.Size(begin)
    chunks = [ChunkStorageMetadata(offsets, local.shape)] if local.numel() else []

    def create_write_items(fqn: str, _: Any) -> list[WriteItem]:
        return write_items(fqn, local, chunks, tensor.size())

    # DCP looks for a third method, `__get_tensor_shard__`. It must stay away: DCP copies tensors
    # with their attributes, and a copy would then return the original. Without it a DTensor returns
    # its local tensor, which is right for both.
    for name, method in (
        ("__create_chunk_list__", lambda: chunks),
        ("__create_write_items__", create_write_items),
    ):
        setattr(local, name, method)
