"""Chat templates: from a conversation to the text that a model reads, and to the answers in it.

A template is a Jinja program that comes with a tokenizer. It gets the names that the transformers
library gives it: `messages`, `tools`, `add_generation_prompt` and the special tokens, and runs in
the same environment (`chat_program.py`).

[Note: what the assistant says]
Answers are located in one rendering of the whole conversation, since many templates render a turn
differently when others follow: they drop what was thought, or end the last turn in another way.

- A template may mark answers with `{% generation %}` ... `{% endgeneration %}`. These marks decide.
- Otherwise an answer is the text that the template wrote while it handled the assistant's message,
  after the generation prompt and without the white space at the end. The generation prompt is the
  text that the template adds for an answer to the turns before. A turn may have only its beginning:
  prompts that open a block of thoughts are followed by other text in turns without thoughts.
- Some templates leave it to the next turn to end an answer (GLM ends it with `<|user|>`). A special
  token that follows an answer without one is a part of it.

A template that writes an assistant's message in no loop over the messages, or without its own
generation prompt, does not say which text is the answer. Such a conversation is refused. Of a
template without a generation prompt, all that it writes for the message is the answer, as it is for
a model that is served by it.
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

# transformers copies what was thought to all names that templates read, from the first one given.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# A prompt may be followed by a part of it only: whole tags, words and blanks.
_OPEN_WORD = re.compile(r"[^\s>\]]\s")
_NUM_OPENING = 32  # characters of a content that identify its beginning
_PROMPT_PARTS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\s|[^<\[\s]+|.")


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
        source: the program, or programs by name: `default`, and `tool_use` for conversations with
            tools.
        special_tokens: by the names that templates know, such as `eos_token`.
        name: where the template is from, for messages.
        ends: tokens that may end an answer: the special tokens of the tokenizer.

    Raises:
        ConfigError: no Jinja program.
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
        """The template of a tokenizer.

        Args:
            tokenizer: a folder of the transformers library, or a file in one.
            template: a file with another template.
            ends: as for the class.

        Raises:
            ConfigError: there is none, or a file cannot be read.
        """
        folder = Path(tokenizer)
        folder = folder if folder.is_dir() else folder.parent
        tokens = special_tokens(folder)
        if template is not None:
            return cls(_read(Path(template)), tokens, str(template), ends)
        found = find_template(folder)
        if found is None:
            raise ConfigError(
                f"--chat-template: expected a file, since {folder} has no chat template, got none."
            )
        return cls(found, tokens, str(folder), ends)

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
        return self._run(_prepared(messages), tools, asks=asks).text

    def render_answers(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> RenderedChat:
        """The text of a conversation, and what the assistant says in it: see the note above.

        Turns of the assistant that are not to be learned are no answers.

        Raises:
            ConversationError: the template cannot render it, or does not say what the answers are.
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
        # A program that meets what it was not made for may raise nearly anything.
        except Exception as error:
            raise ConversationError(
                f"expected a conversation that {self.name} renders, got "
                f"{printable(f'{type(error).__name__}: {error}')}"
            ) from error

    def _marked(self, whole: Traced, learned: set[int] | None) -> tuple[tuple[int, int], ...]:
        """What the template marks.

        Args:
            learned: the messages that are to be learned; None: all that is marked.
        """
        answers = []
        for message, begin, text in whole.marks:
            end = begin + len(text)
            if whole.text[begin:end] != text or (learned is not None and message is None):
                raise ConversationError(
                    f"expected a template that marks answers where it writes them, not in a macro, "
                    f"got {self.name}"
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
        """The answer that a message is. It has several parts if others are written between them.

        Args:
            prompts: the distinct prompts of earlier answers; this answer's prompt is added.
        """
        text = whole.text
        parts = [
            (begin, end)
            for message, begin, end in whole.segments
            if message == index and not text[begin:end].isspace()
        ]
        is_behind = not parts and bool(whole.segments) and index + 1 == len(messages)
        if is_behind:
            # Some templates write the last answer behind their loop.
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
        if prompt is None:  # the template renders no conversation without an answer
            prompt = self._prompt(messages, tools)
        if prompt is not None and not prompt.strip():
            # Some templates ask for no answer to a tool's output, but begin a turn with it later.
            shown = (one for one in prompts if one.strip() and text.startswith(one, first))
            prompt = next(shown, prompt)
        begin = None if prompt is None else _after_prompt(text, first, first_end, prompt)
        if begin is None or (is_behind and begin == first):
            raise ConversationError(
                f"message {index + 1}: expected a template that writes its generation prompt "
                f"before each answer, or marks answers with {{% generation %}}, got {self.name}"
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
        """What the template writes for an answer to these messages; None if it refuses them."""
        try:
            asked = self._run(before, tools, asks=True)
            if asked.segments and (prompt := asked.text[asked.segments[-1].end :]).strip():
                return prompt
            # The last turn may have it, or it is empty.
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
        # The longest: `<|user|>` before a token `<`.
        token = max((t for t in self._ends if following.startswith(t)), key=len, default="")
        return len(text) - len(following) + len(token) if token else end


def _prepared(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as transformers gives them to templates: without keys that are null, and with
    what was thought under the names that templates read.
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
    """Returns the prompt of an earlier answer that this answer's text follows directly.

    It saves the renderings that ask for the prompt, whose number would be that of the answers.
    """
    content = message.get("content")
    opening = content.strip()[:_NUM_OPENING] if isinstance(content, str) else ""
    for prompt in prompts if opening else ():
        after = _after_prompt(text, begin, end, prompt)
        if after is not None and text[after:end].lstrip().startswith(opening):
            return prompt
    return None


def _after_prompt(text: str, begin: int, end: int, prompt: str) -> int | None:
    """Where an answer begins in what was written for its message; None if that cannot be told."""
    # Without a prompt, or where the turn before ends with it.
    if not prompt.strip() or text.endswith(prompt, 0, begin):
        return begin
    # White space between turns may belong to the one or to the other.
    begin = end - len(text[begin:end].lstrip())
    prompt = prompt.lstrip()
    common = _num_common(text[begin : min(end, begin + len(prompt))], prompt)
    parts = [part.end() for part in _PROMPT_PARTS.finditer(prompt)]
    kept = max((one for one in parts if one <= common), default=0)
    # A word that goes on where the prompt has a blank, as with a name after the role, leaves open
    # where the header ends.
    is_open = kept > 0 and _OPEN_WORD.match(prompt, kept - 1) is not None
    return begin + kept if kept and not is_open else None


def _num_common(first: str, second: str) -> int:
    """The number of characters that two texts begin with alike."""
    if first.startswith(second):
        return len(second)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))


def find_template(folder: Path) -> str | dict[str, str] | None:
    """The chat template that a folder of the transformers library has: a text, or texts by name."""
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
