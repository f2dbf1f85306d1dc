"""Fake tensors on threads that end. See [Note: a guard that dies with its thread]."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from megatron.core.dist_checkpointing.format import blob
from megatron.core.dist_checkpointing.format.blob import fake_tensor_mode

ROOT = Path(__file__).resolve().parents[5]

# A program of its own: where this goes wrong, it ends with a segmentation fault.
FIRST_BACKWARD_AFTER_A_THREAD = """
import threading

import torch

from megatron.core.dist_checkpointing.format.blob import blob_frame

thread = threading.Thread(target=blob_frame, args=(torch.float32, (3, 4)))
thread.start()
thread.join()

weight = torch.ones(3, requires_grad=True)
weight.sum().backward()
blob_frame(torch.float32, (5,))
"""


def test_the_first_backward_may_come_after_a_thread_that_saved_has_ended():
    command = [sys.executable, "-c", FIRST_BACKWARD_AFTER_A_THREAD]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_fake_tensor_has_a_size_and_no_memory_on_any_thread():
    made = []

    def make() -> None:
        with fake_tensor_mode():
            made.append(torch.empty(1 << 40, dtype=torch.float32, device="cpu"))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made[0].shape == (1 << 40,)


def threads_that_enter(monkeypatch, version: str) -> list[threading.Thread]:
    """The threads that enter a mode, in order, when this one wants to with that version of
    torch.
    """
    threads = []

    class Noting(FakeTensorMode):
        def __enter__(self):
            threads.append(threading.current_thread())
            return super().__enter__()

    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(blob, "FakeTensorMode", Noting)
    blob._enter_on_a_thread_that_stays.cache_clear()
    with fake_tensor_mode():
        pass
    return threads


def test_with_torch_2_11_a_thread_that_stays_enters_the_mode_before_any_other(monkeypatch):
    first, second = threads_that_enter(monkeypatch, "2.11.0+cu130")
    assert second is threading.current_thread()
    assert first is not second
    assert first.is_alive()


def test_from_torch_2_12_on_no_thread_is_kept_for_it(monkeypatch):
    assert threads_that_enter(monkeypatch, "2.12.0") == [threading.current_thread()]
