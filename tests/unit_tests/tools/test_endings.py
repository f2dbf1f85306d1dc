"""How programs end: by a signal, with a closed pipe, on a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_hybrid import endings
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

ROOT = Path(__file__).parents[3]
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'

# Runs a program as `python PROGRAM ...` or `python -m megatron_hybrid COMMAND ...` does. Sends a
# signal to this process when it writes its third sequence.
STOPPED = """
import os, runpy, signal, sys
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron_hybrid.command_line import main

number, program, *arguments = sys.argv[1:]
for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(each, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if number.startswith("ignored "):
    signal.signal(int(number.split()[1]), signal.SIG_IGN)
added = IndexedDatasetBuilder._add
calls = []

def add(self, *given):
    added(self, *given)
    calls.append(1)
    if len(calls) == 3:
        stop = os.killpg if number.startswith("group ") else os.kill
        stop(os.getpid(), int(number.split()[-1]))

IndexedDatasetBuilder._add = add
if program.endswith(".py"):
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
else:
    sys.exit(main([program, *arguments]))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer, and lines of each kind."""
    folder = tmp_path_factory.mktemp("inputs")
    make_tokenizer(folder)
    (folder / "text.jsonl").write_text('{"text": "some words"}\n' * 9)
    (folder / "chats.jsonl").write_text(CHAT * 9)
    return folder


def run_until_stopped(
    number: str, program: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STOPPED, number, program, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("number", "program"),
    [
        (signal.SIGTERM, "preprocess"),
        (signal.SIGHUP, "preprocess"),
        (signal.SIGINT, "preprocess-multimodal"),
    ],
)
def test_a_stopped_program_removes_its_files(tmp_path, inputs, number, program):
    is_text = "multimodal" not in program
    flags = ["--input", inputs / ("text.jsonl" if is_text else "chats.jsonl")]
    flags += ["--tokenizer-type", "ByteTokenizer"] if is_text else ["--tokenizer-model", inputs]
    done = run_until_stopped(str(int(number)), program, *flags, "--output-prefix", tmp_path / "out")
    assert done.returncode == -number, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_the_whole_group_ends_workers_and_leaves_no_files(tmp_path):
    """A worker may be in the middle of a result, larger than a pipe takes at once."""
    (tmp_path / "in.jsonl").write_text('{"text": "%s"}\n' % ("words " * 50_000) * 60)
    arguments = ["--input", tmp_path / "in.jsonl", "--tokenizer-type", "ByteTokenizer"]
    arguments += ["--output-prefix", tmp_path / "out", "--workers", 2]
    number = f"group {int(signal.SIGTERM)}"
    done = run_until_stopped(number, "preprocess", *arguments)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


KILLED = """
import os, signal
from megatron_hybrid.endings import worker_pool

if __name__ == "__main__":
    with worker_pool(2, print, "started") as pool:
        pool.submit(abs, 1).result()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    # It returns when the last process has closed the output.
    done = subprocess.run(
        [sys.executable, tmp_path / "killed.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == -signal.SIGKILL
    assert "Traceback" not in done.stderr


def test_merging_that_is_stopped_leaves_its_inputs_alone(tmp_path):
    (tmp_path / "parts").mkdir()
    with IndexedDatasetBuilder(tmp_path / "parts" / "a", np.int32) as builder:
        builder.add_document([1, 2, 3])
    code = STOPPED.replace("._add", ".add_index").replace("== 3", "== 1")
    command = [sys.executable, "-c", code, str(int(signal.SIGTERM)), "tools/merge_datasets.py"]
    command += ["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["a.bin", "a.idx", "parts"]


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored(tmp_path, inputs):
    arguments = ["--input", inputs / "text.jsonl", "--tokenizer-type", "ByteTokenizer"]
    arguments += ["--output-prefix", tmp_path / "out"]
    number = f"ignored {int(signal.SIGHUP)}"
    done = run_until_stopped(number, "preprocess", *arguments)
    assert done.returncode == 0, done.stderr
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".bin", ".idx"]


def run_with_output(
    output: int | IO[bytes], *arguments: object, buffered: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("command", ["timeline --help", "preprocess", "status"])
def test_a_program_whose_reader_has_closed_the_pipe_ends_quietly(tmp_path, inputs, command):
    """Unbuffered, a line of the program's output meets the closed pipe, where the program reports
    other errors.
    """
    arguments: list[object] = ["-m", "megatron_hybrid", *command.split()]
    if command == "preprocess":
        arguments += ["--input", inputs / "text.jsonl", "--output-prefix", tmp_path / "out"]
        arguments += ["--tokenizer-type", "ByteTokenizer"]
    elif command == "status":
        (tmp_path / "iter_0000500").mkdir()
        arguments += [tmp_path]
    read, write = os.pipe()
    os.close(read)
    done = run_with_output(write, *arguments, buffered=command == "timeline --help")
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_output_to_a_full_disk_is_one_line():
    with Path("/dev/full").open("wb") as full:
        done = run_with_output(full, "-m", "megatron_hybrid", "timeline", "--help")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "stdout: " in done.stderr
    assert "No space left" in done.stderr


def test_another_broken_pipe_than_that_of_the_output_is_raised():
    def main() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        endings.run(main)


def test_signals_are_handled_as_before_when_a_program_has_ended():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert endings.run(lambda: 5) == 5
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
