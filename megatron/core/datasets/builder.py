"""From the data configuration to the datasets of a run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

import numpy as np

from megatron.core.datasets.answer_dataset import AnswerDataset, AnswerFiles, mask_prefix
from megatron.core.datasets.blended_dataset import BlendedDataset, BlendOrder
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.document_boundaries import DelimitedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, TooFewTokensError
from megatron.core.datasets.image_text_dataset import ImageTextDataset
from megatron.core.datasets.image_text_files import ImageFormat, ImageTextFiles
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.core.datasets.permutation import derive_key
from megatron.core.datasets.sample_dataset import SampleDataset, SplitDatasets
from megatron.core.files import allow_open_files
from megatron.core.options import ConfigError

logger = logging.getLogger(__name__)

_SPLITS = ("train", "valid", "test")
_LOOKED_AT = 8  # documents
_OPEN_FILES = 6  # at most, of a part of a blend: two indexed datasets and the files being opened

_Files = TypeVar("_Files", bound=Sized)


def build_gpt_datasets(
    config: GPTDatasetConfig,
    num_samples: tuple[int, int, int],
    vocab_size: int,
    seed: int,
    eod: int | None = None,
) -> SplitDatasets:
    """Builds the training, validation and test datasets.

    Every process may call it: the first one on a node computes the sample indices, the others map
    them.

    Args:
        config: the data.
        num_samples: samples that training, validation and test will read in the whole run.
        vocab_size: number of embeddings; token ids from there on are rejected when met.
        seed: decides the order of documents and samples; each split derives its own from it.
        eod: the token that ends a document, needed where the configuration has boundaries.

    Raises:
        IndexedDatasetError: token files or a sample index that cannot be used.
        ConfigError: for boundaries in data whose documents do not end with `eod`.
        TooFewTokensError: a split with fewer tokens than one sample needs, though samples are asked
            for.
    """
    if config.mock_data:
        return SplitDatasets(
            *(
                MockGPTDataset(vocab_size, config.seq_length, count, derive_key(seed, name))
                if count and share
                else None
                for name, count, share in zip(
                    _SPLITS, num_samples, config.split_fractions, strict=True
                )
            )
        )
    opened = _open_all(config, IndexedDataset)
    for indexed in opened:
        if IndexedDataset.exists(mask_prefix(indexed.prefix)):
            logger.info(
                "%s has a loss mask, which is only read with --sft: the loss has all tokens",
                indexed.prefix,
            )
        if config.boundaries:
            _check_ends(indexed, eod)

    def build(indexed: IndexedDataset, documents: range, count: int, seed: int) -> SampleDataset:
        cache = config.data_cache_path
        return GPTDataset(indexed, documents, count, config.seq_length, seed, cache, vocab_size)

    built = _build_splits(config, opened, num_samples, seed, build)
    if not config.boundaries:
        return built
    assert eod is not None, "documents end with it"
    return SplitDatasets(
        *(None if one is None else DelimitedDataset(one, eod, config.boundaries) for one in built)
    )


def build_image_text_datasets(
    config: GPTDatasetConfig,
    num_samples: tuple[int, int, int],
    vocab_size: int,
    seed: int,
    filler: int,
) -> SplitDatasets:
    """Builds the datasets of samples with images. --split shares out the samples.

    Args:
        config, num_samples, vocab_size, seed: as for `build_gpt_datasets`.
        filler: the token that fills up rows.

    Raises:
        ConfigError: for data without images, samples longer than a row, or a split without samples.
        IndexedDatasetError: for unusable files.
    """
    if config.mock_data:
        raise ConfigError("--mock-data: expected --data-path with images, got made-up text.")

    def build(files: ImageTextFiles, documents: range, count: int, seed: int) -> SampleDataset:
        return ImageTextDataset(
            files, documents, count, config.seq_length, seed, filler, vocab_size
        )

    opened = _open_all(config, ImageTextFiles)
    return _build_splits(config, opened, num_samples, seed, build)


def build_answer_datasets(
    config: GPTDatasetConfig,
    num_samples: tuple[int, int, int],
    vocab_size: int,
    seed: int,
    filler: int,
) -> SplitDatasets:
    """Builds the datasets of conversations, which may be blended with text. --split shares out the
    documents.

    Args:
        config, num_samples, vocab_size, seed: as for `build_gpt_datasets`.
        filler: the token that fills up rows.

    Raises:
        ConfigError: for conversations that are too long, a split without any, or text alone.
        IndexedDatasetError: files that cannot be used.
    """

    def build(files: AnswerFiles, documents: range, count: int, seed: int) -> SampleDataset:
        return AnswerDataset(
            files,
            documents,
            count,
            config.seq_length,
            seed,
            filler,
            vocab_size,
            is_cut=config.sft_truncate,
        )

    opened = _open_all(config, AnswerFiles)
    if all(files.mask is None for files in opened):
        prefixes = ", ".join(files.prefix for files in opened)
        raise ConfigError(
            "--sft: expected a loss mask, PREFIX_mask.bin and PREFIX_mask.idx, for at least "
            f"one part of --data-path, got none for {prefixes}. If its mask is lost, prepare it "
            "again by `python -m megatron_hybrid preprocess --chat`; text alone is trained "
            "without --sft."
        )
    return _build_splits(config, opened, num_samples, seed, build)


def _open_all(config: GPTDatasetConfig, open_files: Callable[[str], _Files]) -> list[_Files]:
    """The files of all parts of the blend, which stay open."""
    allow_open_files(len(config.blend) * _OPEN_FILES)
    return [open_files(part.prefix) for part in config.blend]


def _build_splits(
    config: GPTDatasetConfig,
    opened: Sequence[_Files],
    num_samples: tuple[int, int, int],
    seed: int,
    build: Callable[[_Files, range, int, int], SampleDataset],
) -> SplitDatasets:
    """Builds the datasets of all splits and parts of a blend.

    Args:
        build: makes one, of files, documents, how many samples will be asked for, and a seed.
    """
    _warn_of_repeated(config)
    weights = [part.weight for part in config.blend]
    built: list[SampleDataset | None] = []
    for number, name in enumerate(_SPLITS):
        if num_samples[number] == 0 or config.split_fractions[number] == 0:
            built.append(None)
            continue

        split_seed = derive_key(seed, name)
        counts = BlendOrder(weights).counts(num_samples[number])
        parts: list[SampleDataset | None] = []
        for part, (files, count) in enumerate(zip(opened, counts, strict=True)):
            documents = split_documents(config.split_fractions, len(files))[number]
            if count == 0:
                parts.append(None)
                continue
            try:
                one = build(files, documents, count, _seed_of_part(split_seed, part))
            except TooFewTokensError as error:
                raise TooFewTokensError(
                    f"--split: {error} They are the {name} split, {len(documents)} of "
                    f"{len(files)} documents at {config.split}."
                ) from error
            parts.append(one)
        is_one = len(parts) == 1
        built.append(parts[0] if is_one else BlendedDataset(parts, weights, num_samples[number]))
    return SplitDatasets(*built)


def _seed_of_part(seed: int, number: int) -> int:
    """The seed of a part of a blend. With a seed in common, parts of equal lengths would come in
    the same order, so that texts that belong together would always meet.

    Args:
        seed: of the split, which the first part has, as does a dataset that is not blended.
    """
    return derive_key(seed, "part", number) if number else seed


def _warn_of_repeated(config: GPTDatasetConfig) -> None:
    parts = config.blend
    if len(config.data_path or ()) > max(1, 2 * len(parts)):
        logger.warning(
            "--data-path: a dataset is given more than once and counts as one, with the sum of its "
            "weights: %s",
            ", ".join(f"{part.weight:g} {part.prefix}" for part in parts),
        )


def image_format_of(config: GPTDatasetConfig) -> ImageFormat | None:
    """The common format of the images of all data; None for text alone.

    Raises:
        ConfigError: for data some of which has no images, or others.
    """
    prefixes = [part.prefix for part in config.blend]
    formats = [
        ImageTextFiles(prefix).format if ImageTextFiles.exists(prefix) else None
        for prefix in prefixes
    ]
    for prefix, found in zip(prefixes, formats, strict=True):
        if found != formats[0]:
            raise ConfigError(
                f"--data-path: expected images as in {prefixes[0]}, {formats[0]}, got {found} in "
                f"{prefix}."
            )
    return formats[0] if formats else None


def without_prefix(config: GPTDatasetConfig, prefix: Sequence[int]) -> list[str]:
    """The datasets of text of which all first documents start with other tokens. Conversations
    start as their template does.
    """
    found = []
    for part in config.blend:
        if IndexedDataset.exists(mask_prefix(part.prefix)):
            continue
        indexed = IndexedDataset(part.prefix)
        first = [
            indexed.get(number, 0, min(len(prefix), length)).tolist()
            for number, length in enumerate(_first_lengths(indexed))
        ]
        if list(prefix) not in first:
            found.append(part.prefix)
    return found


def _first_lengths(indexed: IndexedDataset) -> list[int]:
    """The lengths of the first documents."""
    numbers = np.arange(min(_LOOKED_AT, len(indexed)), dtype=np.int64)
    lengths: list[int] = indexed.gather_lengths(numbers).tolist()
    return lengths


def _check_ends(indexed: IndexedDataset, eod: int | None) -> None:
    """ConfigError unless one of the first documents ends with `eod`."""
    last = [
        int(indexed.get(number, length - 1, 1)[0])
        for number, length in enumerate(_first_lengths(indexed))
        if length
    ]
    if eod not in last:
        raise ConfigError(
            f"--data-path: expected documents that end with token {eod}, the tokenizer's end of "
            f"document, got documents of {indexed.prefix} that end with {last[:3]}. "
            "python -m megatron_hybrid preprocess adds it with --append-eod."
        )


def split_documents(fractions: tuple[float, float, float], num_documents: int) -> list[range]:
    """The documents of each split: boundaries at the rounded cumulative shares, as Megatron sets
    them.
    """
    cumulative = [0.0, *itertools.accumulate(fractions)]
    bounds = [min(num_documents, round(share * num_documents)) for share in cumulative]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]
