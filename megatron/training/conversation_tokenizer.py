"""Converts conversations to tokens and their loss mask.

The chat template in the tokenizer's directory renders the text. For conversations about pictures it
may be missing; the default is this part of the Qwen template, in which a picture may take four
tokens:

    <|im_start|>user
    <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>What is
    this?<|im_end|>
    <|im_start|>assistant
    A cat.<|im_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron.training.chat_template import ChatTemplate, RenderedChat, find_template
from megatron.training.conversations import Conversation, ConversationError
from megatron.training.tokenizer import HuggingFaceTokenizer, Tokenizer

_END = "<|im_end|>"
VISION_BEGIN, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
_OF_PICTURES = (VISION_BEGIN, VISION_END, IMAGE)
PICTURE_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('a role other than system, user and assistant: ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text'
                else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class Rendered(NamedTuple):
    """A conversation in tokens.

    Attributes:
        tokens: [tokens] int64.
        is_answer: [tokens] bool: the assistant's text and its end token.
    """

    tokens: NDArray[np.int64]
    is_answer: NDArray[np.bool_]


class ConversationTokenizer:
    """Converts conversations to tokens.

    Args:
        tokenizer: one of Hugging Face's.
        template: a file with a chat template; default: the one in the tokenizer's directory.

    Raises:
        ConfigError: another kind of tokenizer, or no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None = None) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ConfigError(
                f"--tokenizer-type: expected HuggingFaceTokenizer for conversations, got "
                f"{tokenizer.name}."
            )
        self._backend = tokenizer.backend
        added = tokenizer.backend.get_added_tokens_decoder().values()
        ends = [token.content for token in added if token.special]
        self._template = self._find_template(tokenizer.path, template, ends)

    def _find_template(
        self, folder: Path, template: str | Path | None, ends: list[str]
    ) -> ChatTemplate:
        return ChatTemplate.of_files(folder, template, ends)

    def render(self, conversation: Conversation) -> Rendered:
        """Returns the tokens of a conversation and its loss mask.

        Raises:
            ConversationError: it cannot be rendered, or has no token in the loss.
        """
        chat = self._template.render_answers(conversation.messages, conversation.tools)
        return self._encoded(chat)

    def _encoded(self, chat: RenderedChat) -> Rendered:
        found = encode_answers(self._backend, chat.text, chat.answers)
        # The first token has no predecessor, so it is never in the loss.
        if not found.is_answer[1:].any():
            raise ConversationError("expected text of the assistant, got none")
        return found


class PictureTokenizer(ConversationTokenizer):
    """Converts conversations about pictures to tokens.

    Args:
        tokenizer: one of Hugging Face's, with the tokens that Qwen's models have for images.
        template: as for the base class; the default for a directory without one is Qwen's.

    Attributes:
        end: the token that ends an assistant span.
        image_token: replaces each block of an image's patches.

    Raises:
        ConfigError: a tokenizer without these tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None = None) -> None:
        super().__init__(tokenizer, template)
        ids = {token: self._backend.token_to_id(token) for token in _OF_PICTURES}
        known = {token: number for token, number in ids.items() if number is not None}
        if lacking := [token for token in ids if token not in known]:
            raise ConfigError(
                f"--tokenizer-model: expected the tokens {', '.join(_OF_PICTURES)} of the Qwen "
                f"chat template, got a tokenizer without {', '.join(lacking)}."
            )
        end = self._backend.token_to_id(_END)
        self.end: int = tokenizer.eod if end is None else end
        self.image_token = known[IMAGE]

    def _find_template(
        self, folder: Path, template: str | Path | None, ends: list[str]
    ) -> ChatTemplate:
        if template is None and find_template(folder) is None:
            return ChatTemplate(PICTURE_TEMPLATE, ends=ends)
        return super()._find_template(folder, template, ends)

    def render_pictures(self, conversation: Conversation, num_tokens: Sequence[int]) -> Rendered:
        """Returns the tokens of a conversation about pictures.

        Args:
            num_tokens: tokens of each picture, in the order of the text.

        Raises:
            ConversationError: as `render`, and for a text that spells out tokens of images.
        """
        chat = self._template.render_answers(conversation.messages, conversation.tools)
        return self._encoded(_expanded(chat, num_tokens))

    def prompt(self, conversation: Conversation, num_tokens: Sequence[int]) -> NDArray[np.int64]:
        """Returns the tokens of a conversation and its generation prompt."""
        text = self._template.render(conversation.messages, conversation.tools, asks=True)
        chat = _expanded(RenderedChat(text, ()), num_tokens)
        return encode_answers(self._backend, chat.text, ()).tokens


def _expanded(chat: RenderedChat, num_tokens: Sequence[int]) -> RenderedChat:
    """Returns a text in which each picture's placeholder is repeated once per image token."""
    places = [found.start() for found in re.finditer(re.escape(IMAGE), chat.text)]
    if len(places) != len(num_tokens):
        raise ConversationError(
            f"expected {IMAGE} once for each image ({len(num_tokens)}), got {len(places)}: the "
            "text spells it out, or the chat template leaves out pictures"
        )
    added = np.array([(count - 1) * len(IMAGE) for count in num_tokens], np.int64)
    total = np.concatenate([[0], added.cumsum()])

    def moved(position: int) -> int:
        return position + int(total[np.searchsorted(places, position)])

    counts = iter(num_tokens)
    text = re.sub(re.escape(IMAGE), lambda _: IMAGE * next(counts), chat.text)
    return RenderedChat(text, tuple((moved(begin), moved(end)) for begin, end in chat.answers))


def encode_answers(backend: Any, text: str, answers: Sequence[tuple[int, int]]) -> Rendered:
    """Returns the tokens of a text, and a mask of the tokens with characters of an assistant span.

    As in serving, the start of a conversation is defined by the chat template alone: the
    tokenizer's prefix is not added.

    A token that starts with the blank before a span belongs to it, as in the masks of the
    transformers library: without it, the loss would not include the first word.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        answers: start and end of the spans, in characters.

    Raises:
        ConversationError: the tokenizer has no tokens for it.
    """
    try:
        encoding = backend.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception
        raise ConversationError(
            f"expected a text that the tokenizer has tokens for, got {printable(str(error))}"
        ) from error
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    is_answer = np.zeros(len(offsets), np.bool_)
    for begin, stop in answers:
        is_answer |= (offsets[:, 0] < stop) & (offsets[:, 1] > begin)
    return Rendered(np.array(encoding.ids, np.int64), is_answer)
