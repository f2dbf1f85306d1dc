"""Files of weights that are wrong: an error that names them, before anything is opened or
allocated.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import hf_config
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_files import (
    CONFIG_FILE,
    WeightFiles,
    read_json,
)
from megatron.training.checkpoint.hf_layout import INDEX_FILE, WEIGHTS_FILE
from megatron.training.checkpoint.hf_weights import _config_problems
from tests.helpers.special_files import SPECIAL_FILES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(3), "b": torch.ones(1 << 20)}, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text("{}")
    return tmp_path


def names_in(folder: Path) -> list[str]:
    with ExitStack() as stack:
        return sorted(WeightFiles.open(folder, stack).names)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """The process ends, with its stack, rather than wait for a FIFO's writer: some libraries cannot
    be interrupted.
    """
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def entry(shape: list[int], begin: int, end: int) -> bytes:
    return header(
        json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}}).encode()
    )


def test_whole_files_are_opened(folder: Path) -> None:
    assert names_in(folder) == ["a", "b"]


def test_the_single_file_goes_before_an_index_as_in_transformers(folder: Path) -> None:
    save_file({"c": torch.ones(1)}, folder / "model-1.safetensors")
    index = {"weight_map": {"c": "model-1.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert names_in(folder) == ["a", "b"]
    (folder / WEIGHTS_FILE).unlink()
    assert names_in(folder) == ["c"]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE])
@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_only_regular_files_are_opened(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if name == INDEX_FILE:
        (folder / WEIGHTS_FILE).unlink()
    SPECIAL_FILES[kind](path)
    with at_most(30), pytest.raises(CheckpointDamagedError, match=rf"{name}.* got {kind}"):
        names_in(folder)


@pytest.mark.parametrize(
    "file",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "sub/model", "a\0b", "a\nb", 5, None, ["x"]],
)
def test_an_index_that_names_anything_but_files_beside_it_is_refused_by_name(
    folder: Path, file: object
) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "the.weight": file}})
    )
    with pytest.raises(CheckpointDamagedError) as error:
        names_in(folder)
    assert "Expected names of files beside it in" in str(error.value)
    assert f"got {file!r} for the.weight" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_index_of_many_files_is_read_in_time_that_grows_with_it(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    weight_map = {f"weight.{number}": f"file-{number}" for number in range(30_000)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with (
        at_most(30),
        pytest.raises(
            CheckpointDamagedError, match=r"Expected the safetensors file .*file-0, got none"
        ),
    ):
        names_in(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG_FILE, b"[" * 100_000, "Expected a JSON object in .*config.json"),
        (CONFIG_FILE, b'{"a": ' + b"9" * 5000 + b"}", "Expected a JSON object in .*config.json"),
        (CONFIG_FILE, b"\xff\xfe\0", "Expected a JSON object in .*config.json"),
        (CONFIG_FILE, b"[]", "Expected a JSON object in .*config.json"),
        (
            INDEX_FILE,
            b'{"weight_map": [1]}',
            r"Expected the files of tensors under 'weight_map' in .*, got \[1\]",
        ),
        (INDEX_FILE, b"{}", "Expected the files of tensors under 'weight_map' in .*, got None"),
        (WEIGHTS_FILE, b"", "Expected a whole safetensors file"),
        (WEIGHTS_FILE, header(b"{}", 1 << 60), "Expected a whole safetensors file"),
        (WEIGHTS_FILE, header(b"{}", 90 << 20), "Expected a whole safetensors file"),
        (WEIGHTS_FILE, header(b"[" * 100_000), "Expected a whole safetensors file"),
        (WEIGHTS_FILE, entry([1 << 40], 0, 1 << 42), "Expected a whole safetensors file"),
        (
            WEIGHTS_FILE,
            entry([1 << 62, 1 << 62], 0, 4) + bytes(4),
            "Expected a whole safetensors file",
        ),
        (WEIGHTS_FILE, entry([1], 4, 0) + bytes(4), "Expected a whole safetensors file"),
        (WEIGHTS_FILE, entry([1], 0, 4) + bytes(8), "Expected a whole safetensors file"),
    ],
)
def test_what_files_claim_is_held_against_what_they_are(
    folder: Path, name: str, content: bytes, message: str
) -> None:
    if name == INDEX_FILE:
        (folder / WEIGHTS_FILE).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=message) as error:
        names_in(folder)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_json_without_end_is_not_read(folder: Path) -> None:
    os.truncate(folder / CONFIG_FILE, 1 << 40)  # sparse: takes no space
    with pytest.raises(CheckpointDamagedError, match=r"config.json, .* of at most 67108864 bytes"):
        names_in(folder)


def _read_what_is_cut(folder: Path) -> None:
    torch.set_num_threads(1)  # a forked process has no OpenMP threads, and would wait for them
    with ExitStack() as stack:
        files = WeightFiles.open(folder, stack)
        box = Box((0,), (1 << 20,))
        assert files.read("b", box).sum() == 1 << 20
        os.truncate(folder / WEIGHTS_FILE, 4096)
        with pytest.raises(
            CheckpointError, match=r"Expected .*model.safetensors to keep its \d+ bytes, got 4096"
        ):
            files.read("b", box)


def test_weights_that_are_cut_while_they_are_read_are_an_error_and_kill_nobody(
    folder: Path,
) -> None:
    # In a process of its own, which SIGBUS would kill.
    process = multiprocessing.get_context("fork").Process(target=_read_what_is_cut, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": "many"}, "Expected a number as rope_theta in config.json, got 'many'"),
        ({"rope_theta": [10000]}, r"Expected a number as rope_theta in config.json, got \[10000\]"),
        (
            {"rope_parameters": [1]},
            r"Expected an object as rope_parameters in config.json, got \[1\]",
        ),
        ({"rope_scaling": "yarn"}, "Expected an object as rope_scaling in config.json, got 'yarn'"),
    ],
)
def test_a_config_of_another_structure_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointDamagedError, match=message):
        _config_problems(TheirModel(), changes)


def test_a_config_is_shown_bounded_and_on_one_line() -> None:
    nested: list[Any] = []
    for _ in range(40):
        nested = [nested, nested]
    hostile = {
        "model_type": "x\n\x1b[2J" + "y" * 10**6,
        "head_dim": nested,
        "num_attention_heads": 10**4000,
    }
    problems = _config_problems(TheirModel(), hostile)
    assert len(problems) == 3
    # A GPT's config.json is read whole, up to the first problem.
    content = TheirConfig().to_dict()
    for name, value in {**hostile, "x\n" + "y" * 10**6: nested}.items():
        found = _config_problems(tiny_gpt(), content | {name: value})
        assert len(found) == 1
        problems += found
    for problem in problems:
        assert problem.isprintable()
        assert len(problem) < 1200


class TheirConfig:
    """As the transformers library's configs."""

    def to_dict(self) -> dict[str, Any]:
        gpt = tiny_gpt()
        return hf_config(ModelDescription(gpt.config, gpt.vocab_size))

    def save_pretrained(self, folder: Path) -> None:
        """Is not called."""


class TheirModel(torch.nn.Module):
    """As a model of the transformers library."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TheirConfig()


def tiny_gpt() -> GPTModel:
    with torch.device("meta"):
        return GPTModel(
            TransformerConfig(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=2,
                normalization="RMSNorm",
                swiglu=True,
                ffn_hidden_size=10,
                add_bias_linear=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            ),
            16,
        )


def test_a_config_is_read_as_it_is_even_with_a_limit_that_is_infinite(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "time_step_limit": [0.0, Infinity]}')
    config = read_json(tmp_path / "config.json")
    assert config == {"hidden_size": 64, "time_step_limit": [0.0, float("inf")]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xff",
    ],
)
def test_what_is_no_json_object_is_one_error(tmp_path: Path, content: bytes):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected a JSON object in .*config\.json, got"
    ):
        read_json(path)


def test_a_fifo_in_the_place_of_a_config_is_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointDamagedError, match=r"config\.json, got .*a FIFO"):
        read_json(tmp_path / "config.json")
