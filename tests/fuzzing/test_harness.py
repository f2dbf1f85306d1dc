"""The harness reports all that a reader does which trusts its files."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing.harness import Outcome, Place, Worker

SECONDS = 1.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("folder"), "tests.fuzzing.canaries", seconds=SECONDS)
    yield worker
    worker.close()


class Call:
    """Unpickling it calls something."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def read(worker: Worker, target: str, content: bytes) -> Outcome:
    """Has one of the readers that trust their files read this one."""
    intact = worker.read(target, worker.make(target))
    assert intact.problems() == [], "it is the content that is at fault"
    return worker.read(target, {"file": content})


def test_code_that_a_pickle_runs_is_reported(worker: Worker, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    outcome = read(worker, "unpickle", pickle.dumps(Call(os.mkdir, str(canary))))
    assert canary.exists(), "it has been run"
    shown = "; ".join(outcome.problems())
    assert "pickle.find_class('posix', 'mkdir')" in shown
    assert f"os.mkdir('{canary}'" in shown


CALLS = {
    "compile(": Call(eval, "1 + 1"),
    "import('antigravity_that_is_not_there'": Call(exec, "import antigravity_that_is_not_there"),
    "os.system(": Call(os.system, "true"),
    "subprocess.Popen(": Call(subprocess.call, ["true"]),
    "socket.__new__(": Call(socket.socket),
    "open('/etc/passwd'": Call(open, "/etc/passwd"),
}


@pytest.mark.parametrize("event", CALLS)
def test_commands_connections_and_strange_files_are_reported(worker: Worker, event: str) -> None:
    found = read(worker, "unpickle", pickle.dumps(CALLS[event])).problems()
    assert any(event in each for each in found), found


def test_a_file_that_is_written_outside_of_the_directory_is_reported(worker: Worker) -> None:
    found = read(worker, "write", b"").problems()
    assert any("elsewhere" in each and "open(" in each for each in found), found


def test_examples_that_take_too_much_memory_are_reported(worker: Worker) -> None:
    outcome = read(worker, "allocate", str(1 << 40).encode())
    assert outcome.error == "MemoryError"
    assert outcome.problems()
    # Within the address space, but in use.
    assert read(worker, "fill", str(200 << 20).encode()).nbytes > 190 << 20


def test_an_endless_loop_is_reported(worker: Worker) -> None:
    outcome = read(worker, "loop", b"")
    assert outcome.error == "TooLateError"
    assert outcome.seconds >= SECONDS
    assert any("TooLateError" in each for each in outcome.problems())


def test_an_unexpected_exit_is_reported_and_the_next_example_has_a_new_process(
    worker: Worker,
) -> None:
    for ending in (signal.SIGSEGV, signal.SIGKILL):
        found = read(worker, "die", str(int(ending)).encode()).problems()
        assert any(ending.name in each for each in found), found
    assert read(worker, "unpickle", pickle.dumps(5)).value == {"value": "int"}


def test_a_reader_that_does_not_come_back_is_ended_and_reported(tmp_path: Path) -> None:
    with contextlib.closing(Worker(tmp_path, "tests.fuzzing.canaries", seconds=SECONDS)) as worker:
        worker.read("block", worker.make("block"))
        worker.grace_seconds = 0.0
        found = worker.read("block", {"file": b""}).problems()
    assert any("did not come back" in each for each in found), found


def test_an_error_raised_from_an_unexpected_one_is_reported(worker: Worker) -> None:
    outcome = read(worker, "wrap", b"")
    assert outcome.is_expected
    assert any("did not foresee KeyError" in each for each in outcome.problems())


@pytest.mark.parametrize("place", Place)
def test_special_files_instead_of_a_file_are_made(worker: Worker, place: Place) -> None:
    outcome = worker.read("look", {"file": place})
    assert outcome.value == {"value": place.value}
    assert outcome.problems() == []
