"""docs/coming-from.md lists every flag whose default differs from Megatron-LM's; the table of
unsupported flags covers each of its flags that this project lacks, and no others.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from pathlib import Path
from typing import Any

import yaml

from megatron.core.options import Field
from megatron.training.arguments import parse_config
from megatron.training.config import all_options
from megatron.training.flag_answers import answer_rows
from tests.helpers.doc_commands import section_of

DEFAULTS: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "megatron_defaults.yaml").read_text()
)
ROW = re.compile(r"\| `(--[a-z0-9-]+)` \| `([^`]+)` \| `([^`]+)` \| (.+) \|")
# In earlier releases than the one of the table, whose scripts are still around.
EARLIER = {
    *("--check-for-nan-in-loss-and-grad", "--retro-*", "--DDP-impl"),
    "--activations-checkpoint-method",
}
# Of the programs in its examples/, which have separate parsers.
EXAMPLES = {"--export-*", "--modelopt-enabled", "--finetune-hf-dataset", "--enable-gpt-oss"}
CONFIG = parse_config(
    [
        *"--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --lr 1".split(),
        *"--mock-data --tokenizer-type NullTokenizer --vocab-size 31 --train-iters 1".split(),
        *"--micro-batch-size 1".split(),
    ],
    world_size=1,
)


def shown(value: Any) -> str:
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def defaults_here(field: Field) -> dict[str, Any]:
    """The default of each flag of an option, as the parser of Megatron-LM would have it: a switch
    is true where it is in effect without being given.
    """
    value = field.default
    if value is dataclasses.MISSING:
        value = None
    if field.scalar is not bool:
        return {field.flag: value}
    if value is None:  # follows from others
        value = CONFIG.values()[field.name]
    return {field.flag: value, field.off_flag: not value}


def differing() -> dict[str, tuple[str, str]]:
    found = {}
    for field in all_options().values():
        for flag, value in defaults_here(field).items():
            # A switch for a default that is already off has no effect.
            is_void = field.scalar is bool and flag == field.off_flag and value
            if flag in DEFAULTS and not is_void and value != DEFAULTS[flag]:
                found[flag] = (shown(value), shown(DEFAULTS[flag]))
    return found


def test_the_docs_list_every_flag_whose_default_differs_with_both_and_a_reason():
    rows = ROW.findall(section_of("coming-from.md", "Megatron-LM"))
    assert {flag: (here, there) for flag, here, there, _ in rows} == differing()
    assert len(rows) == len(differing()), "each once"
    assert all(len(why) > 20 for *_, why in rows)


def test_the_comparison_is_not_vacuous():
    shared = [
        flag
        for field in all_options().values()
        for flag in defaults_here(field)
        if flag in DEFAULTS
    ]
    assert len(shared) > 70
    assert "--disable-bias-linear" in shared
    assert "--position-embedding-type" in differing()
    assert "--adam-eps" not in differing()


def test_the_table_of_megatrons_flags_has_its_names():
    for row in answer_rows():
        for name in row.flags:
            is_there = bool(fnmatch.filter(DEFAULTS, name))
            is_elsewhere = name in EARLIER | EXAMPLES
            assert is_there != is_elsewhere, f"{name} is not one of its flags, or still is"


def test_every_flag_of_megatron_lm_is_supported_or_listed_with_a_reason():
    ours = {flag for field in all_options().values() for flag in (field.flag, field.off_flag)}
    names = {name for row in answer_rows() for name in row.flags}
    strangers = [
        flag
        for flag in DEFAULTS
        if flag not in ours and not any(fnmatch.fnmatchcase(flag, name) for name in names)
    ]
    assert strangers == []
    assert len(DEFAULTS) > 800, "it is not vacuous"
