"""`preprocess_data.py --chat`: makes training files of conversations.

    python -m megatron_hybrid preprocess --chat --input chats.jsonl --output-prefix data/chats \\
        --tokenizer-model models/qwen --workers 4

writes `data/chats_chat_document.bin` and `.idx`, and the same of `data/chats_chat_document_mask`,
which says what is to be learned.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megatron.core.datasets.answer_dataset import CHAT_SUFFIX, mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, optimal_dtype
from megatron.core.log import counted
from megatron.core.options import ConfigError
from megatron.training.conversation_tokenizer import ConversationTokenizer, Rendered
from megatron.training.conversations import parse_conversation
from megatron.training.tokenizer import HuggingFaceTokenizer
from megatron_hybrid.input_files import lines_of
from megatron_hybrid.sample_lines import SampleError, Skipped, make_samples


class ChatMaker:
    """Makes tokens of conversations.

    Args:
        tokenizer: a tokenizer.json, or the folder of a Hugging Face tokenizer.
        template: a file with a chat template; default: the tokenizer's own.

    Raises:
        ConfigError: files that cannot be used.
    """

    def __init__(self, tokenizer: str, template: str | None = None) -> None:
        self._files = (tokenizer, template)
        self.tokenizer = HuggingFaceTokenizer(tokenizer)
        self._conversations = ConversationTokenizer(self.tokenizer, template)

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template does not travel to workers.
        return ChatMaker, self._files

    def make(self, record: object, folder: Path) -> Rendered:  # noqa: ARG002  no paths in it
        """The tokens of a conversation, and which of them the assistant says.

        Raises:
            ConversationError: what the record has is no conversation to learn from.
        """
        return self._conversations.render(parse_conversation(record))


class ChatSummary(NamedTuple):
    """What was written."""

    prefix: str
    num_samples: int
    num_tokens: int
    num_answer_tokens: int
    skipped: Skipped


def write_chats(
    files: Sequence[Path],
    output_prefix: str,
    maker: ChatMaker,
    *,
    skip_bad_samples: bool = False,
    num_workers: int = 1,
) -> ChatSummary:
    """Writes the conversations of all lines of `files`.

    Raises:
        SampleError: for a line that makes no sample, unless such lines are left out, and for too
            many of them.
        ConfigError: if there are no samples at all.
        OSError: for files that cannot be read or written.
    """
    prefix = f"{output_prefix}{CHAT_SUFFIX}"
    skipped = Skipped(is_allowed=skip_bad_samples)
    num_answer_tokens = 0
    dtype = optimal_dtype(maker.tokenizer.vocab_size)
    is_silent = not sys.stderr.isatty()
    with (
        # Blocks end in the other order: the mask is there before the tokens are.
        IndexedDatasetBuilder(prefix, dtype) as tokens,
        IndexedDatasetBuilder(mask_prefix(prefix), np.uint8) as mask,
        tqdm(unit=" chats", desc="tokenize", disable=is_silent) as bar,
    ):
        for sample in make_samples(lines_of(files), maker, num_workers):
            bar.update()
            if isinstance(sample, SampleError):
                skipped.add(sample)
                continue
            tokens.add_document(sample.tokens)
            mask.add_document(sample.is_answer.astype(np.uint8))
            num_answer_tokens += int(sample.is_answer.sum())
        if tokens.num_documents == 0:
            raise ConfigError(
                f"--input: expected at least one conversation, got none and "
                f"{counted(len(skipped.reasons), 'bad line')}."
            )
        skipped.check(tokens.num_documents)
        tokens.complete()  # before the mask is published
    return ChatSummary(prefix, tokens.num_documents, tokens.num_tokens, num_answer_tokens, skipped)


def preprocess_chats(
    files: Sequence[Path],
    output_prefix: str,
    maker: ChatMaker,
    *,
    skip_bad_samples: bool,
    num_workers: int,
) -> None:
    """Writes conversations, and says what was written."""
    begun = time.monotonic()
    summary = write_chats(
        files,
        output_prefix,
        maker,
        skip_bad_samples=skip_bad_samples,
        num_workers=num_workers,
    )
    summary.skipped.tell()
    print(
        f"{summary.prefix}: {summary.num_samples} conversations, {summary.num_tokens} tokens, "
        f"{summary.num_answer_tokens} of them to be learned, {len(summary.skipped.reasons)} "
        f"skipped, in {time.monotonic() - begun:.1f} s"
    )
