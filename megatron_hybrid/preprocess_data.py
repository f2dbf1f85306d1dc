"""Tokenizes text into the token files that training reads.

    python -m megatron_hybrid preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-model data/tokenizer.json --append-eod --workers 4

writes `data/corpus_text_document.bin` and `.idx`. The documents keep the order of the input,
whatever the number of workers. The output files appear only when all of it is written.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import reprlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, optimal_dtype
from megatron.core.help_format import ProgramParser
from megatron.core.options import Field, expect, options_of
from megatron.training.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    say_prefix,
    train_bpe,
)
from megatron_hybrid.endings import one_line_errors, worker_pool
from megatron_hybrid.input_files import (
    DamagedInputError,
    InputError,
    find_files,
    is_compressed,
    is_json_lines,
    lines_of,
    read_document,
)
from megatron_hybrid.preprocess_chat import ChatMaker, preprocess_chats
from megatron_hybrid.sample_lines import LostLinesError, SampleError, Skipped

_PLAIN_TEXT_KEY = "text"
_SHOWN = 40  # characters of the input in a message
# A worker's chunk: large enough to hide the cost of passing it, small enough to share the work
# evenly.
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 1 << 19
_CHUNKS_PER_WORKER = 4  # in flight: it bounds the memory


class Document(NamedTuple):
    """One document as read."""

    texts: tuple[str, ...]  # one per key
    num_bytes: int  # of the input


class Encoded(NamedTuple):
    """Documents of one chunk and one key, tokenized."""

    tokens: npt.NDArray[np.int32]  # all documents, end to end
    lengths: list[int]  # tokens of each document; empty documents are left out
    num_empty: int


@dataclass
class Output:
    """The dataset of one key."""

    key: str
    builder: IndexedDatasetBuilder
    num_empty: int = 0  # documents left out


@dataclass
class Counts:
    """Totals over the whole input, for the report at the end."""

    skipped: Skipped
    num_lines: int = 0  # that were not skipped
    num_bytes: int = 0
    undecodable: list[Path] = field(default_factory=list)


def main(argv: Sequence[str] | None = None, program: str = "preprocess_data.py") -> int:
    """Tokenizes the input as the command line says; returns the exit code.

    Args:
        argv: the arguments; default: the command line's.
        program: the name that error messages begin with.
    """
    parser = _parser(program)
    arguments = parser.parse_args(argv)
    with one_line_errors(f"{parser.prog}: error"):
        preprocess(arguments, find_files(arguments.input, arguments.suffix))
        return 0
    return 1


def preprocess(arguments: argparse.Namespace, files: list[Path]) -> None:
    """Trains the tokenizer if asked to, tokenizes `files`, publishes the token files and prints a
    summary.
    """
    begun = time.monotonic()
    keys = list(arguments.json_keys)
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
        _train_tokenizer(arguments, files, keys)
    config = TokenizerConfig(
        **{option.name: getattr(arguments, option.name) for option in _tokenizer_options()}
    )
    tokenizer = build_tokenizer(config)
    dtype = optimal_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        outputs = []
        for key in keys:
            builder = IndexedDatasetBuilder(f"{arguments.output_prefix}_{key}_document", dtype)
            outputs.append(Output(key, stack.enter_context(builder)))
        counts = _tokenize(arguments, files, tokenizer, outputs)
        for output in outputs:
            output.builder.complete()  # all of them before the first is published

    _report(counts, outputs, time.monotonic() - begun)
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
        "neither --train-tokenizer nor --append-eod, since the template says how a text ends",
        "one of them",
    )
    preprocess_chats(
        files,
        arguments.output_prefix,
        ChatMaker(arguments.tokenizer_model, arguments.chat_template),
        skip_bad_samples=arguments.skip_bad_samples,
        num_workers=arguments.workers,
    )


def _tokenize(
    arguments: argparse.Namespace, files: list[Path], tokenizer: Tokenizer, outputs: list[Output]
) -> Counts:
    """Fills the outputs with the documents of `files`."""
    counts = Counts(Skipped(is_allowed=arguments.skip_bad_samples))
    chunks = _chunks(_read(files, [output.key for output in outputs], counts))
    # How much a compressed file holds is not known before.
    is_known = not any(map(is_compressed, files))
    total = sum(path.stat().st_size for path in files) if is_known else None
    is_silent = not _shows_progress()
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenize", disable=is_silent) as bar:
        for num_bytes, encoded in _encode_all(
            chunks, tokenizer, arguments.append_eod, arguments.workers
        ):
            for output, part in zip(outputs, encoded, strict=True):
                _add(output, part)
            counts.num_bytes += num_bytes
            bar.update(num_bytes)

    for output in outputs:
        if output.builder.num_documents == 0:
            raise InputError(
                f"Expected at least one document with text under {output.key!r} in {len(files)} "
                "files, got none."
            )

    return counts


def _parser(program: str) -> argparse.ArgumentParser:
    parser = ProgramParser(prog=program, description="Tokenizes text into .bin/.idx token files.")
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="text files, JSON lines (.jsonl, .ndjson, .jsonlines, .json), either of them "
        "compressed (.gz, .bz2, .xz, .zst), and directories of such files",
    )
    parser.add_argument(
        "--suffix",
        nargs="+",
        metavar=".EXT",
        help="suffixes of the files to read from directories, e.g. .py .md (default: all files of "
        "UTF-8 text)",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=[_PLAIN_TEXT_KEY],
        metavar="KEY",
        help=f"keys of JSON lines to tokenize (default: {_PLAIN_TEXT_KEY})",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_KEY_document.bin and .idx",
    )
    parser.add_argument(
        "--train-tokenizer",
        action="store_true",
        help="first train a BPE tokenizer with --vocab-size tokens on the input, and save it as "
        "--tokenizer-model",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help='tokenize conversations, lines with {"messages": [...]}, by the chat template; write '
        "PREFIX_chat_document, and PREFIX_chat_document_mask, which marks the assistant's answers",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template (default: the tokenizer's)"
    )
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="leave out bad lines, and damaged files from the damage on, and count them; more than "
        "a tenth of bad lines is an error",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    for option in _tokenizer_options():
        parser.add_argument(
            option.flag,
            type=option.scalar,
            default=option.default,
            choices=option.option.choices,
            metavar=option.metavar,
            help=option.option.help,
        )

    return parser


def _tokenizer_options() -> list[Field]:
    """The tokenizer's options that matter here; the embedding's rows are the training's concern."""
    return [
        option
        for option in options_of(TokenizerConfig)
        if option.name != "make_vocab_size_divisible_by"
    ]


