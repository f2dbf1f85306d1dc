"""Tokenizers: from text to token ids and back.

Three kinds, chosen by `--tokenizer-type`: a Hugging Face tokenizer from its files, the bytes of the
text itself, and one for text that is token ids already. All of them can be pickled, so that worker
processes can be handed one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.core.files import UnusableFileError, published, read_regular
from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.options import ConfigError, check_options, expect, option, shown

_END_OF_TEXT = "<|endoftext|>"
# Default end-of-document tokens of vocabularies whose files name none.
_MAX_DIGITS = 18  # of a token id in a text
_MAX_FILE_BYTES = 1 << 28  # a vocabulary of a million tokens takes 50 MB
_MAX_VOCAB_SIZE = 1 << 31  # ids are stored as int32
# Limit of ids without a token per id with one; beyond it, --vocab-size must be given.
_MAX_GAPS = 4
_FREE_GAPS = 1 << 16
TOKENIZER_CONFIG = "tokenizer_config.json"  # of the transformers library
_EOD_CANDIDATES = (_END_OF_TEXT, "</s>", "<eos>")


class Tokenizer(Protocol):
    """What data preparation, training and generation need of a tokenizer."""

    name: str
    vocab_size: int  # all token ids are smaller, `eod` too
    eod: int  # the id that ends a document
    prefix: tuple[int, ...]  # the ids that the tokenizer itself puts before every text

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special tokens at its start or end."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of these ids."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer, and how many rows its embedding has."""

    tokenizer_type: str = option(
        "HuggingFaceTokenizer",
        "HuggingFaceTokenizer reads --tokenizer-model, ByteTokenizer has a token per byte, "
        "NullTokenizer takes token IDs and no text",
        choices=("HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = option(
        None, "tokenizer.json, or the directory of a Hugging Face tokenizer", metavar="PATH"
    )
    vocab_size: int | None = option(
        None, "size of the vocabulary before padding (default: the tokenizer's)", at_least=1
    )
    make_vocab_size_divisible_by: int = option(
        128, "pad the embedding to a multiple of this many rows", at_least=1, ceiling=2**24
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.tokenizer_type == "HuggingFaceTokenizer":
            # Path.exists raises for names that are too long and for unreadable directories.
            path = self.tokenizer_model
            found = path is not None and os.path.exists(path)  # noqa: PTH110
            expected = "an existing tokenizer.json or tokenizer directory"
            expect(found, "--tokenizer-model", expected, self.tokenizer_model)
        else:
            expect(
                self.tokenizer_model is None,
                "--tokenizer-model",
                f"nothing with {self.tokenizer_type}",
                self.tokenizer_model,
            )

        if self.tokenizer_type == "NullTokenizer":
            expect(
                self.vocab_size is not None,
                "--vocab-size",
                "a number, as NullTokenizer has none",
                self.vocab_size,
            )


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library.

    Special tokens that are spelled out in a text become their ids, as in the transformers library.
    Truncation and padding in the files are disabled: a document keeps all of its tokens and gets no
    others.

    Args:
        path: a tokenizer.json, or its directory. The transformers library reads a directory without
            one.

    Attributes:
        backend: the library's own tokenizer.
        path: where its files are.
        num_tokens: that have an id; fewer than `vocab_size` where ids have gaps.
        prefix: the tokens that the files put before every text, such as the BOS token of Llama and
            Gemma.

    Raises:
        ConfigError: the files are missing, cannot be read or hold no tokens, or do not define
            the token that ends a document.
    """

    def __init__(self, path: str | Path) -> None:
        self.backend, eos = _load(Path(path))
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(
                f"--tokenizer-model: expected a tokenizer with tokens in {path}, got none."
            )

        self.name = f"HuggingFaceTokenizer({path})"
        self.path = Path(path).absolute()
        # Ids may have gaps, so their number is not enough.
        self.vocab_size = max(vocabulary.values()) + 1
        self.num_tokens = len(vocabulary)
        self.eod = _choose_eod(vocabulary, eos, path)
        self.prefix = _prefix_of(self.backend, vocabulary)

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError for a text that the tokenizer has no tokens for."""
        try:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{self.name}: expected a text it has tokens for, got {error}."
            ) from error

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


class ByteTokenizer:
    """The UTF-8 bytes of the text, and one id more for the end of a document. Needs no files."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256
    prefix: tuple[int, ...] = ()

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of these ids. Ids beyond the bytes have no text; invalid UTF-8 becomes
        U+FFFD.
        """
        # A model's vocabulary is padded, so that it may give ids beyond the end of a document, too.
        return bytes(token for token in ids if token < self.eod).decode(errors="replace")


class NullTokenizer:
    """Text that is token ids already, separated by white space.

    Args:
        vocab_size: the number of ids for content, from 0. It is itself the id that ends
            a document, as in Megatron, so that the tokenizer has one id more; a text may contain
            that one, too.
    """

    def __init__(self, vocab_size: int) -> None:
        self.name = f"NullTokenizer({vocab_size})"
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size
        self.prefix: tuple[int, ...] = ()

    def tokenize(self, text: str) -> list[int]:
        """Raises ValueError for a word that is no id of the vocabulary."""
        words = text.split()
        for word in words:
            # int() would take 1_0 and digits of other scripts, too.
            if not (word.isascii() and word.isdigit() and len(word) <= _MAX_DIGITS):
                raise ValueError(f"Expected token ids separated by spaces, got {word[:40]!r}.")
        ids = [int(word) for word in words]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"Expected token ids in range({self.vocab_size}), got {token}.")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def say_prefix(tokenizer: Tokenizer) -> str | None:
    """Describes the tokens that the tokenizer puts before every text. None without any."""
    if not tokenizer.prefix:
        return None
    text = tokenizer.detokenize(tokenizer.prefix)
    return f"texts start with {shown(text)}, as defined by the tokenizer's files"


