from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from megatron.core import files
from megatron.core.files import (
    Sync,
    UnusableFileError,
    open_regular,
    published,
    read_regular,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_only_once_it_is_complete(tmp_path):
    path = tmp_path / "file"
    with published(path) as stream:
        stream.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert names(tmp_path) == ["file"]


def test_an_error_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with published(path) as stream:
            stream.write(b"new")
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        write_half()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_the_content_is_on_disk_before_the_rename_and_the_rename_before_it_returns(
    tmp_path, monkeypatch
):
    order = []
    real_fsync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), real_fsync(fd)))
    monkeypatch.setattr(
        Path, "replace", lambda path, to: (order.append("rename"), real_replace(path, to))
    )
    with published(tmp_path / "file") as stream:
        stream.write(b"content")
    assert order == ["sync", "rename", "sync"]


@pytest.mark.parametrize(
    ("sync", "order"),
    [(Sync.CONTENT, ["sync", "rename"]), (Sync.NOTHING, ["rename"])],
    ids=lambda value: str(value),
)
def test_the_rename_is_the_last_operation_since_a_reader_may_move_the_directory(
    tmp_path, monkeypatch, sync, order
):
    found = []
    real_fsync, real_replace = os.fsync, Path.replace

    def replace_and_move(path: Path, to: Path) -> None:
        found.append("rename")
        real_replace(path, to)
        to.parent.rename(tmp_path / "moved")

    monkeypatch.setattr(os, "fsync", lambda fd: (found.append("sync"), real_fsync(fd)))
    monkeypatch.setattr(Path, "replace", replace_and_move)
    (tmp_path / "folder").mkdir()
    with published(tmp_path / "folder" / "file", sync) as stream:
        stream.write(b"content")
    assert found == order
    assert (tmp_path / "moved" / "file").read_bytes() == b"content"
    assert names(tmp_path) == ["moved"]


def test_permissions_equal_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with files.published(tmp_path / "published"):
        pass
    assert (tmp_path / "published").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_is_read_whole_up_to_the_bound_and_not_beyond(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_regular(path, max_bytes=7) == b"content"
    with pytest.raises(
        UnusableFileError, match=r"Expected a marker of at most 6 bytes, got 7 or more.*file"
    ):
        read_regular(path, max_bytes=6, what="a marker")


def test_a_file_without_a_size_is_read_up_to_the_bound(monkeypatch):
    """Files of /proc are regular and have a size of 0, as has one that has grown since it was
    looked at.
    """
    assert read_regular("/proc/self/status", max_bytes=1 << 20).startswith(b"Name:")
    monkeypatch.setattr(files, "_READ_BYTES", 3)
    with pytest.raises(UnusableFileError, match="at most 7 bytes, got 8 or more"):
        read_regular("/proc/self/status", max_bytes=7)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_fifo, "a FIFO"),
        (_socket, "a socket"),
        (Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_only_regular_files_are_opened(tmp_path, monkeypatch, make, kind):
    make(tmp_path / "file")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("has been opened"))
    with pytest.raises(UnusableFileError, match=f"Expected a tracker, got {kind}: .*file"):
        read_regular(tmp_path / "file", max_bytes=10, what="a tracker")


def test_a_fifo_that_replaces_a_file_before_it_is_opened_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "file"
    os.mkfifo(path)
    (tmp_path / "regular").touch()
    regular, real_stat = (tmp_path / "regular").stat(), Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda at, **more: regular if at == path else real_stat(at, **more)
    )
    with pytest.raises(UnusableFileError, match="got a FIFO"):
        open_regular(path)


def test_rejected_files_leave_no_open_descriptor(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.touch()
    before = names(Path("/proc/self/fd"))
    answers = iter([True, False])
    monkeypatch.setattr(stat, "S_ISREG", lambda _: next(answers))
    with pytest.raises(UnusableFileError):
        open_regular(path)
    assert names(Path("/proc/self/fd")) == before
