"""Training samples from token files: sample i is a function of the data, the split, seq_length, the
seed and i.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.data_files import IndexedDatasetError, check_vocabulary
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_dataset import NumberedDataset
from megatron.core.datasets.sample_index import EpochStream, SampleIndex, epoch_permutation
from megatron.core.options import ConfigError


class TooFewTokensError(ConfigError):
    """A part of the data that holds not even one sample."""


class GPTDataset(NumberedDataset):
    """Windows of seq_length + 1 tokens over an endless, reshuffled stream of documents.

    See [Note: the order of samples] in sample_index.py. Sample i belongs to epoch i //
    samples_per_epoch. Its content does not depend on `num_samples`: a longer run sees the samples
    of the shorter one first.

    Args:
        indexed: the token files.
        documents: the split, as a range of sequences of `indexed` (Megatron splits by sequences
            too).
        num_samples: samples that will be asked for; it decides how many epochs are indexed.
        seq_length: tokens of a sample, and as many labels.
        seed: decides both orders.
        cache_path: directory of the sample index; by default `cache/GPTDataset_indices` next to the
            data.
        vocab_size: number of embeddings; token ids from there on are rejected when met. None: they
            are not checked.

    Raises:
        TooFewTokensError: fewer than seq_length + 1 tokens in the split.
        IndexedDatasetError: tokens that are no integers, or a sample index that cannot be written.
        ValueError: a range beyond the data.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_path: str | Path | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if indexed.dtype.kind not in "iu":
            expected = "tokens of an integer dtype"
            raise IndexedDatasetError(
                f"{indexed.prefix}: expected {expected}, got {indexed.dtype}."
            )

        if documents.step != 1 or not 0 <= documents.start <= documents.stop <= len(indexed):
            raise ValueError(
                f"{indexed.prefix}: expected a part of range({len(indexed)}), got {documents}."
            )
        if num_samples < 1 or seq_length < 1:
            raise ValueError(
                f"Expected at least 1 sample of at least 1 token, got {num_samples} of "
                f"{seq_length}."
            )

        self.num_tokens = indexed.num_tokens(documents)
        self.samples_per_epoch = max(0, self.num_tokens - 1) // seq_length
        if self.samples_per_epoch == 0:
            raise TooFewTokensError(
                f"{indexed.prefix}: expected at least {seq_length + 1} tokens (--seq-length + 1) "
                f"in documents {documents.start} to {documents.stop}, got {self.num_tokens}."
            )

        self.indexed = indexed
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        folder = (
            indexed.bin_path.parent / "cache" / "GPTDataset_indices"
            if cache_path is None
            else Path(cache_path)
        )
        self._stream = EpochStream(indexed, documents, seed)
        num_epochs = -(-num_samples // self.samples_per_epoch)
        self._index = SampleIndex(
            self._stream, seq_length, self.samples_per_epoch, num_epochs, folder
        )
        self._starts = self._index.load()

    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`: two views of one window.

        Raises:
            IndexedDatasetError: a token id that has no embedding, a sample index that is not that
                of the data, or files that have changed or cannot be read any more.
        """
        epoch, position = divmod(index, self.samples_per_epoch)
        order = epoch_permutation(self.samples_per_epoch, self.seed, "samples", epoch)
        window = self._read(epoch, order(position))
        self._check_vocabulary(window)
        tokens = torch.from_numpy(window)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}

    def _read(self, epoch: int, number: int) -> npt.NDArray[np.int64]:
        """The seq_length + 1 tokens of one of the epoch's windows."""
        num_needed = self.seq_length + 1
        window = np.empty(num_needed, dtype=np.int64)
        first, offset = begin = self._starts.at(epoch, number)

        num_read = 0
        for place, sequence, length in self._documents_from(epoch, first):
            # A window starts in a document that has tokens left; later ones may be empty.
            if offset < 0 or (num_read == 0 and offset >= length):
                break
            part = min(length - offset, num_needed - num_read)
            if part:
                window[num_read : num_read + part] = self.indexed.get(sequence, offset, part)
                num_read += part
            if num_read == num_needed:
                self._check_end(epoch, number, (place, offset + part - 1))
                return window
            offset = 0

        expected = f"{num_needed} tokens from {_shown(begin)} on"
        raise self._wrong_start(epoch, number, expected, num_read)

    def _documents_from(self, epoch: int, place: int) -> Iterator[tuple[int, int, int]]:
        """From a position of the epoch's stream on: position, sequence, and its length.

        Empty for a position outside of the stream.
        """
        num_documents = len(self._stream.documents)
        # As many documents as hold a window on average; twice as many each time that was too few.
        num_ahead = 2 + (self.seq_length + 1) * num_documents // self.num_tokens
        while 0 <= place < num_documents:
            stop = min(place + num_ahead, num_documents)
            sequences = self._stream.sequences(epoch, np.arange(place, stop, dtype=np.int64))
            lengths = self.indexed.gather_lengths(sequences)
            yield from zip(range(place, stop), sequences.tolist(), lengths.tolist(), strict=True)
            place, num_ahead = stop, 2 * num_ahead

    def _check_end(self, epoch: int, number: int, last: tuple[int, int]) -> None:
        """Holds where a window's last token was found against what follows.

        See [Note: a stored start is not believed] in sample_index.py.
        """
        if number + 1 < self.samples_per_epoch:
            following = self._starts.at(epoch, number + 1)
            if following != last:
                expected = f"its last token at the start of the next one, {_shown(following)}"
                raise self._wrong_start(epoch, number, expected, _shown(last))
            return

        # The rest of the epoch is less than a window.
        num_left = self.num_tokens - 1 - self.samples_per_epoch * self.seq_length
        place, offset = last
        num_found = -offset - 1
        for _, _, length in self._documents_from(epoch, place):
            num_found += length
            if num_found > num_left:
                break

        if num_found != num_left:
            got = "more" if num_found > num_left else num_found
            raise self._wrong_start(epoch, number, f"{num_left} tokens after it", got)

    def _wrong_start(
        self,
        epoch: int,
        number: int,
        expected: str,
        got: int | str,
    ) -> IndexedDatasetError:
        window = f"window {number} of epoch {epoch}"
        return IndexedDatasetError(
            f"{self._index.path}: {window}: expected {expected}, got {got}. "
            "The sample index is not that of the data; it may be removed."
        )

    def _check_vocabulary(self, window: npt.NDArray[np.int64]) -> None:
        if self.vocab_size is not None:
            check_vocabulary(window, self.vocab_size, self.indexed.prefix)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would carry its content; a worker maps the file itself.
        return {name: value for name, value in self.__dict__.items() if name != "_starts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._starts = self._index.load()


def _shown(start: tuple[int, int]) -> str:
    return f"document {start[0]}, token {start[1]}"