def _train_tokenizer(arguments: argparse.Namespace, files: list[Path], keys: list[str]) -> None:
    """Trains the tokenizer and makes it the one to use."""
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
            f"--tokenizer-model: expected a file to write for --train-tokenizer, got the folder "
            f"{arguments.tokenizer_model}."
        )

    # Bad lines are reported when they are met again.
    counts = Counts(Skipped(is_allowed=arguments.skip_bad_samples))
    texts = (text for document in _read(files, keys, counts) for text in document.texts)
    train_bpe(texts, arguments.vocab_size, arguments.tokenizer_model, progress=_shows_progress())


def _shows_progress() -> bool:
    """Whether output and progress bar go to a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def _read(files: Iterable[Path], keys: list[str], counts: Counts) -> Iterator[Document]:
    """The documents in order. Files that are not UTF-8 text are left out and noted in `counts`, and
    so are bad lines and damaged files where that is allowed. SampleError after the last document if
    there are too many of them.
    """
    for path in files:
        try:
            read = _read_json_lines if is_json_lines(path) else _read_text
            yield from read(path, keys, counts)
        except DamagedInputError as error:
            counts.skipped.add(LostLinesError(f"{error}."))
    counts.skipped.check(counts.num_lines)


def _read_text(path: Path, keys: list[str], counts: Counts) -> Iterator[Document]:
    text, num_bytes = read_document(path)
    if text is None:
        counts.undecodable.append(path)
        return
    if keys != [_PLAIN_TEXT_KEY]:
        raise InputError(
            f"--json-keys: expected {_PLAIN_TEXT_KEY!r} for the plain text {path}, got {keys}."
        )
    counts.num_lines += text.count("\n") + 1
    yield Document((text,), num_bytes)


def _read_json_lines(path: Path, keys: list[str], counts: Counts) -> Iterator[Document]:
    for line in lines_of([path]):
        if line.damage:
            counts.skipped.add(LostLinesError(f"{line.damage}."))
            continue
        try:
            texts = _texts_of(line.text(), keys)
        except ValueError as error:
            counts.skipped.add(SampleError(f"{line.place}: {str(error).removesuffix('.')}."))
            continue
        counts.num_lines += 1
        yield Document(texts, len(line.content))


def _texts_of(line: str, keys: list[str]) -> tuple[str, ...]:
    """The texts under `keys` of a line that is a JSON object. ValueError says what is wrong with
    the line.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, got {line[:_SHOWN]!r} ({error})") from error

    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {line[:_SHOWN]!r}.")
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            got = (
                f"{_shown(text)} under it"
                if key in record
                else f"the keys {reprlib.repr(sorted(record))}"
            )
            raise ValueError(f"expected a text under the key {key!r}, got {got}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, which no encoding can.
            wrong = text[max(0, error.start - 10) :]
            raise ValueError(
                f"expected a text that UTF-8 can hold under the key {key!r}, got {_shown(wrong)} "
                f"at character {error.start}."
            ) from error

    return tuple(record[key] for key in keys)


def _shown(value: object) -> str:
    """A value as a message shows it: its beginning, however long and deep it is."""
    return reprlib.repr(value)[:_SHOWN]


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    num_characters = 0
    for document in documents:
        chunk.append(document)
        num_characters += sum(map(len, document.texts))
        if len(chunk) == _CHUNK_DOCUMENTS or num_characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk


def _encode_all(
    chunks: Iterable[list[Document]], tokenizer: Tokenizer, append_eod: bool, num_workers: int
) -> Iterator[tuple[int, list[Encoded]]]:
    """Tokenizes the chunks, in order.

    Yields:
        per chunk the bytes of input it stands for and, per key, its documents.
    """
    if num_workers <= 1:
        for chunk in chunks:
            yield _num_bytes(chunk), _encode(chunk, tokenizer, append_eod)
        return

    pending: collections.deque[tuple[int, Future[list[Encoded]]]] = collections.deque()
    with worker_pool(num_workers, _start_worker, tokenizer, append_eod) as pool:
        for chunk in chunks:
            pending.append((_num_bytes(chunk), pool.submit(_encode_in_worker, chunk)))
            if len(pending) > num_workers * _CHUNKS_PER_WORKER:
                num_bytes, future = pending.popleft()
                yield num_bytes, future.result()
        for num_bytes, future in pending:
            yield num_bytes, future.result()


def _num_bytes(chunk: list[Document]) -> int:
    return sum(document.num_bytes for document in chunk)


_in_worker: dict[str, tuple[Tokenizer, bool]] = {}


def _start_worker(tokenizer: Tokenizer, append_eod: bool) -> None:
    # The workers share the cores, so the tokenizer's own threads would only compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _in_worker["settings"] = (tokenizer, append_eod)


def _encode_in_worker(chunk: list[Document]) -> list[Encoded]:
    return _encode(chunk, *_in_worker["settings"])


def _encode(chunk: list[Document], tokenizer: Tokenizer, append_eod: bool) -> list[Encoded]:
    """Tokenizes a chunk: one `Encoded` per key."""
    encoded = []
    for texts in zip(*(document.texts for document in chunk), strict=True):
        ids: list[int] = []
        lengths = []
        for text in texts:
            begin = len(ids)
            if found := tokenizer.tokenize(text):
                ids.extend((*tokenizer.prefix, *found))
                if append_eod:
                    ids.append(tokenizer.eod)
                lengths.append(len(ids) - begin)
        encoded.append(Encoded(np.array(ids, dtype=np.int32), lengths, len(texts) - len(lengths)))

    return encoded


def _add(output: Output, part: Encoded) -> None:
    for document in np.split(part.tokens, np.cumsum(part.lengths)[:-1]) if part.lengths else ():
        output.builder.add_document(document)
    output.num_empty += part.num_empty


def _report(counts: Counts, outputs: list[Output], seconds: float) -> None:
    """A line per dataset and one for the input."""
    counts.skipped.tell()
    for output in outputs:
        builder = output.builder
        note = f"; {output.num_empty} empty documents skipped" if output.num_empty else ""
        print(
            f"{builder.prefix}: {builder.num_documents} documents, {builder.num_tokens} "
            f"tokens{note}"
        )

    note = (
        f"; {len(counts.undecodable)} files skipped that are not UTF-8 text"
        if counts.undecodable
        else ""
    )
    if counts.skipped.reasons:
        note += f"; {len(counts.skipped.reasons)} bad lines skipped"
    print(f"{counts.num_bytes} bytes tokenized in {seconds:.1f} s{note}")
