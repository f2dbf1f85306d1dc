"""Chat templates: render a conversation as the model's input text, and locate the spans of it that
the assistant generates.

A template is a Jinja program that comes with a tokenizer. It receives the variables that the
transformers library passes (`messages`, `tools`, `add_generation_prompt` and the special tokens)
and runs in an equal environment (`chat_program.py`).

[Note: assistant spans]
Spans are located in one rendering of the whole conversation, because many templates render a turn
differently if other turns follow: they drop its thinking, or end the last turn differently.

- A template may mark spans with `{% generation %}` ... `{% endgeneration %}`. The marks decide.
- Otherwise a span is the text that the template writes while it handles the assistant's message,
  after the generation prompt and without trailing white space. The generation prompt is the text
  that the template appends to the earlier turns if `add_generation_prompt` is set. A turn may
  contain only the start of the prompt: a prompt that opens a thinking block is followed by
  different text in turns without thinking.
- In some templates the next turn's header ends a span (`<|user|>` in GLM). If a span does not end
  with a special token, a special token that follows it becomes part of it.

A conversation is rejected if the template writes an assistant's message outside of a loop over the
messages, or without its generation prompt, since its text does not show where the span starts. If
a template has no generation prompt, the span is all text that it writes for the message: a served
model has to generate all of it, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from megatron.core.files import UnusableFileError, read_regular
from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron.training.chat_program import ChatProgram, Traced
from megatron.training.conversations import ASSISTANT, ConversationError, is_learned
from megatron.training.tokenizer import TOKENIZER_CONFIG, read_object, special_tokens

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_PROCESSOR_TEMPLATE_FILE = "chat_template.json"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MAX_BYTES = 1 << 22

# transformers copies the first of these fields to all names that templates read.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Units in which a turn may repeat only the start of a prompt: tags, words and blanks.
_OPEN_WORD = re.compile(r"[^\s>\]]\s")
_NUM_OPENING = 32  # characters of a content that identify its beginning
_PROMPT_PARTS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\s|[^<\[\s]+|.")


class RenderedChat(NamedTuple):
    """A rendered conversation.

    Attributes:
        answers: start and end of each assistant span, in characters of the text.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template.

    Args:
        source: a Jinja program, or several by name: `default`, and `tool_use` for conversations
            with tools.
        special_tokens: values of template variables such as `eos_token`.
        name: origin of the template, for error messages.
        ends: the tokenizer's special tokens, which may end an assistant span.

    Raises:
        ConfigError: The source is not a Jinja program.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        name: str = "template",
        ends: Collection[str] = (),
    ) -> None:
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        sources = {_DEFAULT: source} if isinstance(source, str) else source
        try:
            self._programs = {key: ChatProgram(text) for key, text in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"--chat-template: expected a Jinja template in {name}, got "
                f"{printable(str(error))}."
            ) from error
        first = self.special_tokens.get("bos_token")
        self._ends = tuple(token for token in ends if token and token != first)

    @classmethod
    def of_files(
        cls, tokenizer: str | Path, template: str | Path | None = None, ends: Collection[str] = ()
    ) -> ChatTemplate:
        """Reads the template of a tokenizer.

        Args:
            tokenizer: a model directory of the transformers library, or a file in one.
            template: a file whose template replaces the tokenizer's.
            ends: as for the class.

        Raises:
            ConfigError: The tokenizer has no template, or a file cannot be read.
        """
        folder = Path(tokenizer)
        folder = folder if folder.is_dir() else folder.parent
        tokens = special_tokens(folder)
        if template is not None:
            return cls(_read(Path(template)), tokens, str(template), ends)
        found = find_template(folder)
        if found is None:
            raise ConfigError(
                f"--chat-template: {folder} has no chat template. Give a file with one."
            )
        return cls(found, tokens, str(folder), ends)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        asks: bool = False,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: each with a role and the other fields that the template reads.
            tools: tools that the assistant may call.
            asks: value of `add_generation_prompt`.

        Raises:
            ConversationError: The template cannot render the conversation.
        """
        return self._run(_prepared(messages), tools, asks=asks).text

    def render_answers(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> RenderedChat:
        """Renders a conversation and locates the [Note: assistant spans] that the loss includes.

        Raises:
            ConversationError: The template cannot render the conversation, or its text does not
                show where the spans are.
        """
        prepared = _prepared(messages)
        answering = {
            index
            for index, message in enumerate(prepared)
            if message.get("role") == ASSISTANT and is_learned(message)
        }
        whole = self._run(prepared, tools)
        if self._program(tools).is_marked:
            is_all = all(map(is_learned, prepared))
            return RenderedChat(whole.text, self._marked(whole, None if is_all else answering))
        answers: list[tuple[int, int]] = []
        prompts: list[str] = []
        for index in sorted(answering):
            answers += self._answer(whole, index, prepared, tools, prompts)
        return RenderedChat(whole.text, tuple(answers))

    def _program(self, tools: Sequence[Any] | None) -> ChatProgram:
        name = _WITH_TOOLS if tools is not None and _WITH_TOOLS in self._programs else _DEFAULT
        return self._programs[name]

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        asks: bool = False,
    ) -> Traced:
        variables = {
            **self.special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": asks,
        }
        try:
            return self._program(tools).run(messages, variables)
        # A template may raise nearly any exception for input that its author did not expect.
        except Exception as error:
            raise ConversationError(
                f"expected a conversation that {self.name} can render, got "
                f"{printable(f'{type(error).__name__}: {error}')}"
            ) from error

    def _marked(self, whole: Traced, learned: set[int] | None) -> tuple[tuple[int, int], ...]:
        """Returns the marked spans.

        Args:
            learned: indices of the messages in the loss; None for all marked text.
        """
        answers = []
        for message, begin, text in whole.marks:
            end = begin + len(text)
            if whole.text[begin:end] != text or (learned is not None and message is None):
                raise ConversationError(
                    "expected a template that marks the assistant's text where it writes it, not "
                    f"in a macro, got {self.name}"
                )
            if text and (learned is None or message in learned):
                answers.append((begin, end))
        return tuple(answers)

    def _answer(
        self,
        whole: Traced,
        index: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        prompts: list[str],
    ) -> list[tuple[int, int]]:
        """Locates the assistant span of a message; several if the template writes other messages
        between them.

        Args:
            prompts: the distinct generation prompts of earlier messages; this one's is added.
        """
        text = whole.text
        parts = [
            (begin, end)
            for message, begin, end in whole.segments
            if message == index and not text[begin:end].isspace()
        ]
        is_behind = not parts and bool(whole.segments) and index + 1 == len(messages)
        if is_behind:
            # Some templates write the last message behind their loop.
            parts = [(whole.segments[-1].end, len(text))]
        if not parts:
            raise ConversationError(
                f"message {index + 1}: expected a template that writes each turn in a loop over "
                f"the messages, got {self.name}"
            )
        (first, first_end), (_, last_end) = parts[0], parts[-1]
        prompt = _known_prompt(text, first, first_end, messages[index], prompts)
        if prompt is None:
            prompt = self._prompt(messages[:index], tools)
        if prompt is None:  # the template cannot render a conversation without this message
            prompt = self._prompt(messages, tools)
        if prompt is not None and not prompt.strip():
            # Some templates append no prompt to a tool's output, but start the next turn with it.
            shown = (one for one in prompts if one.strip() and text.startswith(one, first))
            prompt = next(shown, prompt)
        begin = None if prompt is None else _after_prompt(text, first, first_end, prompt)
        if begin is None or (is_behind and begin == first):
            raise ConversationError(
                f"message {index + 1}: expected a template that writes its generation prompt "
                "before each of the assistant's messages, or marks them with {% generation %}, got "
                f"{self.name}"
            )
        assert prompt is not None, "it was found"
        if prompt not in prompts:
            prompts.append(prompt)
        parts[0] = (begin, first_end)
        parts[-1] = (parts[-1][0], self._end_of_answer(text, parts[-1][0], last_end, prompts))
        return [(begin, end) for begin, end in parts if begin < end]

    def _prompt(
        self, before: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> str | None:
        """Returns the generation prompt after these messages; None if they cannot be rendered."""
        try:
            asked = self._run(before, tools, asks=True)
            if asked.segments and (prompt := asked.text[asked.segments[-1].end :]).strip():
                return prompt
            # The prompt is part of the last turn's segment, or empty.
            unasked = self._run(before, tools).text
        except ConversationError:
            return None
        return asked.text[_num_common(asked.text, unasked) :]

    def _end_of_answer(self, text: str, begin: int, end: int, prompts: Sequence[str]) -> int:
        answer = text[begin:end].rstrip()
        end = begin + len(answer)
        following = text[end:].lstrip()
        headers = tuple(prompt for prompt in prompts if prompt.strip())
        if not self._ends or answer.endswith(self._ends) or following.startswith(headers):
            return end
        # The longest match: `<|user|>` rather than a token `<`.
        token = max((t for t in self._ends if following.startswith(t)), key=len, default="")
        return len(text) - len(following) + len(token) if token else end


def _prepared(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as transformers passes them to templates: without null values, and with
    the thinking under each name that templates read.
    """
    prepared = []
    for message in messages:
        given = {key: value for key, value in message.items() if value is not None}
        thought = next((given[key] for key in _THOUGHTS if key in given), None)
        if thought is not None:
            given = {"thinking": thought, **given, "reasoning_content": thought}
        prepared.append(given)
    return prepared


