"""Samples of text with images, in token files.

    PREFIX_text.bin/.idx     int32; a document for each sample, of two sequences: its tokens, and
                             the spans in the loss: start, end, start, end, ... in tokens
    PREFIX_images.bin/.idx   uint8; a document for each sample, with a sequence for each of its
                             images: rows and columns of patches, as two little-endian uint32, and
                             the pixels [patches, channels, pixel rows, pixel columns]
    PREFIX.json              the size of patches, the tokens of images, the scale of pixels

Patches have the order that `patch_grid` describes. The pixels are of the resized image, one frame:
they are normalised, and repeated in time, where they are used. PREFIX.json is written last, so
files that are not all there are never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.files import published, read_regular
from megatron.core.json_reading import parse_json
from megatron.core.log import counted
from megatron.core.models.multimodal.patch_grid import PatchGrid

_FORMAT = 1
_GRID = np.dtype("<u4")
_HEADER_BYTES = 2 * _GRID.itemsize
_MAX_DESCRIPTION_BYTES = 1 << 20


@dataclass(frozen=True)
class ImageFormat:
    """The common format of the images of files.

    Attributes:
        patch_size: pixels of a patch in each direction.
        merge_size: patches in each direction that are one token.
        image_token: the token of each such block.
        min_pixels, max_pixels: that pictures were resized to.
        mean, std: of pixels from 0 to 1, by channel: for normalisation.
    """

    patch_size: int
    merge_size: int
    image_token: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def patch_numel(self) -> int:
        """Bytes of one patch."""
        return len(self.mean) * self.patch_size**2


class StoredImage(NamedTuple):
    """One image.

    Attributes:
        grid: of its patches.
        pixels: [patches, channels * pixel rows * pixel columns] uint8.
    """

    grid: PatchGrid
    pixels: npt.NDArray[np.uint8]


class ImageTextSample(NamedTuple):
    """One sample.

    Attributes:
        tokens: [tokens] int64.
        is_answer: [tokens] bool, which of them are to be learned.
        images: in the order of their tokens.
    """

    tokens: npt.NDArray[np.int64]
    is_answer: npt.NDArray[np.bool_]
    images: tuple[StoredImage, ...]


class ImageTextWriter:
    """Writes samples. As a context manager it publishes at the end of the block, and removes
    everything if the block raises.

    Args:
        prefix: of the paths of all files; their directory is made where it is missing.
    """

    def __init__(self, prefix: str | Path, format: ImageFormat) -> None:
        self.prefix = str(prefix)
        self.format = format
        self.num_samples = self.num_images = self.num_tokens = 0
        with contextlib.ExitStack() as opened:
            self._text = IndexedDatasetBuilder(f"{prefix}_text", np.int32)
            opened.callback(self._text.abort)  # if the next line fails
            self._images = IndexedDatasetBuilder(f"{prefix}_images", np.uint8)
            opened.pop_all()

    def add(self, sample: ImageTextSample) -> None:
        """Adds a sample.

        Raises:
            ValueError: images that do not match its tokens, or without whole blocks.
        """
        _check(sample, self.format)
        edges = np.flatnonzero(np.diff(sample.is_answer, prepend=False, append=False))
        self._text.add_document(
            np.concatenate([sample.tokens, edges]), [len(sample.tokens), len(edges)]
        )
        for image in sample.images:
            header = np.array([image.grid.rows, image.grid.columns], _GRID).view(np.uint8)
            self._images.add_item(np.concatenate([header, image.pixels.reshape(-1)]))
        self._images.end_document()
        self.num_samples += 1
        self.num_images += len(sample.images)
        self.num_tokens += len(sample.tokens)

    def __enter__(self) -> ImageTextWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        description = {"format": _FORMAT, **dataclasses.asdict(self.format)}
        path = _description_path(self.prefix)
        try:
            if kind is not None:
                return
            self._text.complete()
            self._images.complete()
            # Without it the new files are no dataset, rather than a mixture with the old ones.
            path.unlink(missing_ok=True)
            self._text.finalize()
            self._images.finalize()
        finally:
            self._text.abort()
            self._images.abort()
        with published(path) as stream:
            stream.write(json.dumps(description, indent=2).encode())


class ImageTextFiles:
    """Samples that an `ImageTextWriter` has written, read when they are asked for.

    Raises:
        IndexedDatasetError: files that are missing, or contradict each other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.format = _read_description(_description_path(self.prefix))
        self._text = IndexedDataset(f"{prefix}_text")
        self._images = IndexedDataset(f"{prefix}_images")
        documents = len(self._text.document_indices), len(self._images.document_indices)
        if self._text.dtype != np.int32 or self._images.dtype != np.uint8:
            raise self._error(
                f"int32 tokens and uint8 pixels, got {self._text.dtype} and {self._images.dtype}"
            )
        if documents[0] != documents[1] or len(self._text) != 2 * (documents[0] - 1):
            raise self._error(
                f"as many documents of images as of text, and two sequences for each, got "
                f"{documents[1] - 1} and {documents[0] - 1} of {len(self._text)} sequences"
            )

    @staticmethod
    def exists(prefix: str | Path) -> bool:
        """Whether there are files of this prefix."""
        return _description_path(str(prefix)).is_file()

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._text) // 2

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sample."""
        return self._text.gather_lengths(np.arange(0, len(self._text), 2, dtype=np.int64))

    def __getitem__(self, index: int) -> ImageTextSample:
        """A sample.

        Raises:
            IndexError: no such sample.
            IndexedDatasetError: files that are damaged or have changed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Expected a sample in range({len(self)}), got {index}.")
        tokens = self._text.get(2 * index).astype(np.int64)
        first, stop = self._images.document_indices[index : index + 2].tolist()
        images = tuple(self._image(number) for number in range(first, stop))
        sample = ImageTextSample(tokens, self._answers(index, len(tokens)), images)
        try:
            _check(sample, self.format)
        except ValueError as error:
            raise IndexedDatasetError(f"{self.prefix}: sample {index}: {error}") from error
        return sample

    def _answers(self, index: int, length: int) -> npt.NDArray[np.bool_]:
        edges = self._text.get(2 * index + 1).astype(np.int64)
        is_sorted = bool((np.diff(edges) > 0).all())
        if (
            len(edges) % 2
            or not is_sorted
            or (len(edges) and not 0 <= edges[0] < edges[-1] <= length)
        ):
            raise self._error(f"ordered spans of the loss in sample {index}, got {edges[:8]}")
        changes = np.zeros(length + 1, np.int8)
        changes[edges[::2]], changes[edges[1::2]] = 1, -1
        return np.cumsum(changes[:-1], dtype=np.int8).astype(np.bool_)

    def _image(self, number: int) -> StoredImage:
        content = self._images.get(number)
        if len(content) < _HEADER_BYTES:
            raise self._error(f"an image with rows and columns, got {len(content)} bytes")
        rows, columns = content[:_HEADER_BYTES].view(_GRID).tolist()
        grid = PatchGrid(1, rows, columns)
        pixels = content[_HEADER_BYTES:]
        if len(pixels) != grid.num_patches * self.format.patch_numel:
            raise self._error(
                f"{rows} x {columns} patches of {self.format.patch_numel} bytes, got {len(pixels)}"
            )
        return StoredImage(grid, pixels.reshape(grid.num_patches, -1))

    def _error(self, expected: str) -> IndexedDatasetError:
        return IndexedDatasetError(f"{self.prefix}: expected {expected}.")


