"""Saves through the interfaces of AReaL's engines and of Megatron-FSDP's experimental package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import fully_shard
from megatron.core.mesh import build_mesh
from megatron.core.optimizer import FusedAdam, OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.tokenizer import ByteTokenizer
from tests.helpers.ranks import on_ranks


class Net(nn.Module):
    """A module without a config.json."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)


class Processor:
    """A processor of the transformers library, which saves its tokenizer, too."""

    def save_pretrained(self, folder: str | Path) -> None:
        (Path(folder) / "preprocessor_config.json").write_text('{"size": 224}')
        (Path(folder) / "tokenizer_config.json").write_text('{"of": "the processor"}')


def engine(parallel: DataParallelConfig | None = None) -> ModuleEngine:
    config = EngineConfig(
        OptimizerConfig(),
        LRScheduleConfig(lr=1e-3),
        parallel or DataParallelConfig(),
        train_iters=2,
    )
    made = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    made.initialize(Net())
    return made


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def on_first(make: Any) -> None:
    if dist.get_rank() == 0:
        make()
    dist.barrier()


@pytest.mark.parametrize("use_torch_fsdp2", [False, True])
@pytest.mark.parametrize("weight_format", ["dcp", "hf"])
def test_a_save_accepts_an_existing_empty_directory_only(
    tmp_path: Path, weight_format: str, use_torch_fsdp2: bool
) -> None:
    @on_ranks(2)
    def check() -> None:
        made = engine(DataParallelConfig(use_torch_fsdp2=use_torch_fsdp2))
        meta = SaveLoadMeta(f"{tmp_path}/saved", weight_format, weight_format == "dcp")
        on_first(Path(meta.path).mkdir)
        made.save(meta)
        made.load(meta)

        # A directory with a single file is rejected: files are never overwritten.
        full = SaveLoadMeta(f"{tmp_path}/full", weight_format)
        on_first(Path(full.path).mkdir)
        on_first((Path(full.path) / "notes.txt").touch)
        message = "missing or empty.*, got (files|one that holds notes)"
        with pytest.raises(CheckpointError, match=message):
            made.save(full)
        on_first(lambda: Path(f"{tmp_path}/link").symlink_to(tmp_path / "nowhere"))
        if weight_format == "hf":
            with pytest.raises(CheckpointError, match="link, got a dangling link"):
                made.save(SaveLoadMeta(f"{tmp_path}/link", weight_format))
        dist.barrier()
        assert names(full.path) == ["notes.txt"]

    check()
    assert names(tmp_path) == ["full", "link", "saved"]


def test_save_checkpoint_accepts_an_empty_directory_and_sync_model_weights(tmp_path: Path) -> None:
    @on_ranks(2)
    def check() -> None:
        model = fully_shard(Net())
        optimizer = FusedAdam(model.parameters())
        on_first((tmp_path / "10").mkdir)
        save_checkpoint(model, optimizer, tmp_path / "10")
        before = [parameter.full_tensor().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(model, optimizer, tmp_path / "10", sync_model_weights=True)
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.full_tensor(), old)
        with pytest.raises(NotImplementedError, match="Expected sync_model_weights=True"):
            load_checkpoint(model, optimizer, tmp_path / "10", sync_model_weights=False)

    check()


def base_model(folder: Path) -> Path:
    """A model directory with a symbolic link, as in transformers' cache, and a subdirectory."""
    folder.mkdir()
    (folder / "blob").write_text('{"model_type": "theirs"}')
    (folder / "config.json").symlink_to(folder / "blob")
    for name in ("generation_config.json", "tokenizer.json", "vocab.txt", "modeling_theirs.py"):
        (folder / name).write_text(f"{name} of the base")
    generation = {
        "temperature": 0.5,
        "max_new_tokens": 9,
        "eos_token_id": [7, 8],
        "pad_token_id": 9,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    # Files about its training.
    for name in ("trainer_state.json", "eval_results.json", "requirements.txt"):
        (folder / name).write_text("{}")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_text("weights")
    (folder / "folder.json").mkdir()
    return folder


def saved(tmp_path: Path, **extras: Any) -> Path:
    @on_ranks(2)
    def save() -> None:
        engine().save(SaveLoadMeta(f"{tmp_path}/saved", "hf", **extras))

    save()
    return tmp_path / "saved"


def test_files_of_the_base_model_are_copied_next_to_the_weights(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    folder = saved(tmp_path, base_model_path=str(base))
    assert names(folder) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_theirs.py",
        "tokenizer.json",
        "vocab.txt",
    ]
    assert not (folder / "config.json").is_symlink()
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "theirs"}
    assert (folder / "model.safetensors").read_bytes() != b"weights"


def test_a_processor_and_a_tokenizer_replace_the_files_of_the_base_model(
    tmp_path: Path,
) -> None:
    base = base_model(tmp_path / "base")
    folder = saved(
        tmp_path, processor=Processor(), tokenizer=ByteTokenizer(), base_model_path=str(base)
    )
    assert "vocab.txt" not in names(folder)
    assert "of the base" not in (folder / "tokenizer.json").read_text()
    assert json.loads((folder / "preprocessor_config.json").read_text()) == {"size": 224}
    # The argument `tokenizer` takes precedence over the processor's tokenizer.
    assert "tokenizer_class" in json.loads((folder / "tokenizer_config.json").read_text())
    # Token ids are from the argument `tokenizer`.
    generation = json.loads((folder / "generation_config.json").read_text())
    eod = ByteTokenizer().eod
    assert generation == {"temperature": 0.5, "max_new_tokens": 9, "eos_token_id": eod}


def test_invalid_extras_raise_on_all_ranks(tmp_path: Path) -> None:
    @on_ranks(2)
    def check() -> None:
        made = engine()
        cases: list[tuple[dict[str, Any], str]] = [
            ({"processor": object()}, "Expected a processor with save_pretrained, got object"),
            ({"base_model_path": "org/model-7b"}, "base_model_path .* 'org/model-7b'"),
        ]
        for extras, message in cases:
            with pytest.raises(CheckpointError, match=message):
                made.save(SaveLoadMeta(f"{tmp_path}/saved", "hf", **extras))

    check()
    assert names(tmp_path) == []
    for name in ("tokenizer", "processor", "base_model_path"):
        with pytest.raises(ValueError, match=f"Expected a {name} only with the format hf, got one"):
            SaveLoadMeta("there", "dcp", **{name: "x"})
