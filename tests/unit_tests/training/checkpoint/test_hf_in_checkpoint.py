"""`hf/` in a checkpoint equals the directory of `save_hf`, and may be the only copy of weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.manifest import INDEX_FILE
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore, open_store
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.checkpoint.hf_weights import HfExport, load_hf, save_hf
from megatron.training.checkpoint.loading import load_weights
from megatron.training.tokenizer import ByteTokenizer
from megatron_hybrid.checkpoint import command
from megatron_hybrid.checkpoint.audit import Audit
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    HSDP,
    ITERATION,
    Setting,
    Trained,
    differences,
    expected_tensors,
    full_tensors,
    manager_of,
)
from tests.unit_tests.training.helpers.hf_folders import (
    ARCHITECTURES,
    CPU,
    QWEN3,
    VOCAB,
    digests,
    plain_gpt,
)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 9000  # several files in either dtype
UNTIED = dataclasses.replace(QWEN3, untie_embeddings_and_output_weights=True)
MIXTURE = dataclasses.replace(QWEN3, **ARCHITECTURES["Qwen3Moe"] | {"num_experts": 4})
GATED = dataclasses.replace(QWEN3, **ARCHITECTURES["Qwen3Next"])
WITHOUT, EXACT = 1, ITERATION  # iterations of checkpoints: without hf/, and with it in fp32
NARROW = 3


def trained_gpt(setting: Setting, config: TransformerConfig) -> Trained:
    with torch.device("meta"):
        model = GPTModel(config, VOCAB)
    trained = Trained(setting, seed=0, model=model)
    for number in range(2):
        trained.step(number)
    trained.optimizer.synchronize()
    return trained


def export_of(model: nn.Module, dtype: torch.dtype) -> HfExport:
    return HfExport.of(model, dtype, FolderExtras(ByteTokenizer()), max_shard_bytes=SHARD_BYTES)


def save_during_training(root: str, setting: Setting, config: TransformerConfig) -> None:
    """Saves the directories of `save_hf`, and the same in checkpoints while training continues."""
    trained = trained_gpt(setting, config)
    expected = full_tensors(trained) if config is QWEN3 else {}
    for name, dtype in DTYPES.items():
        folder = f"{root}/{name}"
        options: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": SHARD_BYTES}
        save_hf(trained.model, folder, CPU, tokenizer=ByteTokenizer(), **options)
    exports = {name: export_of(trained.model, dtype) for name, dtype in DTYPES.items()}
    if trained.rank == 0:
        Path(f"{root}/run").mkdir()
        torch.save(expected, f"{root}/run/expected.pt")

    with manager_of(f"{root}/run", trained) as manager:
        contents = trained.contents()
        for iteration, export in ((WITHOUT, None), (NARROW, exports["bf16"])):
            manager.save(iteration, dataclasses.replace(contents, export=export), {})
            manager.finish()
        manager.save(EXACT, dataclasses.replace(contents, export=exports["fp32"]), {})
        trained.step(2)
        manager.finish()
    dist.barrier()


CASES = [
    (1, Setting(), QWEN3),
    (4, Setting(HSDP, 1.0), QWEN3),
    (2, Setting(expert_size=2), MIXTURE),
    (2, Setting("optim_grads_params", 0.5), GATED),
    (3, Setting("optim_grads"), UNTIED),
]


@pytest.mark.parametrize(
    ("num_ranks", "setting", "config"), CASES, ids=["tied", "hsdp", "mixture", "gated", "untied"]
)
def test_hf_in_a_checkpoint_saved_during_training_equals_the_directory_of_save_hf(
    tmp_path: Path, num_ranks: int, setting: Setting, config: TransformerConfig
) -> None:
    run_ranks(num_ranks, save_during_training, str(tmp_path), setting, config)
    store = LocalStore(tmp_path / "run")
    for iteration, name in ((NARROW, "bf16"), (EXACT, "fp32")):
        folder = tmp_path / "run" / checkpoint_name(iteration)
        assert digests(folder / "hf") == digests(tmp_path / name)
        assert len(list((folder / "hf").glob("*.safetensors"))) > 1
        audit = Audit(store, checkpoint_name(iteration), lambda _: None)
        audit.run()
        assert audit.problems == []
        assert audit.num_bytes == sum(
            path.stat().st_size
            for path in folder.rglob("*")
            if path.suffix in (".distcp", ".safetensors")
        )

    check_weights(tmp_path, config)
    check_sizes(tmp_path / "run")


def check_weights(root: Path, config: TransformerConfig) -> None:
    """Checkpoints of either form load the same bits."""
    exact = checkpoint_name(EXACT)
    models = [plain_gpt(config, seed) for seed in (1, 2, 3)]
    load_hf(models[0], root / "run" / exact / "hf")
    load_weights(open_store(root / "run"), exact, models[1])
    load_weights(open_store(root / "run"), checkpoint_name(WITHOUT), models[2])
    tokens = torch.arange(12).view(2, 6)
    logits = [model(tokens) for model in models]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[1], logits[2])
    for weights in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[1], weights[2])


def check_sizes(root: Path) -> None:
    """`hf/` in bf16 adds its bytes; in fp32, the weights are stored only there."""
    without, narrow, exact = (
        root / checkpoint_name(iteration) for iteration in (WITHOUT, NARROW, EXACT)
    )
    index = Index.from_bytes((exact / INDEX_FILE).read_bytes(), None, "index.json")
    weights = [tensor for key, tensor in index.tensors.items() if key.startswith("model.")]
    assert all(chunk.file.startswith("hf/") for tensor in weights for chunk in tensor.chunks)
    assert data_bytes(narrow) == data_bytes(without)
    assert data_bytes(without) - data_bytes(exact) >= sum(tensor.nbytes for tensor in weights)


def data_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def load_on(root: str, setting: Setting) -> list[str]:
    with torch.device("meta"):
        model = GPTModel(QWEN3, VOCAB)
    trained = Trained(setting, seed=7, model=model)
    trained.load(root)
    return differences(full_tensors(trained), expected_tensors(root))


def test_weights_that_are_stored_once_load_with_their_states_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_during_training, str(tmp_path), Setting("optim"), QWEN3)
    for num_ranks, setting in ((1, Setting()), (3, Setting("optim_grads_params", 0.5))):
        assert run_ranks(num_ranks, load_on, str(tmp_path / "run"), setting) == [[]] * num_ranks


# Read by other programs


def save_alone(root: Path, model: GPTModel, dtype: torch.dtype, iteration: int = 1) -> Path:
    store = LocalStore(root)
    with CheckpointManager(store, CPU, 0, 1, "0" * 16) as manager:
        contents = dataclasses.replace(collect(model), export=export_of(model, dtype))
        manager.save(iteration, contents, {})
        manager.finish()
    return root / checkpoint_name(iteration)


def test_pytorch_reads_weights_in_hf_by_its_hugging_face_reader(
    tmp_path: Path,
) -> None:
    model = plain_gpt()
    folder = save_alone(tmp_path / "run", model, torch.float32)
    expected = load_tensors(folder / "hf")

    # `.metadata` does not list the weights.
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert not [key for key in listed if key.startswith("model.")]

    state = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "hf")), no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert torch.equal(
        state["model.embed_tokens.weight"], model.embedding.word_embeddings.weight.detach()
    )


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("name", DTYPES)
def test_an_export_of_a_checkpoint_with_hf_is_the_same_as_without(
    tmp_path: Path, name: str
) -> None:
    model = plain_gpt()
    folder = save_alone(tmp_path / "run", model, DTYPES[name])
    checkpoint = open_checkpoint(LocalStore(folder.parent), folder.name)
    export_hf(
        checkpoint,
        tmp_path / "out",
        ModelDescription(QWEN3, VOCAB),
        tokenizer=ByteTokenizer(),
        dtype=DTYPES[name],
        max_shard_bytes=SHARD_BYTES,
    )
    assert digests(tmp_path / "out") == digests(folder / "hf")


def test_the_tool_lists_the_checkpoints_that_have_hf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_alone(tmp_path, plain_gpt(), torch.float32, 1)
    with CheckpointManager(LocalStore(tmp_path), CPU, 0, 1, "1" * 16) as manager:
        manager.save(2, collect(plain_gpt()), {})
        manager.finish()
    for arguments in (["list"], ["show"]):
        paths = [tmp_path / checkpoint_name(iteration) for iteration in (1, 2)]
        for command_line in [[tmp_path]] if arguments == ["list"] else [[path] for path in paths]:
            assert command.main([*arguments, *map(str, command_line)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "iter_000000" in line]
    assert ["hf/" in line for line in lines] == [True, False, True, False]


# There and whole, or not there


@pytest.mark.parametrize("name", DTYPES)
def test_a_byte_that_changes_anywhere_in_hf_is_found(tmp_path: Path, name: str) -> None:
    folder = save_alone(tmp_path / "run", plain_gpt(), DTYPES[name])
    store = LocalStore(folder.parent)
    for path in sorted((folder / "hf").iterdir()):
        content, size = path.read_bytes(), path.stat().st_size
        for position in {0, 7, 8, min(50, size - 1), header_end(content), size // 2, size - 1}:
            changed = bytearray(content)
            changed[position] ^= 1
            path.write_bytes(changed)
            audit = Audit(store, folder.name, lambda _: None)
            audit.run()
            assert any(path.name in problem for problem in audit.problems), (path, position)
        for wrong in (content[:-1], content + b"\0"):
            path.write_bytes(wrong)
            with pytest.raises(CheckpointDamagedError, match=path.name):
                open_checkpoint(store, folder.name)
        path.unlink()
        with pytest.raises(CheckpointDamagedError, match=path.name):
            open_checkpoint(store, folder.name)
        path.write_bytes(content)
    audit = Audit(store, folder.name, lambda _: None)
    audit.run()
    assert audit.problems == []


def header_end(content: bytes) -> int:
    """Where the header of a safetensors file ends; within any other file."""
    return min(8 + int.from_bytes(content[:8], "little"), len(content) - 2)


def test_a_load_of_weights_that_are_stored_once_finds_damage(tmp_path: Path) -> None:
    folder = save_alone(tmp_path / "run", plain_gpt(), torch.float32)
    path = folder / "hf" / "model-00002-of-00005.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=path.name):
        load_weights(open_store(folder.parent), folder.name, plain_gpt(seed=1))


def test_files_that_hf_cannot_have_are_errors_before_the_first_step(
    tmp_path: Path,
) -> None:
    model = plain_gpt()
    with pytest.raises(
        CheckpointError, match="a tokenizer of this project, or one with save_pretrained"
    ):
        HfExport.of(model, torch.bfloat16, FolderExtras(tokenizer=object()))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a b.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"names of files .* got 'hf/a b\.json'"):
        HfExport.of(model, torch.bfloat16, FolderExtras(base_model_path=tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointError, match="base_model_path"):
        HfExport.of(model, torch.bfloat16, FolderExtras(base_model_path=tmp_path / "base"))


def test_a_remote_store_is_an_error_before_anything_is_written() -> None:
    model = plain_gpt()
    store = open_store("memory://hf-in-checkpoint")
    with CheckpointManager(store, CPU, 0, 1, "0" * 16) as manager:
        contents = dataclasses.replace(collect(model), export=export_of(model, torch.float32))
        with pytest.raises(ValueError, match="a directory of a file system for hf/model"):
            manager.save(1, contents, {})
    assert store.folders() == []
