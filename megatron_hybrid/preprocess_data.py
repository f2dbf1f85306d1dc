"""Tokenizes text into the token files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-model data/tokenizer.json --append-eod --workers 4

writes `data/corpus_text_document.bin` and `.idx`. The documents keep the order of the input,
whatever the number of workers. The output files appear only when all of it is written.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import multiprocessing
import os
import reprlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, optimal_dtype
from megatron.core.files import UnusableFileError, open_regular, read_regular
from megatron.core.log import printable
from megatron.core.options import Field, expect, options_of
from megatron.training.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    say_prefix,
    train_bpe,
)
from megatron_hybrid.preprocess_chat import ChatMaker, preprocess_chats

_PLAIN_TEXT_KEY = "text"
_JSON_LINES = (".jsonl", ".json")  # suffixes; the second as in Megatron
_MAX_MESSAGE = 2000  # characters
_SHOWN = 40  # characters or bytes of the input in a message
# A worker's chunk: large enough to hide the cost of passing it, small enough to share the work
# evenly.
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 1 << 19
_CHUNKS_PER_WORKER = 4  # in flight: it bounds the memory
# A document is held in memory as a whole, with its tokens: 20 times its bytes with ByteTokenizer,
# and up to 130 times with a Hugging Face tokenizer.
_MAX_DOCUMENT_BYTES = 1 << 30
_HEAD_BYTES = 1 << 20  # of a larger file, to see whether it is text at all


class InputError(ValueError):
    """Input that cannot be used. The message names the file, and the line where there is one."""


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
    try:
        files = _find_files(arguments.input, arguments.suffix)
        preprocess(arguments, files)
    except (ValueError, OSError, BrokenProcessPool) as error:
        # In one line, even if the names of files contain control characters.
        parser.exit(1, f"{parser.prog}: error: {printable(str(error), _MAX_MESSAGE)}\n")
    return 0


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
    for flag, given in (
        ("--chat-template", arguments.chat_template),
        ("--skip-bad-samples", arguments.skip_bad_samples),
    ):
        expect(not given, flag, "--chat beside it", given)
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
    counts = Counts()
    chunks = _chunks(_read(files, [output.key for output in outputs], counts))
    total = sum(path.stat().st_size for path in files)
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
    parser = argparse.ArgumentParser(
        prog=program, description="Tokenizes text into .bin/.idx token files."
    )
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        help="text files, .jsonl and .json files (a JSON object a line), and folders of such files",
    )
    parser.add_argument(
        "--suffix",
        nargs="+",
        help="only files with these suffixes are read from folders, e.g. .py .md; by default all "
        "that are UTF-8 text",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=[_PLAIN_TEXT_KEY], help="keys to tokenize of JSON lines"
    )
    parser.add_argument(
        "--output-prefix", required=True, help="files are PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--train-tokenizer",
        action="store_true",
        help="train a BPE of --vocab-size on the input first",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help='lines are conversations ({"messages": [...]}), rendered by the tokenizer\'s chat '
        "template, of which the assistant's answers are to be learned; files are "
        "PREFIX_chat_document and PREFIX_chat_document_mask",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja template in place of the tokenizer's own"
    )
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="with --chat: leave out lines that are no conversation to learn from, and count them; "
        "more than a tenth of all lines is an error",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    for option in _tokenizer_options():
        parser.add_argument(
            option.flag,
            type=option.scalar,
            default=option.default,
            choices=option.option.choices,
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

    texts = (text for document in _read(files, keys, Counts()) for text in document.texts)
    train_bpe(texts, arguments.vocab_size, arguments.tokenizer_model, progress=_shows_progress())


def _shows_progress() -> bool:
    """Whether output and progress bar go to a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def _find_files(inputs: Iterable[Path], suffixes: Sequence[str] | None) -> list[Path]:
    """The files to read: inputs in the order given, folders recursively and sorted, hidden entries
    left out.
    """
    found = []
    for path in inputs:
        if path.is_dir():
            inside = (each for each in sorted(path.rglob("*")) if each.is_file())
            for each in inside:
                is_hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
                if not is_hidden and (suffixes is None or each.suffix in suffixes):
                    found.append(each)
        elif path.is_file():
            found.append(path)
        else:
            raise InputError(f"--input: expected regular files and folders that exist, got {path}.")

    if not found:
        raise InputError(
            f"--input: expected files to read, got none in {', '.join(map(str, inputs))}."
        )

    return found


