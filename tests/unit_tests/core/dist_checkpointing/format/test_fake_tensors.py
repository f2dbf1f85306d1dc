"""Fake tensors on threads that end. See [Note: a guard that dies with its thread]."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.format.blob import fake_tensor_mode

ROOT = Path(__file__).resolve().parents[5]

# A separate program, since the failure is a segmentation fault.
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
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
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
