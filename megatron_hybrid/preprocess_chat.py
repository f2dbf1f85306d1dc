"""`preprocess --chat`: makes training files of conversations.

    python -m megatron_hybrid preprocess --chat --input chats.jsonl --output-prefix data/chats \\
        --tokenizer-model models/qwen --workers 4

writes `data/chats_chat_document.bin` and `.idx`, and their loss mask, the pair
`data/chats_chat_document_mask`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.core.datasets.answer_dataset import CHAT_SUFFIX, mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, optimal_dtype
from megatron.core.options import ConfigError
from megatron.training.conversation_tokenizer import ConversationTokenizer, Rendered
from megatron.training.conversations import parse_conversation
from megatron.training.tokenizer import HuggingFaceTokenizer
from megatron_hybrid.input_files import lines_of
from megatron_hybrid.sample_lines import Skipped, make_samples


class ChatMaker:
    """Tokenizes conversations.

    Args:
        tokenizer: a tokenizer.json, or the directory of a Hugging Face tokenizer.
        template: a file with a chat template; default: the tokenizer's.

    Raises:
        ConfigError: unusable files.
    """

    def __init__(self, tokenizer: str, template: str | None = None) -> None:
        self._files = (tokenizer, template)
        self.tokenizer = HuggingFaceTokenizer(tokenizer)
        self._conversations = ConversationTokenizer(self.tokenizer, template)

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template cannot be pickled.
        return ChatMaker, self._files

    def make(self, record: object, folder: Path) -> Rendered:  # noqa: ARG002  no paths in it
        """Returns the tokens of a conversation and the assistant's among them.

        Raises:
            ConversationError: the record is no conversation with an assistant's message.
        """
        return self._conversations.render(parse_conversation(record))


def preprocess_chats(
    files: Sequence[Path],
    output_prefix: str,
    maker: ChatMaker,
    *,
    skip_bad_samples: bool,
    num_workers: int,
) -> None:
    """Writes the conversations in all lines of `files`, and prints a summary.

    Raises:
        SampleError: a bad line, unless they are skipped; too many bad lines.
        ConfigError: there are no conversations.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    prefix = f"{output_prefix}{CHAT_SUFFIX}"
    skipped = Skipped(is_allowed=skip_bad_samples)
    num_answer_tokens = 0

    dtype = optimal_dtype(maker.tokenizer.vocab_size)
    is_silent = not sys.stderr.isatty()
    with (
        # Published in the opposite order: the mask exists before the tokens do.
        IndexedDatasetBuilder(prefix, dtype) as tokens,
        IndexedDatasetBuilder(mask_prefix(prefix), np.uint8) as mask,
        tqdm(unit=" chats", desc="tokenize", disable=is_silent) as bar,
    ):
        # A conversation can be long: workers take a few at a time.
        samples = make_samples(
            lines_of(files), maker, skipped, num_workers=num_workers, chunk_lines=16
        )
        for sample in samples:
            bar.update()
            tokens.add_document(sample.tokens)
            mask.add_document(sample.is_answer.astype(np.uint8))
            num_answer_tokens += int(sample.is_answer.sum())
        if tokens.num_documents == 0:
            raise ConfigError("--input: expected at least one conversation, got none.")
        tokens.complete()  # before the mask is published

    skipped.tell()
    print(
        f"{prefix}: {tokens.num_documents} conversations, {tokens.num_tokens} tokens, "
        f"{num_answer_tokens} of them to be learned, {len(skipped.reasons)} skipped, in "
        f"{time.monotonic() - start:.1f} s"
    )
