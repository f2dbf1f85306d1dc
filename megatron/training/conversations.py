"""Conversations as people have them in JSON, and as chat templates take them.

Two forms are read. OpenAI's, whose content may be a text or a list of parts:

    {"messages": [
        {"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                     {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A cat."}]}

and the form of ShareGPT and LLaVA, where `<image>` is replaced by the next picture of the record:

    {"images": ["cat.png"],
     "conversations": [{"from": "human", "value": "<image>What is this?"},
                       {"from": "gpt", "value": "A cat."}]}

Both may have the keys `"tools"` and `"system"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.json_reading import parse_json
from megatron.core.options import shown

SYSTEM, ASSISTANT = "system", "assistant"
# Roles in files of LLaVA and ShareGPT.
_ROLES = {SYSTEM: SYSTEM, "human": "user", "user": "user", "gpt": ASSISTANT}
_PLACE = "<image>"
# Keys that exclude a turn from learning: names of OpenAI, Axolotl and ms-swift.
_LEARNED = ("weight", "train", "training", "loss")


class ConversationError(ValueError):
    """A conversation that cannot be used. The message gives the reason."""


class Conversation(NamedTuple):
    """Turns in their order.

    Attributes:
        messages: as chat templates take them, each with a `role`. A picture is the part
            `{"type": "image"}` of its content.
        tools: that the assistant may call.
        pictures: paths and URIs of all pictures, in the order of their places.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Any] | None = None
    pictures: tuple[str, ...] = ()


def parse_conversation(record: object) -> Conversation:
    """A conversation as JSON has it. Its contents are left to the chat template.

    Raises:
        ConversationError: for an invalid record, with the reason.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {shown(record)}")
    if "messages" in record:
        said = record["messages"]
    elif "conversations" in record:
        said = record["conversations"]
    else:
        raise ConversationError(f"expected messages or conversations, got {shown(list(record))}")
    if not isinstance(said, Sequence) or isinstance(said, str) or not said:
        raise ConversationError(f"expected a list of turns, got {shown(said)}")

    messages = [_message(turn, number) for number, turn in enumerate(said, start=1)]
    for number, message in enumerate(messages, start=1):
        if message["role"] == ASSISTANT:
            _check_learned(message, number)
    return Conversation((*_system(record, messages), *messages), _tools(record.get("tools")))


def parse_picture_conversation(record: object) -> Conversation:
    """A conversation as JSON has it, with pictures in the places that it names.

    Raises:
        ConversationError: for an invalid record, with the reason.
    """
    messages, tools, _ = parse_conversation(record)
    assert isinstance(record, Mapping), "a conversation was found in it"
    listed = record.get("images", record.get("image"))
    beside = [listed] if isinstance(listed, str) else listed or []
    if not isinstance(beside, list) or not all(isinstance(one, str) for one in beside):
        raise ConversationError(f"expected images as paths, got {shown(listed)}")

    left = iter(beside)
    placed: list[Mapping[str, Any]] = []
    pictures: list[str] = []
    # A system prompt under the key "system" has no number.
    num_turns = len(record["messages"] if "messages" in record else record["conversations"])
    for number, message in enumerate(messages, start=1 + num_turns - len(messages)):
        if message.get("content") is not None:
            parts = list(_parts(message["content"], left, number))
            pictures += [part for is_picture, part in parts if is_picture]
            message = {**message, "content": _content(parts)}
        placed.append(message)
    if unused := list(left):
        raise ConversationError(
            f"expected a place {_PLACE} for each image ({len(beside)}), got none for {len(unused)}"
        )
    return Conversation(tuple(placed), tools, tuple(pictures))


def is_learned(message: Mapping[str, Any]) -> bool:
    """Returns whether a turn of the assistant is to be learned: not with `"weight": 0` or
    `"train": false`.
    """
    return all(message.get(name) is None or bool(message[name]) for name in _LEARNED)


def _check_learned(message: Mapping[str, Any], number: int) -> None:
    for name in _LEARNED:
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise ConversationError(f"turn {number}: expected {name} 0 or 1, got {shown(value)}")


def _message(turn: object, number: int) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ConversationError(f"turn {number}: expected an object with a role, got {shown(turn)}")
    if isinstance(turn.get("role"), str):
        return dict(turn)
    if "from" in turn and "value" in turn:
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise ConversationError(
                f"turn {number}: expected from as one of {', '.join(_ROLES)}, got {shown(speaker)}"
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        return {"role": _ROLES[speaker], "content": turn["value"], **others}
    raise ConversationError(f"turn {number}: expected an object with a role, got {shown(turn)}")


def _system(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turn of the system prompt under the key "system"."""
    prompt = record.get("system")
    if prompt is None or prompt == "":
        return []
    if not isinstance(prompt, str):
        raise ConversationError(f"expected a text as system, got {shown(prompt)}")
    if messages[0]["role"] != SYSTEM:
        return [{"role": SYSTEM, "content": prompt}]
    if messages[0].get("content") != prompt:
        raise ConversationError(
            "expected a system prompt either as a key or as the first turn, got two"
        )
    return []


def _tools(given: object) -> Sequence[Any] | None:
    tools = given
    if isinstance(given, str):
        try:
            tools = parse_json(given) if given.strip() else None
        except ValueError as error:
            raise ConversationError(f"expected a list of tools, got {shown(given)}") from error
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConversationError(f"expected a list of tools, each an object, got {shown(given)}")
    return tools


def _parts(content: object, left: Iterator[str], number: int) -> Iterator[tuple[bool, str]]:
    """The parts of a turn: whether each is a picture, and its text or path.

    Args:
        left: gives the next path for a place without one.
    """

    def next_picture() -> str:
        path = next(left, None)
        if path is None:
            raise ConversationError(
                f"turn {number}: expected an image for each {_PLACE}, got fewer"
            )
        return path

    if isinstance(content, str):
        first, *others = content.split(_PLACE)
        yield False, first
        for text in others:
            yield True, next_picture()
            yield False, text
        return

    if not isinstance(content, Sequence):
        raise ConversationError(
            f"turn {number}: expected a text or a list of parts, got {shown(content)}"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield False, part["text"]
        elif kind in ("image", "image_url"):
            path = _path_of(part)
            if path is not None and not isinstance(path, str):
                raise ConversationError(f"turn {number}: expected a path, got {shown(path)}")
            yield True, next_picture() if path is None else path
        else:
            raise ConversationError(
                f"turn {number}: expected parts of type text, image or image_url, got {shown(part)}"
            )


def _path_of(part: Mapping[str, Any]) -> object:
    """The path or URI in a picture's part. None for a placeholder of a picture of the record."""
    names = ("image", "path", "url", "image_url")
    found = next((part[name] for name in names if part.get(name) is not None), None)
    return found.get("url", found) if isinstance(found, Mapping) else found


def _content(parts: Sequence[tuple[bool, str]]) -> str | list[dict[str, str]]:
    """A content as chat templates take it: not all of them take a list where a text will do."""
    if not any(is_picture for is_picture, _ in parts):
        return "".join(text for _, text in parts)
    return [
        {"type": "image"} if is_picture else {"type": "text", "text": text}
        for is_picture, text in parts
        if is_picture or text
    ]
