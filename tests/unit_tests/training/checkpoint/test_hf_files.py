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

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.layout.boxes import Box
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


def test_files_that_lost_their_size_or_header_meanwhile_are_found(tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointError, match="to begin with its header, got other bytes"):
        check_files(tmp_path, layout)
