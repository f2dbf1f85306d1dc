"""Tokens and masks of conversations, against transformers with the chat templates that TRL has.

TRL publishes templates and variants with `{% generation %}` marks. The loss masks of a marked
variant must equal transformers' masks; the masks of a published template must equal its variant's.
"""

# ruff: noqa: RUF001  DeepSeek's tokens have full-width bars

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.chat_template import ChatTemplate
from megatron.training.conversation_tokenizer import PictureTokenizer
from megatron.training.conversations import (
    ConversationError,
    parse_conversation,
    parse_picture_conversation,
)
from megatron.training.tokenizer import HuggingFaceTokenizer, train_bpe
from tests.peers.helpers.peer_runs import run_with_peers

pytestmark = pytest.mark.peer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Special tokens of all families, including the tokens that end a turn in unmarked templates.
CONTROL = [
    *("<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|eot_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|system|>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
    *("<|eot|>", "<|eom|>", "<tool_call|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number", "description": "one of them"}},
                "required": ["a"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def user_parts(text: str, num_pictures: int) -> dict[str, Any]:
    pictures = [{"type": "image", "path": "a.png"}] * num_pictures
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}]}


def assistant(text: str, **others: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def calls(text: str, tool: str) -> list[dict[str, Any]]:
    """A call of a tool, and its output."""
    function = {"name": tool, "arguments": {"a": 1, "b": "größe"}}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    answer = {"role": "tool", "name": tool, "tool_call_id": "abcdefghi", "content": "2"}
    return [assistant(text, tool_calls=[call]), answer]


# One and two turns; thinking in a field and in the text; tools.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [user("How many?"), assistant("It is one.")]},
    "two turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            user("How many?"),
            assistant("It is one."),
            user("Größer?"),
            assistant(" Two, I think.\n"),
        ]
    },
    "thinking": {
        "messages": [
            user("How many?"),
            assistant("It is one.", reasoning_content="I count."),
            user("And now?"),
            assistant("Two.", thinking="I count again."),
        ]
    },
    "inline thinking": {
        "messages": [
            user("How many?"),
            assistant("<think>\nI count.\n</think>\n\nIt is one."),
            user("And now?"),
            assistant("<think>\nI count again.\n</think>\n\nTwo."),
        ]
    },
    "tools": {
        "messages": [
            user("How many?"),
            *calls("", "add"),
            assistant("It is one."),
            user("And now?"),
            *calls("I add.", "add"),
            assistant("Two."),
        ],
        "tools": TOOLS,
    },
}
# Each picture takes one token, as in a text that no processor has expanded.
PICTURES: dict[str, Any] = {
    "messages": [
        user_parts("What is this?", 1),
        assistant("A cat.", reasoning_content="It purrs."),
        user_parts("And these?", 2),
        assistant("Two dogs.", thinking="They bark."),
    ]
}
VISION = ["qwen2_5_vl", "qwen3_vl", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"]
MARKED = [
    *("cohere_training", "cohere2_training", "deepseek_r1_distill_training"),
    *("deepseekv3_training", "diffusion_gemma_training", "gemma_training", "gemma3_training"),
    *("glm4moe_training", "gptoss_training", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
    *("lfm2_training", "lfm2_v2_training", "llama3_training", "muse_glimmer_training"),
    *("nemotron_3_5_lightning_training", "nemotron_3_nano_training", "nemotron_3_super_training"),
    *("nemotron_3_ultra_training", "phi3_training", "phi3_5_training", "qwen2_5_training"),
    *("qwen2_5_vl_training", "qwen3_training", "qwen3_5_nothink_training"),
    *("qwen3_5_think_training", "qwen3_6_training", "qwen3_8_training"),
    *("qwen3_instruct_2507_training", "qwen3_vl_training"),
]
# Templates that render as their marked variants.
UNMARKED = [
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma"),
    *("gemma3", "gptoss", "lfm2", "lfm2_v2", "llama3", "muse_glimmer"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    *("phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
]
# Text that a variant marks before the assistant's message: all or part of the generation prompt.
PROMPTS = (
    *("", "\n", "<think>", "<think>\n", "<|start|>assistant", "<｜Assistant｜>"),
    "<｜tool▁outputs▁end｜>",
)
# TRL changes the text of these templates, so their masks are spelled out here.
_THOUGHT = "<think>\n\n</think>\n\n"
_CALL = '{"name": "add", "arguments": {"a": 1, "b": "größe"}}'
_FUNCTION = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ngröße\n"
    "</parameter>\n</function>\n</tool_call>"
)
_ARGUMENTS = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>größe</arg_value>\n</tool_call>"
)
BY_HAND: dict[tuple[str, str], list[str]] = {
    ("qwen3", "two turns"): ["It is one.<|im_end|>", _THOUGHT + " Two, I think.\n<|im_end|>"],
    ("qwen3_5_think", "thinking"): [
        "It is one.<|im_end|>",
        "I count again.\n</think>\n\nTwo.<|im_end|>",
    ],
    ("qwen3_5_nothink", "thinking"): [
        "It is one.<|im_end|>",
        "I count again.\n</think>\n\nTwo.<|im_end|>",
    ],
    ("glm4moe", "thinking"): [
        "\n<think></think>\nIt is one.<|user|>",
        "\n<think>I count again.</think>\nTwo.",
    ],
    ("qwen3", "tools"): [
        f"<tool_call>\n{_CALL}\n</tool_call><|im_end|>",
        "It is one.<|im_end|>",
        f"I add.\n<tool_call>\n{_CALL}\n</tool_call><|im_end|>",
        _THOUGHT + "Two.<|im_end|>",
    ],
    ("qwen3_5_think", "tools"): [
        _FUNCTION + "<|im_end|>",
        "It is one.<|im_end|>",
        "\n</think>\n\nI add.\n\n" + _FUNCTION + "<|im_end|>",
        "\n</think>\n\nTwo.<|im_end|>",
    ],
    ("qwen3_6", "inline thinking"): [
        "It is one.<|im_end|>",
        "I count again.\n</think>\n\nTwo.<|im_end|>",
    ],
    ("glm4moe", "tools"): [
        f"\n<think></think>\n{_ARGUMENTS}<|observation|>",
        "\n<think></think>\nIt is one.<|user|>",
        f"\n<think></think>\nI add.\n{_ARGUMENTS}<|observation|>",
        "\n<think></think>\nTwo.",
    ],
    # The output of tools is written into the turn of the assistant.
    ("gemma4", "tools"): [
        '<|tool_call>call:add{a:1,b:<|"|>größe<|"|>}<tool_call|>',
        "It is one.<turn|>",
        '<|tool_call>call:add{a:1,b:<|"|>größe<|"|>}<tool_call|>',
        "I add.<turn|>",
        "Two.<turn|>",
    ],
}


class Peer:
    """A directory with a tokenizer, and what transformers makes of the conversations with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = train_bpe([json.dumps(CONVERSATIONS)] * 4, 600, folder / "tokenizer.json")
        content = json.loads(file.read_text())
        known = {token["content"] for token in content["added_tokens"]}
        backend = HuggingFaceTokenizer(file).backend
        backend.add_special_tokens([token for token in CONTROL if token not in known])
        backend.save(str(file))
        (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
        requests, answers = folder / "requests.json", folder / "answers.json"
        requests.write_text(json.dumps({**CONVERSATIONS, "pictures": PICTURES}))
        job = ["-m", "tests.peers.helpers.chat_template_job", file, requests, answers]
        run_with_peers(job, folder)
        self.found: dict[str, Any] = json.loads(answers.read_text())

    def tokenizer(self, template: str) -> PictureTokenizer:
        (self.folder / "chat_template.jinja").write_text(self.found[template]["source"])
        return PictureTokenizer(HuggingFaceTokenizer(self.folder))

    def answers(self, template: str, conversation: str) -> tuple[str, list[str]]:
        """Returns the text of a conversation, and the texts of the spans in its loss mask."""
        source = self.found[template]["source"]
        own = ChatTemplate(source, SPECIAL, template, CONTROL)
        messages, tools, _ = parse_conversation(CONVERSATIONS[conversation])
        chat = own.render_answers(messages, tools)
        return chat.text, [chat.text[begin:end] for begin, end in chat.answers]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", MARKED)
def test_masks_of_marked_templates_match_transformers(
    peer: Peer, template: str, conversation: str
) -> None:
    expected = peer.found[template]["made"][conversation]
    tokenizer = peer.tokenizer(template)
    record = parse_conversation(CONVERSATIONS[conversation])
    if expected is None:
        with pytest.raises(ConversationError, match="expected a conversation that"):
            tokenizer.render(record)
        return
    found = tokenizer.render(record)
    assert found.tokens.tolist() == expected["tokens"]
    assert found.is_answer.astype(int).tolist() == expected["mask"]
    assert 0 < sum(expected["mask"]) < len(expected["mask"])


@pytest.mark.parametrize("template", VISION)
def test_masks_of_conversations_about_pictures_match_transformers(
    peer: Peer, template: str
) -> None:
    expected = peer.found[f"{template}_training"]["made"]["pictures"]
    record = parse_picture_conversation(PICTURES)
    found = peer.tokenizer(f"{template}_training").render_pictures(record, [1, 1, 1])
    assert found.tokens.tolist() == expected["tokens"]
    assert found.is_answer.astype(int).tolist() == expected["mask"]
    # More tokens for a picture shift the loss mask.
    more = peer.tokenizer(template).render_pictures(record, [4, 1, 7])
    few = peer.tokenizer(template).render_pictures(record, [1, 1, 1])
    assert len(more.tokens) == len(few.tokens) + 9
    assert more.tokens[more.is_answer].tolist() == few.tokens[few.is_answer].tolist()


def merged(text: str, answers: list[str]) -> list[str]:
    """Returns the marked texts, with adjacent ones merged."""
    pieces: list[str] = []
    position = end = 0
    for answer in answers:
        begin = text.index(answer, position)
        if pieces and begin == end:
            pieces[-1] += answer
        else:
            pieces.append(answer)
        position = end = begin + len(answer)
    return pieces


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", UNMARKED)
def test_masks_of_published_templates_match_their_marked_variants(
    peer: Peer, template: str, conversation: str
) -> None:
    variant = f"{template}_training"
    if peer.found[template]["made"][conversation] is None:
        with pytest.raises(ConversationError, match="expected a conversation that"):
            peer.answers(template, conversation)
        return
    text, answers = peer.answers(template, conversation)
    marked_text, marked = peer.answers(variant, conversation)
    if text != marked_text:
        # The published template drops thoughts inside an assistant's message.
        assert (template, conversation) == ("deepseek_r1_distill", "inline thinking")
        return
    # Phi's variants also mark the end-of-text token, which follows no assistant's message.
    marked = [one for one in merged(text, marked) if one != "</s>"]
    assert len(answers) == len(marked)
    for answer, mark in zip(answers, marked, strict=True):
        # The loss mask excludes white space after the end of a message.
        ended = mark.rstrip() if not mark.endswith("</s>") else mark.removesuffix("</s>").rstrip()
        assert ended.removesuffix(answer.rstrip()) in PROMPTS, (answer, mark)


@pytest.mark.parametrize(("template", "conversation"), BY_HAND)
def test_answers_of_templates_without_such_a_variant(
    peer: Peer, template: str, conversation: str
) -> None:
    _, answers = peer.answers(template, conversation)
    assert answers == BY_HAND[template, conversation]


def test_all_templates_of_the_peer_are_compared(peer: Peer) -> None:
    by_hand = {template for template, _ in BY_HAND}
    compared = {*MARKED, *UNMARKED, *by_hand}
    others = {name for name in peer.found if name not in compared}
    # They take lists of parts alone, as do their variants, or render as a template above does.
    assert others == {
        *("idefics3", "idefics3_training", "llava_next", "llava_next_training"),
        *("smolvlm", "smolvlm_training", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
        *("llama3_1", "llama3_2"),
    }
