"""Merges token files of one dtype into one pair.

    python tools/merge_datasets.py --input data/parts --output-prefix data/corpus_text_document

reads every `.bin/.idx` pair in `data/parts`, in the order of their names, and writes
`data/corpus_text_document.bin` and `.idx`, which appear once they are whole. Masks of conversations
are merged along with their tokens, into `data/corpus_text_document_mask.bin` and `.idx`. Takes the
arguments of `tools/merge_datasets.py` of Megatron-LM except `--multimodal`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

# Python puts a script's directory on its path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.answer_dataset import AnswerFiles, has_mask, mask_prefix
from megatron.core.datasets.config import bin_path, idx_path
from megatron.core.datasets.image_text_files import ImageTextFiles
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.help_format import ProgramParser
from megatron_hybrid.endings import one_line_errors, run

_SUFFIXES = (".bin", ".idx")
_MASK = mask_prefix("")


class InputError(ValueError):
    """Input that cannot be merged, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Merges token files; returns the exit code."""
    parser = ProgramParser(description="Merges .bin/.idx token files into one pair.")
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the token files to merge",
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="write PREFIX.bin and PREFIX.idx",
    )
    arguments = parser.parse_args(argv)
    with one_line_errors(f"{parser.prog}: error"):
        merge(find_prefixes(arguments.input, arguments.output_prefix), arguments.output_prefix)
        return 0
    return 1


def find_prefixes(folder: Path, output_prefix: Path) -> list[Path]:
    """Returns the prefixes of token files in a directory, sorted, without masks.

    InputError without token files, for one file of a pair, for files with images, and if the output
    is among the inputs.
    """
    if not folder.is_dir():
        raise InputError(f"--input: expected an existing directory, got {folder}.")

    prefixes = sorted({path.with_suffix("") for path in folder.iterdir() if _is_part(path)})
    if not prefixes:
        raise InputError(f"--input: expected .bin and .idx files, got none in {folder}.")

    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise InputError(f"--input: expected {path} next to its other half, got no file.")
    # The output of an earlier merge would be merged with its parts. The builder also takes the path
    # of the .bin.
    output = Path(str(output_prefix).removesuffix(".bin"))
    if output.resolve() in {prefix.resolve() for prefix in prefixes}:
        raise InputError(
            f"--output-prefix: expected another name than the inputs, got {output_prefix}."
        )

    for prefix in prefixes:
        described = str(prefix).removesuffix("_text").removesuffix("_images")
        if ImageTextFiles.exists(described):
            raise InputError(
                f"--input: expected tokens alone, got images in {described}.json. Train on several "
                "such files by a blend: --data-path 1 FIRST 1 SECOND."
            )
    masks = {Path(mask_prefix(prefix)) for prefix in prefixes}
    return [prefix for prefix in prefixes if prefix not in masks]


def merge(prefixes: Sequence[Path], output_prefix: Path) -> None:
    """Writes the token files at `prefixes`, one after the other, as one pair, and prints a line.
    Masks of conversations become a pair, too.

    Raises:
        ValueError: files of different dtypes, or that cannot be used; some with a mask and some
            without.
    """
    dtype = IndexedDataset(prefixes[0]).dtype
    has_masks = _have_masks(prefixes)
    with ExitStack() as stack:
        builder = stack.enter_context(IndexedDatasetBuilder(output_prefix, dtype))
        if has_masks:
            # Finalized before the tokens: these are never there without their mask.
            masks = stack.enter_context(
                IndexedDatasetBuilder(mask_prefix(builder.prefix), np.uint8)
            )
        for prefix in prefixes:
            builder.add_index(prefix)
            if has_masks:
                masks.add_index(mask_prefix(prefix))
        builder.complete()  # before the mask is published
        if not has_masks:
            # Of conversations that the output replaces: it would be taken for that of the new ones.
            for path in (bin_path, idx_path):
                path(mask_prefix(builder.prefix)).unlink(missing_ok=True)

    print(
        f"{builder.prefix}: {len(prefixes)} datasets, {builder.num_documents} documents, "
        f"{builder.num_sequences} sequences, {builder.num_tokens} tokens"
        + (", with masks" if has_masks else "")
    )


def _have_masks(prefixes: Sequence[Path]) -> bool:
    """Whether all token files are conversations, with a mask that fits; False if none is."""
    without = []
    for prefix in prefixes:
        if has_mask(prefix):
            AnswerFiles(prefix)  # holds tokens and mask against each other
            continue
        without.append(str(prefix))
        if prefix.name.endswith(_MASK) and IndexedDataset(prefix).dtype == np.uint8:
            tokens = bin_path(str(prefix).removesuffix(_MASK))
            raise InputError(f"--input: expected {tokens} next to its mask, got no file.")

    if 0 < len(without) < len(prefixes):
        raise InputError(
            "--input: expected conversations or text, got both: there is no mask for "
            f"{', '.join(without)}. Merge them separately, and blend them by --data-path."
        )
    return not without


def _is_part(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()


if __name__ == "__main__":
    sys.exit(run(main))
