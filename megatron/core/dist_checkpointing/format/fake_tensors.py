"""Tensors of a size without memory; they show what `torch.save` writes around a tensor's data.

[Note: a guard that dies with its thread] Where torch is built for GPUs and finds none, the first
FakeTensorMode of the process replaces torch's device guard with a fake one, which serves all
threads. In torch 2.11 it belongs to the thread that entered the mode: when that thread ends, torch
is left with a pointer to freed memory, and the next backward, or the next FakeTensorMode, is a
segmentation fault. Saves run on lanes, whose threads end. So a thread that never ends enters the
mode before any other does. torch 2.12 keeps the guard as long as the process.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensor_mode() -> FakeTensorMode:
    """A FakeTensorMode that any thread may enter. See [Note: a guard that dies with its thread]."""
    if torch.__version__ < "2.12":  # versions are compared, not strings
        _enter_on_a_thread_that_stays()
    return FakeTensorMode()


@cache
def _enter_on_a_thread_that_stays() -> None:
    # The main thread would do as well, but nobody can make it enter from here.
    has_entered = threading.Event()
    threading.Thread(
        target=_enter_and_stay, args=(has_entered,), name="fake tensors", daemon=True
    ).start()
    has_entered.wait()


def _enter_and_stay(has_entered: threading.Event) -> None:
    # The caller enters the mode next and sees an error there, so none is reported from here.
    try:
        with FakeTensorMode():
            pass
    finally:
        has_entered.set()

    threading.Event().wait()
