"""Makes training files of conversations about pictures.

    python tools/preprocess_multimodal.py --input captions.jsonl --output-prefix data/captions \\
        --tokenizer-model models/qwen --processor models/qwen --workers 4

writes `data/captions_text`, `data/captions_images` (`.bin` and `.idx` each) and
`data/captions.json`. Samples keep the order of the input, whatever the number of workers. The files
appear only when all of them are written.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from megatron.core.datasets.image_text_files import ImageTextSample, ImageTextWriter
from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron.training.conversations import (
    ConversationError,
    ConversationTokenizer,
    parse_conversation,
)
from megatron.training.images import ImageError, ImageProcessing
from megatron.training.tokenizer import TokenizerConfig, build_tokenizer

_MAX_MESSAGE = 2000  # characters
_MOST_TOLD = 10  # skipped samples that are named
_CHUNK = 16  # samples that a worker makes at a time


class Line(NamedTuple):
    """A line of the input.

    Attributes:
        place: for messages.
        folder: that relative paths of pictures begin in.
    """

    place: str
    content: str
    folder: Path


class SampleError(ValueError):
    """A line that makes no sample. The message names the file, the line, and what is wrong."""


@dataclasses.dataclass
class SampleMaker:
    """Makes samples of lines.

    Attributes:
        tokenizer: a tokenizer.json, or the folder of a Hugging Face tokenizer.
        processing: of pictures.
    """

    tokenizer: str
    processing: ImageProcessing

    def __post_init__(self) -> None:
        config = TokenizerConfig(tokenizer_model=self.tokenizer)
        self._conversations = ConversationTokenizer(build_tokenizer(config))

    @property
    def image_token(self) -> int:
        """In the place of each block of an image's patches."""
        return self._conversations.image_token

    def make(self, line: Line) -> ImageTextSample:
        """The sample of a line. SampleError if there is none."""
        try:
            record = parse_json(line.content)
        except ValueError as error:
            raise SampleError(f"{line.place}: expected a JSON object, got {error}.") from error
        try:
            conversation = parse_conversation(record)
            images = tuple(
                self.processing.load(line.folder / path) for path in conversation.pictures
            )
            block = self.processing.merge_size**2
            rendered = self._conversations.render(
                conversation, [image.grid.num_patches // block for image in images]
            )
            if not rendered.is_answer.any():
                raise ConversationError("expected something that the assistant says, got nothing")
        except (ConversationError, ImageError) as error:
            text = printable(str(error)).removesuffix(".")
            raise SampleError(f"{line.place}: {text}.") from error
        return ImageTextSample(rendered.tokens, rendered.is_answer, images)

    def try_to_make(self, line: Line) -> ImageTextSample | SampleError:
        """The sample of a line, or why there is none."""
        try:
            return self.make(line)
        except SampleError as error:
            return error


class Summary(NamedTuple):
    """What was written."""

    num_samples: int
    num_images: int
    num_tokens: int
    skipped: tuple[str, ...]  # why, each


def preprocess(
    files: Sequence[Path],
    prefix: str,
    maker: SampleMaker,
    *,
    image_folder: Path | None = None,
    skip_bad_samples: bool = False,
    num_workers: int = 1,
) -> Summary:
    """Writes the samples of all lines of `files`.

    Args:
        prefix: of the paths to write.
        image_folder: that relative paths of pictures begin in; default: the folder of their file.
        skip_bad_samples: leave out lines that make no sample; otherwise the first ends it.

    Raises:
        SampleError: for such a line.
        ConfigError: if there are no samples at all.
        OSError: for files that cannot be read or written.
    """
    skipped: list[str] = []
    lines = _lines(files, image_folder)
    is_silent = not sys.stderr.isatty()
    with (
        ImageTextWriter(prefix, maker.processing.format(maker.image_token)) as writer,
        tqdm(unit=" samples", desc="preprocess", disable=is_silent) as bar,
    ):
        for made in _made(lines, maker, num_workers):
            bar.update()
            if not isinstance(made, SampleError):
                writer.add(made)
            elif skip_bad_samples:
                skipped.append(str(made))
            else:
                raise made
        if writer.num_samples == 0:
            raise ConfigError(
                f"--input: expected at least one sample, got none and {len(skipped)} bad line(s)."
            )
    return Summary(writer.num_samples, writer.num_images, writer.num_tokens, tuple(skipped))


def _lines(files: Sequence[Path], image_folder: Path | None) -> Iterator[Line]:
    for path in files:
        folder = path.parent if image_folder is None else image_folder
        with path.open(encoding="utf-8", errors="replace") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield Line(f"{path}, line {number}", line, folder)


_Made = ImageTextSample | SampleError
_worker_maker: SampleMaker | None = None  # of this process, if it is a worker


def _made(lines: Iterable[Line], maker: SampleMaker, num_workers: int) -> Iterator[_Made]:
    """What each line makes, in their order."""
    if num_workers == 1:
        yield from map(maker.try_to_make, lines)
        return

    # Not forked: the tokenizers library has threads.
    context = multiprocessing.get_context("spawn")
    iterator = iter(lines)
    chunks = iter(lambda: list(itertools.islice(iterator, _CHUNK)), [])
    with ProcessPoolExecutor(
        num_workers, context, _start_worker, (maker.tokenizer, maker.processing)
    ) as pool:
        # As many in flight as keep the workers busy: all of the input need not be in memory.
        pending = [pool.submit(_make_chunk, c) for c in itertools.islice(chunks, 2 * num_workers)]
        while pending:
            yield from pending.pop(0).result()
            pending += [pool.submit(_make_chunk, c) for c in itertools.islice(chunks, 1)]


def _start_worker(tokenizer: str, processing: ImageProcessing) -> None:
    global _worker_maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_maker = SampleMaker(tokenizer, processing)


def _make_chunk(lines: list[Line]) -> list[_Made]:
    assert _worker_maker is not None, "the pool has started this process with one"
    return [_worker_maker.try_to_make(line) for line in lines]


def main(argv: Sequence[str] | None = None, program: str = "preprocess_multimodal.py") -> int:
    """Preprocesses as the command line says; returns the exit code.

    Args:
        argv: the arguments; default: the command line's.
        program: the name that error messages begin with.
    """
    parser = _parser(program)
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    try:
        files = _files(arguments.input)
        if arguments.workers < 1:
            raise ConfigError(f"--workers: expected at least 1, got {arguments.workers}.")
        summary = preprocess(
            files,
            arguments.output_prefix,
            SampleMaker(arguments.tokenizer_model, _processing(arguments)),
            image_folder=arguments.image_folder,
            skip_bad_samples=arguments.skip_bad_samples,
            num_workers=arguments.workers,
        )
    except (ValueError, OSError, BrokenProcessPool) as error:
        # In one line, even if the names of files contain control characters.
        parser.exit(1, f"{parser.prog}: error: {printable(str(error), _MAX_MESSAGE)}\n")

    for reason in summary.skipped[:_MOST_TOLD]:
        print(f"skipped: {reason}", file=sys.stderr)
    if (more := len(summary.skipped) - _MOST_TOLD) > 0:
        print(f"skipped: {more} more", file=sys.stderr)
    print(
        f"{arguments.output_prefix}: {summary.num_samples} samples, {summary.num_images} images, "
        f"{summary.num_tokens} tokens, {len(summary.skipped)} skipped, in "
        f"{time.monotonic() - begun:.1f} s"
    )
    return 0


def _files(inputs: Sequence[Path]) -> list[Path]:
    for path in inputs:
        if not path.is_file():
            raise ConfigError(f"--input: expected files of JSON lines that exist, got {path}.")
    return list(inputs)


def _processing(arguments: argparse.Namespace) -> ImageProcessing:
    """What a folder says, or the defaults, changed as flags say."""
    base = ImageProcessing()
    if arguments.processor is not None:
        base = ImageProcessing.of_folder(arguments.processor)
    names = [field.name for field in dataclasses.fields(ImageProcessing)]
    given = {name: getattr(arguments, name) for name in names}
    return dataclasses.replace(
        base, **{n: value for n, value in given.items() if value is not None}
    )


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Makes training files of conversations about pictures."
    )
    add: Callable[..., object] = parser.add_argument
    add(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        help="files of JSON lines: messages as OpenAI has them, or conversations as LLaVA has them",
    )
    add("--output-prefix", required=True, help="files are PREFIX_text, PREFIX_images, PREFIX.json")
    add(
        "--tokenizer-model",
        required=True,
        help="a tokenizer.json, or the folder of a Hugging Face tokenizer, with the tokens of "
        "Qwen's chat template",
    )
    add(
        "--processor",
        metavar="FOLDER",
        help="of a Hugging Face model, whose preprocessor_config.json says how pictures are "
        "resized and normalised; the flags below change that",
    )
    add("--image-folder", type=Path, help="default: the folder of the file that names a picture")
    add("--patch-size", type=int, help="pixels of a patch in each direction (default: 16)")
    add("--merge-size", type=int, help="patches of a token in each direction (default: 2)")
    add("--min-pixels", type=int, help="of a resized picture (default: 65536)")
    add("--max-pixels", type=int, help="of a resized picture (default: 16777216)")
    add("--image-mean", dest="mean", type=_numbers, metavar="R,G,B", help="default: 0.5,0.5,0.5")
    add("--image-std", dest="std", type=_numbers, metavar="R,G,B", help="default: 0.5,0.5,0.5")
    add(
        "--skip-bad-samples",
        action="store_true",
        help="leave out lines with broken pictures or texts, and count them",
    )
    add("--workers", type=int, default=1, help="processes that read pictures")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers as in 0.5,0.5,0.5, got {text!r}"
        ) from None
