"""Where each training sample starts: computed once per data, split and sequence length, and kept in
a mapped file.

[Note: the order of samples]

The sequences of a split, laid end to end in a random order, are one epoch's token stream. Sample j
of the epoch is the window of seq_length + 1 tokens that starts at token j * seq_length: the last
token of one window, a label only, is the first of the next.

    documents     A A A A A B B C C C C C C     seq_length 4
    window 0      A A A A A
    window 1              A B B C C
    window 2                      C C C C C     the rest after the last whole window is dropped

Both orders, of documents in the stream and of samples drawn from the epoch, are
`RandomPermutation`s of (seed, epoch). Only the document that a window starts in cannot be computed
on the spot, since that takes a running sum over all documents before it. So only this is stored.

[Note: a stored start is not believed]

The cache's directory may be shared, and files in it may rot. Checking all starts when the file is
opened would cost as much as computing them. But a window's last token is the first of the next
window: reading a window leads to where the next one starts, and after the last one the rest of the
epoch is known, too. So each window that is read is checked against the start that follows. A wrong
start is found before any of its tokens are used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.core.datasets.data_files import DataFile, IndexedDatasetError, MappedFile
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.permutation import RandomPermutation, derive_key
from megatron.core.files import published

logger = logging.getLogger(__name__)

# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_FORMAT = 1  # raised when the same description would give other numbers
_SECONDS_UNTIL_STALE = 3600
_CHUNK = 1 << 18  # documents, or samples, handled at a time: it bounds the memory of a build


@functools.lru_cache(maxsize=64)
def epoch_permutation(size: int, seed: int, purpose: str, epoch: int) -> RandomPermutation:
    """The order of `size` things ("documents" or "samples") in one epoch."""
    return RandomPermutation(size, derive_key(seed, purpose, epoch))


@dataclass(frozen=True)
class EpochStream:
    """The sequences of one split as an endless row of epochs, each in a separate order."""

    indexed: IndexedDataset
    documents: range  # sequences of `indexed` that belong to the split
    seed: int

    def sequences(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sequences of `indexed` at these positions of the epoch's stream: int64 [n] ->
        int64 [n].
        """
        order = epoch_permutation(len(self.documents), self.seed, "documents", epoch)
        return order(positions) + self.documents.start

    def sample_starts(
        self, epoch: int, seq_length: int, num_samples: int
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Where windows 0 .. num_samples - 1 of the epoch start, in pieces.

        Yields:
            int64 [n, 2]: position of the document in the stream, offset of the first token in that
            document.
        """
        num_tokens = 0
        num_done = 0
        for first in range(0, len(self.documents), _CHUNK):
            positions = np.arange(first, min(first + _CHUNK, len(self.documents)), dtype=np.int64)
            lengths = self.indexed.gather_lengths(self.sequences(epoch, positions))
            ends = num_tokens + np.cumsum(lengths, dtype=np.int64)
            num_tokens = int(ends[-1])
            reached = min(num_samples, -(-num_tokens // seq_length))
            for low in range(num_done, reached, _CHUNK):
                tokens = np.arange(low, min(low + _CHUNK, reached), dtype=np.int64) * seq_length
                # The first document that ends beyond the token; so it is never an empty one.
                found = np.searchsorted(ends, tokens, side="right")
                starts = np.empty((len(tokens), 2), dtype="<i8")
                starts[:, 0] = first + found
                starts[:, 1] = tokens - ends[found] + lengths[found]
                yield starts
            num_done = reached


@dataclass(frozen=True)
class SampleStarts:
    """Where windows start, as stored. See [Note: a stored start is not believed].

    Attributes:
        file: the index, mapped.
        values: a view of it, int64 [num_epochs, samples_per_epoch, 2].
    """

    file: MappedFile
    values: npt.NDArray[np.int64]

    def at(self, epoch: int, window: int) -> tuple[int, int]:
        """Position of the document in the epoch's stream, offset of the first token in it."""
        self.file.check_size()
        document, offset = self.values[epoch, window].tolist()
        return document, offset


@dataclass(frozen=True)
class SampleIndex:
    """The stored starts of the samples of `num_epochs` epochs.

    Attributes:
        stream: the tokens.
        seq_length: tokens from one window to the next.
        samples_per_epoch: whole windows in an epoch.
        num_epochs: epochs stored.
        folder: the directory of the file; created if missing.
    """

    stream: EpochStream
    seq_length: int
    samples_per_epoch: int
    num_epochs: int
    folder: Path

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_epochs, self.samples_per_epoch, 2)

    @functools.cached_property
    def description(self) -> dict[str, object]:
        """All that the numbers depend on; its hash is the file's name."""
        indexed, documents = self.stream.indexed, self.stream.documents
        files = []
        # The files that are mapped, not the ones that may be under their names by now.
        for path, version in (
            (indexed.idx_path, indexed.idx_version),
            (indexed.bin_path, indexed.bin_version),
        ):
            files.append(
                {
                    "path": str(path.resolve()),
                    "bytes": version.num_bytes,
                    "mtime_ns": version.mtime_ns,
                }
            )

        return {
            "format": _FORMAT,
            "files": files,
            "documents": [documents.start, documents.stop],
            "seq_length": self.seq_length,
            "seed": self.stream.seed,
            "num_epochs": self.num_epochs,
        }

    @property
    def path(self) -> Path:
        """The file of starts, int64 [num_epochs, samples_per_epoch, 2] in numpy's format."""
        text = json.dumps(self.description, sort_keys=True)
        return self.folder / f"{xxhash.xxh3_128_hexdigest(text.encode())}.npy"

    def load(self) -> SampleStarts:
        """The starts, mapped. The first process to come builds the file; others wait for it.

        Raises:
            IndexedDatasetError: the index cannot be written; the message names --data-cache-path.
        """
        found = self._map()
        if found is not None:
            return found

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                found = self._map()
                if found is None:
                    self._remove_leftovers()
                    self._build_in_turn()
                    found = self._map()
        except OSError as error:
            expected = "a writable directory for the sample index"
            raise IndexedDatasetError(
                f"--data-cache-path: expected {expected}, got {self.folder} ({error})."
            ) from error

        if found is None:
            expected = "the sample index that was just written"
            raise IndexedDatasetError(f"{self.path}: expected {expected}, got another file.")

        return found

    def _map(self) -> SampleStarts | None:
        """The file, mapped, or None without one of the right shape.

        It is not parsed: `_build` alone writes it, so its header and size are known.
        """
        if not os.path.lexists(self.path):
            return None

        header = self._header()
        num_bytes = len(header) + 8 * math.prod(self.shape)
        try:
            file = DataFile(self.path, "a sample index")
            if file.version.num_bytes != num_bytes or file.read(0, len(header)) != header:
                expected = f"starts of shape {self.shape}"
                raise IndexedDatasetError(f"{self.path}: expected {expected}, got something else.")
            mapped = file.map()
        except IndexedDatasetError as error:
            # As text: a kept record would keep the error's frames, and their open files.
            logger.warning("%s It is built anew.", str(error))
            return None

        return SampleStarts(mapped, mapped.content[len(header) :].view("<i8").reshape(self.shape))

    def _header(self) -> bytes:
        """Numpy's header of the file."""
        stream = io.BytesIO()
        described = {"descr": "<i8", "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(stream, described)
        return stream.getvalue()

    def _build_in_turn(self) -> None:
        try:
            self._build()
        except FileNotFoundError:
            # A process with separate locks has mistaken the unfinished file for the remains of a
            # killed build and deleted it. It does so once, before it builds.
            if self._map() is None:
                self._build()

    def _build(self) -> None:
        begun = time.monotonic()
        with published(self.path.with_suffix(".json")) as stream:
            stream.write(json.dumps(self.description, indent=2, sort_keys=True).encode() + b"\n")
        with published(self.path) as stream:
            stream.write(self._header())
            for epoch in range(self.num_epochs):
                for starts in self.stream.sample_starts(
                    epoch, self.seq_length, self.samples_per_epoch
                ):
                    stream.write(starts.tobytes())

        logger.info(
            "sample index of %s (%d documents, %d epochs of %d samples): built in %.1f s",
            self.stream.indexed.prefix,
            len(self.stream.documents),
            self.num_epochs,
            self.samples_per_epoch,
            time.monotonic() - begun,
        )

    def _remove_leftovers(self) -> None:
        """Removes what killed builds have left: of this index, whose lock is held, and files of
        others without a write for an hour.
        """
        # The file system's clock, which may differ from this node's.
        lock = self.path.with_suffix(".lock")
        os.utime(lock)
        now = lock.stat().st_mtime
        for path in self.folder.glob(f"{'[0-9a-f]' * 32}.npy.*.tmp"):
            with contextlib.suppress(OSError):
                is_own = path.name.startswith(f"{self.path.name}.")
                if is_own or now - path.lstat().st_mtime > _SECONDS_UNTIL_STALE:
                    path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file among the processes of this node.

    The file stays: if it were removed, a process that waits and one that comes later could lock two
    different files. Without locks in the file system every process builds the index.

    Raises:
        OSError: the file cannot be opened, or is something else. Links are not followed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s cannot be locked (%s); processes may each build the sample index.", path, error
            )
        yield
    finally:
        os.close(descriptor)
