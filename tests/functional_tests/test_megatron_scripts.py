"""Megatron-LM's launch scripts start after the changes that one message asks for.

`megatron_scripts.yaml` has the flags of three of its scripts, with small sizes. Here the message is
obeyed by a program, to the letter; and `megatron-flags` rewrites scripts of their forms.
"""

from __future__ import annotations

import re
import shlex
import subprocess
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
from megatron_hybrid import megatron_flags
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
    """The flags after the changes that the message asks for, and no others."""
    changes = {}
    for line in lines:
        match = CHANGE.match(line)
        assert match is not None, f"{line!r} says what to do"
        changes[match["flag"]] = match["use"]

    changed = []
    for flag in flags:
        name = flag.split()[0]
        if name not in changes:
            changed.append(flag)
        elif (use := changes.pop(name)) is not None:
            changed.append(" ".join(blanks.get(word, word) for word in shlex.split(use)))
    assert not changes, "the message speaks of flags that are given"
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
    # The pool's ranks are daemons, which may have no processes of their own.
    return pretrain_gpt.run([*argv, "--num-workers", "0"])


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory without blanks in its path, which a script that quotes nothing cannot name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_after_the_changes_that_one_message_asks_for(script, work):
    flags = flags_of(script, work)
    tokenizer = make_corpus(work) if "gpt3" in script else ""
    lines = message_about(words(flags))
    changed = obeyed(flags, lines, {"FILE": tokenizer})

    outcomes = run_ranks(NUM_RANKS, train, words(changed))
    # 10 samples in batches of 4 where the script counts samples, as in Megatron-LM.
    assert [outcome.iteration for outcome in outcomes] == [2] * NUM_RANKS
    assert outcomes[0].validation_loss is not None
    assert any((work / "checkpoints").iterdir()), "it has saved"


def as_array(flags: list[str]) -> str:
    """Every flag on a line of its own, as most of Megatron-LM's scripts have them."""
    lines = "".join(f"    {flag}\n" for flag in flags)
    return f"ARGS=(\n{lines})\ntorchrun --nproc_per_node 2 pretrain_gpt.py ${{ARGS[@]}}\n"


def as_quoted_elements(flags: list[str]) -> str:
    """Flag and value in one element, with a comment, and one array in another."""
    lines = "".join(f'        "{flag}" # {number}\n' for number, flag in enumerate(flags))
    return (
        f"PRETRAIN=pretrain_gpt.py\nARGS=()\nif true; then\n    ARGS+=(\n{lines}    )\nfi\n"
        'ALL=("${ARGS[@]}")\npython -m torch.distributed.run "$PRETRAIN" ${ALL[@]} "$@"\n'
    )


def as_string(flags: list[str]) -> str:
    """A string over several lines, with values from variables."""
    assigned, words_of_flags = [], []
    for number, flag in enumerate(flags):
        name, _, value = flag.partition(" ")
        if value and " " not in value and "'" not in value:
            assigned.append(f'V{number}="{value}"\n')
            flag = f"{name} ${{V{number}}}"
        words_of_flags.append(flag)
    lines = " \\\n  ".join(words_of_flags)
    return "".join(assigned) + f'ARGS="{lines}"\ntorchrun pretrain_gpt.py \\\n  $ARGS\n'


def arguments_of(script: Path) -> list[str]:
    """The arguments behind pretrain_gpt.py, from bash: the launcher prints them."""
    show = 'shown() { printf "%s\\n" "$@"; }; torchrun() { shown "$@"; }; python() { shown "$@"; }'
    command = f"{show}; source {shlex.quote(str(script))}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    # Bash keeps the quotes within quotes.
    return [line.strip("'") for line in lines[lines.index("pretrain_gpt.py") + 1 :]]


FORMS = dict(zip(SCRIPTS, [as_array, as_quoted_elements, as_string], strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rewritten_script_means_what_the_message_asks_for(script, work, capsys):
    flags = flags_of(script, work)
    tokenizer = str(work / "tokenizer.json")
    path = work / "train.sh"
    path.write_text(FORMS[script](flags))
    assert arguments_of(path) == [word.strip("'") for word in words(flags)], "it gives its flags"
    if "gpt3" in script:
        make_corpus(work)

    left = megatron_flags.main([str(path), "--in-place", "--remove-unsupported"])
    assert left == ("gpt3" in script), "its vocabulary is for the user to replace"
    if left:
        assert "use --tokenizer-model FILE." in capsys.readouterr().err
        text = re.sub(r"--vocab-file [^\s\"]+", f"--tokenizer-model {tokenizer}", path.read_text())
        path.write_text(text)

    argv = arguments_of(path)
    parsed = parse_command_line(argv, NUM_RANKS)
    assert parsed.without_effect == ()
    by_message = obeyed(flags, message_about(words(flags)), {"FILE": tokenizer})
    assert parsed.config == parse_command_line(words(by_message), NUM_RANKS).config
    assert not {*argv} - {word.strip("'") for word in words(by_message)}, "it gives no others"
