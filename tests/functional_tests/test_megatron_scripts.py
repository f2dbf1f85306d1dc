"""Megatron-LM's launch scripts start after the changes that one message requests.

`megatron_scripts.yaml` has the flags of three of its scripts, with small sizes. Here the message is
obeyed by a program, to the letter.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain_gpt
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.options import ConfigError
from megatron.training.arguments import parse_command_line
from megatron.training.pretrain import Outcome
from megatron.training.tokenizer import HuggingFaceTokenizer, train_bpe
from tests.functional_tests.helpers.runs import ROOT
from tests.helpers.ranks import run_ranks

SCRIPTS = yaml.safe_load((Path(__file__).parent / "megatron_scripts.yaml").read_text())
NUM_RANKS = 2
CHANGE = re.compile(r"(?P<flag>--\S+).*?: (remove it|use (?P<use>.+?) instead)\. ")


def flags_of(script: str, work: Path) -> list[str]:
    """The script's flags, each with its values in one text."""

    def flat(entry: Any) -> Iterator[str]:
        """A list of flags may be in others: parts that scripts have in common are."""
        if isinstance(entry, str):
            yield entry.replace("{work}", str(work))
            return
        for each in entry:
            yield from flat(each)

    return list(flat(SCRIPTS[script]))


def words(flags: list[str]) -> list[str]:
    """As bash passes the elements of an array on that is not quoted: quotes inside stay."""
    return " ".join(flags).split()


def message_about(argv: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        parse_command_line(argv, NUM_RANKS)
    return error.value.lines


def obeyed(flags: list[str], lines: tuple[str, ...], blanks: dict[str, str]) -> list[str]:
    """The flags after the changes that the message requests, and no others."""
    changes = {}
    for line in lines:
        match = CHANGE.match(line)
        assert match is not None, f"{line!r} has no replacement"
        changes[match["flag"]] = match["use"]

    changed = []
    for flag in flags:
        name = flag.split()[0]
        if name not in changes:
            changed.append(flag)
        elif (use := changes.pop(name)) is not None:
            changed.append(" ".join(blanks.get(word, word) for word in shlex.split(use)))
    assert not changes, "the message names flags that were not given"
    return changed


def make_corpus(work: Path) -> str:
    """A token file and its tokenizer. Returns the latter's path."""
    path = train_bpe([(ROOT / "LICENSE").read_text()], 300, work / "tokenizer.json")
    tokenizer = HuggingFaceTokenizer(path)
    with IndexedDatasetBuilder(str(work / "corpus"), "uint16") as builder:
        # As many documents as the script's split needs: a thousandth is for the test.
        for paragraph in (ROOT / "LICENSE").read_text().split("\n\n") * 40:
            builder.add_document([*tokenizer.tokenize(paragraph), tokenizer.eod])
    return str(path)


def train(argv: list[str]) -> Outcome:
    # The pool's ranks are daemons, which cannot start processes.
    return pretrain_gpt.run([*argv, "--num-workers", "0"])


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory without blanks in its path, for scripts that do not quote it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_after_the_changes_that_one_message_requests(script, work):
    flags = flags_of(script, work)
    tokenizer = make_corpus(work) if "gpt3" in script else ""
    lines = message_about(words(flags))
    changed = obeyed(flags, lines, {"FILE": tokenizer})
    parallel = {flag for flag in flags if flag.startswith(("--tensor", "--context", "--sequence"))}
    assert "--tensor-model-parallel-size 2" in parallel <= {*changed}

    outcomes = run_ranks(NUM_RANKS, train, words(changed))
    # 10 samples in batches of 4 where the script counts samples, as in Megatron-LM.
    assert [outcome.iteration for outcome in outcomes] == [2] * NUM_RANKS
    assert outcomes[0].validation_loss is not None
    assert any((work / "checkpoints").iterdir()), "it has saved"
