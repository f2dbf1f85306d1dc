"""Training samples of text with images: rows of whole documents, with each image's position. Row i
is a function of the files, the split, the length of rows, the seed and i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.data_files import check_vocabulary
from megatron.core.datasets.image_text_files import ImageTextFiles, ImageTextSample
from megatron.core.datasets.packing import PackedRows
from megatron.core.datasets.sample_dataset import NumberedDataset
from megatron.core.models.multimodal.patch_grid import PatchGrid, decoder_positions
from megatron.core.options import ConfigError

_SHOWN = 5


class ImageTextDataset(NumberedDataset):
    """Rows of documents, which are packed once, in a random order; each epoch has the rows in
    another order. The rest of a row is filled up with a document without targets.

    Args:
        files: of the samples.
        documents: the split, as a range of samples.
        num_samples: rows that will be asked for.
        seq_length: tokens of a row.
        seed: decides both orders.
        filler: the token that fills up rows.
        vocab_size: token ids from there on are rejected when met.

    Raises:
        ConfigError: for samples longer than a row, or none at all.
    """

    def __init__(
        self,
        files: ImageTextFiles,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        filler: int,
        vocab_size: int,
    ) -> None:
        self.files = files
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self._filler = filler
        self._vocab_size = vocab_size
        self._rows = self._packed(documents)
        self._first = documents.start
        self.samples_per_epoch = len(self._rows)

    def _packed(self, documents: range) -> PackedRows:
        if len(documents) == 0:
            raise ConfigError(
                f"--split: expected at least one sample of {self.files.prefix} in each split, "
                "got none."
            )
        lengths = self.files.lengths[documents.start : documents.stop]
        too_long = documents.start + np.flatnonzero(lengths > self.seq_length)
        if len(too_long):
            raise ConfigError(
                f"--seq-length: expected at least {int(lengths.max())}, the longest sample of "
                f"{self.files.prefix}, since pictures cannot be divided, got {self.seq_length}. "
                f"{len(too_long)} of {len(documents)} samples are longer, the first of them "
                f"{too_long[:_SHOWN].tolist()}."
            )
        return PackedRows(lengths, self.seq_length, self.seed)

    def _sample(self, index: int) -> dict[str, Any]:
        """Row `index`.

        Returns:
            "tokens", "labels": [seq_length] int64. "loss_mask": [seq_length] fp32, 1 where the
            label is to be learned. "positions": [3, seq_length] int64. "patches": [patches, numel]
            uint8. "grids": of the images. "lengths": of the documents. "padding": positions that
            fill up the row, in a tuple.

        Raises:
            IndexedDatasetError: files that cannot be used, or a token that has no embedding.
        """
        documents = [self._checked(self._first + number) for number in self._rows[index]]

        tokens = np.full(self.seq_length, self._filler, np.int64)
        labels = np.full(self.seq_length, self._filler, np.int64)
        loss_mask = np.zeros(self.seq_length, np.float32)
        positions = np.empty((3, self.seq_length), np.int64)
        format, begin = self.files.format, 0
        for document in documents:
            # A document's last token is an input, too: an image may end with it.
            stop = begin + len(document.tokens)
            tokens[begin:stop] = document.tokens
            labels[begin : stop - 1] = document.tokens[1:]
            loss_mask[begin : stop - 1] = document.is_answer[1:]
            grids = [image.grid for image in document.images]
            positions[:, begin:stop] = decoder_positions(
                document.tokens, format.image_token, grids, format.merge_size
            )
            begin = stop
        positions[:, begin:] = np.arange(self.seq_length - begin)

        lengths = [len(document.tokens) for document in documents]
        if begin < self.seq_length:
            lengths.append(self.seq_length - begin)
        images = [image for document in documents for image in document.images]
        patches = [image.pixels for image in images]
        none = np.empty((0, format.patch_numel), np.uint8)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "positions": torch.from_numpy(positions),
            "patches": torch.from_numpy(np.concatenate([none, *patches])),
            "grids": tuple(image.grid for image in images),
            "lengths": tuple(lengths),
            "padding": (self.seq_length - begin,),
        }

    def _checked(self, number: int) -> ImageTextSample:
        sample = self.files[number]
        check_vocabulary(sample.tokens, self._vocab_size, self.files.prefix)
        return sample

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The rows of a microbatch together. Tensors of no fixed size stay in one row: patches,
        and, as tuples of the host, grids, lengths and padding.

        Returns:
            As a row has them, with "tokens", "labels" and "loss_mask" [batch, seq_length], and
            "positions" [3, batch, seq_length].
        """
        stacked = {
            name: torch.stack([sample[name] for sample in samples])
            for name in ("tokens", "labels", "loss_mask")
        }
        grids: tuple[PatchGrid, ...] = sum((sample["grids"] for sample in samples), ())
        lengths: tuple[int, ...] = sum((sample["lengths"] for sample in samples), ())
        return {
            **stacked,
            "positions": torch.stack([sample["positions"] for sample in samples], dim=1),
            "patches": torch.cat([sample["patches"] for sample in samples]),
            "grids": grids,
            "lengths": lengths,
            "padding": sum((sample["padding"] for sample in samples), ()),
        }
