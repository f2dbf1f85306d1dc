"""Chat templates: the text is that of transformers, and answers are what the assistant says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.options import ConfigError
from megatron.training.chat_template import ChatTemplate
from megatron.training.conversations import ConversationError
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Answers are marked; what is called is said as JSON.
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'assistant' %}\n"
    "A: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
    "    {% else %}\n"
    "{{ message.role }}: {{ message | tojson }}\n"
    "    {% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
# As Qwen3: what was thought is shown in the last turn alone.
THINKING = (
    "{%- for message in messages %}"
    "{%- set thought = '<think>\\n\\n</think>\\n\\n' if loop.last else '' %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{{- thought + message.content }}"
    "{%- else %}{{- message.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Turns depend on how many there are.
COUNTING = (
    "{% for message in messages %}{{ messages | length }} {{ message.content }}\n{% endfor %}"
)
TALK = [
    {"role": "system", "content": 'Be <brief> & "good".'},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "Two.\n"},
    {"role": "user", "content": "größe 中文?"},
    {"role": "assistant", "content": "é🙂"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def answers_of(source: str, messages: list[dict[str, Any]] = TALK) -> list[str]:
    chat = ChatTemplate(source, TOKENS).render_answers(messages)
    return [chat.text[begin:end] for begin, end in chat.answers]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, ["Two.<|im_end|>", "é🙂<|im_end|>"]),
        (MARKED, ["Two.\n</s>", "é🙂</s>"]),
        (THINKING, ["Two.\n<|im_end|>", "<think>\n\n</think>\n\né🙂<|im_end|>"]),
    ],
    ids=["chatml", "marked", "thinking"],
)
def test_answers_are_what_the_assistant_says_and_what_ends_it(
    source: str, expected: list[str]
) -> None:
    messages = TALK
    if source is THINKING:
        # The white space of a turn in the middle ends with it.
        messages = [*TALK[:2], {"role": "assistant", "content": "Two."}, *TALK[3:]]
        expected = ["Two.<|im_end|>", expected[1]]
    assert answers_of(source, messages) == expected


@pytest.mark.parametrize("source", [CHATML, MARKED, THINKING], ids=["chatml", "marked", "thinking"])
@pytest.mark.parametrize("asks", [False, True])
def test_the_text_is_that_of_transformers(tmp_path: Path, source: str, asks: bool) -> None:
    transformers = pytest.importorskip("transformers")
    make_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), **TOKENS
    )
    theirs.chat_template = source
    expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=asks)
    assert ChatTemplate(source, TOKENS).render(TALK, asks=asks) == expected

    theirs.save_pretrained(tmp_path)
    own = ChatTemplate.of_files(tmp_path)
    assert own.render(TALK, asks=asks) == expected
    assert own.special_tokens["eos_token"] == "</s>"


def test_marked_answers_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), **TOKENS
    )
    theirs.chat_template = MARKED
    ascii_only = TALK[:3]
    found = theirs.apply_chat_template(
        ascii_only, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    chat = ChatTemplate(MARKED, TOKENS).render_answers(ascii_only)
    encoding = theirs.backend_tokenizer.encode(chat.text, add_special_tokens=False)
    ((begin, end),) = chat.answers
    is_answer = [int(begin <= first < end) for first, _ in encoding.offsets]
    assert found["input_ids"] == encoding.ids
    assert found["assistant_masks"] == is_answer
    assert sum(is_answer) > 0


def test_a_template_is_found_where_people_have_it(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.of_files(tmp_path)
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ bos_token }}default"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.of_files(tmp_path / "tokenizer.json").render([]) == "<s>default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.of_files(tmp_path).render([]) == "file"
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}other")
    assert ChatTemplate.of_files(tmp_path, other).render([]) == "<s>other"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('no system turns') }}", "got TemplateError: no system turns"),
        ("{{ messages[9].content.strip() }}", "got UndefinedError"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for x in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_what_a_template_cannot_or_must_not_do_is_one_error(source: str, told: str) -> None:
    with pytest.raises(ConversationError, match="expected a conversation that template .*" + told):
        ChatTemplate(source).render(TALK)


def test_templates_that_do_not_say_what_answers_are_are_refused() -> None:
    with pytest.raises(ConversationError, match=r"turn 3: expected a template that renders a turn"):
        ChatTemplate(COUNTING).render_answers(TALK)


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a Jinja template in template, got"):
        ChatTemplate("{% for %}")
    with pytest.raises(ConfigError, match=r"expected a file with a template, got .*none\.jinja"):
        ChatTemplate.of_files(tmp_path, tmp_path / "none.jinja")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object in"):
        ChatTemplate.of_files(tmp_path)
