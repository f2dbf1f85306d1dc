"""Ranks that write one directory together: the bytes of an export by a single process for each kind
of sharding, and no files if a rank fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.layout.holdings import Division, shares
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpoint import hf_layout
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.checkpoint.hf_weights import save_hf
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import Operation, watched
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    HSDP,
    Setting,
    Trained,
    data_parallel,
)
from tests.unit_tests.training.helpers.hf_folders import CPU, QWEN3, VOCAB, digests, names_in

DTYPES = {"fp32": torch.float32, "default": None}
SHARD_BYTES = 9000  # several files in either dtype
FSDP2, PLAIN = "torch_fsdp2", "plain"


# Equal to an export


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The export of a checkpoint of the same weights by one process, by the name of the dtype."""
    root = tmp_path_factory.mktemp("exports")
    model = GPTModel(QWEN3, VOCAB)
    materialize(model, "cpu", 0)
    store = LocalStore(root)
    with CheckpointManager(store, CPU, 0, 1, "0" * 16) as manager:
        manager.save(1, collect(model), {}, name="own")
        manager.finish()
    for name, dtype in DTYPES.items():
        export_hf(
            open_checkpoint(store, "own"),
            root / name,
            ModelDescription(QWEN3, VOCAB),
            dtype=dtype,
            max_shard_bytes=SHARD_BYTES,
        )
    return {name: digests(root / name) for name in DTYPES}


def gpt(kind: str, fraction: float | None) -> nn.Module:
    """The same weights, sharded over all ranks."""
    if kind == PLAIN:
        model = GPTModel(QWEN3, VOCAB)
        materialize(model, "cpu", 0)
        return model
    with torch.device("meta"):
        model = GPTModel(QWEN3, VOCAB)
    if kind == FSDP2:
        torch_fsdp2.shard_model(
            model,
            build_mesh("cpu", dist.get_world_size()),
            compute_dtype=torch.bfloat16,
            reshard_after_forward=True,
        )
        materialize(model, "cpu", 0)
        return model
    setting = Setting(kind, fraction, compute_dtype=torch.bfloat16)
    return Trained(setting, seed=0, model=model).model


def save_all(folder: Path, cases: list[tuple[str, float | None]]) -> None:
    for number, (kind, fraction) in enumerate(cases):
        model = gpt(kind, fraction)
        for name, dtype in DTYPES.items():
            target = folder / f"{number} {name}"
            save_hf(model, target, CPU, dtype=dtype, max_shard_bytes=SHARD_BYTES)


SHARDED: list[tuple[str, float | None]] = [
    ("optim", None),
    ("optim_grads", None),
    ("optim_grads_params", None),
    ("optim_grads_params", 0.5),
    ("optim", 1.0),
]
CASES = {
    1: [("optim_grads_params", None)],
    2: [*SHARDED, (FSDP2, None), (PLAIN, None)],
    3: [("optim_grads_params", 0.5), (FSDP2, None)],
    4: [(HSDP, None), (HSDP, 1.0)],
}


@pytest.mark.parametrize("world_size", CASES)
def test_files_are_those_that_one_process_exports(
    tmp_path: Path, exported: dict[str, dict[str, str]], world_size: int
) -> None:
    cases = CASES[world_size]
    run_ranks(world_size, save_all, tmp_path, cases)
    assert names_in(tmp_path) == sorted(f"{n} {name}" for n in range(len(cases)) for name in DTYPES)
    for number in range(len(cases)):
        for name, expected in exported.items():
            assert digests(tmp_path / f"{number} {name}") == expected, cases[number]

    assert exported["default"] != exported["fp32"]
    assert all("model.safetensors.index.json" in found for found in exported.values())


# Columns


def save_columns(folder: Path) -> None:
    model = nn.Linear(6, 7)
    with torch.no_grad():
        model.weight.copy_(torch.arange(42.0).view(7, 6))
    torch_fully_shard(
        model,
        mesh=build_mesh("cpu", dist.get_world_size()),
        shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1),
    )
    save_hf(model, folder, CPU, dtype=torch.float32)