def _read(files: Iterable[Path], keys: list[str], counts: Counts) -> Iterator[Document]:
    """The documents in order. Files that are no UTF-8 text are left out and noted in `counts`."""
    for path in files:
        if path.suffix in _JSON_LINES:
            yield from _read_json_lines(path, keys)
            continue
        content = _content(path)
        text = None if content is None else _decode(content)
        if content is None or text is None:
            counts.undecodable.append(path)
            continue
        if keys != [_PLAIN_TEXT_KEY]:
            raise InputError(
                f"--json-keys: expected {_PLAIN_TEXT_KEY!r} for the plain text {path}, got {keys}."
            )
        yield Document((text,), len(content))


def _content(path: Path) -> bytes | None:
    """The content of a file; None for one that is too large but not text anyway. InputError for a
    text that is too large.
    """
    with open_regular(path, "a text file") as stream:
        is_too_large = os.fstat(stream.fileno()).st_size > _MAX_DOCUMENT_BYTES
        if is_too_large and b"\0" in stream.read(_HEAD_BYTES):
            return None
    try:
        return read_regular(path, max_bytes=_MAX_DOCUMENT_BYTES, what="a document")
    except UnusableFileError as error:
        raise InputError(f"{path}: {error.strerror}.") from error


def _decode(content: bytes) -> str | None:
    """The UTF-8 text, without a byte order mark; None if it is none, or holds a zero byte."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _read_json_lines(path: Path, keys: list[str]) -> Iterator[Document]:
    with io.BufferedReader(open_regular(path, "a file of JSON lines")) as stream:
        # One byte more than a line may have: a longer one is not read to its end.
        lines = iter(lambda: stream.readline(_MAX_DOCUMENT_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > _MAX_DOCUMENT_BYTES:
                expected = f"at most {_MAX_DOCUMENT_BYTES} bytes"
                raise InputError(f"{path}, line {number}: expected {expected}, got more.")
            if not line.strip():
                continue
            try:
                texts = _texts_of(line, keys)
            except InputError as error:
                raise InputError(f"{path}, line {number}: {error}") from error
            yield Document(texts, len(line))


def _texts_of(line: bytes, keys: list[str]) -> tuple[str, ...]:
    """The texts under `keys` of a line that is a JSON object. InputError says what is wrong with
    the line.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected JSON, got {line[:_SHOWN]!r} ({error}).") from error

    if not isinstance(record, dict):
        raise InputError(f"expected a JSON object, got {line[:_SHOWN]!r}.")
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            got = (
                f"{_shown(text)} under it"
                if key in record
                else f"the keys {reprlib.repr(sorted(record))}"
            )
            raise InputError(f"expected a text under the key {key!r}, got {got}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, which no encoding can.
            wrong = text[max(0, error.start - 10) :]
            raise InputError(
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

    # Spawned, not forked: a fork of a process that has used the tokenizer's threads may hang.
    executor = ProcessPoolExecutor(
        num_workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer, append_eod),
    )
    pending: collections.deque[tuple[int, Future[list[Encoded]]]] = collections.deque()
    try:
        for chunk in chunks:
            pending.append((_num_bytes(chunk), executor.submit(_encode_in_worker, chunk)))
            if len(pending) > num_workers * _CHUNKS_PER_WORKER:
                num_bytes, future = pending.popleft()
                yield num_bytes, future.result()
        for num_bytes, future in pending:
            yield num_bytes, future.result()
    finally:
        executor.shutdown(cancel_futures=True)


def _num_bytes(chunk: list[Document]) -> int:
    return sum(document.num_bytes for document in chunk)


_in_worker: dict[str, tuple[Tokenizer, bool]] = {}


def _start_worker(tokenizer: Tokenizer, append_eod: bool) -> None:
    # Ctrl-C reaches every process of the terminal. The process that started the workers handles it
    # and ends them; a worker killed by it might still hold the queue's lock.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    print(f"{counts.num_bytes} bytes tokenized in {seconds:.1f} s{note}")
