"""Reads input of the preprocessing tools: text files and JSON lines, compressed or not.

Files with the suffixes `.jsonl`, `.ndjson`, `.jsonlines` and `.json`, in upper or lower case, are
JSON lines. A file with the suffix `.txt` or `.jl`, a numeric one as in `part.00000`, or none, is
JSON lines if its first line is a JSON object. Any other file is text: a minified source map also
starts with an object. A second suffix such as `.gz` is the compression.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.compression import compr

from megatron.core.files import open_regular
from megatron.core.json_reading import parse_json

TEXT_KEY = "text"
_JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".json")
_TEXT_OR_JSON_LINES = ("", ".txt", ".jl")  # and numeric suffixes
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}  # fsspec's names
# A line or a document is in memory as a whole, with its tokens: 20 times its bytes with
# ByteTokenizer, and up to 130 times with a Hugging Face tokenizer.
_MAX_BYTES = 1 << 30
_HEAD_BYTES = 1 << 20  # enough to distinguish JSON lines from text
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputError(ValueError):
    """Unusable input. The message has the file and, where known, the line number."""


class DamagedInputError(InputError):
    """A compressed file that cannot be decompressed to its end."""


class Line(NamedTuple):
    """A line of JSON lines, or a whole text file.

    Attributes:
        place: the file and the line number, for messages.
        content: the bytes; of a line that is too long, the first `_MAX_BYTES` and one more.
        folder: the directory of relative paths in the line.
        is_strict: whether JSON with a key twice, long integers or many levels is a bad line.
        damage: the error, if the rest of the file is lost to damage.
    """

    place: str
    content: bytes
    folder: Path
    is_document: bool = False
    is_strict: bool = True
    damage: str = ""

    def record(self) -> Any:
        """Returns the JSON value; {"text": ...} for a document. ValueError for a bad line."""
        if len(self.content) > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES} bytes, got more")
        try:
            text = self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            wrong = self.content[error.start : error.start + 8]
            raise ValueError(f"expected UTF-8, got {wrong!r} at byte {error.start}") from error
        if self.is_document:
            return {TEXT_KEY: text}
        try:
            return parse_json(text, allow_nan=True) if self.is_strict else json.loads(text)
        except RecursionError as error:
            raise ValueError("expected a JSON object, got too many levels") from error
        except ValueError as error:
            raise ValueError(f"expected a JSON object, got {error}") from error


def find_files(inputs: Iterable[Path], suffixes: Sequence[str] | None = None) -> list[Path]:
    """Returns the files to read: inputs in the given order, directories recursively and sorted,
    without hidden entries.

    Args:
        suffixes: suffixes of the files to read from directories, in any case; default: all.
    """
    wanted = None if suffixes is None else {suffix.lower() for suffix in suffixes}
    found = []
    for path in inputs:
        if path.is_dir():
            for each in sorted(path.rglob("*")):
                is_hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
                is_wanted = wanted is None or wanted & _suffixes(each)
                if each.is_file() and is_wanted and not is_hidden:
                    found.append(each)
        elif path.is_file():
            found.append(path)
        else:
            raise InputError(f"--input: expected existing files and directories, got {path}.")

    if not found:
        raise InputError(
            f"--input: expected files to read, got none in {', '.join(map(str, inputs))}."
        )
    return found


def is_compressed(path: Path) -> bool:
    """Whether a file is decompressed while it is read."""
    return path.suffix.lower() in _COMPRESSIONS


def documents_of(files: Iterable[Path], not_text: list[Path]) -> Iterator[Line]:
    """Yields the lines of JSON lines files, and text files as a whole.

    Files that are not UTF-8 text are appended to `not_text` instead. Lines are not strict, since
    only texts are taken from them.
    """
    for path in files:
        try:
            is_lines = is_json_lines(path)
            content = None if is_lines else _read_text(path)
        except DamagedInputError as error:
            yield Line(str(path), b"", path.parent, damage=str(error))
            continue
        if is_lines:
            yield from lines_of([path], is_strict=False)
        elif content is None:
            not_text.append(path)
        else:
            yield Line(str(path), content, path.parent, is_document=True)


def lines_of(
    files: Iterable[Path], folder: Path | None = None, *, is_strict: bool = True
) -> Iterator[Line]:
    """Yields the lines of files, without blank ones. The last one of a damaged file has `damage`.

    Args:
        folder: the directory of relative paths; default: the file's directory.
        is_strict: as in `Line`.
    """
    for path in files:
        start = path.parent if folder is None else folder
        with open_input(path) as stream:
            number = 0
            try:
                for number, line in enumerate(_split(stream), start=1):
                    if line.removeprefix(_BYTE_ORDER_MARK).strip():
                        yield Line(f"{path}, line {number}", line, start, is_strict=is_strict)
            except DamagedInputError as error:
                place = f"{path}, line {number + 1}"
                damage = f"{error}; line {number + 1} and all later ones are lost"
                yield Line(place, b"", start, damage=damage)


def open_input(path: Path) -> io.BufferedReader:
    """Opens a file for reading, decompressed.

    Raises:
        InputError: no installed package reads this compression.
        OSError: as `open_regular`.
        DamagedInputError: later, on reading damaged content. Reads return the content before it.
    """
    raw = open_regular(path, "an input file")
    if not is_compressed(path):
        return io.BufferedReader(raw)
    try:
        return io.BufferedReader(_Decompressed(path, raw))
    except BaseException:
        raw.close()
        raise


def is_json_lines(path: Path) -> bool:
    """Whether each line of a file is a JSON object.

    Raises:
        InputError: the file has no suffix and could be either.
        DamagedInputError: the first line cannot be decompressed.
    """
    suffix = _inner_suffix(path)
    if suffix in _JSON_LINES:
        return True
    if suffix not in _TEXT_OR_JSON_LINES and not suffix[1:].isdigit():
        return False

    with open_input(path) as stream:
        # Reads the first line only: later damage does not matter here.
        heads = iter(lambda: stream.readline(_HEAD_BYTES), b"")
        stripped = (head.removeprefix(_BYTE_ORDER_MARK).lstrip() for head in heads)
        first = next(filter(None, stripped), b"")
        if not first.startswith(b"{"):
            return False
        if not first.endswith(b"\n"):
            first += stream.readline(_MAX_BYTES)
    try:
        json.loads(first)
    except (ValueError, RecursionError) as error:
        if not suffix:
            raise InputError(
                f"{path}: expected a suffix, since the first line starts as JSON but is not. "
                "Rename the file to .jsonl if each line is a JSON object, or to .txt."
            ) from error
        return False
    return True


def _read_text(path: Path) -> bytes | None:
    """Returns the content of a file; None if it is not UTF-8 or has a zero byte."""
    with open_input(path) as stream:
        content = stream.read(_HEAD_BYTES)
        if b"\0" not in content:
            content += stream.read(_MAX_BYTES + 1 - len(content))

    if b"\0" in content:
        return None
    try:
        content.decode()
    except UnicodeDecodeError:
        # The limit may cut a character; `Line.record` reports such a file.
        return content if len(content) > _MAX_BYTES else None
    return content


def _split(stream: io.BufferedReader) -> Iterator[bytes]:
    """Yields the lines of a file; the beginning of one that is too long."""
    # One byte more than the limit shows that a line is too long.
    for line in iter(lambda: stream.readline(_MAX_BYTES + 1), b""):
        yield line
        rest = line
        while len(rest) > _MAX_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_MAX_BYTES + 1)


def _suffixes(path: Path) -> set[str]:
    """Returns the values of `--suffix` that match a file: .json, .gz and .json.gz."""
    inner, outer = _inner_suffix(path), path.suffix.lower()
    return {inner, outer, f"{inner}{outer}"}


def _inner_suffix(path: Path) -> str:
    """Returns the suffix without the compression's, in lower case."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def _decompressor(path: Path) -> Callable[..., Any]:
    found: Callable[..., Any] | None = compr.get(_COMPRESSIONS[path.suffix.lower()])
    # With the package `zstandard` alone, fsspec has a function instead of a file type, which ends
    # after the first of several frames.
    is_partial = path.suffix.lower() == ".zst" and not isinstance(found, type)
    if found is None or is_partial:
        package = " (pip install backports.zstd)" if path.suffix.lower() == ".zst" else ""
        raise InputError(
            f"{path}: no installed package reads a whole {path.suffix} file{package}. Install "
            "one, or decompress the file."
        )
    return found


class _Decompressed(io.RawIOBase):
    """The content of a compressed file. DamagedInputError where it is damaged."""

    def __init__(self, path: Path, raw: io.FileIO) -> None:
        self._path = path
        self._raw = raw
        self._stream = _decompressor(path)(raw, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            # Unlike `read`, it returns the content before the damage.
            content = self._stream.read1(len(buffer))
        # The packages' errors have no common base class.
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the file system: the file may be whole
            text = str(error).removesuffix(".")
            raise DamagedInputError(
                f"{self._path}: expected a whole {self._path.suffix} file, got {text}"
            ) from error
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._raw.close()
        super().close()