def build_tokenizer(config: TokenizerConfig, *, rows_of: str | None = None) -> Tokenizer:
    """The tokenizer the configuration names.

    Args:
        rows_of: the model directory that `--vocab-size` was taken from, for messages; None: the
            user has set it.

    Raises:
        ConfigError: it cannot be loaded, or has more ids than `--vocab-size`.
    """
    tokenizer: Tokenizer
    if config.tokenizer_type == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None, "checked by the config"
        tokenizer = NullTokenizer(config.vocab_size)
    else:
        assert config.tokenizer_model is not None, "checked by the config"
        tokenizer = HuggingFaceTokenizer(config.tokenizer_model)
    _check_vocab_size(config, tokenizer, rows_of)
    return tokenizer


def padded_vocab_size(config: TokenizerConfig, tokenizer: Tokenizer, tensor_size: int = 1) -> int:
    """Rows of the embedding: the vocabulary, padded to a multiple of
    `--make-vocab-size-divisible-by`.

    Args:
        tensor_size: ranks that divide them.

    Raises:
        ConfigError: the tokenizer has more ids than `--vocab-size`, or the ranks cannot divide the
            rows.
    """
    _check_vocab_size(config, tokenizer)
    # NullTokenizer's has the end of a document in addition to --vocab-size.
    num_rows = max(tokenizer.vocab_size, config.vocab_size or 0)
    divisor = config.make_vocab_size_divisible_by
    padded = -(-num_rows // divisor) * divisor
    expected = f"a divisor of the embedding's {padded} rows (--make-vocab-size-divisible-by)"
    expect(padded % tensor_size == 0, "--tensor-model-parallel-size", expected, tensor_size)
    return padded


def _check_vocab_size(
    config: TokenizerConfig, tokenizer: Tokenizer, rows_of: str | None = None
) -> None:
    """ConfigError where --vocab-size has no room for the tokenizer's ids, and for ids out of all
    proportion.

    Each id up to the highest one gets a row of the embedding. NullTokenizer's follow from
    --vocab-size.
    """
    size = tokenizer.vocab_size
    expected = f"at most {_MAX_VOCAB_SIZE} ids, which an int32 can hold"
    expect(max(size, config.vocab_size or 0) <= _MAX_VOCAB_SIZE, "--vocab-size", expected, size)
    if config.tokenizer_type == "NullTokenizer":
        return

    if config.vocab_size is not None and rows_of is not None and size > config.vocab_size:
        raise ConfigError(
            f"--tokenizer-model: expected at most {config.vocab_size} ids, as many as the "
            f"embedding in {rows_of} has rows, got {size} of {tokenizer.name}. Rows are "
            f"added by --vocab-size {size} in a run with --hf-model."
        )
    if config.vocab_size is not None:
        expected = f"at least the {size} ids of {tokenizer.name}"
        expect(config.vocab_size >= size, "--vocab-size", expected, config.vocab_size)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        num_gaps = size - tokenizer.num_tokens
        if num_gaps > _FREE_GAPS + _MAX_GAPS * tokenizer.num_tokens:
            raise ConfigError(
                f"--tokenizer-model: expected ids that the {tokenizer.num_tokens} tokens of "
                f"{tokenizer.name} about fill, got ids up to {size - 1}. If that is meant, give "
                f"--vocab-size {size}."
            )


def train_bpe(
    texts: Iterable[str], vocab_size: int, path: str | Path, progress: bool = False
) -> Path:
    """Trains a byte-level BPE tokenizer and saves it; the same texts give the same file.

    Args:
        texts: what to train on.
        vocab_size: ids of the tokenizer, `<|endoftext|>` among them; fewer if the texts are too
            short for so many.
        path: the tokenizer.json to write; its directory is created if missing.
        progress: whether to show a progress bar.

    Returns:
        `path`.

    Raises:
        ValueError: a vocabulary too small for the 256 bytes and `<|endoftext|>`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise ValueError(
            f"Expected a vocabulary of at least {len(alphabet) + 1} tokens, got {vocab_size}."
        )

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with published(path) as stream:
        stream.write(tokenizer.to_str(pretty=True).encode())
    return path


def _load(path: Path) -> tuple[tokenizers.Tokenizer, str | None]:
    """The tokenizer at `path`, and its end-of-text token where its files name one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not os.path.lexists(file):
        return _load_with_transformers(path)

    with _one_line(file):
        content = read_regular(file, max_bytes=_MAX_FILE_BYTES, what="a tokenizer.json")
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    return tokenizer, special_tokens(file.parent).get("eos_token")


@contextmanager
def _one_line(place: Path) -> Iterator[None]:
    """ConfigError for whatever a library makes of a tokenizer's broken files."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust raises a class that does not derive from Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = error.strerror if isinstance(error, UnusableFileError) else error
        raise ConfigError(
            f"--tokenizer-model: expected a tokenizer in {place}, got {printable(str(reason))}."
        ) from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Reads the special tokens, such as `eos_token`, from the files next to a tokenizer.json.

    ConfigError for files that cannot be read, and for an `eos_token` that is no text.
    """
    found: dict[str, str] = {}
    files = [folder / TOKENIZER_CONFIG, folder / "special_tokens_map.json"]
    contents = [(file, read_object(file)) for file in files if os.path.lexists(file)]
    # As in the transformers library, whose newer files list all added tokens in the configuration.
    if not any("added_tokens_decoder" in content for _, content in contents):
        contents.reverse()
    for file, content in contents:
        named = content.get("extra_special_tokens")
        tokens = {name: token for name, token in content.items() if name.endswith("_token")}
        tokens |= named if isinstance(named, dict) else {}
        for name, token in tokens.items():
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found.setdefault(name, token)
            elif name == "eos_token" and token is not None:
                expected = f"a string as eos_token in {file}"
                raise ConfigError(f"--tokenizer-model: expected {expected}, got {shown(token)}.")
    return found


def read_object(file: Path) -> dict[str, Any]:
    """Reads a file that must contain one JSON object; raises ConfigError for others."""
    try:
        text = read_regular(file, max_bytes=_MAX_FILE_BYTES, what="a JSON file")
        content = parse_json(text, max_depth=100, allow_nan=True)  # as in a model's config.json
    except (OSError, ValueError) as error:
        reason = printable(str(error))
        raise ConfigError(f"--tokenizer-model: expected JSON in {file}, got {reason}.") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"--tokenizer-model: expected a JSON object in {file}, got a {type(content).__name__}."
        )
    return content


