"""From the data configuration to the datasets of a run."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from megatron.core.datasets.blended_dataset import BlendedDataset, BlendOrder
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, TooFewTokensError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock_dataset import MockGPTDataset
from megatron.core.datasets.permutation import derive_key
from megatron.core.datasets.sample_dataset import SampleDataset

_SPLITS = ("train", "valid", "test")


class GPTDatasets(NamedTuple):
    """Datasets of a run; None where no samples are asked for or --split leaves no share."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def build_gpt_datasets(
    config: GPTDatasetConfig, num_samples: tuple[int, int, int], vocab_size: int, seed: int
) -> GPTDatasets:
    """Builds the training, validation and test datasets.

    Every process may call it: the first one on a node computes the sample indices, the others map
    them.

    Args:
        config: the data.
        num_samples: samples that training, validation and test will ask for in the whole run.
        vocab_size: number of embeddings; token ids from there on are refused when met.
        seed: decides the order of documents and samples; each split derives its own from it.

    Raises:
        IndexedDatasetError: token files or a sample index that cannot be used.
        TooFewTokensError: a split with fewer tokens than one sample needs, though samples are asked
            for.
    """
    opened = [IndexedDataset(part.prefix) for part in config.blend]
    built: list[SampleDataset | None] = []
    for number, name in enumerate(_SPLITS):
        split_seed = derive_key(seed, name)
        if num_samples[number] == 0 or config.split_fractions[number] == 0:
            built.append(None)
        elif config.mock_data:
            built.append(
                MockGPTDataset(vocab_size, config.seq_length, num_samples[number], split_seed)
            )
        else:
            built.append(
                _build_blend(config, opened, number, num_samples[number], vocab_size, split_seed)
            )

    return GPTDatasets(*built)


def split_documents(fractions: tuple[float, float, float], num_documents: int) -> list[range]:
    """The documents of each split: boundaries at the rounded cumulative shares, as Megatron sets
    them.
    """
    cumulative = [0.0, *itertools.accumulate(fractions)]
    bounds = [min(num_documents, round(share * num_documents)) for share in cumulative]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _build_blend(
    config: GPTDatasetConfig,
    opened: list[IndexedDataset],
    number: int,
    num_samples: int,
    vocab_size: int,
    seed: int,
) -> SampleDataset:
    """The dataset of split `number`: a blend, or the one dataset there is."""
    weights = [part.weight for part in config.blend]
    counts = BlendOrder(weights).counts(num_samples)
    parts: list[SampleDataset | None] = []
    for indexed, count in zip(opened, counts, strict=True):
        parts.append(
            _build_part(config, indexed, number, count, vocab_size, seed) if count else None
        )
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    return BlendedDataset(parts, weights, num_samples)


def _build_part(
    config: GPTDatasetConfig,
    indexed: IndexedDataset,
    number: int,
    num_samples: int,
    vocab_size: int,
    seed: int,
) -> GPTDataset:
    documents = split_documents(config.split_fractions, len(indexed))[number]
    try:
        return GPTDataset(
            indexed,
            documents,
            num_samples,
            config.seq_length,
            seed,
            config.data_cache_path,
            vocab_size,
        )
    except TooFewTokensError as error:
        raise TooFewTokensError(
            f"--split: {error} They are the {_SPLITS[number]} split, {len(documents)} of "
            f"{len(indexed)} documents at {config.split}."
        ) from error