def _known_prompt(
    text: str, begin: int, end: int, message: Mapping[str, Any], prompts: Sequence[str]
) -> str | None:
    """Returns an earlier message's prompt if this message's content follows it directly.

    Otherwise each message would need two more renderings, quadratic in the number of turns.
    """
    content = message.get("content")
    opening = content.strip()[:_NUM_OPENING] if isinstance(content, str) else ""
    for prompt in prompts if opening else ():
        after = _after_prompt(text, begin, end, prompt)
        if after is not None and text[after:end].lstrip().startswith(opening):
            return prompt
    return None


def _after_prompt(text: str, begin: int, end: int, prompt: str) -> int | None:
    """Returns the start of the span within the text of its message; None if it is ambiguous."""
    # There is no prompt, or the previous turn ends with it.
    if not prompt.strip() or text.endswith(prompt, 0, begin):
        return begin
    # White space between turns may be part of either turn.
    begin = end - len(text[begin:end].lstrip())
    prompt = prompt.lstrip()
    common = _num_common(text[begin : min(end, begin + len(prompt))], prompt)
    parts = [part.end() for part in _PROMPT_PARTS.finditer(prompt)]
    kept = max((one for one in parts if one <= common), default=0)
    # If a word of the header continues where the prompt has a blank, as with a name after the role,
    # the end of the header is unknown.
    is_open = kept > 0 and _OPEN_WORD.match(prompt, kept - 1) is not None
    return begin + kept if kept and not is_open else None