def test_columns_are_written_to_their_offsets(tmp_path: Path) -> None:
    run_ranks(3, save_columns, tmp_path / "net")
    found = load_file(tmp_path / "net" / "model.safetensors")
    assert torch.equal(found["weight"], torch.arange(42.0).view(7, 6))


# Errors


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_a_rank_without_access_to_the_files_is_one_error_on_all(tmp_path: Path) -> None:
    """A relative path is another directory for each rank here, as /tmp is on several machines."""

    def save() -> str:
        own = tmp_path / str(dist.get_rank())
        own.mkdir()
        with working_in(own), pytest.raises(CheckpointError) as caught:
            save_hf(gpt("optim_grads_params", None), "gpt", CPU)
        dist.barrier()
        assert names_in(own) == []
        return str(caught.value)

    zero, one = run_ranks(2, save)
    assert "every rank to see" in one
    assert zero == f"rank 1: {one}"


def test_a_rank_that_cannot_write_is_one_error_on_all_and_leaves_no_files(tmp_path):
    def save(failing: int, what: str, name: str) -> str:
        def before(operation: Operation) -> None:
            is_it = operation.what == what and operation.path.name.endswith(name)
            if dist.get_rank() == failing and is_it:
                raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

        with watched(tmp_path, before), pytest.raises(CheckpointError) as caught:
            save_hf(gpt("optim_grads_params", None), tmp_path / "gpt", CPU)
        return str(caught.value)

    for failing, what, name in (
        (0, "mkdir", ".writing"),
        (0, "write", "model.safetensors"),
        (1, "write", "model.safetensors"),
        (1, "fsync", "model.safetensors"),
        (0, "write", "config.json"),
    ):
        for error in run_ranks(2, save, failing, what, name):
            assert "No space left on device" in error
        assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"dtype": torch.float32}, {"dtype": torch.bfloat16}),
        ({"max_shard_bytes": 10**9}, {"max_shard_bytes": 8000}),
    ],
)
def test_ranks_with_different_arguments_write_no_files(tmp_path, options, others):
    def save() -> str:
        asked = options if dist.get_rank() == 0 else others
        with pytest.raises(CheckpointError) as caught:
            save_hf(gpt("optim_grads_params", None), tmp_path / "gpt", CPU, **asked)
        return str(caught.value)

    for error in run_ranks(2, save):
        assert "the same tensors, dtypes and shard size on all ranks, got " in error
        assert " bytes (" in error
    assert names_in(tmp_path) == []


def test_rows_that_no_rank_holds_are_not_published_as_zeros(tmp_path):
    def save() -> str:
        def without_the_first(*arguments: Any) -> Any:
            first, *others = shares(*arguments)
            # Rank 1 leaves one out.
            return [Division.of([]) if dist.get_rank() else first, *others]

        with (
            mock.patch.object(hf_layout, "shares", without_the_first),
            pytest.raises(CheckpointError) as caught,
        ):
            save_hf(gpt("optim_grads_params", None), tmp_path / "gpt", CPU)
        return str(caught.value)

    one, two = run_ranks(2, save)
    assert one == two
    assert "bytes of weights, got" in one
    assert names_in(tmp_path) == []


@pytest.mark.sim
def test_weights_on_a_device_are_written_as_from_the_host(
    tmp_path: Path, exported: dict[str, dict[str, str]]
) -> None:
    run_ranks(2, partial(_save_on_device, tmp_path), device="sim")
    for name in DTYPES:
        assert digests(tmp_path / name) == exported[name]


def _save_on_device(folder: Path) -> None:
    device = Device("sim", dist.get_rank())
    with torch.device("meta"):
        model = GPTModel(QWEN3, VOCAB)
    megatron_fsdp.shard_model(
        model,
        build_mesh("sim", 2),
        device,
        data_parallel("optim_grads_params"),
        compute_dtype=torch.bfloat16,
        reset_parameters=seeded_reset(model, device.torch_device, 0),
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"sim"}
    for name, dtype in DTYPES.items():
        save_hf(model, folder / name, device, dtype=dtype, max_shard_bytes=SHARD_BYTES)
