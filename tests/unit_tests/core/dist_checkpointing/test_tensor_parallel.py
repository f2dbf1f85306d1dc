"""Checkpoints of parameters that tensor parallelism divides do not depend on how many ranks divide
them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.fsdp import FsdpContext, OffloadPolicy, fully_shard_optimizer
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_weights import HfExport
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_models import SECTIONS, Model, Way, full, sharded, train
from tests.unit_tests.core.dist_checkpointing.helpers.models import DEVICE, differences
from tests.unit_tests.core.dist_checkpointing.test_zero_collectives import _bytes_of, needs_linux

ITERATION = 2


class Run(NamedTuple):
    way: Way
    model: Model
    context: FsdpContext
    optimizer: FusedAdam | HybridDeviceOptimizer

    def train(self, steps: range) -> None:
        train(self.way, self.model, self.context, self.optimizer, steps=steps)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.synchronize()

    def contents(self) -> Contents:
        ranks = dist.get_rank(), dist.get_world_size()
        return collect(self.model, self.optimizer, rank=ranks[0], world_size=ranks[1])

    def save(self, root: str, export: HfExport | None = None) -> None:
        store, rank = open_store(root), dist.get_rank()
        with CheckpointManager(
            store, DEVICE, rank, dist.get_world_size(), "test", timeout_seconds=600.0
        ) as manager:
            contents = replace(self.contents(), export=export)
            manager.save(ITERATION, contents, {"iteration": ITERATION})
            manager.finish()

    def tensors(self) -> dict[str, Tensor]:
        """All of them, whole, by their keys in a checkpoint."""
        found = {}
        for name, own in self.model.named_parameters():
            states = self.optimizer.state[own]
            named = {f"model.{name}": own}
            named |= {f"optimizer.state.{name}.{state}": value for state, value in states.items()}
            for key, tensor in named.items():
                whole = full(tensor)
                if ".fused." not in key:
                    found[key] = whole
                    continue
                # A counter is that of every section.
                sizes, names = SECTIONS.sizes, SECTIONS.names
                sections = whole.split(sizes) if whole.dim() else [whole] * len(sizes)
                for section, rows in zip(names, sections, strict=True):
                    found[key.replace(".fused.", f".{section}.")] = rows
        return found


def build(way: Way, fraction: float | None, seed: int = 0) -> Run:
    offload = OffloadPolicy(main_weights_on_host=fraction == 1.0)
    model, context = sharded(way, seed, offload)
    optimizer = FusedAdam(model.parameters(), lr=0.05)
    if fraction is not None:
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, lr=0.05)
    fully_shard_optimizer(optimizer, precision_aware=True)
    return Run(way, model, context, optimizer)


def opened(root: str) -> PublishedCheckpoint:
    return PublishedCheckpoint.open(open_store(root), checkpoint_name(ITERATION))


def _save(root: str, way: Way, fraction: float | None) -> dict[str, Tensor]:
    run = build(way, fraction)
    run.train(range(ITERATION))
    run.save(root)
    dist.barrier()
    return run.tensors()


def _load(root: str, way: Way, fraction: float | None) -> dict[str, Tensor]:
    run = build(way, fraction, seed=1)
    checkpoint, contents = opened(root), run.contents()
    load_entries(checkpoint, contents, check_contents(checkpoint, contents))
    tensors = run.tensors()
    run.train(range(ITERATION, ITERATION + 1))
    assert all(own.isfinite().all() for own in run.tensors().values())
    return tensors


OTHERS = [
    (1, Way(1), None),
    (2, Way(2), 0.5),
    (3, Way(1), None),
    (4, Way(4), None),
    (4, Way(2, "optim"), 1.0),
    (4, Way(1, num_instances=2), None),
]


@pytest.mark.parametrize(
    ("num_ranks", "way", "fraction"),
    [
        (4, Way(2), None),
        (4, Way(2), 0.5),
        (4, Way(4), 1.0),
        (4, Way(2, num_instances=2), None),
        (3, Way(1), None),
        *(
            pytest.param(4, Way(2, strategy), fraction, marks=pytest.mark.wide)
            for strategy in SHARDING_STRATEGIES
            for fraction in (None, 0.5)
        ),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_tp_loads_at_any_tp_bit_by_bit(
    tmp_path: Path, num_ranks: int, way: Way, fraction: float | None
) -> None:
    root = str(tmp_path)
    (expected, *_) = run_ranks(num_ranks, _save, root, way, fraction)
    for other_ranks, other, other_fraction in OTHERS:
        for loaded in run_ranks(other_ranks, _load, root, other, other_fraction):
            assert not differences(loaded, expected)


def test_keys_shapes_and_values_do_not_depend_on_tp_and_chunks_are_boxes_of_sections(
    tmp_path: Path,
) -> None:
    expected = {}
    found = []
    for number, tp in enumerate((1, 2, 4)):
        root = str(tmp_path / str(number))
        (expected, *_) = run_ranks(4, _save, root, Way(tp), None)
        tensors = opened(root).index.tensors
        found.append({key: (own.dtype, own.shape) for key, own in tensors.items()})
        chunks = tensors["model.layers.0.scale.weight"].chunks
        assert {chunk.box.sizes[1] for chunk in chunks} == {6}
        # Columns of a row-parallel weight: each rank writes its own.
        widths = {chunk.box.sizes[1] for chunk in tensors["model.layers.0.output.weight"].chunks}
        assert widths == {8 // tp}
    assert found[0] == found[1] == found[2]
    assert {key: tuple(shape) for key, (_, shape) in found[0].items() if key in expected} == {
        key: tuple(own.shape) for key, own in expected.items()
    }


def test_vanilla_dcp_reads_the_whole_tensors(tmp_path: Path) -> None:
    (expected, *_) = run_ranks(4, _save, str(tmp_path), Way(2), None)
    folder = str(tmp_path / checkpoint_name(ITERATION))
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.full(value.size, 77, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if isinstance(value, TensorStorageMetadata) and key in expected
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert not differences(state, expected)


def _save_by_dcp(folder: str, way: Way) -> dict[str, Tensor]:
    run = build(way, None)
    run.train(range(ITERATION))
    dcp.save(get_model_state_dict(run.model), checkpoint_id=folder)
    return {name: full(own) for name, own in run.model.named_parameters()}


def _load_by_dcp(folder: str, way: Way) -> dict[str, Tensor]:
    run = build(way, None, seed=1)
    state = get_model_state_dict(run.model)
    dcp.load(state, checkpoint_id=folder)
    run.model.load_state_dict(state)
    return {name: full(own) for name, own in run.model.named_parameters()}


def test_dcp_saves_and_loads_the_state_dict_of_every_tp(tmp_path: Path) -> None:
    folder = str(tmp_path / "dcp")
    (expected, *_) = run_ranks(4, _save_by_dcp, folder, Way(2))
    for num_ranks, tp in ((1, 1), (2, 2), (4, 4), (3, 1)):
        for loaded in run_ranks(num_ranks, _load_by_dcp, folder, Way(tp)):
            assert not differences(loaded, expected)


def _save_whole(folder: str, way: Way) -> dict[str, Tensor]:
    run = build(way, None)
    run.train(range(ITERATION))
    save_checkpoint(run.model, run.optimizer, folder)
    return run.tensors()


def _load_whole(folder: str, way: Way) -> dict[str, Tensor]:
    run = build(way, None, seed=1)
    load_checkpoint(run.model, run.optimizer, folder)
    return run.tensors()


def test_the_format_of_torch_dcp_has_any_tp(tmp_path: Path) -> None:
    folder = str(tmp_path / "dcp")
    (expected, *_) = run_ranks(4, _save_whole, folder, Way(2))
    for num_ranks, tp in ((1, 1), (2, 2), (4, 4)):
        for loaded in run_ranks(num_ranks, _load_whole, folder, Way(tp)):
            assert not differences(loaded, expected)


def _save_counted(root: str, way: Way, fraction: float | None) -> tuple[int, dict[str, Tensor]]:
    """With the weights in Hugging Face files alone."""
    run = build(way, fraction)
    run.train(range(ITERATION))
    export = HfExport.of(run.model, torch.float32, FolderExtras())
    assert export.is_exact
    num_bytes = _bytes_of(lambda: run.save(root, export))
    dist.barrier()
    return num_bytes, run.tensors()


@needs_linux
@pytest.mark.parametrize("fraction", [None, 0.5])
def test_not_a_byte_is_sent_while_divided_parameters_are_saved_and_exported(
    tmp_path: Path, fraction: float | None
) -> None:
    saved = run_ranks(4, _save_counted, str(tmp_path), Way(2), fraction)
    assert [num_bytes for num_bytes, _ in saved] == [0] * 4
    for num_ranks, tp in ((1, 1), (4, 4)):
        for loaded in run_ranks(num_ranks, _load, str(tmp_path), Way(tp), None):
            assert not differences(loaded, saved[0][1])


def test_every_rank_writes_about_as_many_bytes(tmp_path: Path) -> None:
    """Ranks with the same part of a parameter write equal shares of it."""
    run_ranks(4, _save, str(tmp_path), Way(2, "no_shard"), None)
    written = [0] * 4
    for tensor in opened(str(tmp_path)).index.tensors.values():
        for chunk in tensor.chunks if tensor.key.startswith(("model", "optimizer")) else ():
            if math.prod(tensor.shape) > 1:
                written[chunk.rank] += tensor.chunk_nbytes(chunk)
    assert max(written) - min(written) < max(written) / 4
