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

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.training.checkpoint import hf_files
from megatron.training.checkpoint.hf_files import (
    CONFIG_FILE,
    WeightFiles,
    check_files,
    make_files,
    read_json,
)
from megatron.training.checkpoint.hf_layout import (
    INDEX_FILE,
    WEIGHTS_FILE,
    FileTensor,
    FolderLayout,
)
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


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(folder: Path) -> None:
    save_file({"c": torch.ones(1)}, folder / "model-1.safetensors")
    index = {"weight_map": {"c": "model-1.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert names_in(folder) == ["a", "b"]
    (folder / WEIGHTS_FILE).unlink()
    assert names_in(folder) == ["c"]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE])
@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device"])
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
def test_an_index_with_files_outside_of_its_directory_is_rejected(
    folder: Path, file: object
) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "the.weight": file}})
    )
    with pytest.raises(CheckpointDamagedError) as error:
        names_in(folder)
    assert "Expected names of files in its directory in" in str(error.value)
    assert f"got {file!r} for the.weight" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_one_with_other_tensors_than_its_index_are_errors(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "model-1.safetensors")
    weight_map = dict.fromkeys("abc", "model-1.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointDamagedError, match=f"{INDEX_FILE} .* a difference in c"):
        names_in(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"file .*model-1.safetensors, got none"):
        names_in(folder)


def test_a_directory_without_weights_is_an_error_that_names_pickles(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS_FILE} or {INDEX_FILE} in .* got neither"):
        names_in(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"got pytorch_model.bin, .*unpickled"):
        names_in(folder)
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        names_in(folder / "none")


WHOLE_JSON, WHOLE_FILE = "a JSON object in .*config.json", "a whole safetensors file"
WHOLE_INDEX = "the files of tensors under 'weight_map'"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG_FILE, b"[" * 100_000, WHOLE_JSON),
        (CONFIG_FILE, b"[]", WHOLE_JSON),
        (CONFIG_FILE, b'{"a": 1, "a": 2}', WHOLE_JSON),
        (CONFIG_FILE, b'{"a": ' + b"9" * 5000 + b"}", WHOLE_JSON),
        (CONFIG_FILE, b"\xff", WHOLE_JSON),
        (INDEX_FILE, b'{"weight_map": [1]}', WHOLE_INDEX),
        (INDEX_FILE, b"{}", WHOLE_INDEX),
        (WEIGHTS_FILE, b"", WHOLE_FILE),
        (WEIGHTS_FILE, header(b"{}", 1 << 60), WHOLE_FILE),
        (WEIGHTS_FILE, header(b"[" * 100_000), WHOLE_FILE),
        (WEIGHTS_FILE, entry([1 << 40], 0, 1 << 42), WHOLE_FILE),
        (WEIGHTS_FILE, entry([1 << 62, 1 << 62], 0, 4) + bytes(4), WHOLE_FILE),
        (WEIGHTS_FILE, entry([1], 4, 0) + bytes(4), WHOLE_FILE),
        (WEIGHTS_FILE, entry([1], 0, 4) + bytes(8), WHOLE_FILE),
    ],
)
def test_a_file_whose_content_differs_from_its_header_or_type_is_an_error(
    folder: Path, name: str, content: bytes, message: str
) -> None:
    if name == INDEX_FILE:
        (folder / WEIGHTS_FILE).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=message) as error:
        names_in(folder)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_a_truncated_file_is_an_error_with_its_size(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    size = path.stat().st_size - 1
    os.truncate(path, size)
    with pytest.raises(CheckpointDamagedError, match=rf"got: {size} bytes, \w"):
        names_in(folder)


def test_a_file_that_does_not_fit_in_memory_is_a_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(hf_files, "safe_open", refuse)
    with pytest.raises(CheckpointDamagedError, match="MemoryError"):
        names_in(folder)


def test_json_of_unlimited_length_is_not_read(folder: Path) -> None:
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


def test_weights_that_are_truncated_while_they_are_read_are_an_error(
    folder: Path,
) -> None:
    # In a separate process, which SIGBUS would kill.
    process = multiprocessing.get_context("fork").Process(target=_read_what_is_cut, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_config_may_have_an_infinite_limit(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "time_step_limit": [0.0, Infinity]}')
    config = read_json(tmp_path / "config.json")
    assert config == {"hidden_size": 64, "time_step_limit": [0.0, float("inf")]}


def test_files_that_lost_their_size_or_header_during_a_save_are_errors(tmp_path: Path) -> None:
    layout = FolderLayout.of([FileTensor("a", (3,), torch.float32)], 10**9)
    make_files(tmp_path, layout)
    check_files(tmp_path, layout)

    path, (file,) = tmp_path / layout.files[0].name, layout.files
    os.truncate(path, file.nbytes - 1)
    with pytest.raises(
        CheckpointError, match=f"to have {file.nbytes} bytes, got {file.nbytes - 1}"
    ):
        check_files(tmp_path, layout)
    path.write_bytes(bytes(file.nbytes))
    with pytest.raises(CheckpointError, match="to start with its header, got other bytes"):
        check_files(tmp_path, layout)
