"""Input of the preprocessing tools: text files and JSON lines, compressed or not.

Files with the suffixes `.jsonl`, `.ndjson`, `.jsonlines` and `.json`, in upper or lower case, are
JSON lines. A file with the suffix `.txt` or `.jl`, a numeric one as in `part.00000`, or none, is
JSON lines if its first line is a JSON object. Any other file is text: a minified source map begins
with an object, too. A second suffix such as `.gz` names the compression.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.compression import compr

from megatron.core.files import open_regular

_JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".json")
_TEXT_OR_JSON_LINES = ("", ".txt", ".jl")  # and numeric suffixes
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}  # fsspec's names
# A line or a document is in memory as a whole, with its tokens: 20 times its bytes with
# ByteTokenizer, and up to 130 times with a Hugging Face tokenizer.
_MAX_BYTES = 1 << 30
_HEAD_BYTES = 1 << 20  # enough to tell JSON lines from text
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputError(ValueError):
    """Input that cannot be used. The message names the file, and the line where there is one."""


class DamagedInputError(InputError):
    """A compressed file that cannot be decompressed to its end."""


class Line(NamedTuple):
    """A line of the input, or the first one that is lost to damage of a compressed file.

    Attributes:
        place: file and number, for messages.
        content: of a line that is too long, the first `_MAX_BYTES` and one more.
        folder: directory of relative paths.
        damage: the error, with the file's name, if the line is lost.
    """

    place: str
    content: bytes
    folder: Path
    damage: str = ""

    def text(self) -> str:
        """The line as text, without a byte order mark. ValueError for other bytes."""
        if len(self.content) > _MAX_BYTES:
            raise ValueError(f"expected at most {_MAX_BYTES} bytes, got more")
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            wrong = self.content[error.start : error.start + 8]
            raise ValueError(
                f"expected UTF-8, got {wrong!r} at byte {error.start} of the line"
            ) from error


def find_files(inputs: Iterable[Path], suffixes: Sequence[str] | None = None) -> list[Path]:
    """The files to read: inputs in the order given, folders recursively and sorted, hidden entries
    left out.

    Args:
        suffixes: of the files that are read from folders, in any case; default: all.
    """
    wanted = None if suffixes is None else {suffix.lower() for suffix in suffixes}
    found = []
    for path in inputs:
        if path.is_dir():
            inside = (each for each in sorted(path.rglob("*")) if each.is_file())
            for each in inside:
                is_hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
                if not is_hidden and (wanted is None or wanted & _suffixes(each)):
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


def is_compressed(path: Path) -> bool:
    """Whether a file is decompressed while it is read."""
    return path.suffix.lower() in _COMPRESSIONS


def open_input(path: Path) -> io.BufferedReader:
    """Opens a file for reading, decompressed.

    Raises:
        InputError: no package reads this compression.
        OSError: as `open_regular`.
        DamagedInputError: later, on reading damaged content. Reads return the content before it.
    """
    if not is_compressed(path):
        return io.BufferedReader(open_regular(path, "an input file"))
    decompress = _decompressor(path)
    raw = open_regular(path, "an input file")
    try:
        return io.BufferedReader(_Decompressed(path, raw, decompress))
    except BaseException:
        raw.close()
        raise


def is_json_lines(path: Path) -> bool:
    """Whether each line of a file is a JSON object. InputError for a file without a suffix that
    may be either; DamagedInputError if the first line cannot be decompressed.
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


def read_document(path: Path) -> tuple[str | None, int]:
    """The text of a file without a byte order mark, and its bytes; None in place of a text for a
    file that is not UTF-8 or has a zero byte. InputError for a text that is too large or damaged.
    """
    with open_input(path) as stream:
        content = stream.read(_HEAD_BYTES)
        if b"\0" not in content:  # otherwise no text, however long it is
            content += stream.read(_MAX_BYTES + 1 - len(content))
    if b"\0" in content:
        return None, len(content)
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path}: expected a document of at most {_MAX_BYTES} bytes, got more.")
    try:
        return content.decode("utf-8-sig"), len(content)
    except UnicodeDecodeError:
        return None, len(content)


def lines_of(files: Iterable[Path], folder: Path | None = None) -> Iterator[Line]:
    """The lines of files, without blank ones. The last one of a damaged file has `damage`.

    Args:
        folder: directory of relative paths; default: the folder of their file.
    """
    for path in files:
        own = path.parent if folder is None else folder
        with open_input(path) as stream:
            number = 0
            try:
                for number, line in enumerate(_split(stream), start=1):
                    if line.removeprefix(_BYTE_ORDER_MARK).strip():
                        yield Line(f"{path}, line {number}", line, own)
            except DamagedInputError as error:
                damage = f"{error}; line {number + 1} and all later ones are lost"
                yield Line(f"{path}, line {number + 1}", b"", own, damage)


def _split(stream: io.BufferedReader) -> Iterator[bytes]:
    """The lines of a file; of one that is too long, the beginning."""
    # One byte more than a line may have shows that it is too long.
    for line in iter(lambda: stream.readline(_MAX_BYTES + 1), b""):
        yield line
        rest = line
        while len(rest) > _MAX_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_MAX_BYTES + 1)


def _suffixes(path: Path) -> set[str]:
    """What `--suffix` may name of a file: of a.json.gz, .json, .gz and .json.gz."""
    inner, outer = _inner_suffix(path), path.suffix.lower()
    return {inner, outer, f"{inner}{outer}"}


def _inner_suffix(path: Path) -> str:
    """The suffix, without that of a compression, in lower case."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def _decompressor(path: Path) -> Callable[..., Any]:
    found: Callable[..., Any] | None = compr.get(_COMPRESSIONS[path.suffix.lower()])
    # Where fsspec has only the package `zstandard`, it has a function instead of a file type, which
    # ends after the first of several frames.
    is_partial = path.suffix.lower() == ".zst" and not isinstance(found, type)
    if found is None or is_partial:
        package = " (pip install backports.zstd)" if path.suffix.lower() == ".zst" else ""
        raise InputError(
            f"{path}: expected a package that reads {path.suffix} as a whole, got none{package}. "
            "Install it, or decompress the file."
        )
    return found


class _Decompressed(io.RawIOBase):
    """The content of a compressed file. DamagedInputError where it is damaged."""

    def __init__(self, path: Path, raw: io.FileIO, decompress: Callable[..., Any]) -> None:
        self._path, self._raw = path, raw
        self._stream = decompress(raw, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            # Unlike `read`, it returns what there is before damage.
            content = self._stream.read1(len(buffer))
        # Each package has its own errors, of no common kind.
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
