"""Settings files: values keep their text, and reading is linear in the size of the file."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.options import ConfigError
from megatron.training.arguments import build_config, parse_config, read_yaml
from megatron.training.settings_file import read_settings
from tests.helpers.special_files import SPECIAL_FILES


def write(folder: Path, content: str | bytes) -> str:
    path = folder / "run.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ("hidden-size: 1_000", {"hidden_size": 1000}),
        ("hidden-size: !!int '12'", {"hidden_size": 12}),
        ("lr: 1e-3", {"lr": 1e-3}),
        ("lr: 3", {"lr": 3.0}),
        # String options keep text that YAML 1.1 parses as a number, a date or a boolean.
        ("wandb-exp-name: 2026-11-22", {"wandb_exp_name": "2026-11-22"}),
        ("wandb-exp-name: 007", {"wandb_exp_name": "007"}),
        ("wandb-exp-name: 1_0", {"wandb_exp_name": "1_0"}),
        ("wandb-exp-name: 1:30", {"wandb_exp_name": "1:30"}),
        ("wandb-exp-name: yes", {"wandb_exp_name": "yes"}),
        ("recover-mode: on", {"recover_mode": "on"}),
        ("split: 90,10", {"split": "90,10"}),
        ("bf16: on\nmock-data: No", {"bf16": True, "mock_data": False}),
        ("bf16: 'true'", {"bf16": True}),
        (
            "save:\nload: ~\nwandb-project: null",
            {"save": None, "load": None, "wandb_project": None},
        ),
        ("save: 'null'", {"save": "null"}),
        ("data-path: [0.7, a, 0.30, b]", {"data_path": ("0.7", "a", "0.30", "b")}),
        ("data-path: 0.7 a 0.3 b", {"data_path": ("0.7", "a", "0.3", "b")}),
        (
            "data-path: &one [a]\nsave: &two x\nload: *two",
            {"data_path": ("a",), "save": "x", "load": "x"},
        ),
        ("", {}),
        ("# nothing\n", {}),
    ],
)
def test_a_value_is_parsed_by_the_type_of_its_option(
    tmp_path: Path, content: str, values: dict[str, Any]
) -> None:
    assert read_yaml(write(tmp_path, content)) == values


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("hidden-size: 2026-11-22", "--hidden-size"),
        ("hidden-size: 2026-99-99", "--hidden-size"),
        ("lr: 2026-11-22 10:00:00", "--lr"),
        ("hidden-size: 1:30", "--hidden-size"),
        ("lr: 1:30.5", "--lr"),
        ("hidden-size: 017", "octal"),
        ("hidden-size: 0o17", "--hidden-size"),
        ("hidden-size: 0x1F", "--hidden-size"),
        ("train-iters: 1e5", "--train-iters"),
        ("lr: .inf", "--lr"),
        ("lr: .nan", "--lr"),
        ("hidden-size: true", "--hidden-size"),
        ("bf16: 1", "--bf16"),
        ("hidden-size: " + "9" * 5000, "--hidden-size"),
        ("hidden-size: !!timestamp 2026-11-22", "!!timestamp"),
        ("hidden-size: !!python/name:os.system ''", "!!python/name:os.system"),
        ("hidden-size: !!binary MTI=", "!!binary"),
        ("hidden-size: !<x%E2%80%AE> 1", "x\\u202e"),
        ("hidden-size: {a: 1}", "in line 1"),
        ("lr: 1\nhidden-size: !!set {a}", "hidden-size"),
        ("data-path: [a, [b]]", "a list in a list in line 1"),
        ("data-path: &a [*a]", "a list in a list in line 1"),
        ("hidden-size: [1]", "--hidden-size"),
        ("data-path: [a, ~]", "--data-path"),
        ("? [a]\n: b", "expected plain keys"),
        ("<<: {lr: 1}", "<<"),
        ("<<: 1", "<<"),
        ("lr: 1\nlr: 2", "twice in line 2"),
        ("lr: 1\nx\\e[2J: 2", "x\\e[2J"),
        ('"x\\e[2J\\n": 2', "x\\x1b[2J\\n"),
        ("lr: 1\n---\nlr: 2", "expected YAML"),
        ("- a", "expected keys and values"),
        ("a", "expected keys and values"),
        ("hidden-size: " + "[" * 100 + "]" * 100, "a list in a list"),
        ("hidden-size: " + "{a: " * 1000 + "}" * 1000, "expected YAML"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "expected YAML"),
        ('lr: "\\UFFFFFFFF"', "expected YAML"),
        (b"lr: \xff", "UTF-8"),
        (b"lr: \0", "expected YAML"),
        (b"\xff\xfe\0", "UTF-8"),
        (b"a: 1\n" * 300_000, "expected a readable file"),
    ],
)
def test_an_invalid_value_is_an_error_of_one_line(
    tmp_path: Path, content: str | bytes, part: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_yaml(write(tmp_path, content))
    assert part in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 800


def test_exponentially_nested_aliases_are_rejected_at_once(tmp_path: Path) -> None:
    doublings = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 100))
    with pytest.raises(
        ConfigError, match=r"a1: expected a value or a list of values, got a list in a list"
    ):
        read_yaml(write(tmp_path, f"a0: &a0 [x, x]\n{doublings}hidden-size: *a99\n"))
    # The same within one value; the message must not contain the expanded aliases.
    pairs = ", ".join(f"&b{n} [*b{n - 1}, *b{n - 1}]" for n in range(1, 100))
    with pytest.raises(ConfigError, match=r"data-path: expected a value or a list of values"):
        read_yaml(write(tmp_path, f"data-path: [&b0 [x], {pairs}]\n"))


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.yaml"
    SPECIAL_FILES[kind](path)
    signal.alarm(30)  # ends the process if it waits for a writer
    with pytest.raises(
        ConfigError, match=rf"^--config: expected a readable file, got '.*run.yaml' .*got {kind}"
    ):
        read_yaml(str(path))
    signal.alarm(0)


SNIPPETS = [
    *"lr hidden-size data-path bf16 1 - : [ ] { } , &a *a !!int !!str !x ' | > # ...".split(),
    *"~ null true 0x 0o7 1:2 2026-11-22 .inf << = \\ \\x1 \\U1100".split(),
    *('"', "- ", ": ", "? ", "  ", "\n", "---\n", "%YAML 1.1\n"),
    *("\t", "\0", "\ufeff", "\u2028", "é"),
]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(content=st.lists(st.sampled_from(SNIPPETS), max_size=30).map("".join) | st.text(max_size=40))
def test_any_text_is_parsed_or_an_error_of_one_line(content: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), content.encode(errors="surrogatepass"))
        try:
            found = dict(read_settings(path))
        except ConfigError as error:
            found = {"error": str(error)}
        assert all(isinstance(key, str) and len(repr(value)) < 5000 for key, value in found.items())
        assert str(found.get("error", "")).isprintable()


def test_integers_of_any_length_are_rejected_from_files_and_flags(tmp_path: Path) -> None:
    for digits in (20, 400, 4000):
        values = read_yaml(write(tmp_path, f"seq-length: {'9' * digits}"))
        with pytest.raises(
            ConfigError,
            match=r"--seq-length: expected an integer >= 1 and <= 67108864, "
            r"got (9+|an integer of \d+ bits)\.",
        ):
            build_config(
                {
                    **values,
                    "mock_data": True,
                    "num_layers": 1,
                    "hidden_size": 8,
                    "num_attention_heads": 1,
                }
            )
    with pytest.raises(
        ConfigError, match=r"--seq-length: expected an integer >= 1, got '9+\.\.\.9+'"
    ):
        parse_config(["--seq-length", "9" * 5000], 1)


def test_a_setting_keeps_its_text(tmp_path: Path) -> None:
    read = read_settings(write(tmp_path, "a: 017\nb: [on, ~]\nc: 'on'\n"))
    assert read["a"] == ("017", None, False)
    assert read["b"] == [("on", True, False), ("~", None, True)]
    assert read["c"] == ("on", None, False)
