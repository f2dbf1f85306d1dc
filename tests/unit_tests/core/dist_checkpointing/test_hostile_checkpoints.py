"""Checkpoints that an attacker wrote: reading them runs no code and does not block."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.dist_checkpointing.dcp.torch_dcp import (
    TorchDcpCheckpoint,
    load_tensors,
    save_checkpoint,
)
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    INDEX_FILE,
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    manifest_file,
)
from megatron.core.dist_checkpointing.formats import (
    ReadableCheckpoint,
    open_checkpoint,
)
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.files import UnusableFileError
from megatron_hybrid.checkpoint import command as tool
from tests.helpers.checkpoints import (
    row_cuts,
    whole,
    write_checkpoint,
)

NAME = "iter_0000010"

# Events that a load must not cause. An audit hook cannot be removed, so `quiet` clears the list.
_WATCHED = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
}
_happened: list[str] = []


def _watch(event: str, _: Any) -> None:
    if event in _WATCHED:
        _happened.append(event)


sys.addaudithook(_watch)


@contextmanager
def quiet() -> Iterator[None]:
    """No command, no process, no connection; and an end within seconds."""

    def too_long(*_: Any) -> None:
        raise TimeoutError("Expected an end within 30 seconds, got none.")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    _happened.clear()
    try:
        yield
    finally:
        signal.alarm(0)
    assert _happened == []


class Command:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    """As `save_checkpoint`, without its check of plain data."""
    dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / TRAIN_STATE_FILE).write_text("{}")
    return folder


def state(lr: object = 0.5) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(3.0)},
        "optim": {"param_groups": [{"lr": lr, "betas": (0.9, 0.95), "foreach": None}]},
    }


def opened(folder: Path, *, verify: bool = True) -> TorchDcpCheckpoint:
    found = TorchDcpCheckpoint.open(LocalStore(folder.parent), folder.name, checks_crc=verify)
    if verify:
        found.check()
    return found


def load(folder: Path, *, verify: bool) -> dict[str, Any]:
    wanted = state(0.1)
    load_tensors(opened(folder, verify=verify), wanted, ())
    return wanted


def read_everything(opened: ReadableCheckpoint) -> None:
    """Reads all tensors and plain data."""
    for key, saved in opened.tensors.items():
        opened.read(key, (0,) * len(saved.shape), torch.empty(saved.shape))
    for key in opened.plain:
        opened.read_plain(key)


def blob(folder: Path, key: str) -> tuple[Path, int, int]:
    """The file, offset and length of the blob of a key."""
    info = dcp.FileSystemReader(folder).read_metadata().storage_data[MetadataIndex(key)]
    return folder / info.relative_path, info.offset, info.length


def exchange(folder: Path, key: str, content: bytes) -> None:
    """Appends another blob for a key to its file, and changes its entry in `.metadata`."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(content)
    file.write_bytes(file.read_bytes() + content)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def archive_with(pickled: bytes, name: str = "archive/data.pkl") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        target.writestr(name, pickled)
    return stream.getvalue()


LR = "optim.param_groups.0.lr"


def _object(folder: Path, command: Command) -> Path:
    return save_dcp(folder, state(command))


def _legacy_file(folder: Path, command: Command) -> Path:
    save_dcp(folder, state())
    stream = io.BytesIO()
    torch.save(command, stream, _use_new_zipfile_serialization=False)
    exchange(folder, LR, stream.getvalue())
    return folder


def _pickle_in_an_archive(folder: Path, command: Command) -> Path:
    save_dcp(folder, state())
    exchange(folder, LR, archive_with(pickle.dumps(command)))
    return folder


def _pickle_for_a_tensor(folder: Path, command: Command) -> Path:
    save_dcp(folder, state())
    exchange(folder, "model.w", archive_with(pickle.dumps(command)))
    return folder


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "make",
    [_object, _legacy_file, _pickle_in_an_archive, _pickle_for_a_tensor],
    ids=lambda make: make.__name__,
)
def test_no_entry_of_a_torch_dcp_checkpoint_is_executed(
    tmp_path: Path, make: Callable[[Path, Command], Path], verify: bool
):
    canary = tmp_path / "canary"
    folder = make(tmp_path / NAME, Command(canary))
    message = f"Expected .* in .*{NAME}/__0_0.distcp"
    with quiet():
        with pytest.raises(CheckpointError, match=message):
            load(folder, verify=verify)
        with pytest.raises(CheckpointError, match=message):
            read_everything(open_checkpoint(LocalStore(tmp_path), NAME))
        assert tool.main(["diff", str(folder), str(folder)]) == 2
    assert not canary.exists()


def test_the_reproduction_runs_with_dcp_itself(tmp_path: Path):
    """Or the test above would show nothing."""
    folder = _object(tmp_path / NAME, Command(tmp_path / "canary"))
    wanted = state()
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("verify", [True, False])
def test_metadata_that_is_exchanged_after_it_was_checked_is_not_read(tmp_path: Path, verify: bool):
    folder = save_dcp(tmp_path / NAME, state())
    checkpoint = opened(folder, verify=verify)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Command(tmp_path / "canary")))
    wanted = state(0.1)
    with quiet():
        load_tensors(checkpoint, wanted, ())
    assert torch.equal(wanted["model"]["w"], torch.arange(3.0))
    assert wanted["optim"] == state(0.5)["optim"]
    assert not (tmp_path / "canary").exists()


