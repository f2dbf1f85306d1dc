from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.core import files
from megatron.core.files import published, temporary_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_stands_under_its_name_only_once_it_is_whole(tmp_path):
    path = tmp_path / "file"
    with published(path) as stream:
        stream.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert names(tmp_path) == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
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


def test_the_content_is_on_disk_before_the_rename_and_the_rename_before_it_returns(tmp_path, monkeypatch):
    order = []
    real_fsync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), real_fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (order.append("rename"), real_replace(path, to)))
    with published(tmp_path / "file") as stream:
        stream.write(b"content")
    assert order == ["sync", "rename", "sync"]


def test_two_writers_never_share_a_temporary_name(tmp_path):
    assert temporary_path(tmp_path / "file") != temporary_path(tmp_path / "file")


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with files.published(tmp_path / "published"):
        pass
    assert (tmp_path / "published").stat().st_mode == (tmp_path / "plain").stat().st_mode
