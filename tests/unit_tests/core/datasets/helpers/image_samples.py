"""Samples of text with images, of random tokens and pixels."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.image_text_files import (
    ImageFormat,
    ImageTextSample,
    ImageTextWriter,
    StoredImage,
)
from megatron.core.models.multimodal.patch_grid import PatchGrid

IMAGE, VOCAB = 99, 100
FORMAT = ImageFormat(
    patch_size=2,
    merge_size=2,
    image_token=IMAGE,
    min_pixels=16,
    max_pixels=64,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
)


def sample_of(
    grids: tuple[tuple[int, int], ...], num_words: int, generator: np.random.Generator
) -> ImageTextSample:
    """Words, an image for each pair of rows and columns, and as many words again, half of them an
    answer.
    """
    images = []
    tokens = list(generator.integers(0, IMAGE, num_words))
    for rows, columns in grids:
        grid = PatchGrid(1, rows, columns)
        pixels = generator.integers(0, 256, (grid.num_patches, FORMAT.patch_numel), dtype=np.uint8)
        images.append(StoredImage(grid, pixels))
        tokens += [1, *[IMAGE] * (grid.num_patches // 4), 2]
    tokens += list(generator.integers(0, IMAGE, num_words))
    is_answer = np.zeros(len(tokens), np.bool_)
    is_answer[len(tokens) - num_words // 2 - 1 :] = True
    return ImageTextSample(np.array(tokens, np.int64), is_answer, tuple(images))


GRIDS = ((), ((2, 2),), ((2, 4), (4, 2)), ((4, 4),))


def some_samples(count: int, seed: int = 0) -> list[ImageTextSample]:
    """With no, one and two images in turn."""
    generator = np.random.default_rng(seed)
    return [
        sample_of(GRIDS[number % len(GRIDS)], 2 + number % 5, generator) for number in range(count)
    ]


def write(prefix: str, samples: list[ImageTextSample]) -> None:
    """Writes the samples' files."""
    with ImageTextWriter(prefix, FORMAT) as writer:
        for sample in samples:
            writer.add(sample)


def are_equal(one: ImageTextSample, other: ImageTextSample) -> bool:
    """Whether two samples are the same in all."""
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.is_answer, other.is_answer)
        and [image.grid for image in one.images] == [image.grid for image in other.images]
        and all(
            np.array_equal(a.pixels, b.pixels)
            for a, b in zip(one.images, other.images, strict=True)
        )
    )
