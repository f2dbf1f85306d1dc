"""Tokenizes text into the token files that training reads.

    python -m megatron_hybrid preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-model data/tokenizer.json --append-eod --workers 4

writes `data/corpus_text_document.bin` and `.idx`. Documents keep their order for any number of
workers. The output files appear when all of them are complete.
"""

from __future__ import annotations

import argparse
import contextlib
import reprlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, optimal_dtype
from megatron.core.options import expect
from megatron.training.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    say_prefix,
    train_bpe,
)
from megatron_hybrid import parsers
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.input_files import (
    TEXT_KEY,
    InputError,
    Line,
    documents_of,
    find_files,
    is_compressed,
)
from megatron_hybrid.sample_lines import Skipped, make_samples

_SHOWN = 40  # characters of a value in a message


@dataclass
class TextReader:
    """Takes the texts under some keys from a record."""

    keys: Sequence[str]

    def make(self, record: object, folder: Path) -> tuple[str, ...]:  # noqa: ARG002  no paths in it
        """Returns a text for each key. ValueError if the record does not have them."""
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {_shown(record)}")
        for key in self.keys:
            text = record.get(key)
            if not isinstance(text, str):
                got = f"the keys {reprlib.repr(sorted(record))}"
                got = f"{_shown(text)}" if key in record else got
                raise ValueError(f"expected a text under the key {key!r}, got {got}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                # JSON can contain half of a surrogate pair, which UTF-8 cannot encode.
                wrong = _shown(text[max(0, error.start - 10) :])
                where = f"character {error.start}"
                raise ValueError(
                    f"expected Unicode under the key {key!r}, got {wrong} at {where}"
                ) from error
        return tuple(record[key] for key in self.keys)


@dataclass
class TextTokenizer:
    """Tokenizes the texts under some keys of a record."""

    reader: TextReader
    tokenizer: Tokenizer
    append_eod: bool

    def make(self, record: object, folder: Path) -> list[npt.NDArray[np.int32]]:
        """Returns the tokens of the text under each key, none for an empty text."""
        return [self._tokens_of(text) for text in self.reader.make(record, folder)]

    def _tokens_of(self, text: str) -> npt.NDArray[np.int32]:
        tokens = self.tokenizer.tokenize(text)
        if tokens:
            tokens = [*self.tokenizer.prefix, *tokens]
            tokens += [self.tokenizer.eod] if self.append_eod else []
        return np.array(tokens, np.int32)


@dataclass
class _Totals:
    """Counts over the whole input, for the report at the end."""

    skipped: Skipped
    num_empty: list[int]  # documents without text, by key
    not_text: list[Path]  # files that are not UTF-8


def main(argv: Sequence[str] | None = None, program: str = "preprocess") -> int:
    """Tokenizes the input and returns the exit code."""
    parser = parsers.preprocess(program)
    arguments = parser.parse_args(argv)
    with one_line_errors(f"{parser.prog}: error"):
        preprocess(arguments, find_files(arguments.input, arguments.suffix))
        return 0
    return 1


def preprocess(arguments: argparse.Namespace, files: list[Path]) -> None:
    """Trains the tokenizer if requested, tokenizes `files`, publishes the token files and prints a
    summary.
    """
    start = time.monotonic()
    keys = arguments.json_keys
    expect(arguments.workers >= 1, "--workers", "an integer >= 1", arguments.workers)
    if arguments.chat:
        _preprocess_chats(arguments, files)
        return
    expect(
        not arguments.chat_template, "--chat-template", "--chat with it", arguments.chat_template
    )
    if len(set(keys)) != len(keys):
        raise InputError(f"--json-keys: expected different keys, got {' '.join(keys)}.")

    if arguments.train_tokenizer:
        _train_tokenizer(arguments, files)
    options = {
        option.name: getattr(arguments, option.name) for option in parsers.tokenizer_options()
    }
    tokenizer = build_tokenizer(TokenizerConfig(**options))

    dtype = optimal_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        outputs = [
            stack.enter_context(
                IndexedDatasetBuilder(f"{arguments.output_prefix}_{key}_document", dtype)
            )
            for key in keys
        ]
        totals = _tokenize(arguments, files, tokenizer, outputs)
        for output in outputs:
            output.complete()  # all of them before the first is published

    _report(totals, outputs, time.monotonic() - start)
    if sentence := say_prefix(tokenizer):
        print(sentence)


def _preprocess_chats(arguments: argparse.Namespace, files: list[Path]) -> None:
    expect(
        arguments.tokenizer_type == "HuggingFaceTokenizer" and arguments.tokenizer_model,
        "--tokenizer-model",
        "a Hugging Face tokenizer for --chat",
        arguments.tokenizer_model or arguments.tokenizer_type,
    )
    expect(
        not (arguments.train_tokenizer or arguments.append_eod),
        "--chat",
        "neither --train-tokenizer nor --append-eod, since the template ends a text",
        "one of them",
    )
    # Importing torch takes longer than tokenizing a small file.
    from megatron_hybrid.preprocess_chat import ChatMaker, preprocess_chats

    preprocess_chats(
        files,
        arguments.output_prefix,
        ChatMaker(arguments.tokenizer_model, arguments.chat_template),
        skip_bad_samples=arguments.skip_bad_samples,
        num_workers=arguments.workers,
    )


def _tokenize(
    arguments: argparse.Namespace,
    files: list[Path],
    tokenizer: Tokenizer,
    outputs: Sequence[IndexedDatasetBuilder],
) -> _Totals:
    """Fills the outputs, one for each key, with the documents of `files`."""
    skipped = Skipped(is_allowed=arguments.skip_bad_samples)
    totals = _Totals(skipped, [0] * len(outputs), [])
    # The size of a compressed file's content is unknown.
    is_known = not any(map(is_compressed, files))
    size = sum(path.stat().st_size for path in files) if is_known else None
    is_silent = not _shows_progress()
    with tqdm(total=size, unit="B", unit_scale=True, desc="tokenize", disable=is_silent) as bar:
        reader = TextReader(arguments.json_keys)
        maker = TextTokenizer(reader, tokenizer, arguments.append_eod)
        lines = _documents(files, arguments.json_keys, totals.not_text)
        for texts in make_samples(lines, maker, skipped, num_workers=arguments.workers):
            bar.update(skipped.num_good_bytes - bar.n)
            for number, tokens in enumerate(texts):
                if len(tokens):
                    outputs[number].add_document(tokens)
                else:
                    totals.num_empty[number] += 1

    for key, output in zip(arguments.json_keys, outputs, strict=True):
        if output.num_documents == 0:
            raise InputError(
                f"Expected a document with text under {key!r} in {len(files)} files, got none."
            )
    return totals


def _train_tokenizer(arguments: argparse.Namespace, files: list[Path]) -> None:
    """Trains the tokenizer, and sets --tokenizer-model to it."""
    if arguments.vocab_size is None:
        raise InputError("--vocab-size: expected a number for --train-tokenizer, got none.")
    if arguments.tokenizer_type != "HuggingFaceTokenizer":
        raise InputError(
            f"--train-tokenizer: expected HuggingFaceTokenizer, got {arguments.tokenizer_type}."
        )

    if arguments.tokenizer_model is None:
        arguments.tokenizer_model = f"{arguments.output_prefix}_tokenizer.json"
    if Path(arguments.tokenizer_model).is_dir():
        raise InputError(
            "--tokenizer-model: expected a file to write for --train-tokenizer, got the directory "
            f"{arguments.tokenizer_model}."
        )

    # Tokenizing reports the bad lines.
    skipped = Skipped(is_allowed=arguments.skip_bad_samples)
    lines = _documents(files, arguments.json_keys, [])
    records = make_samples(lines, TextReader(arguments.json_keys), skipped)
    texts = (text for texts in records for text in texts)
    train_bpe(texts, arguments.vocab_size, arguments.tokenizer_model, progress=_shows_progress())


def _documents(files: list[Path], keys: Sequence[str], not_text: list[Path]) -> Iterator[Line]:
    """Yields the documents of files. InputError for a text file if other keys are wanted."""
    for line in documents_of(files, not_text):
        if line.is_document and list(keys) != [TEXT_KEY]:
            raise InputError(
                f"--json-keys: expected {TEXT_KEY!r} for the plain text {line.place}, got "
                f"{' '.join(keys)}."
            )
        yield line


def _report(totals: _Totals, outputs: Sequence[IndexedDatasetBuilder], seconds: float) -> None:
    """Prints a line for each dataset and one for the input."""
    totals.skipped.tell()
    for output, num_empty in zip(outputs, totals.num_empty, strict=True):
        note = f"; {num_empty} empty documents skipped" if num_empty else ""
        counts = f"{output.num_documents} documents, {output.num_tokens} tokens"
        print(f"{output.prefix}: {counts}{note}")

    num_bad, num_other = len(totals.skipped.reasons), len(totals.not_text)
    note = f"; {num_other} files skipped that are not UTF-8 text" if num_other else ""
    note += f"; {num_bad} bad lines skipped" if num_bad else ""
    print(f"{totals.skipped.num_good_bytes} bytes tokenized in {seconds:.1f} s{note}")


def _shows_progress() -> bool:
    """Whether the output and the progress bar go to a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def _shown(value: object) -> str:
    """Returns the beginning of a value's `repr`."""
    return reprlib.repr(value)[:_SHOWN]