def _choose_eod(vocabulary: dict[str, int], eos: str | None, path: str | Path) -> int:
    """The id of `eos`, the token the files name, or else of the first of the usual ones."""
    if eos is not None and eos not in vocabulary:
        raise ConfigError(
            f"--tokenizer-model: expected the eos_token that {path} names among its "
            f"{len(vocabulary)} tokens, got {shown(eos)}, which is not."
        )

    for token in _EOD_CANDIDATES if eos is None else (eos,):
        if token in vocabulary:
            return vocabulary[token]

    raise ConfigError(
        f"--tokenizer-model: expected an end-of-document token in {path} (eos_token in "
        f"tokenizer_config.json, or one of {', '.join(_EOD_CANDIDATES)}), got none."
    )


def _prefix_of(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The special tokens that precede the tokens of a text."""
    # A vocabulary may lack any given text, but not its tokens.
    for text in ("a", next(iter(vocabulary))):
        try:
            encoding = backend.encode(text, add_special_tokens=True)
        except Exception:  # the library raises plain Exception
            continue
        if 0 in encoding.sequence_ids:
            return tuple(encoding.ids[: encoding.sequence_ids.index(0)])
    return ()


def _load_with_transformers(path: Path) -> tuple[tokenizers.Tokenizer, str | None]:
    """A tokenizer kept in another form, converted by the transformers library."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer-model: expected a tokenizer.json in {path}, got none; reading other "
            "forms needs the `hf` extra (pip install '.[hf]' in the clone)."
        ) from error

    _expect_regular_files(path)
    with _one_line(path):  # ImportError for what some kinds need besides, and much else
        # Code in the files is not executed, and the user is not prompted for it.
        loaded: Any = transformers.AutoTokenizer.from_pretrained(
            str(path), use_fast=True, local_files_only=True, trust_remote_code=False
        )

    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"--tokenizer-model: expected a tokenizer with a fast form in {path}, got "
            f"{type(loaded)}."
        )

    return backend, loaded.eos_token


def _expect_regular_files(folder: Path) -> None:
    """Raises ConfigError for a directory with entries other than files and directories, which a
    library would open.
    """
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer-model: expected a file or a directory, got {folder}.")
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(
                f"--tokenizer-model: expected regular files in {folder}, got {path.name!r}."
            )
