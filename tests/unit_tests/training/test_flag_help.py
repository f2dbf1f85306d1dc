"""`--help` of the programs that train: properties that every flag has."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest

from megatron.core.options import ConfigError
from megatron.training.arguments import known_flags
from megatron.training.config import all_options
from megatron.training.flag_help import build_parser
from megatron_hybrid import pretrain_gpt
from megatron_hybrid.parsers import TRAINERS, show_help_if_asked

FIELDS = all_options()
MINIMAL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 1 --train-iters 4 --lr 0.1"
).split()


def help_of(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        show_help_if_asked(program, program, ["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def entries_of(text: str) -> dict[str, str]:
    """Each entry of a help text, on one line, by its first flag."""
    entries = re.split(r"\n(?=  -)", text.partition("\n\nMegatron-LM's")[0])
    return {entry.split()[0].rstrip(","): " ".join(entry.split()) for entry in entries[1:]}


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def test_help_shows_the_values_of_every_flag(capsys):
    entries = entries_of(help_of("pretrain", capsys)) | entries_of(help_of("pretrain-vlm", capsys))
    for field in FIELDS.values():
        entry = entries[field.flag]
        if field.scalar is bool:
            assert entry.startswith(f"{field.flag}, {field.off_flag} "), "both on one line"
        elif field.option.choices is not None:
            values = ",".join(map(str, field.option.choices))
            assert f"{{{values}}}" in entry
        else:
            assert f" {field.metavar} " in entry.replace("[", " ").replace("]", " ")
            assert field.metavar not in ("STR", field.name.upper()), field.flag


def test_help_shows_the_default_of_every_flag_that_has_one_and_which_must_be_given(capsys):
    entries = entries_of(help_of("pretrain", capsys)) | entries_of(help_of("pretrain-vlm", capsys))
    for field in FIELDS.values():
        if field.default is dataclasses.MISSING:
            assert "(required" in entries[field.flag]
        elif field.default not in (None, ()):
            is_switch = field.scalar is bool
            shown = ("off", "on")[field.default] if is_switch else field.default
            assert f"(default: {shown}" in entries[field.flag]


def test_help_names_the_flags_that_a_flag_needs(capsys):
    entries = entries_of(help_of("pretrain", capsys))
    assert "needs --optimizer-cpu-offload" in entries["--optimizer-offload-fraction"]
    assert "needs --position-embedding-type yarn" in entries["--yarn-beta-fast"]
    assert "needs --load" in entries["--ckpt-step"]


@pytest.mark.parametrize("program", TRAINERS)
def test_every_flag_that_help_lists_exists_and_all_others_are_rejected(program, capsys):
    listed = {flag for flag in entries_of(help_of(program, capsys)) if flag.startswith("--")}
    assert listed - {"--config"} <= set(known_flags())
    hidden = {field.name for field in FIELDS.values() if field.flag not in listed}
    assert hidden == TRAINERS[program].rejected


def test_text_training_rejects_every_flag_that_its_help_leaves_out():
    for name in ("vision_num_layers", "vision_patch_size", "image_mean", "video_token_id"):
        assert name in TRAINERS["pretrain"].rejected
        value = "0.5" if FIELDS[name].scalar is float else "1"
        with pytest.raises(ConfigError, match="--vision"):
            pretrain_gpt.run([*MINIMAL, FIELDS[name].flag, value])


def test_every_option_is_in_one_group():
    shown = [
        action.dest
        for action in build_parser("All of them.")._actions
        if not isinstance(action, argparse._HelpAction) and action.dest != "config"
    ]
    assert sorted(shown) == sorted(FIELDS)
