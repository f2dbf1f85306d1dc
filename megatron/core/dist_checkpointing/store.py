"""A directory of checkpoints: in the file system, or in a remote store through fsspec.

[Note: publishing] Half a checkpoint must never look like a whole one, whatever is killed at
whatever moment. The marker is written last, when all other files are on disk. The rest depends on
the store:

    local     A checkpoint is written as a draft, `iter_0000020.<token>.saving`, and renamed to
              `iter_0000020`, which is one step for every reader. A directory to delete is first
              renamed as well, to `<name>.<token>.deleting`. So a publish that races with a sweep
              finds all of its draft, or no draft.
    remote    Object stores cannot rename a directory. The files have their final names from the
              start, and the marker alone makes them a checkpoint: it is written last and deleted
              first, `.metadata` right after it. Two runs must not save into one remote directory:
              a sweep by one may come between the steps of the other.

In a remote directory, a sign that this class created it is written first and deleted last. A sweep
does not touch a directory without one: it may be another program's checkpoint, which has no marker
either.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import fsspec

from megatron.core.dist_checkpointing.config import check_protocol, local_folder
from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from megatron.core.dist_checkpointing.format.manifest import MARKER_FILE, METADATA_FILE
from megatron.core.dist_checkpointing.format.names import (
    checkpoint_name,
    iteration_of,
    parse_folder,
)
from megatron.core.dist_checkpointing.save.data_file import DataSink, LocalSink, RemoteSink
from megatron.core.files import (
    Sync,
    UnusableFileError,
    open_regular,
    published,
    read_regular,
    sync_folder,
)
from megatron.core.shared_file import naming

logger = logging.getLogger(__name__)

MOST_SMALL_BYTES = 1 << 26  # of a file that is read whole
# Of an index, `.metadata` or a manifest: about 40 million chunks.
MOST_METADATA_BYTES = 1 << 32
_REQUEST_BYTES = 1 << 22  # of one request to a remote store

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"[0-9]{1,18}")
_MAX_SHOWN = 40  # characters of a tracker file in a message

SIGN_FILE = "begun.txt"  # in remote directories, see [Note: publishing]
_SAVING, _DELETING, _DAMAGED = ".saving", ".deleting", ".damaged"
_TEMPORARY = ".tmp"  # the suffix of names from `megatron.core.files.temporary_path`

Then: TypeAlias = Callable[[memoryview], None]


def ignore(_buffer: memoryview) -> None:
    """The default of `LocalStore.read_into`: no work on filled buffers."""


def open_store(root: str | Path) -> Store:
    """The store in a directory: a path, or an fsspec URL such as "s3://bucket/run". ConfigError as
    `check_protocol`.
    """
    check_protocol(str(root))
    folder = local_folder(str(root))
    return RemoteStore(str(root)) if folder is None else LocalStore(Path(folder))


def expect_folder(store: Store, name: str) -> None:
    """CheckpointNotFoundError unless the store has the directory of a checkpoint."""
    if not store.exists(name):
        place = path_of(store, name)
        raise CheckpointNotFoundError(f"Expected a checkpoint in {place}, got no such directory.")


def remove_or_warn(store: Store, name: str) -> None:
    """Deletes a directory that is no longer needed; a failure is only logged."""
    try:
        store.remove(name)
    except FileNotFoundError:
        pass  # it was never made, or another run was faster
    except OSError as error:
        logger.warning("could not delete %s: %s", path_of(store, name), error)


class LocalStore:
    """A directory of a file system that all ranks see, on this machine or shared.

    Paths are relative to it, with "/": "iter_0000010/.metadata". OSErrors of the file system reach
    the caller. FileNotFoundError always means a missing file.

    Attributes:
        root: the directory, as messages name it.
        is_rename_atomic: whether a rename publishes checkpoints, or their marker. See
            [Note: publishing].
    """

    is_rename_atomic = True

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._root = root

    def folders(self) -> list[str]:
        """The names of all directories, including drafts, sorted; empty if there is no root yet."""
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def files(self, name: str) -> list[str]:
        """The names of the complete files in a directory, sorted.

        FileNotFoundError if a local store has no such directory.
        """
        with os.scandir(self._root / name) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
        return sorted(name for name in names if not name.endswith(_TEMPORARY))

    def make_folder(self, name: str) -> None:
        """Makes a directory, and the root if need be. An existing one stays as it is."""
        folder = self._root / name
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        # A new directory's name is in its parent, which has to reach the disk.
        for place in reversed(missing):
            sync_folder(place.parent)

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        return (self._root / path).exists()

    def size(self, path: str) -> int:
        """Bytes in a file."""
        return (self._root / path).stat().st_size

    def read(self, path: str, max_bytes: int = MOST_SMALL_BYTES) -> bytes:
        """The content of a small file. UnusableFileError if it is larger, or no regular file."""
        return read_regular(self._root / path, max_bytes=max_bytes)

    def read_into(
        self, path: str, offset: int, buffers: Iterable[memoryview], then: Then = ignore
    ) -> None:
        """Fills buffers of bytes, one after the other, with a file from `offset` on. Thread-safe.

        Args:
            buffers: contiguous; one may come again once `then` has returned.
            then: called with each as soon as it has been filled, while it is still in the
                processor's cache. An error that it raises ends the reading.

        Raises:
            CheckpointDamagedError: if the file ends before that.
        """
        # Opened once for all buffers: each opened file has a separate read-ahead.
        with open_regular(self._root / path) as file:
            file.seek(offset)
            for buffer in buffers:
                rest = buffer
                while rest:
                    num_read = file.readinto(rest)
                    if not num_read:
                        got = buffer.nbytes - rest.nbytes
                        begin = file.tell() - got
                        raise _truncated(self._root / path, begin, buffer.nbytes, got)
                    rest = rest[num_read:]
                then(buffer)

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        """Writes a small file, which appears whole or not at all. Replaces an existing one.

        Args:
            sync: the parts that are durable when this returns; remote stores make everything
                durable. With anything but `Sync.ALL`, the appearance of the file is the last step.
        """
        with naming(self._root / path), published(self._root / path, sync) as stream:
            stream.write(content)

    def delete(self, path: str) -> None:
        """Deletes a file, if it exists."""
        (self._root / path).unlink(missing_ok=True)

    def open_data(self, path: str) -> DataSink:
        """A new data file. FileExistsError, where rename is atomic, if another save has made it."""
        return LocalSink(self._root / path)

    def draft_name(self, final: str, token: str) -> str:
        """The directory to write checkpoint `final` in.

        Args:
            token: that no other save has.
        """
        return f"{final}.{token}{_SAVING}"

    def publish(self, draft: str, final: str) -> bool:
        """Turns a draft, whose files are durable, into the checkpoint `final`.

        Returns:
            Whether that is durable. If not, which is logged, the checkpoint is published all the
            same, but may not outlive a crash.

        Raises:
            FileExistsError: if there is a checkpoint of that name. It stays as it is.
            FileNotFoundError: if the draft, or a part of it, has been swept.
        """
        source, target = self._root / draft, self._root / final
        if os.path.lexists(target):
            raise _is_published(target)

        folder = None
        try:
            folder = source.stat()
            # Brings the names of the files to disk, which other ranks leave to the rank that
            # publishes (`Sync.CONTENT`).
            sync_folder(source)
            source.rename(target)
        except OSError as error:
            # A network file system may rename, lose the response, repeat the request, and fail
            # then.
            if folder is None or not _is_at(target, folder):
                _raise_unpublished(error, source, target)

        # The checkpoint is published, so later errors must not look like failures.
        try:
            sync_folder(self._root)
        except OSError as error:
            logger.warning("%s is published, but may not outlive a crash: %s", target, error)
            return False
        return True

    def sweep(self) -> list[str]:
        """Deletes abandoned drafts and the remains of deleted checkpoints. Returns their names.

        For the beginning of a run: it makes another run's save in flight fail. Failures are logged
        and left to the next sweep; remains are never taken for a checkpoint.
        """
        abandoned = [name for name in self.folders() if _is_abandoned(name)]
        return _delete_each(abandoned, self.remove, self.root)

    def set_aside(self, name: str) -> str:
        """Renames a damaged checkpoint so that it is never found again.

        Returns:
            Where its files are, for people to look at; None if a remote store has deleted them.
        """
        aside = f"{name}.{secrets.token_hex(4)}{_DAMAGED}"
        (self._root / name).rename(self._root / aside)
        sync_folder(self._root)
        return aside

    def remove(self, name: str) -> None:
        """Deletes a published checkpoint. From the first step on, no reader finds it."""
        folder = self._root / name
        # The rename reaches the disk before any file is deleted: a crash must not bring back the
        # old name with half of the files.
        if not name.endswith(_DELETING):
            folder = folder.rename(self._root / f"{name}.{secrets.token_hex(8)}{_DELETING}")
            sync_folder(self._root)
        if folder.is_symlink():
            folder.unlink()
        while folder.exists():
            # A sweep by another process may be deleting the same files.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)


class RemoteStore:
    """A directory behind an fsspec URL, whose files appear whole, as objects do. Has the interface
    of `LocalStore`.

    Listings are cached by fsspec; what another process has written shows only without the cache.
    """

    is_rename_atomic = False

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._files: Any  # fsspec has no stubs
        self._files, path = fsspec.url_to_fs(url)
        self._path = path.rstrip("/")

    def folders(self) -> list[str]:
        return sorted(name for name, kind in self._list(self._path).items() if kind == "directory")

    def files(self, name: str) -> list[str]:
        return sorted(file for file, kind in self._list(self._at(name)).items() if kind == "file")

    def make_folder(self, name: str) -> None:
        self._files.makedirs(self._at(name), exist_ok=True)
        # An object store has no directories, so a file marks them.
        sign = f"Not a checkpoint unless {MARKER_FILE} is here, too.\n"
        self.write(f"{name}/{SIGN_FILE}", sign.encode())

    def exists(self, path: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._at(path)))

    def size(self, path: str) -> int:
        self._files.invalidate_cache()
        return int(self._files.size(self._at(path)))

    def read(self, path: str, max_bytes: int = MOST_SMALL_BYTES) -> bytes:
        size = self.size(path)
        if size > max_bytes:
            message = f"Expected a file of at most {max_bytes} bytes, got {size}"
            raise UnusableFileError(errno.EFBIG, message, path_of(self, path))
        return bytes(self._files.cat_file(self._at(path)))

    def read_into(
        self, path: str, offset: int, buffers: Iterable[memoryview], then: Then = ignore
    ) -> None:
        # Each request has a latency, so it is for several buffers.
        for batch in _batches(buffers):
            nbytes = sum(buffer.nbytes for buffer in batch)
            content = self._files.cat_file(self._at(path), start=offset, end=offset + nbytes)
            if len(content) != nbytes:
                raise _truncated(path_of(self, path), offset, nbytes, len(content))

            offset, rest = offset + nbytes, memoryview(content)
            for buffer in batch:
                buffer[:], rest = rest[: buffer.nbytes], rest[buffer.nbytes :]
                then(buffer)

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:  # noqa: ARG002 (all)
        self._files.pipe_file(self._at(path), content)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def open_data(self, path: str) -> DataSink:
        return RemoteSink(self._files, self._at(path))

    def draft_name(self, final: str, token: str) -> str:  # noqa: ARG002 (there is no rename)
        return final

    def publish(self, draft: str, final: str) -> bool:  # noqa: ARG002 (the same)
        """Only checks: writing the marker has published the checkpoint."""
        path = path_of(self, final)
        try:
            is_whole = all(self.exists(f"{final}/{name}") for name in (MARKER_FILE, METADATA_FILE))
        except Exception as error:  # remote stores raise other errors, too
            # The marker was acknowledged. The check is only for sweeps by a second run, which must
            # not save here anyway.
            logger.warning("%s is published, but cannot be looked at: %s", path, error)
            return False
        if not is_whole:
            # The remains must not look like a checkpoint.
            with contextlib.suppress(Exception):
                self._files.rm_file(self._at(f"{final}/{MARKER_FILE}"))
            raise _is_swept(path)
        return True

    def sweep(self) -> list[str]:
        named = [name for name in self.folders() if iteration_of(name) is not None]
        begun = [name for name in named if self._is_begun(name)]
        return _delete_each(begun, self.remove, self.root)

    def set_aside(self, name: str) -> str | None:
        # It cannot be renamed, and the next save of this iteration needs its place.
        self.remove(name)
        return None

    def _is_begun(self, name: str) -> bool:
        """Whether this class has created a checkpoint that is not published, or no longer."""
        names = self._list(self._at(name))
        return SIGN_FILE in names and MARKER_FILE not in names

    def remove(self, name: str) -> None:
        # See [Note: publishing] for the order.
        order = {MARKER_FILE: 0, METADATA_FILE: 1, SIGN_FILE: 3}
        names = sorted(self._list(self._at(name)), key=lambda file: (order.get(file, 2), file))
        if not names:
            message = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, message, path_of(self, name))

        for file in names:
            self._files.rm(self._at(f"{name}/{file}"), recursive=True)
        # An object store has lost the directory with its last file.
        with contextlib.suppress(FileNotFoundError):
            self._files.rmdir(self._at(name))

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    def _list(self, path: str) -> dict[str, str]:
        """{name: "file" or "directory"} of the entries of a directory, which need not exist."""
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] for entry in entries}


def _batches(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Buffers that are not empty, in lists for one request each."""
    batch: list[memoryview] = []
    for buffer in filter(len, buffers):
        batch.append(buffer)
        if sum(each.nbytes for each in batch) >= _REQUEST_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _truncated(source: Path | str, offset: int, nbytes: int, got: int) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"Expected {nbytes} bytes at byte {offset} of {source}, got {got}: truncated."
    )


