"""A sharded model that is saved while it trains, and helpers that delay saves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.save import data_file
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, Stored
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam

CPU = Device("cpu")
DIM = 64  # a rank's part of each matrix is larger than a tensor that a save may copy
SLOT = 5_000  # elements of a slot of streamed states, of the 16,576 of a layer
Parts = dict[str, tuple[tuple[int, ...], torch.Tensor]]  # by key: offsets and this rank's values


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 2 * DIM)
        self.second = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """Three layers, and a matrix before them in the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """A sharded model and its optimizer: plain, or with an offloaded fraction and full overlap."""

    def __init__(self, fraction: float | None, *, with_states: bool = True, **options: Any) -> None:
        self.model = Model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
        with fully_shard_context("cpu"):
            for module in (*self.model.layers, self.model):
                fully_shard(module, mesh, Placements.for_strategy("optim_grads_params"), policy)
        if fraction is None:
            self.optimizer: torch.optim.Optimizer = FusedAdam(self.model.parameters(), **options)
        else:
            overlaps = {"overlap_step_with_forward": True, "fetch_during_backward": True}
            self.optimizer = HybridDeviceOptimizer(
                self.model.parameters(), fraction, **overlaps, **options
            )
        self.with_states = with_states

    def backward(self, number: int) -> float:
        # Before it: early updates begin with this rate.
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        loss = (self.model(torch.randn(4, DIM, generator=generator)) - 1).square().mean()
        loss.backward()
        return loss.item()

    def update(self, grad_scale: float = 1.0) -> None:
        self.optimizer.step(grad_scale=grad_scale)
        self.optimizer.zero_grad()

    def contents(self) -> Contents:
        return collect(
            self.model,
            self.optimizer,
            with_states=self.with_states,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def parts(self) -> Parts:
        """Copies of the current values."""
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.synchronize()
        return parts_of(self.contents())


def parts_of(contents: Contents) -> Parts:
    return {
        entry.key: (entry.offsets, entry.part_of(entry.values.read()).clone())
        for entry in contents.entries
    }


def is_same(parts: Parts, others: Parts) -> bool:
    assert parts.keys() == others.keys()
    return all(torch.equal(value, others[key][1]) for key, (_, value) in parts.items())


def saved_parts(root: Path, iteration: int, like: Parts) -> Parts:
    """This rank's parts in a checkpoint."""
    checkpoint = PublishedCheckpoint.open(LocalStore(root), checkpoint_name(iteration))
    assert set(checkpoint.tensors) == set(like)
    found = {
        key: (offsets, torch.full_like(part, torch.nan)) for key, (offsets, part) in like.items()
    }
    for key, (offsets, part) in found.items():
        checkpoint.read(key, offsets, part)
    return found


SOON = 0.3  # seconds, within which an operation that does not wait would have happened


@contextlib.contextmanager
def saving(
    root: Path, store: LocalStore | None = None, **settings: Any
) -> Iterator[CheckpointManager]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with CheckpointManager(
        store or LocalStore(root), CPU, rank, world_size, "abcd", **settings
    ) as manager:
        yield manager


def hold_entries_back(entries: Sequence[Entry], gate: threading.Event) -> set[str]:
    held = [entry for entry in entries if not entry.is_copied]
    for entry in held:
        entry.values.as_stored = _after(gate, entry.values.as_stored)
    return {entry.key for entry in held}


def _after(gate: threading.Event, read: Callable[[], Stored]) -> Callable[[], Stored]:
    def read_then() -> Stored:
        assert gate.wait(600)
        return read()

    return read_then


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@contextlib.contextmanager
def in_place(is_on: bool = True) -> Iterator[None]:
    """Treats all matrices of a `Training` as large and aligned for direct I/O."""
    with pytest.MonkeyPatch.context() as patch:
        if is_on:
            patch.setattr(data_file, "_IN_PLACE_BYTES", 4096)
            patch.setattr(data_file, "address_of", lambda _: 0)
        yield