def _num_common(first: str, second: str) -> int:
    """Returns the length of the common prefix of two texts."""
    if first.startswith(second):
        return len(second)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def find_template(folder: Path) -> str | dict[str, str] | None:
    """Returns the chat template of a model directory: its text, or texts by name; None without."""
    named = {}
    if (folder / TEMPLATE_FILE).is_file():
        named[_DEFAULT] = _read(folder / TEMPLATE_FILE)
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        named[path.stem] = _read(path)
    if _DEFAULT in named:
        return named
    for file in (TOKENIZER_CONFIG, _PROCESSOR_TEMPLATE_FILE):
        path = folder / file
        found = read_object(path).get("chat_template") if path.is_file() else None
        if isinstance(found, list):
            items = [one for one in found if isinstance(one, dict)]
            found = {one["name"]: one.get("template") for one in items if "name" in one}
        if isinstance(found, dict):
            found = {str(name): text for name, text in found.items() if isinstance(text, str)}
            found = found if _DEFAULT in found else None
        if isinstance(found, str | dict):
            return found
    return None


def _read(path: Path) -> str:
    try:
        return read_regular(path, max_bytes=_MAX_BYTES, what="a chat template").decode()
    except (UnusableFileError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template: expected a file with a template, got {path}: {error}."
        ) from error
