"""The place that holds a run's checkpoints: a folder of the file system, or one of a remote store
through fsspec.

[Note: publishing] Nobody may ever take half a checkpoint for a whole one, whatever is killed at
whatever moment. The marker is written into a checkpoint last, when all other files are on disk.
What else there is depends on the store:

    local     A checkpoint is written as a draft, `iter_0000020.<token>.saving`, and renamed to `iter_0000020`, which is
              one step for every reader. What is taken away is renamed first as well, to
              `<name>.<token>.deleting`: so a publish that races with a sweep finds either all of
              its draft or none of it.
    remote    Object stores cannot rename a folder. The files stand under their final names from the start, and the
              marker alone makes them a checkpoint: it is written last and deleted first,
              `.metadata` right after it. Two runs must not save into one remote folder: a sweep by
              one may come between the steps of the other.

A remote folder that this class began also holds a sign of it, written first and deleted last.
Without one a sweep leaves a folder alone: another program may keep checkpoints of its own there,
and they have no marker either.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.format.manifest import MARKER_FILE, METADATA_FILE
from megatron.core.dist_checkpointing.format.names import iteration_of, parse_folder
from megatron.core.dist_checkpointing.save.data_sink import DataSink, LocalSink, RemoteSink, naming
from megatron.core.files import (
    Sync,
    UnusableFileError,
    open_regular,
    published,
    read_regular,
    sync_folder,
)

logger = logging.getLogger(__name__)

MAX_SMALL_BYTES = 1 << 28  # of a file that is read whole
MAX_METADATA_BYTES = 1 << 31  # of the metadata of fifteen million chunks

SIGN_FILE = "begun.txt"  # in remote folders, see [Note: publishing]
_SAVING, _DELETING, _DAMAGED = ".saving", ".deleting", ".damaged"
_TEMPORARY = ".tmp"  # how names end that `megatron.core.files.temporary_path` gives


class Store(Protocol):
    """A folder of checkpoints. Paths are relative to it, with "/": "iter_0000010/.metadata".

    OSErrors of the file system reach the caller; FileNotFoundError always means that there is no
    such file.
    """

    @property
    def root(self) -> str:
        """The folder, as messages name it."""

    @property
    def is_rename_atomic(self) -> bool:
        """Whether checkpoints are published by rename, or by their markers. See [Note:
        publishing].
        """

    def folders(self) -> list[str]:
        """The names of all folders, drafts among them, sorted; none if there is no root yet."""

    def files(self, name: str) -> list[str]:
        """The names of the whole files in a folder, sorted. FileNotFoundError if a local store has
        no such folder.
        """

    def is_published(self, name: str) -> bool:
        """Whether the folder of a checkpoint, which is there, holds one that is published."""

    def make_folder(self, name: str) -> None:
        """Makes a folder, and the root if need be. One that is there already stays as it is."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    def size(self, path: str) -> int:
        """Bytes in a file."""

    def read(self, path: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """The content of a small file. UnusableFileError if it is larger, or is no regular file."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`, contiguous, with the bytes of a file from `offset` on. Threads may do so
        side by side.

        Raises:
            CheckpointDamagedError: if the file ends before that.
        """

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        """Writes a small file, which appears whole or not at all. Replaces one that is there.

        Args:
            sync: what is durable when this returns; remote stores make everything durable. With
                anything but `Sync.ALL`, the appearance of the file is the last thing that happens.
        """

    def delete(self, path: str) -> None:
        """Deletes a file, if there is one."""

    def open_data(self, path: str) -> DataSink:
        """A new data file. FileExistsError, where rename is atomic, if there is one: it would be
        another save's.
        """

    def draft_name(self, final: str, token: str) -> str:
        """The folder to write checkpoint `final` in.

        Args:
            token: that no other save has.
        """

    def publish(self, draft: str, final: str) -> bool:
        """Makes a draft, whose files are durable, the checkpoint `final`.

        Returns:
            Whether it is durable. If not, which is logged, it is published all the same, but may
            not outlive a crash.

        Raises:
            FileExistsError: if there is a checkpoint of that name. It stays as it is.
            FileNotFoundError: if the draft, or a part of it, has been swept.
        """

    def sweep(self) -> list[str]:
        """Deletes drafts that were never published, and what is left of a checkpoint half deleted.
        Returns the names.

        For the beginning of a run: the save of another run that is under way fails by it. What
        cannot be deleted is logged and left to the next sweep; it is not taken for a checkpoint.
        """

    def remove(self, name: str) -> None:
        """Deletes a published checkpoint, which is no longer one from the first step on."""

    def set_aside(self, name: str) -> str | None:
        """Renames a damaged checkpoint so that it is never found again.

        Returns:
            Where its files are, for people to look at; None from a remote store, which deletes
            them.
        """


def open_store(root: str | Path) -> Store:
    """The store in a folder: a path, or an fsspec URL such as "s3://bucket/run"."""
    if "://" not in str(root):
        return LocalStore(Path(root))
    file_system, path = fsspec.url_to_fs(str(root))
    return (
        LocalStore(Path(path))
        if isinstance(file_system, LocalFileSystem)
        else RemoteStore(str(root))
    )


class LocalStore:
    """A folder of a file system that all ranks see, on this machine or shared."""

    is_rename_atomic = True

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._root = root

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def files(self, name: str) -> list[str]:
        with os.scandir(self._root / name) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.is_file() and not entry.name.endswith(_TEMPORARY)
            )

    def is_published(self, name: str) -> bool:  # noqa: ARG002 (a draft has another name)
        return True

    def make_folder(self, name: str) -> None:
        folder = self._root / name
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in reversed(missing):
            sync_folder(place.parent)

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def read(self, path: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        return read_regular(self._root / path, max_bytes=max_bytes)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        rest = buffer.cast("B")
        with open_regular(self._root / path) as file:
            file.seek(offset)
            while rest:
                num_read = file.readinto(rest)
                if not num_read:
                    raise _truncated(
                        f"{self.root}/{path}", offset, buffer.nbytes, buffer.nbytes - rest.nbytes
                    )
                rest = rest[num_read:]

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        with naming(self._root / path), published(self._root / path, sync) as stream:
            stream.write(content)

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def open_data(self, path: str) -> DataSink:
        return LocalSink(self._root / path)

    def draft_name(self, final: str, token: str) -> str:
        return f"{final}.{token}{_SAVING}"

    def publish(self, draft: str, final: str) -> bool:
        source, target = self._root / draft, self._root / final
        if os.path.lexists(target):
            raise _is_published(target)

        folder = None
        try:
            folder = source.stat()
            # The names of the files: other ranks leave this to the rank that publishes
            # (`Sync.CONTENT`).
            sync_folder(source)
            source.rename(target)
        except OSError as error:
            # A network file system may carry out a rename and answer its repetition with an error.
            if folder is None or not _is_at(target, folder):
                _raise_unpublished(error, source, target)

        # From here on there is a checkpoint, and nothing may look like a failure to publish it.
        try:
            sync_folder(self._root)
        except OSError as error:
            logger.warning("%s is published, but may not outlive a crash: %s", target, error)
            return False
        return True

    def sweep(self) -> list[str]:
        abandoned = [name for name in self.folders() if _is_abandoned(name)]
        return _delete_each(abandoned, self._delete, self.root)

    def remove(self, name: str) -> None:
        self._delete(name)

    def set_aside(self, name: str) -> str:
        aside = f"{name}.{secrets.token_hex(4)}{_DAMAGED}"
        (self._root / name).rename(self._root / aside)
        sync_folder(self._root)
        return aside

    def _delete(self, name: str) -> None:
        folder = self._root / name
        if not name.endswith(_DELETING):
            folder = folder.rename(self._root / f"{name}.{secrets.token_hex(8)}{_DELETING}")
            sync_folder(self._root)
        if folder.is_symlink():
            folder.unlink()
        while folder.exists():
            # Another process that sweeps may be deleting it, too, and be ahead by a file.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)


class RemoteStore:
    """A folder behind an fsspec URL. Its files must come into being whole, as objects do. See
    [Note: publishing].
    """

    is_rename_atomic = False

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        # Without stubs for fsspec there is no better type.
        self._files: Any
        self._files, path = fsspec.url_to_fs(url)
        self._path = path.rstrip("/")

    def folders(self) -> list[str]:
        return sorted(name for name, kind in self._list(self._path).items() if kind == "directory")

    def files(self, name: str) -> list[str]:
        return sorted(file for file, kind in self._list(self._at(name)).items() if kind == "file")

    def is_published(self, name: str) -> bool:
        return self.exists(f"{name}/{MARKER_FILE}")

    def make_folder(self, name: str) -> None:
        self._files.makedirs(self._at(name), exist_ok=True)
        # An object store has no folders, but files alone.
        self.write(
            f"{name}/{SIGN_FILE}", f"Not a checkpoint unless {MARKER_FILE} is here, too.\n".encode()
        )

    def exists(self, path: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._at(path)))

    def size(self, path: str) -> int:
        self._files.invalidate_cache()
        return int(self._files.size(self._at(path)))

    def read(self, path: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        size = self.size(path)
        if size > max_bytes:
            message = f"Expected a file of at most {max_bytes} bytes, got {size}"
            raise UnusableFileError(errno.EFBIG, message, f"{self.root}/{path}")
        return bytes(self._files.cat_file(self._at(path)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if buffer.nbytes:
            content = self._files.cat_file(self._at(path), start=offset, end=offset + buffer.nbytes)
            if len(content) != buffer.nbytes:
                raise _truncated(f"{self.root}/{path}", offset, buffer.nbytes, len(content))
            buffer.cast("B")[:] = content

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:  # noqa: ARG002 (all)
        self._files.pipe_file(self._at(path), content)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def open_data(self, path: str) -> DataSink:
        return RemoteSink(self._files, self._at(path))

    def draft_name(self, final: str, token: str) -> str:  # noqa: ARG002 (nothing is renamed here)
        return final

    def publish(self, draft: str, final: str) -> bool:
        """The marker has been written by now, and that was all. See [Note: publishing]."""
        if draft != final:
            raise ValueError(f"Expected the draft of {final} under its own name, got {draft}.")

        try:
            is_whole = all(self.exists(f"{final}/{name}") for name in (MARKER_FILE, METADATA_FILE))
        except Exception as error:  # remote stores have errors of their own
            # The marker was acknowledged. This look is for sweeps by a second run, which must not
            # save here anyway.
            path = f"{self.root}/{final}"
            logger.warning("%s is published, but cannot be looked at: %s", path, error)
            return False
        if not is_whole:
            # Nobody must take what is left for a checkpoint.
            with contextlib.suppress(Exception):
                self._files.rm_file(self._at(f"{final}/{MARKER_FILE}"))
            raise _is_swept(f"{self.root}/{final}")
        return True

    def sweep(self) -> list[str]:
        named = [name for name in self.folders() if iteration_of(name) is not None]
        begun = [name for name in named if self._is_begun(name)]
        return _delete_each(begun, self._delete, self.root)

    def remove(self, name: str) -> None:
        self._delete(name)

    def set_aside(self, name: str) -> None:
        # Its place will be taken, and there is no renaming it.
        self._delete(name)

    def _is_begun(self, name: str) -> bool:
        """Whether this class has begun a checkpoint that is not published, or no longer."""
        names = self._list(self._at(name))
        return SIGN_FILE in names and MARKER_FILE not in names

    def _delete(self, name: str) -> None:
        order = {MARKER_FILE: 0, METADATA_FILE: 1, SIGN_FILE: 3}
        names = sorted(self._list(self._at(name)), key=lambda file: (order.get(file, 2), file))
        if not names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.root}/{name}")
        for file in names:
            self._files.rm(self._at(f"{name}/{file}"), recursive=True)
        # An object store has lost the folder with its last file.
        with contextlib.suppress(FileNotFoundError):
            self._files.rmdir(self._at(name))

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    def _list(self, path: str) -> dict[str, str]:
        """{name: "file" or "directory"} of what a folder holds; nothing if there is none."""
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] for entry in entries}


