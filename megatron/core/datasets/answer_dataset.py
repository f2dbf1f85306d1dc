"""Training samples of conversations: rows of whole documents, with a loss mask for the assistant's
tokens. Row i is a function of the files, the split, the length of rows, the seed and i.

    PREFIX.bin/.idx         a sequence of tokens for each conversation
    PREFIX_mask.bin/.idx    uint8 per token: 1 for tokens in the loss

Token files without a mask are text, and all of their tokens are in the loss. Files whose name
contains `_chat_document` are conversations and must have a mask.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.config import bin_path, idx_path
from megatron.core.datasets.data_files import IndexedDatasetError, check_vocabulary
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.packing import PackedRows
from megatron.core.datasets.sample_dataset import NumberedDataset, collate_rows
from megatron.core.options import ConfigError

logger = logging.getLogger(__name__)

CHAT_SUFFIX = "_chat_document"  # suffix of prefixes from `preprocess --chat`
_SHOWN = 5
_LENGTHS_AT_A_TIME = 1 << 20


def mask_prefix(prefix: str | Path) -> str:
    """Returns the prefix of the loss mask's files."""
    return f"{prefix}_mask"


def has_mask(prefix: str | Path) -> bool:
    """Returns whether token files are conversations. Otherwise they are text.

    Raises:
        IndexedDatasetError: conversations without a mask, or with only one of its files.
    """
    mask = mask_prefix(prefix)
    paths = (bin_path(mask), idx_path(mask))
    missing = [str(path) for path in paths if not path.is_file()]
    if not missing:
        return True
    if len(missing) == len(paths) and CHAT_SUFFIX not in Path(prefix).name:
        return False
    raise IndexedDatasetError(
        f"{prefix}: expected its loss mask, got no {' and no '.join(missing)}. Without the mask, "
        "the loss would include every token. Copy it from where the conversations were prepared, "
        "or prepare them again by `python -m megatron_hybrid preprocess --chat`."
    )


