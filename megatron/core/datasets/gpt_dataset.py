"""Training samples from token files: sample i is a function of the data, the split, seq_length, the seed and i."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_dataset import NumberedDataset
from megatron.core.datasets.sample_index import EpochStream, SampleIndex, epoch_permutation
from megatron.core.options import ConfigError


class TooFewTokensError(ConfigError):
    """A part of the data that holds not even one sample."""


class GPTDataset(NumberedDataset):
    """Windows of seq_length + 1 tokens over an endless, reshuffled stream of documents.

    See [Note: the order of samples] in sample_index.py. Sample i belongs to epoch i // samples_per_epoch. Its content
    does not depend on `num_samples`: a longer run sees the samples of the shorter one first.

    Args:
        indexed: the token files.
        documents: the split, as a range of sequences of `indexed` (Megatron splits by sequences too).
        num_samples: samples that will be asked for; it decides how many epochs are indexed.
        seq_length: tokens of a sample, and as many labels.
        seed: decides both orders.
        cache_path: folder of the sample index; by default `cache/GPTDataset_indices` beside the data.
        vocab_size: number of embeddings; token ids from there on are refused when met. None: they are not checked.

    Raises:
        TooFewTokensError: fewer than seq_length + 1 tokens in the split.
        ValueError: tokens that are no integers, or a range beyond the data.
        OSError: the sample index cannot be written.
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
            raise ValueError(f"{indexed.prefix}: expected tokens of an integer dtype, got {indexed.dtype}.")
        if documents.step != 1 or not 0 <= documents.start <= documents.stop <= len(indexed):
            raise ValueError(f"{indexed.prefix}: expected a part of range({len(indexed)}), got {documents}.")
        if num_samples < 1 or seq_length < 1:
            raise ValueError(f"Expected at least 1 sample of at least 1 token, got {num_samples} of {seq_length}.")
        self.num_tokens = indexed.num_tokens(documents)
        self.samples_per_epoch = max(0, self.num_tokens - 1) // seq_length
        if self.samples_per_epoch == 0:
            raise TooFewTokensError(
                f"{indexed.prefix}: expected at least {seq_length + 1} tokens (--seq-length + 1) in documents "
                f"{documents.start} to {documents.stop}, got {self.num_tokens}."
            )
        self.indexed = indexed
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        folder = indexed.bin_path.parent / "cache" / "GPTDataset_indices" if cache_path is None else Path(cache_path)
        self._stream = EpochStream(indexed, documents, seed)
        num_epochs = -(-num_samples // self.samples_per_epoch)
        self._index = SampleIndex(self._stream, seq_length, self.samples_per_epoch, num_epochs, folder)
        self._starts = self._index.load()  # int64 [num_epochs, samples_per_epoch, 2]

    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`: two views of one window.

        Raises:
            ValueError: a token id that has no embedding.
            RuntimeError: the sample index points to where the epoch ends too soon, so it is not that of the data.
        """
        epoch, position = divmod(index, self.samples_per_epoch)
        order = epoch_permutation(self.samples_per_epoch, self.seed, "samples", epoch)
        document, offset = self._starts[epoch, order(position)]
        window = self._read(epoch, int(document), int(offset))
        self._check_vocabulary(window)
        tokens = torch.from_numpy(window)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}

    def _read(self, epoch: int, document: int, offset: int) -> npt.NDArray[np.int64]:
        """The seq_length + 1 tokens from `offset` of the document at position `document` of the epoch's stream on."""
        num_needed = self.seq_length + 1
        window = np.empty(num_needed, dtype=np.int64)
        num_documents = len(self._stream.documents)
        # As many documents as hold that many tokens on average; twice as many each time that was too few.
        num_ahead = 2 + num_needed * num_documents // self.num_tokens
        num_read = 0
        begin = document
        while num_read < num_needed:
            if document >= num_documents:
                raise RuntimeError(
                    f"{self._index.path}: expected {num_needed} tokens from document {begin} of epoch {epoch} on, got "
                    f"{num_read}. The sample index is not that of the data; it may be removed."
                )
            stop = min(document + num_ahead, num_documents)
            sequences = self._stream.sequences(epoch, np.arange(document, stop, dtype=np.int64))
            lengths = self.indexed.gather_lengths(sequences)
            for sequence, length in zip(sequences.tolist(), lengths.tolist(), strict=True):
                part = min(length - offset, num_needed - num_read)
                if part > 0:
                    window[num_read : num_read + part] = self.indexed.get(sequence, offset, part)
                    num_read += part
                offset = 0
                if num_read == num_needed:
                    break
            document, num_ahead = stop, 2 * num_ahead
        return window

    def _check_vocabulary(self, window: npt.NDArray[np.int64]) -> None:
        if self.vocab_size is None:
            return
        lowest, highest = int(window.min()), int(window.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise ValueError(
                f"{self.indexed.prefix}: expected token ids in range({self.vocab_size}), the vocabulary size, got "
                f"{lowest if lowest < 0 else highest}. The data was made with another tokenizer than this run's."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would carry its content; a worker maps the file itself.
        return {name: value for name, value in self.__dict__.items() if name != "_starts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._starts = self._index.load()