Store: TypeAlias = LocalStore | RemoteStore


def path_of(store: Store, path: str) -> str:
    """A file or directory of a store, as messages name it."""
    return f"{store.root}/{path}"


def published_iterations(store: Store) -> list[int]:
    """The iterations of the published checkpoints, ascending; empty if the store has no directory
    yet.

    CheckpointError if there is a file in the directory's place.
    """
    # Only the root of a local store is a path of the file system.
    if store.is_rename_atomic and Path(store.root).exists() and not Path(store.root).is_dir():
        raise CheckpointError(f"Expected a directory of checkpoints at {store.root}, got a file.")
    names = {name: iteration_of(name) for name in store.folders()}
    found = [(name, iteration) for name, iteration in names.items() if iteration is not None]
    return sorted(
        iteration
        for name, iteration in found
        if store.is_rename_atomic or store.exists(f"{name}/{MARKER_FILE}")
    )


def latest_iteration(store: Store) -> int | None:
    """The iteration of the newest published checkpoint, or None.

    The directories decide, not the tracker file, which a crash may leave one behind.

    Raises:
        CheckpointError: if the tracker file is unreadable, or names a checkpoint that is not there.
            A run must not start afresh because its checkpoint cannot be found.
    """
    published = published_iterations(store)
    tracked = _read_tracker(store)
    if tracked is not None and tracked not in published:
        # A run may have published it in between.
        published = published_iterations(store)
    if tracked is None:
        if published:
            # A crash between the publication of the very first checkpoint and the tracker's.
            logger.warning(
                "%s has no %s; taking its newest checkpoint, %d",
                store.root,
                TRACKER_FILE,
                published[-1],
            )
        return published[-1] if published else None

    tracker = path_of(store, TRACKER_FILE)
    if tracked not in published:
        raise CheckpointError(
            f"Expected {path_of(store, checkpoint_name(tracked))}, which {tracker} names, got "
            f"checkpoints {published}. Name one with --ckpt-step, or correct the file."
        )
    if tracked != published[-1]:
        logger.warning(
            "%s names %d, and %d has been published since; taking that. To go back, use "
            "--ckpt-step.",
            tracker,
            tracked,
            published[-1],
        )
    return published[-1]