def test_plain_data_that_is_exchanged_after_it_was_checked_changes_no_tensor(tmp_path: Path):
    folder = save_dcp(tmp_path / NAME, state())
    checkpoint = opened(folder)
    file, offset, nbytes = blob(folder, LR)
    content = bytearray(file.read_bytes())
    content[offset : offset + nbytes] = pickle.dumps(Command(tmp_path / "canary")).ljust(
        nbytes, b"\0"
    )
    file.write_bytes(content)
    wanted = {"model": {"w": torch.full((3,), 7.0)}, "optim": state(0.1)["optim"]}
    with pytest.raises(CheckpointDamagedError, match=f"'{LR}' in .*__0_0.distcp"):
        load_tensors(checkpoint, wanted, ())
    assert torch.equal(wanted["model"]["w"], torch.full((3,), 7.0))
    assert wanted["optim"] == state(0.1)["optim"]
    assert not (tmp_path / "canary").exists()


def test_plain_data_that_a_load_would_reject_is_not_saved(tmp_path: Path):
    class Setting:
        pass

    with pytest.raises(
        CheckpointError,
        match=rf"Expected .* to be written, got rank 0: .*'{LR}', got .*Setting|pickle",
    ):
        save_checkpoint(tmp_path, 10, state(Setting()), {})
    with pytest.raises(CheckpointError, match=rf"got rank 0: .* '{LR}', got .*set"):
        save_checkpoint(tmp_path, 10, state({1, 2}), {})
    assert not (tmp_path / NAME).exists()
    options = {"nested": (1, None, "b", torch.float32, [2**63, -0.5])}
    folder = save_checkpoint(tmp_path, 10, state(options), {})
    wanted = state({"nested": ()})
    load_tensors(opened(folder), wanted, ())
    assert wanted["optim"]["param_groups"][0]["lr"] == options


class WithExtraState(nn.Linear):
    """A module whose extra state is plain data with a tensor in it."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return {"amax": torch.arange(4.0), "recipe": ["e4m3", 3]}

    def set_extra_state(self, found: Any) -> None:
        self.extra = found


def test_extra_state_of_modules_is_saved_and_loaded(tmp_path: Path):
    model = WithExtraState(3, 2)
    folder = save_checkpoint(tmp_path, 10, DCPState(model).state_dict(), {})
    other = WithExtraState(3, 2)
    app = DCPState(other)
    wanted = app.state_dict()
    load_tensors(opened(folder), wanted, ())
    app.load_state_dict(wanted)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.extra["amax"], torch.arange(4.0))
    assert other.extra["recipe"] == ["e4m3", 3]


# Other kinds of files.


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both formats, and single files."""
    root = tmp_path_factory.mktemp("checkpoints")
    weight = torch.arange(12.0).reshape(4, 3)
    write_checkpoint(
        root / "ours" / NAME,
        {
            "model.w": (weight, row_cuts((4, 3), 2, 2)),
            "model.s": (torch.tensor(1.0), whole(torch.tensor(1.0))),
        },
        {"plain": [1]},
        world_size=2,
    )
    save_dcp(root / "dcp" / NAME, state())
    return root


def read_all(root: Path) -> None:
    """Reads both checkpoints, as a load would."""
    for name in ("ours", "dcp"):
        found = open_checkpoint(LocalStore(root / name), NAME)
        read_everything(found)
    folder = root / "dcp" / NAME
    load(folder, verify=True)
    assert found.train_state == {}


FILES = [
    *(
        f"ours/{NAME}/{file}"
        for file in (
            *(MARKER_FILE, METADATA_FILE, INDEX_FILE, TRAIN_STATE_FILE),
            *(manifest_file(1), "__1_0.distcp"),
        )
    ),
    *(f"dcp/{NAME}/{file}" for file in (METADATA_FILE, TRAIN_STATE_FILE, "__0_0.distcp")),
]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "make", [_fifo, _device, Path.touch, Path.mkdir], ids=lambda make: make.__name__
)
def test_another_kind_of_file_is_one_error(pristine: Path, tmp_path: Path, file: str, make: Any):
    root = tmp_path / "root"
    shutil.copytree(pristine, root)
    (root / file).unlink()
    make(root / file)
    with (
        quiet(),
        pytest.raises(
            (CheckpointError, UnusableFileError), match=file.rpartition("/")[2]
        ) as caught,
    ):
        read_all(root)
    assert str(caught.value).isprintable()


def announce(folder: Path, shape: tuple[int, ...]) -> None:
    """Changes the shape of model.w, and of its only chunk, in `.metadata`."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    entry = metadata.state_dict_metadata["model.w"]
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.w"]
    info = metadata.storage_data.pop(index)
    size = torch.Size(shape)
    entry.size = size
    (chunk,) = entry.chunks
    object.__setattr__(chunk, "sizes", size)
    object.__setattr__(chunk, "offsets", torch.Size([0] * len(shape)))
    metadata.storage_data[MetadataIndex("model.w", chunk.offsets)] = info
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 40, 1 << 40), (2,)])
def test_a_tensor_that_is_larger_than_its_file_is_rejected_before_it_is_allocated(
    tmp_path: Path, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
):
    folder = save_dcp(tmp_path / NAME, state())
    announce(folder, shape)
    assert tool.main(["diff", str(folder), str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint: Expected ")
    assert "model.w" in line
