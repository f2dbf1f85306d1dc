from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetError
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.drivers import PinError
from megatron.core.host_memory import HostMemoryError
from megatron.core.options import ConfigError
from megatron.training.health.exits import ExitCode, ExitError, code_of, is_foreseen, process_status

FORESEEN = [
    (ConfigError("x"), ExitCode.BAD_CONFIGURATION),
    (HostMemoryError("x"), ExitCode.BAD_CONFIGURATION),
    (PinError("x"), ExitCode.BAD_CONFIGURATION),
    (CheckpointError("x"), ExitCode.BAD_FILES),
    (CheckpointDamagedError("x"), ExitCode.BAD_FILES),
    (IndexedDatasetError("x"), ExitCode.BAD_FILES),
    (ExitError(ExitCode.NOT_SAVED, "x"), ExitCode.NOT_SAVED),
]


@pytest.mark.parametrize(("error", "code"), FORESEEN)
def test_each_foreseen_error_has_its_code(error, code):
    assert code_of(error) is code
    assert is_foreseen(error)


@pytest.mark.parametrize(
    "error", [ValueError("x"), RuntimeError("x"), MemoryError(), KeyboardInterrupt(), OSError("x")]
)
def test_any_other_error_is_a_failure_with_a_traceback(error):
    assert code_of(error) is ExitCode.FAILED
    assert not is_foreseen(error)


def test_no_two_ways_to_end_share_a_code_and_none_is_taken_by_the_shell():
    values = [member.value for member in ExitCode.__members__.values()]
    assert len(set(values)) == len(values)
    assert max(values) < 126, "126 and 127 are the shell's, 128 + n a signal's"


@pytest.mark.parametrize("code", list(ExitCode))
def test_only_a_preempted_rank_hides_its_code_from_the_agent_of_torchrun(code):
    assert process_status(code, is_elastic=False) == code
    expected = 0 if code in (ExitCode.PREEMPTED, ExitCode.PREEMPTED_UNSAVED) else code
    assert process_status(code, is_elastic=True) == expected


LEAVING = """
import sys, threading
from megatron.training.health.exits import exit_process
print("out"); print("err", file=sys.stderr)
if sys.argv[1] == "closed":
    sys.stdout.close()
thread = threading.Thread(target=lambda: exit_process(7))
if sys.argv[1] == "stuck":
    class Stuck:
        def flush(self):
            threading.Event().wait()
    sys.stdout.flush()
    sys.stdout = Stuck()
    sys.stderr.flush()
    exit_process(7, patience_seconds=0.2)
if sys.argv[1] == "thread":
    thread.start(); threading.Event().wait()
exit_process(7)
"""


@pytest.mark.parametrize("how", ["thread", "closed", "stuck"])
def test_a_process_leaves_at_once_with_its_status_and_all_that_it_has_said(how):
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, how], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
