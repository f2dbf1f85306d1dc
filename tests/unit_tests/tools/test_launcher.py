"""`launch`: the number of ranks after the loss of devices. Restarts: test_recovery.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from megatron_hybrid import launcher


@pytest.mark.parametrize(
    "flags",
    [
        ["--standalone", "--fallback-nproc-per-node", "2,0"],
        ["--standalone", "--fallback-nproc-per-node", "few"],
        ["--standalone", "--fallback-nproc-per-node", "1"],  # ranks without devices
    ],
)
def test_invalid_numbers_of_ranks_are_rejected(flags, monkeypatch):
    monkeypatch.setattr(launcher, "kind_of", lambda: "cpu")
    with pytest.raises(SystemExit) as ended:
        launcher.main([*flags, "train.py"])
    assert ended.value.code == 2


def _started(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program])


def test_a_device_that_does_not_respond_is_lost():
    process = _started("import time; time.sleep(100000)")
    assert not launcher._succeeds(process, time.monotonic())
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 1])
def test_a_device_whose_try_has_ended_is_judged_by_its_end_even_late(code):
    process = _started(f"raise SystemExit({code})")
    process.wait()
    assert launcher._succeeds(process, time.monotonic() - 1) == (code == 0)


def test_a_device_of_this_machine_computes():
    process = subprocess.Popen([*launcher.TRY_DEVICE, "cpu"])
    assert launcher._succeeds(process, time.monotonic() + 600)


@pytest.mark.parametrize(
    ("names", "num_ranks", "expected"),
    [
        ("0,1,2", 2, ("1,2", 2)),  # rank 0 would get the lost device again
        ("0,1,2,3", 4, ("1,2,3", 2)),
        ("1,2", 2, ("1,2", 2)),
        ("0", 1, ("0", 1)),  # too few for any number
    ],
)
def test_ranks_get_the_devices_that_are_left(names, num_ranks, expected, monkeypatch):
    is_lost = "import os, sys; sys.exit(os.environ['DEVICES_OF_A_TEST'] == '0')"
    monkeypatch.setattr(launcher, "TRY_DEVICE", [sys.executable, "-c", is_lost])
    monkeypatch.setenv("DEVICES_OF_A_TEST", names)
    agent = launcher._FallbackAgent.__new__(launcher._FallbackAgent)
    agent._numbers, agent._kind, agent._variable = (2, 1), "kind", "DEVICES_OF_A_TEST"
    spec = Namespace(local_world_size=num_ranks)
    agent._fall_back(spec)
    assert (os.environ["DEVICES_OF_A_TEST"], spec.local_world_size) == expected
