"""Conversations become tokens and answers, by the chat template of the tokenizer's folder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.options import ConfigError
from megatron.training.conversation_tokenizer import (
    PICTURE_TEMPLATE,
    ConversationTokenizer,
    PictureTokenizer,
    Rendered,
    encode_answers,
)
from megatron.training.conversations import Conversation, ConversationError
from megatron.training.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.helpers.hf_models import begin_texts
from tests.unit_tests.training.helpers.chat_tokenizer import SPECIAL, make_tokenizer

PICTURE = {"type": "image"}
TALK = Conversation(
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A cat."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And "},
                PICTURE,
                {"type": "text", "text": "?"},
            ],
        },
        {"role": "assistant", "content": "Two.\n"},
    ),
    pictures=("a.png", "b.png"),
)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_conversation_starts_with_the_prefix_of_its_template_only(
    tmp_path: Path, is_written: bool
) -> None:
    folder = make_tokenizer(tmp_path, [*SPECIAL, "<s>"])
    plain = PictureTokenizer(HuggingFaceTokenizer(folder)).render_pictures(TALK, [2, 1])
    begin = begin_texts(folder, 256 + len(SPECIAL))
    if is_written:
        (folder / "chat_template.jinja").write_text("{{ '<s>' }}" + PICTURE_TEMPLATE)
    tokenizer = PictureTokenizer(HuggingFaceTokenizer(folder))
    found = tokenizer.render_pictures(TALK, [2, 1])
    assert found.tokens.tolist() == [*[begin] * is_written, *plain.tokens.tolist()]
    assert found.is_answer.tolist() == [*[False] * is_written, *plain.is_answer.tolist()]
    asked = tokenizer.prompt(Conversation(TALK.messages[:2], None, ("a.png",)), [2]).tolist()
    assert asked == found.tokens[: len(asked)].tolist()


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **others: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PictureTokenizer:
    return PictureTokenizer(HuggingFaceTokenizer(make_tokenizer(tmp_path_factory.mktemp("t"))))


def answers_of(tokenizer: ConversationTokenizer, found: Rendered) -> list[str]:
    decode = tokenizer._backend.decode
    runs = itertools.groupby(
        zip(found.tokens.tolist(), found.is_answer, strict=True), lambda x: x[1]
    )
    return [
        decode([token for token, _ in run], skip_special_tokens=False)
        for is_answer, run in runs
        if is_answer
    ]


TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>What is this?"
    "<|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n"
    "<|im_start|>user\nAnd <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
    "<|im_start|>assistant\nTwo.\n<|im_end|>\n"
)


def test_the_text_matches_the_chat_template_and_the_mask_has_the_assistants_messages(
    tokenizer: PictureTokenizer,
) -> None:
    found = tokenizer.render_pictures(TALK, [2, 1])
    decode = tokenizer._backend.decode
    assert decode(found.tokens.tolist(), skip_special_tokens=False) == TEXT
    assert answers_of(tokenizer, found) == ["A cat.<|im_end|>", "Two.\n<|im_end|>"]


def test_a_prompt_ends_with_the_generation_prompt(tokenizer: PictureTokenizer) -> None:
    asked = Conversation(TALK.messages[:2])
    prompt = tokenizer.prompt(asked, [2]).tolist()
    whole = tokenizer.render_pictures(Conversation(TALK.messages[:3]), [2])
    begin = int(whole.is_answer.argmax())
    assert prompt == whole.tokens[:begin].tolist()


def test_text_beyond_ascii_keeps_its_loss_mask(tokenizer: PictureTokenizer) -> None:
    talk = Conversation((user("größe 中文"), assistant("é🙂")))
    found = tokenizer.render(talk)
    answer = found.tokens[found.is_answer].tolist()
    assert tokenizer._backend.decode(answer, skip_special_tokens=False) == "é🙂<|im_end|>"


def test_a_text_that_spells_out_images_is_rejected(tokenizer: PictureTokenizer) -> None:
    parts = [PICTURE, {"type": "text", "text": "an <|image_pad|>"}]
    talk = Conversation((user(parts), assistant("a")))
    with pytest.raises(ConversationError, match=r"for each image \(1\), got 2: the text"):
        tokenizer.render_pictures(talk, [2])


def test_tokenizers_without_the_tokens_of_the_template_are_rejected(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, SPECIAL[:3])
    with pytest.raises(ConfigError, match=r"without <\|vision_start\|>, <\|vision_end\|>, <\|im"):
        PictureTokenizer(HuggingFaceTokenizer(folder))
    with pytest.raises(ConfigError, match="HuggingFaceTokenizer for conversations, got Byte"):
        ConversationTokenizer(ByteTokenizer())


# As Qwen3.5's: the prompt opens a block of thoughts, and turns before the last one have none.
THINKING_VISION = """
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image'
                else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- shown(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""


def test_conversations_about_pictures_use_the_template_of_the_directory(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINKING_VISION)
    own = PictureTokenizer(HuggingFaceTokenizer(tmp_path))
    last = assistant("Two.", thinking="One, another.")
    found = own.render_pictures(Conversation((*TALK.messages[:4], last)), [2, 3])
    answers = ["A cat.<|im_end|>", "One, another.\n</think>\n\nTwo.<|im_end|>"]
    assert answers_of(own, found) == answers
    asked = own.prompt(Conversation(TALK.messages[:4]), [2, 3]).tolist()
    assert asked == found.tokens[: len(asked)].tolist()
    assert found.is_answer[len(asked) :].sum() == len(answers[1].replace("<|im_end|>", "e"))


def test_turns_excluded_from_training_are_masked(tokenizer: PictureTokenizer) -> None:
    first = assistant("A cat.", weight=0)
    messages = (*TALK.messages[:2], first, *TALK.messages[3:])
    found = tokenizer.render_pictures(Conversation(messages), [2, 1])
    assert answers_of(tokenizer, found) == ["Two.\n<|im_end|>"]
    whole = tokenizer.render_pictures(TALK, [2, 1])
    assert np.array_equal(found.tokens, whole.tokens)
    nothing = Conversation((user("a"), assistant("b", train=False)))
    with pytest.raises(ConversationError, match="expected text of the assistant"):
        tokenizer.render(nothing)


def test_a_token_that_starts_with_the_blank_before_a_message_is_in_the_loss() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ", "Y", "e", "s", "ĠY", "ĠYe", "ĠYes"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(alphabet + words))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "Y"), ("ĠY", "e"), ("ĠYe", "s")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = "ok? a: Yes.\n"
    begin = text.index("Yes")
    found = encode_answers(backend, text, [(begin, begin + 4)])
    assert backend.decode(found.tokens[found.is_answer].tolist()) == " Yes."


def test_the_template_of_a_processor_is_found(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    content = {"chat_template": THINKING_VISION.replace("think>", "thought>")}
    (tmp_path / "chat_template.json").write_text(json.dumps(content))
    own = PictureTokenizer(HuggingFaceTokenizer(tmp_path))
    found = own.render(Conversation((user("a"), assistant("b"))))
    assert answers_of(own, found) == ["\n</thought>\n\nb<|im_end|>"]
