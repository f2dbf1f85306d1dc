"""Makes training files of conversations about pictures.

    python -m megatron_hybrid preprocess-multimodal --input captions.jsonl \\
        --output-prefix data/captions \\
        --tokenizer-model models/qwen --processor models/qwen --workers 4

writes `data/captions_text`, `data/captions_images` (`.bin` and `.idx` each) and
`data/captions.json`. Samples keep their order for any number of workers. The files appear when all
of them are complete.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megatron.core.datasets.image_text_files import ImageTextSample, ImageTextWriter
from megatron.core.options import ConfigError, expect
from megatron.training.conversation_tokenizer import PictureTokenizer
from megatron.training.conversations import parse_picture_conversation
from megatron.training.images import ImageProcessing, find_picture
from megatron.training.tokenizer import TokenizerConfig, build_tokenizer
from megatron_hybrid import parsers
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.input_files import find_files, lines_of
from megatron_hybrid.sample_lines import Skipped, make_samples


@dataclasses.dataclass
class SampleMaker:
    """Makes samples of conversations.

    Attributes:
        tokenizer: a tokenizer.json, or the directory of a Hugging Face tokenizer.
        processing: the preprocessing of pictures.
        template: a file with a chat template; default: the tokenizer's.
    """

    tokenizer: str
    processing: ImageProcessing
    template: str | None = None

    def __post_init__(self) -> None:
        config = TokenizerConfig(tokenizer_model=self.tokenizer)
        self._conversations = PictureTokenizer(build_tokenizer(config), self.template)

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template cannot be pickled.
        return SampleMaker, (self.tokenizer, self.processing, self.template)

    @property
    def image_token(self) -> int:
        """The token that replaces a block of an image's patches."""
        return self._conversations.image_token

    def make(self, record: object, folder: Path) -> ImageTextSample:
        """Returns the sample of a conversation, with paths relative to `folder`.

        Raises:
            ConversationError: the record is no conversation with an assistant's message.
            ImageError: an unusable picture.
        """
        conversation = parse_picture_conversation(record)
        images = tuple(
            self.processing.load(find_picture(picture, folder)) for picture in conversation.pictures
        )
        block = self.processing.merge_size**2
        rendered = self._conversations.render_pictures(
            conversation, [image.grid.num_patches // block for image in images]
        )
        return ImageTextSample(rendered.tokens, rendered.is_answer, images)


class Summary(NamedTuple):
    """The written files."""

    num_samples: int
    num_images: int
    num_tokens: int
    skipped: Skipped


def preprocess(
    files: Sequence[Path],
    prefix: str,
    maker: SampleMaker,
    *,
    image_folder: Path | None = None,
    skip_bad_samples: bool = False,
    num_workers: int = 1,
) -> Summary:
    """Writes the samples in all lines of `files`.

    Args:
        prefix: the prefix of the paths to write.
        image_folder: the directory of relative paths; default: the input file's directory.
        skip_bad_samples: skip bad lines; otherwise the first one is raised.

    Raises:
        SampleError: a bad line, or too many that are skipped.
        ConfigError: there are no samples, or no workers.
        OSError: a file cannot be read or written.
    """
    expect(num_workers >= 1, "--workers", "an integer >= 1", num_workers)
    skipped = Skipped(is_allowed=skip_bad_samples)
    lines = lines_of(files, image_folder)
    # A sample has pictures, so that few of them are in flight.
    samples = make_samples(lines, maker, skipped, num_workers=num_workers, chunk_lines=16)
    is_silent = not sys.stderr.isatty()
    with (
        ImageTextWriter(prefix, maker.processing.format(maker.image_token)) as writer,
        tqdm(unit=" samples", desc="preprocess", disable=is_silent) as bar,
    ):
        for sample in samples:
            bar.update()
            writer.add(sample)

        if writer.num_samples == 0:
            raise ConfigError("--input: expected at least one sample, got none.")
    return Summary(writer.num_samples, writer.num_images, writer.num_tokens, skipped)


def main(argv: Sequence[str] | None = None, program: str = "preprocess-multimodal") -> int:
    """Preprocesses the input and returns the exit code."""
    parser = parsers.preprocess_multimodal(program)
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    with one_line_errors(f"{parser.prog}: error"):
        files = find_files(arguments.input)
        summary = preprocess(
            files,
            arguments.output_prefix,
            SampleMaker(arguments.tokenizer_model, _processing(arguments), arguments.chat_template),
            image_folder=arguments.image_folder,
            skip_bad_samples=arguments.skip_bad_samples,
            num_workers=arguments.workers,
        )

        summary.skipped.tell()
        print(
            f"{arguments.output_prefix}: {summary.num_samples} samples, {summary.num_images} "
            f"images, {summary.num_tokens} tokens, {len(summary.skipped.reasons)} skipped, in "
            f"{time.monotonic() - start:.1f} s"
        )
        return 0
    return 1


def _processing(arguments: argparse.Namespace) -> ImageProcessing:
    """Returns the processor's settings, or the defaults, with the flags' changes."""
    base = ImageProcessing()
    if arguments.processor is not None:
        base = ImageProcessing.of_folder(arguments.processor)
    names = [field.name for field in dataclasses.fields(ImageProcessing)]
    given = {name: getattr(arguments, name) for name in names}
    return dataclasses.replace(
        base, **{n: value for n, value in given.items() if value is not None}
    )
