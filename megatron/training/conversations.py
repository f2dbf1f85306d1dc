"""Conversations about pictures, and the text that a model reads of them.

Two forms of JSON are read. OpenAI's, whose content may be a text or a list of parts:

    {"messages": [
        {"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                     {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A cat."}]}

and LLaVA's, where `<image>` stands for the next one of the pictures beside it:

    {"images": ["cat.png"],
     "conversations": [{"from": "human", "value": "<image>What is this?"},
                       {"from": "gpt", "value": "A cat."}]}

The text is that of Qwen's chat template, in which the picture above may take four tokens:

    <|im_start|>user
    <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>What is
    this?<|im_end|>
    <|im_start|>assistant
    A cat.<|im_end|>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.log import printable
from megatron.core.options import ConfigError, shown
from megatron.training.tokenizer import HuggingFaceTokenizer, Tokenizer

ASSISTANT = "assistant"
_ROLES = ("system", "user", ASSISTANT)
# Of LLaVA's and ShareGPT's files.
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": ASSISTANT}
_PLACE = "<image>"
_BEGIN, _END = "<|im_start|>", "<|im_end|>"
VISION_BEGIN, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
_SPECIAL = (_BEGIN, _END, VISION_BEGIN, VISION_END, IMAGE)


class ConversationError(ValueError):
    """A conversation that cannot be used. The message says why."""


class Picture(NamedTuple):
    """The place of a picture in a text."""

    path: str


class Turn(NamedTuple):
    """What one side says: texts and pictures in their order."""

    role: str  # system, user or assistant
    parts: tuple[str | Picture, ...]


class Conversation(NamedTuple):
    """Turns in their order."""

    turns: tuple[Turn, ...]

    @property
    def pictures(self) -> tuple[str, ...]:
        """The paths of all pictures, in the order of their places."""
        return tuple(
            part.path for turn in self.turns for part in turn.parts if isinstance(part, Picture)
        )


class Rendered(NamedTuple):
    """A conversation in tokens.

    Attributes:
        tokens: [tokens] int64.
        is_answer: [tokens] bool: what the assistant says, and the end of it.
    """

    tokens: NDArray[np.int64]
    is_answer: NDArray[np.bool_]


def parse_conversation(record: object) -> Conversation:
    """A conversation as JSON has it. ConversationError says what is wrong with it."""
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {shown(record)}")
    listed = record.get("images", record.get("image"))
    pictures = [listed] if isinstance(listed, str) else listed or []
    if not isinstance(pictures, list) or not all(isinstance(one, str) for one in pictures):
        raise ConversationError(f"expected images as paths, got {shown(listed)}")

    if "messages" in record:
        said, speaker, text, roles = (
            record["messages"],
            "role",
            "content",
            dict(zip(_ROLES, _ROLES, strict=True)),
        )
    elif "conversations" in record:
        said, speaker, text, roles = record["conversations"], "from", "value", ROLES
    else:
        raise ConversationError(f"expected messages or conversations, got {shown(list(record))}")
    if not isinstance(said, Sequence) or isinstance(said, str) or not said:
        raise ConversationError(f"expected a list of turns, got {shown(said)}")

    left = iter(pictures)
    turns = []
    for number, turn in enumerate(said, start=1):
        role = turn.get(speaker) if isinstance(turn, Mapping) else None
        if not isinstance(turn, Mapping) or not isinstance(role, str) or role not in roles:
            raise ConversationError(
                f"turn {number}: expected {speaker} as one of {', '.join(roles)}, got {shown(role)}"
            )
        parts = _parts(turn.get(text), left, number)
        turns.append(Turn(roles[role], tuple(part for part in parts if part != "")))
    if unused := list(left):
        raise ConversationError(
            f"expected a place {_PLACE} for each of {len(pictures)} image(s), got none for "
            f"{len(unused)}"
        )
    return Conversation(tuple(turns))


def _parts(content: object, pictures: Any, number: int) -> list[str | Picture]:
    """What a turn consists of. `pictures` gives the next path for a place without one."""

    def next_picture() -> Picture:
        path = next(pictures, None)
        if path is None:
            raise ConversationError(
                f"turn {number}: expected an image for each {_PLACE}, got fewer"
            )
        return Picture(path)

    if isinstance(content, str):
        first, *others = content.split(_PLACE)
        found: list[str | Picture] = [first]
        for text in others:
            found += [next_picture(), text]
        return found

    if not isinstance(content, Sequence):
        raise ConversationError(
            f"turn {number}: expected a text or a list of parts, got {shown(content)}"
        )
    parts: list[str | Picture] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif kind == "image":
            path = part.get("image", part.get("path"))
            if path is not None and not isinstance(path, str):
                raise ConversationError(f"turn {number}: expected a path, got {shown(path)}")
            parts.append(next_picture() if path is None else Picture(path))
        else:
            raise ConversationError(
                f"turn {number}: expected parts of type text or image, got {shown(part)}"
            )
    return parts


class ConversationTokenizer:
    """Makes tokens of conversations.

    Args:
        tokenizer: one of Hugging Face's, with the special tokens of Qwen's chat template.

    Attributes:
        image_token: in the place of each block of an image's patches.

    Raises:
        ConfigError: a tokenizer without these tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ConfigError(
                f"--tokenizer-type: expected HuggingFaceTokenizer for conversations, got "
                f"{tokenizer.name}."
            )
        ids = {token: tokenizer.backend.token_to_id(token) for token in _SPECIAL}
        known = {token: number for token, number in ids.items() if number is not None}
        lacking = [token for token in ids if token not in known]
        if lacking:
            raise ConfigError(
                f"--tokenizer-model: expected the tokens {', '.join(_SPECIAL)} of Qwen's chat "
                f"template, got a tokenizer without {', '.join(lacking)}."
            )
        self._backend = tokenizer.backend
        self.end = known[_END]
        self.image_token = known[IMAGE]

    def render(self, conversation: Conversation, num_tokens: Sequence[int]) -> Rendered:
        """The tokens of a conversation.

        Args:
            num_tokens: of each picture, in the order of their places.

        Raises:
            ConversationError: a text that spells out tokens of images.
        """
        counts = iter(num_tokens)
        text, answers = "", []
        for turn in conversation.turns:
            text += f"{_BEGIN}{turn.role}\n"
            begin = len(text)
            for part in turn.parts:
                text += self._of_picture(next(counts)) if isinstance(part, Picture) else part
            text += _END
            if turn.role == ASSISTANT:
                answers.append((begin, len(text)))
            text += "\n"
        found = self._encoded(text, answers)
        given, wanted = int((found.tokens == self.image_token).sum()), sum(num_tokens)
        if given != wanted:
            raise ConversationError(
                f"expected {wanted} tokens {IMAGE}, those of {len(num_tokens)} image(s), got "
                f"{given}: the text spells them out"
            )
        return found

    def prompt(self, conversation: Conversation, num_tokens: Sequence[int]) -> NDArray[np.int64]:
        """The tokens of a conversation up to where the assistant is to answer."""
        asked = self.render(conversation, num_tokens).tokens
        begin = self._encoded(f"{_BEGIN}{ASSISTANT}\n", []).tokens
        return np.concatenate([asked, begin])

    def _of_picture(self, num_tokens: int) -> str:
        return f"{VISION_BEGIN}{IMAGE * num_tokens}{VISION_END}"

    def _encoded(self, text: str, answers: Sequence[tuple[int, int]]) -> Rendered:
        return encode_answers(self._backend, text, answers)


def encode_answers(backend: Any, text: str, answers: Sequence[tuple[int, int]]) -> Rendered:
    """The tokens of a text, and which of them begin inside of an answer.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        answers: begin and end in characters.

    Raises:
        ConversationError: the tokenizer has no tokens for it.
    """
    try:
        encoding = backend.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception
        raise ConversationError(
            f"expected a text that the tokenizer has tokens for, got {printable(str(error))}"
        ) from error
    begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
    is_answer = np.zeros(len(begins), np.bool_)
    for begin, stop in answers:
        is_answer |= (begins >= begin) & (begins < stop)
    return Rendered(np.array(encoding.ids, np.int64), is_answer)
