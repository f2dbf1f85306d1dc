"""An export of a checkpoint without a model equals the directory that `save_hf` writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, open_checkpoint
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import config_from_hf, hf_config
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.training.checkpoint import hf_export
from megatron.training.checkpoint.hf_export import bytes_to_export, export_hf
from megatron.training.checkpoint.hf_files import publish_draft
from megatron.training.checkpoint.hf_weights import save_hf
from megatron.training.tokenizer import ByteTokenizer
from tests.unit_tests.core.dist_checkpointing.helpers.live_bytes import Live
from tests.unit_tests.training.helpers.hf_folders import (
    ARCHITECTURES,
    CPU,
    QWEN3,
    VOCAB,
    digests,
    names_in,
    plain_gpt,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def published(root: Path, model: torch.nn.Module, name: str = "own") -> ReadableCheckpoint:
    """A checkpoint in our format."""
    store = LocalStore(root)
    with CheckpointManager(store, CPU, 0, 1, "0" * 16) as manager:
        manager.save(1, collect(model), {}, name=name)
        manager.finish()
    return open_checkpoint(store, name)


def saved_by_torch(root: Path, state: dict[str, Any]) -> ReadableCheckpoint:
    """A checkpoint of PyTorch, in which fused weights are fused."""
    dcp.save(state, checkpoint_id=root / "torch", no_dist=True)
    return open_checkpoint(LocalStore(root), "torch")


@pytest.fixture
def checkpoint(tmp_path: Path) -> ReadableCheckpoint:
    return published(tmp_path / "runs", plain_gpt())


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_files_are_those_that_save_hf_writes_of_the_model(tmp_path: Path, case: str) -> None:
    model = plain_gpt(dataclasses.replace(QWEN3, **ARCHITECTURES[case]))
    save_hf(model, tmp_path / "model", CPU, tokenizer=ByteTokenizer())
    prefixed = {"app": {"model": model.state_dict(), "optim": {"lr": torch.ones(1)}}}
    sources = (published(tmp_path, model), saved_by_torch(tmp_path, prefixed))
    for number, source in enumerate(sources):
        folder = tmp_path / f"exported{number}"
        export_hf(source, folder, ModelDescription(model.config, VOCAB), tokenizer=ByteTokenizer())
        assert digests(folder) == digests(tmp_path / "model")


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_config_describes_its_gpt(case: str) -> None:
    config = dataclasses.replace(QWEN3, **ARCHITECTURES[case], max_position_embeddings=32)
    content = json.loads(json.dumps(hf_config(ModelDescription(config, VOCAB))))
    found, vocab_size, _ = config_from_hf(content, "config.json")
    assert (model_spec(found), vocab_size) == (model_spec(config), VOCAB)
    # And in the form of transformers 4.
    del content["rope_parameters"]
    assert config_from_hf(content, "config.json")[0] == found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, "model_type of .* in x.json, got 'gpt2'"),
        ({"hidden_size": None}, "hidden_size in x.json"),
        ({"hidden_size": 0}, "--hidden-size: .* got 0"),
        ({"head_dim": "8"}, "--kv-channels: .* got '8'"),
        ({"vocab_size": True}, "vocab_size in x.json .* got True"),
        ({"attention_bias": 7}, "attention_bias in x.json .* got 7"),
        ({"attention_bias": True}, "x.json, got attention_bias True"),
        ({"rope_parameters": {"rope_theta": "1"}}, "rope_theta .* x.json .* got 500.0"),
        ({"rope_parameters": None, "rope_theta": "1"}, "--rotary-base: "),
    ],
)
def test_a_config_of_another_model_is_one_line(changed: dict[str, Any], message: str) -> None:
    content = {**hf_config(ModelDescription(QWEN3, VOCAB)), **changed}
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_hf(content, "x.json")
    assert "\n" not in str(caught.value)


def test_a_missing_number_in_a_config_is_named() -> None:
    content = hf_config(ModelDescription(QWEN3, VOCAB))
    for name in ("model_type", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings"):
        others = {key: value for key, value in content.items() if key != name}
        with pytest.raises(ConfigError, match=rf"Expected {name} in x.json, got none\."):
            config_from_hf(others, "x.json")


def test_only_a_piece_is_in_memory(tmp_path: Path) -> None:
    config = dataclasses.replace(QWEN3, hidden_size=1024, num_layers=1)
    model = GPTModel(config, 8192)  # an embedding of 32 MiB
    source = published(tmp_path, model)
    del model
    seen: list[int] = []
    total = bytes_to_export(source, ModelDescription(config, 8192))
    with Live() as live:
        export_hf(source, tmp_path / "gpt", ModelDescription(config, 8192), progress=seen.append)
    assert live.peak < 18 << 20
    assert sum(seen) == total > 32 << 20


def other_config(**changes: Any) -> TransformerConfig:
    return dataclasses.replace(QWEN3, **changes)


@pytest.mark.parametrize(
    ("config", "vocab_size", "message"),
    [
        (other_config(num_layers=3), VOCAB, r"it lacks model.decoder.layers.2.* and \d+ more"),
        (other_config(num_layers=1), VOCAB, "it has unexpected keys model.decoder.layers.1"),
        (other_config(ffn_hidden_size=12), VOCAB, r"mlp.gate.weight has shape \(10, 24\) where"),
        (QWEN3, 64, r"word_embeddings.weight has shape \(61, 24\) where the model has \(64, 24\)"),
    ],
)
def test_weights_of_another_model_are_an_error(
    tmp_path: Path,
    checkpoint: ReadableCheckpoint,
    config: TransformerConfig,
    vocab_size: int,
    message: str,
) -> None:
    with pytest.raises(CheckpointError, match=message):
        export_hf(checkpoint, tmp_path / "gpt", ModelDescription(config, vocab_size))
    assert names_in(tmp_path) == ["runs"]


def test_a_fused_weight_of_another_shape_and_dtype_is_an_error(tmp_path: Path) -> None:
    state = plain_gpt().state_dict()
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    other = {**state, name: torch.zeros(70, 24, dtype=torch.int32)}
    source = saved_by_torch(tmp_path, {"model": other})
    shape = rf"{name} has shape \(70, 24\) where the model has \(64, 24\)"
    with pytest.raises(CheckpointError, match=rf"{shape}.*is torch.int32 where the model has fl"):
        export_hf(source, tmp_path / "gpt", ModelDescription(QWEN3, VOCAB))


def test_a_gpt_without_an_architecture_is_an_error_that_names_its_setting(
    tmp_path: Path, checkpoint: ReadableCheckpoint
) -> None:
    config = other_config(normalization="LayerNorm", kv_channels=6)
    with pytest.raises(ConfigError, match=r"--qk-layernorm: .* StableLmForCausalLM"):
        export_hf(checkpoint, tmp_path / "gpt", ModelDescription(config, VOCAB))
    assert names_in(tmp_path) == ["runs"]


def test_only_an_empty_directory_is_replaced(
    tmp_path: Path, checkpoint: ReadableCheckpoint
) -> None:
    target = tmp_path / "exports" / "gpt"
    target.mkdir(parents=True)
    (tmp_path / "link").symlink_to(target)
    # Drafts of a killed export, and of another target.
    (target.parent / ".gpt.0123abcd.writing").mkdir()
    (target.parent / ".other.0123abcd.writing").mkdir()
    export_hf(checkpoint, tmp_path / "link", ModelDescription(QWEN3, VOCAB))
    assert names_in(target) == ["config.json", "model.safetensors"]
    assert names_in(target.parent) == [".other.0123abcd.writing", "gpt"]
    assert (tmp_path / "link").is_symlink()

    before = digests(target)
    with pytest.raises(CheckpointError, match=r"at .*gpt, got one that holds conf"):
        export_hf(checkpoint, target, ModelDescription(QWEN3, VOCAB))
    assert digests(target) == before
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"at .*file, got a file"):
        export_hf(checkpoint, tmp_path / "file", ModelDescription(QWEN3, VOCAB))
    with pytest.raises(CheckpointError, match=r"file/gpt, got .*File exists"):
        export_hf(checkpoint, tmp_path / "file" / "gpt", ModelDescription(QWEN3, VOCAB))


def full_disk(*_arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def fill(target: Path) -> Callable[..., None]:
    def filled(*arguments: Any) -> None:
        target.mkdir()
        (target / "mine").touch()
        publish_draft(*arguments)

    return filled


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, checkpoint: ReadableCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "exports" / "gpt"
    for step in ("_write_weights", "write_small_files", "publish_draft"):
        with monkeypatch.context() as patch:
            patch.setattr(hf_export, step, full_disk)
            with pytest.raises(CheckpointError, match=r"Expected to write .*No space left"):
                export_hf(checkpoint, target, ModelDescription(QWEN3, VOCAB))
        assert names_in(target.parent) == []

    # Another process has created the directory.
    monkeypatch.setattr(hf_export, "publish_draft", fill(target))
    with pytest.raises(CheckpointError, match="got one that holds mine"):
        export_hf(checkpoint, target, ModelDescription(QWEN3, VOCAB))
    assert names_in(target) == ["mine"]
    assert names_in(target.parent) == ["gpt"]
