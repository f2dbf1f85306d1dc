"""`python -m megatron_hybrid`: commands, their names and help, and errors."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.health import exits
from megatron_hybrid import pretrain_gpt
from megatron_hybrid.command_line import COMMANDS, PROGRAM, main

ROOT = Path(__file__).resolve().parents[3]
# Programs whose `--help` does not wait for torch. `launch` has torchrun's flags.
QUICK_HELP = sorted(set(COMMANDS) - {"launch"})


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["pytest"])  # is put back afterwards
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def test_no_command_and_an_unknown_one_list_the_existing_ones(capsys):
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert re.findall(r"^  ([\w-]+) ", usage, re.MULTILINE) == list(COMMANDS)
    for argv, got in (([], "none"), (["train"], "'train'"), (["--version"], "'--version'")):
        assert main(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(usage)
        assert printed.err.endswith(f"{PROGRAM}: expected a command of these, got {got}.\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help_under_its_name(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {PROGRAM} {command} [options]")
    assert [line for line in text.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"launch"}))
def test_every_flag_of_a_command_documents_its_value_and_effect(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for entry in re.split(r"\n(?=  --)", text.partition("\noptions:")[2])[1:]:
        words = entry.split()
        assert len(words) > 2, f"{words[0]} has no help"
        own_name = words[0].lstrip("-").replace("-", "_").upper()
        assert words[1].strip("[]") != own_name, f"{words[0]} names its value by its own name"


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["status", "."], 2, "status: expected a run's directory, got . without events"),
        (["checkpoint", "list", "none"], 2, "checkpoint: Expected a directory of checkpoints"),
        (["generate", "--load", "none"], 2, "generate: Expected a checkpoint in none, got none."),
        (["preprocess", "--input", "none", "--output-prefix", "x"], 1, "preprocess: error: --inp"),
        (
            ["pretrain", "--config", "none.yaml"],
            2,
            "pretrain: --config: expected a readable file, got",
        ),
    ],
)
def test_errors_are_one_line_with_the_command(argv, code, line, tmp_path, monkeypatch, capsys):
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exits, "exit_process", end)  # would end this process
    try:
        status: Any = main(argv)
    except SystemExit as ended:
        status = ended.code
    assert status == code
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"{PROGRAM} {line}")


def test_a_run_ends_without_the_interpreters_finalisation(monkeypatch):
    """gloo's threads may abort it: [exit_process]."""
    ended: list[int] = []
    given: list[Any] = []
    monkeypatch.setattr(exits, "exit_process", ended.append)
    monkeypatch.setattr(pretrain_gpt, "main", lambda *arguments: given.extend(arguments) or 75)
    main(["pretrain", "--lr", "1"])
    assert given == [["--lr", "1"], f"{PROGRAM} pretrain"]
    assert ended == [75]
    # The event log and argparse take the program's name from there.
    assert sys.argv == [f"{PROGRAM} pretrain", "--lr", "1"]


@pytest.mark.parametrize(
    "program",
    ["pretrain_gpt.py", "pretrain_vlm.py", *(f"megatron_hybrid {name}" for name in QUICK_HELP)],
)
def test_help_is_shown_without_importing_torch_or_numpy(program):
    start = "runpy.run_path('{}', run_name='__main__')"
    if not program.endswith(".py"):
        start = "runpy.run_module('{}', run_name='__main__')"
    name, *words = program.split()
    code = f"""
import atexit, runpy, sys
sys.argv = [{name!r}, *{words!r}, "--help"]
sys.path.insert(0, {str(ROOT)!r})
atexit.register(lambda: print(sorted({{"torch", "numpy"}} & {{*sys.modules}})))
{start.format(name)}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.stdout.startswith("usage: "), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_status_runs_without_torch(tmp_path):
    (tmp_path / "iter_0000500").mkdir()
    code = (
        "import sys; from megatron_hybrid.command_line import main; "
        f"main(['status', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
