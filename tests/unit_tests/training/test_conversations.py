"""Conversations in the forms that people have them become messages of chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.conversations import (
    Conversation,
    ConversationError,
    is_learned,
    parse_conversation,
    parse_picture_conversation,
)

TALK = Conversation(
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A cat."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And "},
                {"type": "image"},
                {"type": "text", "text": "?"},
            ],
        },
        {"role": "assistant", "content": "Two.\n"},
    ),
    pictures=("a.png", "b.png"),
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
                {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}},
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
    assert parse_picture_conversation(record) == TALK


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ([1], "a JSON object"),
        ({"text": "hello"}, r"expected messages or conversations, got \['text'\]"),
        ({"messages": []}, "a list of turns"),
        ({"messages": "hello"}, "a list of turns"),
        ({"messages": ["hello"]}, "turn 1: expected an object with a role, got 'hello'"),
        ({"messages": [{"role": ["user"]}]}, "turn 1: expected an object with a role"),
        ({"conversations": [{"from": "me", "value": "x"}]}, "turn 1: expected from as one of"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "turn 1: expected from as one of"),
        ({**user("a"), "system": ["b"]}, "expected a text as system"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "first turn, got two"),
        ({**user("a"), "tools": "add"}, "expected a list of tools, got 'add'"),
        ({**user("a"), "tools": "[1]"}, "expected a list of tools, each an object"),
        ({**user("a"), "tools": {"name": "add"}}, "expected a list of tools, each an object"),
        (user(3), "turn 1: expected a text or a list of parts, got 3"),
        (user([{"type": "video"}]), "turn 1: expected parts of type text, image or image_url"),
        (user([{"type": "text"}]), "turn 1: expected parts of type text, image or image_url"),
        (user([{"type": "image", "image": 3}]), "turn 1: expected a path, got 3"),
        (user([{"type": "image_url", "image_url": {"url": 3}}]), "turn 1: expected a path, got 3"),
        (user("a <image>"), "turn 1: expected an image for each <image>, got fewer"),
        ({**user("a <image>"), "images": ["a", "b"]}, r"for each image \(2\), got none for 1"),
        ({**user("a"), "images": [1]}, "images as paths"),
    ],
)
def test_records_that_are_no_conversation_are_rejected(record: object, told: str) -> None:
    with pytest.raises(ConversationError, match=told):
        parse_picture_conversation(record)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_prompt_outside_the_turns_is_the_first_turn(key: str) -> None:
    first = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "What?"}
    turns = {
        "messages": [question],
        "conversations": [{"from": "human", "value": "What?", "weight": 0}],
    }[key]
    messages = parse_conversation({key: turns, "system": "Be brief."}).messages
    assert messages[0] == first
    assert messages[1].items() >= question.items()
    assert messages[1].get("weight") == (0 if key == "conversations" else None)
    repeated = parse_conversation({"messages": [first, question], "system": "Be brief."})
    assert repeated.messages == (first, question)


@pytest.mark.parametrize("given", [[{"name": "add"}], '[{"name": "add"}]'], ids=["list", "text"])
def test_tools_are_a_list_or_its_text(given: object) -> None:
    assert parse_conversation({**user("a"), "tools": given}).tools == [{"name": "add"}]
    assert parse_conversation({**user("a"), "tools": ""}).tools is None


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, True),
        ({"weight": 1}, True),
        ({"train": True, "weight": None}, True),
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"train": False}, False),
        ({"loss": False}, False),
    ],
)
def test_turns_say_whether_they_are_to_be_learned(marks: dict[str, Any], expected: bool) -> None:
    assert is_learned({"role": "assistant", **marks}) is expected


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"train": "false"}, {"weight": [0]}], ids=str)
def test_errors_name_the_turn_as_the_record_has_it(mark: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "b", **mark}
    turns = [{"role": "user", "content": "a"}, answer]
    # A system prompt outside the turns has no number.
    for record in ({"messages": turns}, {"messages": turns, "system": "Be brief."}):
        with pytest.raises(ConversationError, match=r"turn 2: expected .* 0 or 1, got"):
            parse_conversation(record)
    picture = {"role": "user", "content": "<image>"}
    for record in ({"messages": [picture]}, {"messages": [picture], "system": "Be brief."}):
        with pytest.raises(ConversationError, match="turn 1: expected an image"):
            parse_picture_conversation(record)
