"""The simulated accelerator in the place of a GPU. The only file that imports from tests/, for `--simulate` alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("OMP_NUM_THREADS", "1")

import simproto  # noqa: F401
import simdev as _sim
import torch

from megatron.core.device import Device
from tools.gpu_check.accelerator import Accelerator, Peak

_DELAY = 300  # microseconds


class SimulatedAccelerator(Accelerator):
    kind = "sim"
    shared_backends = ("simccl",)

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.device = Device(self.kind)
        self.device.make_current()
        _sim.set_poison(2)
        _sim.set_delay(0, 0)

    def pause(self, seconds: float) -> None:
        _sim.launch(lambda: time.sleep(seconds))

    def num_segments(self) -> int:
        return int(_sim.stats()["fresh_blocks"])

    def peak(self) -> Peak:
        peak = int(_sim.stats()["peak"])
        return Peak(peak, peak)

    def reset_peak(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return 1 << 30

    @contextmanager
    def counting_syncs(self) -> Iterator[list[str]]:
        places: list[str] = []
        before = _sim.stats()["syncs"]
        yield places
        places += ["?"] * (_sim.stats()["syncs"] - before)

    @contextmanager
    def blocking_launches(self) -> Iterator[None]:
        _sim.set_depth(1)
        yield

    @contextmanager
    def pauses(self, seed: int) -> Iterator[None]:
        _sim.set_delay(_DELAY, seed)
        yield
        _sim.set_delay(0, 0)
