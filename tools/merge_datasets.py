"""Merges token files of one dtype into one pair.

    python tools/merge_datasets.py --input data/parts --output-prefix data/corpus_text_document

reads every `.bin/.idx` pair in `data/parts`, in the order of their names, and writes
`data/corpus_text_document.bin` and `.idx`, which appear once they are whole. The arguments are
those of Megatron's tool of this name without `--multimodal`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Python puts this file's folder on the path of a script, and not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    bin_path,
    idx_path,
)
from megatron_hybrid.endings import one_line_errors, run

_SUFFIXES = (".bin", ".idx")


class InputError(ValueError):
    """Input that cannot be merged, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Merges what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Merges .bin/.idx token files into one pair.")
    parser.add_argument(
        "--input", type=Path, required=True, help="folder of the token files to merge"
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        help="path of the merged files without .bin and .idx",
    )
    arguments = parser.parse_args(argv)
    with one_line_errors(parser.prog):
        merge(find_prefixes(arguments.input, arguments.output_prefix), arguments.output_prefix)
    return 0


def find_prefixes(folder: Path, output_prefix: Path) -> list[Path]:
    """The token files in a folder, sorted by name.

    InputError if there are none, for one file without the other, and where the output would be one
    of them.
    """
    if not folder.is_dir():
        raise InputError(f"--input: expected a folder that exists, got {folder}.")

    prefixes = sorted({path.with_suffix("") for path in folder.iterdir() if _is_part(path)})
    if not prefixes:
        raise InputError(f"--input: expected .bin and .idx files, got none in {folder}.")

    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise InputError(f"--input: expected {path} beside its other half, got no file.")
    # What an earlier merge has left would be merged with its own parts. The builder takes the path
    # of the .bin too.
    output = Path(str(output_prefix).removesuffix(".bin"))
    if output.resolve() in {prefix.resolve() for prefix in prefixes}:
        raise InputError(
            f"--output-prefix: expected another name than those of the inputs, got {output_prefix}."
        )

    return prefixes


def merge(prefixes: Sequence[Path], output_prefix: Path) -> None:
    """Writes the token files at `prefixes`, one after the other, as one pair, and prints a line.

    Raises:
        ValueError: files of different dtypes, or that cannot be used.
    """
    dtype = IndexedDataset(prefixes[0]).dtype
    with IndexedDatasetBuilder(output_prefix, dtype) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)

    print(
        f"{builder.prefix}: {len(prefixes)} datasets, {builder.num_documents} documents, "
        f"{builder.num_sequences} sequences, {builder.num_tokens} tokens"
    )


def _is_part(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()


if __name__ == "__main__":
    sys.exit(run(main))
