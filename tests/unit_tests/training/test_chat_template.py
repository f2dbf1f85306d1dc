"""Chat templates: renderings equal transformers', and spans cover the assistant's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.options import ConfigError
from megatron.training.chat_program import ChatProgram
from megatron.training.chat_template import ChatTemplate
from megatron.training.conversation_tokenizer import encode_answers
from megatron.training.conversations import ConversationError
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Marks the assistant's text, and renders other messages as JSON.
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'assistant' %}\n"
    "A: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
    "    {% else %}\n"
    "{{ message.role }}: {{ message | tojson }}\n"
    "    {% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
# As in Qwen3, only the last turn has a block of reasoning.
THINKING = (
    "{%- for message in messages %}"
    "{%- set thought = '<think>\\n\\n</think>\\n\\n' if loop.last else '' %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{{- thought + message.content }}"
    "{%- else %}{{- message.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
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
def test_spans_cover_the_assistants_text_and_its_end_token(
    source: str, expected: list[str]
) -> None:
    messages = TALK
    if source is THINKING:
        # White space at the end of an inner turn is not preserved.
        messages = [*TALK[:2], {"role": "assistant", "content": "Two."}, *TALK[3:]]
        expected = ["Two.<|im_end|>", expected[1]]
    assert answers_of(source, messages) == expected


@pytest.mark.parametrize("source", [CHATML, MARKED, THINKING], ids=["chatml", "marked", "thinking"])
@pytest.mark.parametrize("asks", [False, True])
def test_renderings_equal_transformers_renderings(tmp_path: Path, source: str, asks: bool) -> None:
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


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[3] | tojson(ensure_ascii=True) }}",
        "{{ messages | tojson(indent=2, sort_keys=True) }}",
        "{{ messages[3] | tojson(separators=(',', ':')) }}",
        "{{ messages[0] | tojson(False, 4) }}",
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index == 2 %}{% continue %}"
        "{% endif %}{{ m.content }}{% if loop.index == 4 %}{% break %}{% endif %}{% endfor %}",
        "{% set n = namespace(a=1, self=2) %}{% for m in messages %}{% set n.a = n.a + 1 %}"
        "{% endfor %}{{ n.a + n.self }}{{ dict(b=3) | tojson }}{{ dict.fromkeys('ab') | tojson }}",
        "{% macro say(m, n=1) %}  {{ m.role }}{{ n }}\n{% endmacro %}"
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}\n"
        "    {% set x %} {{ say(m, n=loop.index) | trim }} {% endset %}\n{{ x }}|{% endfor %}",
        "{% for m in messages recursive %}{{ m.content }}{% if loop.depth == 1 %}"
        "{{ loop(messages[1:2]) }}{% endif %}{% else %}none{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{{ documents is none }}"
        "{{ tools is none }}{{ pad_token is defined }}{{ eos_token }}",
    ],
)
def test_jinja_features_render_as_in_transformers(source: str) -> None:
    templates = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = templates.render_jinja_template([TALK], chat_template=source, **TOKENS)
    assert ChatTemplate(source, TOKENS).render(TALK) == expected


def test_marked_spans_equal_the_masks_of_transformers(tmp_path: Path) -> None:
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
    own = encode_answers(theirs.backend_tokenizer, chat.text, chat.answers)
    assert found["input_ids"] == own.tokens.tolist()
    assert found["assistant_masks"] == own.is_answer.tolist()
    assert own.is_answer.any()


def test_a_template_is_found_in_each_file_that_transformers_reads(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.of_files(tmp_path)
    tokens = {"bos_token": "<wrong>", "pad_token": {"content": "<pad>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "add_bos_token": True,
        "added_tokens_decoder": {},
        "chat_template": [
            {"name": "tool_use", "template": "tools {{ tools[0].name }}"},
            {"name": "default", "template": "{{ bos_token }}default"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.of_files(tmp_path / "tokenizer.json")
    assert found.render([]) == "<s>default"
    assert found.render([], [{"name": "add"}]) == "tools add"
    assert found.special_tokens == {"bos_token": "<s>", "pad_token": "<pad>"}
    del config["added_tokens_decoder"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.of_files(tmp_path)
    assert found.special_tokens == {"bos_token": "<wrong>", "pad_token": "<pad>"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.of_files(tmp_path).render([], []) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    assert ChatTemplate.of_files(tmp_path).render([], []) == "other"
    assert ChatTemplate.of_files(tmp_path).render([]) == "file"
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}other")
    assert ChatTemplate.of_files(tmp_path, other).render([], []) == "<wrong>other"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('no system turns') }}", "got TemplateError: no system turns"),
        ("{{ messages[9].content.strip() }}", "got UndefinedError"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ namespace(__class__=1) }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "SecurityError"),
        ("{% set _ = dict.update(messages[0], {'role': 'user'}) %}", "UndefinedError"),
        ("{% for x in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_failing_and_forbidden_templates_raise_a_conversation_error(source: str, told: str) -> None:
    with pytest.raises(ConversationError, match="expected a conversation that template .*" + told):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ messages[1].content }} {{ messages[2].content }}", r"message 3: .* in a loop"),
        (
            "{% macro all() %}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}"
            "{{ all() }}",
            r"message 3: .* in a loop",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<bot>{% endif %}",
            r"message 3: .* generation prompt",
        ),
        (
            CHATML.replace("role + '", "role + (' name=bob' if loop.index == 3 else '') + '"),
            r"message 3: .* generation prompt",
        ),
        (
            "{% for m in messages[:2] %}{{ m.content }}{% endfor %}{{ messages[2].content }}",
            r"message 3: .* in a loop",
        ),
        (
            "{% macro say(m) %}a{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{{ m.role + say(m) }}{% endfor %}",
            r"not in a macro",
        ),
    ],
    ids=[
        "no loop",
        "a macro",
        "no prompt",
        "a name in the header",
        "not in the loop",
        "marks in a macro",
    ],
)
def test_templates_whose_assistant_text_cannot_be_located_are_rejected(
    source: str, told: str
) -> None:
    with pytest.raises(ConversationError, match=told):
        ChatTemplate(source).render_answers(TALK)


# As in DeepSeek: the prompt opens a block of reasoning that turns close, tool outputs are not
# followed by a prompt, and the last turn has a different end token.
OPENING = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}"
    "{%- elif message.role == 'tool' %}{{- '<|out|>' + message.content + '<|/out|>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- if loop.index0 == 0 or loop.previtem.role != 'tool' %}{{- '<|Bot|></think>' }}{% endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|call|>' + call.name }}{%- endfor %}"
    "{{- '<|done|>' if loop.last else '<|end|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}"
    "{{- '<|Bot|><think>\\n' }}{%- endif %}"
)
# Loops over indices; the prompt is in the last turn, and a turn ends at the start of the next.
BY_INDEX = (
    "{% for i in range(messages|length) %}{% set message = messages[i] %}"
    "<|{{ message.role }}|>\n{{ message.content }}"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)
# As in Gemma: tool outputs are inside of the assistant's turn.
INSIDE = (
    "{%- for message in messages %}{%- if message.role != 'tool' %}"
    "{{- '<turn>' + message.role + '\\n' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<call>' + call.name }}{%- endfor %}"
    "{%- if message.tool_calls %}{%- for k in range(loop.index0 + 1, messages|length) %}"
    "{%- set follow = messages[k] %}"
    "{%- if follow.role == 'tool' %}{{- '<out>' + follow.content + '</out>' }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- message.content + '</turn>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<turn>assistant\\n' }}{%- endif %}"
)
# As in Nemotron Nano: the last assistant message is written after the loop.
BEHIND = (
    "{%- set others = messages[:-1] if messages[-1].role == 'assistant' else messages %}"
    "{%- for message in others %}{{- '<turn>' + message.role + '\\n' + message.content }}"
    "{{- '<end>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt or messages[-1].role == 'assistant' %}"
    "{{- '<turn>assistant\\n<think>\\n' }}{%- endif %}"
    "{%- if messages[-1].role == 'assistant' %}{{- messages[-1].content + '<end>\\n' }}{%- endif %}"
)
# Reads the name of a tool from an earlier message.
LOOKING_BACK = (
    "{%- for i in range(messages|length) %}{%- set message = messages[i] %}"
    "{{- '<turn>' + message.role + '\n' }}"
    "{%- for k in range(i) %}{%- set before = messages[k] %}"
    "{%- for call in before.tool_calls or [] %}{{- call.name + ',' }}{%- endfor %}{%- endfor %}"
    "{%- for one in messages[:i + 1] %}{{- 'C' if one.tool_calls }}{%- endfor %}"
    "{{- message.content + '</turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<turn>assistant\n' }}{%- endif %}"
)
# White space before each turn.
SPACED = (
    "{% for message in messages %}\n\n  ### {{ message.role }}:\n{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}\n### assistant:\n{% endif %}"
)
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "I ask.", "tool_calls": [{"name": "add"}, {"name": "see"}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            OPENING,
            [
                "</think>I ask.<|call|>add<|call|>see<|end|>",
                "Two.<|end|>",
                "</think>Yes.<|done|>",
            ],
        ),
        (BY_INDEX, ["I ask.<|tool|>", "Two.<|user|>", "Yes."]),
        (INSIDE, ["<call>add<call>see", "I ask.</turn>", "Two.</turn>", "Yes.</turn>"]),
        (BEHIND, ["I ask.<end>", "Two.<end>", "Yes.<end>"]),
        (LOOKING_BACK, ["CI ask.</turn>", "add,see,CTwo.</turn>", "add,see,CYes.</turn>"]),
        (SPACED, ["I ask.</s>", "Two.</s>", "Yes.</s>"]),
    ],
    ids=["opening", "by index", "inside", "behind", "looking back", "spaced"],
)
def test_spans_are_located_in_each_form_of_template(source: str, expected: list[str]) -> None:
    template = ChatTemplate(source, ends=["<|user|>", "<|tool|>", "<|end|>"])
    chat = template.render_answers(CALLS)
    assert [chat.text[begin:end] for begin, end in chat.answers] == expected


@pytest.mark.parametrize("source", [CHATML, SPACED], ids=["chatml", "spaced"])
def test_the_number_of_renderings_does_not_grow_with_the_turns(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs = []
    run = ChatProgram.run

    def counting(self: ChatProgram, *args: Any) -> Any:
        num_runs.append(1)
        return run(self, *args)

    monkeypatch.setattr(ChatProgram, "run", counting)
    assert len(answers_of(source, TALK[3:] * 40)) == 40
    assert len(num_runs) <= 4


def test_content_that_starts_like_the_prompt_is_in_the_span_from_its_start() -> None:
    source = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    talk = [TALK[1], {"role": "assistant", "content": "<thin air>"}]
    assert answers_of(source, talk) == ["<thin air><|im_end|>"]


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["found", "marked"])
def test_turns_with_weight_0_have_no_span(source: str) -> None:
    talk = [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    assert answers_of(source, talk) == answers_of(source)[1:]
    assert answers_of(source, [*talk[:4], {**TALK[4], "train": False}]) == []


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_passed_under_the_name_that_the_template_reads(field: str, read: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.{read} }}}}>{{{{ m.content }}}}.{{% endfor %}}"
    talk = [{"role": "assistant", "content": "Two.", field: "1 + 1", "name": None}]
    assert answers_of(source, talk) == ["<1 + 1>Two.."]


def test_invalid_templates_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a Jinja template in template, got"):
        ChatTemplate("{% for %}")
    with pytest.raises(ConfigError, match=r"expected a file with a template, got .*none\.jinja"):
        ChatTemplate.of_files(tmp_path, tmp_path / "none.jinja")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object in"):
        ChatTemplate.of_files(tmp_path)
