"""The saved and loaded state, in this project's layout and as DTensors for DCP."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.helpers.checkpoint.known_values import Part, fill
from benchmarks.helpers.models import OFFLOADED, llama_config, on_meta, shard
from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.index import build_index
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.mesh import build_mesh


class State:
    """The model with its optimizer; and the same values in DTensors for DCP."""

    def __init__(
        self, arguments: argparse.Namespace, device: Device, rank: int, world_size: int
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.model = on_meta(llama_config(arguments.layers, arguments.hidden), arguments.vocabulary)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        mesh = build_mesh(device.kind, world_size)
        built = shard(self.model, mesh, device, OFFLOADED, num_local_ranks=world_size)
        assert built is not None, "it was asked for"
        self.optimizer = built.optimizer

        contents = self.contents()
        self.parts = []
        for entry in contents.entries:
            if entry.saved_as.shape:
                row = int(np.prod(entry.saved_as.shape[1:]))
                self.parts.append(
                    Part(entry.key, entry.offsets[0] * row, entry.part_of(entry.values.target()))
                )
        self.even_parts: list[Part] = []
        self.even = self._even(contents, mesh)

        index = build_index("", [entry.saved_as for entry in contents.entries], {}, rank)
        self.file_nbytes = max(
            chunk.offset + tensor.chunk_nbytes(chunk)
            for tensor in index.tensors.values()
            for chunk in tensor.chunks
        )
        fill((*self.parts, *self.even_parts))

    def contents(self) -> Contents:
        return collect(self.model, self.optimizer, rank=self.rank, world_size=self.world_size)

    def _even(self, contents: Contents, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for entry in contents.entries:
            shape = torch.Size(entry.saved_as.shape)
            if not shape:
                state[entry.key] = entry.values.read().clone()
                continue
            sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, [Shard(0)])
            local = torch.empty(sizes)
            strides = torch.empty(shape, device="meta").stride()
            state[entry.key] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
            )
            self.even_parts.append(Part(entry.key, offsets[0] * strides[0], local))
        return state