def _check(sample: ImageTextSample, format: ImageFormat) -> None:
    """ValueError unless a sample's images match its tokens."""
    for image in sample.images:
        image.grid.check(format.merge_size)
        shape = (image.grid.num_patches, format.patch_numel)
        if image.pixels.shape != shape or image.pixels.dtype != np.uint8:
            raise ValueError(
                f"Expected pixels uint8 {shape}, got {image.pixels.dtype} {image.pixels.shape}."
            )
    wanted = sum(image.grid.num_patches for image in sample.images) // format.merge_size**2
    given = int((sample.tokens == format.image_token).sum())
    if given != wanted or len(sample.is_answer) != len(sample.tokens):
        raise ValueError(
            f"Expected {wanted} image tokens for {counted(len(sample.images), 'image')}, got "
            f"{given}."
        )


def _description_path(prefix: str) -> Path:
    return Path(f"{prefix}.json")


def _read_description(path: Path) -> ImageFormat:
    try:
        content: Any = parse_json(
            read_regular(path, max_bytes=_MAX_DESCRIPTION_BYTES, what="a description of images")
        )
    except (OSError, ValueError) as error:
        raise IndexedDatasetError(
            f"{path}: expected a description of images, got {error}."
        ) from error
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}")
        return ImageFormat(
            int(content["patch_size"]),
            int(content["merge_size"]),
            int(content["image_token"]),
            int(content["min_pixels"]),
            int(content["max_pixels"]),
            tuple(float(one) for one in content["mean"]),
            tuple(float(one) for one in content["std"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IndexedDatasetError(
            f"{path}: expected a description of images in format {_FORMAT}, got {error!r}."
        ) from error
