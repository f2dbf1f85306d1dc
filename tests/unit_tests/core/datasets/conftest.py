"""Token files for the tests of this directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def write_tokens(
    prefix: Path, documents: Sequence[Sequence[int]], dtype: Any = np.uint16
) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return IndexedDataset(prefix)


@pytest.fixture(name="write_tokens")
def write_tokens_fixture() -> Callable[..., IndexedDataset]:
    """`write_tokens(prefix, documents, dtype=np.uint16)`: one sequence per document, opened for
    reading.
    """
    return write_tokens


@pytest.fixture
def corpus(tmp_path: Path) -> IndexedDataset:
    """200 documents of 0 to 59 tokens; every token differs from all others."""
    lengths = np.random.default_rng(0).integers(0, 60, size=200)
    ends = np.cumsum(lengths)
    documents = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    return write_tokens(tmp_path / "corpus_text_document", documents)