def track(store: Store, iteration: int) -> bool:
    """Makes the tracker file name a published checkpoint. Returns whether that is durable.

    Never raises: the checkpoint is published, so a failure is only logged.
    """
    try:
        store.write(TRACKER_FILE, f"{iteration}\n".encode())
    except Exception as error:  # remote stores raise other errors, too
        path = path_of(store, checkpoint_name(iteration))
        message = "%s is published, but %s may still name another: %s"
        logger.warning(message, path, TRACKER_FILE, error)
        return False

    return True


def _read_tracker(store: Store) -> int | None:
    """The iteration in the tracker file, or None if there is no such file."""
    tracker = path_of(store, TRACKER_FILE)
    try:
        content = store.read(TRACKER_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        got = error.strerror or error
        raise CheckpointError(f"Expected to read {tracker}, got {got}.") from error

    text = content.decode(errors="replace").strip()
    # Before int(), which raises another error for thousands of digits.
    if _ITERATION.fullmatch(text) is None:
        more = len(text) - _MAX_SHOWN
        shown = repr(text[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise CheckpointError(f"Expected an iteration in {tracker}, got {shown}.")
    return int(text)


def _delete_each(names: Iterable[str], delete: Callable[[str], None], root: str) -> list[str]:
    """Deletes directories, and returns the names of the deleted ones. See `LocalStore.sweep`."""
    deleted = []
    for name in names:
        try:
            delete(name)
        except FileNotFoundError:
            continue  # another process has swept or published it meanwhile
        except OSError as error:
            message = "Could not delete all of %s/%s, which is no checkpoint: %s"
            logger.warning(message, root, name, error)
        else:
            deleted.append(name)
    return deleted


def _is_abandoned(name: str) -> bool:
    found = parse_folder(name)
    return found is not None and found.suffix.endswith((_SAVING, _DELETING))


def _is_at(path: Path, folder: os.stat_result) -> bool:
    """Whether a directory, as it was before it was renamed, is the one at a path now."""
    try:
        return os.path.samestat(path.lstat(), folder)
    except OSError:
        return False


def _raise_unpublished(error: OSError, source: Path, target: Path) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        raise _is_swept(source) from error
    # Another run was faster: a rename replaces an empty directory, but never a checkpoint.
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
        raise _is_published(target) from error
    raise error


def _is_published(target: Path) -> FileExistsError:
    return FileExistsError(f"Expected no checkpoint yet at {target}, got one.")


def _is_swept(source: Path | str) -> FileNotFoundError:
    return FileNotFoundError(
        f"Expected the whole draft at {source}, got less: another run may have swept it."
    )