def _delete_each(names: Iterable[str], delete: Callable[[str], None], root: str) -> list[str]:
    """The names of those that `delete` deleted. See `Store.sweep`."""
    deleted = []
    for name in names:
        try:
            delete(name)
        except FileNotFoundError:
            continue  # another process has swept or published it meanwhile
        except OSError as error:
            logger.warning(
                "Could not delete all of %s/%s, which is no checkpoint: %s", root, name, error
            )
        else:
            deleted.append(name)
    return deleted


def _is_abandoned(name: str) -> bool:
    found = parse_folder(name)
    return found is not None and found.suffix.endswith((_SAVING, _DELETING))


def _truncated(path: str, offset: int, nbytes: int, num_read: int) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"Expected {nbytes} bytes at byte {offset} of {path}, got {num_read}: truncated."
    )


def _is_at(path: Path, folder: os.stat_result) -> bool:
    """Whether a folder, as it was before it was renamed, is the one at a path now."""
    try:
        return os.path.samestat(path.lstat(), folder)
    except OSError:
        return False


def _raise_unpublished(error: OSError, source: Path, target: Path) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        raise _is_swept(source) from error
    # Another run was faster. The system renames onto an empty folder only, which no checkpoint is.
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
        raise _is_published(target) from error
    raise error


def _is_published(target: Path) -> FileExistsError:
    return FileExistsError(f"Expected no checkpoint yet at {target}, got one.")


def _is_swept(source: Path | str) -> FileNotFoundError:
    return FileNotFoundError(
        f"Expected the whole draft at {source}, got less: another run may have swept it."
    )
