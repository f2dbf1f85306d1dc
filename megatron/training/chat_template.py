"""Chat templates: from a conversation to the text that a model reads of it, and to what of that
text the assistant says.

A template is a Jinja program that comes with a tokenizer. It gets the names that the transformers
library gives it: `messages`, `tools`, `add_generation_prompt` and the special tokens, and may call
`raise_exception` and `strftime_now`. It runs in Jinja's sandbox.

[Note: what the assistant says]
A template may mark it with `{% generation %}` ... `{% endgeneration %}`. Most do not. Then the
conversation is rendered up to where the assistant begins, and up to where it has ended; what the
second has beyond the first is what it says, without white space behind it. Some templates render a
turn otherwise once there are later ones (they take out what was thought). Then the turn is looked
for in the whole conversation, and what ends it behind it; where it is not found, the
conversation is refused, since what would be learned is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.core.files import UnusableFileError, read_regular
from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.options import ConfigError, shown
from megatron.training.conversations import ASSISTANT, ConversationError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_MAX_BYTES = 1 << 22
_MAX_DEPTH = 64

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Characters for private use, around what a template marks.
_BEGIN, _END = "\ue0f0", "\ue0f1"


class RenderedChat(NamedTuple):
    """A conversation as text.

    Attributes:
        answers: what the assistant says, as begin and end in characters of the text.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template.

    Args:
        source: the program.
        special_tokens: by the names that templates know, such as `eos_token`.
        name: of where it is from, for messages.

    Raises:
        ConfigError: no Jinja program.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, name: str = "template"
    ) -> None:
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"--chat-template: expected a Jinja template in {name}, got "
                f"{printable(str(error))}."
            ) from error
        self._is_marked = _MARK.search(source) is not None

    @classmethod
    def of_files(cls, tokenizer: str | Path, template: str | Path | None = None) -> ChatTemplate:
        """The template of a tokenizer.

        Args:
            tokenizer: a folder of the transformers library, or a file in one.
            template: a file with another template.

        Raises:
            ConfigError: there is none, or a file cannot be read.
        """
        folder = Path(tokenizer)
        folder = folder if folder.is_dir() else folder.parent
        config = _read_config(folder / CONFIG_FILE)
        tokens = {
            name: text
            for name, value in config.items()
            if name.endswith("_token") and (text := _text_of_token(value)) is not None
        }
        if template is not None:
            return cls(_read(Path(template)), tokens, str(template))
        own = folder / TEMPLATE_FILE
        if own.is_file():
            return cls(_read(own), tokens, str(own))
        found = config.get("chat_template")
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if not isinstance(found, str):
            raise ConfigError(
                f"--chat-template: expected a file, since {folder} has no chat template, got none."
            )
        return cls(found, tokens, str(folder / CONFIG_FILE))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        asks: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with a role and what the template knows besides.
            tools: that the assistant may call.
            asks: whether to end where the assistant is to answer.

        Raises:
            ConversationError: the template cannot render it.
        """
        return self._marked(messages, tools, asks=asks).replace(_BEGIN, "").replace(_END, "")

    def render_answers(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> RenderedChat:
        """The text of a conversation, and what of it the assistant says: see the note above.

        Raises:
            ConversationError: the template cannot render it, or does not say what the answers are.
        """
        marked = self._marked(messages, tools)
        if self._is_marked:
            return _unmarked(marked)

        answers = []
        for number, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            asked = self.render(messages[:number], tools, asks=True)
            said = self.render(messages[: number + 1], tools)
            end = _end_of_answer(marked, asked, said, message.get("content"))
            if end is None:
                raise ConversationError(
                    f"turn {number + 1}: expected a template that renders a turn as it does "
                    "without those behind it, or marks answers with {% generation %}, got "
                    f"{self.name}"
                )
            answers.append((len(asked), end))
        return RenderedChat(marked, tuple(answers))

    def _marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        asks: bool = False,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=asks,
                **self.special_tokens,
            )
        # A program that meets what it was not made for may raise nearly anything.
        except Exception as error:
            raise ConversationError(
                f"expected a conversation that {self.name} renders, got "
                f"{printable(f'{type(error).__name__}: {error}')}"
            ) from error


def _end_of_answer(whole: str, asked: str, said: str, content: object) -> int | None:
    """Where in a whole conversation an answer ends; None where that cannot be told.

    Args:
        asked: the conversation up to where the answer begins.
        said: up to where it has ended, as if nothing followed.
        content: of the turn.
    """
    if not whole.startswith(asked):
        return None
    if said.startswith(asked) and whole.startswith(said):
        return max(len(asked), len(said.rstrip()))

    text = content.strip() if isinstance(content, str) else ""
    before, found, ending = said.rpartition(text) if text else ("", "", "")
    ending = ending.rstrip()
    begin = len(asked) + len(whole[len(asked) :]) - len(whole[len(asked) :].lstrip())
    is_there = bool(found) and whole.startswith(text + ending, begin)
    return begin + len(text) + len(ending) if is_there and before else None


class _Generation(Extension):
    """The tag `{% generation %}`, which puts marks around what is between it and its end."""

    tags = {"generation"}  # noqa: RUF012  as the class it derives from has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _unmarked(marked: str) -> RenderedChat:
    text, answers = "", []
    for number, part in enumerate(marked.split(_BEGIN)):
        said, end, rest = part.partition(_END) if number else ("", "", part)
        if number and not end:
            raise ConversationError("expected an end of what the template marks, got none")
        if said:
            answers.append((len(text), len(text) + len(said)))
        text += said + rest
    return RenderedChat(text, tuple(answers))


def _to_json(value: Any, indent: int | None = None, **others: Any) -> str:
    # Unlike Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **others)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read(path: Path) -> str:
    try:
        return read_regular(path, max_bytes=_MAX_BYTES, what="a chat template").decode()
    except (UnusableFileError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template: expected a file with a template, got {path}: {error}."
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    """What a tokenizer's configuration says; nothing, where there is none."""
    if not path.is_file():
        return {}
    try:
        content = parse_json(
            read_regular(path, max_bytes=_MAX_BYTES, what="a tokenizer's configuration"),
            max_depth=_MAX_DEPTH,
        )
    except (UnusableFileError, OSError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer-model: expected a tokenizer's configuration in {path}, got {error}."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"--tokenizer-model: expected a JSON object in {path}, got {shown(content)}."
        )
    return content


def _text_of_token(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
