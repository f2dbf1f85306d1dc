"""`launch`: the number of ranks after the loss of devices. Restarts: test_recovery.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megatron_hybrid import launcher, try_device


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


def test_a_device_of_this_machine_computes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["try_device", "cpu"])
    assert try_device.main() == 0
