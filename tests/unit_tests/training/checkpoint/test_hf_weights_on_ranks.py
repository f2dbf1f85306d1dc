"""Ranks that write one folder together: the bytes of an export by a single process, however the
model is sharded, and nothing at all if one of them fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.description import ModelDescription
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.checkpoint.hf_files import make_files, write_own_rows
from megatron.training.checkpoint.hf_layout import RowPlan, file_dtype
from megatron.training.checkpoint.hf_weights import save_hf
from tests.helpers.ranks import run_ranks
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
    """What one process makes of a checkpoint of the same weights, by the name of the dtype."""
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


# Rows of ours at other offsets in the files


class Scattered(nn.Module):
    """Parameters and buffers whose rows are written to other offsets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(6, 12, bias=True)
        self.gate = nn.Linear(6, 12, bias=True)
        self.up = nn.Linear(6, 7, bias=False)
        self.down = nn.Linear(6, 4, bias=False)
        self.conv = nn.Conv1d(5, 5, 3, groups=5)
        self.register_buffer("seen", torch.arange(9))
        self.register_buffer("scale", torch.tensor(1.5))


# Theirs have each head's three gates behind its three queries, and down before up.
ROWS = {
    "model.query.weight": RowMap("qg.weight", 0, 3, 6),
    "model.gate.weight": RowMap("qg.weight", 3, 3, 6),
    "model.query.bias": RowMap("qg.bias", 0, 3, 6),
    "model.gate.bias": RowMap("qg.bias", 3, 3, 6),
    "model.up.weight": RowMap("mlp.weight", 4),
    "model.down.weight": RowMap("mlp.weight"),
    "model.conv.weight": RowMap("conv.weight", 0, 1, 1),
    "model.conv.bias": RowMap("conv.bias"),
    "model.seen": RowMap("seen"),
    "model.scale": RowMap("scale"),
}


def theirs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = Scattered()

    def mixed(query: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        heads = [half.unflatten(0, (4, 3)) for half in (query, gate)]
        return torch.stack(heads, 1).flatten(0, 2)

    found = {
        "qg.weight": mixed(model.query.weight, model.gate.weight),
        "qg.bias": mixed(model.query.bias, model.gate.bias),
        "mlp.weight": torch.cat([model.down.weight, model.up.weight]),
        "conv.weight": model.conv.weight,
        "conv.bias": model.conv.bias,
        "scale": model.scale,
    }
    cast = {name: tensor.detach().to(dtype) for name, tensor in found.items()}
    return {**cast, "seen": model.seen}


def save_scattered(folder: Path, kind: str, dtype: torch.dtype) -> None:
    """Through the writer alone, since no model has such names yet."""
    model: Any = Scattered()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if kind == "columns":
        mesh = build_mesh("cpu", world_size)

        def widest(parameter: nn.Parameter) -> Shard:
            return Shard(1 if parameter.dim() > 1 and parameter.shape[1] % world_size == 0 else 0)

        torch_fully_shard(model, mesh=mesh, shard_placement_fn=widest)
    elif kind == FSDP2:
        torch_fully_shard(model, mesh=build_mesh("cpu", world_size))
    else:
        megatron_fsdp.shard_model(
            model,
            build_mesh("cpu", world_size),
            CPU,
            data_parallel(kind),
            compute_dtype=torch.float32,
            reset_parameters=None,
        )

    entries = collect(model, rank=rank, world_size=world_size).entries
    dtypes = {entry.key: file_dtype(entry.saved_as.dtype, dtype) for entry in entries}
    plan = RowPlan.of(entries, ROWS, dtypes, max_shard_bytes=300)
    if rank == 0:
        folder.mkdir()
        make_files(folder, plan.layout)
    dist.barrier()
    write_own_rows(folder, plan.own_rows(entries, rank), CPU)
    dist.barrier()


@pytest.mark.parametrize(
    ("world_size", "kind", "dtype"),
    [
        (2, "optim", torch.float32),
        (2, FSDP2, torch.bfloat16),
        (2, "columns", torch.float32),
        (3, "optim_grads_params", torch.bfloat16),
    ],
    ids=str,
)
def test_rows_are_written_to_the_offsets_of_their_map(
    tmp_path: Path, world_size: int, kind: str, dtype: torch.dtype
) -> None:
    expected, folder = theirs(dtype), tmp_path / "saved"
    run_ranks(world_size, save_scattered, folder, kind, dtype)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.iterdir()):
        found |= load_file(path)
    assert len(names_in(folder)) > 1
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


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
