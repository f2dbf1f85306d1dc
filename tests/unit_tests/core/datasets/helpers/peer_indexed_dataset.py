"""Runs under an interpreter that has megatron-core, not this project: writes or reads token files
with it.

    peer_indexed_dataset.py write PREFIX SPEC.json
        SPEC: {"dtype": "uint16", "documents": [[[1, 2], [3]], ...]}
    peer_indexed_dataset.py read PREFIX RESULT.json    RESULT: the same, as megatron-core reads it

A document is a list of sequences.
"""

import json
import sys
from pathlib import Path

import numpy
import torch

from megatron.core.datasets import indexed_dataset as peer


def write(prefix: str, spec: dict) -> None:
    builder = peer.IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, spec["dtype"]))
    for sequences in spec["documents"]:
        tokens = [token for sequence in sequences for token in sequence]
        builder.add_document(
            torch.tensor(tokens, dtype=torch.int64), [len(sequence) for sequence in sequences]
        )
    builder.finalize(prefix + ".idx")


def read(prefix: str) -> dict:
    dataset = peer.IndexedDataset(prefix)
    boundaries = dataset.document_indices.tolist()
    documents = [
        [dataset[sequence].tolist() for sequence in range(begin, end)]
        for begin, end in zip(boundaries[:-1], boundaries[1:])  # noqa: B905, RUF007
    ]
    return {"dtype": dataset.index.dtype.__name__, "documents": documents}


if __name__ == "__main__":
    assert not hasattr(peer, "IndexedDatasetError"), f"Expected megatron-core, got {peer.__file__}."
    action, prefix, path = sys.argv[1:]
    if action == "write":
        write(prefix, json.loads(Path(path).read_text()))
    else:
        Path(path).write_text(json.dumps(read(prefix)))