class AnswerFiles:
    """The files of conversations, or of text.

    Raises:
        IndexedDatasetError: files that are missing, or that do not match.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.tokens = IndexedDataset(prefix)
        self.mask: IndexedDataset | None = None
        if not has_mask(prefix):
            logger.info("%s has no loss mask, so it is text: the loss has all tokens", prefix)
            return

        mask = self.mask = IndexedDataset(mask_prefix(prefix))
        if mask.dtype != np.uint8 or len(mask) != len(self.tokens):
            raise IndexedDatasetError(
                f"{mask.prefix}: expected {len(self.tokens)} sequences of uint8, as {prefix} has "
                f"sequences, got {len(mask)} of {mask.dtype}."
            )
        for begin in range(0, len(mask), _LENGTHS_AT_A_TIME):
            numbers = np.arange(begin, min(begin + _LENGTHS_AT_A_TIME, len(mask)), dtype=np.int64)
            differs = mask.gather_lengths(numbers) != self.tokens.gather_lengths(numbers)
            if differs.any():
                first = int(numbers[differs.argmax()])
                raise IndexedDatasetError(
                    f"{mask.prefix}: expected a mask as long as the tokens of {prefix}, got "
                    f"another length in sequence {first}."
                )

    def __len__(self) -> int:
        """Number of conversations, or sequences of text."""
        return len(self.tokens)


class _Piece(NamedTuple):
    """Inputs of one document, starting at token `begin`; the labels are one token later."""

    sequence: int
    begin: int
    length: int


class AnswerDataset(NumberedDataset):
    """Rows of whole documents. Text longer than a row is divided. Rows are padded with a document
    without targets.

    A document of n tokens takes n - 1 positions: its last token is a label only.

    Args:
        files: files of the conversations.
        documents: the split, as a range of sequences.
        num_samples: number of rows.
        seq_length: tokens per row.
        seed: seed of the packing and of the order of rows.
        filler: the padding token.
        vocab_size: larger or equal token ids are rejected when they are read.
        is_cut: whether conversations longer than a row are truncated; a conversation with an empty
            loss mask in its first row is dropped.

    Raises:
        ConfigError: for conversations longer than a row, or none at all.
    """

    # The number of lengths varies.
    collate = staticmethod(collate_rows)

    def __init__(
        self,
        files: AnswerFiles,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        filler: int,
        vocab_size: int,
        *,
        is_cut: bool = False,
    ) -> None:
        self.files = files
        self.num_samples = num_samples
        self.seq_length = seq_length
        self._filler = filler
        self._vocab_size = vocab_size
        self._sequences, self._begins, self._lengths = self._pieces(documents, is_cut=is_cut)
        if len(self._lengths) == 0:
            raise ConfigError(
                f"--split: expected at least one document of {files.prefix} with tokens in the "
                "loss in each split, got none."
            )
        self._rows = PackedRows(self._lengths, seq_length, seed)
        self.samples_per_epoch = len(self._rows)

    def _pieces(self, documents: range, *, is_cut: bool) -> tuple[npt.NDArray[np.int64], ...]:
        """Returns the fields of the `_Piece`s of a split."""
        sequences = np.arange(documents.start, documents.stop, dtype=np.int64)
        lengths = self.files.tokens.gather_lengths(sequences).astype(np.int64) - 1
        sequences, lengths = sequences[lengths > 0], lengths[lengths > 0]
        if self.files.mask is None:
            counts = -(-lengths // self.seq_length)
            numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            begins = numbers * self.seq_length
            left = np.repeat(lengths, counts) - begins
            return np.repeat(sequences, counts), begins, np.minimum(left, self.seq_length)

        too_long = sequences[lengths > self.seq_length]
        if len(too_long) and not is_cut:
            raise ConfigError(
                f"--seq-length: expected at least {int(lengths.max())}, the longest conversation "
                f"of {self.files.prefix}, or --sft-truncate, got {self.seq_length}. "
                f"{len(too_long)} of {len(sequences)} conversations are longer, the first of them "
                f"{too_long[:_SHOWN].tolist()}."
            )
        sequences = np.setdiff1d(sequences, self._without_answers(too_long), assume_unique=True)
        lengths = self.files.tokens.gather_lengths(sequences).astype(np.int64) - 1
        return sequences, np.zeros_like(sequences), np.minimum(lengths, self.seq_length)

    def _without_answers(self, too_long: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns, and logs, conversations with an empty loss mask in their first row."""
        mask = self.files.mask
        assert mask is not None, "text has no conversations"
        found = [
            number for number in too_long.tolist() if not mask.get(number, 1, self.seq_length).any()
        ]
        if found:
            logger.warning(
                "%s: dropped %d of %d conversations that --sft-truncate cuts, since their first %d "
                "tokens are not in the loss, the first of them %s; raise --seq-length to train on "
                "them",
                self.files.prefix,
                len(found),
                len(too_long),
                self.seq_length,
                found[:_SHOWN],
            )
        return np.array(found, np.int64)

    def _sample(self, index: int) -> dict[str, Any]:
        """Returns row `index`.

        Returns:
            "tokens", "labels", "positions": [seq_length] int64. "loss_mask": [seq_length] fp32, 1
            for labels in the loss. "lengths": lengths of the documents. "padding": a tuple with the
            number of padded positions.

        Raises:
            IndexedDatasetError: unusable files, or a token without an embedding.
        """
        tokens = np.full(self.seq_length, self._filler, np.int64)
        labels = np.full(self.seq_length, self._filler, np.int64)
        loss_mask = np.zeros(self.seq_length, np.float32)
        positions = np.empty(self.seq_length, np.int64)
        lengths, begin = [], 0
        for number in self._rows[index]:
            sequence, first, length = (
                int(part[number]) for part in (self._sequences, self._begins, self._lengths)
            )
            window = self._checked(_Piece(sequence, first, length))
            stop = begin + length
            tokens[begin:stop], labels[begin:stop] = window[:-1], window[1:]
            loss_mask[begin:stop] = (
                1.0
                if self.files.mask is None
                else self.files.mask.get(sequence, first + 1, length) != 0
            )
            positions[begin:stop] = np.arange(length)
            lengths.append(length)
            begin = stop
        if begin < self.seq_length:
            lengths.append(self.seq_length - begin)
            positions[begin:] = np.arange(self.seq_length - begin)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "positions": torch.from_numpy(positions),
            "lengths": tuple(lengths),
            "padding": (self.seq_length - begin,),
        }

    def _checked(self, piece: _Piece) -> npt.NDArray[np.int64]:
        """Returns the tokens of a piece and the next one."""
        window = self.files.tokens.get(piece.sequence, piece.begin, piece.length + 1)
        window = window.astype(np.int64)
        check_vocabulary(window, self._vocab_size, self.files.prefix)
        return window
