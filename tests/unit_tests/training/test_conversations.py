"""Conversations about pictures, in the forms that people have them, become tokens and answers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron.core.options import ConfigError
from megatron.training.conversations import (
    Conversation,
    ConversationError,
    ConversationTokenizer,
    Picture,
    Turn,
    parse_conversation,
)
from megatron.training.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.unit_tests.training.helpers.chat_tokenizer import SPECIAL, make_tokenizer

TALK = Conversation(
    (
        Turn("system", ("Be brief.",)),
        Turn("user", (Picture("a.png"), "What is this?")),
        Turn("assistant", ("A cat.",)),
        Turn("user", ("And ", Picture("b.png"), "?")),
        Turn("assistant", ("Two.\n",)),
    )
)
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "What is this?"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And "},
                {"type": "image", "path": "b.png"},
                {"type": "text", "text": "?"},
            ],
        },
        {"role": "assistant", "content": "Two.\n"},
    ]
}
LLAVA = {
    "images": ["a.png", "b.png"],
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>What is this?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "And <image>?"},
        {"from": "gpt", "value": "Two.\n"},
    ],
}
BESIDE: dict[str, Any] = {
    "images": ["a.png", "b.png"],
    "messages": [
        *OPENAI["messages"][:1],
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "Two.\n"},
    ],
}


@pytest.mark.parametrize("record", [OPENAI, LLAVA, BESIDE], ids=["openai", "llava", "beside"])
def test_all_forms_are_the_same_conversation(record: dict[str, Any]) -> None:
    assert parse_conversation(record) == TALK
    assert TALK.pictures == ("a.png", "b.png")


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ([1], "a JSON object"),
        ({"text": "hello"}, r"expected messages or conversations, got \['text'\]"),
        ({"messages": []}, "a list of turns"),
        ({"messages": "hello"}, "a list of turns"),
        ({"messages": ["hello"]}, "turn 1: expected role as one of system, user, assistant"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role as one of .* got 'tool'"),
        ({"conversations": [{"from": "me", "value": "x"}]}, "turn 1: expected from as one of"),
        (user(3), "turn 1: expected a text or a list of parts, got 3"),
        (user([{"type": "video"}]), "turn 1: expected parts of type text or image"),
        (user([{"type": "text"}]), "turn 1: expected parts of type text or image"),
        (user([{"type": "image", "image": 3}]), "turn 1: expected a path, got 3"),
        (user("a <image>"), "turn 1: expected an image for each <image>, got fewer"),
        ({**user("a <image>"), "images": ["a", "b"]}, r"for each of 2 image\(s\), got none for 1"),
        ({**user("a"), "images": [1]}, "images as paths"),
    ],
)
def test_records_that_are_no_conversation_are_refused(record: object, told: str) -> None:
    with pytest.raises(ConversationError, match=told):
        parse_conversation(record)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ConversationTokenizer:
    return ConversationTokenizer(HuggingFaceTokenizer(make_tokenizer(tmp_path_factory.mktemp("t"))))


TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>What is this?"
    "<|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n"
    "<|im_start|>user\nAnd <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
    "<|im_start|>assistant\nTwo.\n<|im_end|>\n"
)


def test_the_text_is_that_of_the_chat_template_and_answers_are_what_the_assistant_says(
    tokenizer: ConversationTokenizer,
) -> None:
    found = tokenizer.render(TALK, [2, 1])
    decode = tokenizer._backend.decode
    assert decode(found.tokens.tolist(), skip_special_tokens=False) == TEXT
    runs = itertools.groupby(
        zip(found.tokens.tolist(), found.is_answer, strict=True), lambda x: x[1]
    )
    answers = [
        decode([token for token, _ in run], skip_special_tokens=False)
        for is_answer, run in runs
        if is_answer
    ]
    assert answers == ["A cat.<|im_end|>", "Two.\n<|im_end|>"]


def test_a_prompt_ends_where_the_assistant_is_to_answer(tokenizer: ConversationTokenizer) -> None:
    asked = Conversation(TALK.turns[:2])
    prompt = tokenizer.prompt(asked, [2]).tolist()
    whole = tokenizer.render(Conversation(TALK.turns[:3]), [2])
    begin = int(whole.is_answer.argmax())
    assert prompt == whole.tokens[:begin].tolist()


def test_text_beyond_ascii_keeps_its_answers(tokenizer: ConversationTokenizer) -> None:
    talk = Conversation((Turn("user", ("größe 中文",)), Turn("assistant", ("é🙂",))))
    found = tokenizer.render(talk, [])
    answer = found.tokens[found.is_answer].tolist()
    assert tokenizer._backend.decode(answer, skip_special_tokens=False) == "é🙂<|im_end|>"


def test_a_text_that_spells_out_images_is_refused(tokenizer: ConversationTokenizer) -> None:
    talk = Conversation((Turn("user", (Picture("a"), "an <|image_pad|>")),))
    with pytest.raises(ConversationError, match=r"expected 2 tokens .* got 3: the text spells"):
        tokenizer.render(talk, [2])


def test_tokenizers_without_the_tokens_of_the_template_are_refused(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, SPECIAL[:3])
    with pytest.raises(ConfigError, match=r"without <\|vision_start\|>, <\|vision_end\|>, <\|im"):
        ConversationTokenizer(HuggingFaceTokenizer(folder))
    with pytest.raises(ConfigError, match="HuggingFaceTokenizer for conversations, got Byte"):
        ConversationTokenizer(ByteTokenizer())
