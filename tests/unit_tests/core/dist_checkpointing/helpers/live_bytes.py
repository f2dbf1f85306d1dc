"""Peaks of the memory in use: of tensors, and of the process."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """The peak of the bytes in tensors that this thread has created and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in self._plain((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for tensor in self._plain(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return result

    def _plain(self, values: Any) -> list[torch.Tensor]:
        return [
            value
            for value in tree_leaves(values)
            if type(value) is torch.Tensor and not value.is_meta
        ]


def peak_growth(work: Callable[[], object]) -> int:
    """The growth of the process's resident memory up to its peak during `work`, in bytes."""
    gc.collect()
    # Freed memory that the allocator keeps would hide new allocations.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"{name}:\s+(\d+) kB", status)
    return 1024 * int(kib)
